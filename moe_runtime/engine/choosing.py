"""What ``auto`` stands for: eviction policy, shares and predictor for a model and a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moe_runtime.config import nearest
from moe_runtime.engine.prefetching import check_predictor, find_gate
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.policies.eviction import LIVE_POLICIES
from moe_runtime.policies.prediction import NextGate, RunningCounts
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


def settle_policy(policy: str, shares: str, signature: ModelSignature, num_slots: int) -> Choice:
    """The policy and shares that were named, or for ``auto`` the ones that replay best.

    Args:
        policy: a name, or ``auto``.
        shares: ``even``, ``adaptive``, or ``auto``: even unless the policy's choice says otherwise.
        signature: the model.
        num_slots: experts that fit where they are computed from.
    """
    chosen = Choice(policy=policy, adaptive=False, reason="")
    if policy == AUTO:
        chosen = choose_policy(signature, read_recent(signature), num_slots)
    if shares == AUTO:
        return chosen
    return Choice(policy=chosen.policy, adaptive=shares == "adaptive", reason=chosen.reason)


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
