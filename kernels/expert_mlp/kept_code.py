"""How much code oneDNN keeps of the products of experts in training: part of a run's memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from moe_runtime.kernels.linear.op import (
    KEPT_CODE_BYTES,
    ROWS_OF_A_PRODUCT,
    SMALL_WEIGHT,
    is_faster_widened,
    keeps_code,
    kept_code_bytes,
)
from moe_runtime.kernels.native import native_library


def experts_code_bytes(
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
    num_rows: int,
    *,
    has_backward: bool,
    is_trained: bool,
) -> int:
    """What `Products` of all of a model's experts leave behind, in bytes.

    Rows forward are counted as `kept_code_bytes` does, and gradients of rows in portions of the
    same numbers, one row included. A matrix's gradient is a sum over one of these numbers of rows,
    or one of two more for every doubling beyond the largest. A matrix is multiplied as it lies in
    one direction and turned in the other, so that each has code of its own; experts share it.

    Args:
        shapes: Of an expert's tensors; biases and small matrices leave nothing.
        dtype: Of products.
        num_rows: The most that one expert gets: all tokens of a step.
        has_backward: Whether rows get gradients.
        is_trained: Whether matrices do.
    """
    library = native_library()
    if library is not None and is_faster_widened(library, dtype):
        return 0
    if not keeps_code(torch.empty(0, dtype=dtype)):
        return 0
    matrices = {(shape[0], shape[1]) for shape in shapes if len(shape) == 2}
    large = sum(math.prod(shape) > SMALL_WEIGHT for shape in matrices)
    padded = sum(less < num_rows for less in (0, *ROWS_OF_A_PRODUCT[:-1]))
    doublings = max(0, (num_rows - 1).bit_length() - ROWS_OF_A_PRODUCT[-1].bit_length() + 1)
    back = (1 + padded) * has_backward + (padded + 2 * doublings) * is_trained
    forward = kept_code_bytes(matrices, dtype, num_rows, by_rows=False)  # some lie transposed
    return forward + KEPT_CODE_BYTES * large * back
