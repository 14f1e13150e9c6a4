"""What ``auto`` stands for: eviction policy, shares and predictor for a model and a budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    SHARES,
    PrefetchMode,
    require_known,
    require_types,
)
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference import options
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.memory.layout import ExpertLayout
from moe_runtime.policies import prediction
from moe_runtime.policies.eviction import LIVE_POLICIES, LayerShares, Setting, make_policy
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from moe_runtime.policies.prediction import Estimator

AUTO = "auto"
GATES, COUNTS = "next-gate", "running-counts"
"""Predictors that stand for others: the model's own gates tell most, counts are always there."""
_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "path_or_id": (str, Path),
    "device": (str, int, torch.device),
    "dtype": (str, torch.dtype),
    **dict.fromkeys(
        ("policy", "prefetch", "shares", "cache_code", "activations", "misses"), (str,)
    ),
    "predictor": (str, Path),
    **dict.fromkeys(("trace", "timeline", "placement"), (str, Path, _NONE)),
    "max_tokens": (int, _NONE),
    "io_threads": (int,),
    "warm_up": (bool,),
    "progress": (cast("type", Callable), _NONE),
}


@dataclass(frozen=True)
class Guessers:
    """Who guesses what will be routed to.

    Attributes:
        reader: for reads ahead of demand; None where there are none.
        policy_estimator: for the policy ``predicted``, if the named predictor guesses from
            routing alone. An object of its own: each learns from what it is shown.
        table_bytes: memory that their tables take.
    """

    reader: Estimator | None
    policy_estimator: Estimator | None
    table_bytes: int


def resolve_guessers(
    mode: PrefetchMode,
    policy: str,
    predictor: str | Path,
    model: torch.nn.Module,
    block_names: Sequence[str],
    signature: ModelSignature,
) -> Guessers:
    """The estimators that a way of prefetching and a policy need.

    Args:
        mode: of prefetching.
        policy: a name, or ``auto``.
        predictor: a name, the file of a trained one, or ``auto`` for one that needs no training.
        model: whose gates may be asked.
        block_names: of the layers' blocks in the model.
        signature: the model.

    Raises:
        CheckpointError: the predictor's file cannot be used, or belongs to another model.
    """
    reader, table_bytes = None, 0
    if mode is not PrefetchMode.OFF:
        named = _resolve_predictor(predictor, model, block_names, signature)
        reader = options.make_live_estimator(named, signature)
        table_bytes = options.learned_bytes(named, reader)
    policy_estimator = _routing_estimator(policy, predictor, signature)
    if policy_estimator is not None:
        table_bytes += options.learned_bytes(predictor, policy_estimator)
    return Guessers(reader, policy_estimator, table_bytes)


def check_types(given: Mapping[str, object]) -> None:
    """Refuses options of `load` that have a wrong type.

    Args:
        given: all of them by name.

    Raises:
        TypeError: one has; memory sizes and the group are looked at where they are read.
    """
    require_types(_TYPES, given)


def check_names(
    policy: str,
    shares: str,
    predictor: str | Path,
    cache_code: str,
    activations: str = "exact",
) -> None:
    """Refuses names that nothing has, before anything is loaded.

    Raises:
        CheckpointError: the predictor's file is missing, or is not a predictor.
        ValueError: no policy, predictor, code, kind of shares or of activations has it.
    """
    require_known("policy", policy, (AUTO, *LIVE_POLICIES))
    require_known("shares", shares, SHARES)
    require_known("cache_code", cache_code, CACHE_CODES)
    require_known("activations", activations, ACTIVATIONS)
    if predictor != AUTO:
        options.check_predictor(predictor)


def resolve_policy(
    policy: str,
    shares: str,
    signature: ModelSignature,
    checkpoint: Path,
    num_slots: int,
    trained: Estimator | None = None,
    expert_bytes: int | None = None,
) -> PolicyChoice:
    """The policy and shares that were named, or for ``auto`` the ones that replay best.

    Args:
        policy: a name, or ``auto``.
        shares: ``even``, ``adaptive``, or ``auto``: even unless the policy's choice says otherwise.
        signature: the model.
        checkpoint: its folder or file.
        num_slots: experts that fit where they are computed from.
        trained: a predictor of routing that was given, for the policy ``predicted``.
        expert_bytes: bytes of an expert.
    """
    chosen = PolicyChoice(policy=policy, adaptive=False, reason="")
    if policy == AUTO:
        recent = options.read_recent(signature, checkpoint)
        chosen = options.choose_policy(signature, recent, num_slots, trained, expert_bytes)
    elif policy == "predicted":
        name = COUNTS if trained is None else trained.name
        chosen = replace(chosen, predictor=name)
    if shares == AUTO:
        return chosen
    return replace(chosen, adaptive=shares == "adaptive")


def _routing_estimator(
    policy: str, predictor: str | Path, signature: ModelSignature
) -> Estimator | None:
    """The named predictor, if it guesses from routing alone and the policy may ask one."""
    if predictor == AUTO or policy not in (AUTO, "predicted"):
        return None
    estimator = options.make_live_estimator(predictor, signature)
    return None if estimator.needs_hidden else estimator


def read_costs(layouts: Mapping[ExpertKey, ExpertLayout]) -> dict[ExpertKey, float] | None:
    """Bytes that a miss of each expert reads; None where they are the same for all."""
    costs = {key: float(layout.tensor_bytes) for key, layout in layouts.items()}
    return costs if len(set(costs.values())) > 1 else None


def policy_maker(
    choice: PolicyChoice,
    signature: ModelSignature,
    policy_estimator: Estimator | None,
    layouts: Mapping[ExpertKey, ExpertLayout],
) -> Callable[[MemoryPlan], LayerShares]:
    """Makes the chosen policy for a tier; each has a memory of its own.

    Args:
        choice: policy, shares and, for ``predicted``, the predictor's name.
        signature: the model.
        policy_estimator: the predictor, if it is not one that needs no training.
        layouts: what each expert reads, for the policies that go by costs.
    """
    shape, costs = shape_of(signature), read_costs(layouts)

    def make(plan: MemoryPlan) -> LayerShares:
        predictor = None
        if choice.predictor:
            is_given = policy_estimator is not None and policy_estimator.name == choice.predictor
            estimator = policy_estimator
            if not is_given:
                estimator = prediction.make_estimator(choice.predictor, shape)
            predictor = prediction.TrackedPredictor(cast("Estimator", estimator))
        return make_policy(
            choice.policy,
            num_slots=plan.num_slots,
            setting=Setting(shape=shape, predictor=predictor, costs=costs),
            adaptive=choice.adaptive,
            reserve=plan.stream_slots(),
        )

    return make


def _resolve_predictor(
    predictor: str | Path,
    model: torch.nn.Module,
    block_names: Sequence[str],
    signature: ModelSignature,
) -> str | Path:
    """For ``auto`` the model's own gates, which tell most; counts where they are not found."""
    if predictor != AUTO:
        return predictor
    try:
        for name in block_names:
            options.find_gate(model, name, shape_of(signature))
    except UnsupportedModelError:
        return COUNTS
    return GATES
