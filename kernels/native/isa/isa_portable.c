/* Any processor. */
#define ISA_NAME "portable"
#define ISA_SYMBOL isa_portable
#define LANES 4
#define HAS_BF16_DOT 0
#include "isa/isa_template.h"
