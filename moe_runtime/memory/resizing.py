"""A store of host memory that gets slots, or gives them and their memory back, while it is used."""

import mmap
from typing import Any

import torch

from moe_runtime.errors import CapacityError
from moe_runtime.kernels.native.pages import madvise
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.memory.slab import Slab, aligned_bytes
from moe_runtime.policies.eviction import LayerShares, even_shares
from moe_runtime.policies.eviction.shares import AdaptiveShares
from moe_runtime.types import ExpertKey


def resize(store: ExpertStore[Any], num_slots: int, *, shared_slots: int, stream_slots: int) -> int:
    """Gives a store another number of slots.

    Experts that are in use or being read keep their slots, and memory for more may not be had: the
    number may then be another than was asked for, and may be asked for again.

    Args:
        store: over a slab of host memory, which it alone uses.
        num_slots: 1 at least.
        shared_slots: those of them that the layers divide.
        stream_slots: those of them that experts who only pass through may take.

    Returns:
        How many it has now.
    """
    with store._changed:
        divide(store._policy, shared_slots)
        store._stream_slots = max(1, min(stream_slots, num_slots))
        while store.num_slots > num_slots and _close_one(store):
            pass
        while store.num_slots < num_slots and store._closed:
            store._free.append(store._closed.pop())
        if store.num_slots < num_slots:
            _extend(store, num_slots - store.num_slots)
        store._changed.notify_all()
        return store.num_slots


def divide(policy: LayerShares, num_slots: int) -> None:
    """Evenly, for a start where shares move; who holds more than its share keeps it so far."""
    policy._shares = even_shares(num_slots, len(policy.layers))
    if isinstance(policy, AdaptiveShares):
        policy._num_slots = num_slots


def _close_one(store: ExpertStore[Any]) -> bool:
    """Gives up one slot, that of an expert if none is free; says whether one could be."""
    if not store._free:
        victim = _victim(store)
        if victim is None:
            return False
        store._counters.evictions += 1
        store._drop(victim)
    slot = store._free.pop()
    store._closed.add(slot)
    _give_back(store._slab.slot(slot))
    return True


def _victim(store: ExpertStore[Any]) -> ExpertKey | None:
    """Who only passes through, else whom the layer furthest above its share gives up."""
    idle = (key for key in store._streamed if store._is_idle(key))
    victim = next(idle, None)
    if victim is not None:
        return victim
    kept = [key for key in store._entries if key not in store._streamed]
    surplus = {key.layer: -store._policy.share(key.layer) for key in kept}
    for key in kept:
        surplus[key.layer] += 1
    for layer in sorted(surplus, key=surplus.__getitem__, reverse=True):
        some = next(key for key in kept if key.layer == layer)
        victim = store._policy.victim_within(layer, store._is_idle, some)
        if victim is not None:
            return victim
    return None


def _extend(store: ExpertStore[Any], num_slots: int) -> None:
    """Slots in memory of their own, if it can be had."""
    slab: Slab = store._slab
    try:
        memory = aligned_bytes(num_slots * slab.slot_bytes)
    except CapacityError:
        return
    first = slab.num_slots
    slab._slots[first:] = memory.split(slab.slot_bytes)
    slab.num_slots += num_slots
    store._free.extend(range(slab.num_slots - 1, first - 1, -1))


def _give_back(memory: torch.Tensor) -> None:
    """Gives whole pages back to the system; they hold zeros when they are read again."""
    advise = madvise()
    if advise is None:
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        advise(first, last - first, mmap.MADV_DONTNEED)
