/* x86-64 with AVX-512 (F, BW, VL, DQ). */
#define ISA_NAME "avx512"
#define ISA_SYMBOL isa_avx512
#define LANES 16
#define HAS_BF16_DOT 0
#include "isa/isa_template.h"
