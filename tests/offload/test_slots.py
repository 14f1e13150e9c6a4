"""Slots of host memory while the store closes, or the disk fails."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.training.offload.disk import Disk, RecordFile
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import ExpertTensor, RecordLayout, Sections, Version
from moe_runtime.types import ExpertKey

FIRST, *OTHERS = [ExpertKey(0, expert) for expert in range(4)]


class Gate(RecordFile):
    """Reads wait until the gate is opened."""

    begun, open = threading.Event(), threading.Event()

    def fetch(self, offset: int, into: memoryview) -> int:
        self.begun.set()
        self.open.wait()
        return super().fetch(offset, into)


@pytest.fixture
def slots(tmp_path: Path) -> RecordStore:
    """Four experts on the disk, three slots, and a read of the first that waits at the gate."""
    Gate.begun.clear()
    Gate.open.clear()
    layout = RecordLayout([ExpertTensor("w", (3, 5), decays=True)], torch.float32)
    layouts = dict.fromkeys([FIRST, *OTHERS], layout)
    disk = Disk(tmp_path, layouts, io_threads=1, open_file=partial(Gate, direct=False))
    slots = RecordStore(layouts, resident=[], ring_slots=3, disk=disk)
    for expert in slots.experts.values():
        expert.version = Version(disk.files[layout.state_bytes].take(), 0, 0)
    slots.expect((key, Sections.STATE) for key in [FIRST, *OTHERS])
    Gate.begun.wait()
    return slots


def test_a_read_that_ends_while_closing_begins_no_other(slots):
    """The expected expert has no slot until the first read ends, when the threads are ending."""
    slots.expect((key, Sections.STATE) for key in OTHERS)
    assert slots.disk is not None
    queue = slots.disk._queue
    closing = threading.Thread(target=slots.close)
    closing.start()
    while not queue._closed:
        closing.join(0.001)
    Gate.open.set()
    closing.join()
    # pytest fails the test for an exception in the reading thread
    slots.check()


def test_a_read_ahead_that_cannot_begin_fails_whoever_waits(slots, monkeypatch):
    slots.expect((key, Sections.STATE) for key in OTHERS)

    def refuse(*_: object) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(slots.disk, "read", refuse)
    Gate.open.set()
    with pytest.raises(CheckpointError, match="the disk is gone"):
        slots.acquire(OTHERS[0], Sections.STATE)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        slots.wait_for_transfers()
    slots.close()


def test_an_expert_that_is_read_ahead_while_it_waits_for_a_slot_takes_one(slots, monkeypatch):
    """Another expert was expected next; the end of a read starts the read of the waiting one."""
    slots.expect((key, Sections.STATE) for key in [FIRST, OTHERS[2]])
    wait = slots._changed.wait

    def wait_until_it_is_read_ahead() -> None:
        Gate.open.set()
        wait()
        while OTHERS[2] not in slots._entries:
            wait()

    monkeypatch.setattr(slots._changed, "wait", wait_until_it_is_read_ahead)
    slots.acquire(OTHERS[2], Sections.STATE)
    slots.release(OTHERS[2])
    slots.check()
    slots.close()
