/* x86-64 with AVX2, FMA and F16C. */
#define ISA_NAME "avx2"
#define ISA_SYMBOL isa_avx2
#define LANES 8
#define HAS_BF16_DOT 0
#include "isa/isa_template.h"
