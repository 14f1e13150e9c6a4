"""Chooses an eviction policy by replaying what a model did lately."""

from dataclasses import dataclass

from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.tracing.format import Trace
from moe_runtime.tracing.replay import replay_demand
from moe_runtime.tracing.routes import shape_of
from moe_runtime.tracing.workload import Workload, workload_of
from moe_runtime.types import ModelSignature

FALLBACK = "lru"
"""What is chosen where nothing is known: close to the best on most texts, and free."""
CANDIDATES = ("lru", "lfu-aging", "lfru", "slru", "sieve", "gdsf")
"""Policies that cost next to nothing, in the order in which equals are preferred."""
THINKERS = ("reuse",)
"""Policies that take time of every step."""
LEAST_STEPS = 48
MAX_EVENTS = 2000
"""Layer visits that are replayed: all candidates together within a second."""
LEAST_GAIN = 0.02
"""Share of LRU's misses that another policy must save, or the difference is an accident."""
LEAST_GAIN_OF_THINKERS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An eviction policy and why.

    Attributes:
        policy: its name.
        adaptive: whether the layers' shares of the slots move.
        reason: one sentence.
    """

    policy: str
    adaptive: bool
    reason: str


def choose_policy(signature: ModelSignature, trace: Trace | None, num_slots: int) -> Choice:
    """Replays the latest steps through the candidates and takes the one that misses least.

    Equal traces and budgets give equal choices. Each candidate has even shares for the layers at
    first; of the best one adaptive shares are tried too.

    Args:
        signature: the model.
        trace: its latest decode steps; None where none were kept.
        num_slots: experts that fit in memory at once.
    """
    if num_slots >= signature.num_layers * signature.num_experts:
        return _fallback("all experts fit, nothing is ever evicted")
    if trace is None or trace.num_steps < LEAST_STEPS:
        seen = 0 if trace is None else trace.num_steps
        return _fallback(f"{seen} steps of this model were seen so far, {LEAST_STEPS} are needed")
    num_steps = min(trace.num_steps, MAX_EVENTS // signature.num_layers)
    workload = workload_of(trace.steps(trace.num_steps - num_steps, trace.num_steps))
    misses = {
        (name, False): _misses(workload, name, num_slots, adaptive=False)
        for name in (*CANDIDATES, *THINKERS)
    }
    best = min(misses, key=lambda option: _price(misses, *option))
    misses[best[0], True] = _misses(workload, best[0], num_slots, adaptive=True)
    best = min(misses, key=lambda option: _price(misses, *option))
    return _explain(misses, best, num_steps)


def _price(misses: dict[tuple[str, bool], int], name: str, adaptive: bool) -> float:
    """Misses, if they are clearly fewer than LRU's; else more than LRU's."""
    found, base = misses[name, adaptive], misses[FALLBACK, False]
    if (name, adaptive) == (FALLBACK, False):
        return base
    least = LEAST_GAIN_OF_THINKERS if name in THINKERS else LEAST_GAIN
    return found if found <= (1.0 - least) * base else base + 1 + found


def _explain(misses: dict[tuple[str, bool], int], best: tuple[str, bool], num_steps: int) -> Choice:
    name, adaptive = best
    base = misses[FALLBACK, False]
    others = ", ".join(
        f"{other} {count}"
        for (other, moved), count in misses.items()
        if not moved and other != name
    )
    shares = "adaptive" if adaptive else "even"
    return Choice(
        policy=name,
        adaptive=adaptive,
        reason=(
            f"in the latest {num_steps} steps of this model it would have missed {misses[best]} "
            f"times with {shares} shares ({others}; lru stays unless {LEAST_GAIN:.0%} of its "
            f"{base} are saved)"
        ),
    )


def _fallback(why: str) -> Choice:
    return Choice(policy=FALLBACK, adaptive=False, reason=why)


def _misses(workload: Workload, name: str, num_slots: int, *, adaptive: bool) -> int:
    setting = Setting(shape=shape_of(workload.trace.signature))
    replay = replay_demand(
        workload,
        lambda _: make_policy(name, num_slots=num_slots, setting=setting, adaptive=adaptive),
        num_slots,
    )
    return replay.num_accesses - replay.num_hits
