/* The work around the products of experts with many rows: gathering tokens' rows, the activation, its gradient, and the
 * weighted sum of rows into tokens.
 *
 * One thread computes a whole row, or in the sum a range of columns, so the number of threads changes no bit. */
#include <stdatomic.h>

#include "kernels.h"

enum { CHUNK = 512, SUM_LANES = 16, ROWS_AT_ONCE = 4, ROWS_GATHERED = 16, FETCHED_BYTES = 1024, CACHE_LINE = 64, MIN_COLUMNS = 256 };

/* ActivationSpec of activation.py, without the function; a bound of infinity is none. */
typedef struct {
    float alpha, limit, up_offset, gate_softcap, up_softcap, clamps_after;
} Formula;

/* ---- the formula, one element at a time; `function` and `plain` are constants wherever it is used ---- */

/* Small arguments by the series, up to where the next term is below a rounding: 1 - 2 / (...) would cancel. */
INLINE float tanh_f32(float x) {
    const float square = x * x;
    const float series = x + x * square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315 + square * (62.0f / 2835))));
    return square < 0.04f ? series : 1.0f - 2.0f / (exp_f32(2.0f * x) + 1.0f);
}
INLINE float min_f32(float x, float limit) { return x > limit ? limit : x; }
INLINE float clamp_f32(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }
INLINE float softcap(float x, float cap) { return cap == INFINITY ? x : cap * tanh_f32(x / cap); }

INLINE float softcap_slope(float x, float cap) {
    const float tanh = cap == INFINITY ? 0.0f : tanh_f32(x / cap);
    return 1.0f - tanh * tanh;
}

INLINE float function_of(int function, int plain, const Formula *f, float x) {
    if (function != ACT_SILU || plain) return activated(function, x);
    return softcap(x, f->gate_softcap) / (1.0f + exp_f32(-f->alpha * x));
}

INLINE float slope_of(int function, int plain, const Formula *f, float x) {
    switch (function) {
        case ACT_SILU: {
            const float alpha = plain ? 1.0f : f->alpha, sigmoid = 1.0f / (1.0f + exp_f32(-alpha * x));
            const float capped = plain ? x : softcap(x, f->gate_softcap);
            return sigmoid * ((plain ? 1.0f : softcap_slope(x, f->gate_softcap)) + alpha * capped * (1.0f - sigmoid));
        }
        case ACT_GELU: {
            const float density = 0.39894228040143268f * exp_f32(-0.5f * x * x);
            return 0.5f * (1.0f + erff(x * 0.70710678118654752f)) + x * density;
        }
        case ACT_GELU_TANH: {
            const float tanh = tanh_f32(0.79788456080286536f * (x + 0.044715f * x * x * x));
            return 0.5f * (1.0f + tanh) + 0.5f * x * (1.0f - tanh * tanh) * 0.79788456080286536f * (1.0f + 0.134145f * x * x);
        }
        case ACT_RELU: return x > 0.0f ? 1.0f : 0.0f;
        default: return x > 0.0f ? 2.0f * x : 0.0f;
    }
}

INLINE float bounded_function(int function, int plain, const Formula *f, float gate) {
    if (plain) return function_of(function, 1, f, gate);
    const int after = f->clamps_after != 0.0f;
    const float value = function_of(function, 0, f, after ? gate : min_f32(gate, f->limit));
    return after ? min_f32(value, f->limit) : value;
}

INLINE float factor_of(int plain, const Formula *f, float up) {
    return plain ? up : softcap(clamp_f32(up, f->limit), f->up_softcap) + f->up_offset;
}

/* gate[i] becomes the hidden value; without a gate up[i] does. */
INLINE void hidden_values(int function, int plain, const Formula *f, int has_gate, float *restrict gate,
                          const float *restrict up, int64_t count) {
    if (has_gate)
        for (int64_t i = 0; i < count; i++) gate[i] = bounded_function(function, plain, f, gate[i]) * factor_of(plain, f, up[i]);
    else
        for (int64_t i = 0; i < count; i++) gate[i] = function_of(function, plain, f, up[i]);
}

/* From gate, up and the gradient of the hidden value to the gradients of both and the hidden value, in place. */
INLINE void step_back(int function, int plain, const Formula *f, int has_gate, float weight, float *restrict gate,
                      float *restrict up, float *restrict grad, float *restrict products, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float dh = grad[i];
        if (!has_gate) {
            const float hidden = function_of(function, plain, f, up[i]);
            products[i] = dh * hidden;
            up[i] = weight * dh * slope_of(function, plain, f, up[i]);
            grad[i] = weight * hidden;
            continue;
        }
        const float g = gate[i], u = up[i];
        const int after = !plain && f->clamps_after != 0.0f;
        const float low = plain || after ? g : min_f32(g, f->limit);
        const float value = function_of(function, plain, f, low), factor = factor_of(plain, f, u);
        const float kept = after ? min_f32(value, f->limit) : value;
        float gate_slope = slope_of(function, plain, f, low), up_slope = 1.0f;
        if (!plain) {
            gate_slope = (after ? value : g) > f->limit ? 0.0f : gate_slope;
            up_slope = softcap_slope(clamp_f32(u, f->limit), f->up_softcap);
            up_slope = fabsf(u) > f->limit ? 0.0f : up_slope;
        }
        products[i] = dh * kept * factor;
        gate[i] = weight * dh * factor * gate_slope;
        up[i] = weight * dh * kept * up_slope;
        grad[i] = weight * kept * factor;
    }
}

/* call(function, plain, has_gate), with constants. */
#define BY_FORM(plain, has_gate, call, function)                                    \
    if (plain)                                                                      \
        has_gate ? call(function, 1, 1) : call(function, 1, 0);                     \
    else                                                                            \
        has_gate ? call(function, 0, 1) : call(function, 0, 0)

MOE_CLONES static void forward(int function, int plain, const Formula *f, int has_gate, float *gate, const float *up, int64_t count) {
#define FORWARD(function, plain, has_gate) hidden_values(function, plain, f, has_gate, gate, up, count)
#define FORWARD_BY_FORM(function) BY_FORM(plain, has_gate, FORWARD, function)
    BY_ACTIVATION(function, FORWARD_BY_FORM)
}

MOE_CLONES static void backward(int function, int plain, const Formula *f, int has_gate, float weight, float *gate, float *up,
                                float *grad, float *products, int64_t count) {
#define BACKWARD(function, plain, has_gate) step_back(function, plain, f, has_gate, weight, gate, up, grad, products, count)
#define BACKWARD_BY_FORM(function) BY_FORM(plain, has_gate, BACKWARD, function)
    BY_ACTIVATION(function, BACKWARD_BY_FORM)
}

void moe_hidden_values(int function, const float *formula, int has_gate, float *gate, const float *up, int64_t count) {
    forward(function, 0, (const Formula *)formula, has_gate, gate, up, count);
}

/* ---- rows of numbers of any type; `step`, 1 or 2, is the distance of neighbours in elements ---- */

INLINE void load_row_as(int dtype, const char *src, int64_t step, float *restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = load_as(dtype, src, i * step);
}

INLINE void store_row_as(int dtype, char *dst, int64_t step, const float *restrict values, int64_t count) {
    for (int64_t i = 0; i < count; i++) store_as(dtype, dst, i * step, values[i]);
}

MOE_CLONES static void load_row(int dtype, const char *src, int64_t step, float *out, int64_t count) {
#define LOAD_ROW(type) step == 1 ? load_row_as(type, src, 1, out, count) : load_row_as(type, src, 2, out, count)
    BY_DTYPE(dtype, LOAD_ROW)
}

MOE_CLONES static void store_row(int dtype, char *dst, int64_t step, const float *values, int64_t count) {
#define STORE_ROW(type) step == 1 ? store_row_as(type, dst, 1, values, count) : store_row_as(type, dst, 2, values, count)
    BY_DTYPE(dtype, STORE_ROW)
}

INLINE void add_row_as(int dtype, float *restrict sums, const char *src, float weight, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] += weight * load_as(dtype, src, i);
}

MOE_CLONES static void add_row(int dtype, float *sums, const char *src, float weight, int64_t count) {
#define ADD_ROW(type) add_row_as(type, sums, src, weight, count)
    BY_DTYPE(dtype, ADD_ROW)
}

/* ---- the activation ---- */

typedef struct {
    const char *z; /* [rows, width]: gate and up as they lie */
    int64_t z_stride, num_rows, dim_hidden;
    int has_gate, is_concatenated, z_dtype, dtype, function, plain;
    const Formula *formula;
    char *kept; /* forward: receives z as kept_dtype, without gaps; or NULL */
    int kept_dtype;
    char *hidden; /* [rows, dim_hidden] of dtype; the backward pass gets the gradient here */
    char *grad_z; /* [rows, width] of dtype, without gaps; NULL in the forward pass */
    const float *weights; /* [rows] or NULL for ones */
    float *grad_weights; /* [rows] */
} Gate;

static void gate_row(const Gate *call, int64_t row) {
    const int64_t z_bytes = dtype_bytes(call->z_dtype), bytes = dtype_bytes(call->dtype);
    const int64_t kept_bytes = dtype_bytes(call->kept_dtype), width = call->dim_hidden * (call->has_gate ? 2 : 1);
    const int64_t step = call->has_gate && !call->is_concatenated ? 2 : 1;
    const int64_t up_first = !call->has_gate ? 0 : call->is_concatenated ? call->dim_hidden : 1;
    const char *z = call->z + row * call->z_stride;
    char *hidden = call->hidden + row * call->dim_hidden * bytes, *grad_z = call->grad_z, *kept = call->kept;
    if (grad_z) grad_z += row * width * bytes;
    if (kept) kept += row * width * kept_bytes;
    float gate[CHUNK], up[CHUNK], grad[CHUNK], products[CHUNK] = {0}, sums[SUM_LANES] = {0};
    for (int64_t first = 0; first < call->dim_hidden; first += CHUNK) {
        const int64_t left = call->dim_hidden - first, count = left < CHUNK ? left : CHUNK;
        const int64_t gate_at = first * step, up_at = up_first + first * step;
        load_row(call->z_dtype, z + up_at * z_bytes, step, up, count);
        if (call->has_gate) load_row(call->z_dtype, z + gate_at * z_bytes, step, gate, count);
        if (kept) store_row(call->kept_dtype, kept + up_at * kept_bytes, step, up, count);
        if (kept && call->has_gate) store_row(call->kept_dtype, kept + gate_at * kept_bytes, step, gate, count);
        if (!grad_z) {
            forward(call->function, call->plain, call->formula, call->has_gate, gate, up, count);
            store_row(call->dtype, hidden + first * bytes, 1, gate, count);
            continue;
        }
        load_row(call->dtype, hidden + first * bytes, 1, grad, count);
        backward(call->function, call->plain, call->formula, call->has_gate, call->weights ? call->weights[row] : 1.0f, gate, up, grad,
                 products, count);
        store_row(call->dtype, hidden + first * bytes, 1, grad, count);
        store_row(call->dtype, grad_z + up_at * bytes, step, up, count);
        if (call->has_gate) store_row(call->dtype, grad_z + gate_at * bytes, step, gate, count);
        for (int64_t i = count; i < CHUNK; i++) products[i] = 0.0f;
        for (int64_t i = 0; i < CHUNK; i += SUM_LANES)
            for (int lane = 0; lane < SUM_LANES; lane++) sums[lane] += products[i + lane];
    }
    if (!grad_z) return;
    float total = 0.0f;
    for (int lane = 0; lane < SUM_LANES; lane++) total += sums[lane];
    call->grad_weights[row] = total;
}

static void gate_rows(void *context, int thread, int64_t first, int64_t end) {
    (void)thread;
    for (int64_t row = first; row < end; row++) gate_row(context, row);
}

/* hidden = activation(z), and kept = z if not NULL. With grad_z the gradient: hidden holds the gradient of the hidden values
 * for a gate weight of one; grad_z becomes the gradient of z and hidden the hidden values, both times the gate weight, and
 * grad_weights the gradient of the gate weight. grad_z may be z if both have one type. */
MOE_EXPORT void moe_gate(const char *z, int64_t z_stride, int64_t num_rows, int64_t dim_hidden, int has_gate,
                         int is_concatenated, int z_dtype, int dtype, int function, int plain, const float *formula,
                         char *kept, int kept_dtype, char *hidden, char *grad_z, const float *weights, float *grad_weights,
                         int share_threads) {
    Gate call = {.z = z, .z_stride = z_stride, .num_rows = num_rows, .dim_hidden = dim_hidden, .has_gate = has_gate,
                 .is_concatenated = is_concatenated, .z_dtype = z_dtype, .dtype = dtype, .function = function,
                 .plain = plain != 0, .formula = (const Formula *)formula, .kept = kept, .kept_dtype = kept_dtype,
                 .hidden = hidden, .grad_z = grad_z, .weights = weights, .grad_weights = grad_weights};
    pool_begin();
    pool_each(gate_rows, &call, num_rows, ROWS_AT_ONCE, share_threads);
    pool_end();
}

/* ---- rows of tokens, side by side ---- */

typedef struct {
    const char *source;
    int64_t stride, dim, num_rows;
    const int64_t *tokens;
    char *out;
    int dtype, out_dtype;
} Gather;

/* Rows lie anywhere, so the processor does not find the next one by itself. The rest of a long row it does. */
static void fetch_row(const char *row, int64_t bytes) {
    for (int64_t b = 0; b < bytes && b < FETCHED_BYTES; b += CACHE_LINE) __builtin_prefetch(row + b, 0, 3);
}

static void gather_rows(void *context, int thread, int64_t first, int64_t end) {
    Gather *call = context;
    const int64_t out_bytes = call->dim * dtype_bytes(call->out_dtype), source_bytes = call->dim * dtype_bytes(call->dtype);
    (void)thread;
    for (int64_t row = first; row < end; row++) {
        const char *source = call->source + call->tokens[row] * call->stride;
        if (row + 1 < call->num_rows) fetch_row(call->source + call->tokens[row + 1] * call->stride, source_bytes);
        char *out = call->out + row * out_bytes;
        if (call->dtype == call->out_dtype)
            memcpy(out, source, (size_t)out_bytes);
        else
            load_row(call->dtype, source, 1, (float *)out, call->dim);
    }
}

/* out[r] = source[tokens[r]] without gaps; out has the type of source or is fp32. The caller has checked the tokens. */
MOE_EXPORT void moe_gather_rows(const char *source, int64_t stride, int64_t dim, int dtype, const int64_t *tokens,
                                int64_t num_rows, char *out, int out_dtype, int share_threads) {
    Gather call = {.source = source, .stride = stride, .dim = dim, .num_rows = num_rows, .tokens = tokens, .out = out,
                   .dtype = dtype, .out_dtype = out_dtype};
    pool_begin();
    pool_each(gather_rows, &call, num_rows, ROWS_GATHERED, share_threads);
    pool_end();
}

/* ---- sums of rows ---- */

typedef struct {
    float *sums;
    int64_t dim, num_rows;
    const int64_t *tokens;
    const char *rows;
    const float *weights;
    int dtype;
} Sum;

static void sum_columns(void *context, int thread, int64_t first, int64_t end) {
    Sum *call = context;
    (void)thread;
    for (int64_t row = 0; row < call->num_rows; row++)
        add_row(call->dtype, call->sums + call->tokens[row] * call->dim + first,
                call->rows + (row * call->dim + first) * dtype_bytes(call->dtype), call->weights ? call->weights[row] : 1.0f, end - first);
}

/* sums[tokens[r]] += weights[r] * rows[r], in the order of r. The caller has checked the tokens. */
MOE_EXPORT void moe_add_rows(float *sums, int64_t dim, const int64_t *tokens, const char *rows, int64_t num_rows,
                             const float *weights, int dtype, int share_threads) {
    Sum call = {.sums = sums, .dim = dim, .num_rows = num_rows, .tokens = tokens, .rows = rows, .weights = weights, .dtype = dtype};
    pool_begin();
    /* one range for each thread: the longer, the better the processor fetches ahead */
    pool_each(sum_columns, &call, dim, max64(MIN_COLUMNS, round_up(dim / pool_threads(), MIN_COLUMNS)), share_threads);
    pool_end();
}
