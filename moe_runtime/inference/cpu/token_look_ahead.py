"""The look-ahead of a few tokens in machine code, as the prefetcher asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moe_runtime.kernels.gate_ranking import MOST_TOKENS, GateRanking, NativeLookAhead
from moe_runtime.policies.prediction import Guess, NextGate
from moe_runtime.policies.prediction.hidden import PRIOR, REMEMBERED, believed_at_first
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.inference.expert_partition import ExpertPartition


class TokenLookAhead:
    """Guesses from the tokens' hidden states, by the gates of the coming layers.

    Says what ``LookaheadPredictor`` says, less what is too improbable to matter.
    """

    def __init__(
        self,
        estimator: NextGate,
        native: NativeLookAhead,
        share: ExpertPartition | None,
        dim: int,
        dtype: torch.dtype,
    ) -> None:
        shape = estimator.shape
        self._native = native
        self._top_k, self._dim, self._dtype = shape.top_k, dim, dtype
        self._is_mine = None if share is None else share.owns
        keys = [
            ExpertKey(layer, expert)
            for layer in range(shape.num_layers)
            for expert in range(shape.num_experts)
        ]
        self._key = keys.__getitem__
        self.begin_step = native.begin_step
        self.take_counts = native.take_counts

    def takes(self, ids_TK: torch.Tensor, hidden_TD: torch.Tensor) -> bool:
        """Whether the machine code was made for these: how many, how wide, of which type."""
        return (
            ids_TK.shape[0] <= MOST_TOKENS
            and ids_TK.shape[1] == self._top_k
            and hidden_TD.shape[1] == self._dim
            and hidden_TD.dtype is self._dtype
            and hidden_TD.is_contiguous()
            and ids_TK.dtype is torch.int64
            and ids_TK.is_contiguous()
        )

    def look(
        self, layer: int, ids_TK: torch.Tensor, hidden_TD: torch.Tensor, horizon: int
    ) -> list[Guess]:
        """Takes note of a layer's routing and guesses the next ones', nearest layer first."""
        native = self._native
        number = native.look(layer, ids_TK, hidden_TD, horizon)
        experts, chances = native.experts[:number], native.chances[:number]
        guesses = list(zip(map(self._key, experts), chances, strict=True))
        if self._is_mine is None:
            return guesses
        return [guess for guess in guesses if self._is_mine(guess[0])]


def make_token_look_ahead(
    estimator: NextGate,
    gates_DL: Sequence[Sequence[GateRanking]],
    dtype: torch.dtype,
    least_chance: float,
    share: ExpertPartition | None,
) -> TokenLookAhead | None:
    """The look-ahead, if the native code can ask these gates."""
    if any(gate.record(dtype) is None for gates in gates_DL for gate in gates):
        return None
    shape = estimator.shape
    native = NativeLookAhead(
        gates_DL,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        dtype=dtype,
        prior=PRIOR,
        remembered=REMEMBERED,
        believed=believed_at_first(estimator.num_ranks, shape.top_k),
        least_chance=least_chance,
    )
    return TokenLookAhead(estimator, native, share, gates_DL[0][0].dim, dtype)
