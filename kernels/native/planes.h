/* The lossless code of bf16 matrices: sign and mantissa as they are, exponents as indices into a short code book.
 *
 * A row of `cols` elements is written in blocks of 64, the last one filled up with zeros. First come the indices of all
 * blocks, three words of 64 bits each: bit p of word i is bit i of the index of position p. Then come the bytes of sign
 * and mantissa, 64 a block. Index 7 says that the exponent is none of the book's seven; these exponents, in the order of
 * positions, are the row's escapes.
 *
 * Positions are ordered so that interleaving bytes within the 16-byte lanes of vectors gives elements in their order:
 * position p of a block is element p % 16 % 8 + p / 16 * 8, and 32 more in the upper half of a lane.
 */
#ifndef MOE_RUNTIME_PLANES_H
#define MOE_RUNTIME_PLANES_H

#include <stdint.h>

enum { PLANES_BLOCK = 64, PLANES_INDEX_BYTES = 24, PLANES_BOOK = 7 };

/* Bytes behind the last escape that may be read. */
enum { PLANES_TAIL = 64 };

static inline int64_t planes_blocks(int64_t cols) { return (cols + PLANES_BLOCK - 1) / PLANES_BLOCK; }

static inline int planes_element(int position) {
    const int lane = position >> 4, place = position & 15;
    return lane * 8 + (place & 7) + (place & 8 ? 32 : 0);
}

/* Decodes the blocks of one row. `escapes` to `end` are the row's own, and PLANES_TAIL more bytes may be read. Every block
 * is written whole. Returns whether the row has exactly as many escapes. */
typedef int (*PlanesDecode)(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                            char *out);

int planes_decode_portable(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                           char *out);
#if defined(MOE_HAVE_AVX2)
int planes_decode_avx2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                       char *out);
#endif
#if defined(MOE_HAVE_VBMI2)
int planes_decode_vbmi2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                        char *out);
#endif

/* The one that calls use: as good as the chosen instruction set and the processor allow. */
PlanesDecode planes_decode(void);

#endif
