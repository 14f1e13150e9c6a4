"""What stays of the experts that a streaming lease uses: those wanted most."""

from collections.abc import Sequence
from typing import Any

from moe_runtime.memory.residency import ExpertStore
from moe_runtime.types import ExpertKey


def keep_most_wanted(
    store: ExpertStore[Any], keys: Sequence[ExpertKey], *, only_free: bool
) -> set[ExpertKey]:
    """Chooses which of the experts that the policy does not hold it shall hold from now on.

    They fill the free room of their layer. Where they are more than its share, they also take the
    slots of residents that the lease does not use, as far as enough are left to stream through.

    Args:
        store: whose lock is held; what is there of the experts is pinned.
        keys: the experts of the lease, those wanted most last.
        only_free: leaves alone what the last leases streamed through.

    Returns:
        The experts to keep. What makes way for them has left, and those that are there are kept.
    """
    policy, layer = store._policy, keys[0].layer
    newcomers = [key for key in keys if key not in policy]
    room = policy.room(layer)
    num_beyond = len(keys) - store.share(layer)
    if num_beyond <= 0:
        num_kept = 0 if only_free and len(store._free) <= store._stream_slots else room
    else:
        num_used = len(keys) - len(newcomers)
        num_unused = len(policy.layers[layer]) - num_used
        streamed = sum(not store._entries[key].expected for key in store._streamed)
        spare = len(store._free) + streamed - min(num_beyond, store._stream_slots)
        num_kept = max(0, min(store.share(layer) - num_used, num_unused + spare))
        _evict_unused(store, keys, num_kept - min(room, spare))
    kept = newcomers[max(0, len(newcomers) - num_kept) :]
    for key in store._streamed.intersection(kept):
        store._keep(key)
    return set(kept)


def _evict_unused(store: ExpertStore[Any], keys: Sequence[ExpertKey], number: int) -> None:
    in_use = frozenset(keys)
    for _ in range(number):
        victim = store._policy.victim_within(
            keys[0].layer, lambda key: key not in in_use and store._is_idle(key), keys[-1]
        )
        if victim is None:  # other leases hold the rest
            return
        store._counters.evictions += 1
        store._drop(victim)
