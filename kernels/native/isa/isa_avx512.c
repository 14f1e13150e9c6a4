/* x86-64 with AVX-512 (F, BW, VL, DQ). */
#define ISA_NAME "avx512"
#define ISA_SYMBOL isa_avx512
#define HAS_BF16_DOT 0
#define HAS_BYTE_DOT 0
#define HAS_PLANES_DOT 0

#include "isa/vec_avx512.h"

#include "isa/isa_template.h"
