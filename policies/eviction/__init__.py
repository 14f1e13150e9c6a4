"""Eviction policies by name."""

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, Watcher
from moe_runtime.policies.eviction.registry import (
    BOUNDS,
    LIVE_POLICIES,
    POLICIES,
    make_global_policy,
    make_policy,
)
from moe_runtime.policies.eviction.rules.lru import LRU
from moe_runtime.policies.eviction.setting import Setting
from moe_runtime.policies.eviction.shares import LayerShares, even_shares

__all__ = [
    "BOUNDS",
    "LIVE_POLICIES",
    "LRU",
    "POLICIES",
    "Evictable",
    "EvictionPolicy",
    "LayerShares",
    "Setting",
    "Watcher",
    "even_shares",
    "make_global_policy",
    "make_policy",
]
