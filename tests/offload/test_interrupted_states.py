"""The record store after exceptions: no lost waits, no unwritten versions, no lost slots."""

import contextlib
import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_runtime.errors import CapacityError
from moe_runtime.training.offload.disk import Disk, RecordFile
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import ExpertTensor, RecordLayout, Sections
from moe_runtime.types import ExpertKey

KEYS = [ExpertKey(0, expert) for expert in range(5)]
*RING, RESIDENT = KEYS
LAYOUT = RecordLayout([ExpertTensor("w", (3, 5), decays=True)], torch.float32)


def state_of(record: torch.Tensor) -> torch.Tensor:
    """Parameters and moments of a record, all in float32."""
    return record[: LAYOUT.state_bytes].view(torch.float32)


class Trained(RecordStore):
    """Four experts on the disk, slots for three, one in memory; each is full of one number."""

    def __init__(self, folder: Path) -> None:
        layouts = dict.fromkeys(KEYS, LAYOUT)
        disk = Disk(folder, layouts, io_threads=2, direct=False)
        super().__init__(layouts, resident=[RESIDENT], ring_slots=3, disk=disk)
        self.numbers = dict.fromkeys(KEYS, 0.0)
        for key in KEYS:
            self.fill(self.acquire(key, Sections.NONE, writes=True), 0.0)
            self.write_state(key)
            self.release(key)
        self.end_step({})
        self.drop_versions(self.hold_versions())

    def fill(self, record: torch.Tensor, number: float) -> None:
        state_of(record).fill_(number)

    def step(self, keys: list[ExpertKey], number: float) -> None:
        """Changes experts, as an optimizer's step does; `end_step` keeps it."""
        self.expect((key, Sections.STATE) for key in keys)
        for key in keys:
            record = self.acquire(key, Sections.STATE, writes=True)
            self.fill(record, number)
            self.set_content_step(key, int(number))
            self.write_state(key)
            self.release(key)

    def end_step(self, numbers: dict[ExpertKey, float]) -> None:
        self.commit()
        self.wait_for_transfers()
        self.numbers |= numbers

    def discard(self) -> None:
        """As the optimizer does after an exception."""
        self.abandon()
        self.roll_back()

    def require_whole(self) -> None:
        """Every expert has its content of the last step, and all slots are accounted for."""
        for key, number in self.numbers.items():
            record = self.acquire(key, Sections.STATE)
            assert state_of(record).unique().tolist() == [number], key
            self.release(key)
        self.wait_for_transfers()
        self.check()

    def require_saved(self) -> None:
        """A checkpoint of now has every expert's current content."""
        versions = self.hold_versions()
        self.wait_until_durable(versions)
        for key, version in versions.items():
            buffer = torch.empty(LAYOUT.record_bytes, dtype=torch.uint8)
            self._fill_now(key, version, buffer)
            assert state_of(buffer).unique().tolist() == [self.numbers[key]]
        self.drop_versions(versions)
        (file,) = self._on_disk.files.values()
        # An exception may cost a slot of the file until it is opened again, but never gives one up.
        assert all(file._holds[version.slot] >= 1 for version in versions.values())
        assert not {version.slot for version in versions.values()} & set(file._free)


OPERATIONS = [(name, number) for name in ("take", "write", "drop", "hold") for number in range(3)]
"""Disk operations in which an exception is raised."""


def struck_in(states: Trained, name: str, number: int, call: Callable[[], None]) -> bool:
    """Makes a call in which one disk operation raises; returns whether it was reached."""
    (file,) = states._on_disk.files.values()
    place, count = states._on_disk if name == "write" else file, itertools.count()
    real = getattr(place, name)

    def strike(*arguments: Any) -> Any:
        if next(count) == number:
            raise MemoryError(name)
        return real(*arguments)

    with mock.patch.object(place, name, strike), contextlib.suppress(MemoryError):
        call()
        return False
    return True


def at_operations(states: Trained, call: Callable[[], None], after: Callable[[], None]) -> int:
    struck = 0
    for name, number in OPERATIONS:
        struck += struck_in(states, name, number, call)
        after()
    return struck


@pytest.fixture
def states(tmp_path: Path) -> Trained:
    return Trained(tmp_path)


def test_an_interrupted_step_is_taken_back_and_the_next_one_is_right(states):
    numbers = iter(range(1, 10_000))

    def after() -> None:
        states.discard()
        states.require_whole()
        if (number := float(next(numbers))) % 3 == 0:
            states.step(RING, number)
            states.end_step(dict.fromkeys(RING, number))
            states.require_whole()
            states.require_saved()

    struck = at_operations(states, lambda: states.step(RING, 9999.0), after)
    assert struck >= 6
    states.close()


def test_an_interrupted_checkpoint_is_followed_by_a_right_one(states):
    numbers = iter(range(1, 10_000))

    def change() -> None:
        number = float(next(numbers))
        states.fill(states.acquire(RESIDENT, Sections.STATE, writes=True), number)
        states.set_content_step(RESIDENT, int(number))
        states.numbers[RESIDENT] = number

    def after() -> None:
        states.wait_for_transfers()
        states.require_whole()
        states.require_saved()
        change()

    change()
    struck = at_operations(states, lambda: states.drop_versions(states.hold_versions()), after)
    assert struck >= 4
    states.close()


def test_an_interrupted_exchange_of_tiers_loses_no_expert(tmp_path):
    pairs = [(RING[0], RESIDENT), (RESIDENT, RING[0])]

    def exchange(states: Trained) -> Callable[[], None]:
        in_memory = states.experts[RESIDENT].resident_slot is not None
        return lambda: states.exchange_tiers(*pairs[not in_memory])

    def fresh(number: int) -> Trained:
        (folder := tmp_path / str(number)).mkdir()
        states = Trained(folder)
        states.step(RING, 3.0)
        states.end_step(dict.fromkeys(RING, 3.0))
        return states

    struck = 0
    for number, operation in enumerate(OPERATIONS):
        states = fresh(number)
        struck += struck_in(states, *operation, exchange(states))
        states.discard()
        states.require_whole()
        states.require_saved()
        states.close()
    assert struck


def test_a_full_disk_changes_nothing_of_an_expert_that_has_no_room(states, monkeypatch):
    """The same checkpoint and step succeed once there is room."""
    states.fill(states.acquire(RESIDENT, Sections.STATE, writes=True), 5.0)
    states.set_content_step(RESIDENT, 5)
    states.numbers[RESIDENT] = 5.0
    record = states.acquire(RING[0], Sections.STATE, writes=True)
    states.fill(record, 6.0)
    states.set_content_step(RING[0], 6)

    def full(file: RecordFile) -> int:
        raise CapacityError(os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "take", full)
        with pytest.raises(CapacityError, match="No space"):
            states.hold_versions()
        with pytest.raises(CapacityError, match="No space"):
            states.write_state(RING[0])
    assert states.experts[RING[0]].step == 0
    states.write_state(RING[0])
    states.release(RING[0])
    states.end_step({RING[0]: 6.0})
    states.require_whole()
    states.require_saved()
    states.close()
