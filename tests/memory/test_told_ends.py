"""Ends of copies that a thread is woken for later: nobody's patience has to end for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from device_tiers import Interrupted, Tiers
from fake_tier import NUM_LAYERS

from moe_runtime.memory import reads
from moe_runtime.types import ExpertKey

RESIDENT_BELOW = [ExpertKey(0, expert) for expert in range(3)]
PATIENCE_S = 20
"""What hangs fails after this."""


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    with patch.object(reads, "PATIENCE_S", None):  # who is not woken sleeps for ever
        tiers = Tiers()
        with tiers.host.lease(RESIDENT_BELOW) as lease:
            assert sum(map(len, lease)) == len(RESIDENT_BELOW)
        tiers.use([ExpertKey(1, 0)], streaming=False)
        yield tiers
        tiers.close()


def returns(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def leave_at_once(tiers: Tiers) -> None:
    with tiers.store.lease(RESIDENT_BELOW[:2]):
        pass


def leave_first_group(tiers: Tiers) -> None:
    with tiers.store.lease(RESIDENT_BELOW[:2]) as lease:
        assert next(iter(lease))


def fail(tiers: Tiers) -> None:
    with suppress(Interrupted):
        tiers.use(RESIDENT_BELOW[:2], streaming=False, cut_at=1)


@pytest.mark.parametrize("leave", [leave_at_once, leave_first_group, fail])
def test_copies_of_a_lease_that_is_left_end(tiers: Tiers, leave: Callable[[Tiers], None]) -> None:
    leave(tiers)
    if leave is not fail:
        assert returns(tiers.store.fetcher.finish_used)
    assert returns(tiers.settle)
    tiers.check()


def test_who_tells_of_ends_while_another_thread_queues_a_copy_loses_none(tiers: Tiers) -> None:
    ends: Any = tiers.store.fetcher._ends
    submit = ends.submit

    def submit_later(*given: Any, **options: Any) -> None:
        assert returns(tiers.store.fetcher.wake_ends)
        while len(ends._changed._condition._waiters) < len(ends._threads):
            time.sleep(1e-4)
        submit(*given, **options)

    with patch.object(ends, "submit", submit_later):
        assert returns(partial(tiers.use, RESIDENT_BELOW[:2], streaming=False))
    assert returns(tiers.settle)
    tiers.check()


def test_who_was_just_used_is_counted_before_somebody_makes_room(tiers: Tiers) -> None:
    """Also where nobody has leased since: what the CPU computed is brought behind it."""
    store = tiers.store
    for layer in range(NUM_LAYERS):  # which have two slots each
        tiers.use([ExpertKey(layer, expert) for expert in range(2)], streaming=False)
    tiers.device.finish()
    tiers.settle()
    used, other, brought = RESIDENT_BELOW
    residents = store.with_residents(0, lambda _: None)
    _, event = tiers.device.download(torch.tensor([used.expert]))
    event.synchronize()
    assert store.count_residents(residents, [used.expert], event, lambda: [used])
    store.bring([brought])
    tiers.settle()
    assert (store.has(used), store.has(other), store.has(brought)) == (True, False, True)
    tiers.check()
