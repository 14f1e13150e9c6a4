"""The three products of an expert's matrix: rows forward, gradients back, its own gradient.

Letters: n rows of one expert, K summed dimension, N outputs, A and B the sides of an outer product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.linear.op import (
    KEPT_CODE_BYTES,
    MULTIPLY_PAIRS,
    ROWS_OF_A_PRODUCT,
    SMALL_WEIGHT,
    UNLIMITED,
    is_faster_widened,
    keeps_code,
    kept_code_bytes,
    lies_by_rows,
    linear_into,
    linear_of_few_shapes,
    native_row_limit,
    outer_into,
)
from moe_runtime.kernels.native import NativeLibrary, native_library

# Rows above which torch's product is faster than the C kernel, measured with two threads on Zen 4
# and Cascade Lake: fp32, widened operands, and bf16 by the processor's instruction.
_FEW_ROWS, _FEW_ROWS_WIDENED, _FEW_ROWS_HALF = 64, 256, 512
# fp32 where the kernel's vectors are twice as wide as torch's (Zen 5: 1.6 times as fast)
_FEW_ROWS_WIDE = 512
# a widened part of a matrix fits the cache
_BLOCK_BYTES = 8 << 20
_MIN_BLOCK_ROWS = 64


class Products:
    """torch's products, of operands as they are.

    An expert has another number of rows in every step. Where torch would keep code for each, small
    matrices are multiplied in fp32 and rows are padded to a few sizes.
    """

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of rows and results, for experts of `dtype`."""
        return dtype

    def forward(self, x_nK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_nN: Tensor) -> None:
        """``x @ weight.T + bias`` into `out`."""
        if keeps_code(x_nK):
            out_nN.copy_(linear_of_few_shapes(x_nK, weight_NK, bias))
        elif bias is None:
            torch.mm(x_nK, weight_NK.T, out=out_nN)
        else:
            torch.addmm(bias, x_nK, weight_NK.T, out=out_nN)

    def backward(self, grad_nN: Tensor, weight_NK: Tensor, out_nK: Tensor) -> None:
        """``grad @ weight`` into `out`."""
        if keeps_code(grad_nN):
            out_nK.copy_(linear_of_few_shapes(grad_nN, weight_NK.T, None))
        else:
            torch.mm(grad_nN, weight_NK, out=out_nK)

    def outer(self, left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool) -> None:
        """``left.T @ right`` into `out`, or added to it unless it `is_first`."""
        if keeps_code(left_nA):
            if out_AB.numel() <= SMALL_WEIGHT:
                wide = left_nA.float().T @ right_nB.float()
                out_AB.copy_(wide if is_first else wide.add_(out_AB))
                return
            missing = _padded(len(left_nA)) - len(left_nA)
            left_nA, right_nB = (F.pad(x, (0, 0, 0, missing)) for x in (left_nA, right_nB))
        torch.addmm(out_AB, left_nA.T, right_nB, beta=0 if is_first else 1, out=out_AB)


class NativeProducts(Products):
    """The C kernel for few rows, torch's products for many, in fp32 where that is faster.

    Without instructions for half precision a processor multiplies it several times slower than fp32
    (oneDNN converts every element). There a part of the matrix at a time is widened, and the result
    is rounded once. `row_limit`: the most rows of an expert for the C kernel of whole experts.
    """

    def __init__(self, library: NativeLibrary, dtype: torch.dtype) -> None:
        self._library = library
        self._widens = is_faster_widened(library, dtype)
        few = _FEW_ROWS if dtype == torch.float32 else _FEW_ROWS_HALF
        if dtype == torch.float32 and library.cpu_is_amd and library.isa.startswith("avx512"):
            few = _FEW_ROWS_WIDE
        few = _FEW_ROWS_WIDENED if self._widens else few
        self.row_limit = min(few, native_row_limit(library, dtype))
        has_units = library.isa == "amx" and dtype == torch.bfloat16
        self._by_rows_limit = UNLIMITED if has_units else self.row_limit
        self._turned_limit = min(few, native_row_limit(library, dtype, by_rows=False))
        multiplies_pairs = library.isa in MULTIPLY_PAIRS and not self._widens
        self._has_outer = dtype == torch.bfloat16 and multiplies_pairs
        self._scratch = torch.empty(0, dtype=torch.float32)

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._widens else dtype

    def forward(self, x_nK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_nN: Tensor) -> None:
        if self._is_for_kernel(len(x_nK), weight_NK):
            linear_into(self._library, x_nK, weight_NK, bias, out_nN)
        elif not self._widens:
            super().forward(x_nK, weight_NK, bias, out_nN)
        else:
            for block in _blocks(weight_NK):
                wide_bias = None if bias is None else bias[block].float()
                super().forward(x_nK, self._wide(weight_NK[block]), wide_bias, out_nN[:, block])

    def backward(self, grad_nN: Tensor, weight_NK: Tensor, out_nK: Tensor) -> None:
        if self._is_for_kernel(len(grad_nN), weight_NK.T):
            linear_into(self._library, grad_nN, weight_NK.T, None, out_nK)
            return
        if not self._widens:
            super().backward(grad_nN, weight_NK, out_nK)
            return
        for block in _blocks(weight_NK):
            wide, beta = self._wide(weight_NK[block]), 0 if block.start == 0 else 1
            torch.addmm(out_nK, grad_nN[:, block], wide, beta=beta, out=out_nK)

    def outer(self, left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool) -> None:
        # torch would widen both sides: 1.4 to 2.5 times as long
        by_rows = all(matrix.stride(1) == 1 for matrix in (left_nA, right_nB, out_AB))
        if self._has_outer and out_AB.numel() <= SMALL_WEIGHT and by_rows:
            outer_into(left_nA, right_nB, out_AB, adds=not is_first)
        elif not self._widens:
            super().outer(left_nA, right_nB, out_AB, is_first=is_first)
        else:
            self._outer_widened(left_nA, right_nB, out_AB, is_first=is_first)

    def _outer_widened(
        self, left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool
    ) -> None:
        for block in _blocks(out_AB):
            wide = self._part(out_AB[block])
            if not is_first:
                wide.copy_(out_AB[block])
            super().outer(left_nA[:, block], right_nB, wide, is_first=is_first)
            out_AB[block] = wide

    def _is_for_kernel(self, num_rows: int, weight_NK: Tensor) -> bool:
        limit = self._by_rows_limit if lies_by_rows(weight_NK) else self._turned_limit
        return num_rows <= limit and 1 in weight_NK.stride()

    def _wide(self, narrow: Tensor) -> Tensor:
        return self._part(narrow).copy_(narrow)

    def _part(self, narrow: Tensor) -> Tensor:
        """Memory for the fp32 copy of a part of a matrix, in the same order."""
        self._scratch, wide = _memory_like(narrow, self._scratch)
        return wide


class RoundedProducts(Products):
    """Products in a narrower dtype than that of the experts, as under autocast.

    One matrix or gradient at a time is converted, in memory that stays in the cache.
    """

    def __init__(self, products: Products, dtype: torch.dtype) -> None:
        self._products, self._dtype = products, dtype
        self._scratch = torch.empty(0, dtype=dtype)

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._products.operand_dtype(dtype)

    def forward(self, x_nK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_nN: Tensor) -> None:
        bias = None if bias is None else bias.to(self._dtype)
        self._products.forward(x_nK, self._rounded(weight_NK), bias, out_nN)

    def backward(self, grad_nN: Tensor, weight_NK: Tensor, out_nK: Tensor) -> None:
        self._products.backward(grad_nN, self._rounded(weight_NK), out_nK)

    def outer(self, left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool) -> None:
        self._scratch, narrow = _memory_like(out_AB, self._scratch)
        self._products.outer(left_nA, right_nB, narrow, is_first=True)
        if is_first:
            out_AB.copy_(narrow)
        else:
            out_AB.add_(narrow)

    def _rounded(self, matrix: Tensor) -> Tensor:
        self._scratch, narrow = _memory_like(matrix, self._scratch)
        return narrow.copy_(matrix)


class Adapter(NamedTuple):
    """`W + scale * second @ first` of one matrix of a frozen expert, of rank L.

    `gradients` are accumulated in the backward pass; None in a forward pass.
    """

    first_LK: Tensor
    second_NL: Tensor
    scale: float
    gradients: tuple[Tensor, Tensor] | None = None


class AdaptedProducts(Products):
    """Products of one frozen expert and its adapters: `x @ W.T + scale * (x @ A.T) @ B.T`.

    Neither the merged matrix nor a whole matrix's gradient is made. Adapters multiply in their own
    dtype.

    Args:
        adapters: By the address of their matrix.
        is_turned: Matrices have the summed dimension first, so the sides of `outer` are swapped.
    """

    def __init__(
        self, products: Products, adapters: Mapping[int, Adapter], *, is_turned: bool
    ) -> None:
        self._products, self._adapters, self._is_turned = products, adapters, is_turned
        learning = [(own, own.gradients) for own in adapters.values() if own.gradients is not None]
        self._learning = {first_LK.data_ptr(): own for own, (first_LK, _) in learning}

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self._products.operand_dtype(dtype)

    def forward(self, x_nK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_nN: Tensor) -> None:
        self._products.forward(x_nK, weight_NK, bias, out_nN)
        own = self._adapters[weight_NK.data_ptr()]
        inner_nL = x_nK.to(own.first_LK.dtype) @ own.first_LK.T
        out_nN.add_(inner_nL @ own.second_NL.T, alpha=own.scale)

    def backward(self, grad_nN: Tensor, weight_NK: Tensor, out_nK: Tensor) -> None:
        self._products.backward(grad_nN, weight_NK, out_nK)
        own = self._adapters[weight_NK.data_ptr()]
        inner_nL = grad_nN.to(own.first_LK.dtype) @ own.second_NL
        out_nK.add_(inner_nL @ own.first_LK, alpha=own.scale)

    def outer(self, left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool) -> None:
        """Adds to both gradients of the adapter whose first matrix has the gradient `out`."""
        own = self._learning[out_AB.data_ptr()]
        assert own.gradients is not None
        grad_nN, x_nK = (right_nB, left_nA) if self._is_turned else (left_nA, right_nB)
        grad_nN, x_nK = (rows.to(own.first_LK.dtype) for rows in (grad_nN, x_nK))
        first_LK, second_NL = own.gradients
        first_LK.addmm_((grad_nN @ own.second_NL).T, x_nK, alpha=own.scale)
        second_NL.addmm_(grad_nN.T, x_nK @ own.first_LK.T, alpha=own.scale)


def _memory_like(matrix: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Grown scratch memory, and a view of it with the layout of `matrix` in another dtype."""
    if scratch.numel() < matrix.numel():
        scratch = scratch.new_empty(matrix.numel())
    flat = scratch[: matrix.numel()]
    if matrix.stride(1) == 1:
        return scratch, flat.view(matrix.shape)
    return scratch, flat.view(matrix.shape[1], matrix.shape[0]).T


def _padded(num_rows: int) -> int:
    """The next of a few numbers of rows; zeros add nothing to a sum over rows.

    Beyond the largest product of rows there are two sizes per doubling.
    """
    step = 2 ** (num_rows - 1).bit_length() // 4
    fitting = (size for size in ROWS_OF_A_PRODUCT if size >= num_rows)
    return next(fitting, -(-num_rows // max(step, 1)) * step)


def _blocks(matrix: Tensor) -> list[slice]:
    """Rows of a matrix whose fp32 copy fits the cache."""
    rows = max(_MIN_BLOCK_ROWS, _BLOCK_BYTES // (4 * matrix.shape[1]))
    return [slice(first, first + rows) for first in range(0, matrix.shape[0], rows)]


def experts_code_bytes(
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
    num_rows: int,
    *,
    has_backward: bool,
    is_trained: bool,
) -> int:
    """Bytes of code that oneDNN keeps for the products of all of a model's experts in training.

    Forward rows count as in `kept_code_bytes`; gradients of rows have the same sizes and one row; a
    matrix's gradient has these sizes, and two more per doubling beyond the largest. Each direction
    has its own code, which all experts share. `num_rows` is the most that one expert gets: all
    tokens of a step.
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
