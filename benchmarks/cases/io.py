"""The case ``io``: reads experts from disk as a run does, compared with plain reads.

The page cache is dropped before each repetition, and bytes from storage are counted. A system whose
bytes differ from the file's gets no numbers; some experts are compared.
"""

import contextlib
import random
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.suite.memory_cap import forget
from moe_runtime.errors import MoERuntimeError
from moe_runtime.kernels.quantized.storage_order import put_in_order
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.memory.source import (
    CheckpointFile,
    ExpertLayout,
    ExpertSource,
    Slab,
    TensorRange,
    host_view,
)
from moe_runtime.types import ExpertKey

METRICS = {
    "bytes_per_s": suite.Metric("bytes/s", better="more"),
    "expert_read_s": suite.Metric("s"),
    "from_storage": suite.Metric("share", is_judged=False),
}
_COMPARED = 4
Layouts = Mapping[ExpertKey, ExpertLayout]
Found = tuple[dict[ExpertKey, torch.Tensor], list[float]]


@dataclass(frozen=True, kw_only=True)
class ReadPlan:
    layouts: Layouts
    num_experts: int
    in_flight: int
    io_threads: int

    def keys(self, number: int) -> list[ExpertKey]:
        """The experts of a repetition, equal for all systems."""
        return random.Random(number).sample(sorted(self.layouts), self.num_experts)


class ReadSystem(suite.BenchSystem):
    """A way to read experts; its tensors are compared with the file's."""

    def __init__(self, name: str, plan: ReadPlan, slab: Slab) -> None:
        super().__init__(name, None if name == "moe_runtime" else {})
        self.plan, self.slab = plan, slab
        self._number = 0

    def repeat(self) -> Mapping[str, suite.Number]:
        keys = self.plan.keys(self._number)
        self._number += 1
        layouts = self.plan.layouts
        forget({extent.file for key in keys for extent in layouts[key].extents})
        before, begin = _storage_bytes(), time.perf_counter()
        try:
            last, took_s = self.read(keys)
        except (OSError, EOFError, MoERuntimeError) as error:
            raise suite.PeerFailedError(str(error)) from None
        elapsed_s = time.perf_counter() - begin
        num_bytes = sum(e.needed_bytes for key in keys for e in layouts[key].extents)
        share = (_storage_bytes() - before) / num_bytes
        for key, slot in list(last.items())[:_COMPARED]:
            self._compare(layouts[key], slot)
        speed = num_bytes / elapsed_s
        return {"bytes_per_s": speed, "expert_read_s": took_s, "from_storage": share}

    @abstractmethod
    def read(self, keys: Sequence[ExpertKey]) -> Found:
        """Read experts into slots; return where the last ones lie, and the seconds of each."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading."""

    def _compare(self, layout: ExpertLayout, slot: torch.Tensor) -> None:
        found = layout.views(slot)
        same = [
            torch.equal(_bits(view), _bits(tensor.view(_plain_bytes(tensor))))
            for view, tensor in zip(found, layout.tensors, strict=True)
        ]
        self.count(len(same), sum(same), "tensors differ from those of the file")


class QueueReads(ReadSystem):
    """This project's reads: queued blocks of experts, past the page cache, by native threads."""

    def __init__(self, name: str, plan: ReadPlan, slab: Slab) -> None:
        super().__init__(name, plan, slab)
        self._source = ExpertSource(plan.layouts, io_threads=plan.io_threads)

    def read(self, keys: Sequence[ExpertKey]) -> Found:
        """Read experts into slots; each starts as soon as a slot is free."""
        free = list(range(self.plan.in_flight))
        lying: dict[int, ExpertKey] = {}
        reads: list[tuple[float, Transfer]] = []
        monitor = self._source.monitor

        def note(slot: int, _: Transfer) -> None:
            with monitor:
                free.append(slot)
                monitor.notify_all()

        with monitor:
            for key in keys:
                while not free:
                    monitor.wait()
                slot = free.pop()
                read = Transfer(Priority.DEMAND, partial(note, slot))
                lying[slot] = key
                reads.append((time.perf_counter(), read))
                self._source.fetch(key, self.slab.slot(slot), read)
            while len(free) < self.plan.in_flight:
                monitor.wait()
        for _, read in reads:
            if read.error is not None:
                raise read.error
        lies = {key: self.slab.slot(slot) for slot, key in lying.items()}
        return lies, [read.ended_s - begin for begin, read in reads]

    def close(self) -> None:
        self._source.close()


class PlainReads(ReadSystem):
    """Threads that call ``preadv`` for one expert each."""

    def __init__(self, name: str, plan: ReadPlan, slab: Slab, *, direct: bool) -> None:
        super().__init__(name, plan, slab)
        self._direct = direct
        paths = {extent.file for one in plan.layouts.values() for extent in one.extents}
        self._files = {path: CheckpointFile(path, direct=direct) for path in sorted(paths)}

    def read(self, keys: Sequence[ExpertKey]) -> Found:
        """Read experts into slots; each thread fills its own slots in turn."""
        if self._direct and not all(file.direct for file in self._files.values()):
            raise OSError("this file system has no direct reads")
        waiting, lies = iter(list(keys)), dict[int, ExpertKey]()

        def work(slot: int) -> list[float]:
            took_s = []
            buffer = host_view(self.slab.slot(slot))
            for key in waiting:
                begin = time.perf_counter()
                for extent in self.plan.layouts[key].extents:
                    into = buffer[extent.slot_offset : extent.slot_offset + extent.num_bytes]
                    self._files[extent.file].read(extent.offset, into, extent.needed_bytes)
                lies[slot] = key
                took_s.append(time.perf_counter() - begin)
            return took_s

        with ThreadPoolExecutor(self.plan.in_flight) as pool:
            took_s = [s for one in pool.map(work, range(self.plan.in_flight)) for s in one]
        slots = {key: self.slab.slot(slot) for slot, key in lies.items()}
        for key, slot in slots.items():
            for order, source, place in self.plan.layouts[key].reorderings:
                found = put_in_order(order, slot[source : source + order.stored_bytes])
                slot[place : place + found.numel()] = found
        return slots, took_s

    def close(self) -> None:
        for file in self._files.values():
            file.close()


@contextlib.contextmanager
def make_read_systems(plan: ReadPlan) -> Iterator[list[ReadSystem]]:
    """``moe_runtime``, ``preadv`` through the page cache, and ``preadv:direct`` past it."""
    slab = Slab(plan.in_flight, max(one.slot_bytes for one in plan.layouts.values()))
    slab.bytes.fill_(1)  # touched pages: the first write to a page costs more than a read
    with contextlib.ExitStack() as stack:
        systems: list[ReadSystem] = [QueueReads("moe_runtime", plan, slab)]
        stack.callback(slab.close)
        stack.callback(systems[0].close)
        for name, direct in (("preadv", False), ("preadv:direct", True)):
            systems.append(PlainReads(name, plan, slab, direct=direct))
            stack.callback(systems[-1].close)
        yield systems


def measure_reads(
    plan: ReadPlan, rules: suite.Rules, settings: Mapping[str, Any]
) -> dict[str, Any]:
    with make_read_systems(plan) as systems:
        return suite.measure_systems("io", systems, METRICS, rules, settings)


def _storage_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def _plain_bytes(tensor: TensorRange) -> torch.Tensor:
    """A tensor's bytes in the file, by an ordinary read."""
    num_bytes = tensor.span_bytes if tensor.order is None else tensor.order.stored_bytes
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        return torch.frombuffer(bytearray(file.read(num_bytes)), dtype=torch.uint8)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
