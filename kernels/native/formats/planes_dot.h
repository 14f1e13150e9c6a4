/* Products of the lossless code that never leave registers: a row of weights is decoded as it is multiplied with a panel.
 *
 * Sums are those of the kernels in isa_template.h, in their order: a chain for each row of x. To be included by an instruction
 * set with dot_bf16 and AVX-512 VBMI2.
 */
#include "formats/planes_vbmi2.h"

INLINE const uint8_t *dot_planes_of(int panel_rows, const char *row, const uint8_t *escapes, const uint8_t *end,
                                    const uint8_t *book, int64_t cols, const char *panel, float *out, int64_t ldo) {
    const int64_t blocks = planes_blocks(cols);
    const int step_bytes = panel_rows * K_STEP * 2;
    const __m512i exponents = planes_exponents(book);
    const char *ahead = row + PLANES_AHEAD;
    PlanesPlace place = planes_place(row, escapes, blocks);
    Vec acc[PANEL_ROWS][TILE_ROWS];
    UNROLL for (int m = 0; m < panel_rows; m++) acc[m][0] = vec_zero();
    for (int64_t left = cols; left > 0; left -= PLANES_BLOCK, panel += 2 * step_bytes) {
        __m512i values[2];
        planes_fetch(&ahead);
        if (place.escapes > end) return NULL;
        planes_block(&place, exponents, values);
        UNROLL for (int m = 0; m < panel_rows; m++)
            acc[m][0] = dot_bf16(acc[m][0], (BfVec)values[0], vec_load_bf16_pairs(panel + m * K_STEP * 2));
        if (left <= K_STEP) break; /* the panel ends here */
        UNROLL for (int m = 0; m < panel_rows; m++)
            acc[m][0] = dot_bf16(acc[m][0], (BfVec)values[1], vec_load_bf16_pairs(panel + step_bytes + m * K_STEP * 2));
    }
    store_sums(1, panel_rows, acc, out, ldo);
    return place.escapes <= end ? place.escapes : NULL;
}

static const uint8_t *dot_planes(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t cols,
                                 const char *panel, int panel_rows, float *out, int64_t ldo) {
    switch (panel_rows) {
    case 1: return dot_planes_of(1, row, escapes, end, book, cols, panel, out, ldo);
    case 2: return dot_planes_of(2, row, escapes, end, book, cols, panel, out, ldo);
    case 3: return dot_planes_of(3, row, escapes, end, book, cols, panel, out, ldo);
    case 4: return dot_planes_of(4, row, escapes, end, book, cols, panel, out, ldo);
    case 5: return dot_planes_of(5, row, escapes, end, book, cols, panel, out, ldo);
    default: return dot_planes_of(6, row, escapes, end, book, cols, panel, out, ldo);
    }
}
