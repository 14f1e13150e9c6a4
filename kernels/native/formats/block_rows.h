/* Products of blocks that hold their scales, decoded in registers; a part of quantized_template.h.
 *
 * Values are those of block_values.h, rounded once, and sums add up as in a tile of fp32: a row of x has the same bits whether
 * values are multiplied in registers or from memory.
 */
/* Numbers are read again for every group: out of registers each would be a shuffle. */
#define IN_MEMORY(numbers) __asm__("" : "+m"(numbers))
/* Values of x serve several rows: compilers load them again for each. */
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))

#if LANES == 8
#include "formats/blocks_avx2.h"
#else
#include "formats/blocks_avx512.h"
#endif

/* `count` weight rows, one or a tile's, by one row of x; or their values to `out`, a row behind the other. */
INLINE void block_rows(int code, int is_dot, int count, const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x,
                       float *out) {
    const int codes = BLOCK_SIZES[code - CODE_BLOCKS].codes, bytes = BLOCK_SIZES[code - CODE_BLOCKS].bytes;
    const int64_t apart = count * stride, ahead = apart > 0 ? (LANES_AHEAD / apart + 1) * apart : 0; /* rows may lie in one place */
    Vec acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int n = 0; n < TILE_ROWS; n++) acc[0][n] = vec_zero();
    for (int64_t first = 0; first < k; first += codes, weight += bytes) {
        GroupNumbers numbers[TILE_ROWS];
        /* the same block of later rows; past the last row fetching is harmless */
        UNROLL for (int n = 0; n < count; n++)
            UNROLL for (int i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(weight + ahead + n * stride + i, 0, 3);
        UNROLL for (int n = 0; n < count; n++) {
            block_numbers(code, (const uint8_t *)weight + n * stride, &numbers[n]);
            IN_MEMORY(numbers[n]);
        }
        UNROLL for (int group = 0; group < codes / 32; group++) {
            const int64_t at = first + 32 * group;
            Vec of_x[32 / LANES];
            if (is_dot) {
                UNROLL for (int i = 0; i < 32 / LANES; i++) {
                    of_x[i] = vec_load_f32(x + at + LANES * i);
                    IN_REGISTER(of_x[i]);
                }
            }
            UNROLL for (int n = 0; n < count; n++) {
                Vec values[32 / LANES];
                group_values(code, table, (const uint8_t *)weight + n * stride, group, &numbers[n], values);
                UNROLL for (int i = 0; i < 32 / LANES; i++) {
                    if (is_dot)
                        acc[0][n] = vec_fma(acc[0][n], values[i], of_x[i]);
                    else
                        vec_store_f32(out + n * k + at + LANES * i, values[i]);
                }
            }
        }
    }
    if (is_dot) store_sums(count, 1, acc, out, 0);
}

typedef void (*BlockRows)(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out);

#define DEFINE_BLOCK_ROWS(code)                                                                                              \
    static void write_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 0, 1, table, weight, stride, k, x, out);                                                            \
    }                                                                                                                        \
    static void dot_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, 1, table, weight, stride, k, x, out);                                                               \
    }                                                                                                                        \
    static void dots_##code(const CodeTable *table, const char *weight, int64_t stride, int64_t k, const float *x, float *out) { \
        block_rows(code, 1, TILE_ROWS, table, weight, stride, k, x, out);                                                       \
    }
#define NAME_BLOCK_ROWS(code) {write_##code, dot_##code, dots_##code}

FOR_BLOCKS(DEFINE_BLOCK_ROWS, NO_SEPARATOR)

enum { WRITE_ROW, DOT_ROW, DOT_ROWS, NUM_BLOCK_ROWS };
static const BlockRows BLOCK_ROWS[END_OF_CODES - CODE_BLOCKS][NUM_BLOCK_ROWS] = {FOR_BLOCKS(NAME_BLOCK_ROWS, COMMA)};

static void multiply_blocks(Matrix weight, int64_t num_weight_rows, int64_t k, const char *packed, int64_t num_rows, float *out,
                            int64_t ldo) {
    const BlockRows *rows = BLOCK_ROWS[weight.quantized->codes - CODE_BLOCKS];
    const int64_t at_once = rows_of_values(k, num_rows);
    CodeTable table;
    prepare_table(weight.quantized->codes, &table);
    if (num_rows == 1) {
        int64_t n = 0;
        for (; n + TILE_ROWS <= num_weight_rows; n += TILE_ROWS)
            rows[DOT_ROWS](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        for (; n < num_weight_rows; n++)
            rows[DOT_ROW](&table, weight.data + n * weight.stride, weight.stride, k, (const float *)packed, out + n);
        return;
    }
    float values[at_once * k];
    for (int64_t first = 0; first < num_weight_rows; first += at_once) {
        const int64_t count = num_weight_rows - first < at_once ? num_weight_rows - first : at_once;
        for (int64_t n = 0; n < count; n++)
            rows[WRITE_ROW](&table, weight.data + (first + n) * weight.stride, weight.stride, k, NULL, values + n * k);
        multiply_cached(KIND_F32, (Matrix){.data = (const char *)values, .stride = 4 * k}, count, k, packed, num_rows, out + first, ldo);
    }
}
