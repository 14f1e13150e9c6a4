"""A normalisation bound for few rows: what `rms_norm` does, checked once instead of always."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.native import DTYPE_CODES, native_library, place_of
from moe_runtime.kernels.rms_norm.op import NATIVE_ROW_LIMIT, native_problem


class BoundRMSNorm:
    """The native normalisation with one weight, for rows of the weight's dtype.

    Remembers an address: `fits` says whether it is still that of the weight.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        """Checks the weight, `[D]`."""
        self._dtype = weight.dtype
        self._dim = weight.shape[0]
        self._address = weight.data_ptr()
        self._place = place_of(weight)
        self._row_bytes = self._dim * weight.element_size()
        able = native_library() is not None and native_problem(weight, weight) is None
        self._value_limit = NATIVE_ROW_LIMIT * self._dim if able else 0
        self._tail = (self._dim, eps, DTYPE_CODES[weight.dtype]) if able else ()

    def fits(self, weight: Tensor) -> bool:
        """Whether a weight still lies where it did, in its type and shape."""
        return place_of(weight) == self._place

    def __call__(self, x: Tensor) -> Tensor | None:
        """Normalises `[..., D]` along its last dimension, in the bits of `rms_norm`.

        Returns:
            None for what has to go through `rms_norm`: many rows, another type, gradients enabled.
        """
        num_values = x.numel()
        if (
            not 0 < num_values <= self._value_limit
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
            x.data_ptr(),
            self._row_bytes,
            num_values // self._dim,
            self._address,
            out.data_ptr(),
            *self._tail,
        )
        return out
