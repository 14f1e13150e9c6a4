/* Products of rows in panels with tiles of a matrix. One step covers K_STEP elements of k for every kind of weight. */
#pragma once

#include "isa/vec.h"
#if LANES == 8
#include "isa/steps_avx2.h"
#endif

#define K_STEP (2 * LANES)
#define CACHE_LINE 64
/* Packed rows multiplied by a block of weights before the next rows are: they stay in the second-level cache. */
#define GROUP_BYTES (256 << 10)
/* From this many bytes of a weight row on, even a few panels would not stay there: many rows take such a matrix a part of k
 * at a time. */
#define PART_BYTES (8 << 10)
enum { PART_WEIGHT_ROWS = TILE_ROWS == 3 ? 30 : 32, PART_PANELS = 22 };

/* ---- products ---- */

INLINE Vec load_weight(int kind, int half, const char *w) {
    if (kind == KIND_F32) return vec_load_f32((const float *)(w + half * LANES * 4));
    if (kind == KIND_F16) return vec_load_f16(w + half * LANES * 2);
    return half ? vec_load_bf16_odd(w) : vec_load_bf16_even(w);
}

INLINE void step(int kind, int tile_rows, int panel_rows, Vec acc[PANEL_ROWS][TILE_ROWS],
                 const char *const w[TILE_ROWS], const char *x) {
#if HAS_BF16_DOT
    if (kind == KIND_BF16_DOT) {
        BfVec weight[TILE_ROWS];
        UNROLL for (int n = 0; n < tile_rows; n++) weight[n] = vec_load_bf16_pairs(w[n]);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            BfVec value = vec_load_bf16_pairs(x + m * K_STEP * 2);
            UNROLL for (int n = 0; n < tile_rows; n++) acc[m][n] = dot_bf16(acc[m][n], weight[n], value);
        }
        return;
    }
#endif
    for (int half = 0; half < 2; half++) {
        Vec weight[TILE_ROWS];
        UNROLL for (int n = 0; n < tile_rows; n++) weight[n] = load_weight(kind, half, w[n]);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            Vec value = vec_load_f32((const float *)(x + (m * K_STEP + half * LANES) * 4));
            UNROLL for (int n = 0; n < tile_rows; n++) acc[m][n] = vec_fma(acc[m][n], weight[n], value);
        }
    }
}

/* Where a tile fetches ahead: `steps` steps from each pointer in turn. */
typedef struct {
    const char *data;
    int64_t steps;
} Ahead;

/* a single row needs two: the place ahead crosses from one row to the next */
#define AHEAD_PARTS(tile_rows, lines) ((tile_rows) == 1 ? 2 : (lines))

/* The rows that a multiplication reads: those of `weight`, then those of `next`. */
typedef struct {
    Matrix weight, next;
    int64_t num_rows;
    int64_t whole_rows, rest_steps; /* the distance ahead: rows, and steps within a row */
    int64_t steps, step_bytes;      /* of one row */
} Stream;

INLINE const char *stream_row(const Stream *stream, int64_t row) {
    if (row < stream->num_rows) return stream->weight.data + row * stream->weight.stride;
    return stream->next.data ? stream->next.data + (row - stream->num_rows) * stream->next.stride : NULL;
}

/* A single row fetches `distance` bytes ahead of itself. */
INLINE void ahead_of_row(const Stream *stream, int64_t row, Ahead *ahead) {
    const char *near = stream_row(stream, row + stream->whole_rows), *far = stream_row(stream, row + stream->whole_rows + 1);
    ahead[0].data = near + stream->rest_steps * stream->step_bytes;
    ahead[0].steps = near ? stream->steps - stream->rest_steps : 0;
    ahead[1].data = far;
    ahead[1].steps = far ? stream->rest_steps : 0;
}

/* The panels of a tile share the rows of a later tile: `lines` rows for each panel, until all are fetched. */
INLINE void ahead_of_tile(const Stream *stream, int64_t row, int height, int lines, int64_t panel, Ahead *ahead) {
    const int64_t share = stream->steps / lines;
    UNROLL for (int part = 0; part < lines; part++) {
        const int64_t offset = lines * panel + part;
        ahead[part].data = offset < height ? stream_row(stream, row + stream->whole_rows + offset) : NULL;
        ahead[part].steps = !ahead[part].data ? 0 : part < lines - 1 ? share : stream->steps - share * (lines - 1);
    }
}

/* Sums over lanes, four vectors at a time; a vector's sum does not depend on its neighbours. */
INLINE void store_sums(int tile_rows, int panel_rows, Vec acc[PANEL_ROWS][TILE_ROWS], float *out, int64_t ldo) {
    UNROLL for (int first = 0; first < panel_rows * tile_rows; first += 4) {
        Vec four[4];
        float sums[4];
        UNROLL for (int i = 0; i < 4; i++) {
            const int index = first + i;
            four[i] = index < panel_rows * tile_rows ? acc[index / tile_rows][index % tile_rows] : vec_zero();
        }
        vec_four_sums(four[0], four[1], four[2], four[3], sums);
        UNROLL for (int i = 0; i < 4; i++)
            if (first + i < panel_rows * tile_rows) out[(first + i) / tile_rows * ldo + (first + i) % tile_rows] = sums[i];
    }
}

/* A part of k. Sums go from one part to the next as vectors: the bits are those of one pass. */
typedef struct {
    int64_t first, count;
    int is_first, is_last;
    Vec *sums; /* NULL where the part is all of k */
} Part;

/* A tile of sums over a part of k; fetches `lines` times as many bytes ahead as a weight row has. */
INLINE void tile(int kind, int tile_rows, int panel_rows, int lines, Matrix weight, const Part *part, Vec *sums, const char *x,
                 float *out, int64_t ldo, const Ahead *ahead) {
    const int width = kind == KIND_F32 ? 4 : 2;
    const int step_bytes = K_STEP * width, ahead_bytes = lines * step_bytes;
    const int x_step_bytes = panel_rows * K_STEP * (kind == KIND_BF16_DOT ? 2 : 4);
    Vec acc[PANEL_ROWS][TILE_ROWS];
    const char *w[TILE_ROWS];
    UNROLL for (int n = 0; n < tile_rows; n++) w[n] = weight.data + n * weight.stride;
    UNROLL for (int m = 0; m < panel_rows; m++)
        UNROLL for (int n = 0; n < tile_rows; n++) acc[m][n] = part->is_first ? vec_zero() : sums[m * tile_rows + n];

    int64_t steps = part->count / K_STEP;
#if LANES == 8
    if (tile_rows == TILE_ROWS && panel_rows > 1) {
        for (int i = 0; steps > 0; i++) {
            const int64_t count = i < lines ? ahead[i].steps : steps;
            const char *line = i < lines ? ahead[i].data : NULL;
            if (!count) continue;
            tall_steps(kind, panel_rows, &acc[0][0], w, x, count, line ? line : x, line != NULL, ahead_bytes);
            UNROLL for (int n = 0; n < tile_rows; n++) w[n] += count * step_bytes;
            x += count * x_step_bytes, steps -= count;
        }
    } else
#endif
    for (int i = 0; i < AHEAD_PARTS(tile_rows, lines); i++) {
        const char *line = ahead[i].data;
        for (int64_t left = ahead[i].steps; left > 0; left--, steps--) {
            UNROLL for (int b = 0; b < ahead_bytes; b += CACHE_LINE) __builtin_prefetch(line + b, 0, 2);
            line += ahead_bytes;
            step(kind, tile_rows, panel_rows, acc, w, x);
            UNROLL for (int n = 0; n < tile_rows; n++) w[n] += step_bytes;
            x += x_step_bytes;
        }
    }
    for (; steps > 0; steps--) {
        step(kind, tile_rows, panel_rows, acc, w, x);
        UNROLL for (int n = 0; n < tile_rows; n++) w[n] += step_bytes;
        x += x_step_bytes;
    }
    const int64_t rest = part->count % K_STEP;
    if (rest) {
        /* The row may end at the end of the mapped memory: never read past it. */
        char padded[TILE_ROWS][K_STEP * 4];
        memset(padded, 0, sizeof padded);
        UNROLL for (int n = 0; n < tile_rows; n++) {
            memcpy(padded[n], w[n], (size_t)(rest * width));
            w[n] = padded[n];
        }
        step(kind, tile_rows, panel_rows, acc, w, x);
    }
    if (part->is_last) {
        store_sums(tile_rows, panel_rows, acc, out, ldo);
        return;
    }
    UNROLL for (int m = 0; m < panel_rows; m++)
        UNROLL for (int n = 0; n < tile_rows; n++) sums[m * tile_rows + n] = acc[m][n];
}

/* Tiles one below the other, for one panel of x. */
INLINE void strip(int kind, int tile_rows, int panel_rows, int lines, const Stream *stream, int64_t row, int64_t num_tiles,
                  const Part *part, Vec *sums, const char *x, int64_t panel, float *out, int64_t ldo) {
    for (; num_tiles > 0; num_tiles--, row += tile_rows) {
        const Matrix here = {.data = stream->weight.data + row * stream->weight.stride, .stride = stream->weight.stride};
        Ahead ahead[AHEAD_PARTS(tile_rows, lines)];
        if (tile_rows == 1)
            ahead_of_row(stream, row, ahead);
        else
            ahead_of_tile(stream, row, tile_rows, lines, panel, ahead);
        tile(kind, tile_rows, panel_rows, lines, here, part, sums, x, out + row, ldo, ahead);
    }
}

typedef void (*StripFn)(const Stream *stream, int64_t row, int64_t num_tiles, const Part *part, Vec *sums, const char *x,
                        int64_t panel, float *out, int64_t ldo);

#define DEFINE_STRIP(kind, panel_rows, rows, lines)                                                                  \
    static void strip_##kind##_##rows##_##panel_rows##_##lines(const Stream *stream, int64_t row, int64_t num_tiles, \
                                                               const Part *part, Vec *sums, const char *x,          \
                                                               int64_t panel, float *out, int64_t ldo) {            \
        strip(kind, rows, panel_rows, lines, stream, row, num_tiles, part, sums, x, panel, out, ldo);               \
    }
#define NAME_STRIP(kind, panel_rows, rows, lines) strip_##kind##_##rows##_##panel_rows##_##lines,

/* The shapes of tiles: weight rows, and lines fetched a step; a tall tile fetches more, as fewer panels share the work. */
#if TILE_ROWS == 4
enum { SHAPE_SINGLE, SHAPE_TALL, SHAPE_TALL_ALONE, SHAPE_TALL_PAIR, NUM_SHAPES };
#define FOR_SHAPES(macro, kind, panel) macro(kind, panel, 1, 1) macro(kind, panel, 4, 1) macro(kind, panel, 4, 4) macro(kind, panel, 4, 2)
#elif TILE_ROWS == 3
enum { SHAPE_SINGLE, SHAPE_TALL, SHAPE_TALL_ALONE, SHAPE_TALL_PAIR, SHAPE_TWO, NUM_SHAPES };
#define FOR_SHAPES(macro, kind, panel)                                                                             \
    macro(kind, panel, 1, 1) macro(kind, panel, 3, 1) macro(kind, panel, 3, 3) macro(kind, panel, 3, 2) macro(kind, panel, 2, 2)
#else
enum { SHAPE_SINGLE, SHAPE_TALL, SHAPE_TALL_ALONE, SHAPE_TALL_PAIR, NUM_SHAPES };
#define FOR_SHAPES(macro, kind, panel) macro(kind, panel, 1, 1) macro(kind, panel, 2, 1) macro(kind, panel, 2, 2)
#endif
static const int SHAPE_ROWS[] = {1, TILE_ROWS, TILE_ROWS, TILE_ROWS, 2};

#define DEFINE_PANEL(kind, panel) FOR_SHAPES(DEFINE_STRIP, kind, panel)
#define NAME_PANEL(kind, panel) {FOR_SHAPES(NAME_STRIP, kind, panel)},
#if PANEL_ROWS == 6
#define FOR_PANEL_ROWS(macro, kind) macro(kind, 1) macro(kind, 2) macro(kind, 3) macro(kind, 4) macro(kind, 5) macro(kind, 6)
#else
#define FOR_PANEL_ROWS(macro, kind) macro(kind, 1) macro(kind, 2) macro(kind, 3) macro(kind, 4)
#endif
#define DEFINE_KIND(kind) FOR_PANEL_ROWS(DEFINE_PANEL, kind)
#define NAME_KIND(kind) {FOR_PANEL_ROWS(NAME_PANEL, kind)},
#if HAS_BF16_DOT
#define FOR_KINDS(macro) macro(KIND_F32) macro(KIND_F16) macro(KIND_BF16) macro(KIND_BF16_DOT)
#else
#define FOR_KINDS(macro) macro(KIND_F32) macro(KIND_F16) macro(KIND_BF16)
#endif

FOR_KINDS(DEFINE_KIND)
static const StripFn STRIPS[NUM_STRIP_KINDS][PANEL_ROWS][NUM_SHAPES] = {FOR_KINDS(NAME_KIND)};

/* One row of x: one weight row after another, the order that memory serves fastest (measured on Zen 4: four rows at once are
 * a third slower), if vectors are wide enough. Narrow ones wait for their single chain of sums (measured on Zen 5: AVX2
 * reads 25 GB/s that way, 34 by pairs of rows). More rows of x need a taller tile to keep up with memory; its panels share
 * the fetching evenly, because a burst of fetches holds up the loads. */
static int tile_shape(int64_t num_rows, int64_t panels) {
    if (SINGLE_WEIGHT_ROWS && num_rows == 1) return SHAPE_SINGLE;
#if TILE_ROWS == 3
    if (num_rows == 1) return SHAPE_TWO; /* three rows at once are a fortieth slower from memory (measured on Zen 3) */
#endif
    return panels == 1 ? SHAPE_TALL_ALONE : panels < TILE_ROWS ? SHAPE_TALL_PAIR : SHAPE_TALL;
}

/* How far ahead a line is fetched, in bytes: the slower a tile takes lines, the farther the processor's own window of loads
 * falls short (measured on Zen 4). */
static int64_t ahead_distance(int shape) { return shape == SHAPE_SINGLE ? 2 << 10 : 16 << 10; }

static Stream plan_stream(Matrix weight, int64_t num_rows, Matrix next, int height, int64_t distance, int64_t steps,
                          int64_t step_bytes) {
    Stream stream = {.weight = weight, .next = next, .num_rows = num_rows, .steps = steps, .step_bytes = step_bytes};
    const int64_t tile_bytes = height * steps * step_bytes;
    if (height > 1) {
        stream.whole_rows = tile_bytes ? (distance + tile_bytes - 1) / tile_bytes * height : 0;
    } else if (tile_bytes) {
        stream.whole_rows = distance / tile_bytes;
        stream.rest_steps = distance % tile_bytes / step_bytes;
    }
    return stream;
}

/* All panels from `first_panel` to `last_panel` with all weight rows, over a part of k. */
static void multiply_panels(int kind, const Stream *stream, int shape, int64_t k, const Part *part, const char *packed,
                            int64_t num_rows, int64_t first_panel, int64_t last_panel, float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), row_bytes = packed_row_bytes(kind, k, K_STEP);
    const int64_t small = num_rows / panels, num_larger = num_rows % panels;
    const int64_t skipped = packed_row_bytes(kind, part->first, K_STEP), first_row = panel_start(first_panel, panels, num_rows);
    for (int64_t n = 0; n < stream->num_rows; shape = SHAPE_SINGLE) {
        const int64_t height = SHAPE_ROWS[shape], tiles = (stream->num_rows - n) / height;
        /* One panel takes the whole strip; several take turns on a tile while it is in the cache. */
        const int64_t turn = panels == 1 ? tiles : 1;
        for (const int64_t last = n + tiles * height; n < last; n += turn * height) {
            int64_t row = first_row;
            for (int64_t p = first_panel; p < last_panel; p++) {
                const int64_t rows = small + (p < num_larger);
                Vec *sums = part->sums ? part->sums + (row - first_row) * PART_WEIGHT_ROWS + n * rows : NULL;
                STRIPS[kind][rows - 1][shape](stream, n, turn, part, sums, packed + row * row_bytes + rows * skipped, p,
                                              out + row * ldo, ldo);
                row += rows;
            }
        }
    }
}

static int64_t weight_bytes(int kind) { return kind == KIND_F32 ? 4 : 2; }

static void multiply_tiles(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo, Matrix next, int shape, int64_t distance) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS);
    const int64_t panel_bytes = PANEL_ROWS * packed_row_bytes(kind, k ? k : 1, K_STEP);
    const int64_t group = panel_bytes * 4 < GROUP_BYTES ? GROUP_BYTES / panel_bytes : 4;
    const Stream stream = plan_stream(weight, num_weight_rows, next, SHAPE_ROWS[shape], distance, k / K_STEP,
                                      K_STEP * weight_bytes(kind));
    const Part whole = {.count = k, .is_first = 1, .is_last = 1};
    for (int64_t first = 0; first < panels; first += group) {
        const int64_t last = first + group < panels ? first + group : panels;
        multiply_panels(kind, &stream, shape, k, &whole, packed, num_rows, first, last, out, ldo);
    }
}

/* The same for rows so long that few panels of them would fill the second-level cache. */
static void multiply_parts(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                           float *out, int64_t ldo) {
    const int64_t panels = num_panels(num_rows, PANEL_ROWS), width = weight_bytes(kind), most = PART_BYTES / width;
    Vec sums[PART_PANELS * PANEL_ROWS * PART_WEIGHT_ROWS];
    for (int64_t n = 0; n < num_weight_rows; n += PART_WEIGHT_ROWS) {
        const int64_t count = num_weight_rows - n < PART_WEIGHT_ROWS ? num_weight_rows - n : PART_WEIGHT_ROWS;
        for (int64_t first = 0; first < panels; first += PART_PANELS) {
            const int64_t last = first + PART_PANELS < panels ? first + PART_PANELS : panels;
            for (int64_t start = 0; start < k; start += most) {
                const Part part = {.first = start, .count = k - start < most ? k - start : most, .is_first = start == 0,
                                   .is_last = k - start <= most, .sums = sums};
                const Matrix here = {.data = weight.data + n * weight.stride + start * width, .stride = weight.stride};
                const Stream stream = plan_stream(here, count, (Matrix){0}, TILE_ROWS, 0, part.count / K_STEP, K_STEP * width);
                multiply_panels(kind, &stream, SHAPE_TALL, k, &part, packed, num_rows, first, last, out + n, ldo);
            }
        }
    }
}

/* Weights that are in the first-level cache: tiles have as many sums as there are registers, and nothing is fetched. */
static void multiply_cached(int kind, Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows,
                            float *out, int64_t ldo) {
    multiply_tiles(kind, weight, num_weight_rows, k, packed, num_rows, out, ldo, (Matrix){0}, SHAPE_TALL, INT32_MAX);
}
