"""Chooses an eviction policy by replaying the recent routing of a model."""

from dataclasses import dataclass, replace

from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.learned import Lesson
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ModelSignature

FALLBACK = "lru"
"""The choice without recorded routing: close to the best on most texts, and free.

``lfu-aging`` misses less where hot experts stay, and more where they soon are others.
"""
CANDIDATES = ("lru", "lfu-aging", "slru")
"""Policies that cost next to nothing, in the order in which equals are preferred."""
ONLINE = "reuse"
LEAST_STEPS = 48
MAX_EVENTS, MAX_EVENTS_TAUGHT = 2000, 10_000
"""Layer visits that are replayed, without a lesson and with one, which spares the replay of the
policy that takes long: all candidates together within a second."""
LEAST_GAIN = 0.02
"""Share of LRU's misses that another policy must save, or the difference is an accident."""
LEAST_GAIN_ONLINE = 0.1
ESTIMATE_S, LISTENING_S = 2e-5, 1.2e-4
"""Seconds of each layer of a step on a processor of two cores: for the estimate, and for listening
and for experts that stream through, measured on the pocket model."""
LINK_BYTES_PER_S = 1e9
"""Speed of a disk, to compare the misses that an online policy saves with its time."""


@dataclass(frozen=True)
class _Option:
    """One candidate, as a key of the misses that it would have had."""

    policy: str
    adaptive: bool = False


_BASE, _ONLINE = _Option(FALLBACK), _Option(ONLINE)


def choose_policy(
    signature: ModelSignature,
    trace: Trace | None,
    num_slots: int,
    expert_bytes: int | None = None,
    lesson: Lesson | None = None,
) -> PolicyChoice:
    """Replays the latest steps through the candidates and takes the one that misses least.

    For ``reuse`` with a trained network, the lesson has its misses on held-out steps.
    """
    if num_slots >= signature.num_layers * signature.num_experts:
        return _fallback("all experts fit, nothing is ever evicted")
    if trace is None or trace.num_steps < LEAST_STEPS:
        seen = 0 if trace is None else trace.num_steps
        return _fallback(f"{seen} steps of this model were seen so far, {LEAST_STEPS} are needed")
    most_events = MAX_EVENTS if lesson is None else MAX_EVENTS_TAUGHT
    num_steps = min(trace.num_steps, most_events // signature.num_layers)
    workload = workload_of(trace.steps(trace.num_steps - num_steps, trace.num_steps))
    options = [_Option(name) for name in CANDIDATES]
    misses = {option: _misses(workload, option, num_slots) for option in options}
    gain, policy_s = LEAST_GAIN_ONLINE, ESTIMATE_S
    if lesson is None:
        misses[_ONLINE] = _misses(workload, _ONLINE, num_slots)
    else:
        share = lesson.share_of_lru(num_slots / (signature.num_layers * signature.num_experts))
        misses[_ONLINE] = round(share * misses[_BASE])
        gain, policy_s = LEAST_GAIN, lesson.policy_s
    # misses whose time the online policy takes
    own_time = 0.0
    if expert_bytes is not None:
        own_s = num_steps * signature.num_layers * (policy_s + LISTENING_S)
        own_time = own_s * LINK_BYTES_PER_S / expert_bytes
    least = max(gain * misses[_BASE], own_time)
    best = min(misses, key=lambda option: _price(misses, option, least))
    if lesson is None or best != _ONLINE:
        moving = replace(best, adaptive=True)
        misses[moving] = _misses(workload, moving, num_slots)
        best = min(misses, key=lambda option: _price(misses, option, least))
    source = "" if lesson is None else f"; {ONLINE} as taught from {lesson.tokens} tokens"
    return _explain(misses, best, num_steps, source)


def _price(misses: dict[_Option, int], option: _Option, least_online: float) -> float:
    """Misses, if they are clearly fewer than LRU's; else more than LRU's."""
    found, base = misses[option], misses[_BASE]
    if option == _BASE:
        return base
    least = least_online if option.policy == ONLINE else LEAST_GAIN * base
    return found if found <= base - least else base + 1 + found


def _explain(
    misses: dict[_Option, int], best: _Option, num_steps: int, source: str
) -> PolicyChoice:
    base = misses[_BASE]
    others = ", ".join(
        f"{other.policy} {count}"
        for other, count in misses.items()
        if not other.adaptive and other != replace(best, adaptive=False)
    )
    saved = 1 - misses[best] / base if base else 0.0
    gain = f"{saved:.0%} fewer than lru" if saved else "and no other clearly fewer"
    shares = "adaptive" if best.adaptive else "even"
    return PolicyChoice(
        policy=best.policy,
        adaptive=best.adaptive,
        reason=(
            f"in the latest {num_steps} steps of this model it would have missed {misses[best]} "
            f"times with {shares} shares, {gain} ({others}{source})"
        ),
    )


def _fallback(why: str) -> PolicyChoice:
    return PolicyChoice(policy=FALLBACK, adaptive=False, reason=why)


def _misses(workload: Workload, option: _Option, num_slots: int) -> int:
    setting = Setting(shape=shape_of(workload.trace.signature))
    replay = replay_demand(
        workload,
        lambda _: make_policy(
            option.policy, num_slots=num_slots, setting=setting, adaptive=option.adaptive
        ),
        num_slots,
    )
    return replay.num_accesses - replay.num_hits
