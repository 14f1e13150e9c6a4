"""What ``auto`` stands for: eviction policy, shares and predictor for a model and a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from moe_runtime.config import nearest
from moe_runtime.engine.memory import MemoryPlan
from moe_runtime.engine.prefetching import check_predictor, find_gate, make_live_estimator
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.policies.eviction import LIVE_POLICIES, LayerShares, Setting, make_policy
from moe_runtime.policies.prediction import (
    Estimator,
    NextGate,
    RunningCounts,
    TrackedPredictor,
    make_estimator,
)
from moe_runtime.tracing.choice import Choice, choose_policy
from moe_runtime.tracing.recent import read_recent
from moe_runtime.tracing.routes import shape_of
from moe_runtime.types import ModelSignature

AUTO = "auto"
SHARES = (AUTO, "even", "adaptive")


def check_names(policy: str, shares: str, predictor: str | Path) -> None:
    """Refuses names that nothing has, before anything is loaded.

    Raises:
        CheckpointError: the predictor's file is missing, or is not a predictor.
        ValueError: no policy, predictor or kind of shares has this name.
    """
    if policy not in (AUTO, *LIVE_POLICIES):
        raise ValueError(f"unknown policy {policy!r}: {nearest(policy, (AUTO, *LIVE_POLICIES))}")
    if shares not in SHARES:
        raise ValueError(f"unknown shares {shares!r}: {nearest(shares, SHARES)}")
    if predictor != AUTO:
        check_predictor(predictor)


def settle_policy(
    policy: str,
    shares: str,
    signature: ModelSignature,
    num_slots: int,
    trained: Estimator | None = None,
    expert_bytes: int | None = None,
) -> Choice:
    """The policy and shares that were named, or for ``auto`` the ones that replay best.

    Args:
        policy: a name, or ``auto``.
        shares: ``even``, ``adaptive``, or ``auto``: even unless the policy's choice says otherwise.
        signature: the model.
        num_slots: experts that fit where they are computed from.
        trained: a predictor of routing that was given, for the policy ``predicted``.
        expert_bytes: bytes of an expert.
    """
    chosen = Choice(policy=policy, adaptive=False, reason="")
    if policy == AUTO:
        recent = read_recent(signature)
        chosen = choose_policy(signature, recent, num_slots, trained, expert_bytes)
    elif policy == "predicted":
        name = RunningCounts.name if trained is None else trained.name
        chosen = replace(chosen, predictor=name)
    if shares == AUTO:
        return chosen
    return replace(chosen, adaptive=shares == "adaptive")


def routing_estimator(
    policy: str, predictor: str | Path, signature: ModelSignature
) -> Estimator | None:
    """The named predictor for the policy ``predicted``, if it guesses from routing alone.

    None also where neither this policy nor ``auto``, which may take it, was asked for.

    Its own object: a prefetcher that asks the same predictor has another one.

    Raises:
        CheckpointError: the predictor's file cannot be used, or belongs to another model.
    """
    if predictor == AUTO or policy not in (AUTO, "predicted"):
        return None
    estimator = make_live_estimator(predictor, signature)
    return None if estimator.needs_hidden else estimator


def policy_maker(
    choice: Choice, signature: ModelSignature, foreteller: Estimator | None
) -> Callable[[MemoryPlan], LayerShares]:
    """Makes the chosen policy for a tier; each has a memory of its own.

    Args:
        choice: policy, shares and, for ``predicted``, the predictor's name.
        signature: the model.
        foreteller: the predictor, if it is not one that needs no training.
    """
    shape = shape_of(signature)

    def make(plan: MemoryPlan) -> LayerShares:
        predictor = None
        if choice.predictor:
            is_given = foreteller is not None and foreteller.name == choice.predictor
            estimator = foreteller if is_given else make_estimator(choice.predictor, shape)
            predictor = TrackedPredictor(cast(Estimator, estimator))
        return make_policy(
            choice.policy,
            num_slots=plan.num_slots,
            setting=Setting(shape=shape, predictor=predictor),
            adaptive=choice.adaptive,
            reserve=plan.stream_slots,
        )

    return make


def settle_predictor(
    predictor: str | Path,
    model: torch.nn.Module,
    block_names: Sequence[str],
    signature: ModelSignature,
) -> str | Path:
    """The predictor that was named, or for ``auto`` one that needs no training.

    The model's own gates tell most; where they are not found, counts of the running request serve.
    """
    if predictor != AUTO:
        return predictor
    try:
        for name in block_names:
            find_gate(model, name, shape_of(signature))
    except UnsupportedModelError:
        return RunningCounts.name
    return NextGate.name
