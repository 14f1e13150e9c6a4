"""`linear` with a quantised weight (by codes for few rows, by values for many), or a frozen one.

Letters: R rows, K summed dimension, N outputs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from moe_runtime.kernels.linear.gpu import packed_linear, packed_problem
from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    LinearImpl,
    check_status,
    is_faster_widened,
    keeps_code,
    linear,
    linear_of_few_shapes,
    native_row_limit,
    takes_native,
)
from moe_runtime.kernels.lossless import PlanesMatrix, decode_planes
from moe_runtime.kernels.native import (
    DTYPE_CODES,
    NEEDS_TORCH,
    NativeLibrary,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.quantized import QuantizedMatrix
from moe_runtime.kernels.quantized.reference import int8_values

Weight = QuantizedMatrix | PlanesMatrix
Values = Callable[[QuantizedMatrix, torch.dtype], Tensor]  # the values `[N, K]` in a dtype
PLANES_DTYPES = (torch.bfloat16, torch.float32)  # of rows times lossless bf16

# with more rows, decoding the values of a few rows of weights at a time is faster
_ROW_LIMIT = 48
_ROW_LIMITS = {"avx2": 64, "amx": 5}
_ROW_LIMIT_BESIDE_UNITS = 16  # if only torch has matrix units


def quantized_row_limit(library: NativeLibrary) -> int:
    """Rows up to which `impl="auto"` multiplies codes directly."""
    rest = _ROW_LIMIT_BESIDE_UNITS if library.has_matrix_units else _ROW_LIMIT
    return _ROW_LIMITS.get(library.isa, rest)


def packed_row_limit(library: NativeLibrary, weight: Weight) -> int:
    """Rows up to which `impl="auto"` multiplies packed weights directly; lossless code counts as
    bf16.
    """
    if isinstance(weight, PlanesMatrix):
        return native_row_limit(library, torch.bfloat16)
    return quantized_row_limit(library)


def quantized_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    impl: LinearImpl = "auto",
    values: Values | None = None,
) -> Tensor:
    """Applies `x @ weight.T + bias` with sums in fp32.

    Products of codes round no weight; values that are written out first have the dtype of `x`. With
    `int8_activations` of the format, `x` is rounded to `int8_values(x)`.

    Args:
        x: `[R, K]`; fp32, bf16 and fp16 for kernels.
        weight: `[N, K]`; lossless code gives the bits of `linear` with the original matrix.
        bias: `[N]`, fp32, bf16 or fp16, or None.
        impl: As in `linear`; `auto` takes the Triton kernels on a GPU.
        values: How `auto` writes values out; by default in new memory.

    Returns:
        `[R, N]` in the dtype of `x`.

    Raises:
        ValueError: The named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    library = require_native() if impl == "native" else native_library()
    if isinstance(weight, QuantizedMatrix) and (impl == "triton" or (impl == "auto" and x.is_cuda)):
        problem = packed_problem(x, weight, bias)
        if problem is None:
            return packed_linear(x, weight, bias)
        if impl == "triton":
            raise ValueError(f"impl='triton' cannot compute this: {problem}")
    if isinstance(weight, PlanesMatrix):
        if impl == "auto" and library is not None and len(x) <= packed_row_limit(library, weight):
            of_bf16 = x.dtype in PLANES_DTYPES and (bias is None or bias.dtype == torch.bfloat16)
            if of_bf16 and not _native_problem(x, weight, bias):
                return _run(library, x, weight, bias, decodes=False)
        return linear(x, decode_planes(weight), bias, impl=impl)
    if impl in ("auto", "native") and library is not None:
        problem = _native_problem(x, weight, bias)
        if impl == "native" and problem:
            raise ValueError(f"impl='native' cannot compute this: {problem}")
        is_limited = impl == "auto" and not weight.format.int8_activations
        decodes = is_limited and len(x) > quantized_row_limit(library)
        if not problem and (not decodes or len(x) <= native_row_limit(library, x.dtype)):
            return _run(library, x, weight, bias, decodes=decodes)
    if weight.format.int8_activations:
        exact = replace(weight, format=replace(weight.format, int8_activations=False))
        return quantized_linear(int8_values(x), exact, bias, impl=impl, values=values).to(x.dtype)
    dtype = precise_dtype(x) if impl == "reference" else x.dtype
    write = values_of if impl == "auto" else QuantizedMatrix.dequantize
    wide = (values or write)(weight, dtype)
    return linear(x, wide, None if bias is None else bias.to(dtype), impl=impl)


def values_of(matrix: Weight, dtype: torch.dtype) -> Tensor:
    """`matrix.dequantize(dtype)`, by all threads if the library can; bf16 of lossless code."""
    if isinstance(matrix, PlanesMatrix):
        return decode_planes(matrix)
    return write_values(matrix, dtype, None)


def write_values(matrix: QuantizedMatrix, dtype: torch.dtype, out_NK: Tensor | None) -> Tensor:
    """`values_of` into given memory, or new memory."""
    library = native_library()
    found = matrix.native_struct()
    if library is None or found is None or dtype not in DTYPE_CODES:
        return matrix.dequantize(dtype)
    words, kept = found
    num_rows, num_cols = matrix.shape
    if out_NK is None:
        out_NK = matrix.codes.new_empty((num_rows, num_cols), dtype=dtype)
    library.dequantize(
        struct.pack("4q", *words), num_rows, num_cols, out_NK.data_ptr(),
        out_NK.stride(0) * out_NK.element_size(), DTYPE_CODES[dtype], library.shares_threads(),
    )  # fmt: skip
    del kept
    return out_NK


def _native_problem(x: Tensor, weight: Weight, bias: Tensor | None) -> str | None:
    """Why the C kernel cannot take these arguments, or None."""
    if x.ndim != 2 or x.shape[1] != weight.num_cols:
        return f"x must be [R, {weight.num_cols}], got {list(x.shape)}"
    if x.dtype not in DTYPE_CODES:
        return f"x must be fp32, bf16 or fp16, got {x.dtype}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be [{weight.shape[0]}], got {list(bias.shape)}"
    if not x.is_cpu or (bias is not None and bias.dtype not in DTYPE_CODES):
        return "it needs CPU tensors, and biases in fp32, bf16 or fp16"
    if needs_torch(x, bias):
        return NEEDS_TORCH
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return "it is under autocast or traced by a compiler"
    if weight.native_struct() is None:
        return "codes and scales must lie in a CPU's memory, without gaps in a row"
    return None


def _run(
    library: NativeLibrary, x_RK: Tensor, weight: Weight, bias_N: Tensor | None, *, decodes: bool
) -> Tensor:
    x_RK = x_RK if x_RK.stride(1) == 1 else x_RK.contiguous()
    bias_N = None if bias_N is None else bias_N.contiguous()
    dim_out, dim_in = weight.shape
    found = weight.native_struct()
    assert found is not None
    words, kept = found
    out_RN = x_RK.new_empty((len(x_RK), dim_out))
    x_bytes, out_bytes = x_RK.stride(0) * x_RK.element_size(), dim_out * x_RK.element_size()
    for first in range(0, len(x_RK), ROWS_PER_CALL):
        num_rows = min(ROWS_PER_CALL, len(x_RK) - first)
        status = library.quantized_linear(
            x_RK.data_ptr() + first * x_bytes, x_bytes, num_rows, struct.pack("4q", *words),
            None if bias_N is None else bias_N.data_ptr(),
            DTYPE_CODES[torch.float32 if bias_N is None else bias_N.dtype],
            out_RN.data_ptr() + first * out_bytes, out_bytes, dim_in, dim_out,
            DTYPE_CODES[x_RK.dtype], decodes, library.shares_threads(),
        )  # fmt: skip
        check_status(status, num_rows, dim_in)
    del kept
    return out_RN


def frozen_linear(x: Tensor, weight: Tensor | Weight, bias: Tensor | None = None) -> Tensor:
    """`linear` by a weight that is never trained: `[R, K]` to `[R, N]` in the dtype of `x`.

    Gradients are of `x` and `bias`. The backward pass keeps no copy of the weight; it decodes
    quantised and coded ones again.
    """
    return cast(Tensor, _FrozenLinear.apply(x, weight, bias))


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(weight, Tensor):
            ctx.quantized = weight
            return quantized_linear(x, weight, bias)
        ctx.quantized = None
        ctx.save_for_backward(weight)
        return linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, None, Tensor | None]:  # type: ignore[override]
        if ctx.quantized is not None:
            weight_NK = values_of(ctx.quantized, grad_RN.dtype)
        else:
            (weight_NK,) = ctx.saved_tensors
        bias_grad_N = grad_RN.sum(dim=0) if ctx.needs_input_grad[2] else None
        return _times_weight(grad_RN, weight_NK), None, bias_grad_N


def _times_weight(grad_RN: Tensor, weight_NK: Tensor) -> Tensor:
    """``grad @ weight``, `[R, K]` in the dtype of `grad`, widened if that is exact or faster."""
    library = native_library() if grad_RN.is_cpu else None
    if library is not None and takes_native(library, grad_RN, weight_NK.T, None):
        return linear(grad_RN, weight_NK.T)
    widens = library is not None and is_faster_widened(library, weight_NK.dtype)
    if grad_RN.dtype == weight_NK.dtype and not widens:
        if keeps_code(grad_RN):
            return linear_of_few_shapes(grad_RN, weight_NK.T, None)
        return grad_RN @ weight_NK
    wide = torch.promote_types(grad_RN.dtype, torch.float32)
    return (grad_RN.to(wide) @ weight_NK.to(wide)).to(grad_RN.dtype)
