"""Chooses an eviction policy by replaying what a model did lately."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import LayerShares, Setting, make_policy
from moe_runtime.policies.eviction.base import Events, PolicyChoice
from moe_runtime.policies.prediction import (
    Estimator,
    PreviousToken,
    RunningCounts,
    TrackedPredictor,
    make_estimator,
)
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ModelSignature

FALLBACK = "lru"
"""What is chosen where nothing is known: close to the best on most texts, and free.

``lfu-aging`` misses less where hot experts stay, and more where they soon are others.
"""
CANDIDATES = ("lru", "lfu-aging", "lfru", "slru", "sieve", "gdsf")
"""Policies that cost next to nothing, in the order in which equals are preferred."""
PREDICTORS = (RunningCounts.name, PreviousToken.name)
"""What ``predicted`` is tried with beside a trained predictor: what needs no training."""
LEAST_STEPS = 48
MAX_EVENTS = 2000
"""Layer visits that are replayed: all candidates together within a second."""
LEAST_GAIN = 0.02
"""Share of LRU's misses that another policy must save, or the difference is an accident."""
LEAST_GAIN_OF_ONLINE_POLICIES = 0.1
ONLINE_POLICY_S = {"reuse": 6e-5, "predicted": 3e-4}
"""Seconds that an online policy takes of each layer of a step on a processor of two cores."""
LINK_BYTES_PER_S = 1e9
"""What a disk gives, to tell whether the misses that an online policy saves are worth its time."""


@dataclass(frozen=True)
class _Option:
    """One candidate, as a key of the misses that it would have had."""

    policy: str
    predictor: str = ""
    adaptive: bool = False

    def __str__(self) -> str:
        return f"{self.policy} by {self.predictor}" if self.predictor else self.policy


_BASE = _Option(FALLBACK)


def choose_policy(
    signature: ModelSignature,
    trace: Trace | None,
    num_slots: int,
    trained: Estimator | None = None,
    expert_bytes: int | None = None,
) -> PolicyChoice:
    """Replays the latest steps through the candidates and takes the one that misses least."""
    if num_slots >= signature.num_layers * signature.num_experts:
        return _fallback("all experts fit, nothing is ever evicted")
    if trace is None or trace.num_steps < LEAST_STEPS:
        seen = 0 if trace is None else trace.num_steps
        return _fallback(f"{seen} steps of this model were seen so far, {LEAST_STEPS} are needed")
    num_steps = min(trace.num_steps, MAX_EVENTS // signature.num_layers)
    workload = workload_of(trace.steps(trace.num_steps - num_steps, trace.num_steps))
    estimators = {name: make_estimator(name, shape_of(signature)) for name in PREDICTORS}
    if trained is not None and not trained.needs_hidden:
        estimators[trained.name] = trained
    options = [_Option(name) for name in (*CANDIDATES, *ONLINE_POLICY_S) if name != "predicted"]
    options += [_Option("predicted", name) for name in estimators]
    misses = {option: _misses(workload, option, num_slots, estimators) for option in options}
    events = num_steps * signature.num_layers
    # misses whose time an online policy takes, for each second that it takes of a layer
    worth = 0.0 if expert_bytes is None else events * LINK_BYTES_PER_S / expert_bytes
    best = min(misses, key=lambda option: _price(misses, option, worth))
    moving = replace(best, adaptive=True)
    misses[moving] = _misses(workload, moving, num_slots, estimators)
    return _explain(
        misses, min(misses, key=lambda option: _price(misses, option, worth)), num_steps
    )


def _price(misses: dict[_Option, int], option: _Option, worth: float) -> float:
    """Misses, if they are clearly fewer than LRU's; else more than LRU's."""
    found, base = misses[option], misses[_BASE]
    if option == _BASE:
        return base
    least = LEAST_GAIN * base
    if option.policy in ONLINE_POLICY_S:
        own_time = worth * ONLINE_POLICY_S[option.policy]
        least = max(LEAST_GAIN_OF_ONLINE_POLICIES * base, own_time)
    return found if found <= base - least else base + 1 + found


def _explain(misses: dict[_Option, int], best: _Option, num_steps: int) -> PolicyChoice:
    others = ", ".join(
        f"{other} {count}"
        for other, count in misses.items()
        if not other.adaptive and other != replace(best, adaptive=False)
    )
    asked = f"asking {best.predictor}, " if best.predictor else ""
    shares = "adaptive" if best.adaptive else "even"
    return PolicyChoice(
        policy=best.policy,
        adaptive=best.adaptive,
        predictor=best.predictor,
        reason=(
            f"{asked}in the latest {num_steps} steps of this model it would have missed "
            f"{misses[best]} times with {shares} shares ({others}; lru stays unless "
            f"{LEAST_GAIN:.0%} of its {misses[_BASE]} are saved, more by those that take time)"
        ),
    )


def _fallback(why: str) -> PolicyChoice:
    return PolicyChoice(policy=FALLBACK, adaptive=False, reason=why)


def _misses(
    workload: Workload, option: _Option, num_slots: int, estimators: Mapping[str, Estimator]
) -> int:
    shape = shape_of(workload.trace.signature)

    def make(_: Events) -> LayerShares:
        # a replay must not leave behind what it learned from the requests that ended in it
        estimator = copy.deepcopy(estimators.get(option.predictor))
        predictor = None if estimator is None else TrackedPredictor(estimator)
        setting = Setting(shape=shape, predictor=predictor)
        return make_policy(
            option.policy, num_slots=num_slots, setting=setting, adaptive=option.adaptive
        )

    replay = replay_demand(workload, make, num_slots)
    return replay.num_accesses - replay.num_hits
