"""Two tiers over reads that end when a test says so: what is demanded waits for nothing else."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from slow_reader import SlowReader

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.prefetcher import Guesses
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.source import Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.memory.tiers import TierFetcher, TierStore
from moe_runtime.policies.eviction import LRU, LayerShares
from moe_runtime.types import ExpertKey

K = ExpertKey
AHEAD, DEMAND = Priority.READAHEAD, Priority.DEMAND


def until(holds: Callable[[], bool]) -> None:
    """Waits for what other threads do at once; pytest's own limit ends a test that waits on."""
    while not holds():
        time.sleep(0.001)


class Tiers:
    """A device that is emulated on the host, over a host tier, over a disk that a test holds."""

    def __init__(self, above: list[int], below: list[int]) -> None:
        self.disk = SlowReader()
        self.host = self._store(self.disk, below)
        self.device = self._store(TierFetcher(self.host), above)
        self._threads: list[threading.Thread] = []

    def _store(self, fetcher: SlowReader | TierFetcher, shares: list[int]) -> ExpertStore:
        policy, slab = LayerShares(LRU, shares), Slab(sum(shares), 64)
        kind: Any = TierStore if isinstance(fetcher, TierFetcher) else ExpertStore
        return kind(fetcher, slab, policy, lambda key, slot: slot, stream_slots=2)

    def use(self, *keys: ExpertKey, streaming: bool = False) -> None:
        with self.device.lease(keys, streaming=streaming) as lease:
            for group in lease:
                for key, slot in group:
                    assert (slot == key.layer * 16 + key.expert).all()

    def begin(self, *keys: ExpertKey, streaming: bool = False) -> threading.Thread:
        thread = threading.Thread(target=self.use, args=keys, kwargs={"streaming": streaming})
        thread.start()
        self._threads.append(thread)
        return thread

    def use_now(self, *keys: ExpertKey, streaming: bool = False) -> None:
        """Uses experts while the disk answers at once."""
        thread = self.begin(*keys, streaming=streaming)
        while thread.is_alive():
            self.disk.finish_all()
            thread.join(0.001)

    def asked(self, key: ExpertKey) -> list[Priority]:
        return [priority for asked, priority in self.disk.asked if asked == key]

    def close(self) -> None:
        until(lambda: self.disk.finish_all() or not any(t.is_alive() for t in self._threads))
        closing = threading.Thread(target=self.device.close)
        closing.start()
        until(lambda: self.disk.finish_all() or not closing.is_alive())
        self.device.check()
        self.host.check()


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers([4, 4], [3, 3])
    yield made
    made.close()


def test_a_demand_waits_for_no_read_ahead(tiers):
    ahead = [K(1, 0), K(1, 1)]
    tiers.device.read_ahead(ahead)
    until(lambda: all(key in tiers.disk.waiting for key in ahead))
    wanted = tiers.begin(K(0, 5))
    until(lambda: K(0, 5) in tiers.disk.waiting)
    tiers.disk.finish(K(0, 5))
    wanted.join()
    assert not wanted.is_alive()
    assert all(key in tiers.disk.waiting for key in ahead)


def test_what_is_read_ahead_above_is_read_ahead_below(tiers):
    tiers.device.read_ahead([K(1, 0)])
    until(lambda: bool(tiers.asked(K(1, 0))))
    tiers.begin(K(0, 5))
    until(lambda: bool(tiers.asked(K(0, 5))))
    assert (tiers.asked(K(1, 0)), tiers.asked(K(0, 5))) == ([AHEAD], [DEMAND])


def test_a_promotion_reaches_the_read_below(tiers):
    tiers.device.read_ahead([K(1, 0)])
    until(lambda: K(1, 0) in tiers.disk.waiting)
    tiers.begin(K(1, 0))
    until(lambda: tiers.disk.promoted == [K(1, 0)])


def test_a_read_ahead_that_waits_for_a_thread_is_demanded_past_the_others():
    tiers = Tiers([2, 4], [2, 1])  # three slots below: one read-ahead at a time
    tiers.device.read_ahead([K(1, 0), K(1, 1)])
    until(lambda: K(1, 0) in tiers.disk.waiting)
    wanted = tiers.begin(K(1, 1))
    until(lambda: K(1, 1) in tiers.disk.waiting)
    assert tiers.asked(K(1, 1)) == [DEMAND]
    tiers.disk.finish(K(1, 1))
    wanted.join()
    assert not wanted.is_alive()
    assert K(1, 0) in tiers.disk.waiting
    tiers.close()


def test_a_prompt_leaves_both_caches_alone():
    tiers = Tiers([2, 2], [6, 6])
    often = [K(layer, expert) for layer in (0, 1) for expert in range(6)]
    for key in often:
        tiers.use_now(key)
    for layer in (0, 1):
        tiers.use_now(*(K(layer, expert) for expert in range(6, 16)), streaming=True)
    # the two slots below that the stream may pass through are all it may have cost
    assert len(Guesses(tiers.host).absent([(key, 1.0) for key in often])) <= 2
    tiers.close()


def test_reads_that_wait_when_the_tiers_close_end_with_an_error():
    tiers = Tiers([4, 4], [3, 3])
    errors: list[str] = []

    def use() -> None:
        with pytest.raises(MoERuntimeError) as caught:
            tiers.use(*(K(0, expert) for expert in range(6)))
        errors.append(str(caught.value))

    waiting = threading.Thread(target=use)
    waiting.start()
    until(lambda: len(tiers.disk.waiting) == 4)  # all that may begin at once
    tiers.device.close()
    waiting.join()
    assert not waiting.is_alive()
    assert errors == ["the model's experts were closed; load it again"]
    tiers.device.check()
    tiers.host.check()


def test_a_read_ahead_whose_copy_fails_is_not_kept(tiers):
    fetcher = tiers.device._fetcher
    tiers.disk.close()  # nothing is read any more
    tiers.device.read_ahead([K(0, 0)])
    entries = tiers.device._entries  # another thread drops from it meanwhile
    until(lambda: not any(fetcher.is_under_way(e.read) for e in [*entries.values()]))
    until(lambda: K(0, 0) not in entries)
    tiers.host.check()
