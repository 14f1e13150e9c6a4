"""Eviction rules over uses alone, and Belady's bounds, which know the uses to come."""

import heapq
import math
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self, cast

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, ReplayRule, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted, Routes
from moe_runtime.types import ExpertKey


class LRU(EvictionPolicy[K]):
    """Least recently used: evicts the key whose last use lies furthest back.

    ``touch``, ``insert`` and ``remove`` take constant time; ``victim`` takes one step for every key
    at the old end that is not evictable.
    """

    rule = ReplayRule("lru")

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()

    def touch(self, key: K) -> None:
        """Makes a held key the most recent one."""
        self._order.move_to_end(key)

    def insert(self, key: K) -> None:
        """Starts to hold a key as the most recent one."""
        if key in self._order:
            raise ValueError(f"{key} is held already")
        self._order[key] = None

    def remove(self, key: K) -> None:
        del self._order[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The least recently used key that may be evicted."""
        return next((key for key in self._order if evictable(key)), None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order


class SLRU(EvictionPolicy[K]):
    """Segmented LRU: a key must be used twice before it can push out one that was used twice.

    Two orders by recency: newcomers on probation, and a protected segment. Karedla, Love and
    Wherry, "Caching Strategies to Improve Disk System Performance", Computer 1994.

    Args:
        protected_share: largest share of the held keys that is protected.
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
        """Starts to hold a key on probation."""
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


class SIEVE(EvictionPolicy[K]):
    """A queue in order of arrival, and a hand that spares what was used since it last came by.

    A use only sets a mark, and the hand takes marks away. ``victim`` moves the hand, so that asking
    again gives the same key until it is removed. ``remove`` closes a gap in the queue, which takes
    a time proportional to its length. Zhang et al., "SIEVE is Simpler than LRU: an Efficient
    Turn-Key Eviction Algorithm for Web Caches", NSDI 2024.
    """

    rule = ReplayRule("sieve")

    def __init__(self) -> None:
        self._queue: list[K] = []  # the oldest first
        self._used: dict[K, bool] = {}
        self._hand = 0

    def touch(self, key: K) -> None:
        if key not in self._used:
            raise KeyError(key)
        self._used[key] = True

    def insert(self, key: K) -> None:
        """Starts to hold a key at the young end of the queue, without a mark."""
        if key in self._used:
            raise ValueError(f"{key} is held already")
        self._used[key] = False
        self._queue.append(key)

    def remove(self, key: K) -> None:
        """Stops holding a key; a hand that points at it moves on."""
        del self._used[key]
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
                if not self._used[key]:
                    self._hand = place
                    return key
                self._used[key] = False
            place = (place + 1) % len(self._queue)
        return None

    def check(self) -> None:
        assert len(self._queue) == len(self._used)
        assert set(self._queue) == self._used.keys()
        assert 0 <= self._hand < max(1, len(self._queue))

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: object) -> bool:
        return key in self._used


class RandomChoice(EvictionPolicy[K]):
    """Evicts any evictable key with equal probability: below this line a policy does harm.

    Equal calls give equal victims. The numbers are those of Knuth's linear congruential generator
    (MMIX), so that the compiled replay draws the same.
    """

    rule = ReplayRule("random")

    def __init__(self) -> None:
        self._state = 0
        self._keys: list[K] = []
        self._place: dict[K, int] = {}

    def touch(self, key: K) -> None:
        """A use changes nothing."""
        if key not in self._place:
            raise KeyError(key)

    def insert(self, key: K) -> None:
        if key in self._place:
            raise ValueError(f"{key} is held already")
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def remove(self, key: K) -> None:
        """Stops holding a key; the last one takes its place."""
        place = self._place.pop(key)
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._place[last] = place

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        for _ in range(4):
            if self._keys and evictable(key := self._any_of(self._keys)):
                return key
        candidates = [key for key in self._keys if evictable(key)]
        return self._any_of(candidates) if candidates else None

    def check(self) -> None:
        assert self._place == {key: place for place, key in enumerate(self._keys)}

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._place

    def _any_of(self, keys: list[K]) -> K:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        # the low digits of such a generator repeat soon
        return keys[(self._state >> 33) * len(keys) >> 31]


class Stamped(EvictionPolicy[K]):
    """Evicts the key that is worth least now, the least recently used one among equals.

    Worths may change at any time, so ``victim`` looks at every held key.
    """

    def __init__(self) -> None:
        self._last_use: dict[K, int] = {}
        self._clock = 0

    @abstractmethod
    def worths(self, keys: Sequence[K]) -> Sequence[float]:
        """What keys are worth at this moment."""

    def touch(self, key: K) -> None:
        """Renews the place of a held key among equals."""
        if key not in self._last_use:
            raise KeyError(key)
        self._stamp(key)

    def insert(self, key: K) -> None:
        if key in self._last_use:
            raise ValueError(f"{key} is held already")
        self._stamp(key)

    def remove(self, key: K) -> None:
        del self._last_use[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of lowest worth."""
        candidates = [key for key in self._last_use if evictable(key)]
        stamps = map(self._last_use.__getitem__, candidates)
        ranked = zip(self.worths(candidates), stamps, candidates, strict=True)
        return min(ranked, default=(0, 0, None))[2]

    def check(self) -> None:
        assert all(stamp <= self._clock for stamp in self._last_use.values())

    def __len__(self) -> int:
        return len(self._last_use)

    def __contains__(self, key: object) -> bool:
        return key in self._last_use

    def _stamp(self, key: K) -> None:
        self._clock += 1
        self._last_use[key] = self._clock


class LFRU(Stamped[K]):
    """Frequency-weighted recency: a key is worth its uses while held, over its age (as in vLLM)."""

    rule = ReplayRule("lfru")

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: dict[K, int] = {}

    def touch(self, key: K) -> None:
        super().touch(key)
        self._num_uses[key] += 1

    def insert(self, key: K) -> None:
        super().insert(key)
        self._num_uses[key] = 1

    def remove(self, key: K) -> None:
        super().remove(key)
        del self._num_uses[key]

    def worths(self, keys: Sequence[K]) -> list[float]:
        now = self._clock + 1
        return [self._num_uses[key] / (now - self._last_use[key]) for key in keys]


class Ranked(EvictionPolicy[K]):
    """Evicts the key of lowest rank, which changes only when the key is used.

    A rank that rises costs one assignment: its place in the heap is corrected when it comes up. A
    rank that falls costs one push. Ranks must differ between keys wherever the order matters.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, Any] = {}
        self._queued: dict[K, Any] = {}  # the smallest rank under which a key lies in the heap
        self._heap: list[tuple[Any, int, K]] = []
        self._num_pushes = 0

    @abstractmethod
    def rank(self, key: K) -> Any:
        """Notes a use of a key, and gives the rank that follows from it."""

    def touch(self, key: K) -> None:
        if key not in self._ranks:
            raise KeyError(key)
        rank = self._ranks[key] = self.rank(key)
        if rank < self._queued[key]:
            self._push(key, rank)

    def insert(self, key: K) -> None:
        if key in self._ranks:
            raise ValueError(f"{key} is held already")
        rank = self._ranks[key] = self.rank(key)
        self._push(key, rank)

    def remove(self, key: K) -> None:
        del self._ranks[key], self._queued[key]
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, number, k) for number, (k, rank) in enumerate(self._ranks.items())]
            self._num_pushes = len(self._heap)
            self._queued = dict(self._ranks)
            heapq.heapify(self._heap)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The evictable key of lowest rank."""
        passed_over: list[tuple[Any, int, K]] = []
        found = None
        while self._heap and found is None:
            rank, number, key = self._heap[0]
            if key not in self._ranks or self._queued[key] != rank:
                heapq.heappop(self._heap)
            elif self._ranks[key] != rank:
                self._queued[key] = self._ranks[key]
                heapq.heapreplace(self._heap, (self._ranks[key], number, key))
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
        assert self._ranks.keys() == self._queued.keys()
        assert all((key, rank) in queued for key, rank in self._queued.items())
        assert all(self._queued[key] <= rank for key, rank in self._ranks.items())

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks

    def _push(self, key: K, rank: Any) -> None:
        self._queued[key] = rank
        self._num_pushes += 1
        heapq.heappush(self._heap, (rank, self._num_pushes, key))


class LFU(Ranked[K]):
    """Least frequently used, by all uses so far, also those before an eviction.

    Among equals the least recently used key goes.
    """

    rule = ReplayRule("lfu")

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: Counter[K] = Counter()
        self._clock = 0

    def rank(self, key: K) -> int:
        """Uses, then the time of the last one, as one number."""
        self._clock += 1
        self._num_uses[key] += 1
        return (self._num_uses[key] << 48) + self._clock


class AgingLFU(Ranked[K]):
    """LFU with ageing: every use counts, and counts less the longer ago it was (as LRFU does).

    Instead of shrinking every count, a new use weighs more than the ones before; logarithms keep
    the numbers small. Lee et al., "LRFU: A Spectrum of Policies that Subsumes the LRU and LFU
    Policies", IEEE TC 2001.

    Args:
        half_life: time in which a use loses half its weight, in turns of the cache: one turn has
            passed after as many uses as keys are held.
    """

    rule: ReplayRule | None = None

    def __init__(self, half_life: float = 8.0) -> None:
        super().__init__()
        self.rule = ReplayRule("lfu-aging", parameter=half_life)
        self._half_life = half_life
        self._log2_uses: dict[K, float] = {}
        self._now = 0.0  # in half-lives

    def rank(self, key: K) -> float:
        """The weight of all uses of the key, as a logarithm."""
        num_held = len(self._ranks)
        self._now += 1 / (self._half_life * max(1, num_held))
        before = self._log2_uses.get(key, -math.inf)
        self._log2_uses[key] = self._now + math.log2(1 + math.exp2(min(before - self._now, 1000.0)))
        return self._log2_uses[key]


class GDSF(Ranked[K]):
    """Greedy-Dual-Size-Frequency: rank = clock + uses * cost; the clock is the last victim's rank.

    The paper divides by the size; here every key takes one slot, however small it is. With equal
    costs this is LFU with dynamic ageing. Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories 1998.

    Args:
        cost: what a miss of a key costs; only ratios matter. All keys cost the same when omitted.
    """

    rule: ReplayRule | None = None

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        return partial(cls, setting.cost_of)

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        super().__init__()
        self.rule = ReplayRule("gdsf") if cost is None else None
        self._cost = cost or _one
        self._num_uses: Counter[K] = Counter()  # since the key came in
        self._clock = 0.0
        self._num_stamps = 0
        self._candidate: K | None = None

    def rank(self, key: K) -> tuple[float, int]:
        """One more use of the key, on the present clock."""
        self._num_uses[key] += 1
        self._num_stamps += 1
        return self._clock + self._num_uses[key] * self._cost(key), self._num_stamps

    def remove(self, key: K) -> None:
        """Stops holding a key; the clock advances to its rank if it was chosen as a victim."""
        if key == self._candidate:
            self._clock = max(self._clock, self._ranks[key][0])
            self._candidate = None
        super().remove(key)
        del self._num_uses[key]

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        self._candidate = super().victim(evictable, incoming)
        return self._candidate


class LeastExpectedCost(Ranked[K]):
    """Ranks by uses so far times cost; a newcomer is kept only if it is worth more than a victim.

    Zhu et al., "On Optimal Caching and Model Multiplexing for Large Model Inference", NeurIPS 2023.

    Args:
        cost: what a miss of a key costs; only ratios matter. All keys cost the same when omitted.
    """

    may_decline: bool = True
    rule: ReplayRule | None = None

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        return partial(cls, setting.cost_of)

    def __init__(self, cost: Callable[[K], float] | None = None) -> None:
        super().__init__()
        self.rule = ReplayRule("lec") if cost is None else None
        self._cost = cost or _one
        self._num_uses: Counter[K] = Counter()
        self._num_stamps = 0

    def rank(self, key: K) -> tuple[float, int]:
        """Uses times cost, one more use included."""
        self._num_uses[key] += 1
        self._num_stamps += 1
        return self._num_uses[key] * self._cost(key), self._num_stamps

    def decline(self, key: K) -> None:
        self._num_uses[key] += 1

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer is not worth more, its present use included."""
        expected_cost = (self._num_uses[incoming] + 1) * self._cost(incoming)
        return expected_cost <= self._ranks[victim][0]


class StaticPopularity(Ranked[K]):
    """Static pinning: keeps the keys of largest weight, whatever happens now.

    A key below all that are held is not kept. Among equal weights the lowest slot goes first: slots
    fill in order, and a newcomer takes the slot of its victim.

    Args:
        weights: uses of each key in a trace; a key that is absent has none.
    """

    may_decline: bool = True
    rule: ReplayRule | None = None

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        if setting.training is None:
            raise ValueError("policy 'static' needs a recorded trace to count uses in")
        return partial(cls, cast(Mapping[Any, float], popularity(setting.training)))

    def __init__(self, weights: Mapping[K, float]) -> None:
        super().__init__()
        self.rule = ReplayRule("static", weights=weights)
        self._weights = weights
        self._free_slots: list[int] = []

    def touch(self, key: K) -> None:
        """A use changes nothing."""
        if key not in self._ranks:
            raise KeyError(key)

    def rank(self, key: K) -> tuple[float, int]:
        """The weight, then the lowest free slot."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._ranks)
        return self._weights.get(key, 0), slot

    def remove(self, key: K) -> None:
        _, slot = self._ranks[key]
        super().remove(key)
        heapq.heappush(self._free_slots, slot)

    def declines(self, incoming: K, victim: K) -> bool:
        return self._weights.get(incoming, 0) < self._ranks[victim][0]

    def check(self) -> None:
        super().check()
        slots = [slot for _, slot in self._ranks.values()] + self._free_slots
        assert sorted(slots) == list(range(len(slots)))


class Future:
    """When every key is used, told by a clock that advances with the routing events.

    Args:
        events: the keys of every layer of every step, in the order in which they will be routed.
    """

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
        """Moves the clock to the next layer."""
        self._now += isinstance(event, LayerRouted)

    def finish(self, sequence: int) -> None:
        pass

    def next_use(self, key: Hashable) -> float:
        """The number of the next event that uses the key, and as a fraction its place there."""
        uses = self._uses.get(key, [])
        while uses and uses[-1] < self._now + 1:
            uses.pop()
        return uses[-1] if uses else math.inf


class Belady(Ranked[K]):
    """The fewest misses that a cache can have which keeps everything that it loads.

    Evicts the key whose next use lies furthest ahead (Belady, IBM Systems Journal 1966). No running
    system can know the future; this bounds what any policy can reach on a trace.

    Args:
        future: the uses to come; its clock must advance before the keys of an event are used.
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

    def rank(self, key: K) -> float:
        """The sooner the next use, the higher."""
        return -self._future.next_use(key)


class BeladyBypass(Belady[K]):
    """The fewest misses that any cache can have: what is needed last is used once and not kept."""

    may_decline: bool = True
    rule = ReplayRule("belady-bypass")

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the newcomer is used after all that is held."""
        return self.rank(incoming) < self._ranks[victim]


def popularity(routes: Routes) -> dict[ExpertKey, int]:
    """Counts the tokens that visited each expert."""
    shape = routes.shape
    counts = [
        np.bincount(routes.expert_ids[:, layer].ravel(), minlength=shape.num_experts + 1)
        for layer in range(shape.num_layers)
    ]
    return {
        ExpertKey(layer, expert): int(counts[layer][expert])
        for layer in range(shape.num_layers)
        for expert in range(shape.num_experts)
    }


def _one(_: Hashable) -> float:
    return 1.0
