"""What a model's experts cost, as the engine reports it."""

from __future__ import annotations

from typing import Any

from moe_runtime.serving.requests import ExpertStatistics


def expert_statistics(model: Any) -> ExpertStatistics:
    """What the experts cost; zeros for a model that has them in memory."""
    handle = getattr(model, "moe", None)
    if handle is None:
        return ExpertStatistics(
            hits=0, late_hits=0, misses=0, bytes_read={}, stall_s=0.0, useful_guesses=0,
            late_guesses=0, wasted_guesses=0, expert_slots=0, policy="none",
        )  # fmt: skip
    stats = handle.stats()
    host = {} if handle.facts.device_plan is None else {"host": stats.copied_bytes}
    return ExpertStatistics(
        hits=stats.hits,
        late_hits=stats.late_hits,
        misses=stats.misses,
        bytes_read={"disk": stats.bytes_read, **host},
        stall_s=stats.stall_s,
        useful_guesses=stats.useful_guesses,
        late_guesses=stats.late_guesses,
        wasted_guesses=stats.wasted_guesses,
        expert_slots=stats.expert_slots,
        policy=stats.policy,
    )
