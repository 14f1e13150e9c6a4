"""A gate that is asked whom it prefers, again and again, for one row or a few."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_runtime.kernels.native import DTYPE_CODES, native_library, require_native

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


MOST_TOKENS = 16
"""Tokens of a step that are looked ahead for, one of each sequence: more visit most experts."""
_ADDRESS = "P"


class NativeLookAhead:
    """Names the likely experts of the next layers from what a layer's gate was given.

    Attributes:
        experts: ``layer * E + expert`` of what the last call named, nearest layer first, and in a
            layer the likeliest first.
        chances: their probabilities.
    """

    def __init__(
        self,
        gates_DL: Sequence[Sequence[GateRanking]],
        *,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype,
        prior: float,
        remembered: float,
        believed: Sequence[float],
        least_chance: float,
    ) -> None:
        """Lays out the memory.

        Args:
            gates_DL: whom to ask about a layer, by distance and layer.
            num_experts: experts of a layer.
            top_k: experts that a token visits in a layer.
            dtype: of the hidden states.
            prior: lists of all layers together that weigh as much as one of the layer's own.
            remembered: weight that a list keeps with each further one of its layer.
            believed: ``[R]`` probability of each rank while nothing is known.
            least_chance: what is less probable is not named.

        Raises:
            NativeUnavailableError: there is no native library.
            ValueError: it cannot ask gates of this type or size.
        """
        library = require_native()
        records = [gate.record(dtype) for gates in gates_DL for gate in gates]
        if any(record is None for record in records):
            raise ValueError(f"the native look-ahead cannot ask these gates about {dtype}")
        self._gates = gates_DL  # what the records point to
        num_distances, num_layers, num_ranks = len(gates_DL), len(gates_DL[0]), len(believed)
        lists = (num_distances, num_layers)
        at_first = prior * np.asarray(believed, np.float64)
        self._arrays = (
            np.zeros((*lists, num_ranks)),
            np.zeros(lists),
            np.tile(at_first, (num_distances, 1)),
            np.full(num_distances, float(prior)),
            np.zeros((*lists, MOST_TOKENS, num_ranks), np.int64),
            np.zeros(lists, np.int64),
            np.zeros(3, np.int64),
        )
        self.experts = (ctypes.c_int64 * (num_distances * num_experts))()
        self.chances = (ctypes.c_double * (num_distances * num_experts))()
        self._joined = b"".join(record for record in records if record is not None)
        head = (len(self._joined) // len(records), num_layers, num_distances, MOST_TOKENS)
        self._gate_bytes = ctypes.create_string_buffer(self._joined, len(self._joined))
        self._state = struct.pack(
            f"{_ADDRESS}8q3d9{_ADDRESS}",
            ctypes.addressof(self._gate_bytes),
            *head,
            num_ranks,
            num_experts,
            top_k,
            gates_DL[0][0].dim * dtype.itemsize,
            prior,
            remembered,
            least_chance,
            *(array.ctypes.data for array in self._arrays),
            ctypes.addressof(self.experts),
            ctypes.addressof(self.chances),
        )
        self._look, self._forget = library.look_ahead, library.look_ahead_anew

    def begin_step(self) -> None:
        """Forgets what was guessed for a step that ended."""
        self._forget(self._state)

    def look(self, layer: int, ids_TK: Tensor, hidden_TD: Tensor, horizon: int) -> int:
        """Takes note of where a layer sent the tokens, and looks ahead.

        Args:
            layer: which one.
            ids_TK: int64, contiguous: the experts that they go to; at most ``MOST_TOKENS``.
            hidden_TD: contiguous, what the gate was given.
            horizon: how many layers to look ahead.

        Returns:
            How many experts are named in ``experts``.
        """
        ids, hidden = ids_TK.data_ptr(), hidden_TD.data_ptr()
        return self._look(self._state, layer, ids, ids_TK.shape[0], hidden, horizon)

    def take_counts(self) -> tuple[int, int, int]:
        """Experts visited, guessed, and guessed rightly one layer ahead since the last call."""
        counts = self._arrays[-1]
        visited, guessed, found = counts.tolist()
        counts[:] = 0
        return visited, guessed, found


def rank_reference(
    hidden_BD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, num_ranks: int
) -> Tensor:
    """The experts of largest logit, the largest first, of equals the first: `[B, num_ranks]`."""
    bias = None if bias_E is None else bias_E.float()
    logits_BE = linear(hidden_BD.float(), weight_ED.float(), bias)
    return logits_BE.argsort(dim=1, descending=True, stable=True)[:, :num_ranks]
