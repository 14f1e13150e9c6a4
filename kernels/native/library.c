/* What the library says about itself and lets be chosen: the variants of the kernels, threads, memory bandwidth. */
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "kernels.h"
#include "pool.h"

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

#if defined(__x86_64__)
/* Bits of EDX of leaf 7 of CPUID. */
enum { AMX_BF16 = 22, AMX_TILE = 24 };

static int cpu_has_amx(int bit) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> bit & 1);
}
#endif

MOE_EXPORT int moe_cpu_has_amx(void) {
#if defined(__x86_64__)
    return cpu_has_amx(AMX_BF16);
#else
    return 0;
#endif
}

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

/* ---- threads ---- */

MOE_EXPORT void moe_set_num_threads(int num_threads) { pool_resize(num_threads); }
MOE_EXPORT int moe_get_num_threads(void) { return pool_size(); }
MOE_EXPORT void moe_set_parallel(ParallelFn parallel) { pool_set_parallel(parallel); }
MOE_EXPORT void moe_set_spin_ns(int64_t nanoseconds) { pool_set_spin(nanoseconds); }

/* ---- measurement ---- */

enum { READ_BLOCK = 1 << 20 };

typedef struct {
    const char *data;
    int64_t bytes;
    atomic_llong next;
    _Atomic float sum;
} Reading;

static void read_blocks(void *context) {
    Reading *reading = context;
    for (;;) {
        int64_t start = atomic_fetch_add(&reading->next, READ_BLOCK);
        const int64_t left = reading->bytes - start;
        if (left <= 0) return;
        float sum = current_isa()->read_all(reading->data + start, left < READ_BLOCK ? left : READ_BLOCK);
        atomic_store_explicit(&reading->sum, sum, memory_order_relaxed);
    }
}

/* Reads the whole buffer once with all threads; the caller takes the time. */
MOE_EXPORT float moe_read(const char *data, int64_t bytes, int share_threads) {
    Reading reading = {.data = data, .bytes = bytes};
    pool_begin();
    pool_run(read_blocks, &reading, share_threads);
    pool_end();
    return reading.sum;
}
