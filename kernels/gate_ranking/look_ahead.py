"""A look-ahead for a few tokens at a time, with its memory where the native code finds it.

The object of `policies/prediction/lookahead.py` is the specification: told the same, both say the
same. Here all that a layer asks is one native call, because prediction must not take longer than
what it saves.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_runtime.kernels.gate_ranking.op import GateRanking
from moe_runtime.kernels.native import require_native

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
