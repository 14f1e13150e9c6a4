"""Linear layers, normalisations and experts of few rows, with checks of the weights done once.

Linear layers and norms remember a weight's address, dtype, shape and strides, and check again when
these change.

Shape suffixes: T tokens, K choices per token, D model in, O model out, R routed rows = T * K.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.combine.op import MAX_CHOICES
from moe_runtime.kernels.expert_mlp.expert_weights import ExpertShape, ExpertWeights
from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    UNLIMITED,
    check_status,
    lies_by_rows,
    native_problem,
    native_row_limit,
)
from moe_runtime.kernels.linear.quantized import (
    PLANES_DTYPES,
    packed_row_limit,
    quantized_row_limit,
)
from moe_runtime.kernels.lossless import PlanesMatrix
from moe_runtime.kernels.native import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    STATUS_BAD_ROW,
    STATUS_DAMAGED,
    STATUS_NO_MEMORY,
    NativeLibrary,
    native_library,
)
from moe_runtime.kernels.operands import ActivationSpec
from moe_runtime.kernels.quantized import QuantizedMatrix
from moe_runtime.kernels.rms_norm.op import FORMS, ROWS_ALONE, NormForm
from moe_runtime.kernels.rms_norm.op import native_problem as native_norm_problem

RowIds = Tensor | Sequence[int]


class PreparedLinear:
    """The native product with one weight, for rows in its dtype."""

    def __init__(self) -> None:
        self._place: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x @ weight.T + bias`, `[..., K]` to `[..., N]`, with the bits of `linear`.

        None for cases that `linear` handles: many rows, another dtype, gradients, autocast.
        """
        place: tuple[Any, ...] = weight.data_ptr(), weight.dtype, weight.shape, weight.stride()
        if bias is not None:
            place += bias.data_ptr(), bias.dtype, bias.shape, bias.stride()
        if place != self._place:
            self._prepare(weight, bias)
            self._place = place
        shape = x.shape
        num_rows = x.numel() // max(self._dim_in, 1) if shape and shape[-1] == self._dim_in else 0
        if (
            not 0 < num_rows <= self._row_limit
            or x.dtype is not self._dtype
            or not x.is_cpu
            or not x.is_contiguous()
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return None
        library = native_library()
        assert library is not None
        out = x.new_empty((*shape[:-1], self._dim_out))
        status = (library.linear if self._by_rows else library.linear_transposed)(
            x.data_ptr(), self._row_bytes, num_rows, *self._weight, out.data_ptr(), *self._out,
            torch.get_num_threads() == library.num_threads,
        )  # fmt: skip
        if status:
            check_status(status, num_rows, self._dim_in)
        return out

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> None:
        library = native_library()
        self._dtype = weight.dtype
        self._dim_out, self._dim_in = weight.shape
        self._row_bytes = self._dim_in * weight.element_size()
        self._row_limit = 0
        bias_fits = bias is None or bias.is_contiguous()
        if library is not None and bias_fits and native_problem(weight, weight, bias) is None:
            self._by_rows = lies_by_rows(weight)
            limit = native_row_limit(library, weight.dtype, by_rows=self._by_rows)
            self._row_limit = min(limit, ROWS_PER_CALL)
            stride = weight.stride(int(not self._by_rows)) * weight.element_size()
            self._weight = weight.data_ptr(), stride, None if bias is None else bias.data_ptr()
            out_stride, code = self._dim_out * weight.element_size(), DTYPE_CODES[weight.dtype]
            self._out = (out_stride, self._dim_in, self._dim_out, code, code)


class PreparedRMSNorm:
    """The native normalisation with one weight, for rows in its dtype."""

    def __init__(self, form: NormForm) -> None:
        self._place: tuple[Any, ...] = ()
        self._form = FORMS.index(form)

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """The bits of `rms_norm` for `[..., D]`; None for another dtype or where gradients are
        enabled.
        """
        place = weight.data_ptr(), weight.dtype, weight.shape, weight.stride(), eps
        if place != self._place:
            self._prepare(weight, eps)
            self._place = place
        num_values = x.numel()
        if (
            not (num_values and self._is_able)
            or x.shape[-1] != self._dim
            or x.dtype is not self._dtype
            or not x.is_cpu
            or not x.is_contiguous()
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or torch.compiler.is_compiling()
        ):
            return None
        library = native_library()
        assert library is not None
        out = torch.empty_like(x)
        library.rms_norm(
            x.data_ptr(), self._row_bytes, num_values // self._dim, self._address, out.data_ptr(),
            *self._tail, num_values > self._few_values and library.shares_threads(),
        )  # fmt: skip
        return out

    def _prepare(self, weight: Tensor, eps: float) -> None:
        self._dtype, self._dim = weight.dtype, weight.shape[0]
        self._address = weight.data_ptr()
        self._row_bytes = self._dim * weight.element_size()
        self._is_able = native_library() is not None and native_norm_problem(weight, weight) is None
        self._few_values = ROWS_ALONE * self._dim
        if self._is_able:
            self._tail = (self._dim, eps, DTYPE_CODES[weight.dtype], self._form)


class PreparedQuantizedLinear:
    """The native product with one quantised weight that never moves or changes.

    `row_limit` is the largest number of rows it takes. The caller keeps the weight alive.
    """

    def __init__(self, weight: QuantizedMatrix | PlanesMatrix) -> None:
        self._dim_out, self._dim_in = weight.shape
        self.row_limit, library, struct = 0, native_library(), weight.native_struct()
        if library is not None and struct is not None:
            words, self._kept = struct
            self._words = array("q", words)
            self._address = self._words.buffer_info()[0]
            self.row_limit = min(packed_row_limit(library, weight), ROWS_PER_CALL)
        is_bf16 = isinstance(weight, PlanesMatrix)
        self._dtypes = PLANES_DTYPES if is_bf16 else tuple(DTYPE_CODES)
        self._bias_dtypes = (torch.bfloat16,) if is_bf16 else tuple(DTYPE_CODES)

    def address(self, dtype: torch.dtype) -> int:
        """The address of the C struct `Matrix`; 0 if kernels cannot multiply rows of this dtype
        by it.
        """
        return self._address if self.row_limit and dtype in self._dtypes else 0

    def _takes_bias(self, bias: Tensor) -> bool:
        is_whole = bias.shape == (self._dim_out,) and bias.is_contiguous()
        return is_whole and bias.dtype in self._bias_dtypes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x @ weight.T + bias`, `[..., K]` to `[..., N]`, with the bits of `quantized_linear`.

        None for cases that it handles: many rows, another dtype, gradients, autocast.
        """
        shape, dtype = x.shape, x.dtype
        num_rows = x.numel() // self._dim_in if shape and shape[-1] == self._dim_in else 0
        if (
            not 0 < num_rows <= self.row_limit
            or dtype not in self._dtypes
            or not x.is_cpu
            or not x.is_contiguous()
            or not (bias is None or self._takes_bias(bias))
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
        ):
            return None
        library = native_library()
        assert library is not None
        out = x.new_empty((*shape[:-1], self._dim_out))
        size = dtype.itemsize
        status = library.quantized_linear(
            x.data_ptr(), self._dim_in * size, num_rows, self._address,
            None if bias is None else bias.data_ptr(),
            DTYPE_CODES[torch.float32 if bias is None else bias.dtype],
            out.data_ptr(), self._dim_out * size, self._dim_in, self._dim_out,
            DTYPE_CODES[dtype], False, torch.get_num_threads() == library.num_threads,
        )  # fmt: skip
        if status:
            check_status(status, num_rows, self._dim_in)
        return out


class KernelActivation(NamedTuple):
    code: int
    formula: ctypes.Array[ctypes.c_float] | None


@lru_cache(maxsize=64)
def kernel_activation(activation: str | ActivationSpec) -> KernelActivation | None:
    """An activation's code and numbers for the C kernels; None if they do not know it."""
    if isinstance(activation, str):
        code = ACTIVATION_CODES.get(activation)
        return None if code is None else KernelActivation(code, None)
    code = ACTIVATION_CODES[activation.function]
    if activation.is_plain:
        return KernelActivation(code, None)
    numbers = activation.numbers()
    return KernelActivation(code, (ctypes.c_float * len(numbers))(*numbers))


def is_coded(shape: ExpertShape) -> bool:
    return bool(shape.formats) and "planes" not in shape.formats


def row_limit(library: NativeLibrary, shape: ExpertShape) -> int:
    """The most rows of an expert for which `impl="auto"` takes the native kernel."""
    if is_coded(shape):
        is_rounded = any(getattr(kind, "int8_activations", False) for kind in shape.formats)
        return UNLIMITED if is_rounded else quantized_row_limit(library)
    return native_row_limit(library, shape.dtype)


def call_kernel(
    library: NativeLibrary,
    x_TD: Tensor,
    structs: bytes,
    counts: Sequence[int],
    token_ids_R: RowIds,
    destinations_R: RowIds,
    out_RO: Tensor,
    *,
    shape: ExpertShape,
    activation: str | ActivationSpec | KernelActivation,
    decodes: bool = False,
    added: Tensor | None = None,
    hidden: Tensor | None = None,
) -> None:
    """The C kernel of whole experts, for arguments that `expert_ffn` has checked.

    Args:
        structs: C structs `Expert`, concatenated.
        decodes: Multiply quantised experts by their values, in the dtype of `x`.
        added: fp32, added to each row's pre-activations, gate first.
        hidden: `[R, F]` fp32, receives the hidden values.

    Raises:
        CheckpointError: Lossless code is damaged.
        ValueError: A row number is out of range.
        MemoryError: There is no memory to pack the rows in.
    """
    token_ids, destinations = _int64(token_ids_R), _int64(destinations_R)
    if not isinstance(activation, KernelActivation):
        found = kernel_activation(activation)
        assert found is not None
        activation = found
    size = x_TD.element_size()
    status = library.expert_ffn(
        structs, len(counts), array("q", counts).tobytes(),
        x_TD.data_ptr(), x_TD.stride(0) * size, x_TD.shape[0],
        token_ids if isinstance(token_ids, bytes) else token_ids.data_ptr(),
        destinations if isinstance(destinations, bytes) else destinations.data_ptr(),
        out_RO.data_ptr(), out_RO.stride(0) * size, out_RO.shape[0], *shape[:3],
        DTYPE_CODES[x_TD.dtype], DTYPE_CODES[shape.dtype], DTYPE_CODES[shape.bias_dtype],
        *activation, None if added is None else added.data_ptr(),
        None if hidden is None else hidden.data_ptr(),
        decodes, torch.get_num_threads() == library.num_threads,
    )  # fmt: skip
    if status:
        rule = f"token_ids must be in [0, {len(x_TD)}) and destinations in [0, {len(out_RO)})"
        _refuse(status, rule, sum(counts))


def _int64(rows: RowIds) -> Tensor | bytes:
    """Row numbers as contiguous int64 that the C code can read."""
    if isinstance(rows, Tensor):
        return rows.to(device="cpu", dtype=torch.int64).contiguous()
    return array("q", rows).tobytes()


def _refuse(status: int, rule: str, num_rows: int) -> None:
    """Raises the error of an expert kernel's status; `rule` describes valid row numbers."""
    if status == STATUS_BAD_ROW:
        raise ValueError(rule)
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for {num_rows} routed rows")
    if status == STATUS_DAMAGED:
        raise CheckpointError(
            "escapes of an expert in the lossless code do not fit its rows; pack the checkpoint "
            "again"
        )


STEP_ROWS = 64  # routed rows of a step; with more, checks are a small part of a call


class ExpertStep:
    """`expert_ffn` and `combine_assignments` with the same bits, checked once instead of per call.

    `most_rows` is the largest number of routed rows of a step; 0 if the native kernel takes none.
    """

    def __init__(self, shape: ExpertShape, activation: str | ActivationSpec) -> None:
        self.shape = shape
        library = native_library()
        self.most_rows = self._row_limit = 0
        function = kernel_activation(activation)
        if library is not None and shape.dtype in DTYPE_CODES and function is not None:
            self._row_limit = min(row_limit(library, shape), STEP_ROWS)
            self.most_rows = STEP_ROWS
            self._row_dtypes = shape.row_dtypes
            self._dims = shape[:3]
            self._activation, self._function = activation, function
            self._bias_code = DTYPE_CODES.get(shape.bias_dtype, 0)

    def layer(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        expert_of_row_R: Sequence[int],
        experts: Sequence[ExpertWeights],
    ) -> Tensor | None:
        """A whole layer: the weighted sums `[T, O]` over each token's experts.

        Args:
            weights_TK: Gate weights.
            expert_of_row_R: For every choice of every token, its index in `experts`.
            experts: Each once.

        Returns:
            None for cases that `expert_ffn` handles: many rows, another dtype or shape, gradients.

        Raises:
            MemoryError: There is no memory to work in.
            ValueError: A row names no expert.
        """
        num_tokens, num_choices = weights_TK.shape
        num_rows = num_tokens * num_choices
        # each expert's own number of rows decides for it, in `expert_ffn` too
        own_rows = 1 if len(experts) == num_rows else num_rows
        if own_rows > self._row_limit:
            own_rows = max(Counter(expert_of_row_R).values(), default=0)
        library = native_library()
        if (
            library is None
            or not 0 < own_rows <= self._row_limit
            or not 0 < num_choices <= MAX_CHOICES
            or num_rows > self.most_rows
            or len(expert_of_row_R) != num_rows
            or x_TD.shape != (num_tokens, self._dims[0])
            or x_TD.dtype not in self._row_dtypes
            or weights_TK.dtype not in DTYPE_CODES
            or not (x_TD.is_cpu and x_TD.is_contiguous())
            or not (weights_TK.is_cpu and weights_TK.is_contiguous())
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or forward_ad._current_level >= 0
        ):
            return None
        structs = [one.c_struct for one in experts if one.c_struct and one.shape == self.shape]
        if len(structs) < len(experts):
            return None
        out_TO = x_TD.new_empty((num_tokens, self._dims[2]))
        status = library.expert_step(
            b"".join(structs), len(experts), array("q", expert_of_row_R).tobytes(),
            x_TD.data_ptr(), self._dims[0] * x_TD.element_size(), num_tokens, num_choices,
            weights_TK.data_ptr(), out_TO.data_ptr(), *self._dims,
            DTYPE_CODES[x_TD.dtype], DTYPE_CODES[self.shape.dtype], self._bias_code,
            DTYPE_CODES[weights_TK.dtype], *self._function,
            torch.get_num_threads() == library.num_threads,
        )  # fmt: skip
        if status:
            _refuse(status, f"expert_of_row must be in [0, {len(experts)})", num_rows)
        return out_TO

    def rows(
        self,
        x_TD: Tensor,
        experts: Sequence[ExpertWeights],
        counts: Sequence[int],
        token_ids_R: Sequence[int],
        destinations_R: Sequence[int],
        out_RO: Tensor,
    ) -> bool:
        """Rows of some experts, not summed, with arguments as in `expert_ffn`.

        Returns False for cases that `expert_ffn` handles.
        """
        library = native_library()
        if (
            library is None
            or not experts
            or max(counts) > self._row_limit
            or len(destinations_R) > self.most_rows
            or x_TD.dtype not in self._row_dtypes
            or out_RO.dtype is not x_TD.dtype
            or x_TD.shape[1:] != self._dims[:1]
            or out_RO.shape[1:] != self._dims[2:]
            or not (x_TD.is_cpu and x_TD.stride(1) == 1)
            or not (out_RO.is_cpu and out_RO.stride(1) == 1)
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or forward_ad._current_level >= 0
        ):
            return False
        structs = [one.c_struct for one in experts if one.c_struct and one.shape == self.shape]
        if len(structs) < len(experts):
            return False
        rows = counts, token_ids_R, destinations_R, out_RO
        kind = {"shape": self.shape, "activation": self._activation}
        call_kernel(library, x_TD, b"".join(structs), *rows, **kind)
        return True
