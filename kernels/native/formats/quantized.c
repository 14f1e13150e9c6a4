/* Decodes quantised matrices, and reorders their numbers as products read them; kernels/quantized/storage_order.py says how
 * they lie in files. */
#include "kernels.h"

enum { ROWS_AT_ONCE = 16 };

typedef struct {
    Matrix matrix;
    int64_t num_cols;
    char *out;
    int64_t out_stride;
    int dtype;
} Dequantizing;

static void dequantize_rows(void *context, int thread, int64_t first, int64_t end) {
    Dequantizing *call = context;
    Matrix rows = call->matrix;
    (void)thread;
    rows.data += first * rows.stride;
    rows.first_row += first;
    current_isa()->dequantize(rows, end - first, call->num_cols, call->out + first * call->out_stride, call->out_stride, call->dtype);
}

/* The values of a quantised matrix, rounded to fp32 and then to `dtype`. */
MOE_EXPORT void moe_dequantize(const Matrix *matrix, int64_t num_rows, int64_t num_cols, char *out, int64_t out_stride, int dtype,
                               int share_threads) {
    Dequantizing call = {.matrix = *matrix, .num_cols = num_cols, .out = out, .out_stride = out_stride, .dtype = dtype};
    pool_begin();
    pool_each(dequantize_rows, &call, num_rows, ROWS_AT_ONCE, share_threads);
    pool_end();
}

/* ---- order ---- */

enum { ORDER_TRANSPOSED, ORDER_AWQ_CODES, ORDER_ZEROS_DOWN, ORDER_ZEROS_ACROSS, ORDER_AWQ_ZEROS, ORDER_INT8 };
enum { TILE = 32, WORDS = 16, NIBBLES = 8, WORD_BITS = 32 };

static const int AWQ_COLUMN[NIBBLES] = {0, 2, 4, 6, 1, 3, 5, 7}; /* of each nibble of a word */

/* Tile by tile, so that what is read and what is written both stay in the first-level cache. */
INLINE void transpose(size_t size, const char *from, char *to, int64_t rows, int64_t cols) {
    for (int64_t row = 0; row < rows; row += TILE)
        for (int64_t col = 0; col < cols; col += TILE)
            for (int64_t r = row; r < rows && r < row + TILE; r++)
                for (int64_t c = col; c < cols && c < col + TILE; c++)
                    memcpy(to + (r * cols + c) * (int64_t)size, from + (c * rows + r) * (int64_t)size, size);
}

/* Of eight vectors of words: nibble i of word j becomes nibble j of word i. */
MOE_CLONES static void transpose_nibbles(uint32_t x[NIBBLES][WORDS]) {
    static const uint32_t masks[] = {0x0000ffff, 0x00ff00ff, 0x0f0f0f0f};
    for (int stage = 0; stage < 3; stage++) {
        const int apart = 4 >> stage, shift = 4 * apart;
        for (int i = 0; i < NIBBLES; i++) {
            if (i & apart) continue;
            uint32_t *restrict low = x[i], *restrict high = x[i + apart];
            for (int lane = 0; lane < WORDS; lane++) {
                const uint32_t other = ((low[lane] >> shift) ^ high[lane]) & masks[stage];
                high[lane] ^= other;
                low[lane] ^= other << shift;
            }
        }
    }
}

static void order_awq_codes(const char *from, char *to, int64_t rows, int64_t cols) {
    const int64_t num_words = rows / NIBBLES, row_bytes = cols / 2;
    uint32_t x[NIBBLES][WORDS] = {{0}}, tile[NIBBLES * WORDS][WORDS]; /* rows by words of eight columns: whole lines */
    for (int64_t first = 0; first < num_words; first += WORDS) {
        const int64_t count = min64(WORDS, num_words - first);
        for (int64_t col = 0; col < cols; col += NIBBLES * WORDS) {
            const int64_t width = min64(WORDS, (cols - col) / NIBBLES);
            for (int64_t word = 0; word < width; word++) {
                const char *begin = from + 4 * ((col + NIBBLES * word) * num_words + first);
                for (int i = 0; i < NIBBLES; i++) memcpy(x[i], begin + 4 * i * num_words, 4 * (size_t)count);
                transpose_nibbles(x);
                for (int i = 0; i < NIBBLES; i++)
                    for (int64_t lane = 0; lane < count; lane++) tile[NIBBLES * lane + AWQ_COLUMN[i]][word] = x[i][lane];
            }
            for (int64_t row = 0; row < NIBBLES * count; row++)
                memcpy(to + (NIBBLES * first + row) * row_bytes + col / 2, tile[row], 4 * (size_t)width);
        }
    }
}

static void order_zeros(const OrderStep *step, const char *from, unsigned char *to) {
    const int bits = (int)step->bits, in_word = WORD_BITS / bits, is_down = step->kind == ORDER_ZEROS_DOWN;
    const int64_t num_words = parts_of(step->rows, in_word);
    const uint32_t mask = (1u << bits) - 1, ones = !step->adds_one ? 0 : bits == 4 ? 0x11111111 : 0x01010101;
    for (int64_t number = 0; number < num_words; number++)
        for (int64_t col = 0; col < step->cols; col++) {
            const int64_t place = is_down ? number * step->cols + col : col * num_words + number;
            const uint32_t word = bits_of(load_f32(from + 4 * place)) + ones;
            for (int i = 0; i < in_word; i++) {
                const int64_t row = in_word * number + (step->kind == ORDER_AWQ_ZEROS ? AWQ_COLUMN[i] : i);
                if (row < step->rows) to[row * step->cols + col] = (unsigned char)(word >> (bits * i) & mask);
            }
        }
}

static int64_t own_bytes(const OrderStep *step) { return step->rows * step->cols * step->bits / 8; }

int64_t order_scratch_bytes(const OrderStep *steps, int64_t count) {
    int64_t most = 0;
    for (const OrderStep *step = steps; step < steps + count; step++) {
        if (step->kind == ORDER_TRANSPOSED || step->kind == ORDER_AWQ_CODES) most = max64(most, own_bytes(step));
    }
    return most;
}

MOE_EXPORT void moe_put_in_order(const OrderStep *steps, int64_t count, char *slot, char *scratch) {
    for (const OrderStep *step = steps; step < steps + count; step++) {
        char *from = slot + step->from, *to = slot + step->to;
        if (step->kind == ORDER_INT8) {
            for (int64_t i = 0; i < own_bytes(step); i++) to[i] = (char)(to[i] ^ 0x80);
        } else if (step->kind == ORDER_TRANSPOSED || step->kind == ORDER_AWQ_CODES) {
            memcpy(scratch, from, (size_t)own_bytes(step));
            if (step->kind == ORDER_AWQ_CODES)
                order_awq_codes(scratch, to, step->rows, step->cols);
            else
                step->bits == 16 ? transpose(2, scratch, to, step->rows, step->cols) : transpose(4, scratch, to, step->rows, step->cols);
        } else {
            order_zeros(step, from, (unsigned char *)to);
        }
    }
}
