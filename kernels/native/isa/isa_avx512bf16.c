/* x86-64 with AVX-512 and its instructions for pairs of bf16, fours and tables of bytes (Zen 4, Sapphire Rapids and newer). */
#define ISA_NAME "avx512bf16"
#define ISA_SYMBOL isa_avx512bf16
#define LANES 16
#define HAS_BF16_DOT 1
#include "isa/isa_template.h"
