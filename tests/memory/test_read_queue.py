"""Every read ends once, with its data or an error, whatever a block raises, after closing too."""

import fcntl
import os
import sys
import termios
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.kernels.native import native_library
from moe_runtime.memory.reads import NativeReadQueue, Priority, ReadQueue, Transfer, pack_blocks

PATIENCE_S = 600  # a test that fails waits so long; one that passes never does


class Ends:
    """Reads, and how they ended."""

    def __init__(self) -> None:
        self.ended: list[Transfer] = []
        self._told = threading.Event()

    def read(self, priority: Priority = Priority.DEMAND) -> Transfer:
        return Transfer(priority, self._end)

    def _end(self, read: Transfer) -> None:
        self.ended.append(read)
        self._told.set()

    def wait_for(self, number: int) -> None:
        while len(self.ended) < number:
            self.wait()

    def wait(self) -> Transfer:
        assert self._told.wait(PATIENCE_S), "the read never ended"
        self._told.clear()
        return self.ended[-1]


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, SystemExit, CheckpointError])
def test_whatever_a_block_raises_is_the_error_of_its_read(kind):
    queue, ends = ReadQueue(1), Ends()
    cause = kind("as asked")

    def fail() -> int:
        raise cause

    queue.submit([lambda: 3, fail, lambda: 4], ends.read())
    read = ends.wait()
    if kind is CheckpointError:
        assert read.error is cause
    else:
        assert isinstance(read.error, MoERuntimeError)
        assert str(read.error) == f"a read failed with {kind.__name__}: as asked"
        assert read.error.__cause__ is cause
    assert read.num_bytes == 7
    queue.submit([], ends.read())  # the only thread is alive, and a read of nothing ends too
    assert ends.wait().error is None
    queue.close()
    assert len(ends.ended) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_failures", [1, 2])
def test_an_end_that_cannot_be_announced_ends_no_thread(num_failures):
    queue, ends, calls = ReadQueue(1), Ends(), list[Transfer]()

    def fail(read: Transfer) -> None:
        calls.append(read)
        if len(calls) <= num_failures:
            raise MemoryError("as asked")

    read = Transfer(Priority.DEMAND, fail)
    queue.submit([lambda: 1], read)
    queue.submit([lambda: 1], ends.read())
    assert ends.wait().error is None
    assert calls == [read, read]
    assert not queue.is_under_way(read)
    queue.close()


def test_closing_ends_what_waits_with_an_error_and_refuses_the_rest():
    queue, ends = ReadQueue(1), Ends()
    begun, go = threading.Event(), threading.Event()

    def block() -> int:
        begun.set()
        assert go.wait(PATIENCE_S)
        return 1

    first, second = ends.read(), ends.read(Priority.READAHEAD)
    queue.submit([block], first)
    queue.submit([lambda: 1], second)
    assert begun.wait(PATIENCE_S)
    closing = threading.Thread(target=queue.close)
    closing.start()
    while not queue._closed:
        closing.join(0.001)
    go.set()
    closing.join(PATIENCE_S)
    assert (first.error, str(second.error)) == (
        None,
        "the model's experts were closed; load it again",
    )
    assert sorted(map(id, ends.ended)) == sorted(map(id, (first, second)))
    with pytest.raises(MoERuntimeError, match="closed; load it again"):
        queue.submit([lambda: 1], ends.read())
    queue.close()
    assert len(ends.ended) == 2


SIZE = 64


def fault(block: int, reason: OSError | EOFError | None) -> MoERuntimeError | None:
    return reason and CheckpointError(f"block {block}: {reason}")


class Pipes:
    """Reads that end when a test writes what they wait for: each block is a pipe of its own."""

    def __init__(self, num_threads: int) -> None:
        library = native_library()
        if library is None:
            pytest.skip("the native CPU library was not built (needs gcc)")
        self.queue = NativeReadQueue(library, num_threads)
        self.ended: list[str] = []
        self._slots: dict[str, torch.Tensor] = {}
        self._reads: list[int] = []
        self._writes: dict[str, list[int]] = {}

    def submit(self, name: str, *, blocks: int = 1, ahead: bool = False) -> Transfer:
        self._slots[name] = torch.zeros(blocks * SIZE, dtype=torch.uint8)
        ends = [os.pipe() for _ in range(blocks)]
        self._reads += [end[0] for end in ends]
        self._writes[name] = [end[1] for end in ends]
        packed = pack_blocks([(end[0], -1, SIZE * i, SIZE, SIZE) for i, end in enumerate(ends)])
        priority = Priority.READAHEAD if ahead else Priority.DEMAND
        address = self._slots[name].data_ptr()
        with self.queue:
            read = Transfer(priority, lambda _: self.ended.append(name))
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


def test_blocks_lie_where_they_belong_and_bytes_are_counted(pipes):
    read = pipes.submit("a", blocks=3)
    pipes.answer("a")
    pipes.wait_for("a")
    assert pipes.content("a") == [[1] * SIZE, [2] * SIZE, [3] * SIZE]
    assert (read.num_bytes, read.error) == (3 * SIZE, None)
    assert read.ended_s > 0


def test_demands_go_first_and_a_promoted_read_is_one(pipes):
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


def test_only_what_has_not_begun_is_taken_back(pipes):
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


def test_a_read_that_fails_says_which_block(pipes):
    with pipes.queue:
        slot = torch.zeros(SIZE, dtype=torch.uint8)
        read = Transfer(Priority.DEMAND, lambda _: pipes.ended.append("bad"))
        packed = pack_blocks([(-1, 0, 0, SIZE, SIZE)])
        pipes.queue.submit(packed, slot.data_ptr(), read, fault)
    pipes.wait_for("bad")
    assert error_of(read) == "block 0: [Errno 9] Bad file descriptor"


def error_of(read: Transfer) -> str:
    assert isinstance(read.error, CheckpointError)
    return str(read.error)


def test_all_who_wait_are_woken_by_reads_and_by_others():
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
        thread.join(600)
        assert not thread.is_alive()
    pipes.close()


def unread_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_closing_lets_a_begun_read_finish_and_refuses_the_others(pipes):
    begun, waiting = pipes.submit("begun"), pipes.submit("waiting")
    os.write(pipes._writes["begun"][0], bytes(SIZE // 2))
    while unread_bytes(pipes._reads[0]):  # until the thread reads it
        time.sleep(0.001)
    events = pipes.queue.events.value
    closing = threading.Thread(target=pipes.queue.close)
    closing.start()
    while pipes.queue.events.value == events:  # closing is an event
        closing.join(0.001)
    os.write(pipes._writes["begun"][0], bytes(SIZE // 2))
    closing.join(PATIENCE_S)
    assert pipes.ended == ["begun", "waiting"]
    assert begun.error is None
    assert str(waiting.error) == "the model's experts were closed; load it again"
    pipes.queue.close()  # once is enough
    with pytest.raises(MoERuntimeError, match="closed"):
        pipes.submit("later")
    with pipes.queue, pytest.raises(MoERuntimeError, match="closed"):
        pipes.queue.wait()
