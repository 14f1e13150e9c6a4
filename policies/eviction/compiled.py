"""The compiled replay of policies that follow a known rule: the same hits, much sooner.

``replay_loop.c`` is an optional part of installing; without it a replay runs the objects. Tests
compare both.
"""

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_runtime.policies.eviction import classic, learned
from moe_runtime.policies.eviction.base import EvictionPolicy, LayerShares

LIBRARY_PATH = Path(__file__).with_name("replay_loop.so")
VERSIONS = {"replay": 3, "reuse": 1, "combined": 2}
"""Of the functions of each C file; a library of other versions is not used."""
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "replay_events": (
        ctypes.c_int,
        [
            *(ctypes.c_int, ctypes.c_double, _POINTER, _POINTER, _INT, _POINTER, _POINTER),
            *(_POINTER, _LONG, _INT, _INT, _POINTER, _POINTER),
        ],
    ),
    "reuse_new": (_POINTER, [_INT] * 5),
    "reuse_free": (None, [_POINTER]),
    "reuse_begin": (ctypes.c_int, [_POINTER, _POINTER, _POINTER, _INT]),
    "reuse_route": (None, [_POINTER, _INT, _POINTER, _POINTER, _INT, _INT]),
    "reuse_finish": (None, [_POINTER, _LONG]),
    "reuse_scores": (ctypes.POINTER(ctypes.c_float), [_POINTER, _INT]),
    "reuse_num_learned": (_LONG, [_POINTER]),
    "reuse_array": (_POINTER, [_POINTER, ctypes.c_int]),
    "reuse_take_network": (ctypes.c_int, [_POINTER, _INT, *[_POINTER] * 4]),
    "combined_token": (
        None,
        [*[_INT] * 4, *[_POINTER] * 3, *[_POINTER, ctypes.c_float] * 2, _LONG, *[_POINTER] * 5],
    ),
    "combined_guess": (_INT, [_POINTER, *[_INT] * 4, ctypes.c_float]),
}

RULES: Mapping[str, type] = {
    "lru": classic.LRU,
    "lfu": classic.LFU,
    "slru": classic.SLRU,
    "sieve": classic.SIEVE,
    "static": classic.StaticPopularity,
    "belady": classic.Belady,
    "belady-bypass": classic.BeladyBypass,
    "lfu-aging": classic.AgingLFU,
    "lfru": classic.LFRU,
    "gdsf": classic.GDSF,
    "lec": classic.LeastExpectedCost,
    "mrs": learned.RecentScores,
    "expert-buffering": learned.ExpertBuffering,
    "random": classic.RandomChoice,
}
"""Classes whose rule ``replay_loop.c`` knows, in the order of its codes; no subclasses."""
_CODES = {kind: code for code, kind in enumerate(RULES.values())}


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """A policy that starts empty, as ``replay_loop.c`` takes it.

    Attributes:
        parameter: the share that SLRU protects, the half-life of ageing, or the ``alpha`` of MRS.
        weights: of static pinning; 0 for an absent key.
        needs_gates: whether the gate weights of each use count.
    """

    code: int
    parameter: float = 0.0
    weights: Mapping[Any, float] | None = None
    needs_gates: bool = False


def rule_of(policy: EvictionPolicy[Any]) -> ReplayRule | None:
    """The rule that a policy follows; None where only the object can be replayed."""
    if type(policy) is LayerShares:
        rules = [rule_of(layer) for layer in policy.layers]
        return rules[0] if all(rule == rules[0] for rule in rules) else None
    follows: Any = policy.scorer if type(policy) is learned.Scored else policy
    code = _CODES.get(type(follows))
    if code is None or not getattr(follows, "has_equal_costs", True):
        return None
    given = (getattr(follows, name, None) for name in ("protected_share", "half_life", "alpha"))
    parameter = next((one for one in given if one is not None), 0.0)
    weights = getattr(follows, "weights", None)
    return ReplayRule(code, parameter, weights, needs_gates=follows is not policy)


def is_available() -> bool:
    return library() is not None


def count_hits(
    rule: ReplayRule,
    keys: np.ndarray,
    starts: np.ndarray,
    runs: Sequence[int],
    *,
    num_slots: Sequence[int],
    num_keys: int,
    layer_keys: int,
    weights: np.ndarray | None = None,
    gates: np.ndarray | None = None,
) -> np.ndarray | None:
    """Replays runs of events, each from empty caches.

    Args:
        keys: ``[U]`` int32 numbers of the keys used, distinct within an event; cache ``g``
            holds the keys from ``g * num_keys`` on, and all keys of an event are of one cache.
        starts: ``[N + 1]`` int64, where each event begins in ``keys``.
        runs: the events at which runs begin, and the number of events as the last.
        weights: ``[caches * num_keys]``, the rule's weights by key number, if it has any.
        gates: ``[U]`` float64, mean gate weight of each use, for rules that need it.

    Returns:
        ``[N]`` int64, keys of each event that were held; None without the library or the gates.
    """
    found = library()
    if found is None or (rule.needs_gates and gates is None):
        return None
    hits = np.zeros(len(starts) - 1, np.int64)
    weights = np.zeros(1) if weights is None else weights
    arrays = [
        np.unique(weights, return_inverse=True)[1].astype(np.int64),
        np.ascontiguousarray(np.zeros(1) if gates is None else gates, np.float64),
        np.ascontiguousarray(keys, np.int32),
        np.ascontiguousarray(starts, np.int64),
        np.asarray(runs, np.int64),
        np.asarray(num_slots, np.int32),
    ]
    order_at, gates_at, keys_at, starts_at, runs_at, slots_at = (a.ctypes.data for a in arrays)
    failed = found.moe_replay_events(
        *(rule.code, rule.parameter, order_at, None if gates is None else gates_at),
        *(layer_keys, keys_at, starts_at, runs_at, len(runs) - 1, len(num_slots), num_keys),
        *(slots_at, hits.ctypes.data),
    )
    if failed:
        raise MemoryError(f"no memory for a replay of {len(num_slots)} x {num_keys} keys")
    return hits


@functools.cache
def library() -> Any:
    """The functions of the C files, named ``moe_...``; None where they were not built."""
    try:
        found = ctypes.CDLL(str(LIBRARY_PATH))
        if any(getattr(found, f"moe_{name}_version")() != n for name, n in VERSIONS.items()):
            return None
    except (OSError, AttributeError):
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(found, f"moe_{name}")
        function.restype, function.argtypes = result, arguments
    return found
