/* One block of a quantised weight row by rows of x that were rounded to int8; a part of quantized_avx512.h.
 *
 * Unsigned codes times signed ones, four to a lane, less the zero point times the sum of the signed ones.
 */

INLINE void int8_block(int decoder, int panel_rows, const Lanes *lanes, const char *codes, int64_t bytes, const char *x,
                       int64_t block, Vec acc[PANEL_ROWS]) {
    const int is_byte = decoder == DECODE_BYTES;
    const __m512i nibble = _mm512_set1_epi8(15), first_half = _mm512_set1_epi32(0xffff);
    UNROLL for (int part = 0; part < 1 + is_byte; part++) {
        const int64_t element = block * QUANT_BLOCK + part * 64;
        if (part && bytes <= 64) break; /* there are no groups any more */
        __m512i low = load_codes(codes + part * 64, bytes - part * 64), high = _mm512_setzero_si512();
        if (is_byte) {
            low = _mm512_xor_si512(low, lanes->flip);
        } else {
            high = _mm512_and_si512(_mm512_srli_epi16(low, 4), nibble);
            low = _mm512_and_si512(low, nibble);
        }
        if (decoder == DECODE_TABLE4) low = _mm512_shuffle_epi8(lanes->bytes, low), high = _mm512_shuffle_epi8(lanes->bytes, high);
        /* of a lane's pair of sums, those of these codes */
        __m512i zeros = _mm512_sub_epi32(_mm512_setzero_si512(), zeros_at(lanes, element));
        if (is_byte)
            zeros = part ? _mm512_slli_epi32(zeros, 16) : _mm512_and_si512(zeros, first_half);
        else
            zeros = _mm512_or_si512(_mm512_slli_epi32(zeros, 16), _mm512_and_si512(zeros, first_half));
        const __m512i x_groups = _mm512_add_epi32(lanes->x_groups, _mm512_set1_epi32(2 * part));
        const Vec scales = scales_at(lanes, element);
        UNROLL for (int m = 0; m < panel_rows; m++) {
            const char *row = x + m * INT8_RECORD;
            __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(row + INT8_SUMS), zeros);
            sum = _mm512_dpbusd_epi32(sum, low, _mm512_loadu_si512(row + part * 64));
            if (!is_byte) sum = _mm512_dpbusd_epi32(sum, high, _mm512_loadu_si512(row + 64));
            const __m512 x_scales = _mm512_broadcast_f32x4(_mm_loadu_ps((const float *)(row + INT8_SCALES)));
            const Vec both = _mm512_mul_ps(scales, _mm512_permutexvar_ps(x_groups, x_scales));
            acc[m] = vec_fma(acc[m], _mm512_cvtepi32_ps(sum), both);
        }
    }
}
