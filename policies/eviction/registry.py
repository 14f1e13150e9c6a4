"""Eviction policies by name, and what each of them needs to be made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moe_runtime.config import nearest
from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.belady import Belady, BeladyBypass, Future
from moe_runtime.policies.eviction.lfu import LFU
from moe_runtime.policies.eviction.lru import LRU
from moe_runtime.policies.eviction.random_choice import RandomChoice
from moe_runtime.policies.eviction.reuse import ReuseEstimator
from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.shares import LayerShares, even_shares
from moe_runtime.policies.eviction.static import StaticPopularity, popularity
from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.types import ExpertKey

Maker = Callable[[], EvictionPolicy[ExpertKey]]
"""Makes one ordering; what several of them share was made before."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What policies may be told about the model and the workload when they are made.

    Attributes:
        shape: the sizes of the model.
        training: recorded sequences to learn from; None where there are none.
        future: the keys of every event to come, for the policies that bound all others.
    """

    shape: Shape
    training: Routes | None = None
    future: Events | None = None


def _belady(setting: Setting) -> Maker:
    future = _future(setting, "belady")
    return lambda: Belady(future)


def _belady_bypass(setting: Setting) -> Maker:
    future = _future(setting, "belady-bypass")
    return lambda: BeladyBypass(future)


def _future(setting: Setting, name: str) -> Future:
    if setting.future is None:
        raise ValueError(f"policy {name!r} must be told the future, which only a replay can")
    return Future(setting.future)


def _static(setting: Setting) -> Maker:
    if setting.training is None:
        raise ValueError("policy 'static' needs a recorded trace to count uses in")
    weights = popularity(setting.training)
    return lambda: StaticPopularity(weights)


def _reuse(setting: Setting) -> Maker:
    estimator = ReuseEstimator(setting.shape)
    return lambda: Scored(estimator, may_decline=True)


POLICIES: dict[str, Callable[[Setting], Maker]] = {
    "lru": lambda _: LRU,
    "lfu": lambda _: LFU,
    "reuse": _reuse,
    "random": lambda _: RandomChoice,
    "static": _static,
    "belady": _belady,
    "belady-bypass": _belady_bypass,
}
"""Makes the maker of a named policy: one object for each share of the slots."""

BOUNDS = ("belady", "belady-bypass")
"""Policies that must know the future: they bound what the others can reach."""

LIVE_POLICIES = tuple(name for name in POLICIES if name not in (*BOUNDS, "random", "static"))
"""Policies that serve a model without being told more than its shape."""


def make_policy(name: str, *, num_slots: int, setting: Setting) -> LayerShares:
    """Builds the named policy with an even share of the slots for every layer.

    Raises:
        ValueError: no policy has this name (the message suggests the nearest one), or the setting
            lacks what the policy needs.
    """
    return LayerShares(_maker(name, setting), even_shares(num_slots, setting.shape.num_layers))


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
