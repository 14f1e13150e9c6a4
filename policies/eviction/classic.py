"""Eviction rules over uses alone, and Belady's bounds."""

import heapq
import math
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Self, cast

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, K, Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted
from moe_runtime.types import ExpertKey


class Holding(EvictionPolicy[K]):
    """Holds keys in the order of their arrival, each with a value that its last use gave it."""

    def __init__(self) -> None:
        self._held: dict[K, Any] = {}

    @abstractmethod
    def use(self, key: K) -> Any:
        """Notes a use of a key; returns its new value."""

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
    """Least recently used: evicts the key whose last use is oldest."""

    def __init__(self) -> None:
        self._held: Any = OrderedDict()  # by recency

    def use(self, key: K) -> None:
        """The order is enough."""

    def touch(self, key: K) -> None:
        self._held.move_to_end(key)

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        return next(filter(evictable, self._held), None)


class SLRU(EvictionPolicy[K]):
    """Segmented LRU: a key must be used twice before it can push out one that was used twice.

    Two orders by recency: newcomers on probation, and a protected segment, at most
    ``protected_share`` of the held keys. Karedla, Love and Wherry, "Caching Strategies to Improve
    Disk System Performance", Computer 1994.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        self.protected_share = protected_share
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
        assert len(self._protected) <= max(1, self.protected_share * len(self))

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __contains__(self, key: object) -> bool:
        return key in self._protected or key in self._probation

    def _balance(self) -> None:
        while len(self._protected) > max(1, self.protected_share * len(self)):
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None


class SIEVE(Holding[K]):
    """A queue in order of arrival, and a hand that spares keys used since it last passed.

    A use marks a key, and the hand removes the mark. ``victim`` moves the hand: it returns the same
    key until that is removed. ``remove`` takes time proportional to the length of the queue. Zhang
    et al., "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches",
    NSDI 2024.
    """

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
        """The first evictable key without a mark, from the hand towards the newest."""
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
    """Evicts any evictable key with equal probability: a policy that hits less does harm.

    Draws from Knuth's linear congruential generator (MMIX), as the compiled replay does.
    """

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
        """Present worth of each key."""

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
    """Evicts the key of lowest rank, the value that its last use gave it."""

    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        ranked = sorted(self._held, key=self._held.__getitem__)
        return next(filter(evictable, ranked), None)


class LFU(Ranked[K]):
    """Least frequently used, by all uses so far; among equals the least recently used key."""

    def __init__(self) -> None:
        super().__init__()
        self._num_uses: Counter[K] = Counter()
        self._clock = 0

    def use(self, key: K) -> int:
        """Number of uses, then the time of the last one, as one number."""
        self._clock += 1
        self._num_uses[key] += 1
        return (self._num_uses[key] << 48) + self._clock


class AgingLFU(Ranked[K]):
    """LFU with ageing: every use counts, and counts less the older it is (as in LRFU).

    A use loses half its weight in ``half_life`` turns of the cache; one turn is as many uses as
    keys are held. Instead of shrinking old weights, new ones grow, and ranks are logarithms. Lee et
    al., "LRFU: A Spectrum of Policies that Subsumes the LRU and LFU Policies", IEEE TC 2001.
    """

    def __init__(self, half_life: float = 8.0) -> None:
        super().__init__()
        self.half_life = half_life
        self._log2_uses: dict[K, float] = {}
        self._now = 0.0  # in half-lives

    def use(self, key: K) -> float:
        """The weight of all uses of the key, as a logarithm."""
        self._now += 1 / (self.half_life * max(1, len(self._held)))
        before = self._log2_uses.get(key, -math.inf)
        self._log2_uses[key] = self._now + math.log2(1 + math.exp2(min(before - self._now, 1000.0)))
        return self._log2_uses[key]


class Costed(Ranked[K]):
    """Ranks by uses and by ``cost`` of a miss of a key: 1 each when omitted."""

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        return partial(cls, None if setting.costs is None else setting.costs.__getitem__)

    def __init__(self, cost: Callable[[Any], float] | None = None) -> None:
        super().__init__()
        self.has_equal_costs = cost is None
        self._cost = cost or (lambda _: 1.0)
        self._num_uses: Counter[K] = Counter()
        self._num_stamps = 0
        self._clock = 0.0

    def use(self, key: K) -> tuple[float, int]:
        self._num_uses[key] += 1
        self._num_stamps += 1
        return self._clock + self._num_uses[key] * self._cost(key), self._num_stamps


class GDSF(Costed[K]):
    """Greedy-Dual-Size-Frequency: rank = clock + uses * cost; the clock is the last victim's rank.

    Uses count since the key came in. The paper divides by the size; here every key takes one slot.
    With equal costs this is LFU with dynamic ageing. Cherkasova, "Improving WWW Proxies Performance
    with Greedy-Dual-Size-Frequency Caching Policy", HP Laboratories 1998.
    """

    _candidate: K | None = None

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

    may_decline: bool = True

    def decline(self, key: K) -> None:
        self._num_uses[key] += 1

    def declines(self, incoming: K, victim: K) -> bool:
        expected_cost = (self._num_uses[incoming] + 1) * self._cost(incoming)
        return expected_cost <= self._held[victim][0]


class StaticPopularity(Ranked[K]):
    """Static pinning: keeps the keys with most uses in a trace (``weights``), whatever comes.

    A key below all held ones is not kept. Among equal weights the lowest slot is evicted first:
    slots fill in order, and a newcomer takes the slot of its victim.
    """

    may_decline: bool = True

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        if setting.training is None:
            raise ValueError("policy 'static' needs a recorded trace to count uses in")
        counts = np.ndenumerate(setting.training.counts())
        popularity = {ExpertKey(*place): int(count) for place, count in counts}
        return partial(cls, cast(Mapping[Any, float], popularity))

    def __init__(self, weights: Mapping[K, float]) -> None:
        super().__init__()
        self.weights = weights
        self._free_slots: list[int] = []

    def touch(self, key: K) -> None:
        if key not in self._held:
            raise KeyError(key)

    def use(self, key: K) -> tuple[float, int]:
        """The weight, then the lowest free slot."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._held)
        return self.weights.get(key, 0), slot

    def remove(self, key: K) -> None:
        _, slot = self._held[key]
        super().remove(key)
        heapq.heappush(self._free_slots, slot)

    def declines(self, incoming: K, victim: K) -> bool:
        return self.weights.get(incoming, 0) < self._held[victim][0]

    def check(self) -> None:
        slots = [slot for _, slot in self._held.values()] + self._free_slots
        assert sorted(slots) == list(range(len(slots)))


class Future:
    """The coming uses of every key; its clock advances with the events."""

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
        """Number of the next event that uses the key, plus its place there as a fraction; or
        infinity."""
        uses = self._uses.get(key, [])
        while uses and uses[-1] < self._now + 1:
            uses.pop()
        return uses[-1] if uses else math.inf


class Belady(Ranked[K]):
    """The fewest misses of a cache that keeps everything it loads.

    Evicts the key whose next use is furthest ahead (Belady, IBM Systems Journal 1966). The clock of
    ``future`` must advance before the keys of an event are used.
    """

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        if setting.future is None:
            raise ValueError("Belady's policies need the future, which only a replay knows")
        return partial(cls, Future(setting.future))

    def __init__(self, future: Future) -> None:
        super().__init__()
        self.watcher = self._future = future

    def use(self, key: K) -> float:
        """The sooner the next use, the higher."""
        return -self._future.next_use(key)


class BeladyBypass(Belady[K]):
    """The fewest misses of any cache: a key that is needed last is used once and not kept."""

    may_decline: bool = True

    def declines(self, incoming: K, victim: K) -> bool:
        return self.use(incoming) < self._held[victim]
