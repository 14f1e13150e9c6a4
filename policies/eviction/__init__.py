"""Eviction policies by name."""

from collections.abc import Callable

from moe_runtime.config import nearest
from moe_runtime.policies.eviction.base import EvictionPolicy
from moe_runtime.policies.eviction.lru import LRU
from moe_runtime.policies.eviction.shares import LayerShares, even_shares
from moe_runtime.types import ExpertKey

__all__ = ["LRU", "POLICIES", "EvictionPolicy", "LayerShares", "even_shares", "make_policy"]

POLICIES: dict[str, Callable[[], EvictionPolicy[ExpertKey]]] = {"lru": LRU}


def make_policy(name: str, *, num_slots: int, num_layers: int) -> LayerShares:
    """Builds the named policy with an even share of the slots for every layer.

    Raises:
        ValueError: no policy has this name; the message suggests the nearest one.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: {nearest(name, POLICIES)}")
    return LayerShares(POLICIES[name], even_shares(num_slots, num_layers))
