"""A CUDA or ROCm device of a tier: memory, and copies that overlap with computation."""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
import select
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.memory.reads import Priority

LOADS_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")
"""Whether this processor's loads see the writes of a device in their order."""
NOT_TOLD = -(2**31)
"""Stands where a graph has not written a number yet."""
_LOOKS = 256
"""Looks at a graph's numbers between two checks whether it has ended."""
PAGE_BYTES = 4096
_ANY_WAY = 4
"""`cudaMemcpyDefault`: the addresses give the direction."""
_MAPPED = 2
"""`cudaHostRegisterMapped`: kernels may read the memory."""
PIN_BYTES = 2**30
"""Host memory is registered in parts of about this size, which fail early."""


class Event(Protocol):
    """A place in a stream of a device's work: ``query`` returns whether the device has reached it,
    ``synchronize`` waits for it and raises errors of earlier work."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CudaCopy:
    """Events of CUDA around a copy into a slot."""

    def __init__(self, begun: torch.cuda.Event, done: torch.cuda.Event) -> None:
        self.begun, self.done = begun, done

    def query(self) -> bool:
        return self.done.query()

    def synchronize(self) -> None:
        self.done.synchronize()

    def seconds_after(self, before: CudaCopy | None) -> float:
        """Seconds in which the copy alone used the link, after an earlier copy."""
        took_ms = self.begun.elapsed_time(self.done)
        if before is not None:
            took_ms = min(took_ms, before.done.elapsed_time(self.done))
        return max(0.0, took_ms) / 1e3


class CudaTold:
    """Pinned memory that a graph copies to in the middle of each replay: integers ``numbers``, and
    ``values`` of any type, valid until ``forget``. Polling it is cheaper than an event.

    Numbers are looked at one by one, and a device writes eight aligned bytes at once: they need no
    order. Values come before the numbers; where loads may overtake each other, the host waits for
    the stream before it reads values.
    """

    def __init__(self, device: CudaDevice, *sources: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as other:  # a thread that records must not allocate
            lock = partial(other.submit, torch.empty, pin_memory=True)
            found: list[Any] = [lock(s.shape, dtype=s.dtype).result() for s in sources]
        self.numbers, *self.values = found
        self._looked_at = self.numbers.zero_().view(-1).numpy()
        self._device = device
        self._stream = torch.cuda.current_stream(device.place)

    def query(self) -> bool:
        return NOT_TOLD not in self._looked_at.tolist()

    def synchronize(self) -> None:
        self.settle()
        if not self.query():
            raise RuntimeError("a graph has ended without its numbers for the host")
        if self.values and not LOADS_IN_ORDER:
            self._stream.synchronize()

    def settle(self) -> None:
        """Waits until no replay that was queued before writes here."""
        num_looks = 0
        while not self.query():
            num_looks += 1
            if num_looks % _LOOKS == 0 and self._stream.query():
                return  # all queued work has ended
            select.select((), (), (), 0)  # lets copying threads run; a sleep takes longer

    def forget(self) -> None:
        """Clears the numbers before a replay, after ``settle``."""
        self._stream = self._device.computing_here()
        self._looked_at.fill(NOT_TOLD)

    def __del__(self) -> None:
        self.settle()  # a replay may still write to this memory


class CudaRecorder:
    """Records the work that a ``with`` block queues, in one or several CUDA graphs.

    They share memory with other recordings: replay them one after another, in their order, before
    those of another recording.
    """

    def __init__(
        self, device: CudaDevice, stream: torch.cuda.Stream, beside: torch.cuda.Stream
    ) -> None:
        self._device, self._place = device, device.place
        self._pool = device.graph_pool()
        self._within = torch.cuda.stream(stream)
        self._stream, self._beside = stream, beside
        self._graph: torch.cuda.CUDAGraph | None = None
        self._sources: list[torch.Tensor] = []  # copied to the host by the running graph

    def __enter__(self) -> CudaRecorder:
        torch.cuda.synchronize(self._place)
        self._within.__enter__()
        try:
            self.begin()
        except BaseException:
            self._within.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            if self._graph is not None:
                self._give_up()
        finally:
            self._within.__exit__(None, None, None)

    def tell(self, numbers: torch.Tensor, *values: torch.Tensor) -> CudaTold:
        """Copies integers above ``NOT_TOLD`` and values to the host, in parallel with the next
        work."""
        self._sources += (sources := [one.contiguous() for one in (*values, numbers)])
        told = CudaTold(self._device, numbers, *values)
        self._beside.wait_stream(self._stream)
        # numbers come last: the host polls these
        pairs = zip(sources, (*told.values, told.numbers), strict=True)
        parts = [(one.view(torch.uint8), there.view(torch.uint8)) for one, there in pairs]
        self._device.queue(parts, self._beside)
        return told

    def cut(self) -> torch.cuda.CUDAGraph:
        """Ends a graph and begins the next one."""
        done = self.end()
        self.begin()
        return done

    def end(self) -> torch.cuda.CUDAGraph:
        """Ends a graph; raises RuntimeError if some work cannot be recorded."""
        graph = self._graph
        assert graph is not None
        if self._sources:
            self._stream.wait_stream(self._beside)
            self._sources.clear()
        graph.capture_end()
        self._graph = None
        return graph

    def begin(self) -> None:
        """Begins a graph after ``end``; what was queued in between is done."""
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads may copy meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._restore_generator()
            raise
        self._graph = graph

    def _give_up(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.end()
        self._restore_generator()

    def _restore_generator(self) -> None:
        """Resets torch's generator: after a failed recording it stays in capture mode."""
        index = self._place.index if self._place.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


class CudaDevice:
    """A CUDA or ROCm device; its methods may be called from several threads.

    Streams are made once, since cuBLAS keeps memory for each stream. The host waits for no
    computation here; copies wait on the device.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._copies = {
            priority: torch.cuda.Stream(place, priority=-(priority is Priority.DEMAND))
            for priority in Priority
        }
        self._back, self._down = torch.cuda.Stream(place), torch.cuda.Stream(place)
        self._recording, self._telling = torch.cuda.Stream(place), torch.cuda.Stream(place)
        self._computing: dict[int, torch.cuda.Stream] = {}  # by their handles
        self._allocated: list[weakref.ref[torch.Tensor]] = []
        self._pool: torch.cuda.MemPool | None = None
        self._replayed: tuple[int, Any] | None = None  # the last replay's stream, and its end
        self._index = place.index if place.index is not None else torch.cuda.current_device()
        self._runtime = find_runtime()
        self.compute_here()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, ``uint8``; raises CapacityError."""
        try:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.place)
        except torch.OutOfMemoryError:
            size = format_bytes(num_bytes)
            raise CapacityError(f"cannot allocate {size} on {self.place}") from None
        # torch reuses freed memory only after the work of these streams
        for stream in (*self._copies.values(), self._back, *self._computing.values()):
            memory.record_stream(stream)
        self._allocated.append(weakref.ref(memory))
        return memory

    def pin(self, memory: torch.Tensor, slot_bytes: int) -> None:
        """Pins host memory of slots until it is freed; raises CapacityError."""
        with torch.cuda.device(self.place):
            try:
                pin_in_parts(torch.cuda.cudart(), memory, slot_bytes, place=self.place)
            except CapacityError:
                if self._runtime is not None:
                    self._runtime.cudaGetLastError()  # else the next kernel launch raises it
                raise

    def reads_host(self, memory: torch.Tensor) -> bool:
        """Whether kernels can read pinned host memory at its host addresses."""
        with torch.cuda.device(self.place):
            return self._runtime is not None and is_mapped(self._runtime, memory)

    def compute_here(self) -> int:
        """Registers the caller's current stream as one that reads slots; returns its number."""
        number: int = torch._C._cuda_getCurrentRawStream(self._index)
        if number not in self._computing:
            stream = torch.cuda.current_stream(self.place)
            for memory in [ref() for ref in self._allocated]:
                if memory is not None:
                    memory.record_stream(stream)
            self._computing[number] = stream
        return number

    def upload(
        self, numbers: npt.NDArray[np.integer], into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Copies numbers to the device, to ``into`` or new memory, for work on the current stream.
        New memory is not an inference tensor. The source may change afterwards."""
        source = torch.from_numpy(numbers)
        pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
        if into is None:
            with torch.inference_mode(False):
                return pinned.to(self.place, non_blocking=True)
        return into.copy_(pinned, non_blocking=True)

    def download(
        self, numbers: torch.Tensor, *, is_kept: bool = False
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Copies numbers to host memory after the current stream's work; valid after the event.
        With ``is_kept`` nothing overwrites them, and later work does not wait for the copy."""
        found = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied, here = torch.cuda.Event(), self.computing_here()
        if not is_kept:
            found.copy_(numbers, non_blocking=True)
            copied.record(here)
            return found, copied
        self._down.wait_stream(here)
        numbers.record_stream(self._down)
        with torch.cuda.stream(self._down):
            found.copy_(numbers, non_blocking=True)
        copied.record(self._down)
        return found, copied

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Copies values to the device, for work on the current stream."""
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values).to(self.place, non_blocking=True)

    def wait_here(self, event: Any) -> None:
        """The caller's current stream waits for a ``copy``."""
        self.computing_here().wait_event(event.done)

    def vacate(self, *slots: torch.Tensor, still: Sequence[Any] = ()) -> list[Any]:
        """Events after all queued work that may read these slots, and those in ``still``."""
        return [*(stream.record_event() for stream in tuple(self._computing.values())), *still]

    def copy(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        after: Sequence[Any],
        priority: Priority,
    ) -> CudaCopy:
        """Queues copies of ``uint8`` pairs from host to slots, after the events of ``vacate``.
        Until the returned event, sources must not change, and nothing may read the targets."""
        stream, done = self._copies[priority], torch.cuda.Event(enable_timing=True, blocking=True)
        begun = torch.cuda.Event(enable_timing=True)
        for event in after:
            stream.wait_event(event)
        begun.record(stream)
        self.queue(parts, stream)
        done.record(stream)
        return CudaCopy(begun, done)

    def copy_back(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Event:
        """Queues copies from the device to pinned host memory, after all work queued so far.
        Neither side may be changed before the returned event."""
        done = torch.cuda.Event(blocking=True)
        self.compute_here()
        for event in self.vacate():
            self._back.wait_event(event)
        self.queue(parts, self._back)
        done.record(self._back)
        return done

    def time(self, queue: Callable[[], object]) -> Callable[[], float]:
        """Queues work on the caller's current stream; the returned function waits for it, and
        returns its seconds."""
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        here = self.computing_here()
        begun.record(here)
        queue()
        done.record(here)

        def wait() -> float:
            done.synchronize()
            return begun.elapsed_time(done) / 1e3

        return wait

    def drain(self) -> None:
        """Waits for all copies, after an exception."""
        for stream in (*self._copies.values(), self._back):
            stream.synchronize()

    def computing_here(self) -> torch.cuda.Stream:
        """The caller's current stream; making a new object is slow."""
        return self._computing[self.compute_here()]

    def queue(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: torch.cuda.Stream
    ) -> None:
        """Queues copies of contiguous bytes on a stream; the memory must outlive them."""
        if self._runtime is not None:
            queue_copies(self._runtime, parts, stream.cuda_stream)
            return
        with torch.cuda.stream(stream):
            for source, target in parts:
                target.copy_(source, non_blocking=True)

    def graph_pool(self) -> Any:
        """The memory that all recordings share; a replay overwrites that of other recordings.
        The pool is held here: torch refuses a handle whose last graph was freed."""
        if self._pool is None:
            with torch.cuda.device(self.place):
                self._pool = torch.cuda.MemPool()
        return self._pool.id

    def recorded_bytes(self) -> int:
        """Bytes that recordings have taken of the device, free parts of their memory included."""
        parts = () if self._pool is None else self._pool.snapshot()
        return sum(part["total_size"] for part in parts)

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Orders replays: those within the block run after those of earlier blocks, on any stream.
        One thread at a time may be in a block."""
        number = self.compute_here()
        here = self._computing[number]
        if self._replayed is not None and self._replayed[0] != number:
            here.wait_event(self._replayed[1])
        try:
            yield
        finally:
            self._replayed = number, here.record_event()

    def record(self) -> CudaRecorder:
        """Records the caller's work instead of computing it."""
        return CudaRecorder(self, self._recording, self._telling)


def open_device(place: torch.device) -> CudaDevice:
    """The device of a place; raises ValueError if it is neither CUDA nor ROCm."""
    if place.type != "cuda":
        raise ValueError(f"experts are computed on the CPU or on a CUDA device, not on {place}")
    return CudaDevice(place)


def find_runtime() -> Any:
    """The CUDA runtime that torch has loaded, or None."""
    try:
        # these calls do not wait, so the interpreter's lock is not released
        runtime = ctypes.PyDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        copy, _ = runtime.cudaMemcpyAsync, runtime.cudaGetLastError
    except (OSError, AttributeError):
        return None
    address = ctypes.c_void_p
    copy.argtypes = [address, address, ctypes.c_size_t, ctypes.c_int, address]
    return runtime


def queue_copies(
    runtime: Any, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], stream: int
) -> None:
    """Queues copies of contiguous bytes by `cudaMemcpyAsync`, cheaper for the host than torch's."""
    for source, target in parts:
        addresses = target.data_ptr(), source.data_ptr()
        if status := runtime.cudaMemcpyAsync(*addresses, source.numel(), _ANY_WAY, stream):
            runtime.cudaGetLastError()  # else this thread's next kernel launch raises it
            raise RuntimeError(f"cudaMemcpyAsync failed with error {status}")


def is_mapped(runtime: Any, memory: torch.Tensor) -> bool:
    """Whether the current GPU has registered this host memory at its address on the host."""
    found, address = ctypes.c_void_p(), memory.data_ptr()
    if runtime.cudaHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(address), 0):
        runtime.cudaGetLastError()  # else this thread's next kernel launch raises it
        return False
    return found.value == address


def pin_in_parts(
    runtime: Any,
    memory: torch.Tensor,
    slot_bytes: int,
    *,
    part_bytes: int = PIN_BYTES,
    place: torch.device | None = None,
) -> None:
    """Registers page-aligned ``uint8`` host memory with CUDA until the tensor is freed and the work
    on the GPU of ``place`` (None: the current one) has ended.

    A copy must not cross two registrations, and these must not share a page: a part is a number of
    whole slots and of whole pages. Raises CapacityError, with nothing registered.
    """
    unit = math.lcm(slot_bytes, PAGE_BYTES)
    parts = memory.split(max(1, part_bytes // unit) * unit)
    held: list[int] = []
    # holding the tensor itself would keep its memory
    weakref.finalize(memory.untyped_storage(), _unregister, runtime, held, place)
    for part in parts:
        if int(runtime.cudaHostRegister(part.data_ptr(), part.numel(), _MAPPED)) != 0:
            _unregister(runtime, held, place)
            size = format_bytes(memory.numel())
            raise CapacityError(
                f"cannot lock {size} of host memory for the GPU; raise the limit of locked memory "
                "(ulimit -l) or lower host_memory"
            )
        held.append(part.data_ptr())


def _unregister(runtime: Any, held: list[int], place: torch.device | None) -> None:
    if held and torch.cuda.is_initialized():
        torch.cuda.synchronize(place)  # kernels may read there
    while held:
        runtime.cudaHostUnregister(held.pop())
