"""Threads of C serve reads in the order of `ReadQueue`, and what ended is found by who looks."""

import os
import threading
from collections.abc import Iterator

import pytest
import torch

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.kernels.native import native_library
from moe_runtime.memory.reads import NativeReadQueue, Priority, Read, pack_blocks

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="the native CPU library was not built (needs gcc)"
)
SIZE = 64


def fault(block: int, reason: OSError | EOFError | None) -> MoERuntimeError | None:
    return reason and CheckpointError(f"block {block}: {reason}")


class Pipes:
    """Reads that end when a test writes what they wait for: each block is a pipe of its own."""

    def __init__(self, num_threads: int) -> None:
        library = native_library()
        assert library is not None
        self.queue = NativeReadQueue(library, num_threads)
        self.ended: list[str] = []
        self._slots: dict[str, torch.Tensor] = {}
        self._reads: list[int] = []
        self._writes: dict[str, list[int]] = {}

    def submit(self, name: str, *, blocks: int = 1, ahead: bool = False) -> Read:
        self._slots[name] = torch.zeros(blocks * SIZE, dtype=torch.uint8)
        ends = [os.pipe() for _ in range(blocks)]
        self._reads += [end[0] for end in ends]
        self._writes[name] = [end[1] for end in ends]
        packed = pack_blocks([(end[0], -1, SIZE * i, SIZE, SIZE) for i, end in enumerate(ends)])
        priority = Priority.READAHEAD if ahead else Priority.DEMAND
        address = self._slots[name].data_ptr()
        with self.queue:
            read = Read(priority, lambda _: self.ended.append(name))
            self.queue.submit(packed, address, read, fault)
            return read

    def answer(self, name: str) -> None:
        """Writes every block in two parts, so that a short read must be continued."""
        for number, end in enumerate(self._writes[name]):
            os.write(end, bytes([number + 1]) * (SIZE // 2))
            os.write(end, bytes([number + 1]) * (SIZE // 2))

    def wait_for(self, *names: str) -> None:
        with self.queue:
            while not set(names) <= set(self.ended):
                self.queue.wait()

    def content(self, name: str) -> list[int]:
        return self._slots[name].view(-1, SIZE).tolist()

    def close(self) -> None:
        for ends in self._writes.values():
            for end in ends:
                os.close(end)  # a read that still waits for its pipe ends
        self.queue.close()
        for end in self._reads:
            os.close(end)


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    one_thread = Pipes(1)
    yield one_thread
    one_thread.close()


def test_blocks_lie_where_they_belong_and_bytes_are_counted(pipes: Pipes) -> None:
    read = pipes.submit("a", blocks=3)
    pipes.answer("a")
    pipes.wait_for("a")
    assert pipes.content("a") == [[1] * SIZE, [2] * SIZE, [3] * SIZE]
    assert (read.num_bytes, read.error) == (3 * SIZE, None)
    assert read.ended_s > 0


def test_demands_go_first_and_a_promoted_read_is_one(pipes: Pipes) -> None:
    pipes.submit("busy")
    ahead, late = pipes.submit("ahead", ahead=True), pipes.submit("late", ahead=True)
    pipes.submit("demand")
    with pipes.queue:
        pipes.queue.promote(late)
        pipes.queue.promote(late)  # once is enough
    for name in ("ahead", "late", "demand", "busy"):
        pipes.answer(name)
    pipes.wait_for("ahead", "late", "demand")
    assert pipes.ended == ["busy", "demand", "late", "ahead"]
    assert (ahead.priority, late.priority) == (Priority.READAHEAD, Priority.DEMAND)


def test_only_what_has_not_begun_is_taken_back(pipes: Pipes) -> None:
    first = pipes.submit("first", blocks=2)
    second = pipes.submit("second", ahead=True)
    third = pipes.submit("third", ahead=True)
    with pipes.queue:
        assert pipes.queue.cancel(second)
        assert not pipes.queue.cancel(second)
    pipes.answer("first")
    pipes.wait_for("first")
    pipes.answer("third")
    pipes.wait_for("third")
    with pipes.queue:
        assert not pipes.queue.cancel(first)
        assert not pipes.queue.cancel(third)
    assert pipes.ended == ["first", "third"]
    assert pipes.content("second") == [[0] * SIZE]


def test_a_read_that_fails_says_which_block(pipes: Pipes) -> None:
    with pipes.queue:
        slot = torch.zeros(SIZE, dtype=torch.uint8)
        read = Read(Priority.DEMAND, lambda _: pipes.ended.append("bad"))
        packed = pack_blocks([(-1, 0, 0, SIZE, SIZE)])
        pipes.queue.submit(packed, slot.data_ptr(), read, fault)
    pipes.wait_for("bad")
    assert error_of(read) == "block 0: [Errno 9] Bad file descriptor"


def error_of(read: Read) -> str:
    assert isinstance(read.error, CheckpointError)
    return str(read.error)


def test_all_who_wait_are_woken_by_reads_and_by_others() -> None:
    pipes = Pipes(2)
    changes: list[str] = []

    def wait(name: str) -> None:
        with pipes.queue:
            while name not in [*pipes.ended, *changes]:
                pipes.queue.wait()

    waiting = [threading.Thread(target=wait, args=(name,)) for name in ("a", "b", "told")]
    for thread in waiting:
        thread.start()
    for name in ("a", "b"):
        pipes.submit(name)
        pipes.answer(name)
    with pipes.queue:
        changes.append("told")
        pipes.queue.notify_all()
    for thread in waiting:
        thread.join(120)
        assert not thread.is_alive()
    pipes.close()


def test_a_closed_queue_refuses(pipes: Pipes) -> None:
    pipes.submit("last")
    pipes.answer("last")
    pipes.queue.close()
    pipes.queue.close()  # once is enough
    with pytest.raises(MoERuntimeError, match="closed"):
        pipes.submit("later")
    with pipes.queue, pytest.raises(MoERuntimeError, match="closed"):
        pipes.queue.wait()
