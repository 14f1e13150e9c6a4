"""`outer_into`: the gradient of a matrix, from the rows on either side of it."""

from __future__ import annotations

from torch import Tensor

from moe_runtime.kernels.linear.op import ROWS_PER_CALL, check_status
from moe_runtime.kernels.native import DTYPE_CODES, require_native


def outer_into(left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, adds: bool) -> None:
    """``left.T @ right`` by the native kernel, with sums in fp32. Nothing is checked.

    Args:
        left_nA: fp32, bf16 or fp16, with unit stride along A.
        right_nB: In the same dtype, with unit stride along B.
        out_AB: Likewise; receives the product.
        adds: Whether what is there is added to it, before it is rounded.

    Raises:
        NativeUnavailableError: The library was not built.
    """
    library, size = require_native(), left_nA.element_size()
    left, right, out = (x.stride(0) * size for x in (left_nA, right_nB, out_AB))
    dtype, threads = DTYPE_CODES[left_nA.dtype], library.shares_threads()
    for first in range(0, left_nA.shape[1], ROWS_PER_CALL):
        num_rows = min(ROWS_PER_CALL, left_nA.shape[1] - first)
        status = library.outer(
            left_nA.data_ptr() + first * size, left, right_nB.data_ptr(), right, len(left_nA),
            out_AB.data_ptr() + first * out, out, num_rows, right_nB.shape[1], dtype, adds, threads,
        )  # fmt: skip
        check_status(status, num_rows, len(left_nA))
