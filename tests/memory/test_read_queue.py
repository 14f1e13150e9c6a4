"""Every read ends once, with its data or an error, whatever a block raises, after closing too."""

import fcntl
import os
import sys
import termios
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from injection import Site

from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.kernels.native import native_library
from moe_runtime.memory import changes
from moe_runtime.memory.io_queue import Priority, Read, ReadQueue, _Attempt
from moe_runtime.memory.native_io_queue import NativeReadQueue, pack_blocks

PATIENCE_S = 600  # a test that fails waits so long; one that passes never does


class Ends:
    """Reads, and how they ended."""

    def __init__(self) -> None:
        self.ended: list[Read] = []
        self._told = threading.Event()

    def read(self, priority: Priority = Priority.DEMAND) -> Read:
        return Read(priority, self._end)

    def _end(self, read: Read) -> None:
        self.ended.append(read)
        self._told.set()

    def wait_for(self, number: int) -> None:
        while len(self.ended) < number:
            self.wait()

    def wait(self) -> Read:
        assert self._told.wait(PATIENCE_S), "the read never ended"
        self._told.clear()
        return self.ended[-1]


@pytest.mark.parametrize("kind", [ValueError, MemoryError, OSError, KeyboardInterrupt, SystemExit])
def test_whatever_a_block_raises_is_the_error_of_its_read(kind: type[BaseException]) -> None:
    queue, ends = ReadQueue(1), Ends()
    cause = kind("as asked")

    def fail() -> int:
        raise cause

    queue.submit([lambda: 3, fail, lambda: 4], ends.read())
    read = ends.wait()
    assert isinstance(read.error, MoERuntimeError)
    assert str(read.error) == f"a read failed with {kind.__name__}: as asked"
    assert read.error.__cause__ is cause
    assert read.num_bytes == 7
    queue.submit([lambda: 5], ends.read())  # the only thread is alive
    assert ends.wait().error is None
    queue.close()
    assert len(ends.ended) == 2


def test_an_error_of_the_runtime_stays_what_it_is() -> None:
    queue, ends = ReadQueue(1), Ends()
    error = CheckpointError("the file is gone")

    def fail() -> int:
        raise error

    queue.submit([fail], ends.read())
    assert ends.wait().error is error
    queue.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_end_that_could_not_be_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "PATIENCE_S", 0.001)
    queue, ends, told = ReadQueue(1), Ends(), threading.Event()
    read = Read(Priority.DEMAND, lambda _: told.set() if ends.ended else fail())

    def fail() -> None:
        raise RuntimeError("as asked")

    queue.submit([lambda: 1], read)
    queue.submit([lambda: 1], ends.read())  # the only thread goes on meanwhile
    assert ends.wait().error is None
    assert told.wait(PATIENCE_S)
    queue.close()
    assert (read.error, read.num_bytes) == (None, 1)
    assert not queue.is_under_way(read)


def _lines(function: Callable[..., Any]) -> list[Site]:
    code = function.__code__
    lines = {line for *_, line in code.co_lines() if line and line != code.co_firstlineno}
    return [Site(code, line) for line in sorted(lines)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "site",
    [
        site
        for function in (*vars(ReadQueue).values(), *vars(Read).values(), *vars(_Attempt).values())
        if getattr(function, "__name__", "") in ("_take", "_move", "_tell", "end", "__exit__")
        for site in _lines(function)
    ],
    ids=str,
)
def test_a_read_ends_whatever_line_of_a_reading_thread_is_struck(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PATIENCE_S", 0.001)
    is_armed = False

    def strike(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal is_armed
        if is_armed and event == "line" and frame.f_lineno == site.line:
            is_armed = False
            raise MemoryError("as asked")
        return strike

    threading.settrace(lambda frame, *_: strike if frame.f_code is site.code else None)
    try:
        queue = ReadQueue(1)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    ends = Ends()
    is_armed = True
    reads = [ends.read() for _ in range(3)]
    for read in reads:
        queue.submit([lambda: 3, lambda: 4], read)
    ends.wait_for(len(reads))
    while any(map(queue.is_under_way, reads)):
        assert all(thread.is_alive() for thread in queue._threads)
    queue.close()
    assert set(ends.ended) == set(reads)
    for read in reads:  # what strikes a block is the error of its read
        assert read.num_bytes == 7 if read.error is None else "MemoryError" in str(read.error)


def test_a_read_of_nothing_ends_too() -> None:
    queue, ends = ReadQueue(1), Ends()
    queue.submit([], ends.read())
    assert ends.wait().error is None
    queue.close()


def test_closing_ends_what_waits_with_an_error_and_refuses_the_rest() -> None:
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


def unread_bytes(pipe: int) -> int:
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_closing_native_threads_ends_what_waits_with_an_error() -> None:
    library = native_library()
    if library is None:
        pytest.skip("the native CPU library was not built (needs gcc)")
    queue, ends = NativeReadQueue(library, 1), Ends()
    slots = torch.zeros(3, 8, dtype=torch.uint8)
    pipes = [os.pipe() for _ in slots]

    def fault(block: int, reason: OSError | EOFError | None) -> MoERuntimeError | None:
        return reason and CheckpointError(str(reason))

    reads = [ends.read() for _ in slots]
    with queue.changed:
        for read, (end, _), slot in zip(reads, pipes, slots, strict=True):
            queue.submit(pack_blocks([(end, -1, 0, 8, 8)]), slot.data_ptr(), read, fault)
    os.write(pipes[0][1], bytes(8))
    with queue.changed:
        while not reads[0].ended_s:
            queue.changed.wait()
    os.write(pipes[1][1], bytes(4))
    while unread_bytes(pipes[1][0]):  # until the thread is in the second read
        time.sleep(0.001)
    events = queue.changed.events.value
    closing = threading.Thread(target=queue.close)
    closing.start()
    while queue.changed.events.value == events:  # closing is an event
        closing.join(0.001)
    # the second read is let finish; the third has not begun
    os.write(pipes[1][1], bytes(4))
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert [read.error is None for read in reads[:2]] == [True, True]
    assert str(reads[2].error) == "the model's experts were closed; load it again"
    assert ends.ended == reads
    for pipe in pipes:
        for end in pipe:
            os.close(end)
