/* Decoding the lossless code into memory, with AVX-512 VBMI2. */
#include "formats/planes_vbmi2.h"

const uint8_t *planes_decode_vbmi2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                        char *out) {
    PlanesPlace place = planes_place(row, escapes, blocks);
    const __m512i exponents = planes_exponents(book);
    const char *ahead = row + PLANES_AHEAD;
    for (int64_t block = 0; block < blocks; block++, out += 2 * PLANES_BLOCK) {
        __m512i values[2];
        planes_fetch(&ahead);
        if (place.escapes > end) return NULL;
        planes_block(&place, exponents, values);
        _mm512_storeu_si512(out, values[0]);
        _mm512_storeu_si512(out + PLANES_BLOCK, values[1]);
    }
    return place.escapes <= end ? place.escapes : NULL;
}
