"""Ranks experts by a gate's logits, and the native look-ahead predictor built on it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from moe_runtime.kernels.native import DTYPE_CODES, native_library, require_native

MOST_TOKENS = 16  # of a step with look-ahead; more tokens visit most experts
_MOST_DIMS, _MOST_EXPERTS = 16384, 1024
_DTYPES = (torch.float32, torch.bfloat16)


class GateRanking:
    """Ranks experts by a gate's logits.

    One row on a CPU is one native call; in torch the product, conversion and sort of a few dozen
    numbers take longer than the arithmetic. The order of fp32 sums differs from torch's, so experts
    with nearly equal logits may swap places. Raises ValueError if shapes do not fit.

    Args:
        weight_ED: Any floating dtype.
        bias_E: Or None.
        num_ranks: Experts to name, at most E.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None, num_ranks: int) -> None:
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
        self._structs = self._make_structs()

    def __call__(self, hidden_BD: Tensor) -> list[list[int]]:
        """The `num_ranks` experts with the largest logits for each row, best first."""
        is_one_row = hidden_BD.shape == (1, self._weight.shape[1])
        struct = self._structs.get(hidden_BD.dtype) if is_one_row else None
        library = native_library()
        if struct is None or library is None or not hidden_BD.is_contiguous():
            return self._reference(hidden_BD).tolist()
        library.rank_experts(hidden_BD.data_ptr(), struct, self._ranked)
        return [self._ranked[:]]

    def c_struct(self, dtype: torch.dtype) -> bytes | None:
        """The C struct `Gate` for hidden states of a dtype, or None; valid as long as this
        object.
        """
        return None if native_library() is None else self._structs.get(dtype)

    def _reference(self, hidden_BD: Tensor) -> Tensor:
        logits_BE = linear(hidden_BD.float(), self._weight.float(), self._bias)
        return logits_BE.argsort(dim=1, descending=True, stable=True)[:, : self._num_ranks]

    def _make_structs(self) -> dict[torch.dtype, bytes]:
        weight, bias = self._weight, self._bias
        (num_experts, dim), fits = weight.shape, weight.is_cpu and weight.dtype in _DTYPES
        if not fits or weight.stride(1) != 1 or dim > _MOST_DIMS or num_experts > _MOST_EXPERTS:
            return {}
        bias_at = 0 if bias is None else bias.data_ptr()
        place = weight.data_ptr(), weight.stride(0) * weight.element_size(), bias_at
        sizes = num_experts, dim, self._num_ranks, DTYPE_CODES[weight.dtype]
        return {dtype: struct.pack("8q", *place, *sizes, DTYPE_CODES[dtype]) for dtype in _DTYPES}


class NativeLookAhead:
    """Predicts the experts of the next layers from the input of a layer's gate, in one native call.

    Specified by `LookaheadPredictor` of `policies/prediction`. Raises NativeUnavailableError
    without the native library, and ValueError for gates of another dtype or size.

    Args:
        gates_DL: The gate of each layer, by distance.
        top_k: Experts per token and layer.
        dtype: Of the hidden states.
        prior: Observations of all layers together that count as much as one of the layer itself.
        remembered: Weight that an observation keeps with each later one of its layer.
        believed: `[R]` initial probability of each rank.
        least_chance: Less probable experts are not named.

    Attributes:
        experts: `layer * E + expert` of the last call, nearest layer and likeliest expert first.
        chances: Their probabilities.
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
        library = require_native()
        structs = [gate.c_struct(dtype) for gates in gates_DL for gate in gates]
        if any(struct is None for struct in structs):
            raise ValueError(f"the native look-ahead cannot ask these gates about {dtype}")
        self._gates = gates_DL  # what the structs point to
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
        joined = b"".join(struct for struct in structs if struct is not None)
        self._gate_bytes = ctypes.create_string_buffer(joined, len(joined))
        sizes = (len(joined) // len(structs), num_layers, num_distances, MOST_TOKENS, num_ranks)
        self._state = struct.pack(
            "P8q3d9P", ctypes.addressof(self._gate_bytes), *sizes, num_experts, top_k,
            gates_DL[0][0].dim * dtype.itemsize, prior, remembered, least_chance,
            *(array.ctypes.data for array in self._arrays),
            ctypes.addressof(self.experts), ctypes.addressof(self.chances),
        )  # fmt: skip
        self._look, self._forget = library.look_ahead, library.look_ahead_anew

    def begin_step(self) -> None:
        """Forgets the predictions of the last step."""
        self._forget(self._state)

    def look(self, layer: int, ids_TK: Tensor, hidden_TD: Tensor, horizon: int) -> int:
        """Records where a layer sent its tokens and returns the number of predicted `experts`.

        `ids_TK` are contiguous int64 ids of at most `MOST_TOKENS` tokens; `hidden_TD` is the
        contiguous input of the gate; `horizon` is the number of layers to look ahead.
        """
        ids, hidden = ids_TK.data_ptr(), hidden_TD.data_ptr()
        return self._look(self._state, layer, ids, ids_TK.shape[0], hidden, horizon)

    def take_counts(self) -> tuple[int, int, int]:
        """Experts visited, predicted, and predicted correctly one layer ahead since the last
        call.
        """
        counts = self._arrays[-1]
        visited, guessed, found = counts.tolist()
        counts[:] = 0
        return visited, guessed, found
