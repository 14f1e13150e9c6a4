"""How experts are used again within and between the steps of training, and what tiers make of it.

A recorded forward pass is one micro-batch; those with the same `step_update` are one optimizer
step. Offloaded training fetches an expert once for all micro-batches of a step, and keeps in memory
those that it uses most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.record_tiers import TierReplay, replay_tiers
from moe_runtime.lab.traces.format import Trace
from moe_runtime.types import ExpertKey

HOME_SHARES = (0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingReuse:
    """What the micro-batches and steps of a training run had in common.

    Attributes:
        num_steps: optimizer steps.
        num_passes: forward passes of micro-batches.
        pass_share: share of all experts that a micro-batch asks for.
        step_share: likewise of a step.
        asked: experts that micro-batches asked for, each once a micro-batch.
        fetched: experts that steps asked for, each once a step.
        returning: share of a step's experts that the step before asked for as well; nan with one
            step.
        use: ``[L, E]`` share of the steps that asked for each expert.
        tiers: for each share of experts with a tier in memory, what tiers would have found.
    """

    num_steps: int
    num_passes: int
    pass_share: float
    step_share: float
    asked: int
    fetched: int
    returning: float
    use: np.ndarray
    tiers: dict[float, TierReplay]


def training_reuse(trace: Trace, *, shares: Sequence[float] = HOME_SHARES) -> TrainingReuse | None:
    """Measures reuse in a trace of training; None of other traces.

    Args:
        trace: the recording.
        shares: of the experts that have their tiers in memory, to be replayed.
    """
    if trace.step_update is None or not trace.num_steps:
        return None
    used = _used_by_pass(trace)
    numbers, step_of_pass = np.unique(trace.step_update, return_inverse=True)
    by_step = np.zeros((len(numbers), *used.shape[1:]), bool)
    for step, found in zip(step_of_pass, used, strict=True):
        by_step[step] |= found
    again = by_step[1:] & by_step[:-1]
    keys = [
        ExpertKey(layer, expert)
        for layer in range(used.shape[1])
        for expert in range(used.shape[2])
    ]
    steps = [[keys[place] for place in np.flatnonzero(found)] for found in by_step]
    return TrainingReuse(
        num_steps=len(numbers),
        num_passes=len(used),
        pass_share=float(used.mean()),
        step_share=float(by_step.mean()),
        asked=int(used.sum()),
        fetched=int(by_step.sum()),
        returning=float(again.sum() / max(1, by_step[1:].sum())) if len(again) else float("nan"),
        use=by_step.mean(axis=0),
        tiers={share: replay_tiers(steps, keys, round(share * len(keys))) for share in shares},
    )


def _used_by_pass(trace: Trace) -> np.ndarray:
    """Which experts each forward pass asked for: ``[S, L, E]``."""
    signature = trace.signature
    used = np.zeros((trace.num_steps, signature.num_layers, signature.num_experts), bool)
    for step, layer, experts in trace.accesses():
        used[step, layer, experts] = True
    return used
