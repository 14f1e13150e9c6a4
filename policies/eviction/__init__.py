"""Eviction policies by name."""

from collections.abc import Callable, Mapping

from moe_runtime.config import nearest, require_known
from moe_runtime.lazy import LazyTable, is_code_file
from moe_runtime.policies.eviction.base import (
    AdaptiveShares,
    Evictable,
    EvictionPolicy,
    LayerShares,
    Maker,
    PolicyChoice,
    Setting,
    Watcher,
    even_shares,
)
from moe_runtime.policies.eviction.classic import LRU
from moe_runtime.policies.prediction.base import Shape
from moe_runtime.types import ExpertKey

__all__ = [
    "BOUNDS",
    "LIVE_POLICIES",
    "LRU",
    "POLICIES",
    "AdaptiveShares",
    "Evictable",
    "EvictionPolicy",
    "LayerShares",
    "PolicyChoice",
    "Setting",
    "Watcher",
    "even_shares",
    "make_global_policy",
    "make_policy",
    "require_live",
]

POLICIES: Mapping[str, Callable[[Setting], Maker]] = LazyTable(
    {
        "lru": f"{__name__}.classic:LRU.maker",
        "lfu": f"{__name__}.classic:LFU.maker",
        "lfu-aging": f"{__name__}.classic:AgingLFU.maker",
        "lfru": f"{__name__}.classic:LFRU.maker",
        "slru": f"{__name__}.classic:SLRU.maker",
        "sieve": f"{__name__}.classic:SIEVE.maker",
        "gdsf": f"{__name__}.classic:GDSF.maker",
        "lec": f"{__name__}.classic:LeastExpectedCost.maker",
        "mrs": f"{__name__}.learned:RecentScores.maker",
        "activation-aware": f"{__name__}.learned:ActivationMatrices.maker",
        "expert-buffering": f"{__name__}.learned:ExpertBuffering.maker",
        "reuse": f"{__name__}.reuse:make_reuse",
        "predicted": f"{__name__}.learned:PredictedUse.maker",
        "static": f"{__name__}.classic:StaticPopularity.maker",
        "random": f"{__name__}.classic:RandomChoice.maker",
        "belady": f"{__name__}.classic:Belady.maker",
        "belady-bypass": f"{__name__}.classic:BeladyBypass.maker",
    },
    own=f"{__name__}.base:EvictionPolicy.maker",
)
"""For each name a function that takes a setting and returns a maker of policies."""

BOUNDS = ("belady", "belady-bypass")
"""Policies that know the future: bounds for the others."""

LIVE_POLICIES = ("lru", "lfu-aging", "slru", "mrs", "activation-aware", "reuse")
"""Policies that serve a model: on recorded routing each of them missed less than LRU."""


def require_live(policy: str) -> None:
    """Refuses a policy that serves no model; a file must have a policy class."""
    if is_code_file(policy):
        POLICIES[policy]
    elif policy in POLICIES.keys() - set(LIVE_POLICIES):
        raise ValueError(
            f"policy {policy!r} is only for `moe-runtime replay` and `bench policies`: others miss "
            f"less; a model is served by auto, {', '.join(LIVE_POLICIES)}, or your FILE.py"
        )
    else:
        require_known("policy", policy, ("auto", *LIVE_POLICIES))


def make_policy(
    name: str, *, num_slots: int, setting: Setting, adaptive: bool = False, reserve: int = 0
) -> LayerShares:
    """Builds the named policy with a share of the slots for every layer.

    Args:
        num_slots: slots of all layers together.
        adaptive: let the shares, even at first, move to where misses could be saved.
        reserve: slots through which experts may pass that are not kept. A policy that may decline
            gets as many fewer, one for each expert of a token at most.

    Raises:
        ValueError: no policy has this name, or the setting lacks what the policy needs.
    """
    make = _maker(name, setting)
    if make().may_decline:
        num_slots -= min(reserve, setting.shape.top_k, num_slots // 4)
    shares = even_shares(num_slots, setting.shape.num_layers)
    if not adaptive:
        return LayerShares(make, shares)
    worths = None if setting.costs is None else _layer_costs(setting.costs, setting.shape)
    return AdaptiveShares(make, shares, smallest=setting.shape.top_k, worths=worths)


def make_global_policy(name: str, *, setting: Setting) -> EvictionPolicy[ExpertKey]:
    """Builds the named policy over all layers together; raises as ``make_policy``."""
    return _maker(name, setting)()


def _layer_costs(costs: Mapping[ExpertKey, float], shape: Shape) -> list[float]:
    of_layer: list[list[float]] = [[] for _ in range(shape.num_layers)]
    for key, cost in costs.items():
        of_layer[key.layer].append(cost)
    return [sum(known) / len(known) if known else 0.0 for known in of_layer]


def _maker(name: str, setting: Setting) -> Maker:
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
    return POLICIES[name](setting)
