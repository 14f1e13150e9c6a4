"""Slots get their memory while something else runs, in order, and only as long as that runs."""

import ctypes
import mmap
import threading

import pytest
import torch

from moe_runtime.kernels.native.pages import populate
from moe_runtime.memory import source as prefault
from moe_runtime.memory.source import PART_BYTES, Slab, aligned_bytes, touched_meanwhile


def resident_pages(memory: torch.Tensor) -> int:
    pages = -(-memory.nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, found) == 0
    return sum(flags & 1 for flags in found)


def test_populated_memory_is_resident_and_keeps_its_content():
    memory = aligned_bytes(10 * mmap.PAGESIZE)
    memory[5] = 7
    if not populate(memory):
        pytest.skip("this system cannot take memory in advance (Linux before 5.14)")
    assert resident_pages(memory) == 10
    assert memory[5] == 7
    assert int(memory.sum()) == 7


class Recorder:
    """Stands for ``populate``: keeps what it is given, and says when it has been given so much."""

    def __init__(self, wanted: int, *, works: bool = True) -> None:
        self.parts: list[torch.Tensor] = []
        self.enough = threading.Event()
        self._wanted, self._works = wanted, works

    def __call__(self, part: torch.Tensor) -> bool:
        self.parts.append(part)
        if len(self.parts) == self._wanted:
            self.enough.set()
        return self._works


def use(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setattr(prefault, "populate", recorder)


def test_every_slot_is_touched_once_from_the_first_on(monkeypatch):
    recorder = Recorder(3)
    use(monkeypatch, recorder)
    slab = Slab(5, PART_BYTES // 2)
    with touched_meanwhile(slab):
        assert recorder.enough.wait(600)
    sizes = [part.nbytes for part in recorder.parts]
    assert sizes == [PART_BYTES, PART_BYTES, PART_BYTES // 2]
    starts = [part.data_ptr() - slab.slot(0).data_ptr() for part in recorder.parts]
    assert starts == [0, PART_BYTES, 2 * PART_BYTES]


def test_it_ends_with_the_block_that_fails(monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    parts: list[int] = []

    def wait(part: torch.Tensor) -> bool:
        parts.append(part.nbytes)
        began.set()
        return go_on.wait(600)

    monkeypatch.setattr(prefault, "populate", wait)
    before = threading.active_count()

    def fail() -> None:
        with touched_meanwhile(Slab(100, PART_BYTES)):
            assert began.wait(600)
            # the part under way is finished after the block has ended
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert len(parts) == 1
    assert "moe-touch" not in [thread.name for thread in threading.enumerate()]
    assert threading.active_count() <= before + 1
