/* Products of the lossless code that never leave registers: rows of weights are decoded as they are multiplied with a panel.
 *
 * Sums are those of the kernels in isa_template.h, in their order: a chain for each row of x and of the weights. Two rows are
 * taken at once, since a single chain is slower than memory. To be included by an instruction set with dot_bf16 and AVX-512
 * VBMI2.
 */
#include "formats/planes_vbmi2.h"

/* Half a block of each row times half a step of a panel. */
INLINE void dot_planes_half(int rows, int panel_rows, Vec acc[PANEL_ROWS][TILE_ROWS], __m512i values[2][2], int half,
                            const char *panel) {
    UNROLL for (int m = 0; m < panel_rows; m++) {
        const BfVec x = vec_load_bf16_pairs(panel + m * K_STEP * 2);
        UNROLL for (int n = 0; n < rows; n++) acc[m][n] = dot_bf16(acc[m][n], (BfVec)values[n][half], x);
    }
}

INLINE const uint8_t *dot_planes_of(int rows, int panel_rows, const char *row, const uint8_t *escapes, const uint8_t *end,
                                    const uint8_t *book, int64_t cols, const char *panel, float *out, int64_t ldo) {
    const int64_t blocks = planes_blocks(cols), row_bytes = planes_row_bytes(cols);
    const int step_bytes = panel_rows * K_STEP * 2;
    const __m512i exponents = planes_exponents(book);
    const uint8_t *second = rows == 1 ? escapes : escapes + planes_escapes(row, blocks);
    if (second > end) return NULL;
    PlanesPlace places[2] = {planes_place(row, escapes, blocks), planes_place(row + row_bytes, second, blocks)};
    PlanesPlace *last = &places[rows - 1];
    const char *ahead[2] = {row + PLANES_AHEAD, row + row_bytes + PLANES_AHEAD};
    Vec acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int m = 0; m < panel_rows; m++)
        UNROLL for (int n = 0; n < rows; n++) acc[m][n] = vec_zero();
    for (int64_t left = cols; left > 0; left -= PLANES_BLOCK, panel += 2 * step_bytes) {
        __m512i values[2][2];
        if (last->escapes > end) return NULL;
        UNROLL for (int n = 0; n < rows; n++) {
            planes_fetch(&ahead[n]);
            planes_block(&places[n], exponents, values[n]);
        }
        dot_planes_half(rows, panel_rows, acc, values, 0, panel);
        if (left <= K_STEP) break; /* the panel ends here */
        dot_planes_half(rows, panel_rows, acc, values, 1, panel + step_bytes);
    }
    store_sums(rows, panel_rows, acc, out, ldo);
    return last->escapes <= end ? last->escapes : NULL;
}

#define DOT_PLANES_OF(panel_rows)                                                                         \
    return rows == 2 ? dot_planes_of(2, panel_rows, row, escapes, end, book, cols, panel, out, ldo) \
                     : dot_planes_of(1, panel_rows, row, escapes, end, book, cols, panel, out, ldo)

static const uint8_t *dot_planes(const char *row, int rows, const uint8_t *escapes, const uint8_t *end, const uint8_t *book,
                                 int64_t cols, const char *panel, int panel_rows, float *out, int64_t ldo) {
    switch (panel_rows) {
    case 1: DOT_PLANES_OF(1);
    case 2: DOT_PLANES_OF(2);
    case 3: DOT_PLANES_OF(3);
    case 4: DOT_PLANES_OF(4);
    case 5: DOT_PLANES_OF(5);
    default: DOT_PLANES_OF(6);
    }
}
#undef DOT_PLANES_OF
