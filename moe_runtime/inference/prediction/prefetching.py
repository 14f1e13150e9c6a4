"""Connects a model's forward passes to a predictor and its prefetches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_runtime.config import PrefetchMode
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.inference.prediction.predictors import as_numpy, find_gate
from moe_runtime.inference.steps import LayerRouting, Listener, Listeners, Step
from moe_runtime.kernels.decode_step.gate_ranking import MOST_TOKENS, GateRanking, NativeLookAhead
from moe_runtime.memory.prefetcher import Guesses, Prefetcher
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction import (
    Estimator,
    Guess,
    HiddenLookahead,
    LayerRouted,
    NextGate,
    Predictor,
    make_predictor,
)
from moe_runtime.policies.prediction.hidden import PRIOR, REMEMBERED, believed_at_first
from moe_runtime.policies.prefetch import PrefetchRules
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.inference.expert_partition import ExpertPartition
    from moe_runtime.inference.learning import KeptLearning


def _bind_ranker(
    estimator: Estimator, model: torch.nn.Module, block_names: Sequence[str], place: torch.device
) -> list[list[GateRanking]]:
    """Binds an estimator of hidden states to the model's own gates, as tensors where it computes.

    Returns rankings by distance and layer; none for other estimators.
    """
    if not isinstance(estimator, NextGate):
        return []
    if isinstance(estimator, HiddenLookahead):
        maps = torch.from_numpy(estimator.maps_DLEX).to(place)
        offsets = torch.from_numpy(estimator.offsets_DLE).to(place)
        gates = [
            list(zip(*of_distance, strict=True)) for of_distance in zip(maps, offsets, strict=True)
        ]
    else:
        own = [find_gate(model, name, estimator.shape) for name in block_names]
        gates = [own] * estimator.max_distance
    rankings = [
        [GateRanking(weight, bias, estimator.num_ranks) for weight, bias in of_distance]
        for of_distance in gates
    ]

    def rank(hidden_BD: torch.Tensor, distance: int, layer: int) -> list[list[int]]:
        return rankings[distance - 1][layer](hidden_BD)

    estimator.ranker = rank
    return rankings


class PrefetchListener(Listener):
    """Passes steps, and the routing of layers while it is wanted, to a prefetcher."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        look_ahead: TokenLookAhead | None,
        *,
        needs_weights: bool,
        needs_hidden: bool,
    ) -> None:
        self._prefetcher = prefetcher
        self._look_ahead = look_ahead
        self._needs_weights = needs_weights
        self._needs_hidden = needs_hidden
        # each conversion takes as long as a small gate
        self._no_weights = np.zeros((0, 0), np.float32)

    def begin(self, step: Step) -> None:
        for request in step.ended:
            self._prefetcher.finish(request)
        self._prefetcher.step(step.requests, lambda: step.token_ids)
        self.hears_demands = self.follows_requests = self._prefetcher.wants_layers

    def demanded(self, routing: LayerRouting) -> None:
        prefetcher, look_ahead = self._prefetcher, self._look_ahead
        layer, keys, hidden_TD, ids_TK, weights_TK = routing
        if look_ahead is not None and look_ahead.takes(ids_TK, hidden_TD):
            prefetcher.tokens_routed(layer, keys, ids_TK, hidden_TD)
            return
        event = LayerRouted(
            layer=layer,
            expert_ids=as_numpy(ids_TK),
            gate_weights=as_numpy(weights_TK) if self._needs_weights else self._no_weights,
            hidden=hidden_TD if self._needs_hidden else None,
        )
        prefetcher.routed(event, keys)

    def forget(self) -> None:
        self._prefetcher.forget()


def open_prefetcher(
    model: torch.nn.Module,
    listeners: Listeners,
    block_names: Sequence[str],
    store: ExpertStore[Any],
    estimator: Estimator,
    mode: PrefetchMode,
    place: torch.device,
    share: ExpertPartition | None = None,
    learning: KeptLearning | None = None,
) -> Prefetcher:
    """Opens a prefetcher that listens to every forward pass of a model.

    Raises:
        UnsupportedModelError: the predictor needs the gates, and they are not where gates are.
    """
    gates_DL = _bind_ranker(estimator, model, block_names, place)
    predictor: Predictor = make_predictor(estimator)
    begins_empty = [] if learning is None else learning.keep(predictor)
    if begins_empty and type(estimator).finish is not Estimator.finish:
        warnings.warn(
            f"{estimator.name} begins empty: it guesses from requests of this model that have "
            "ended, and keeps them for later runs",
            MoERuntimeWarning,
            stacklevel=2,
        )
    if share is not None:
        predictor = share.own_guesses(predictor)
    rules, shape = PrefetchRules(), estimator.shape
    look_ahead = None
    dtype = getattr(model, "dtype", torch.float32)
    if isinstance(estimator, NextGate) and gates_DL:
        least_chance = rules.min_probability / 2  # less protects no expert's slot from a guess
        look_ahead = make_token_look_ahead(estimator, gates_DL, dtype, least_chance, share)
    prefetcher = Prefetcher(
        Guesses(store),
        predictor,
        mode,
        num_layers=len(block_names),
        top_k=shape.top_k,
        rules=rules,
        token_look_ahead=look_ahead,
    )
    listeners.add(
        PrefetchListener(
            prefetcher,
            look_ahead,
            needs_weights=predictor.needs_history,
            needs_hidden=estimator.needs_hidden,
        )
    )
    return prefetcher


class TokenLookAhead:
    """Guesses from the tokens' hidden states, by the gates of the coming layers.

    As ``LookaheadPredictor``, less what is too improbable to matter.
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
        """Whether the machine code was made for these shapes and types."""
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
        """Notes a layer's routing and guesses the next layers', nearest first."""
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
    """The look-ahead, if the native code takes these gates."""
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
