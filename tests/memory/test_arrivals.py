"""Missing experts of a decode step, copied and used without a lease."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from device_tiers import Tiers
from fake_tier import keys

from moe_runtime.errors import MoERuntimeError


def ready(*on_device: int) -> Tiers:
    """Six experts of a layer in the host's memory, of which these two are on the device too, beside
    the last one of the others."""
    tiers = Tiers(on_device=3, on_host=18)
    for expert in (*(e for e in range(6) if e not in on_device), *on_device):
        tiers.use(keys(0, expert), streaming=False)
    tiers.settle()
    tiers.store.reset_stats()
    return tiers


def test_what_lies_below_is_copied_at_once_and_leased_by_nobody() -> None:
    tiers = ready(0, 1)
    copies, copy = list[int](), tiers.device.copy
    with patch.object(tiers.device, "copy", lambda *a: copies.append(len(a[0])) or copy(*a)):
        assert tiers.use_step(keys(0, 1, 4)) == []
    assert copies == [1]
    tiers.check()
    stats = tiers.store.stats()
    assert (stats.hits, stats.misses, stats.evictions) == (1, 1, 1)
    tiers.settle()
    assert tiers.use_step(keys(0, 4, 1)) == []  # the one that was used was not the one to leave
    assert (tiers.store.stats().hits, tiers.store.stats().misses) == (3, 1)
    tiers.close()


def test_several_are_one_copy() -> None:
    tiers = ready(0, 1)
    copies, copy = list[int](), tiers.device.copy
    with patch.object(tiers.device, "copy", lambda *a: copies.append(len(a[0])) or copy(*a)):
        assert tiers.use_step(keys(0, 3, 4)) == []
    assert copies == [2]
    assert tiers.store.stats().misses == 2
    tiers.close()


def test_what_cannot_be_had_so_is_left_to_a_lease() -> None:
    tiers = ready(0, 1)
    assert tiers.use_step(keys(1, 0)) == keys(1, 0)  # it lies on the disk
    tiers.settle()
    tiers.use(keys(0, 0), streaming=False)
    tiers.settle()
    tiers.store.reset_stats()
    assert tiers.use_step(keys(0, 0, 2, 3, 4)) == keys(0, 4)  # for which there is no slot
    stats = tiers.store.stats()
    assert (stats.hits, stats.late_hits, stats.misses) == (1, 0, 3)
    tiers.close()


def test_copies_that_are_refused_together_are_made_one_by_one_or_by_threads() -> None:
    for num_faults, left in ((1, []), (2, keys(0, 3, 4)), (3, keys(0, 3, 4))):
        tiers = ready(0, 1)
        tiers.device.faults.extend(MemoryError("as asked") for _ in range(num_faults))
        assert tiers.use_step(keys(0, 0, 3, 4)) == left
        assert not tiers.device.faults
        tiers.settle()
        tiers.close()


def test_a_copy_that_fails_is_told() -> None:
    tiers = ready(0, 1)
    tiers.device.late_faults.append(OSError("unplugged"))
    with pytest.raises(MoERuntimeError, match="unplugged"):  # noqa: PT012
        assert tiers.use_step(keys(0, 4)) == []
        tiers.store.fetcher.finish_used()
    tiers.seen = [found for found in tiers.seen if found[0] not in keys(0, 4)]  # what is void
    tiers.use_step(keys(0, 4))
    tiers.close()
