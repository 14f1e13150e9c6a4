"""The recordings of one model: of the cache of the last call, and of others beside it.

A server has one for each number of sequences that decode together, and `generate` one of its own.
They go together: an expert that one of them relied on, and that has left, was there for the others.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

from moe_runtime.inference.device.static_caches import StaticCaches
from moe_runtime.memory.device.device_store import DeviceStore

_MOST_OTHERS = 16


class CacheRecording(Protocol):
    """A recorded step.

    Attributes:
        others: by their caches, those beside it, for as long as the caches live.
    """

    others: WeakKeyDictionary[Any, Any]

    @property
    def cache(self) -> Any:
        """Its cache; None where that is gone."""
        ...

    def keeps_other(self, cache: Any, caches: StaticCaches) -> bool:
        """Whether it alone holds the memory of another cache than this one, beside it."""
        ...


def recording_of(store: DeviceStore[Any], cache: Any, caches: StaticCaches) -> Any:
    """The recording of a cache, the store's from then on; None where there is none.

    Those go that alone hold another cache, and those whose cache is gone.

    Args:
        store: whose slots they are of.
        cache: that the model is called with, of any kind.
        caches: of `generate`.
    """
    first: CacheRecording | None = store.recorded
    if first is None or (not first.others and first.cache is cache):
        return first
    there = [*first.others.values(), first]
    left = [one for one in there if one.cache is not None and not one.keeps_other(cache, caches)]
    if len(left) < len(there):
        store.recorded = None
        for recorded in left:
            put_first(store, recorded)
    for recorded in left:
        if recorded.cache is cache:
            put_first(store, recorded)
            return recorded
    return None


def put_first(store: DeviceStore[Any], recorded: CacheRecording) -> None:
    """Makes a recording the store's; the one before it stays beside it."""
    before: CacheRecording | None = store.recorded
    if before is recorded:
        return
    store.recorded, recorded.others = recorded, WeakKeyDictionary()
    if before is None:
        return
    recorded.others, before.others = before.others, recorded.others
    recorded.others.pop(recorded.cache, None)
    if (cache := before.cache) is not None:
        recorded.others[cache] = before
    while len(recorded.others) > _MOST_OTHERS:
        del recorded.others[next(iter(recorded.others))]
