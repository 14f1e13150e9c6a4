/* The lossless code of bf16 matrices: encoding, decoding on any processor, and the functions that Python calls. */
#include <stdatomic.h>

#include "formats/quantized.h"

/* Bit i of a byte as byte i of a word, and back; little-endian, as everything that is packed. */
static const uint64_t EACH = 0x0101010101010101u;

static inline uint64_t spread_bits(uint8_t bits) {
    const uint64_t apart = bits * EACH & 0x8040201008040201u;
    return (apart + 0x7f * EACH) >> 7 & EACH;
}

static inline uint8_t gather_bits(uint64_t bytes) { return (uint8_t)((bytes & EACH) * 0x0102040810204080u >> 56); }

const uint8_t *planes_decode_portable(const char *row, const uint8_t *escapes, const uint8_t *end, const uint8_t *book, int64_t blocks,
                           char *out) {
    const char *signs = row + blocks * PLANES_INDEX_BYTES;
    for (int64_t block = 0; block < blocks; block++, row += PLANES_INDEX_BYTES, signs += PLANES_BLOCK, out += 2 * PLANES_BLOCK) {
        const uint8_t *planes = (const uint8_t *)row;
        uint8_t exponents[PLANES_BLOCK];
        for (int i = 0; i < 8; i++) {
            uint8_t indices[8];
            const uint64_t word = spread_bits(planes[i]) | spread_bits(planes[8 + i]) << 1 | spread_bits(planes[16 + i]) << 2;
            memcpy(indices, &word, sizeof word);
            for (int j = 0; j < 8; j++) exponents[8 * i + j] = book[indices[j]];
            for (unsigned escaped = planes[i] & planes[8 + i] & planes[16 + i]; escaped; escaped &= escaped - 1) {
                if (escapes >= end) return NULL;
                exponents[8 * i + __builtin_ctz(escaped)] = *escapes++;
            }
        }
        for (int p = 0; p < PLANES_BLOCK; p++) {
            const unsigned sign = (uint8_t)signs[p];
            store_u16(out + 2 * planes_element(p), (uint16_t)((sign & 0x80u) << 8 | (unsigned)exponents[p] << 7 | (sign & 0x7fu)));
        }
    }
    return escapes;
}

/* The best that the chosen instruction set and the processor allow. */
static PlanesDecode planes_decode(void) {
    const char *isa = current_isa()->name;
#if defined(MOE_HAVE_VBMI2)
    const int is_wide = strcmp(isa, "portable") && strcmp(isa, "avx2");
    if (is_wide && __builtin_cpu_supports("avx512vbmi2")) return planes_decode_vbmi2;
#endif
#if defined(MOE_HAVE_AVX2)
    if (strcmp(isa, "portable")) return planes_decode_avx2;
#endif
    (void)isa;
    return planes_decode_portable;
}

/* Adds to counts[e] the number of elements with exponent e. */
MOE_EXPORT void moe_planes_count(const char *weight, int64_t stride, int64_t rows, int64_t cols, int64_t *counts) {
    int64_t apart[4][256] = {{0}}; /* several counters: equal exponents in a row would wait for one another */
    for (int64_t n = 0; n < rows; n++, weight += stride)
        for (int64_t k = 0; k < cols; k++) apart[k & 3][load_u16(weight + 2 * k) >> 7 & 255]++;
    for (int e = 0; e < 256; e++) counts[e] += apart[0][e] + apart[1][e] + apart[2][e] + apart[3][e];
}

static int planes_encode_portable(const uint16_t *values, const uint8_t *book, char *indices, char *signs, uint8_t *escapes) {
    uint8_t index[PLANES_BLOCK], exponents[PLANES_BLOCK];
    int count = 0;
    for (int p = 0; p < PLANES_BLOCK; p++) {
        const unsigned value = values[planes_element(p)];
        signs[p] = (char)((value >> 8 & 0x80) | (value & 0x7f));
        exponents[p] = (uint8_t)(value >> 7);
    }
    for (int p = 0; p < PLANES_BLOCK; p++) {
        index[p] = 0;
        while (index[p] < PLANES_BOOK && book[index[p]] != exponents[p]) index[p]++;
        escapes[count] = exponents[p];
        count += index[p] == PLANES_BOOK;
    }
    for (int i = 0; i < 8; i++) {
        uint64_t word;
        memcpy(&word, index + 8 * i, sizeof word);
        for (int bit = 0; bit < 3; bit++) indices[8 * bit + i] = (char)gather_bits(word >> bit);
    }
    return count;
}

static PlanesEncode planes_encode(void) {
#if defined(MOE_HAVE_AVX2)
    if (strcmp(current_isa()->name, "portable")) return planes_encode_avx2;
#endif
    return planes_encode_portable;
}

/* Encodes a matrix. Rows of `coded` lie without gaps; starts[g] is the first escape of row g * PLANES_GROUP, and the last
 * start is the number of escapes, which is returned. `escapes` has room for all of them and PLANES_TAIL bytes more. */
MOE_EXPORT int64_t moe_planes_encode(const char *weight, int64_t stride, int64_t rows, int64_t cols, const uint8_t *book,
                                     char *coded, uint32_t *starts, uint8_t *escapes) {
    const PlanesEncode encode_block = planes_encode();
    const int64_t blocks = planes_blocks(cols);
    const uint16_t filler = (uint16_t)((book[0] < book[1] ? book[0] : book[1]) << 7); /* finite */
    int64_t count = 0;
    for (int64_t n = 0; n < rows; n++, weight += stride) {
        char *signs = coded + blocks * PLANES_INDEX_BYTES;
        if (n % PLANES_GROUP == 0) starts[n / PLANES_GROUP] = (uint32_t)count;
        for (int64_t first = 0; first < cols; first += PLANES_BLOCK, coded += PLANES_INDEX_BYTES, signs += PLANES_BLOCK) {
            const int64_t filled = cols - first < PLANES_BLOCK ? cols - first : PLANES_BLOCK;
            uint16_t values[PLANES_BLOCK];
            for (int k = (int)filled; k < PLANES_BLOCK; k++) values[k] = filler;
            memcpy(values, weight + 2 * first, (size_t)(2 * filled));
            count += encode_block(values, book, coded, signs, escapes + count);
        }
        coded = signs;
    }
    starts[planes_groups(rows)] = (uint32_t)count;
    memset(escapes + count, 0, PLANES_TAIL);
    return count;
}

void planes_begin(PlanesReader *reader, const PlanesMatrix *matrix, const char *coded, int64_t first_row) {
    *reader = (PlanesReader){.matrix = matrix, .decode = planes_decode(), .coded = coded, .row = first_row};
}

/* At the start of a group its escapes must begin where those of the group before ended. */
static int begin_row(PlanesReader *reader) {
    const PlanesMatrix *matrix = reader->matrix;
    if (reader->row % PLANES_GROUP) return 1;
    const uint32_t *bounds = matrix->starts + reader->row / PLANES_GROUP;
    if (reader->escapes != reader->end || bounds[0] > bounds[1] || bounds[1] > matrix->num_escapes) return 0;
    reader->escapes = matrix->escapes + bounds[0];
    reader->end = matrix->escapes + bounds[1];
    return 1;
}

/* Whether every row was read as far as its escapes say; if not, the code is damaged. */
static int end_rows(PlanesReader *reader, int64_t rows, const uint8_t *escapes) {
    reader->escapes = escapes;
    reader->coded += rows * planes_row_bytes(reader->matrix->cols);
    reader->row += rows;
    return escapes != NULL;
}

int planes_read(PlanesReader *reader, int64_t rows, char *out, int64_t out_stride) {
    const int64_t blocks = planes_blocks(reader->matrix->cols);
    for (; rows > 0; rows--, out += out_stride) {
        if (!begin_row(reader)) return 0;
        if (!end_rows(reader, 1, reader->decode(reader->coded, reader->escapes, reader->end, reader->matrix->book, blocks, out)))
            return 0;
    }
    return 1;
}

int planes_multiply(PlanesReader *reader, PlanesDot dot, int64_t rows, const char *panel, int panel_rows, float *out, int64_t ldo) {
    const PlanesMatrix *matrix = reader->matrix;
    for (int count; rows > 0; rows -= count, out += count) {
        count = rows > 1 && reader->row % 2 == 0 ? 2 : 1; /* of one group */
        if (!begin_row(reader)) return 0;
        if (!end_rows(reader, count, dot(reader->coded, count, reader->escapes, reader->end, matrix->book, matrix->cols, panel,
                                         panel_rows, out, ldo)))
            return 0;
    }
    return 1;
}

typedef struct {
    PlanesMatrix matrix;
    const char *coded;
    int64_t out_stride;
    char *out;
    atomic_int is_damaged;
} Decoding;

static void decode_group(void *context, int thread, int64_t first, int64_t end) {
    Decoding *call = context;
    PlanesReader reader;
    (void)thread;
    planes_begin(&reader, &call->matrix, call->coded + first * planes_row_bytes(call->matrix.cols), first);
    if (!planes_read(&reader, end - first, call->out + first * call->out_stride, call->out_stride) || reader.escapes != reader.end)
        atomic_store(&call->is_damaged, 1);
}

/* Decodes a matrix to rows of bf16, each with room for whole blocks. There are at most `num_escapes` escapes, with
 * PLANES_TAIL bytes after them. */
MOE_EXPORT int moe_planes_decode(const char *coded, const uint32_t *starts, const uint8_t *escapes, int64_t num_escapes,
                                 const uint8_t *book, int64_t rows, int64_t cols, char *out, int64_t out_stride,
                                 int share_threads) {
    if (starts[0]) return STATUS_DAMAGED;
    Decoding call = {.matrix = {CODE_PLANES, starts, escapes, book, num_escapes, cols}, .coded = coded, .out = out,
                     .out_stride = out_stride};
    pool_begin();
    pool_each(decode_group, &call, rows, PLANES_GROUP, share_threads);
    pool_end();
    return atomic_load(&call.is_damaged) ? STATUS_DAMAGED : STATUS_OK;
}
