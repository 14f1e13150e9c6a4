"""ScMoE's schedule (Cai et al. 2024): where the routed experts compute among the rest of a block.

Their input is an earlier representation, so they are routed, and their tokens or weights travel,
while the backbone computes: with the paper's position 2 the dense feed-forward, the next attention
and the shared expert. The experts take their turn between two of these operations (or before, or
after all of them); what is left of the backbone hides the way back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.lab.simulate.layer_simulation import TaskGraph

_COMPUTE, _LINK_THERE, _LINK_BACK = range(3)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutCosts:
    """Seconds of the parts of one block."""

    backbone_s: tuple[float, ...]
    there_s: float
    experts_s: float
    back_s: float = 0.0

    def __post_init__(self) -> None:
        if min(*self.backbone_s, self.there_s, self.experts_s, self.back_s, 0.0) < 0:
            raise ValueError(f"times must not be negative, got {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortcutSchedule:
    """One place of the experts."""

    position: int
    block_s: float
    exposed_s: float


def shortcut_schedules(costs: ShortcutCosts) -> list[ShortcutSchedule]:
    """Every place of the experts, simulated, from before the backbone to after it."""
    return [_simulate(costs, position) for position in range(len(costs.backbone_s) + 1)]


def best_shortcut_schedule(costs: ShortcutCosts) -> ShortcutSchedule:
    """The one that takes the least time; the earliest among equals."""
    return min(shortcut_schedules(costs), key=lambda schedule: schedule.block_s)


def _simulate(costs: ShortcutCosts, position: int) -> ShortcutSchedule:
    graph = TaskGraph()
    there = graph.add(costs.there_s, resource=_LINK_THERE)
    before = _chain(graph, costs.backbone_s[:position], [])
    experts = graph.add(costs.experts_s, resource=_COMPUTE, after=[there, *before])
    graph.add(costs.back_s, resource=_LINK_BACK, after=[experts])
    _chain(graph, costs.backbone_s[position:], [experts])
    block_s = graph.run().makespan_s
    compute_s = sum(costs.backbone_s) + costs.experts_s
    return ShortcutSchedule(position=position, block_s=block_s, exposed_s=block_s - compute_s)


def _chain(graph: TaskGraph, seconds: Sequence[float], after: list[int]) -> list[int]:
    """Computations one after another; what follows them waits for the last."""
    for duration_s in seconds:
        after = [graph.add(duration_s, resource=_COMPUTE, after=after)]
    return after
