/* What the library says about itself, the choice of an instruction set, and memory bandwidth. */
#include <stdatomic.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(MOE_HAVE_AVX512) || defined(MOE_HAVE_AVX512BF16)
static int cpu_has_avx512(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}
#endif

#if defined(MOE_HAVE_AVX512BF16)
static int cpu_has_dot_products(void) {
    unsigned eax, ebx, ecx, edx;
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512vbmi2") &&
           __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}
#endif

MOE_EXPORT int moe_cpu_is_amd(void) {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}

enum { AMX_BF16 = 22, AMX_TILE = 24 }; /* bits of EDX of leaf 7 of CPUID */

static int cpu_has_amx(int bit) {
#if defined(__x86_64__)
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> bit & 1);
#else
    return 0 * bit;
#endif
}

MOE_EXPORT int moe_cpu_has_amx(void) { return cpu_has_amx(AMX_BF16); }

enum { NUM_ISAS = 5 };

/* Variants this machine can run, best first. */
static int usable_isas(const Isa *isas[NUM_ISAS]) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
#if defined(MOE_HAVE_AMX)
    if (cpu_has_avx512() && cpu_has_dot_products() && cpu_has_amx(AMX_BF16) && cpu_has_amx(AMX_TILE) && isa_amx())
        isas[count++] = isa_amx();
#endif
#if defined(MOE_HAVE_AVX512BF16)
    if (cpu_has_avx512() && cpu_has_dot_products()) isas[count++] = &isa_avx512bf16;
#endif
#if defined(MOE_HAVE_AVX512)
    if (cpu_has_avx512()) isas[count++] = &isa_avx512;
#endif
#if defined(MOE_HAVE_AVX2)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        isas[count++] = &isa_avx2;
#endif
#endif
    isas[count++] = &isa_portable;
    return count;
}

static _Atomic(const Isa *) selected_isa;

const Isa *current_isa(void) {
    const Isa *isa = atomic_load(&selected_isa);
    if (!isa) {
        const Isa *isas[NUM_ISAS];
        usable_isas(isas);
        isa = isas[0];
        atomic_store(&selected_isa, isa);
    }
    return isa;
}

MOE_EXPORT int moe_abi_version(void) { return MOE_ABI_VERSION; }

MOE_EXPORT const char *moe_isa_name(int index) {
    const Isa *isas[NUM_ISAS];
    return index >= 0 && index < usable_isas(isas) ? isas[index]->name : NULL;
}

/* Variants that were compiled, whether or not this machine can run them. */
MOE_EXPORT const char *moe_built_isas(void) {
    return ""
#if defined(MOE_HAVE_AMX)
           "amx "
#endif
#if defined(MOE_HAVE_AVX512BF16)
           "avx512bf16 "
#endif
#if defined(MOE_HAVE_AVX512)
           "avx512 "
#endif
#if defined(MOE_HAVE_AVX2)
           "avx2 "
#endif
           "portable";
}

MOE_EXPORT const char *moe_current_isa(void) { return current_isa()->name; }

MOE_EXPORT int moe_select_isa(const char *name) {
    const Isa *isas[NUM_ISAS];
    int count = usable_isas(isas);
    for (int i = 0; i < count; i++)
        if (!strcmp(isas[i]->name, name)) {
            atomic_store(&selected_isa, isas[i]);
            return 1;
        }
    return 0;
}

/* ---- measurement ---- */

typedef struct {
    const char *data;
    _Atomic float sum;
} Reading;

static void read_block(void *context, int thread, int64_t first, int64_t end) {
    Reading *reading = context;
    (void)thread;
    atomic_store_explicit(&reading->sum, current_isa()->read_all(reading->data + first, end - first), memory_order_relaxed);
}

/* Reads the whole buffer once with all threads; the caller takes the time. */
MOE_EXPORT float moe_read(const char *data, int64_t bytes, int share_threads) {
    Reading reading = {.data = data};
    pool_begin();
    pool_each(read_block, &reading, bytes, 1 << 20, share_threads);
    pool_end();
    return reading.sum;
}
