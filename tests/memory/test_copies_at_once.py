"""Copies that who asks queues at once, as the expert is in the host's memory already."""

import time
from typing import Any
from unittest.mock import patch

from device_tiers import Tiers
from fake_tier import keys


def lacks_a_slot(tiers: Tiers, number: int) -> bool:
    """Whether so many leases of the host's tier wait for a slot."""
    with tiers.host._changed:
        return sum(not lease.all_started for lease in tiers.host._leases) == number


def test_reads_that_wait_for_slots_below_do_not_wait_for_copies_that_hold_them() -> None:
    tiers = Tiers(on_device=9, on_host=1)
    held, *missing = keys(0, 0, 1, 2, 3)
    with tiers.host.lease([held]) as lease:
        next(iter(lease))
        with tiers.store.lease(missing) as absent:
            while not lacks_a_slot(tiers, len(missing)):  # all threads that read
                time.sleep(1e-4)
            with tiers.store.lease([held]) as resident:  # its copy is queued at once
                lease.__exit__()
                assert [key for group in resident for key, _ in group] == [held]
            assert {key for group in absent for key, _ in group} == {*missing}
    tiers.use([held], streaming=False)
    tiers.settle()
    tiers.close()


def test_a_copy_that_is_queued_despite_an_error_is_not_queued_again() -> None:
    tiers = Tiers()
    (key,) = keys(0, 0)
    tiers.host.read_ahead([key])
    while tiers.host._link.under_way:
        time.sleep(1e-4)
    push, failures = tiers.store.fetcher._ends._push, [MemoryError("as asked")]

    def fail(*args: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        push(*args, **options)

    copies: list[Any] = []
    copy = tiers.device.copy
    with (
        patch.object(tiers.store.fetcher._ends, "_push", fail),
        patch.object(tiers.device, "copy", lambda *args: copies.append(1) or copy(*args)),
    ):
        tiers.use([key], streaming=False)
        tiers.settle()
        tiers.check()
    assert not failures
    assert len(copies) == 1
    tiers.close()
