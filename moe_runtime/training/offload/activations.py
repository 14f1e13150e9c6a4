"""Activations of each layer between forward and backward: kept, recomputed or swapped to the disk.

The bits are the same in any case. The predicted time of a step is

    T = max(forward, disk + swapped / write speed)
      + max(backward + recomputed, disk + swapped / read speed)

where `disk` is the time that experts keep the disk busy. Both maxima are linear in the choices, so
the best plan within a budget of memory is a small integer programme.

Source: Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU" (Fuyou, 2024); its model, solved exactly instead of by a sweep.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest
from moe_runtime.errors import MoERuntimeError
from moe_runtime.lab.programme import Programme
from moe_runtime.memory.reads import Monitor, Priority, ReadQueue, Transfer
from moe_runtime.memory.source import aligned_bytes, host_view
from moe_runtime.training.offload.disk import RecordFile

ActivationChoice = Literal["keep", "recompute", "swap"]

_SOLVER_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """Measured of one layer: bytes that could be computed again, and the seconds that takes."""

    num_bytes: int
    recompute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpeeds:
    """Measured of a step and of the disk.

    Attributes:
        forward_s, backward_s: seconds of computation, nothing computed again.
        forward_disk_s, backward_disk_s: seconds that experts keep the disk busy.
        swaps: whether there is a disk to swap to.
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
    """The choice for each layer with the least predicted time within a budget of kept activations
    and buffers."""
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
    # what is neither kept nor swapped is computed again
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
    # the solver's tolerance is a share of the budget: a byte too much is too much
    fits = memory_bytes(layers, choices, staging_bytes) <= budget_bytes
    return choices if fits else everything


SLOT_BYTES = 2**20
"""Tensors are cut into slots of this size; smaller ones are not worth a transfer."""


class Swapped:
    """A tensor that was packed; its slots are free again when nothing refers to it."""

    def __init__(self, tensor: Tensor, slots: list[int], release: Callable[[list[int]], None]):
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.num_bytes = tensor.numel() * tensor.element_size()
        self.slots = slots
        self.buffer: Tensor | None = None
        self.is_written = False
        self.is_read = False
        weakref.finalize(self, release, slots).atexit = False


class ActivationSwap:
    """Packs and unpacks tensors through a file.

    Args:
        folder: for the file, which is removed at the end.
        direct: go past the page cache where possible.
        buffer_bytes: of tensors on their way, in either direction.
        smallest_bytes: smaller tensors stay as they are.
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
        self._file = RecordFile(folder / "activations.scratch", SLOT_BYTES, 0, direct=direct)
        with contextlib.ExitStack() as opened:
            opened.callback(self._remove)
            self._queue = ReadQueue(io_threads)
            opened.pop_all()
        self._changed = Monitor()
        self.buffer_bytes = buffer_bytes
        self._smallest_bytes = smallest_bytes
        self._writing_bytes = self._reading_bytes = 0
        self._stack: list[weakref.ref[Swapped]] = []
        self._failure: MoERuntimeError | None = None
        self.written_bytes = self.read_bytes = 0

    def pack(self, tensor: Tensor) -> Tensor | Swapped:
        """Begins to write a tensor; small ones are given back."""
        size = tensor.numel() * tensor.element_size()
        if size < self._smallest_bytes:
            return tensor
        num_slots = -(-size // SLOT_BYTES)
        with self._changed:
            self._wait_for(lambda: self._writing_bytes + size <= self.buffer_bytes, size)
            held = Swapped(tensor, [self._file.take() for _ in range(num_slots)], self._release)
            self._writing_bytes += num_slots * SLOT_BYTES
            self._stack = [ref for ref in self._stack if ref() is not None]
            self._stack.append(weakref.ref(held))
        held.buffer = aligned_bytes(num_slots * SLOT_BYTES)
        held.buffer[:size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._move(held, self._file.write, Priority.READAHEAD, partial(self._write_done, held))
        return held

    def unpack(self, held: Tensor | Swapped) -> Tensor:
        if isinstance(held, Tensor):
            return held
        with self._changed:
            self._begin_read(held, Priority.DEMAND)
            self._read_ahead(held)
            self._wait_for(lambda: held.buffer is not None and held.is_read, 0)
            buffer = held.buffer
            assert buffer is not None
        flat = buffer[: held.num_bytes].view(held.dtype).view(held.shape)
        return flat if held.device.type == "cpu" else flat.to(held.device)

    def measure(self) -> tuple[float, float]:
        tensor = torch.zeros(16 * SLOT_BYTES, dtype=torch.uint8)
        started = time.perf_counter()
        held = self.pack(tensor)
        with self._changed:
            self._wait_for(lambda: self._writing_bytes == 0, 0)
        written = time.perf_counter()
        self.unpack(held)
        ended = time.perf_counter()
        size = tensor.numel()
        return size / max(written - started, 1e-9), size / max(ended - written, 1e-9)

    def close(self) -> None:
        self._queue.close()
        self._remove()

    def _remove(self) -> None:
        self._file.close()
        self._file.path.unlink(missing_ok=True)

    def _move(
        self,
        held: Swapped,
        move: Callable[[int, memoryview], int],
        priority: Priority,
        done: Callable[[Transfer], None],
    ) -> None:
        assert held.buffer is not None
        view = host_view(held.buffer)
        blocks = [
            partial(move, slot * SLOT_BYTES, view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES])
            for i, slot in enumerate(held.slots)
        ]
        self._queue.submit(blocks, Transfer(priority, done))

    def _write_done(self, held: Swapped, write: Transfer) -> None:
        with self._changed:
            self._failure = self._failure or write.error
            size = len(held.slots) * SLOT_BYTES
            self._writing_bytes -= size
            self.written_bytes += size
            held.is_written = True
            # what is wanted already is taken from memory
            if not held.is_read:
                held.buffer = None
            self._changed.notify_all()

    def _read_done(self, held: Swapped, read: Transfer) -> None:
        with self._changed:
            self._failure = self._failure or read.error
            size = len(held.slots) * SLOT_BYTES
            self._reading_bytes -= size
            self.read_bytes += size
            held.is_read = True
            self._changed.notify_all()

    # What follows is called with the lock held.

    def _begin_read(self, held: Swapped, priority: Priority) -> None:
        if held.buffer is not None:
            held.is_read = held.is_read or not held.is_written
            return
        size = len(held.slots) * SLOT_BYTES
        held.buffer = aligned_bytes(size)
        self._reading_bytes += size
        self._move(held, self._file.fetch, priority, partial(self._read_done, held))

    def _read_ahead(self, held: Swapped) -> None:
        """Begins to read what was packed before a tensor, as far as the buffers go."""
        alive = [x for ref in self._stack if (x := ref()) is not None]
        before = alive[: alive.index(held)] if held in alive else []
        for earlier in reversed(before):
            size = len(earlier.slots) * SLOT_BYTES
            ready = sum(len(x.slots) * SLOT_BYTES for x in before if x.buffer is not None)
            if ready + size > self.buffer_bytes:
                return
            self._begin_read(earlier, Priority.READAHEAD)

    def _release(self, slots: list[int]) -> None:
        with self._changed:
            for slot in slots:
                self._file.drop(slot)

    def _wait_for(self, is_done: Callable[[], bool], size: int) -> None:
        # a tensor larger than the buffers goes alone
        while self._failure is None and not is_done() and not (size and not self._writing_bytes):
            self._changed.wait()
        if self._failure is not None:
            raise self._failure


Activations = Literal["model", "keep", "recompute", "swap", "auto"]


class Pass(NamedTuple):
    """What one pass through a layer took.

    Attributes:
        saved_bytes: what the backward pass needs and could compute again.
        recompute_share: share of the forward pass' computation that this would be.
    """

    seconds: float
    saved_bytes: int
    recompute_share: float
    read_bytes: int
    written_bytes: int


class ActivationPolicy:
    """Keeps, recomputes or swaps, layer by layer.

    Args:
        kind: `model` does as each layer says, `auto` recomputes in the first step, measures it, and
            then follows the plan with the least predicted time; the others hold for all layers.
        recomputes: what each layer says.
        swap: where swapped tensors go; None if there is no disk.
        budget_bytes: for what `auto` keeps, the swap's buffers included.
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

    def recomputes(self, layer: int) -> bool:
        return self.choices[layer] == "recompute"

    def saving(self, layer: int) -> AbstractContextManager[object]:
        """Surrounds the forward pass of a layer, whose tensors autograd saves."""
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
        by_layer = (measured["forward"].get(n, ()) for n in range(len(self.choices)))
        layers = [
            LayerActivations(
                num_bytes=sum(x.saved_bytes for x in passes),
                recompute_s=sum(x.seconds * x.recompute_share for x in passes),
            )
            for passes in by_layer
        ]
        write_speed, read_speed = (1.0, 1.0) if self._swap is None else self._swap.measure()
        forward, backward = (
            [x for passes in side.values() for x in passes] for side in measured.values()
        )
        again_s = sum(layer.recompute_s for layer in layers)
        speeds = StepSpeeds(
            forward_s=sum(x.seconds for x in forward),
            backward_s=max(0.0, sum(x.seconds for x in backward) - again_s),
            forward_disk_s=_disk_seconds(forward, read_speed, write_speed),
            backward_disk_s=_disk_seconds(backward, read_speed, write_speed),
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


def _disk_seconds(passes: Sequence[Pass], read_speed: float, write_speed: float) -> float:
    return sum(x.read_bytes / read_speed + x.written_bytes / write_speed for x in passes)
