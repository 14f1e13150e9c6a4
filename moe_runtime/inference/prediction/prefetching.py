"""Connects a model's forward passes to a predictor and its prefetches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_runtime.config import PrefetchMode
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.inference.cpu.token_look_ahead import TokenLookAhead, make_token_look_ahead
from moe_runtime.inference.prediction.gates import as_numpy, find_gate
from moe_runtime.inference.steps import LayerRouting, Listener, Listeners, Step
from moe_runtime.kernels.gate_ranking import GateRanking
from moe_runtime.memory.prefetcher import Guesses, Prefetcher
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction import (
    Estimator,
    HiddenLookahead,
    LayerRouted,
    NextGate,
    Predictor,
    make_predictor,
)
from moe_runtime.policies.prefetch import PrefetchRules

if TYPE_CHECKING:
    from moe_runtime.inference.expert_partition import ExpertPartition
    from moe_runtime.inference.kept_learning import KeptLearning


def _bind_ranker(
    estimator: Estimator, model: torch.nn.Module, block_names: Sequence[str], place: torch.device
) -> list[list[GateRanking]]:
    """Has an estimator that reads hidden states take them as tensors, where the model computes.

    The gates are the model's own, not copies.

    Returns:
        Whom to ask about a layer, by distance and layer; none for other estimators.

    Raises:
        UnsupportedModelError: the predictor needs the gates, and they are not where gates are.
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
    """Tells a prefetcher of steps, and of the routing of layers while it wants to hear of them."""

    def __init__(
        self,
        prefetcher: Prefetcher,
        look_ahead: TokenLookAhead | None,
        *,
        needs_weights: bool,
        needs_hidden: bool,
    ) -> None:
        """Joins steps with a prefetcher.

        Args:
            prefetcher: who is told.
            look_ahead: the quicker predictor of steps of a few tokens that it was given.
            needs_weights: whether its predictor looks at gate weights.
            needs_hidden: whether it looks at hidden states.
        """
        self._prefetcher = prefetcher
        self._look_ahead = look_ahead
        self._needs_weights = needs_weights
        self._needs_hidden = needs_hidden
        # each conversion takes as long as a small gate
        self._no_weights = np.zeros((0, 0), np.float32)

    def begin(self, step: Step) -> None:
        """Ends what ended, and has the first layers guessed."""
        for request in step.ended:
            self._prefetcher.finish(request)
        self._prefetcher.step(step.requests, lambda: step.token_ids)
        self.hears_demands = self.follows_requests = self._prefetcher.wants_layers

    def demanded(self, routing: LayerRouting) -> None:
        """Has the next layers guessed."""
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
        """The step failed."""
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
    """Lets a prefetcher listen to every forward pass of a model from now on.

    Args:
        model: the model.
        listeners: of the model.
        block_names: of its layers' blocks.
        store: where its experts lie.
        estimator: who guesses.
        mode: how far guesses go.
        place: where the model computes.
        share: which experts this process computes; all of them by default.
        learning: what the estimator begins with, and who keeps what it learns.

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
