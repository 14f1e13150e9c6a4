"""A store after exceptions: Ctrl-C waits for the end of an operation, anything else empties it."""

import contextlib
import os
import signal
import threading
import time
from typing import Self

import pytest
from fake_tier import FakeTier, content, keys, make_store, use
from injection import KINDS, calls_of, raise_on, without_collection

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.memory.reads import Monitor
from moe_runtime.types import ExpertKey


@pytest.mark.parametrize("kind", [CheckpointError, MemoryError, KeyboardInterrupt])
def test_a_failed_submit_leaves_nothing_behind(monkeypatch, kind):
    tier = FakeTier()
    store = make_store(tier, 4)
    use(store, keys(0, 5))
    fetch = tier.fetch

    def fail(key, slot, read) -> None:
        if key.expert == 1:
            raise kind("as asked")
        fetch(key, slot, read)

    for layer, start in enumerate(
        (
            lambda: store.read_ahead(keys(0, 1)),
            lambda: use(store, keys(1, 0, 1, 2)),
            lambda: use(store, keys(2, 1, 0), streaming=True),
        )
    ):
        monkeypatch.setattr(tier, "fetch", fail)
        with pytest.raises(kind, match="as asked"):
            start()
        store.check()
        monkeypatch.setattr(tier, "fetch", fetch)
        use(store, keys(layer, 0, 1, 2))


def test_an_exception_in_any_call_of_an_operation_leaves_nothing_behind():
    def work() -> None:
        store.read_ahead(keys(1, 0, 1))
        use(store, keys(0, 0, 1, 2, 3), streaming=True)
        use(store, keys(1, 0, 4))
        store.resize(4, shared_slots=4, stream_slots=2)
        store.resize(5, shared_slots=5, stream_slots=2)
        use(store, keys(2, 5))

    def new_store():
        made = make_store(FakeTier(), 5)
        use(made, keys(2, 0, 1))
        return made

    store = new_store()
    sites = [site for site in calls_of(work) if str(site).startswith(("memory/", "policies/"))]
    assert len(sites) > 40
    for number, site in enumerate(sites):
        store = new_store()
        raise_on(site, 1 + number % 2, KINDS[number % len(KINDS)], work)
        store.end_leases()
        store.check()
        for layer in range(3):
            use(store, keys(layer, 1, 3, 5))
        assert not store._leases


def test_an_operation_that_fails_empties_the_store_and_ends_the_leases_of_others():
    tier = FakeTier()
    store = make_store(tier, 6)
    use(store, keys(0, 0, 1))
    tier.at_once = False
    store.read_ahead(keys(1, 0))
    with store.lease(keys(0, 0, 1)) as lease:
        groups = iter(lease)
        next(groups)
        with pytest.raises(MemoryError), store._monitor:
            raise MemoryError
        store.check()
        assert [*store._entries] == keys(1, 0)  # it is being read, and then leaves
        tier.finish()
        assert not store._entries
        with pytest.raises(MoERuntimeError, match="has ended; ask for the experts again"):
            next(groups)
    tier.at_once = True
    use(store, keys(0, 0, 1))


def test_a_failed_use_of_residents_empties_nothing():
    store = make_store(FakeTier(), 6)
    use(store, keys(0, 0, 1))

    def fail(_) -> None:
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        store.use_resident(keys(0, 0, 1), fail)
    assert store.use_resident(keys(0, 0, 1), len) == 2


def test_leases_that_an_exception_left_open_end_for_their_thread_alone():
    store = make_store(FakeTier(), 4)
    with store.lease(keys(1, 0)) as other:
        thread = threading.Thread(target=lambda: store.lease(keys(0, 0, 1)).__enter__())
        thread.start()
        thread.join()
        store.lease(keys(0, 2)).__enter__()
        assert len(store._leases) == 3
        store.end_leases()
        assert len(store._leases) == 1  # that of the thread
        assert not other.is_open
    for lease in [*store._leases]:
        lease.__exit__()
    store.check()
    use(store, keys(0, 3, 4, 5))


class Interrupts:
    """Presses Ctrl-C again and again while a block runs; it strikes once each time `is_awaited`.

    Elsewhere it would strike the test, or pytest. Garbage is collected before: what a finalizer
    raises is lost.
    """

    def __init__(self, pauses_s: float) -> None:
        self.is_awaited = False
        self._pauses_s = pauses_s
        self._stop = threading.Event()
        self._pressing = threading.Thread(target=self._press)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._exits.enter_context(without_collection())
        self._exits.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        signal.signal(signal.SIGINT, self._strike)
        self._pressing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_awaited = False
        self._stop.set()
        self._pressing.join()
        self._exits.close()

    def _press(self) -> None:
        while not self._stop.wait(self._pauses_s):
            os.kill(os.getpid(), signal.SIGINT)

    def _strike(self, *_: object) -> None:
        if self.is_awaited:
            self.is_awaited = False
            raise KeyboardInterrupt


def test_ctrl_c_at_any_time_keeps_the_cache_and_leaves_nothing_behind():
    store, num_struck, number = make_store(FakeTier(), 7), 0, 0
    resets, reset = [], store._monitor.reset
    store._monitor.reset = lambda: (resets.append(1), reset())
    with Interrupts(0.002) as interrupts:
        handler = signal.getsignal(signal.SIGINT)
        while num_struck < 100:
            number += 1
            wanted = keys(number % 3, *{number % 5, number % 4, number // 3 % 6})
            try:
                interrupts.is_awaited = True
                with store.lease(wanted, streaming=number % 7 == 0) as lease:
                    for group in lease:
                        for key, slot in group:
                            assert (slot == content(key)).all()
                interrupts.is_awaited = False
            except KeyboardInterrupt:
                num_struck += 1
                store.end_leases()
        assert signal.getsignal(signal.SIGINT) == handler
    assert not resets
    assert not any(entry.pins for entry in store._entries.values())
    store.check()
    other = threading.Thread(target=use, args=(store, keys(0, 0, 1)))
    other.start()
    other.join(600)
    assert not other.is_alive()


def test_ctrl_c_ends_a_wait_for_a_read():
    tier = FakeTier(at_once=False)
    store = make_store(tier, 3)

    def press_once_it_reads() -> None:
        while not tier.under_way:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press_once_it_reads).start()
    with pytest.raises(KeyboardInterrupt):
        use(store, keys(0, 0))
    store.check()
    assert [*store._entries] == keys(0, 0)  # its read goes on
    tier.finish()
    use(store, keys(0, 0))
    assert store.stats().hits == 1


def test_a_handler_of_the_application_is_called_once_the_operation_has_ended():
    monitor, seen = Monitor(), []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(monitor._lock._is_owned()))
    try:
        with monitor:
            signal.raise_signal(signal.SIGINT)
            assert not seen
            with Monitor(), monitor:
                signal.raise_signal(signal.SIGINT)
        assert seen == [False]
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_pinned", [False, True])
def test_pins_without_a_lease_and_reads_without_an_end_are_seen(is_pinned):
    tier = FakeTier(at_once=False)
    store = make_store(tier, 3)
    store.read_ahead(keys(0, 0))
    store.check()
    if is_pinned:
        store._entries[ExpertKey(0, 0)].pins += 1
    else:
        tier.under_way.clear()
    with pytest.raises(AssertionError):
        store.check()
