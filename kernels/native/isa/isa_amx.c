/* x86-64 with matrix units for bf16 (AMX: Sapphire Rapids and newer). They multiply bf16 rows by bf16 weights; all else is
 * from isa_avx512bf16.c.
 *
 * A tile of weights is 16 rows of K_STEP elements as they lie in memory: weights are not reordered. A tile of x is a step of
 * a panel: its rows are pairs of elements, its columns rows of x. A sum runs over k in one order whatever the tiles around
 * it: it has its own place in a tile of sums, and each step adds a sum of its even and one of its odd elements. */
#include <immintrin.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels.h"

enum { ROWS = PANEL_ROWS_OF_TILES, STRIP_ROWS = 2 * ROWS, K_STEP = 32, STEP_BYTES = 2 * K_STEP, CACHE_LINE = 64 };

/* Two tiles of weights by two of x, and their sums; the compiler takes tile numbers only as constants. */
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define WEIGHTS_0 4
#define WEIGHTS_1 5
#define X_0 6
#define X_1 7

/* The intrinsics do not tell the compiler what they read. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

/* ---- the shapes of tiles ---- */

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Rows of the two tiles of weights and of x; 0 for a tile that is not there. */
typedef struct {
    int weights[2], x[2];
} Shape;

static void set_tile(TileConfig *config, int tile, int rows, int columns) {
    config->rows[tile] = (uint8_t)rows;
    config->row_bytes[tile] = (uint16_t)(columns * 4);
}

static void set_shape(Shape shape) {
    TileConfig config __attribute__((aligned(64)));
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 2; j++)
            if (shape.weights[i] && shape.x[j]) set_tile(&config, SUMS_00 + 2 * i + j, shape.weights[i], shape.x[j]);
        if (shape.weights[i]) set_tile(&config, WEIGHTS_0 + i, shape.weights[i], K_STEP / 2);
        if (shape.x[i]) set_tile(&config, X_0 + i, K_STEP / 2, shape.x[i]);
    }
    WRITTEN();
    _tile_loadconfig(&config);
}

/* ---- what is read ahead ---- */

/* Places in the rows that are read next. Weights used once or twice are fetched as fast as memory gives them: from one place
 * on the processor goes on by itself, and fetching every line would hold up the tiles' own loads (measured on Granite
 * Rapids: a tenth slower at 32 rows). Others are fetched line by line while these are used again. */
typedef struct {
    const char *place, *row_end;
    int64_t row_bytes, stride, rows_left;
    int step, places; /* bytes from one place to the next, and places of a step over k */
} Ahead;

enum { USES_OF_FEW = 2, AHEAD_STEP_OF_FEW = 512 };

static Ahead ahead_of(Matrix weight, int64_t first, int64_t num_rows, Matrix next, int64_t row_bytes, int64_t uses) {
    const Matrix *from = first < num_rows ? &weight : &next;
    Ahead ahead = {.row_bytes = row_bytes, .stride = from->stride, .step = uses > USES_OF_FEW ? CACHE_LINE : AHEAD_STEP_OF_FEW};
    ahead.places = (int)((STRIP_ROWS * STEP_BYTES / ahead.step + uses - 1) / uses);
    if (from->data) {
        ahead.place = from->data + (first < num_rows ? first * from->stride : 0);
        ahead.row_end = ahead.place + row_bytes;
        ahead.rows_left = first < num_rows ? min64(STRIP_ROWS, num_rows - first) : STRIP_ROWS;
    }
    return ahead;
}

INLINE void fetch(Ahead *ahead) {
    for (int places = ahead->places; places > 0 && ahead->rows_left; places--) {
        __builtin_prefetch(ahead->place, 0, 2);
        ahead->place += ahead->step;
        if (ahead->place < ahead->row_end) continue;
        ahead->place = ahead->row_end - ahead->row_bytes + ahead->stride;
        ahead->row_end += ahead->stride;
        ahead->rows_left--;
    }
}

/* ---- products ---- */

/* Weights [strip of rows, steps] and two panels of x; the distance to the next step of a panel is that of its rows. */
typedef struct {
    const char *weights[2], *x[2];
    int64_t weight_stride, x_row[2];
} Operands;

INLINE void add_step(int num_weights, int num_x, const Operands *at) {
    _tile_loadd(X_0, at->x[0], at->x_row[0]);
    if (num_x > 1) _tile_loadd(X_1, at->x[1], at->x_row[1]);
    _tile_loadd(WEIGHTS_0, at->weights[0], at->weight_stride);
    _tile_dpbf16ps(SUMS_00, WEIGHTS_0, X_0);
    if (num_x > 1) _tile_dpbf16ps(SUMS_01, WEIGHTS_0, X_1);
    if (num_weights < 2) return;
    _tile_loadd(WEIGHTS_1, at->weights[1], at->weight_stride);
    _tile_dpbf16ps(SUMS_10, WEIGHTS_1, X_0);
    if (num_x > 1) _tile_dpbf16ps(SUMS_11, WEIGHTS_1, X_1);
}

INLINE void add_steps(int num_weights, int num_x, Operands at, int64_t k, const Shape *shape, Ahead *ahead) {
    _tile_zero(SUMS_00);
    if (num_x > 1) _tile_zero(SUMS_01);
    if (num_weights > 1) _tile_zero(SUMS_10);
    if (num_weights > 1 && num_x > 1) _tile_zero(SUMS_11);
    for (; k >= K_STEP; k -= K_STEP) {
        fetch(ahead);
        add_step(num_weights, num_x, &at);
        UNROLL for (int i = 0; i < 2; i++) {
            at.weights[i] += STEP_BYTES;
            at.x[i] += at.x_row[i] * (K_STEP / 2);
        }
    }
    if (!k) return;
    /* The row may end at the end of the mapped memory: never read past it. */
    char padded[2][ROWS][STEP_BYTES] __attribute__((aligned(64)));
    memset(padded, 0, sizeof padded);
    for (int i = 0; i < num_weights; i++) {
        for (int n = 0; n < shape->weights[i]; n++)
            memcpy(padded[i][n], at.weights[i] + n * at.weight_stride, (size_t)(2 * k));
        at.weights[i] = padded[i][0];
    }
    at.weight_stride = STEP_BYTES;
    WRITTEN();
    add_step(num_weights, num_x, &at);
}

static void add_all_steps(Operands at, int64_t k, const Shape *shape, Ahead *ahead) {
    const int two_x = shape->x[1] > 0;
    if (shape->weights[1])
        two_x ? add_steps(2, 2, at, k, shape, ahead) : add_steps(2, 1, at, k, shape, ahead);
    else
        two_x ? add_steps(1, 2, at, k, shape, ahead) : add_steps(1, 1, at, k, shape, ahead);
}

/* out[m * ldo + n] = sums[n][m] for some weight rows n and rows m of x. */
static void store_transposed(const float *sums, int weight_rows, int x_rows, float *out, int64_t ldo) {
    __m512 a[ROWS], b[ROWS];
    UNROLL for (int i = 0; i < ROWS; i++) a[i] = _mm512_load_ps(sums + i * ROWS);
    UNROLL for (int i = 0; i < ROWS; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < ROWS; i += 4) UNROLL for (int j = 0; j < 2; j++) {
        const __m512d even = _mm512_castps_pd(b[i + j]), odd = _mm512_castps_pd(b[i + j + 2]);
        a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(even, odd));
        a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(even, odd));
    }
    /* part p of a[i + j] is column 4 p + j of four rows */
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512 even[2] = {_mm512_shuffle_f32x4(a[j], a[j + 4], 0x88), _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0x88)};
        const __m512 odd[2] = {_mm512_shuffle_f32x4(a[j], a[j + 4], 0xdd), _mm512_shuffle_f32x4(a[j + 8], a[j + 12], 0xdd)};
        b[j] = _mm512_shuffle_f32x4(even[0], even[1], 0x88);
        b[j + 4] = _mm512_shuffle_f32x4(odd[0], odd[1], 0x88);
        b[j + 8] = _mm512_shuffle_f32x4(even[0], even[1], 0xdd);
        b[j + 12] = _mm512_shuffle_f32x4(odd[0], odd[1], 0xdd);
    }
    const __mmask16 mask = (__mmask16)((1u << weight_rows) - 1);
    UNROLL for (int m = 0; m < ROWS; m++)
        if (m < x_rows) _mm512_mask_storeu_ps(out + m * ldo, mask, b[m]);
}

/* Writes a tile of sums to out; those of one row of x already lie in order. */
#define STORE_SUMS(tile, weight_rows, x_rows, out, ldo)                                 \
    do {                                                                                \
        if (!(weight_rows) || !(x_rows)) break;                                         \
        if ((x_rows) == 1) {                                                            \
            _tile_stored(tile, out, 4);                                                 \
        } else {                                                                        \
            float sums[ROWS * ROWS] __attribute__((aligned(64)));                       \
            _tile_stored(tile, sums, ROWS * 4);                                         \
            store_transposed(sums, weight_rows, x_rows, out, ldo);                      \
        }                                                                               \
    } while (0)

static void multiply_by_tiles(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                              int64_t ldo, Matrix next) {
    const int64_t panels = num_panels(num_rows, ROWS), row_bytes = packed_row_bytes(KIND_BF16_TILES, k, K_STEP);
    Shape last = {0};
    for (int64_t n = 0; n < num_weight_rows; n += STRIP_ROWS) {
        const int64_t height = min64(STRIP_ROWS, num_weight_rows - n);
        Ahead ahead = ahead_of(weight, n + STRIP_ROWS, num_weight_rows, next, 2 * k, (panels + 1) / 2);
        for (int64_t p = 0; p < panels; p += 2) {
            const int64_t first = panel_start(p, panels, num_rows), middle = panel_start(p + 1, panels, num_rows);
            const int64_t end = p + 1 < panels ? panel_start(p + 2, panels, num_rows) : middle;
            const Shape shape = {{(int)min64(ROWS, height), (int)(height > ROWS ? height - ROWS : 0)},
                                 {(int)(middle - first), (int)(end - middle)}};
            if (memcmp(&shape, &last, sizeof shape)) set_shape(shape);
            last = shape;
            const char *data = weight.data + n * weight.stride;
            const Operands at = {{data, data + ROWS * weight.stride}, {packed + first * row_bytes, packed + middle * row_bytes},
                                 weight.stride, {4 * shape.x[0], 4 * shape.x[1]}};
            add_all_steps(at, k, &shape, &ahead);
            float *place = out + first * ldo + n, *second = out + middle * ldo + n;
            STORE_SUMS(SUMS_00, shape.weights[0], shape.x[0], place, ldo);
            STORE_SUMS(SUMS_01, shape.weights[0], shape.x[1], second, ldo);
            STORE_SUMS(SUMS_10, shape.weights[1], shape.x[0], place + ROWS, ldo);
            STORE_SUMS(SUMS_11, shape.weights[1], shape.x[1], second + ROWS, ldo);
        }
    }
    _tile_release();
}

/* ---- the table ---- */

static void pack(int kind, const char *src, int dtype, int64_t count, char *panel, int64_t first_k, int row, int panel_rows,
                 int64_t k) {
    if (kind != KIND_BF16_TILES) {
        isa_avx512bf16.pack(kind, src, dtype, count, panel, first_k, row, panel_rows, k);
        return;
    }
    uint32_t *pairs = (uint32_t *)(panel + first_k * panel_rows * 2) + row;
    const __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i places = _mm512_mullo_epi32(order, _mm512_set1_epi32(panel_rows));
    for (int64_t i = 0; i < count; i += K_STEP, pairs += panel_rows * (K_STEP / 2)) {
        const int filled = count - i < K_STEP ? (int)(count - i) : K_STEP;
        uint16_t values[K_STEP] = {0};
        if (dtype == DTYPE_BF16)
            memcpy(values, src + 2 * i, (size_t)(2 * filled));
        else if (filled == K_STEP)
            for (int j = 0; j < K_STEP; j++) values[j] = f32_to_bf16(load_f32(src + 4 * (i + j)));
        else
            for (int j = 0; j < filled; j++) values[j] = f32_to_bf16(load_f32(src + 4 * (i + j)));
        _mm512_i32scatter_epi32(pairs, places, _mm512_loadu_si512(values), 4);
    }
}

static void multiply(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                     int64_t ldo, Matrix next) {
    if (kind == KIND_BF16_TILES)
        multiply_by_tiles(weight, num_weight_rows, k, packed, num_rows, out, ldo, next);
    else
        isa_avx512bf16.multiply(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, next);
}

static void multiply_cached(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                            float *out, int64_t ldo) {
    if (kind == KIND_BF16_TILES)
        multiply_by_tiles(weight, num_weight_rows, k, packed, num_rows, out, ldo, (Matrix){0});
    else
        isa_avx512bf16.multiply_cached(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo);
}

static Isa table;
static int is_usable;

/* Whether the system saves tiles and lets this process use them: Linux wants each process to ask. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18, TILE_STATE = 3 << 17 };
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & TILE_STATE) == TILE_STATE && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA);
}

static void make_table(void) {
    is_usable = may_use_tiles();
    table = isa_avx512bf16;
    table.name = "amx";
    table.has_tiles = 1;
    table.pack = pack;
    table.multiply = multiply;
    table.multiply_cached = multiply_cached;
}

const Isa *isa_amx(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_table);
    return is_usable ? &table : NULL;
}
