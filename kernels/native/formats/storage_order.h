/* What is done to an expert's bytes once they have been read, where a file has them in an order that no product reads. */
#ifndef MOE_RUNTIME_STORAGE_ORDER_H
#define MOE_RUNTIME_STORAGE_ORDER_H

#include "kernels.h"

enum { ORDER_TRANSPOSED, ORDER_AWQ_CODES, ORDER_ZEROS_DOWN, ORDER_ZEROS_ACROSS, ORDER_AWQ_ZEROS, ORDER_INT8 };

/* StorageOrder of kernels/quantized/storage_order.py, and two places in a slot. */
typedef struct {
    int64_t kind, from, to, rows, cols, bits, adds_one;
} OrderStep;

/* Memory that moe_put_in_order needs beside the slot. */
int64_t order_scratch_bytes(const OrderStep *steps, int64_t count);
MOE_EXPORT void moe_put_in_order(const OrderStep *steps, int64_t count, char *slot, char *scratch);

#endif
