/* Root-mean-square normalisation of rows, as models write it in several operations, in one pass over each row.
 *
 * The calling thread does few rows alone: in a step of few tokens a row is a few kilobytes. One thread computes a whole
 * row, so the number of threads changes no bit.
 */
#include <math.h>
#include <stdatomic.h>

#include "convert.h"
#include "kernels.h"
#include "pool.h"

enum { PARTIAL_SUMS = 64, ROWS_ALONE = 64, ROWS_AT_ONCE = 16 };

/* out = round(x * rsqrt(mean(x^2) + eps)) * weight, where round is to the data type; or with one rounding at the end, and
 * there perhaps with one added to the weight. Sums run in a fixed number of partial sums, so that every instruction set adds
 * in the same order. */
#define DEFINE_NORM(NAME, LOAD, STORE, ROUND, BYTES)                                                             \
    MOE_CLONES static void norm_##NAME(const char *x, const char *weight, char *out, int64_t count, float eps, int form) { \
        float sums[PARTIAL_SUMS] = {0}, total = 0;                                                               \
        int64_t k = 0;                                                                                           \
        for (; k + PARTIAL_SUMS <= count; k += PARTIAL_SUMS)                                                     \
            for (int i = 0; i < PARTIAL_SUMS; i++) {                                                             \
                const float value = LOAD(x + (k + i) * BYTES);                                                   \
                sums[i] += value * value;                                                                        \
            }                                                                                                    \
        for (; k < count; k++) sums[k % PARTIAL_SUMS] += LOAD(x + k * BYTES) * LOAD(x + k * BYTES);              \
        for (int i = 0; i < PARTIAL_SUMS; i++) total += sums[i];                                                 \
        const float scale = 1.0f / sqrtf(total / (float)count + eps);                                            \
        if (form == NORM_ROUNDED) {                                                                              \
            for (k = 0; k < count; k++)                                                                          \
                STORE(out + k * BYTES, LOAD(weight + k * BYTES) * ROUND(LOAD(x + k * BYTES) * scale));           \
            return;                                                                                              \
        }                                                                                                        \
        const float more = form == NORM_PLUS_ONE ? 1 : 0;                                                        \
        for (k = 0; k < count; k++)                                                                              \
            STORE(out + k * BYTES, LOAD(x + k * BYTES) * scale * (more + LOAD(weight + k * BYTES)));             \
    }

DEFINE_NORM(f32, load_f32, store_f32, round_f32, 4)
DEFINE_NORM(bf16, load_bf16, store_bf16, round_bf16, 2)
DEFINE_NORM(f16, load_f16, store_f16, round_f16, 2)

typedef void (*Norm)(const char *, const char *, char *, int64_t, float, int);
static const Norm norms[] = {norm_f32, norm_bf16, norm_f16};

void moe_norm_rows(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, char *out, int64_t count,
                   float eps, int dtype, int form) {
    const int64_t row_bytes = count * dtype_bytes(dtype);
    for (int64_t r = 0; r < num_rows; r++) norms[dtype](x + r * x_stride, weight, out + r * row_bytes, count, eps, form);
}

typedef struct {
    const char *x, *weight;
    char *out;
    int64_t x_stride, num_rows, count;
    float eps;
    int dtype, form;
    atomic_llong next;
} Norms;

static void norm_some(void *context) {
    Norms *call = context;
    const int64_t row_bytes = call->count * dtype_bytes(call->dtype);
    for (;;) {
        const int64_t first = atomic_fetch_add(&call->next, ROWS_AT_ONCE), left = call->num_rows - first;
        if (left <= 0) return;
        moe_norm_rows(call->x + first * call->x_stride, call->x_stride, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE,
                      call->weight, call->out + first * row_bytes, call->count, call->eps, call->dtype, call->form);
    }
}

MOE_EXPORT void moe_rms_norm(const char *x, int64_t x_stride, int64_t num_rows, const char *weight, char *out, int64_t count,
                             float eps, int dtype, int form, int share_threads) {
    if (num_rows <= ROWS_ALONE) {
        moe_norm_rows(x, x_stride, num_rows, weight, out, count, eps, dtype, form);
        return;
    }
    Norms call = {.x = x, .weight = weight, .out = out, .x_stride = x_stride, .num_rows = num_rows, .count = count,
                  .eps = eps, .dtype = dtype, .form = form};
    pool_begin();
    pool_run(norm_some, &call, share_threads);
    pool_end();
}
