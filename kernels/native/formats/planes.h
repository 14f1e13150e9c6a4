/* The lossless code of bf16 matrices: sign and mantissa as they are, exponents as indices into a short code book.
 *
 * A row of `cols` elements is coded in blocks of 64, the last one filled up with a number of the book. First come the
 * indices of all blocks, three 64-bit words each: bit p of word i is bit i of the index of position p. Then come the bytes
 * of sign and mantissa, 64 a block. Index 7 is an escape: the exponent is not one of the book's seven. Escaped exponents lie
 * in the order of rows and positions; where those of every 32nd row begin is stored, so reading can begin there.
 *
 * Positions are ordered so that interleaving bytes within the 16-byte lanes of vectors gives elements in their order:
 * position p of a block is element p % 16 % 8 + p / 16 * 8, and 32 more in the upper half of a lane. */
#pragma once

#include "convert.h"

enum { PLANES_BLOCK = 64, PLANES_INDEX_BYTES = 24, PLANES_BOOK = 7, PLANES_GROUP = 32 };

/* How far ahead a matrix is fetched, and bytes after the last escape that may be read. */
enum { PLANES_AHEAD = 8 << 10, PLANES_TAIL = 64 };

static inline int64_t planes_blocks(int64_t cols) { return parts_of(cols, PLANES_BLOCK); }

static inline int planes_element(int position) {
    const int lane = position >> 4, place = position & 15;
    return lane * 8 + (place & 7) + (place & 8 ? 32 : 0);
}

static inline int64_t planes_groups(int64_t rows) { return parts_of(rows, PLANES_GROUP); }

static inline int64_t planes_row_bytes(int64_t cols) { return planes_blocks(cols) * (PLANES_INDEX_BYTES + PLANES_BLOCK); }

/* Decodes the blocks of one row, each written whole. Its escapes lie between `escapes` and `end`; PLANES_TAIL bytes after
 * them may be read. Returns where they end, or NULL if that is beyond `end`. */
typedef const uint8_t *(*PlanesDecode)(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                            char *out);

const uint8_t *planes_decode_portable(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book,
                                      int64_t blocks, char *out);
const uint8_t *planes_decode_avx2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                                  char *out);
const uint8_t *planes_decode_vbmi2(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                                   char *out);

/* Decodes one row or two as above and multiplies them by the rows of a panel of bf16 pairs: out[m * ldo + row]. */
typedef const uint8_t *(*PlanesDot)(const char *row, int rows, const uint8_t *escapes, const uint8_t *end, const uint8_t *book,
                                    int64_t cols, const char *panel, int panel_rows, float *out, int64_t ldo);

/* Encodes one block and returns how many escapes it has; there is room for 64. */
typedef int (*PlanesEncode)(const uint16_t *values, const uint8_t *book, char *indices, char *signs, uint8_t *escapes);

int planes_encode_avx2(const uint16_t *values, const uint8_t *book, char *indices, char *signs, uint8_t *escapes);

/* A matrix in the code, as kernels/lossless writes it. */
typedef struct {
    int64_t codes; /* CODE_PLANES: it stands where other matrices have a Quantized */
    const uint32_t *starts;
    const uint8_t *escapes, *book;
    int64_t num_escapes, cols;
} PlanesMatrix;

/* Reads rows in order, beginning at a multiple of PLANES_GROUP. */
typedef struct {
    const PlanesMatrix *matrix;
    PlanesDecode decode;
    const char *coded;
    int64_t row;
    const uint8_t *escapes, *end;
} PlanesReader;

/* `coded` is where row `first_row` lies. */
void planes_begin(PlanesReader *reader, const PlanesMatrix *matrix, const char *coded, int64_t first_row);

/* Decodes the next rows, into rows with room for whole blocks; returns whether they are sound. */
int planes_read(PlanesReader *reader, int64_t rows, char *out, int64_t out_stride);

/* The products of the next rows with the rows of a panel: out[m * ldo + row]. */
int planes_multiply(PlanesReader *reader, PlanesDot dot, int64_t rows, const char *panel, int panel_rows, float *out, int64_t ldo);
