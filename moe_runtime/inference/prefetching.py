"""Connects a model's forward passes to a predictor and its prefetches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_runtime.config import nearest
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.cpu.token_look_ahead import make_token_look_ahead
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.expert_partition import ExpertPartition, OwnGuesses
from moe_runtime.inference.routing_record import read_step
from moe_runtime.inference.steps import RequestNumbers
from moe_runtime.kernels.gate_ranking import GateRanking
from moe_runtime.lab.traces.predictor_file import read_predictor, read_predictor_signature
from moe_runtime.lab.traces.routes import shape_of
from moe_runtime.memory.prefetch_slots import Guesses
from moe_runtime.memory.prefetcher import Prefetcher, PrefetchMode
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.policies.prediction import (
    PREDICTORS,
    Estimator,
    HiddenLookahead,
    LayerRouted,
    NextGate,
    Predictor,
    Shape,
    StepBegins,
    make_estimator,
    make_predictor,
)
from moe_runtime.policies.prefetch import PrefetchRules
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from moe_runtime.inference.learning import KeptLearning


def check_predictor(predictor: str | Path) -> None:
    """Refuses a predictor that loading would refuse minutes later.

    Raises:
        CheckpointError: the file is missing, or is not a predictor.
        ValueError: no predictor has this name.
    """
    if is_file_name(predictor):
        read_predictor_signature(predictor)
    elif predictor not in PREDICTORS:
        raise ValueError(
            f"unknown predictor {predictor!r}: {nearest(str(predictor), PREDICTORS)}; "
            "or the file of a trained one, which ends in .npz"
        )


def make_live_estimator(predictor: str | Path, signature: ModelSignature) -> Estimator:
    """The estimator that a caller named: trained, from a file, or one that needs no training.

    Args:
        predictor: a predictor's name, or the file of a trained one.
        signature: what a trained predictor must have been trained for.

    Raises:
        CheckpointError: the file cannot be used, or belongs to another model.
        ValueError: no predictor has this name.
    """
    if is_file_name(predictor):
        return read_predictor(predictor, signature)
    return make_estimator(str(predictor), shape_of(signature))


def learned_bytes(predictor: str | Path, estimator: Estimator | None) -> int:
    """Memory that a trained estimator's tables take: part of the budget.

    Without training there are only counts of a few kilobytes; they are in the fixed reserve.
    """
    if estimator is None or not is_file_name(predictor):
        return 0
    return sum(array.nbytes for array in estimator.state().values())


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


def find_gate(
    model: torch.nn.Module, block_name: str, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's gate: weight ``[E, D]`` and bias ``[E]``, if it has one.

    A gate is the module beside the experts, or a part of one, whose weight has a row for every
    expert.

    Raises:
        UnsupportedModelError: the layer has no such module.
    """
    gates = [
        (weight, getattr(part, "bias", None))
        for child in model.get_submodule(block_name).children()
        for part in (child, *child.children())
        if isinstance(weight := getattr(part, "weight", None), torch.Tensor)
        and weight.ndim == 2
        and len(weight) == shape.num_experts
    ]
    if len(gates) != 1:
        raise UnsupportedModelError(
            f"{block_name}: found no gate with {shape.num_experts} rows beside the experts; use a "
            "predictor that needs routing only, such as running-counts"
        )
    weight, bias = gates[0]
    if isinstance(bias, torch.Tensor) and bias.shape == (shape.num_experts,):
        return weight.detach(), bias.detach()
    return weight.detach(), None


def find_gates(
    model: torch.nn.Module, block_names: Sequence[str], shape: Shape
) -> tuple[np.ndarray, np.ndarray]:
    """Copies of all gates, to train with: weights ``[L, E, D]`` and biases ``[L, E]``, float32.

    Raises:
        UnsupportedModelError: a layer has no gate, or the gates differ in width.
    """
    found = [find_gate(model, name, shape) for name in block_names]
    if len({weight.shape for weight, _ in found}) != 1:
        raise UnsupportedModelError("the gates of this model differ in width between layers")
    no_bias = np.zeros(shape.num_experts, dtype=np.float32)
    biases = [no_bias if bias is None else _as_numpy(bias) for _, bias in found]
    return np.stack([_as_numpy(weight) for weight, _ in found]), np.stack(biases)


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    # each of these costs as much as a small gate, even where it has nothing to do
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is not torch.float32 and tensor.dtype is not torch.int64:
        tensor = tensor.float()
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def attach_prefetcher(
    model: torch.nn.Module,
    block_names: Sequence[str],
    modules: Sequence[OffloadedExperts],
    store: ExpertStore[Any],
    estimator: Estimator,
    mode: PrefetchMode,
    place: torch.device,
    share: ExpertPartition | None = None,
    learning: KeptLearning | None = None,
) -> Prefetcher:
    """Lets a prefetcher watch every forward pass of a model from now on.

    Args:
        model: the model.
        block_names: of its layers' blocks.
        modules: its experts.
        store: where they lie.
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
    if learning is not None:
        learning.keep(predictor)
    if share is not None:
        predictor = OwnGuesses(predictor, share)
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
        num_layers=len(modules),
        top_k=shape.top_k,
        rules=rules,
        token_look_ahead=look_ahead,
    )
    requests = RequestNumbers()

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = read_step(args, kwargs)
        first_request, ended = requests.begin(step)
        for request in ended:
            prefetcher.finish(request)
        sequences = step.sequences + first_request
        prefetcher.step(StepBegins(sequences=sequences, token_ids=step.token_ids))

    # gate weights are for those who remember them; each conversion takes as long as a small gate
    no_weights = np.zeros((0, 0), np.float32)

    def routed(
        layer: int,
        keys: Sequence[ExpertKey],
        hidden_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> None:
        if not prefetcher.wants_layers:
            return
        if look_ahead is not None and look_ahead.takes(ids_TK, hidden_TD):
            prefetcher.tokens_routed(layer, keys, ids_TK, hidden_TD)
            return
        event = LayerRouted(
            layer=layer,
            expert_ids=_as_numpy(ids_TK),
            gate_weights=_as_numpy(weights_TK) if predictor.needs_history else no_weights,
            hidden=hidden_TD if estimator.needs_hidden else None,
        )
        prefetcher.routed(event, keys)

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    for module in modules:
        module.watcher = routed
    return prefetcher


def is_file_name(predictor: str | Path) -> bool:
    """Whether a caller means the file of a trained predictor rather than a predictor's name."""
    return isinstance(predictor, Path) or predictor.endswith(".npz") or "/" in predictor
