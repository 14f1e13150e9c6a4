"""`linear`: a product by the native kernel for few rows, torch, or Triton on a GPU."""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.native import (
    DTYPE_CODES,
    NEEDS_TORCH,
    STATUS_DAMAGED,
    STATUS_NO_MEMORY,
    NativeLibrary,
    native_library,
    needs_torch,
    require_native,
)
from moe_runtime.kernels.operands import check_choice, precise_dtype

LinearImpl = Literal["auto", "native", "reference", "torch", "triton"]
IMPLS: tuple[LinearImpl, ...] = get_args(LinearImpl)

UNLIMITED = sys.maxsize
ROWS_PER_CALL = 512  # that one call of the C kernel packs

# Rows up to which `auto` takes the native kernel, measured with two threads on Zen 4 (with the bf16
# instruction), Cascade Lake (without) and Granite Rapids (matrix units). Without the instruction
# torch has at most a third of the kernel's speed in bf16 and fp16; with it, and in fp32, both are
# equal at many rows. Below AVX-512 torch was never measured: the limits err on its side.
_ALL_ROWS = dict.fromkeys(DTYPE_CODES, UNLIMITED)
_ROW_LIMITS = {
    **dict.fromkeys(("amx", "avx512bf16", "avx512"), _ALL_ROWS),
    "avx2": {torch.bfloat16: UNLIMITED, torch.float16: UNLIMITED, torch.float32: 32},
    "portable": {torch.bfloat16: 1, torch.float16: 0, torch.float32: 16},
}
MULTIPLY_PAIRS = ("amx", "avx512bf16")  # of bf16, in one instruction
# Rows of torch's products in half precision: portions of the largest size, the rest padded. oneDNN
# keeps code for every number of rows, 0.7 to 2.4 MiB each (a prompt took 50 MiB), and reorders the
# weight for every product, so few large ones cost least.
ROWS_OF_A_PRODUCT = (16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# Of one number of rows and one weight shape: 0.7 to 0.95 MiB on average, for weights of 640 x 512
# to 2048 x 4096 in bf16 with AMX.
KEPT_CODE_BYTES = 2**20
# Values of a weight up to which torch multiplies half precision as fp32: that keeps no code, and
# making code takes longer than many such products.
SMALL_WEIGHT = 2**18
# torch's matrix units multiply bf16 far faster than vector code once memory is no bound
_BF16_LIMIT_OF_VECTORS = 16


def native_row_limit(library: NativeLibrary, dtype: torch.dtype, *, by_rows: bool = True) -> int:
    """Rows up to which `impl="auto"` takes the native kernel; `UNLIMITED` if it always does.

    `dtype` is that of the weights; `by_rows`: unit stride along the summed dimension.
    """
    limit = _ROW_LIMITS[library.isa].get(dtype, 0)
    uses_vectors = library.isa != "amx" or not by_rows
    if library.has_matrix_units and uses_vectors and dtype == torch.bfloat16:
        return min(limit, _BF16_LIMIT_OF_VECTORS)
    return limit


def is_faster_widened(library: NativeLibrary, dtype: torch.dtype) -> bool:
    """Whether torch multiplies many rows faster in fp32 than in `dtype`, conversions included.

    True for half precision on a processor without instructions for it.
    """
    if library.has_matrix_units or library.isa == "portable":
        return False
    is_bf16 = dtype == torch.bfloat16
    return dtype == torch.float16 or (is_bf16 and library.isa not in MULTIPLY_PAIRS)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, impl: LinearImpl = "auto"
) -> Tensor:
    """Applies `x @ weight.T + bias` with sums in fp32.

    Args:
        x: `[..., K]`; fp32, bf16 or fp16.
        weight: `[N, K]` with unit stride along K or along N. Its dtype is that of `x`, or bf16 or
            fp16 under fp32 `x`.
        bias: `[N]` in the dtype of the weights, or None.
        impl: `native` (C, CPU) and `triton` (one row on a GPU) are for inference only; `torch` is
            the ordinary product, `reference` the specification. `auto` takes a kernel if it is
            faster and possible, else torch, also under autocast.

    Returns:
        `[..., N]` in the dtype of `x`; torch's, under autocast, in autocast's. With the native
            kernel,
        a row's bits do not depend on other rows or on threads.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError, TritonUnavailableError: The named implementation is not installed.
    """
    if impl == "auto":
        library = None if x.is_cuda else native_library()
        if library is not None and takes_native(library, x, weight, bias):
            return _linear_native(library, x, weight, bias)
        if x.is_cuda:
            from moe_runtime.kernels.linear.gpu import linears_of_a_row

            if (found := linears_of_a_row(x, (weight, bias))) is not None:
                return found[0]
        return _linear_torch(x, weight, bias)
    _validate(x, weight, bias)
    if impl == "native":
        library = require_native()
        problem = native_problem(x, weight, bias)
        if problem:
            raise ValueError(f"impl='native' cannot compute this: {problem}")
        return _linear_native(library, x, weight, bias)
    if impl == "triton":
        from moe_runtime.kernels.linear.gpu import linear_row

        return linear_row(x, weight, bias)
    if impl == "reference":
        return linear_reference(x, weight, bias)
    check_choice(impl, IMPLS)
    return _linear_torch(x, weight, bias)


def _validate(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"expected x [..., K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"expected bias [{weight.shape[0]}], got {list(bias.shape)}")


def native_problem(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    if not (x.is_cpu and weight.is_cpu and (bias is None or bias.is_cpu)):
        return f"it needs CPU tensors, got {x.device} and {weight.device}"
    if x.dtype not in DTYPE_CODES or weight.dtype not in DTYPE_CODES:
        return f"it knows fp32, bf16 and fp16, got {x.dtype} and {weight.dtype}"
    if x.dtype not in (weight.dtype, torch.float32):
        return f"x must be {weight.dtype} like the weights, or fp32, got {x.dtype}"
    if not lies_by_rows(weight) and weight.stride(0) != 1:
        return f"weights must have unit stride along K or N, got strides {weight.stride()}"
    if bias is not None and bias.dtype != weight.dtype:
        return f"bias must be {weight.dtype} like the weights, got {bias.dtype}"
    return NEEDS_TORCH if needs_torch(x, weight, bias) else None


def takes_native(library: NativeLibrary, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `auto` takes the native kernel; torch reports invalid arguments."""
    is_torchs = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    if is_torchs or native_problem(x, weight, bias):
        return False
    x_shape, weight_shape = x.shape, weight.shape
    has_columns = bias is None or bias.shape == weight_shape[:1]
    if not x_shape or x_shape[-1:] != weight_shape[1:] or not has_columns:
        return False
    limit = native_row_limit(library, weight.dtype, by_rows=lies_by_rows(weight))
    return 0 < x_shape.numel() // max(x_shape[-1], 1) <= limit


def lies_by_rows(weight: Tensor) -> bool:
    """Whether the values of a row are contiguous, not those of a column."""
    return weight.stride(-1) == 1 or weight.shape[-1] <= 1


def _linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    is_traced = torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling()
    wants_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if is_traced or weight.ndim != 2 or wants_gradient or not keeps_code(x):
        return F.linear(x, weight, bias)
    return linear_of_few_shapes(x, weight, bias)


def linear_of_few_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Torch's product in fp32, or in portions of a few sizes, whatever the number of rows."""
    if has_torch_function((x,)):  # such as vmap: the number of rows is not yet known
        return handle_torch_function(linear_of_few_shapes, (x,), x, weight, bias)
    x_RK = x.reshape(-1, x.shape[-1])
    num_rows = len(x_RK)
    if num_rows <= 1:
        return F.linear(x, weight, bias)
    if weight.numel() <= SMALL_WEIGHT:
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    out = x.new_empty((num_rows, len(weight)))
    for first in range(0, num_rows, ROWS_OF_A_PRODUCT[-1]):
        rows = x_RK[first : first + ROWS_OF_A_PRODUCT[-1]]
        size = next(size for size in ROWS_OF_A_PRODUCT if size >= len(rows))
        padded = F.pad(rows, (0, 0, 0, size - len(rows))) if size > len(rows) else rows
        out[first : first + len(rows)] = F.linear(padded, weight, bias)[: len(rows)]
    return out.view(*x.shape[:-1], len(weight))


def keeps_code(x: Tensor) -> bool:
    """Whether torch multiplies such values by oneDNN, which keeps code for every shape."""
    if not x.is_cpu or not torch.backends.mkldnn.enabled:
        return False
    if x.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return x.dtype == torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def kept_code_bytes(
    shapes: set[tuple[int, int]], dtype: torch.dtype, num_rows: int, *, by_rows: bool = True
) -> int:
    """Bytes of code that torch's products of up to `num_rows` rows keep for weights `(N, K)`."""
    if not keeps_code(torch.empty(0, dtype=dtype)):
        return 0
    library = native_library()
    limit = 0 if library is None else native_row_limit(library, dtype, by_rows=by_rows)
    below = (0, 1, *ROWS_OF_A_PRODUCT)
    sizes = sum(size > limit and less < num_rows for less, size in pairwise(below))
    return KEPT_CODE_BYTES * sizes * sum(math.prod(shape) > SMALL_WEIGHT for shape in shapes)


def _linear_native(
    library: NativeLibrary, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    dim_out, dim_in = weight.shape
    x_RK = x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), dim_in)
    if x_RK.stride(1) != 1 and dim_in > 1:
        x_RK = x_RK.contiguous()
    out_RN = x.new_empty((len(x_RK), dim_out))
    linear_into(library, x_RK, weight, bias, out_RN)
    return out_RN if x.ndim == 2 else out_RN.view(*x.shape[:-1], dim_out)


def linear_into(
    library: NativeLibrary, x_RK: Tensor, weight: Tensor, bias: Tensor | None, out_RN: Tensor
) -> None:
    """`linear` by the native kernel into `[R, N]` with unit stride along N, without checks."""
    dim_out, dim_in = weight.shape
    by_rows = lies_by_rows(weight)
    kernel, stride = library.linear if by_rows else library.linear_transposed, int(not by_rows)
    bias = None if bias is None else bias.contiguous()
    x_bytes, out_bytes = (rows.stride(0) * rows.element_size() for rows in (x_RK, out_RN))
    for first in range(0, x_RK.shape[0], ROWS_PER_CALL):
        num_rows = min(ROWS_PER_CALL, x_RK.shape[0] - first)
        status = kernel(
            x_RK.data_ptr() + first * x_bytes, x_bytes, num_rows,
            weight.data_ptr(), weight.stride(stride) * weight.element_size(),
            None if bias is None else bias.data_ptr(),
            out_RN.data_ptr() + first * out_bytes, out_bytes, dim_in, dim_out,
            DTYPE_CODES[x_RK.dtype], DTYPE_CODES[weight.dtype], library.shares_threads(),
        )  # fmt: skip
        check_status(status, num_rows, dim_in)


def check_status(status: int, num_rows: int, dim_in: int) -> None:
    """Raises MemoryError, or CheckpointError for damaged lossless code, by the kernel's status."""
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory to pack {num_rows} rows of {dim_in} values")
    if status == STATUS_DAMAGED:
        raise CheckpointError("a linear layer in the lossless code is damaged; load it again")


def outer_into(left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, adds: bool) -> None:
    """`left.T @ right` by the native kernel, with sums in fp32, without checks.

    All tensors have one dtype (fp32, bf16 or fp16) and unit stride along A or B. With `adds`, `out`
    is added before rounding.

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


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The specification: in fp32 (fp64 for fp64 input), rounded to x's dtype once."""
    precise = precise_dtype(x)
    y = x.to(precise) @ weight.to(precise).T
    if bias is not None:
        y = y + bias.to(precise)
    return y.to(x.dtype)
