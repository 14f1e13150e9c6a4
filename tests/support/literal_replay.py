"""An expert cache replayed as literally as it can be written; the reference of tests/lab."""

import math
from collections import Counter

import numpy as np


def literal_replay(
    ids: np.ndarray,
    starts: list[int],
    num_experts: int,
    policy: str,
    capacity: int,
    *,
    shared_pool: bool,
    reset: bool,
) -> tuple[int, int]:
    """Replays one decoded token after another through a cache.

    Args:
        ids: ``[T, L, K]`` experts of every token in gate order.
        starts: first token of every sequence.
        num_experts: experts of a layer.
        policy: ``lru``, ``lfu``, ``belady``, ``belady-bypass`` or ``static``.
        capacity: slots of the pool, or of each layer.
        shared_pool: one pool for all layers.
        reset: forget everything where a sequence starts.

    Returns:
        Hits, and events all of whose experts were resident.
    """
    num_tokens, num_layers, top_k = ids.shape
    events = [
        (token, layer, [(layer, int(e)) for e in ids[token, layer]])
        for token in range(num_tokens)
        for layer in range(num_layers)
    ]
    totals = Counter(key for _, _, keys in events for key in keys)
    may_decline = policy in ("belady-bypass", "static")

    def next_use(number: int, key: tuple[int, int]) -> float:
        for later in range(number + 1, len(events)):
            if reset and events[later][1] == 0 and events[later][0] in starts:
                return math.inf
            if key in events[later][2]:
                return later
        return math.inf

    hits = full = 0
    pools: dict[int, list[tuple[int, int] | None]] = {}
    count: Counter[tuple[int, int]] = Counter()
    last: dict[tuple[int, int], int] = {}
    for number, (token, layer, keys) in enumerate(events):
        if number == 0 or (reset and layer == 0 and token in starts):
            pools = {n: [None] * capacity for n in range(1 if shared_pool else num_layers)}
            count.clear()
        slots = pools[0 if shared_pool else layer]
        found = [key for key in keys if key in slots]
        hits += len(found)
        full += len(found) == top_k
        for place, key in enumerate(keys):
            count[key] += 1
            last[key] = number * top_k + place

        def worth(key: tuple[int, int], number: int = number) -> tuple[float, ...]:
            if policy == "lru":
                return (last[key],)
            if policy == "lfu":
                return (count[key], last[key])
            return (totals[key],) if policy == "static" else (-next_use(number, key),)

        for key in keys:
            if key in found:
                continue
            slot = slots.index(None) if None in slots else None
            if slot is None:
                free = [n for n, held in enumerate(slots) if may_decline or held not in keys]
                slot = min(free, key=lambda n: worth(slots[n]))
                if may_decline and worth(key) < worth(slots[slot]):
                    continue
            slots[slot] = key
    return hits, full
