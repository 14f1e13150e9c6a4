"""The product of few rows with one quantised or coded weight that is checked once."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.linear.op import ROWS_PER_CALL, check_status
from moe_runtime.kernels.linear.quantized import PLANES_DTYPES, packed_row_limit
from moe_runtime.kernels.lossless import PlanesMatrix
from moe_runtime.kernels.native import DTYPE_CODES, native_library
from moe_runtime.kernels.quantized import QuantizedMatrix


class PreparedQuantizedLinear:
    """The native product with one weight, which lies where it lies and never changes.

    Attributes:
        row_limit: rows up to which it is taken.
    """

    def __init__(self, weight: QuantizedMatrix | PlanesMatrix) -> None:
        """Notes where the parts are; the weight must be kept as long as this."""
        self._dim_out, self._dim_in = weight.shape
        self.row_limit, library, record = 0, native_library(), weight.native_record()
        if library is not None and record is not None:
            words, self._kept = record
            self._words = array("q", words)
            self._address = self._words.buffer_info()[0]
            self.row_limit = min(packed_row_limit(library, weight), ROWS_PER_CALL)
        is_bf16 = isinstance(weight, PlanesMatrix)
        self._dtypes = PLANES_DTYPES if is_bf16 else tuple(DTYPE_CODES)
        self._bias_dtypes = (torch.bfloat16,) if is_bf16 else tuple(DTYPE_CODES)

    def address(self, dtype: torch.dtype) -> int:
        """Where the C struct `Matrix` is; 0 where kernels cannot multiply rows of a dtype by it."""
        return self._address if self.row_limit and dtype in self._dtypes else 0

    def _takes_bias(self, bias: Tensor) -> bool:
        is_whole = bias.shape == (self._dim_out,) and bias.is_contiguous()
        return is_whole and bias.dtype in self._bias_dtypes

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """`x @ weight.T + bias`: `[..., K]` to `[..., N]`, in the bits of `quantized_linear`.

        None for what has to go through that: many rows, another type, gradients, autocast.
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
