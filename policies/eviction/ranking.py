"""Keys with a rank, and the smallest of them: what frequency- and cost-based policies share."""

import heapq
from collections.abc import Container, Iterator, Sequence
from typing import Any, Generic

from moe_runtime.policies.eviction.base import Evictable, K


class Ranking(Generic[K]):
    """A set of keys with comparable ranks that answers which key has the smallest one.

    A rank that rises costs one assignment: its place in the heap is corrected when it comes up. A
    rank that falls costs one push. Ranks must differ between keys wherever the order matters.

    Attributes:
        ranks: the rank of every key. Who serves many keys may assign a higher rank directly.
    """

    def __init__(self) -> None:
        self.ranks: dict[K, Any] = {}
        self._queued: dict[K, Any] = {}  # the smallest rank under which a key lies in the heap
        self._heap: list[tuple[Any, int, K]] = []
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, key: object) -> bool:
        return key in self.ranks

    def __iter__(self) -> Iterator[K]:
        return iter(self.ranks)

    def __getitem__(self, key: K) -> Any:
        return self.ranks[key]

    def add(self, key: K, rank: Any) -> None:
        """Adds a key.

        Raises:
            ValueError: the key is there already.
        """
        if key in self.ranks:
            raise ValueError(f"{key} is held already")
        self.ranks[key] = rank
        self._push(key, rank)

    def move(self, key: K, rank: Any) -> None:
        """Gives a key another rank.

        Raises:
            KeyError: the key is not there.
        """
        if key not in self.ranks:
            raise KeyError(key)
        self.ranks[key] = rank
        if rank < self._queued[key]:
            self._push(key, rank)

    def remove(self, key: K) -> None:
        """Removes a key.

        Raises:
            KeyError: the key is not there.
        """
        del self.ranks[key]
        del self._queued[key]
        if len(self._heap) > 64 + 4 * len(self.ranks):
            self._rebuild()

    def smallest(self, evictable: Evictable) -> K | None:
        """The key of smallest rank among the evictable ones, None where there is none."""
        passed_over: list[tuple[Any, int, K]] = []
        found = None
        while self._heap and found is None:
            entry = self._heap[0]
            rank, number, key = entry
            if key not in self.ranks or self._queued[key] != rank:
                heapq.heappop(self._heap)
            elif self.ranks[key] != rank:
                self._queued[key] = self.ranks[key]
                heapq.heapreplace(self._heap, (self.ranks[key], number, key))
            elif evictable(key):
                found = key
            else:
                passed_over.append(heapq.heappop(self._heap))
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return found

    def replace(
        self, newcomers: Sequence[tuple[K, Any]], num_keys: int, in_use: Container[K]
    ) -> None:
        """Removes the keys of smallest rank to make room for newcomers, and adds these.

        Args:
            newcomers: keys that are not there, with their ranks.
            num_keys: keys that may be there in the end.
            in_use: keys that must stay; with the newcomers they must fit.
        """
        ranks, queued, heap = self.ranks, self._queued, self._heap
        excess = len(ranks) + len(newcomers) - num_keys
        passed_over = []
        while excess > 0:
            rank, number, key = heap[0]
            if key not in ranks or queued[key] != rank:
                heapq.heappop(heap)
            elif ranks[key] != rank:
                queued[key] = ranks[key]
                heapq.heapreplace(heap, (ranks[key], number, key))
            elif key in in_use:
                passed_over.append(heapq.heappop(heap))
            else:
                heapq.heappop(heap)
                del ranks[key], queued[key]
                excess -= 1
        for entry in passed_over:
            heapq.heappush(heap, entry)
        number = self._num_pushes
        for key, rank in newcomers:
            number += 1
            ranks[key] = queued[key] = rank
            heapq.heappush(heap, (rank, number, key))
        self._num_pushes = number
        if len(heap) > 64 + 4 * len(ranks):
            self._rebuild()

    def check(self) -> None:
        """Proves that every key can come up at its rank or before.

        Raises:
            AssertionError: a key is lost or would come up too late.
        """
        queued = {(key, rank) for rank, _, key in self._heap}
        assert self.ranks.keys() == self._queued.keys()
        assert all((key, rank) in queued for key, rank in self._queued.items())
        assert all(self._queued[key] <= rank for key, rank in self.ranks.items())

    def _push(self, key: K, rank: Any) -> None:
        self._queued[key] = rank
        self._num_pushes += 1
        heapq.heappush(self._heap, (rank, self._num_pushes, key))

    def _rebuild(self) -> None:
        self._heap = [(rank, number, key) for number, (key, rank) in enumerate(self.ranks.items())]
        self._num_pushes = len(self._heap)
        self._queued = dict(self.ranks)
        heapq.heapify(self._heap)
