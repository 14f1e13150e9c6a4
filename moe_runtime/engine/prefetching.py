"""Connects a model's forward passes to a predictor and its prefetches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_runtime.config import nearest
from moe_runtime.engine.experts import OffloadedExperts
from moe_runtime.engine.share import ExpertShare, OwnGuesses
from moe_runtime.engine.tracing import read_step
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.policies.prediction import (
    PREDICTORS,
    Estimator,
    LayerRouted,
    NextGate,
    Predictor,
    Shape,
    StepBegins,
    TrackedPredictor,
    make_estimator,
)
from moe_runtime.store.cache import ExpertStore
from moe_runtime.store.guesses import Guesses
from moe_runtime.store.prefetch import Prefetcher, PrefetchMode
from moe_runtime.tracing.predictor_file import read_predictor, read_predictor_signature
from moe_runtime.tracing.routes import shape_of
from moe_runtime.types import ExpertKey, ModelSignature


def check_predictor(predictor: str | Path) -> None:
    """Refuses a predictor that loading would refuse minutes later.

    Raises:
        CheckpointError: the file is missing, or is not a predictor.
        ValueError: no predictor has this name.
    """
    if _is_file_name(predictor):
        read_predictor_signature(predictor)
    elif predictor not in PREDICTORS:
        raise ValueError(
            f"unknown predictor {predictor!r}: {nearest(str(predictor), PREDICTORS)}; "
            "or the file of a trained one, which ends in .npz"
        )


def make_live_estimator(
    predictor: str | Path,
    model: torch.nn.Module,
    block_names: Sequence[str],
    signature: ModelSignature,
) -> Estimator:
    """The estimator that a caller named: trained, from a file, or one that needs no training.

    Args:
        predictor: a predictor's name, or the file of a trained one.
        model: where gates are taken from.
        block_names: names of the modules that hold each layer's experts and gate.
        signature: what a trained predictor must have been trained for.

    Raises:
        CheckpointError: the file cannot be used, or belongs to another model.
        UnsupportedModelError: the predictor needs the gates, and they are not where gates are.
        ValueError: no predictor has this name.
    """
    if _is_file_name(predictor):
        estimator = read_predictor(predictor, signature)
    else:
        estimator = make_estimator(str(predictor), shape_of(signature))
    if type(estimator) is NextGate:
        estimator.set_gates(*find_gates(model, block_names, shape_of(signature)))
    return estimator


def find_gates(
    model: torch.nn.Module, block_names: Sequence[str], shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """The gates' weights ``[L, E, D]`` and biases ``[L, E]`` as float32.

    A gate is the module beside the experts whose weight has a row for every expert.

    Raises:
        UnsupportedModelError: a layer has no such module.
    """
    weights, biases = [], []
    for name in block_names:
        gates = [
            (weight, getattr(child, "bias", None))
            for child in model.get_submodule(name).children()
            if isinstance(weight := getattr(child, "weight", None), torch.Tensor)
            and weight.ndim == 2
            and len(weight) == shape.num_experts
        ]
        if len(gates) != 1:
            raise UnsupportedModelError(
                f"{name}: found no gate with {shape.num_experts} rows beside the experts; use a "
                "predictor that needs routing only, such as running-counts"
            )
        weight, bias = gates[0]
        weights.append(_as_numpy(weight))
        if isinstance(bias, torch.Tensor) and bias.shape == (shape.num_experts,):
            biases.append(_as_numpy(bias))
        else:
            biases.append(np.zeros(shape.num_experts, dtype=np.float32))
    if len({weight.shape for weight in weights}) != 1:
        raise UnsupportedModelError("the gates of this model differ in width between layers")
    return np.stack(weights), np.stack(biases)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def attach_prefetcher(
    model: torch.nn.Module,
    modules: Iterable[OffloadedExperts],
    store: ExpertStore[Any],
    estimator: Estimator,
    mode: PrefetchMode,
    share: ExpertShare | None = None,
) -> Prefetcher:
    """Lets a prefetcher watch every forward pass of a model from now on.

    Args:
        model: the model.
        modules: its experts.
        store: where they lie.
        estimator: who guesses.
        mode: how far guesses go.
        share: which experts this process computes; all of them by default.
    """
    predictor: Predictor = TrackedPredictor(estimator)
    if share is not None:
        predictor = OwnGuesses(predictor, share)
    prefetcher = Prefetcher(Guesses(store), predictor, mode)
    first_request = 0
    num_running = 0

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal first_request, num_running
        step = read_step(args, kwargs)
        if step.is_new:
            for request in range(first_request, first_request + num_running):
                prefetcher.finish(request)
            first_request, num_running = first_request + num_running, step.num_sequences
        sequences = step.sequences + first_request
        prefetcher.step(StepBegins(sequences=sequences, token_ids=step.token_ids))

    def routed(
        layer: int, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> None:
        ids = ids_TK.cpu().numpy()
        hidden = hidden_TD.float().cpu().numpy() if estimator.needs_hidden else None
        event = LayerRouted(
            layer=layer,
            expert_ids=ids,
            gate_weights=weights_TK.float().cpu().numpy(),
            hidden=hidden,
        )
        visited = (ExpertKey(layer, expert) for expert in set(ids.ravel().tolist()))
        keys = frozenset(key for key in visited if share is None or share.owns(key))
        prefetcher.routed(event, keys)

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    for module in modules:
        module.watcher = routed
    return prefetcher


def _is_file_name(predictor: str | Path) -> bool:
    return isinstance(predictor, Path) or predictor.endswith(".npz") or "/" in predictor
