"""A weight bound for products with few rows: what `linear` does, checked once instead of always.

A decode step calls it for every weight of a model; what it asks about a weight has the same
answer every time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.linear.op import (
    ROWS_PER_CALL,
    check_status,
    native_problem,
    native_row_limit,
)
from moe_runtime.kernels.native import DTYPE_CODES, native_library, place_of


class PreparedLinear:
    """The native product with one weight, for rows of the weight's dtype.

    Remembers addresses: `fits` says whether they are still those of weight and bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Checks the weight.

        Args:
            weight: `[N, K]`.
            bias: `[N]`, or None.
        """
        library = native_library()
        self._dtype = weight.dtype
        self._dim_out, self._dim_in = weight.shape
        self._place = place_of(weight)
        self._bias_place = None if bias is None else place_of(bias)
        self._row_bytes = self._dim_in * weight.element_size()
        self._row_limit = 0
        bias_fits = bias is None or bias.is_contiguous()
        if library is not None and bias_fits and native_problem(weight, weight, bias) is None:
            self._row_limit = min(native_row_limit(library, weight.dtype), ROWS_PER_CALL)
            stride = weight.stride(0) * weight.element_size()
            self._weight = (weight.data_ptr(), stride, None if bias is None else bias.data_ptr())
            out_stride, code = self._dim_out * weight.element_size(), DTYPE_CODES[weight.dtype]
            self._out = (out_stride, self._dim_in, self._dim_out, code, code)

    def fits(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether weight and bias still lie where they did, in their type and shape."""
        bias_place = None if bias is None else place_of(bias)
        return place_of(weight) == self._place and bias_place == self._bias_place

    def __call__(self, x: Tensor) -> Tensor | None:
        """`x @ weight.T + bias`: `[..., K]` to `[..., N]`, in the bits of `linear`.

        Returns:
            None for what has to go through `linear`: many rows, another type, gradients enabled or
            autocast.
        """
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
        status = library.linear(
            x.data_ptr(),
            self._row_bytes,
            num_rows,
            *self._weight,
            out.data_ptr(),
            *self._out,
            library.shares_threads(),
        )
        check_status(status, num_rows, self._dim_in)
        return out
