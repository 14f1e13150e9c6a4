"""The compiled replay of policies that a rule describes: the hits of their objects, much sooner.

``replay_loop.c`` is an optional part of installing; without it a replay asks the objects. Tests
hold both equal.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moe_runtime.policies.eviction.base import ReplayRule

LIBRARY_PATH = Path(__file__).with_name("replay_loop.so")
RULES = {
    name: code
    for code, name in enumerate(
        (
            *("lru", "lfu", "slru", "sieve", "static", "belady", "belady-bypass", "lfu-aging"),
            *("lfru", "gdsf", "lec", "mrs", "expert-buffering", "random"),
        )
    )
}
"""The codes of ``replay_loop.c``."""
NEED_GATES = ("mrs",)
VERSION = 3  # of what ``replay_loop.c`` exports. A library left from another version is not used.
_POINTER = ctypes.c_void_p


def is_available() -> bool:
    return _library() is not None


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
    """Replays runs of events, each from caches that are empty.

    Args:
        keys: ``[U]`` int32 numbers of the keys used, distinct within an event; cache ``g``
            holds the keys from ``g * num_keys`` on, and all keys of an event are of one cache.
        starts: ``[N + 1]`` int64, where each event begins in ``keys``.
        runs: the events at which runs begin, and the number of events as the last.
        weights: ``[caches * num_keys]``, the rule's weights by key number, if it has any.
        gates: ``[U]`` float64, mean gate weight of each use, for rules that ask for it.

    Returns:
        ``[N]`` int64, keys of each event that were held; None where nothing compiled can say.
    """
    library = _library()
    if library is None or rule.name not in RULES or (rule.name in NEED_GATES and gates is None):
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
    failed = library.moe_replay_events(
        *(RULES[rule.name], rule.parameter, order_at, None if gates is None else gates_at),
        *(layer_keys, keys_at, starts_at, runs_at, len(runs) - 1, len(num_slots), num_keys),
        *(slots_at, hits.ctypes.data),
    )
    if failed:
        raise MemoryError(f"no memory for a replay of {len(num_slots)} x {num_keys} keys")
    return hits


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
        function, version = library.moe_replay_events, library.moe_replay_version()
    except (OSError, AttributeError):
        return None
    if version != VERSION:
        return None
    function.restype = ctypes.c_int
    function.argtypes = [
        *(ctypes.c_int, ctypes.c_double, _POINTER, _POINTER, ctypes.c_int32),
        *(_POINTER, _POINTER, _POINTER, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32),
        *(_POINTER, _POINTER),
    ]
    return library
