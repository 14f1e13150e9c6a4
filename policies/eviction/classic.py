"""Eviction rules over uses alone, and Belady's bounds."""

import heapq
import math
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self, cast

import numpy as np

from moe_runtime.policies.eviction.base import (
    Evictable,
    EvictionPolicy,
    K,
    ReplayRule,
    Setting,
)
from moe_runtime.policies.prediction.base import Event, LayerRouted
from moe_runtime.types import ExpertKey


class Holding(EvictionPolicy[K]):
    """Holds keys in the order of their arrival, each with what its last use made of it."""

    def __init__(self) -> None:
        self._held: dict[K, Any] = {}

    @abstractmethod
    def use(self, key: K) -> Any:
        """Notes a use of a key, and gives what is held of it from now on."""

    def touch(self, key: K) -> None:
        if key not in self._held:
            raise KeyError(key)
        self._held[key] = self.use(key)

    def insert(self, key: K) -> None:
        if key in self._held:
            raise ValueError(f"{key} is held already")
        self._held[key] = self.use(key)

    def remove(self, key: K) -> None:
        del self._held[key]

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held


class LRU(Holding[K]):
    """Least recently used: evicts the key whose last use lies furthest back."""

    rule = ReplayRule("lru")

    def __init__(self) -> None:
        self._held: Any = OrderedDict()  # by recency

    def use(self, key: K) -> None:
        """The order says it all."""

    def touch(self, key: K) -> None:
        self._held.move_to_end(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        return next((key for key in self._held if evictable(key)), None)


class SLRU(EvictionPolicy[K]):
    """Segmented LRU: a key must be used twice before it can push out one that was used twice.

    Two orders by recency: newcomers on probation, and a protected segment, at most
    ``protected_share`` of the held keys. Karedla, Love and Wherry, "Caching Strategies to Improve
    Disk System Performance", Computer 1994.
    """

    rule: ReplayRule | None = None

    def __init__(self, protected_share: float = 0.8) -> None:
        self.rule = ReplayRule("slru", parameter=protected_share)
        self._protected_share = protected_share
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """Protects a held key; the oldest protected ones may fall back to probation."""
        if key in self._protected:
            self._protected.move_to_end(key)
            return
        del self._probation[key]
        self._protected[key] = None
        self._balance()

    def insert(self, key: K) -> None:
        if key in self:
            raise ValueError(f"{key} is held already")
        self._probation[key] = None

    def remove(self, key: K) -> None:
        del (self._protected if key in self._protected else self._probation)[key]
        self._balance()

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The oldest evictable key on probation, or else the oldest protected one."""
        segments = (self._probation, self._protected)
        return next((key for keys in segments for key in keys if evictable(key)), None)

    def check(self) -> None:
        assert not self._probation.keys() & self._protected.keys()
        assert len(self._protected) <= max(1, self._protected_share * len(self))

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._protected or key in self._probation

    def _balance(self) -> None:
        while len(self._protected) > max(1, self._protected_share * len(self)):
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None


class SIEVE(Holding[K]):
    """A queue in order of arrival, and a hand that spares what was used since it last came by.

    A use only sets a mark, and the hand takes marks away. ``victim`` moves the hand, so that asking
    again gives the same key until it is removed. ``remove`` closes a gap in the queue, in a time
    proportional to its length. Zhang et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key
    Eviction Algorithm for Web Caches", NSDI 2024.
    """

    rule = ReplayRule("sieve")

    def __init__(self) -> None:
        super().__init__()  # of each key whether it is marked
        self._queue: list[K] = []  # the oldest first
        self._hand = 0

    def use(self, key: K) -> bool:
        return key in self._held

    def insert(self, key: K) -> None:
        super().insert(key)
        self._queue.append(key)

    def remove(self, key: K) -> None:
        super().remove(key)
        place = self._queue.index(key)
        del self._queue[place]
        self._hand -= place < self._hand
        if self._hand == len(self._queue):
            self._hand = 0

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The first evictable key without a mark, from the hand towards the young end."""
        place = self._hand
        for _ in range(2 * len(self._queue)):  # after one round every mark is gone
            key = self._queue[place]
            if evictable(key):
                if not self._held[key]:
                    self._hand = place
                    return key
                self._held[key] = False
            place = (place + 1) % len(self._queue)
        return None

    def check(self) -> None:
        assert len(self._queue) == len(self._held)
        assert set(self._queue) == self._held.keys()
        assert 0 <= self._hand < max(1, len(self._queue))


class RandomChoice(Holding[K]):
    """Evicts any evictable key with equal probability: below this line a policy does harm.

    The numbers are those of Knuth's linear congruential generator (MMIX), as in the compiled
    replay.
    """

    rule = ReplayRule("random")

    def __init__(self) -> None:
        super().__init__()  # of each key its place
        self._state = 0
        self._keys: list[K] = []

    def use(self, key: K) -> int:
        return self._held.get(key, len(self._keys))

    def insert(self, key: K) -> None:
        super().insert(key)
        self._keys.append(key)

    def remove(self, key: K) -> None:
        place = self._held.pop(key)
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._held[last] = place

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        for _ in range(4):
            if self._keys and evictable(key := self._any_of(self._keys)):
                return key
        candidates = [key for key in self._keys if evictable(key)]
        return self._any_of(candidates) if candidates else None

    def check(self) -> None:
        assert self._held == {key: place for place, key in enumerate(self._keys)}

    def _any_of(self, keys: list[K]) -> K:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        # the low digits of such a generator repeat soon
        return keys[(self._state >> 33) * len(keys) >> 31]


class Stamped(Holding[K]):
    """Evicts the key that is worth least now, the least recently used one among equals."""

    def __init__(self) -> None:
        super().__init__()  # of each key the time of its last use
        self._clock = 0

    @abstractmethod
    def worths(self, keys: Sequence[K]) -> Sequence[float]:
        """What keys are worth at this moment."""

    def use(self, key: K) -> int:
        self._clock += 1
        return self._clock

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        candidates = [key for key in self._held if evictable(key)]
        stamps = map(self._held.__getitem__, candidates)
        ranked = zip(self.worths(candidates), stamps, candidates, strict=True)
        return min(ranked, default=(0, 0, None))[2]

    def check(self) -> None:
        assert all(stamp <= self._clock for stamp in self._held.values())


class LFRU(Stamped[K]):
    """Frequency-weighted recency: a key is worth its uses while held, over its age (as in vLLM)."""

    rule = ReplayRule("lfru")

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: Counter[K] = Counter()

    def use(self, key: K) -> int:
        self._num_uses[key] += 1
        return super().use(key)

    def remove(self, key: K) -> None:
        super().remove(key)
        del self._num_uses[key]

    def worths(self, keys: Sequence[K]) -> list[float]:
        now = self._clock + 1
        return [self._num_uses[key] / (now - self._held[key]) for key in keys]


class Ranked(Holding[K]):
    """Evicts the key of lowest rank, which changes only when the key is used.

    A rank that rises costs one assignment: its place in the heap is corrected when it comes up. A
    rank that falls costs one push. Ranks must differ between keys wherever the order matters.
    """

    def __init__(self) -> None:
        super().__init__()  # of each key its rank
        self._queued: dict[K, Any] = {}  # the smallest rank under which a key lies in the heap
        self._heap: list[tuple[Any, int, K]] = []
        self._num_pushes = 0

    def touch(self, key: K) -> None:
        super().touch(key)
        if self._held[key] < self._queued[key]:
            self._push(key)

    def insert(self, key: K) -> None:
        super().insert(key)
        self._push(key)

    def remove(self, key: K) -> None:
        del self._held[key], self._queued[key]
        if len(self._heap) > 64 + 4 * len(self._held):
            self._heap = [(rank, number, k) for number, (k, rank) in enumerate(self._held.items())]
            self._num_pushes = len(self._heap)
            self._queued = dict(self._held)
            heapq.heapify(self._heap)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        passed_over: list[tuple[Any, int, K]] = []
        found = None
        while self._heap and found is None:
            rank, number, key = self._heap[0]
            if key not in self._held or self._queued[key] != rank:
                heapq.heappop(self._heap)
            elif self._held[key] != rank:
                self._queued[key] = self._held[key]
                heapq.heapreplace(self._heap, (self._held[key], number, key))
            elif evictable(key):
                found = key
            else:
                passed_over.append(heapq.heappop(self._heap))
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return found

    def check(self) -> None:
        """Proves that every key can come up at its rank or before."""
        queued = {(key, rank) for rank, _, key in self._heap}
        assert self._held.keys() == self._queued.keys()
        assert all((key, rank) in queued for key, rank in self._queued.items())
        assert all(self._queued[key] <= rank for key, rank in self._held.items())

    def _push(self, key: K) -> None:
        rank = self._queued[key] = self._held[key]
        self._num_pushes += 1
        heapq.heappush(self._heap, (rank, self._num_pushes, key))


class LFU(Ranked[K]):
    """Least frequently used, by all uses so far; among equals the least recently used key goes."""

    rule = ReplayRule("lfu")

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: Counter[K] = Counter()
        self._clock = 0

    def use(self, key: K) -> int:
        """Uses, then the time of the last one, as one number."""
        self._clock += 1
        self._num_uses[key] += 1
        return (self._num_uses[key] << 48) + self._clock


class AgingLFU(Ranked[K]):
    """LFU with ageing: every use counts, and counts less the longer ago it was (as LRFU does).

    A new use weighs more than the ones before, and ranks are logarithms, so that no count shrinks.
    A use loses half its weight in ``half_life`` turns of the cache: one turn is as many uses as
    keys are held. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the LRU and LFU
    Policies", IEEE TC 2001.
    """

    rule: ReplayRule | None = None

    def __init__(self, half_life: float = 8.0) -> None:
        super().__init__()
        self.rule = ReplayRule("lfu-aging", parameter=half_life)
        self._half_life = half_life
        self._log2_uses: dict[K, float] = {}
        self._now = 0.0  # in half-lives

    def use(self, key: K) -> float:
        """The weight of all uses of the key, as a logarithm."""
        self._now += 1 / (self._half_life * max(1, len(self._held)))
        before = self._log2_uses.get(key, -math.inf)
        self._log2_uses[key] = self._now + math.log2(1 + math.exp2(min(before - self._now, 1000.0)))
        return self._log2_uses[key]


class Costed(Ranked[K]):
    """Ranks by uses and by ``cost``, what a miss of a key costs: 1 each when omitted."""

    name: str

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        return partial(cls, setting.cost_of)

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        super().__init__()
        self.rule = ReplayRule(self.name) if cost is None else None
        self._cost = cost or _one
        self._num_uses: Counter[K] = Counter()
        self._num_stamps = 0
        self._clock = 0.0

    def use(self, key: K) -> tuple[float, int]:
        self._num_uses[key] += 1
        self._num_stamps += 1
        return self._clock + self._num_uses[key] * self._cost(key), self._num_stamps


class GDSF(Costed[K]):
    """Greedy-Dual-Size-Frequency: rank = clock + uses * cost; the clock is the last victim's rank.

    Uses count since the key came in. The paper divides by the size; here every key takes one slot,
    however small it is. With equal costs this is LFU with dynamic ageing. Cherkasova, "Improving
    WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories 1998.
    """

    name = "gdsf"
    rule: ReplayRule | None = None

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        super().__init__(cost)
        self._candidate: K | None = None

    def remove(self, key: K) -> None:
        """Stops holding a key; the clock advances to its rank if it was chosen as a victim."""
        if key == self._candidate:
            self._clock = max(self._clock, self._held[key][0])
            self._candidate = None
        super().remove(key)
        del self._num_uses[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        self._candidate = super().victim(evictable, incoming)
        return self._candidate


class LeastExpectedCost(Costed[K]):
    """Ranks by uses so far times cost; a newcomer is kept only if it is worth more than a victim.

    Zhu et al., "On Optimal Caching and Model Multiplexing for Large Model Inference", NeurIPS 2023.
    """

    name = "lec"
    may_decline: bool = True
    rule: ReplayRule | None = None

    def decline(self, key: K) -> None:
        self._num_uses[key] += 1

    def declines(self, incoming: K, victim: K) -> bool:
        expected_cost = (self._num_uses[incoming] + 1) * self._cost(incoming)
        return expected_cost <= self._held[victim][0]


class StaticPopularity(Ranked[K]):
    """Static pinning: keeps the keys of largest weight, their uses in a trace, whatever happens
    now.

    A key below all that are held is not kept. Among equal weights the lowest slot goes first: slots
    fill in order, and a newcomer takes the slot of its victim.
    """

    may_decline: bool = True
    rule: ReplayRule | None = None

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        if setting.training is None:
            raise ValueError("policy 'static' needs a recorded trace to count uses in")
        counts = np.ndenumerate(setting.training.counts())
        popularity = {ExpertKey(*place): int(count) for place, count in counts}
        return partial(cls, cast(Mapping[Any, float], popularity))

    def __init__(self, weights: Mapping[K, float]) -> None:
        super().__init__()
        self.rule = ReplayRule("static", weights=weights)
        self._weights = weights
        self._free_slots: list[int] = []

    def touch(self, key: K) -> None:
        if key not in self._held:
            raise KeyError(key)

    def use(self, key: K) -> tuple[float, int]:
        """The weight, then the lowest free slot."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._held)
        return self._weights.get(key, 0), slot

    def remove(self, key: K) -> None:
        _, slot = self._held[key]
        super().remove(key)
        heapq.heappush(self._free_slots, slot)

    def declines(self, incoming: K, victim: K) -> bool:
        return self._weights.get(incoming, 0) < self._held[victim][0]

    def check(self) -> None:
        super().check()
        slots = [slot for _, slot in self._held.values()] + self._free_slots
        assert sorted(slots) == list(range(len(slots)))


class Future:
    """When every key is used, by a clock that advances with the events."""

    def __init__(self, events: Sequence[Sequence[Hashable]]) -> None:
        self._events = events
        self._now = -1

    @cached_property
    def _uses(self) -> dict[Hashable, list[float]]:
        """The events to come of every key, the next one last."""
        uses: defaultdict[Hashable, list[float]] = defaultdict(list)
        for number, keys in enumerate(self._events):
            for place, key in enumerate(keys):
                uses[key].append(number + place / len(keys))
        return {key: numbers[::-1] for key, numbers in uses.items()}

    def observe(self, event: Event) -> None:
        self._now += isinstance(event, LayerRouted)

    def finish(self, sequence: int) -> None:
        pass

    def next_use(self, key: Hashable) -> float:
        """The number of the next event that uses the key, its place there as a fraction; or
        infinite.
        """
        uses = self._uses.get(key, [])
        while uses and uses[-1] < self._now + 1:
            uses.pop()
        return uses[-1] if uses else math.inf


class Belady(Ranked[K]):
    """The fewest misses that a cache can have which keeps everything that it loads.

    Evicts the key whose next use lies furthest ahead (Belady, IBM Systems Journal 1966). The clock
    of ``future`` must advance before the keys of an event are used.
    """

    rule = ReplayRule("belady")

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        if setting.future is None:
            raise ValueError("Belady's policies must be told the future, which only a replay can")
        return partial(cls, Future(setting.future))

    def __init__(self, future: Future) -> None:
        super().__init__()
        self.watcher = self._future = future

    def use(self, key: K) -> float:
        """The sooner the next use, the higher."""
        return -self._future.next_use(key)


class BeladyBypass(Belady[K]):
    """The fewest misses that any cache can have: what is needed last is used once and not kept."""

    may_decline: bool = True
    rule = ReplayRule("belady-bypass")

    def declines(self, incoming: K, victim: K) -> bool:
        return self.use(incoming) < self._held[victim]


def _one(_: Hashable) -> float:
    return 1.0
