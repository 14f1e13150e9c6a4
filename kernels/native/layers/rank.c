/* Which experts a gate prefers for one hidden state: its logits, and the best of them in order.
 *
 * A look-ahead asks this of a later gate in every layer. In torch that is a product, a conversion and a sort of a few
 * dozen numbers: four calls, each of which takes longer than the arithmetic.
 */
#include <stddef.h>
#include <string.h>

#include "kernels.h"

enum { LANES = 16 };

/* One gate as decode_step/gate_ranking.py writes it: weight [num_experts, dim] with unit stride, bias [num_experts] or NULL, both of fp32 or bf16. */
typedef struct {
    const char *weight;
    int64_t stride; /* bytes between rows */
    const float *bias;
    int64_t num_experts, dim, num_ranks, weight_dtype, hidden_dtype;
} Gate;

static inline float widened(const char *values, int64_t i, int dtype) {
    if (dtype == DTYPE_F32) {
        float value;
        memcpy(&value, values + 4 * i, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, values + 2 * i, 2);
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Sixteen sums side by side, which the compiler turns into vectors. */
static inline float dot(const float *x, const char *row, int64_t dim, int dtype) {
    float lanes[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * widened(row, i + lane, dtype);
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    for (; i < dim; i++) sum += x[i] * widened(row, i, dtype);
    return sum;
}

MOE_CLONES static void compute_logits(const Gate *gate, const char *hidden, float *x, float *logits) {
    if (gate->hidden_dtype == DTYPE_F32)
        for (int64_t i = 0; i < gate->dim; i++) x[i] = widened(hidden, i, DTYPE_F32);
    else
        for (int64_t i = 0; i < gate->dim; i++) x[i] = widened(hidden, i, DTYPE_BF16);
    for (int64_t e = 0; e < gate->num_experts; e++) {
        const char *row = gate->weight + e * gate->stride;
        logits[e] = gate->weight_dtype == DTYPE_F32 ? dot(x, row, gate->dim, DTYPE_F32) : dot(x, row, gate->dim, DTYPE_BF16);
        if (gate->bias) logits[e] += gate->bias[e];
    }
}

/* Writes the num_ranks experts of largest logit, the largest first, of equals the first. Returns STATUS_NO_MEMORY where the
 * gate is wider than any that is known. */
MOE_EXPORT int moe_rank_experts(const char *hidden, const void *gate_record, int64_t *ranked) {
    const Gate *gate = gate_record;
    float x[MOST_DIMS], logits[MOST_EXPERTS];
    char taken[MOST_EXPERTS] = {0};
    if (gate->dim > MOST_DIMS || gate->num_experts > MOST_EXPERTS) return STATUS_NO_MEMORY;
    compute_logits(gate, hidden, x, logits);
    for (int64_t rank = 0; rank < gate->num_ranks; rank++) {
        int64_t best = -1;
        for (int64_t e = 0; e < gate->num_experts; e++)
            if (!taken[e] && (best < 0 || logits[e] > logits[best])) best = e;
        taken[best] = 1;
        ranked[rank] = best;
    }
    return STATUS_OK;
}
