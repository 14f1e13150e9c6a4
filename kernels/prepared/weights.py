"""`linear` and `rms_norm` of few rows, with weights that are checked once instead of always.

Both remember a weight's address, dtype, shape and strides, and check again when these change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    check_status,
    lies_by_rows,
    native_problem,
    native_row_limit,
)
from moe_runtime.kernels.native import DTYPE_CODES, native_library
from moe_runtime.kernels.rms_norm.op import FORMS, ROWS_ALONE, NormForm
from moe_runtime.kernels.rms_norm.op import native_problem as native_norm_problem


class PreparedLinear:
    """The native product with one weight, for rows of the weight's dtype."""

    def __init__(self) -> None:
        self._place: tuple[Any, ...] = ()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x @ weight.T + bias`: `[..., K]` to `[..., N]`, in the bits of `linear`.

        None for what has to go through `linear`: many rows, another type, gradients, autocast.
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
    """The native normalisation with one weight, for rows of the weight's dtype."""

    def __init__(self, form: NormForm) -> None:
        self._place: tuple[Any, ...] = ()
        self._form = FORMS.index(form)

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """`rms_norm` of `[..., D]`, in its bits.

        None for what has to go through `rms_norm`: another type, gradients enabled.
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
