/* Shared declarations of the native CPU kernels: the C interface that __init__.py loads with ctypes, the thread pool, and
 * the functions that every instruction set provides. Small integers stand for types and layouts, as ctypes passes them. */
#pragma once

#include "convert.h"
#include "formats/planes.h"

#if defined(__GNUC__)
#define MOE_EXPORT __attribute__((visibility("default")))
#else
#define MOE_EXPORT
#endif

/* Plain loops that the compiler vectorises, once for each of these levels; the loader chooses. Not by processor names: those
 * only match Intel's. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MOE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define MOE_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define MOE_CLONES
#endif

/* The loops over a tile are unrolled before anything else: only then do its sums stay in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Raised with every incompatible change of this interface; __init__.py accepts no other number. */
#define MOE_ABI_VERSION 31

enum { STATUS_OK = 0, STATUS_NO_MEMORY = 1, STATUS_BAD_ROW = 2, STATUS_DAMAGED = 3 };

/* How norm.c normalises: rounded before the weight, rounded after it, and rounded after a weight to which one is added. */
enum { NORM_ROUNDED = 0, NORM_WIDE = 1, NORM_PLUS_ONE = 2 };

/* ---- the thread pool ---- */

typedef void (*PoolFn)(void *context);
typedef void (*PartFn)(void *context, int thread, int64_t first, int64_t end);

/* Runs fn(context) on the calling thread and on workers that come in time, and returns when all have left it. fn hands out
 * its own work and must also be right if only the caller runs it. One call at a time; a second caller waits. With `share` it
 * runs on OpenMP's threads instead, if moe_set_parallel has named a function that starts them. The pool's lock is held from
 * pool_begin to pool_end; buffers that all calls share may be touched between them. */
void pool_begin(void);
void pool_run(PoolFn fn, void *context, int share);
void pool_end(void);

/* pool_run of fn for `count` items, `at_once` at a time; `thread` numbers the threads that take part. */
void pool_each(PartFn fn, void *context, int64_t count, int64_t at_once, int share);

/* Memory until pool_end, 64-byte aligned and reused by the next call; NULL if there is none. */
void *pool_scratch(int64_t bytes);

/* Threads that work on a call, the caller included. */
int pool_threads(void);

/* One turn of a waiting loop; `turn` counts them, and long waits yield the processor. */
void pool_relax(int turn);

/* ---- matrices ---- */

/* Rows of keys and values in int8, 32 values after their scale in fp16: blocks of Q8_0. */
enum { DTYPE_ROUNDED = 3, ROUNDED_VALUES = 32, ROUNDED_BYTES = 34 };

/* How weights are multiplied, and so how the rows of x are packed:
 *   KIND_F32      fp32 weights, x as fp32 in order
 *   KIND_F16      fp16 weights widened to fp32, x as fp32 in order
 *   KIND_BF16     bf16 weights widened to fp32, x as fp32, each group split into even and odd elements
 *   KIND_BF16_DOT bf16 weights in the instruction for pairs of bf16, x as bf16 in order
 *   KIND_BF16_TILES bf16 weights in matrix units, x as pairs of bf16, transposed within a panel
 * Quantised weights; rows of x are packed in blocks of QUANT_BLOCK, except for the first kind. Formats without a kind are
 * written as fp32, a few rows at a time (KIND_F32):
 *   KIND_QUANT_BLOCKS  codes in blocks decoded to fp32 in registers, x as fp32, permuted for vectors of eight: see blocks.h
 *   KIND_QUANT_F32  codes decoded to fp32 in registers, x as fp32, transposed: see pack_quantized
 *   KIND_QUANT_DOT4, KIND_QUANT_DOT8  codes of 4 and 8 bits decoded to pairs of bf16, x as bf16, transposed
 *   KIND_QUANT_INT4, KIND_QUANT_INT8  codes of 4 and 8 bits as int8, x rounded to int8, see int8.h
 *   KIND_INT8_BLOCKS  codes in blocks as int8, x rounded to int8, see int8_blocks.h */
enum {
    KIND_F32 = 0,
    KIND_F16 = 1,
    KIND_BF16 = 2,
    KIND_BF16_DOT = 3,
    NUM_STRIP_KINDS,
    KIND_BF16_TILES = NUM_STRIP_KINDS,
    NUM_KINDS,
    KIND_QUANT_BLOCKS = NUM_KINDS,
    KIND_QUANT_F32,
    KIND_QUANT_DOT4,
    KIND_QUANT_DOT8,
    KIND_QUANT_INT4,
    KIND_QUANT_INT8,
    KIND_INT8_BLOCKS
};
enum { QUANT_BLOCK = 128 };
/* Rows of x in a panel of KIND_BF16_TILES, and rows of weights in a tile. */
enum { PANEL_ROWS_OF_TILES = 16 };
/* Columns of x rounded to int8 that share a scale; bytes of a packed block: codes, scales, and sums of codes. */
enum { INT8_GROUP = 32, INT8_BLOCK_BYTES = QUANT_BLOCK + 8 * QUANT_BLOCK / INT8_GROUP };
/* KIND_INT8_BLOCKS: columns of a packed step, and its bytes. */
enum { INT8_BLOCK_STEP = 256, INT8_STEP_BYTES = INT8_BLOCK_STEP + 16 * INT8_BLOCK_STEP / INT8_GROUP };

typedef struct Quantized Quantized;

/* A row-major matrix whose rows lie `stride` bytes apart. A quantised one begins at row `first_row` of what `quantized`
 * describes, and `data` are its codes. */
typedef struct {
    const char *data;
    int64_t stride;
    const Quantized *quantized; /* or NULL */
    int64_t first_row;
} Matrix;

/* Rows to be multiplied by whole lines of a matrix, in panels of max_panel_rows. A step is four bytes of a row: a pair of
 * bf16 or one fp32. Distances in bytes: between rows of a panel, steps of a row, and panels. */
typedef struct {
    const char *data;
    int64_t row, step, panel;
} Rows;

/* Values `stride` bytes apart; data may be NULL. */
typedef struct {
    const char *data;
    int64_t stride;
} Bias;

/* One expert as expert_weights.py writes it; gate.data is NULL when the expert has no gate. */
typedef struct {
    Matrix gate, up, down;
    Bias gate_bias, up_bias, down_bias;
} Expert;

/* Queries of the heads that share a key head, and what they attend to. Query q sees the keys up to place + q, at most the
 * last `window` of them. Distances in bytes. */
typedef struct {
    const char *query, *key, *value; /* [heads, queries, key_dim], [length, key_dim], [length, value_dim] */
    char *out;                       /* [heads, queries, value_dim] */
    const char *sinks;               /* of each head, or NULL */
    int64_t query_head, query_row, key_row, value_row, out_head, out_row;
    int64_t heads, queries, length, key_dim, value_dim, place, window;
    int dtype, sinks_dtype;
    float scale;
} AttentionBlock;

/* ---- instruction sets ---- */

/* Rows are multiplied in panels of at most max_panel_rows rows. A panel is packed as [k / k_step][row][k_step], for matrix
 * units as [k / k_step][pair][row][2], padded with zeros, so that it is read strictly forwards.
 *
 * Every sum over k has one accumulator vector that runs from the first group to the last, whatever the tile around it: the
 * result for one row and one weight row is independent of all other rows. */
typedef struct {
    const char *name;
    int max_panel_rows, tile_rows; /* of x and of a matrix: the sums taken at once */
    int k_step;
    int has_bf16_dot, has_tiles;
    /* Packs `count` elements, which begin at element first_k (a multiple of k_step), of one row of k elements. */
    void (*pack)(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows,
                 int64_t k);
    /* out[row * ldo + n] = dot(weight row n, packed row); `next` is the matrix that will be read after this one (hint). */
    void (*multiply)(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                     float *out, int64_t ldo, Matrix next);
    /* The same for plain weights that were just written. */
    void (*multiply_cached)(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                            float *out, int64_t ldo);
    /* The same for one or two rows in the lossless code and one panel of KIND_BF16_DOT; NULL where there is none. */
    PlanesDot dot_planes;
    /* out[row * ldo + n] = dot(x row, column n of a matrix [k, num_columns]). Rows of x are bf16 for KIND_BF16_DOT, with a zero
     * after an odd k, else fp32; ldo is a multiple of k_step, `sums` has num_rows * ldo elements. */
    void (*multiply_columns)(int kind, Matrix weight, int64_t k, int64_t num_columns, Rows x, int64_t num_rows, float *sums,
                             float *out, int64_t ldo);
    /* out = softmax(scale * query . keys, sink) . values; attention_scratch says how `scratch` is divided. */
    void (*attend)(const AttentionBlock *block, char *scratch);
    /* values[i] = act(values[i]) * factor[i]; factor may be NULL. */
    void (*activate)(int activation, float *values, const float *factor, int64_t count);
    /* Adds a bias from its value `first` on. */
    void (*add_bias)(float *values, Bias bias, int64_t first, int dtype, int64_t count);
    void (*store)(char *dst, int dtype, const float *src, int64_t count);
    /* Reads every byte; the result only keeps the reads alive. */
    float (*read_all)(const char *data, int64_t bytes);
    /* How a quantised matrix is multiplied by rows of a data type. */
    int (*quantized_kind)(const Quantized *format, int x_dtype);
    /* The values of the first `num_rows` rows of a quantised matrix. */
    void (*dequantize)(Matrix weight, int64_t num_rows, int64_t k, char *out, int64_t out_stride, int dtype);
    /* For a matrix of DTYPE_ROUNDED and a few rows of x without gaps: dot products out[row, n]; or sums out[row] of its
     * rows, weighted by x[row, n]. */
    void (*dot_rounded)(Matrix weight, int64_t num_weight_rows, int64_t k, const float *x, int64_t num_rows, float *out);
    void (*mix_rounded)(Matrix weight, int64_t num_weight_rows, int64_t num_columns, const float *x, int64_t num_rows, float *out);
} Isa;

/* The instruction set that calls use. */
const Isa *current_isa(void);

/* Those that were compiled, see MOE_HAVE_.... isa_amx returns NULL if the system has no tiles for this process. */
extern const Isa isa_portable, isa_avx2, isa_avx512, isa_avx512bf16;
const Isa *isa_amx(void);

/* ---- functions that several files call ---- */

MOE_EXPORT int moe_quantized_linear(const char *x, int64_t x_stride, int64_t num_rows, const Matrix *weight, const char *bias,
                                    int bias_dtype, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                                    int decodes, int share_threads);
MOE_EXPORT int moe_linear(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, int64_t weight_stride,
                          const char *bias, char *out, int64_t out_stride, int64_t dim_in, int64_t dim_out, int x_dtype,
                          int weight_dtype, int share_threads);
MOE_EXPORT int moe_combine_slots(const char *rows, const char *weights, char *out, int64_t num_tokens, int64_t choices,
                                 int64_t dim, int dtype, int weights_dtype, int share_threads);
MOE_EXPORT int moe_single_query_attention(const char *query, int64_t query_stride, const char *key, int64_t key_outer,
                                          int64_t key_inner, int64_t key_row, const char *value, int64_t value_outer,
                                          int64_t value_inner, int64_t value_row, const float *mask, const char *sinks,
                                          int sinks_dtype, char *out, int64_t outer, int64_t inner, int64_t rows, int64_t length,
                                          int64_t key_dim, int64_t value_dim, float scale, int dtype, int cached_dtype,
                                          int share_threads);

/* Rounds a row to DTYPE_ROUNDED, on the calling thread. A NaN spoils its block. */
void moe_round_row(int dtype, const char *x, int64_t count, char *out);

/* Normalises rows of `count` elements, on the calling thread; `out` has no gaps; x, weight and out have one data type. */
void moe_norm_rows(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, char *out, int64_t count,
                   float eps, int dtype, int form);

/* gate[i] becomes the hidden value of gate[i] and up[i], or without a gate that of up[i]; `formula` as in moe_gate. */
void moe_hidden_values(int function, const float *formula, int has_gate, float *gate, const float *up, int64_t count);

/* Turns scores into weights in place: they sum to one, with that of the sink, a further score, which may be NULL. */
void moe_softmax(float *scores, int64_t count, const float *sink);

/* Puts an expert's bytes in order after they were read: StorageOrder of kernels/quantized, and two places in a slot. */
typedef struct {
    int64_t kind, from, to, rows, cols, bits, adds_one;
} OrderStep;

/* Bytes of scratch memory that moe_put_in_order needs. */
int64_t order_scratch_bytes(const OrderStep *steps, int64_t count);
MOE_EXPORT void moe_put_in_order(const OrderStep *steps, int64_t count, char *slot, char *scratch);

/* ---- small helpers ---- */

/* Keys multiplied by a block of queries at once, and how `attend` divides its scratch memory: places in bytes, steps of
 * queries in a row, and columns of values, filled up to whole vectors. */
enum { KEYS_AT_ONCE = 128 };
typedef struct {
    int64_t query_steps, query_row, columns;
    int64_t queries, keys, values, scores, sums, most, bytes;
} AttentionScratch;

static inline AttentionScratch attention_scratch(const AttentionBlock *block, int pairs, const Isa *isa) {
    const int64_t rows = block->heads * block->queries, together = pairs ? 2 : 1, line = 64;
    AttentionScratch at = {.query_steps = parts_of(block->key_dim, together), .columns = round_up(block->value_dim, isa->k_step)};
    at.query_row = 4 * (at.query_steps + 1);
    at.keys = round_up(rows * at.query_row, line);
    at.values = at.keys + 4 * at.query_steps * KEYS_AT_ONCE;
    at.scores = at.values + 4 * KEYS_AT_ONCE / together * at.columns;
    at.sums = at.scores + rows * 4 * KEYS_AT_ONCE;
    at.most = at.sums + 4 * rows * at.columns;
    at.bytes = round_up(at.most + 12 * rows, line);
    return at;
}

/* How rows of a data type are multiplied by plain weights whose outputs are neighbours in memory. */
static inline int column_kind(const Isa *isa, int x_dtype, int weight_dtype) {
    if (weight_dtype == DTYPE_F32) return KIND_F32;
    if (weight_dtype == DTYPE_F16) return KIND_F16;
    return isa->has_bf16_dot && x_dtype == DTYPE_BF16 ? KIND_BF16_DOT : KIND_BF16;
}

/* How they are multiplied by other plain weights. */
static inline int weight_kind(const Isa *isa, int x_dtype, int weight_dtype) {
    const int kind = column_kind(isa, x_dtype, weight_dtype);
    return kind == KIND_BF16_DOT && isa->has_tiles ? KIND_BF16_TILES : kind;
}

static inline int panel_rows_of(const Isa *isa, int kind) {
    return kind == KIND_BF16_TILES ? PANEL_ROWS_OF_TILES : isa->max_panel_rows;
}

/* Panels of nearly equal height that an expert's rows are cut into. Four panels share the fetching of a tile of four rows
 * evenly, three do not (measured: 4 % at 16 rows); matrix units take panels two by two. */
static inline int64_t num_panels(int64_t num_rows, int max_panel_rows) {
    const int64_t panels = parts_of(num_rows, max_panel_rows);
    return panels == 3 && num_rows > 14 && max_panel_rows < PANEL_ROWS_OF_TILES ? 4 : panels;
}

static inline int64_t panel_start(int64_t panel, int64_t panels, int64_t num_rows) {
    const int64_t small = num_rows / panels, larger = num_rows % panels;
    return panel * small + (panel < larger ? panel : larger);
}

static inline int64_t packed_row_bytes(int kind, int64_t k, int k_step) {
    if (kind == KIND_INT8_BLOCKS) return parts_of(k, INT8_BLOCK_STEP) * INT8_STEP_BYTES;
    const int64_t padded = round_up(k, kind > KIND_QUANT_BLOCKS ? QUANT_BLOCK : k_step);
    if (kind >= KIND_QUANT_INT4) return padded / QUANT_BLOCK * INT8_BLOCK_BYTES;
    return padded * (kind == KIND_BF16_DOT || kind == KIND_BF16_TILES || kind >= KIND_QUANT_DOT4 ? 2 : 4);
}

/* Packs `count` elements of every row from element first_k on, in panels; row r is row index[r] of x, without an index row
 * r. */
static inline void pack_panels(const Isa *isa, int kind, const char *x, int64_t x_stride, int dtype, const int64_t *index,
                               int64_t num_rows, int64_t first_k, int64_t count, int64_t k, char *packed) {
    const int64_t panels = num_panels(num_rows, panel_rows_of(isa, kind)), row_bytes = packed_row_bytes(kind, k, isa->k_step);
    for (int64_t p = 0; p < panels; p++) {
        const int64_t start = panel_start(p, panels, num_rows), end = panel_start(p + 1, panels, num_rows);
        for (int64_t r = start; r < end; r++)
            isa->pack(kind, x + (index ? index[r] : r) * x_stride, dtype, count, packed + start * row_bytes, first_k,
                      (int)(r - start), (int)(end - start), k);
    }
}
