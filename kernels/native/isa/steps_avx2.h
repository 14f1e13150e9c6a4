/* The innermost loop of a tile of three weight rows by up to four rows of x, for vectors of eight.
 *
 * Twelve sums, three weights and a value of x take all sixteen registers. Compilers spill some of the sums or read a value
 * again for every product, which halves the speed (measured on Zen 3: 100 GFLOP/s of 190), so the registers are named here.
 * Sums add up in the order of `step` in tiles.h. */
#pragma once

#include "isa/vec.h"

#define FMA3(a, b, c)                      \
    "vfmadd231ps %%ymm12, %%ymm15, %%ymm" #a "\n" \
    "vfmadd231ps %%ymm13, %%ymm15, %%ymm" #b "\n" \
    "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #c "\n"
/* A row of x in one half of a step: where its sixteen values lie is the row's place times 64 bytes. */
#define X_ROW(place, a, b, c) "vmovups " #place "(%[x]), %%ymm15\n" FMA3(a, b, c)
#define EVEN_2 X_ROW(0, 0, 1, 2) X_ROW(64, 3, 4, 5)
#define EVEN_3 EVEN_2 X_ROW(128, 6, 7, 8)
#define EVEN_4 EVEN_3 X_ROW(192, 9, 10, 11)
#define ODD_2 X_ROW(32, 0, 1, 2) X_ROW(96, 3, 4, 5)
#define ODD_3 ODD_2 X_ROW(160, 6, 7, 8)
#define ODD_4 ODD_3 X_ROW(224, 9, 10, 11)

#define WEIGHTS(instruction, place, constant)                    \
    instruction " " #place "(%[w0]), " constant "%%ymm12\n"      \
    instruction " " #place "(%[w1]), " constant "%%ymm13\n"      \
    instruction " " #place "(%[w2]), " constant "%%ymm14\n"
#define SHIFTED(n) "vpslld $16, %%ymm" #n ", %%ymm" #n "\n"
#define LOWER_KIND_F32 WEIGHTS("vmovups", 0, "")
#define UPPER_KIND_F32 WEIGHTS("vmovups", 32, "")
#define LOWER_KIND_F16 WEIGHTS("vcvtph2ps", 0, "")
#define UPPER_KIND_F16 WEIGHTS("vcvtph2ps", 16, "")
#define LOWER_KIND_BF16 WEIGHTS("vmovdqu", 0, "") SHIFTED(12) SHIFTED(13) SHIFTED(14)
#define UPPER_KIND_BF16 "vmovups %[mask], %%ymm15\n" WEIGHTS("vandps", 0, "%%ymm15, ")

#define EACH_SUM_2(macro) macro(0) macro(1) macro(2) macro(3) macro(4) macro(5)
#define EACH_SUM_3(macro) EACH_SUM_2(macro) macro(6) macro(7) macro(8)
#define EACH_SUM_4(macro) EACH_SUM_3(macro) macro(9) macro(10) macro(11)
#define LOAD_SUM(n) "vmovups 32*" #n "(%[sums]), %%ymm" #n "\n"
#define STORE_SUM(n) "vmovups %%ymm" #n ", 32*" #n "(%[sums])\n"

#define STEPS(kind, panel, step_bytes, fetches)                                                                                    \
    __asm__ volatile(EACH_SUM_##panel(LOAD_SUM) ".p2align 5\n1:\n"                                                           \
                     fetches                                                                                                 \
                     LOWER_##kind EVEN_##panel UPPER_##kind ODD_##panel                                                      \
                     "add $" #step_bytes ", %[w0]\nadd $" #step_bytes ", %[w1]\nadd $" #step_bytes ", %[w2]\n"               \
                     "add %[fetched_bytes], %[fetched]\nadd $64*" #panel ", %[x]\ndec %[steps]\njnz 1b\n"                    \
                     EACH_SUM_##panel(STORE_SUM)                                                                             \
                     : [w0] "+r"(w0), [w1] "+r"(w1), [w2] "+r"(w2), [x] "+r"(x), [fetched] "+r"(fetched), [steps] "+r"(steps) \
                     : [sums] "r"(sums), [mask] "m"(*(const __m256 *)UPPER_HALVES), [fetched_bytes] "r"(fetched_bytes)       \
                     : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",       \
                       "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define FETCH_1 "prefetcht1 (%[fetched])\n"
#define FETCH_2 FETCH_1 "prefetcht1 64(%[fetched])\n"
#define FETCH_3 FETCH_2 "prefetcht1 128(%[fetched])\n"
#define STEPS_OF_PANEL(kind, panel, step_bytes)                          \
    do {                                                                 \
        if (ahead_bytes <= 64)                                           \
            STEPS(kind, panel, step_bytes, FETCH_1);                     \
        else if (ahead_bytes <= 128)                                     \
            STEPS(kind, panel, step_bytes, FETCH_2);                     \
        else                                                             \
            STEPS(kind, panel, step_bytes, FETCH_3);                     \
    } while (0)
#define STEPS_OF_KIND(kind, step_bytes)                                  \
    do {                                                                 \
        if (panel_rows == 2)                                             \
            STEPS_OF_PANEL(kind, 2, step_bytes);                         \
        else if (panel_rows == 3)                                        \
            STEPS_OF_PANEL(kind, 3, step_bytes);                         \
        else                                                             \
            STEPS_OF_PANEL(kind, 4, step_bytes);                         \
    } while (0)

static const uint32_t UPPER_HALVES[8] __attribute__((aligned(32))) = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                                      0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

/* `steps` (at least one) of a tile with two to four rows of x, whose sums lie as [row of x][3]. Each step fetches
 * `ahead_bytes` from `fetched` on, the same ones each time unless it `moves`. */
INLINE void tall_steps(int kind, int panel_rows, Vec *sums, const char *const w[3], const char *x, int64_t steps,
                       const char *fetched, int moves, int ahead_bytes) {
    const char *w0 = w[0], *w1 = w[1], *w2 = w[2];
    const int64_t fetched_bytes = moves ? ahead_bytes : 0;
    if (kind == KIND_F32)
        STEPS_OF_KIND(KIND_F32, 64);
    else if (kind == KIND_F16)
        STEPS_OF_KIND(KIND_F16, 32);
    else
        STEPS_OF_KIND(KIND_BF16, 32);
}
