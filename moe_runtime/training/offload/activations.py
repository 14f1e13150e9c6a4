"""Activations of each layer between forward and backward: kept, recomputed or swapped to the disk.

The results have the same bits. The predicted time of a step is

    T = max(forward, disk + swapped / write speed)
      + max(backward + recomputed, disk + swapped / read speed)

where `disk` is the time that experts keep the disk busy. Both maxima are linear in the choices, so
the best plan within a budget of memory is a small integer programme.

Source: Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU" (Fuyou, 2024); its model, solved exactly instead of by a sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest
from moe_runtime.lab.programme import Programme
from moe_runtime.memory.source import aligned_bytes, host_view
from moe_runtime.training.offload.disk import RecordFile

ActivationChoice = Literal["keep", "recompute", "swap"]

_SOLVER_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """One layer: bytes that can be recomputed, and the seconds that recomputing takes."""

    num_bytes: int
    recompute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpeeds:
    """A step and the disk, as measured.

    Attributes:
        forward_s, backward_s: seconds of computation without recomputing.
        forward_disk_s, backward_disk_s: seconds that experts keep the disk busy.
        swaps: there is a disk to swap to.
    """

    forward_s: float
    backward_s: float
    forward_disk_s: float = 0.0
    backward_disk_s: float = 0.0
    write_bytes_per_s: float = 1.0
    read_bytes_per_s: float = 1.0
    swaps: bool = True


def memory_bytes(
    layers: Sequence[LayerActivations], choices: Sequence[ActivationChoice], staging_bytes: int
) -> int:
    kept = sum(x.num_bytes for x, choice in zip(layers, choices, strict=True) if choice == "keep")
    return kept + (staging_bytes if "swap" in choices else 0)


def plan_activations(
    layers: Sequence[LayerActivations],
    speeds: StepSpeeds,
    *,
    budget_bytes: int,
    staging_bytes: int = 0,
) -> list[ActivationChoice]:
    """The choice for each layer that minimises the predicted time within a budget of bytes."""
    everything: list[ActivationChoice] = ["recompute"] * len(layers)
    if not layers:
        return everything
    plan = Programme()
    keeps, swaps = plan.binaries(len(layers)), plan.binaries(len(layers))
    (any_swap,) = plan.binaries(1)
    forward, backward = plan.reals(2)
    plan.cost(forward, 1.0)
    plan.cost(backward, 1.0)
    plan.between(speeds.forward_s, [(1.0, forward)], float("inf"))
    rows = list(zip(layers, keeps, swaps, strict=True))
    written = [(x.num_bytes / speeds.write_bytes_per_s, swap) for x, _, swap in rows]
    plan.at_most([*written, (-1.0, forward)], -speeds.forward_disk_s)
    read = [(x.num_bytes / speeds.read_bytes_per_s, swap) for x, _, swap in rows]
    plan.at_most([*read, (-1.0, backward)], -speeds.backward_disk_s)
    # a layer that is neither kept nor swapped is recomputed
    saved = [(-x.recompute_s, choice) for x, *choices in rows for choice in choices]
    again_s = sum(x.recompute_s for x in layers)
    plan.at_most([*saved, (-1.0, backward)], -speeds.backward_s - again_s)
    scale = 1.0 / max(1, budget_bytes, sum(x.num_bytes for x in layers))
    kept = [(x.num_bytes * scale, keep) for x, keep, _ in rows]
    plan.at_most([*kept, (staging_bytes * scale, any_swap)], budget_bytes * scale)
    for _, keep, swap in rows:
        plan.at_most([(1.0, keep), (1.0, swap)], 1.0)
        plan.at_most([(1.0, swap), (-1.0, any_swap)], 0.0)
        if not speeds.swaps:
            plan.equal([(1.0, swap)], 0.0)
    found = plan.solve(time_limit_s=_SOLVER_S)
    if found is None:
        return everything
    choices: list[ActivationChoice] = [
        "keep" if found[keep] > 0.5 else "swap" if found[swap] > 0.5 else "recompute"
        for _, keep, swap in rows
    ]
    # the solver's tolerance may exceed the budget by a few bytes
    fits = memory_bytes(layers, choices, staging_bytes) <= budget_bytes
    return choices if fits else everything


SLOT_BYTES = 2**20
"""Tensors are cut into slots of this size; smaller tensors stay in memory."""


class Swapped:
    """A tensor in the file; its slots are free again when nothing refers to it.

    Attributes:
        buffer: its content until it is written; None afterwards.
        written, read: transfers of its slots; `read` is None before they begin.
        content: filled by `read`.
        unwritten: slots that are still to be written.
    """

    def __init__(self, tensor: Tensor, slots: list[int], release: Callable[[list[int]], None]):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.slots = slots
        self.buffer: Tensor | None = None
        self.content: Tensor | None = None
        self.written: list[Future[int]] = []
        self.read: list[Future[int]] | None = None
        self.unwritten = len(slots)
        weakref.finalize(self, release, slots).atexit = False


class ActivationSwap:
    """Packs and unpacks tensors through a file.

    Args:
        folder: for the file, which is removed at the end.
        direct: bypass the page cache where possible.
        buffer_bytes: of tensors that are being moved, in either direction.
        smallest_bytes: smaller tensors stay in memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        io_threads: int = 2,
        direct: bool = True,
        buffer_bytes: int = 64 * 2**20,
        smallest_bytes: int = SLOT_BYTES,
    ) -> None:
        self._threads = ThreadPoolExecutor(io_threads, "activations")
        self._file = RecordFile(folder / "activations.scratch", SLOT_BYTES, 0, direct=direct)
        # a tensor may be freed, and return its slots, in any thread
        self._lock = threading.RLock()
        self.buffer_bytes = buffer_bytes
        self._smallest_bytes = smallest_bytes
        self._writes: deque[tuple[list[Future[int]], int]] = deque()
        self._stack: list[weakref.ref[Swapped]] = []

    def pack(self, tensor: Tensor) -> Tensor | Swapped:
        """Begins to write a tensor; returns small ones as they are."""
        if tensor.numel() * tensor.element_size() < self._smallest_bytes:
            return tensor
        with self._lock:
            num_slots = -(-tensor.numel() * tensor.element_size() // SLOT_BYTES)
            held = Swapped(tensor, [self._file.take() for _ in range(num_slots)], self._release)
        size = num_slots * SLOT_BYTES
        # a tensor larger than the buffers is written alone
        while self._writes and sum(s for _, s in self._writes) + size > self.buffer_bytes:
            self._await_write()
        held.buffer = aligned_bytes(size)
        held.buffer[: held.num_bytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        held.written = [
            self._threads.submit(self._write, held, *block)
            for block in self._blocks(held, held.buffer)
        ]
        self._writes.append((held.written, size))
        self._stack = [ref for ref in self._stack if ref() is not None]
        self._stack.append(weakref.ref(held))
        return held

    def unpack(self, held: Tensor | Swapped) -> Tensor:
        if isinstance(held, Tensor):
            return held
        content, reads = self._begin_read(held)
        self._read_ahead(held)
        for read in reads:
            read.result()
        flat = content[: held.num_bytes].view(held.dtype).view(held.shape)
        return flat if held.device.type == "cpu" else flat.to(held.device)

    def measure(self) -> tuple[float, float]:
        """Bytes a second of writes and of reads."""
        tensor = torch.zeros(16 * SLOT_BYTES, dtype=torch.uint8)
        started = time.perf_counter()
        held = self.pack(tensor)
        while self._writes:
            self._await_write()
        written = time.perf_counter()
        self.unpack(held)
        ended = time.perf_counter()
        size = tensor.numel()
        return size / max(written - started, 1e-9), size / max(ended - written, 1e-9)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._file.close()
        self._file.path.unlink(missing_ok=True)

    def _await_write(self) -> None:
        writes, _ = self._writes.popleft()
        for write in writes:
            write.result()

    def _write(self, held: Swapped, offset: int, content: memoryview) -> int:
        try:
            return self._file.write(offset, content)
        finally:
            with self._lock:
                held.unwritten -= 1
                if not held.unwritten:
                    held.buffer = None

    def _read(self, held: Swapped, offset: int, content: memoryview) -> int:
        for write in held.written:
            write.result()
        return self._file.fetch(offset, content)

    def _blocks(self, held: Swapped, buffer: Tensor) -> Iterator[tuple[int, memoryview]]:
        view = host_view(buffer)
        for number, slot in enumerate(held.slots):
            yield slot * SLOT_BYTES, view[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]

    def _begin_read(self, held: Swapped) -> tuple[Tensor, list[Future[int]]]:
        if held.content is None or held.read is None:
            held.content, held.read = held.buffer, []  # the buffer while it is being written
            if held.content is None:
                held.content = aligned_bytes(len(held.slots) * SLOT_BYTES)
                held.read = [
                    self._threads.submit(self._read, held, *block)
                    for block in self._blocks(held, held.content)
                ]
        return held.content, held.read

    def _read_ahead(self, held: Swapped) -> None:
        """Begins to read the tensors packed before this one, as far as the buffers go."""
        alive = [x for ref in self._stack if (x := ref()) is not None]
        before = alive[: alive.index(held)] if held in alive else []
        for earlier in reversed(before):
            ready = [x for x in before if x.read is not None or x.buffer is not None]
            size = sum(len(x.slots) for x in (*ready, earlier)) * SLOT_BYTES
            if size > self.buffer_bytes:
                return
            self._begin_read(earlier)

    def _release(self, slots: list[int]) -> None:
        with self._lock:
            for slot in slots:
                self._file.drop(slot)


Activations = Literal["model", "keep", "recompute", "swap", "auto"]


class Pass(NamedTuple):
    """One pass through a layer, as measured.

    Attributes:
        saved_bytes: activations that the backward pass needs and could recompute.
        recompute_share: share of the forward computation that recomputing repeats.
    """

    seconds: float
    saved_bytes: int
    recompute_share: float
    read_bytes: int
    written_bytes: int


class ActivationPolicy:
    """Keeps, recomputes or swaps, layer by layer.

    Args:
        kind: `model` follows each layer's setting. `auto` recomputes in the first step, measures
            it, and then follows the fastest plan. The others hold for all layers.
        recomputes: each layer's setting.
        swap: None if there is no disk.
        budget_bytes: of activations that `auto` keeps, and of the swap's buffers.
    """

    def __init__(
        self,
        kind: Activations,
        recomputes: Sequence[bool],
        swap: ActivationSwap | None = None,
        budget_bytes: int = 0,
    ) -> None:
        if kind not in get_args(Activations):
            hint = nearest(str(kind), get_args(Activations))
            raise ValueError(f"activations is {kind!r}; {hint}")
        if kind == "swap" and swap is None:
            raise ValueError("activations='swap' needs a storage_dir to swap to")
        self._swap = swap
        self._budget_bytes = budget_bytes
        self._measured: dict[str, dict[int, list[Pass]]] | None = None
        if kind == "auto":
            self._measured = {"forward": {}, "backward": {}}
        self.choices: list[ActivationChoice] = [
            "recompute" if kind == "auto" or (kind == "model" and own)
            else "keep" if kind == "model" else kind
            for own in recomputes
        ]  # fmt: skip

    def saving(self, layer: int) -> AbstractContextManager[object]:
        """A context for the forward pass of a layer, in which autograd saves its tensors."""
        if self.choices[layer] != "swap" or self._swap is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._swap.pack, self._swap.unpack)

    def observe(self, direction: Literal["forward", "backward"], layer: int, found: Pass) -> None:
        if self._measured is not None:
            self._measured[direction].setdefault(layer, []).append(found)

    def finish_step(self) -> None:
        if self._measured is None or not self._measured["backward"]:
            return
        measured, self._measured = self._measured, None
        layers = [
            LayerActivations(
                num_bytes=sum(x.saved_bytes for x in passes),
                recompute_s=sum(x.seconds * x.recompute_share for x in passes),
            )
            for passes in (measured["forward"].get(n, ()) for n in range(len(self.choices)))
        ]
        write_speed, read_speed = (1.0, 1.0) if self._swap is None else self._swap.measure()
        seconds, disk_s = [], []
        for side in measured.values():
            passes = list(itertools.chain(*side.values()))
            seconds.append(sum(x.seconds for x in passes))
            read_s = sum(x.read_bytes for x in passes) / read_speed
            disk_s.append(read_s + sum(x.written_bytes for x in passes) / write_speed)
        again_s = sum(layer.recompute_s for layer in layers)
        speeds = StepSpeeds(
            forward_s=seconds[0],
            backward_s=max(0.0, seconds[1] - again_s),
            forward_disk_s=disk_s[0],
            backward_disk_s=disk_s[1],
            write_bytes_per_s=write_speed,
            read_bytes_per_s=read_speed,
            swaps=self._swap is not None,
        )
        self.choices = plan_activations(
            layers, speeds, budget_bytes=self._budget_bytes,
            staging_bytes=0 if self._swap is None else 2 * self._swap.buffer_bytes,
        )  # fmt: skip

    def close(self) -> None:
        if self._swap is not None:
            self._swap.close()
