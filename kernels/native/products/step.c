/* A step of a few tokens: its rows sorted by expert, the experts, and the weighted sums of what they give. */
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* Sorts rows by expert, each expert's in their order; 0 if there is no such expert. */
static int sort_rows(const int64_t *expert_of_row, int64_t num_rows, int64_t choices, int64_t num_experts, int64_t *counts,
                     int64_t *next, int64_t *token_ids, int64_t *rows) {
    for (int64_t r = 0; r < num_rows; r++) {
        if (expert_of_row[r] < 0 || expert_of_row[r] >= num_experts) return 0;
        counts[expert_of_row[r]]++;
    }
    for (int64_t e = 0, first = 0; e < num_experts; first += counts[e++]) next[e] = first;
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t place = next[expert_of_row[r]]++;
        token_ids[place] = r / choices;
        rows[place] = r;
    }
    return 1;
}

/* The experts of a few tokens and the weighted sums of what they give: row r, the choice r % choices of token
 * r / choices, goes through experts[expert_of_row[r]]. Gate weights and out lie without gaps. */
MOE_EXPORT int moe_expert_step(const Expert *experts, int64_t num_experts, const int64_t *expert_of_row, const char *x,
                               int64_t x_stride, int64_t num_tokens, int64_t choices, const char *gates, char *out,
                               int64_t dim_in, int64_t dim_hidden, int64_t dim_out, int x_dtype, int weight_dtype,
                               int bias_dtype, int gates_dtype, int activation, const float *formula, int share_threads) {
    const int64_t num_rows = num_tokens * choices, row_bytes = dim_out * dtype_bytes(x_dtype);
    const int64_t words = 2 * (num_experts + num_rows);
    int64_t *counts = malloc((size_t)(words * (int64_t)sizeof *counts + num_rows * row_bytes));
    if (!counts) return STATUS_NO_MEMORY;
    memset(counts, 0, (size_t)num_experts * sizeof *counts);
    int64_t *next = counts + num_experts, *token_ids = next + num_experts, *rows = token_ids + num_rows;
    char *results = (char *)(counts + words);
    int status = STATUS_BAD_ROW;
    if (sort_rows(expert_of_row, num_rows, choices, num_experts, counts, next, token_ids, rows))
        status = moe_expert_ffn(experts, num_experts, counts, x, x_stride, num_tokens, token_ids, rows, results, row_bytes,
                                num_rows, dim_in, dim_hidden, dim_out, x_dtype, weight_dtype, bias_dtype, activation, formula, 0,
                                share_threads);
    if (status == STATUS_OK)
        status = moe_combine_slots(results, gates, out, num_tokens, choices, dim_out, x_dtype, gates_dtype, share_threads);
    free(counts);
    return status;
}
