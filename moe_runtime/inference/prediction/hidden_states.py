"""Records what the gates of a model are given, for predictors that learn from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.prediction.predictors import find_gates
from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.policies.prediction import HiddenLookahead, NextGate, Routes, Shape
from moe_runtime.policies.prediction.base import shape_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def record_hidden(
    model: PreTrainedModel,
    windows: Sequence[Sequence[int]],
    *,
    progress: Callable[[int], None] | None = None,
) -> tuple[Routes, np.ndarray]:
    """Runs a loaded model over texts and keeps what each layer's gate was given.

    Returns the routes, and ``[T, L, D]`` float16.
    """
    shape = shape_of(cast(Any, model).moe.facts.signature)
    hidden: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]
    ids: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]
    weights: list[list[np.ndarray]] = [[] for _ in range(shape.num_layers)]

    class Keep(Listener):
        hears_routing = True

        def routed(self, routing: LayerRouting) -> None:
            hidden[routing.layer].append(routing.hidden_TD.half().cpu().numpy())
            ids[routing.layer].append(routing.ids_TK.cpu().numpy())
            weights[routing.layer].append(routing.weights_TK.float().cpu().numpy())

    with cast(Any, model)._steps.listeners.also(Keep()), torch.no_grad():
        for number, window in enumerate(windows):
            model(input_ids=torch.tensor([list(window)], device=model.device), use_cache=False)
            if progress is not None:
                progress(number + 1)
    routes = Routes(
        shape=shape,
        expert_ids=np.stack([np.concatenate(layer) for layer in ids], axis=1).astype(np.int64),
        gate_weights=np.stack([np.concatenate(layer) for layer in weights], axis=1),
        token_ids=np.concatenate([np.asarray(window, dtype=np.int64) for window in windows]),
        offsets=np.cumsum([0, *map(len, windows)]).astype(np.int64),
    )
    return routes, np.stack([np.concatenate(layer) for layer in hidden], axis=1)


def fit_lookahead(
    model: PreTrainedModel, routes: Routes, hidden_TLD: np.ndarray
) -> HiddenLookahead:
    """Trains the look-ahead from hidden states for a model.

    Raises:
        UnsupportedModelError: the model's gates are not where gates are.
    """
    estimator = HiddenLookahead(routes.shape)
    estimator.fit_hidden(routes, hidden_TLD, *_gates_of(model, routes.shape))
    return estimator


def next_gate(model: PreTrainedModel, shape: Shape) -> NextGate:
    """The look-ahead that needs no training, with copies of a model's gates.

    Raises:
        UnsupportedModelError: the model's gates are not where gates are.
    """
    estimator = NextGate(shape)
    estimator.set_gates(*_gates_of(model, shape))
    return estimator


def _gates_of(model: PreTrainedModel, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    blocks = [name.rpartition(".")[0] for name, _ in _expert_modules(model)]
    return find_gates(model, blocks, shape)


def _expert_modules(model: torch.nn.Module) -> list[tuple[str, OffloadedExperts]]:
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, OffloadedExperts)]
    return sorted(found, key=lambda pair: pair[1].layer)
