"""Eviction policies by name, and what each of them needs to be made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from moe_runtime.config import nearest
from moe_runtime.policies.eviction import episodes
from moe_runtime.policies.eviction.adaptive_shares import AdaptiveShares
from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.belady import Belady, BeladyBypass, Future
from moe_runtime.policies.eviction.rules.activation_aware import ActivationMatrices
from moe_runtime.policies.eviction.rules.expert_buffering import ActiveExperts, ExpertBuffering
from moe_runtime.policies.eviction.rules.gdsf import GDSF
from moe_runtime.policies.eviction.rules.lec import LeastExpectedCost
from moe_runtime.policies.eviction.rules.lfru import LFRU
from moe_runtime.policies.eviction.rules.lfu import LFU
from moe_runtime.policies.eviction.rules.lfu_aging import AgingLFU
from moe_runtime.policies.eviction.rules.lru import LRU
from moe_runtime.policies.eviction.rules.mrs import RecentScores
from moe_runtime.policies.eviction.rules.predicted_use import PredictedUse
from moe_runtime.policies.eviction.rules.random_choice import RandomChoice
from moe_runtime.policies.eviction.rules.reuse import ReuseEstimator
from moe_runtime.policies.eviction.rules.sieve import SIEVE
from moe_runtime.policies.eviction.rules.slru import SLRU
from moe_runtime.policies.eviction.rules.static import StaticPopularity, popularity
from moe_runtime.policies.eviction.scored import Scored
from moe_runtime.policies.eviction.shares import LayerShares, even_shares
from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.policies.prediction.eam import CAPACITY
from moe_runtime.policies.prediction.tracked import TrackedPredictor
from moe_runtime.types import ExpertKey

Maker = Callable[[], EvictionPolicy[ExpertKey]]
"""Makes one ordering; what several of them share was made before."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What policies may be told about the model and the workload when they are made.

    Attributes:
        shape: the sizes of the model.
        training: recorded sequences to learn from; None where there are none. ``static`` counts
            in them, ``activation-aware`` begins with their matrices.
        future: the keys of every event to come, for the policies that bound all others.
        predictor: foretells visits, for the policies that evict by predictions. It must not be
            shared with anyone else: the policy tells it of every event.
        costs: what a miss of each expert costs, such as the bytes to be read; only ratios matter.
            None where all cost the same.
    """

    shape: Shape
    training: Routes | None = None
    future: Events | None = None
    predictor: TrackedPredictor | None = None
    costs: Mapping[ExpertKey, float] | None = None


def _belady(setting: Setting) -> Maker:
    future = _future(setting)
    return lambda: Belady(future)


def _belady_bypass(setting: Setting) -> Maker:
    future = _future(setting)
    return lambda: BeladyBypass(future)


def _future(setting: Setting) -> Future:
    if setting.future is None:
        raise ValueError("Belady's policies must be told the future, which only a replay can")
    return Future(setting.future)


def _cost_of(setting: Setting) -> Callable[[ExpertKey], float] | None:
    return None if setting.costs is None else setting.costs.__getitem__


def _static(setting: Setting) -> Maker:
    if setting.training is None:
        raise ValueError("policy 'static' needs a recorded trace to count uses in")
    weights = popularity(setting.training)
    return lambda: StaticPopularity(weights)


def _mrs(setting: Setting) -> Maker:
    scores = RecentScores(setting.shape)
    return lambda: Scored(scores, rule=scores.rule)


def _activation_aware(setting: Setting) -> Maker:
    matrices = ActivationMatrices(setting.shape)
    if setting.training is not None:
        matrices.fit(setting.training)
    return lambda: Scored(matrices)


def _expert_buffering(setting: Setting) -> Maker:
    active = ActiveExperts()
    return lambda: ExpertBuffering(active)


def _predicted(setting: Setting) -> Maker:
    if setting.predictor is None:
        raise ValueError("policy 'predicted' needs a predictor; name one")
    scores = PredictedUse(setting.shape, setting.predictor)
    return lambda: Scored(scores, may_decline=True)


def _reuse(setting: Setting) -> Maker:
    estimator = ReuseEstimator(setting.shape)
    return lambda: Scored(estimator, may_decline=True)


POLICIES: dict[str, Callable[[Setting], Maker]] = {
    "lru": lambda _: LRU,
    "lfu": lambda _: LFU,
    "lfu-aging": lambda _: AgingLFU,
    "lfru": lambda _: LFRU,
    "slru": lambda _: SLRU,
    "sieve": lambda _: SIEVE,
    "gdsf": lambda setting: partial(GDSF, _cost_of(setting)),
    "lec": lambda setting: partial(LeastExpectedCost, _cost_of(setting)),
    "mrs": _mrs,
    "activation-aware": _activation_aware,
    "expert-buffering": _expert_buffering,
    "reuse": _reuse,
    "predicted": _predicted,
    "static": _static,
    "random": lambda _: RandomChoice,
    "belady": _belady,
    "belady-bypass": _belady_bypass,
}
"""Makes the maker of a named policy: one object for each share of the slots."""

BOUNDS = ("belady", "belady-bypass")
"""Policies that must know the future: they bound what the others can reach."""

LIVE_POLICIES = tuple(name for name in POLICIES if name not in (*BOUNDS, "random", "static"))
"""Policies that serve a model without a trace; ``predicted`` does so with a predictor."""


def most_remembered_bytes(shape: Shape) -> int:
    """Most that a policy and a predictor that need no training remember of a model's routing.

    The policy ``reuse``, and the collections of activation matrices (float32) of
    ``activation-aware`` and of the predictor ``eam``; one more while such a collection, kept from
    earlier processes, is read or written.
    """
    return episodes.remembered_bytes(shape) + 3 * most_learned_bytes(shape)


def most_learned_bytes(shape: Shape) -> int:
    """Most that one learner keeps for later processes: a full collection, and popularity."""
    return (CAPACITY + 1) * shape.num_layers * shape.num_experts * 4


def make_policy(
    name: str, *, num_slots: int, setting: Setting, adaptive: bool = False, reserve: int = 0
) -> LayerShares:
    """Builds the named policy with a share of the slots for every layer.

    Args:
        name: one of ``POLICIES``.
        num_slots: slots of all layers together.
        setting: what the policy may be told.
        adaptive: let the shares, even at first, move to where misses could be saved.
        reserve: slots through which experts may pass that are not kept. A policy that may decline
            gets as many fewer, one for each expert of a token at most.

    Raises:
        ValueError: no policy has this name (the message suggests the nearest one), or the setting
            lacks what the policy needs.
    """
    make = _maker(name, setting)
    if make().may_decline:
        num_slots -= min(reserve, setting.shape.top_k, num_slots // 4)
    shares = even_shares(num_slots, setting.shape.num_layers)
    if adaptive:
        worths = None if setting.costs is None else _layer_costs(setting.costs, setting.shape)
        return AdaptiveShares(make, shares, smallest=setting.shape.top_k, worths=worths)
    return LayerShares(make, shares)


def make_global_policy(name: str, *, setting: Setting) -> EvictionPolicy[ExpertKey]:
    """Builds the named policy over all layers together.

    Raises:
        ValueError: as for ``make_policy``.
    """
    return _maker(name, setting)()


def _layer_costs(costs: Mapping[ExpertKey, float], shape: Shape) -> list[float]:
    """Mean cost of each layer's experts."""
    of_layer: list[list[float]] = [[] for _ in range(shape.num_layers)]
    for key, cost in costs.items():
        of_layer[key.layer].append(cost)
    return [sum(known) / len(known) if known else 0.0 for known in of_layer]


def _maker(name: str, setting: Setting) -> Maker:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
    return POLICIES[name](setting)
