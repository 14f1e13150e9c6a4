/* Products of quantised matrices with more rows of x than a panel has, for vectors of eight; a part of quantized_avx2.h.
 *
 * A part of some weight rows is decoded once and stays in the nearest caches while the panels are multiplied with it.
 * Sums add up in the order of lanes_step and go from one part of k to the next as vectors: what a row of x gives does not
 * depend on how many others there are.
 */
enum { MANY_WEIGHT_ROWS = 24, MANY_STEPS = 4, MANY_PANELS = 16, MANY_GROUPS = 64 << 10 };

/* Codes as fp32, and the scales of their groups by lanes. */
typedef struct {
    Vec values[4], scales;
} DecodedPart;

typedef DecodedPart DecodedSteps[MANY_STEPS][NUM_PARTS];

INLINE void decode_steps(int decoder, const Lanes *lanes, const Source *source, int64_t first, int64_t k, DecodedSteps out) {
    const int step_bytes = decoder == DECODE_TABLE4 || decoder == DECODE_ZEROS4 ? STEP / 2 : STEP;
    for (int i = 0; i < MANY_STEPS && first + i * STEP < k; i++) {
        const int64_t element = first + i * STEP;
        const char *codes = source->codes + element / STEP * step_bytes;
        char padded[STEP] = {0};
        Step step;
        if (k - element < STEP) {
            /* The row may end at the end of the mapped memory: never read past it. */
            memcpy(padded, codes, (size_t)((k - element) * step_bytes + STEP - 1) / STEP);
            codes = padded;
        }
        read_step(decoder, lanes, codes, &step);
        UNROLL for (int part = 0; part < NUM_PARTS; part++) {
            decode_part(decoder, lanes, source, &step, element, part, out[i][part].values);
            out[i][part].scales = by_lanes(lanes, source->scales, element, part);
        }
    }
}

static void decode_row_steps(int decoder, const Lanes *lanes, const Source *source, int64_t first, int64_t k, DecodedSteps out) {
    switch (decoder) {
        case DECODE_TABLE4: decode_steps(DECODE_TABLE4, lanes, source, first, k, out); break;
        case DECODE_ZEROS4: decode_steps(DECODE_ZEROS4, lanes, source, first, k, out); break;
        case DECODE_E4M3: decode_steps(DECODE_E4M3, lanes, source, first, k, out); break;
        default: decode_steps(DECODE_BYTES, lanes, source, first, k, out);
    }
}

/* A part of three weight rows by those of a panel's rows: twelve sums from zero, three weights and a value of x take all
 * registers, which are named as in steps_avx2.h. Then either the sums are kept until those of the other part are added, or
 * they are multiplied by the scales and added to what the steps before gave. */
#define MUL3(a, b, c)                        \
    "vmulps %%ymm12, %%ymm15, %%ymm" #a "\n" \
    "vmulps %%ymm13, %%ymm15, %%ymm" #b "\n" \
    "vmulps %%ymm14, %%ymm15, %%ymm" #c "\n"
#define PART_ROW(m, j, products) "vmovups 512*" #m "+32*" #j "(%[x]), %%ymm15\n" products
#define PART_ROWS_2(j, products) PART_ROW(0, j, products(0, 1, 2)) PART_ROW(1, j, products(3, 4, 5))
#define PART_ROWS_3(j, products) PART_ROWS_2(j, products) PART_ROW(2, j, products(6, 7, 8))
#define PART_ROWS_4(j, products) PART_ROWS_3(j, products) PART_ROW(3, j, products(9, 10, 11))
#define OF_THREE_ROWS(j) \
    "vmovaps 32*" #j "(%[w0]), %%ymm12\nvmovaps 32*" #j "(%[w1]), %%ymm13\nvmovaps 32*" #j "(%[w2]), %%ymm14\n"
#define PART_SUMS(panel)                                                                     \
    OF_THREE_ROWS(0) PART_ROWS_##panel(0, MUL3) OF_THREE_ROWS(1) PART_ROWS_##panel(1, FMA3) \
    OF_THREE_ROWS(2) PART_ROWS_##panel(2, FMA3) OF_THREE_ROWS(3) PART_ROWS_##panel(3, FMA3)
#define ADD_SUM(n) "vaddps 32*" #n "(%[sums]), %%ymm" #n ", %%ymm" #n "\n"
#define SCALE_SUM(n, scales) \
    "vfmadd213ps 32*" #n "(%[acc]), %%ymm" #scales ", %%ymm" #n "\nvmovaps %%ymm" #n ", 32*" #n "(%[acc])\n"
#define SCALE3(a, b, c) SCALE_SUM(a, 12) SCALE_SUM(b, 13) SCALE_SUM(c, 14)
#define SCALE_SUMS_2 OF_THREE_ROWS(4) SCALE3(0, 1, 2) SCALE3(3, 4, 5)
#define SCALE_SUMS_3 SCALE_SUMS_2 SCALE3(6, 7, 8)
#define SCALE_SUMS_4 SCALE_SUMS_3 SCALE3(9, 10, 11)
#define PART(panel, ends)                                                                                                 \
    __asm__ volatile(PART_SUMS(panel) ends                                                                                \
                     :                                                                                                    \
                     : [w0] "r"(w0), [w1] "r"(w1), [w2] "r"(w2), [x] "r"(x), [sums] "r"(sums), [acc] "r"(acc)             \
                     : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
                       "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define PART_OF_PANEL(panel)                                    \
    do {                                                        \
        if (keeps)                                              \
            PART(panel, EACH_SUM_##panel(STORE_SUM));           \
        else if (adds)                                          \
            PART(panel, EACH_SUM_##panel(ADD_SUM) SCALE_SUMS_##panel); \
        else                                                    \
            PART(panel, SCALE_SUMS_##panel);                    \
    } while (0)

INLINE void sum_part(int panel_rows, int keeps, int adds, const DecodedPart *w0, const DecodedPart *w1, const DecodedPart *w2,
                     const float *x, Vec *sums, Vec *acc) {
    if (panel_rows == 2)
        PART_OF_PANEL(2);
    else if (panel_rows == 3)
        PART_OF_PANEL(3);
    else
        PART_OF_PANEL(4);
}

/* Sums of three weight rows by the rows of a panel, [row of x][3]. */
typedef Vec TripleSums[NUM_PARTS][PANEL_ROWS * 3];

INLINE void triple_steps(int scales_of_step, int panel_rows, const DecodedSteps *const w[3], int64_t steps, const float *x,
                         TripleSums acc) {
    const int are_added = scales_of_step == 1;
    for (int64_t i = 0; i < steps; i++) {
        const float *own = x + (i / 2 * panel_rows * 2 + i % 2) * STEP;
        Vec sums[PANEL_ROWS * 3];
        UNROLL for (int part = 0; part < NUM_PARTS; part++)
            sum_part(panel_rows, are_added && !part, are_added && part, &(*w[0])[i][part], &(*w[1])[i][part], &(*w[2])[i][part],
                     own + part * 4 * LANES, sums, acc[are_added ? 0 : part]);
    }
}

typedef void (*TripleSteps)(const DecodedSteps *const w[3], int64_t steps, const float *x, TripleSums acc);

#define DEFINE_TRIPLE_STEPS(scales, panel)                                                                                     \
    static void triple_steps_##scales##_##panel(const DecodedSteps *const w[3], int64_t steps, const float *x, TripleSums acc) { \
        triple_steps(scales, panel, w, steps, x, acc);                                                                         \
    }
#define NAME_TRIPLE_STEPS(scales, panel) triple_steps_##scales##_##panel
#define FOR_TRIPLE_PANELS(macro, scales, separator) macro(scales, 2) separator() macro(scales, 3) separator() macro(scales, 4)

FOR_TRIPLE_PANELS(DEFINE_TRIPLE_STEPS, 1, NO_SEPARATOR)
FOR_TRIPLE_PANELS(DEFINE_TRIPLE_STEPS, 2, NO_SEPARATOR)

/* Several panels have two rows of x at least. */
static const TripleSteps TRIPLE_STEPS[2][PANEL_ROWS - 1] = {{FOR_TRIPLE_PANELS(NAME_TRIPLE_STEPS, 1, COMMA)},
                                                            {FOR_TRIPLE_PANELS(NAME_TRIPLE_STEPS, 2, COMMA)}};

static void store_triple_sums(int scales_of_step, int panel_rows, int weight_rows, TripleSums acc, float *out, int64_t ldo) {
    for (int n = 0; n < weight_rows; n++) {
        Vec whole[PANEL_ROWS];
        float sums[4];
        for (int m = 0; m < PANEL_ROWS; m++) {
            const int at = 3 * m + n;
            whole[m] = m >= panel_rows ? vec_zero() : scales_of_step == 2 ? vec_add(acc[0][at], acc[1][at]) : acc[0][at];
        }
        vec_four_sums(whole[0], whole[1], whole[2], whole[3], sums);
        for (int m = 0; m < panel_rows; m++) out[m * ldo + n] = sums[m];
    }
}

/* Rows of x as they are packed, and the floats between their sums. */
typedef struct {
    const float *packed;
    int64_t num_rows, row_floats, ldo;
} ManyRows;

/* Weight rows, up to MANY_WEIGHT_ROWS, by panels, up to MANY_PANELS; `out` begins at the first of the weight rows. */
static void multiply_many(int decoder, int scales_of_step, const Lanes *lanes, const Source *sources, int weight_rows, int64_t k,
                          const ManyRows *x, int64_t first_panel, int64_t last_panel, float *out) {
    const int64_t panels = num_panels(x->num_rows, PANEL_ROWS);
    DecodedSteps decoded[MANY_WEIGHT_ROWS];
    TripleSums acc[MANY_PANELS][MANY_WEIGHT_ROWS / 3];
    memset(acc, 0, (size_t)(last_panel - first_panel) * sizeof acc[0]);
    for (int64_t element = 0; element < k; element += MANY_STEPS * STEP) {
        const int64_t left = (k - element + STEP - 1) / STEP, steps = left < MANY_STEPS ? left : MANY_STEPS;
        for (int n = 0; n < weight_rows; n++) decode_row_steps(decoder, lanes, &sources[n], element, k, decoded[n]);
        for (int64_t p = first_panel; p < last_panel; p++) {
            const int64_t row = panel_start(p, panels, x->num_rows), rows = panel_start(p + 1, panels, x->num_rows) - row;
            const float *own = x->packed + row * x->row_floats + element * rows;
            for (int n = 0; n < weight_rows; n += 3) {
                const DecodedSteps *w[3];
                for (int i = 0; i < 3; i++) w[i] = &decoded[n + i < weight_rows ? n + i : n];
                TRIPLE_STEPS[scales_of_step - 1][rows - 2](w, steps, own, acc[p - first_panel][n / 3]);
            }
        }
    }
    for (int64_t p = first_panel; p < last_panel; p++) {
        const int64_t row = panel_start(p, panels, x->num_rows), rows = panel_start(p + 1, panels, x->num_rows) - row;
        for (int n = 0; n < weight_rows; n += 3)
            store_triple_sums(scales_of_step, (int)rows, weight_rows - n < 3 ? weight_rows - n : 3, acc[p - first_panel][n / 3],
                              out + row * x->ldo + n, x->ldo);
    }
}
