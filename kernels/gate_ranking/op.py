"""A gate that is asked whom it prefers, again and again, for one row or a few."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from moe_runtime.kernels.gate_ranking.reference import rank_reference
from moe_runtime.kernels.native import DTYPE_CODES, native_library

_MOST_DIMS, _MOST_EXPERTS = 16384, 1024
_DTYPES = (torch.float32, torch.bfloat16)


class GateRanking:
    """Ranks experts by a gate's logits.

    One row on the CPU is one native call: in torch a product, a conversion and a sort of a few
    dozen numbers take longer than the arithmetic. Logits are sums in fp32 in another order than
    torch's, so experts whose logits all but agree may change places.

    Attributes:
        dim: D, of the hidden states that it takes.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None, num_ranks: int) -> None:
        """Checks the gate.

        Args:
            weight_ED: any floating type.
            bias_E: None where there is none.
            num_ranks: how many experts to name, at most E.

        Raises:
            ValueError: the shapes do not fit, or there are fewer experts.
        """
        if weight_ED.ndim != 2 or not 0 < num_ranks <= len(weight_ED):
            raise ValueError(
                f"weight must be [E, D] with E of at least {num_ranks}, got {list(weight_ED.shape)}"
            )
        if bias_E is not None and bias_E.shape != (len(weight_ED),):
            raise ValueError(f"bias must be [{len(weight_ED)}], got {list(bias_E.shape)}")
        self._weight = weight_ED
        self._bias = None if bias_E is None else bias_E.float().contiguous()
        self._num_ranks = num_ranks
        self.dim = weight_ED.shape[1]
        self._ranked = (ctypes.c_int64 * num_ranks)()
        self._records = self._make_records()

    def __call__(self, hidden_BD: Tensor) -> list[list[int]]:
        """The experts of largest logit for each row, the largest first.

        Args:
            hidden_BD: floating, on the gate's device.

        Returns:
            ``num_ranks`` experts a row.
        """
        is_one_row = hidden_BD.shape == (1, self._weight.shape[1])
        record = self._records.get(hidden_BD.dtype) if is_one_row else None
        library = native_library()
        if record is None or library is None or not hidden_BD.is_contiguous():
            ranked = rank_reference(hidden_BD, self._weight, self._bias, self._num_ranks)
            return ranked.tolist()
        library.rank_experts(hidden_BD.data_ptr(), record, self._ranked)
        return [self._ranked[:]]

    def record(self, dtype: torch.dtype) -> bytes | None:
        """The gate as rank.c reads it for hidden states of a type; None where it cannot.

        Good for as long as this object lives.
        """
        return None if native_library() is None else self._records.get(dtype)

    def _make_records(self) -> dict[torch.dtype, bytes]:
        """The gate as rank.c reads it, for the types of hidden states that it takes."""
        weight, bias = self._weight, self._bias
        (num_experts, dim), fits = weight.shape, weight.is_cpu and weight.dtype in _DTYPES
        if not fits or weight.stride(1) != 1 or dim > _MOST_DIMS or num_experts > _MOST_EXPERTS:
            return {}
        return {
            dtype: struct.pack(
                "8q",
                weight.data_ptr(),
                weight.stride(0) * weight.element_size(),
                0 if bias is None else bias.data_ptr(),
                num_experts,
                dim,
                self._num_ranks,
                DTYPE_CODES[weight.dtype],
                DTYPE_CODES[dtype],
            )
            for dtype in _DTYPES
        }
