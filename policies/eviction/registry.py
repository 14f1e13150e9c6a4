"""Eviction policies by name, and what each of them needs to be made."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_runtime.config import nearest
from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.belady import Belady, BeladyBypass, Future
from moe_runtime.policies.eviction.lfu import LFU
from moe_runtime.policies.eviction.lru import LRU
from moe_runtime.policies.eviction.random_choice import RandomChoice
from moe_runtime.policies.eviction.shares import LayerShares, even_shares
from moe_runtime.policies.eviction.static import StaticPopularity
from moe_runtime.types import ExpertKey

Maker = Callable[[], EvictionPolicy[ExpertKey]]
"""Makes one ordering; what several of them share was made before."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What policies may be told about the model and the workload when they are made.

    Attributes:
        num_layers: Mixture-of-Experts layers.
        num_experts: experts of the widest layer.
        top_k: experts that a token visits in a layer.
        past: the keys of every event of a trace to learn from; None where there is none.
        future: the keys of every event to come, for the policies that bound all others.
    """

    num_layers: int
    num_experts: int
    top_k: int
    past: Events | None = None
    future: Events | None = None


def _belady(setting: Setting) -> Maker:
    future = Future(_needed(setting.future, "belady", "the events to come, as a replay has them"))
    return lambda: Belady(future)


def _belady_bypass(setting: Setting) -> Maker:
    future = Future(_needed(setting.future, "belady-bypass", "the events to come"))
    return lambda: BeladyBypass(future)


def _static(setting: Setting) -> Maker:
    events = _needed(setting.past, "static", "a trace to count uses in")
    weights = Counter(key for keys in events for key in keys)
    return lambda: StaticPopularity(weights)


POLICIES: dict[str, Callable[[Setting], Maker]] = {
    "lru": lambda _: LRU,
    "lfu": lambda _: LFU,
    "random": lambda _: RandomChoice,
    "static": _static,
    "belady": _belady,
    "belady-bypass": _belady_bypass,
}
"""Makes the maker of a named policy: one object for each share of the slots."""


def make_policy(name: str, *, num_slots: int, setting: Setting) -> LayerShares:
    """Builds the named policy with an even share of the slots for every layer.

    Raises:
        ValueError: no policy has this name (the message suggests the nearest one), or the setting
            lacks what the policy needs.
    """
    return LayerShares(_maker(name, setting), even_shares(num_slots, setting.num_layers))


def make_global_policy(name: str, *, setting: Setting) -> EvictionPolicy[ExpertKey]:
    """Builds the named policy over all layers together.

    Raises:
        ValueError: as for ``make_policy``.
    """
    return _maker(name, setting)()


def _maker(name: str, setting: Setting) -> Maker:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
    return POLICIES[name](setting)


def _needed(value: Events | None, name: str, what: str) -> Events:
    if value is None:
        raise ValueError(f"policy {name!r} needs {what}")
    return value
