"""A device on the host: slots, a link and streams in virtual time, poison where none may look."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from emulated_graphs import EmulatedGraph, EmulatedRecorder

from moe_runtime.memory.reads import Priority

POISON = 0xFF
"""The byte of memory whose content is not there yet: floating-point numbers of it are NaN."""


class EmulatedEvent(NamedTuple):
    """A place in a stream: the device has come this far at a time; a copy had the link before."""

    device: EmulatedDevice
    time_s: float
    begun_s: float = 0.0

    def query(self) -> bool:
        return self.device.now_s >= self.time_s

    def synchronize(self) -> None:
        self.device.hesitate()
        self.device.wait_until(self.time_s)

    def seconds_after(self, before: object) -> float:
        return self.time_s - self.begun_s


class EmulatedDevice:
    """Does what is queued as late as it may be: when somebody waits for it, in the order of time.

    Work may start when its stream, the link and what it waits for are ready. A slot is poison from
    when the work queued before its eviction ends until its copy does.

    Attributes:
        now_s: how far the device has come.
        pinned: addresses of host memory that was pinned; nothing else may be copied from.
        faults: raised by copies that are about to begin, one each.
        late_faults: raised by waits for copies that run, one each.
        place: where its tensors are, for torch.
        num_drains: how often somebody waited for everything.
        num_waits: how often a stream was told to go on behind a copy.
        hesitate: called by who is about to wait on the host: what happens before that, happens.
        computing: the streams that said so, by their numbers.
    """

    place = torch.device("cpu")

    def __init__(self, *, bytes_per_s: float = 1e9, latency_s: float = 1e-5) -> None:
        self.now_s = 0.0
        self.pinned: list[range] = []
        self.faults: list[BaseException] = []
        self.late_faults: list[BaseException] = []
        self.num_drains = self.num_waits = 0
        self.hesitate: Callable[[], object] = lambda: None
        self.computing: set[int] = set()
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._here = threading.local()  # the number of a thread's current stream
        self._link_s = 0.0  # when it will have nothing to do, as what follows
        self._back_s = 0.0  # the other direction of the link
        self.replayed_s = 0.0  # when the last replay ends
        self._streams_s: dict[int, float] = {}
        self._copies_s = dict.fromkeys(Priority, 0.0)
        self._queued: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._lock = threading.RLock()
        self.graphs = weakref.WeakSet[EmulatedGraph]()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor, slot_bytes: int) -> None:
        self.pinned.append(range(memory.data_ptr(), memory.data_ptr() + memory.numel()))

    def reads_host(self, memory: torch.Tensor) -> bool:
        return any(memory.data_ptr() in pinned for pinned in self.pinned)

    def time(self, queue: Callable[[], object]) -> Callable[[], float]:
        queue()
        return lambda: 0.0

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Makes a stream this thread's current one."""
        before, self._here.number = self._current, number
        yield
        self._here.number = before

    @property
    def _current(self) -> int:
        return getattr(self._here, "number", 0)

    def compute_here(self) -> int:
        self.computing.add(self._current)
        return self._current

    def upload(
        self, numbers: npt.NDArray[np.integer], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        with torch.inference_mode(False):
            found = torch.tensor(numbers)
        return found if into is None else into.copy_(found)

    def download(
        self, numbers: torch.Tensor, *, is_kept: bool = False
    ) -> tuple[torch.Tensor, EmulatedEvent]:
        """They arrive when somebody waits; until then they are no expert's."""
        with self._lock, torch.inference_mode(False):
            source = numbers if is_kept else numbers.clone()
            found = torch.full_like(source, -(2**30) if source.dtype != torch.float16 else -1)
            end = max(self.now_s, self._streams_s.get(self._current, 0.0)) + self._latency_s
            self._at(end, lambda: found.copy_(source))
            return found, EmulatedEvent(self, end)

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def wait_here(self, event: EmulatedEvent | _Failing) -> None:
        with self._lock:
            self.num_waits += 1
            done_s = (event.event if isinstance(event, _Failing) else event).time_s
            self._streams_s[self._current] = max(self._streams_s.get(self._current, 0.0), done_s)

    def vacate(
        self, *slots: torch.Tensor, still: Sequence[EmulatedEvent] = ()
    ) -> list[EmulatedEvent]:
        with self._lock:
            ends_s = [self._streams_s.get(number, 0.0) for number in self.computing]
            last = max(self.now_s, *ends_s, *(event.time_s for event in still), 0.0)
            self._at(last, lambda: [slot.fill_(POISON) for slot in slots])
            return [*(EmulatedEvent(self, end_s) for end_s in ends_s), *still]

    def copy(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[EmulatedEvent],
        priority: Priority,
    ) -> EmulatedEvent | _Failing:
        with self._lock:
            if self.faults:
                raise self.faults.pop()
            for source, target in parts:
                assert any(source.data_ptr() in memory for memory in self.pinned)
                assert source.shape == target.shape
            num_bytes = sum(len(source) for source, _ in parts)
            streams_s = self._link_s, self._copies_s[priority]
            begin = max(self.now_s, *streams_s, *(event.time_s for event in after))
            end = begin + self._latency_s + num_bytes / self._bytes_per_s
            self._link_s = self._copies_s[priority] = end
            self._at(begin, lambda: [target.fill_(POISON) for _, target in parts])
            self._at(end, lambda: [target.copy_(source) for source, target in parts])
            done = EmulatedEvent(self, end, begin)
            return _Failing(done, self.late_faults.pop()) if self.late_faults else done

    def copy_back(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> EmulatedEvent:
        with self._lock:
            for source, target in parts:
                assert any(target.data_ptr() in memory for memory in self.pinned)
                assert source.shape == target.shape
            num_bytes = sum(len(source) for source, _ in parts)
            computing_s = [self._streams_s.get(n, 0.0) for n in {self._current, *self.computing}]
            begin = max(self.now_s, self._back_s, *computing_s)
            self._back_s = end = begin + self._latency_s + num_bytes / self._bytes_per_s
            for _, target in parts:  # whoever looks too early sees what no gradient is
                target.fill_(POISON)
            self._at(end, lambda: [t.copy_(source, non_blocking=True) for source, t in parts])
            return EmulatedEvent(self, end)

    def compute(self, work: Callable[[], object], duration_s: float = 1e-5) -> EmulatedEvent:
        """Queues work that reads slots when it begins and when it ends."""
        with self._lock:
            begin = max(self.now_s, self._streams_s.get(self._current, 0.0))
            self._streams_s[self._current] = end = begin + duration_s
            self._at(begin, work)
            self._at(end, work)
            return EmulatedEvent(self, end)

    def record(self) -> EmulatedRecorder:
        return EmulatedRecorder(self)

    def recorded_bytes(self) -> int:
        """Of all that the recordings made which are still there."""
        made = {place: tensor for graph in self.graphs for place, tensor in graph.made.items()}
        return sum(tensor.untyped_storage().nbytes() for tensor in made.values())

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        here = self._current
        self._streams_s[here] = max(self._streams_s.get(here, 0.0), self.replayed_s)
        yield
        self.replayed_s = self._streams_s[here]

    def drain(self) -> None:
        self.num_drains += 1
        self.wait_until(max(self._back_s, *self._copies_s.values()))

    def finish(self) -> None:
        """Does everything that is queued."""
        self.wait_until(max(self._link_s, self._back_s, *self._streams_s.values(), 0.0))

    def wait_until(self, time_s: float) -> None:
        with self._lock:
            while self._queued and self._queued[0][0] <= time_s:
                due_s, _, action = heapq.heappop(self._queued)
                self.now_s = max(self.now_s, due_s)
                action()
            self.now_s = max(self.now_s, time_s)

    def _at(self, time_s: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._queued, (time_s, next(self._number), action))
        self.wait_until(self.now_s)


class _Failing(NamedTuple):
    """The event of a copy of which the device says, while it runs, that it failed."""

    event: EmulatedEvent
    error: BaseException

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.device.hesitate()
        raise self.error
