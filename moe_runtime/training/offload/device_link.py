"""Experts' weights on their way to where products are computed, and gradients on the way back.

Records hold fp32 weights in pinned host memory. Where products are computed on a device, or in
another type, a copy crosses the link in the type of the products, and the gradient crosses back.
While the device computes with one expert, the next one's weights cross, and the gradients of the
one before are added to its record. Nothing is read, written or released before its event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.memory.device.cuda_device import CudaDevice, Event
from moe_runtime.memory.device.device_layout import ALIGNMENT
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.source import Slab, aligned_bytes

_MOST_TENSORS = 4
"""Of an expert: two matrices and their biases."""

_IN_TURN = 2
"""Buffers of each kind: one is computed with while the other is filled or emptied."""

DEVICE_BUFFERS = 2 * _IN_TURN + 1
"""On the device: weights, gradients that cross, and one of a micro-batch before it is summed."""

HOST_BUFFERS = 2 * _IN_TURN
"""In pinned host memory: weights and gradients in the type of the products."""


class _Job(NamedTuple):
    """What the host does once the device has come so far.

    Attributes:
        event: None for at once.
        crosses: whether it empties a buffer of gradients.
        ends: whether it is an expert's last.
    """

    event: Event | None
    action: Callable[[], object]
    crosses: bool
    ends: bool


class _Buffer:
    """Memory of one expert's tensors, and the events after which it may be written."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.after: Sequence[Any] = ()


class DeviceLink:
    """Both directions between records and a device, for one expert after another.

    An expert's weights are brought, work is queued with them, its gradients are sent back, and
    `release` ends its turn.

    Args:
        section_bytes: of the largest expert's parameters in the type of its record.
    """

    def __init__(self, device: CudaDevice, section_bytes: int, records: Slab) -> None:
        self.device = device
        device.pin(records.bytes, records.slot_bytes)
        size = buffer_bytes(section_bytes)

        def there() -> _Buffer:
            return _Buffer(device.allocate(size))

        def here() -> _Buffer:
            memory = aligned_bytes(size)
            device.pin(memory, size)
            return _Buffer(memory)

        self._weights = deque(there() for _ in range(_IN_TURN))
        self._gradients = deque(there() for _ in range(_IN_TURN))
        self._part = there()
        self._staged_weights = deque(here() for _ in range(_IN_TURN))
        self._staged_gradients = deque(here() for _ in range(_IN_TURN))
        self._in_use: _Buffer | None = None
        self._borrowed: Event | None = None
        self._jobs: deque[_Job] = deque()
        self._num_crossing = self._num_ends = 0

    def keep(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Memory on the device for a copy that stays."""
        return list(_carve(self.device.allocate(kept_bytes(tensors, dtype)), tensors, dtype))

    def bring(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Queues the copy of an expert's weights; the current stream goes on after it.

        Args:
            tensors: in the record, which must not change before `release` calls its action.
            into: memory of `keep`; a buffer that `release` frees if omitted.
        """
        self.device.compute_here()
        if into is None:
            self._weights.rotate()
            self._in_use = buffer = self._weights[0]
            into, after = list(_carve(buffer.memory, tensors, dtype)), buffer.after
        else:
            after = [event for part in into for event in self.device.vacate(_bytes(part))]
        sources, staged = list(tensors), None
        if dtype != tensors[0].dtype:
            self._staged_weights.rotate()
            staged = self._staged_weights[0]
            for event in staged.after:
                event.synchronize()
            sources = list(_carve(staged.memory, tensors, dtype))
            for source, tensor in zip(sources, tensors, strict=True):
                source.copy_(tensor)
        parts = [(_bytes(a), _bytes(b)) for a, b in zip(sources, into, strict=True)]
        event = self.device.copy(parts, after, Priority.DEMAND)
        if staged is None:
            self._borrowed = event
        else:
            staged.after = [event]
        self.device.wait_here(event)
        return list(into)

    def gradients(self, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Memory on the device for gradients that cross; the ones before the last have crossed."""
        while self._num_crossing >= _IN_TURN:
            self._do_first()
        self._gradients.rotate()
        return list(_carve(self._gradients[0].memory, like, dtype))

    def part(self, like: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Memory on the device for gradients of one micro-batch, which are summed there."""
        return list(_carve(self._part.memory, like, dtype))

    def send_back(self, found: Sequence[Tensor], targets: Sequence[Tensor], *, adds: bool) -> None:
        """Queues the way back of gradients; `targets` in the record have them when `release` calls
        its action."""
        arrivals = list(targets)
        is_direct = not adds and found[0].dtype == targets[0].dtype
        if not is_direct:
            self._staged_gradients.rotate()
            memory = self._staged_gradients[0].memory
            arrivals = list(_carve(memory, targets, found[0].dtype))

        def take() -> None:
            if is_direct:
                return
            add_up(targets, arrivals, adds=adds)

        parts = [(_bytes(a), _bytes(b)) for a, b in zip(found, arrivals, strict=True)]
        event = self.device.copy_back(parts)
        self._jobs.append(_Job(event, take, crosses=True, ends=False))
        self._num_crossing += 1

    def release(self, action: Callable[[], object]) -> None:
        """All work with an expert is queued: its buffer may be filled after that.

        Args:
            action: releases the record; called when nothing uses it, at the end of the next
                expert's turn at the latest.
        """
        if self._in_use is not None:
            self._in_use.after = self.device.vacate(self._in_use.memory)
            self._in_use = None
        borrowed, self._borrowed = self._borrowed, None
        self._jobs.append(_Job(borrowed, action, crosses=False, ends=True))
        self._num_ends += 1
        while self._num_ends > 1:
            self._do_first()

    def finish(self) -> None:
        while self._jobs:
            self._do_first()

    def abandon(self) -> None:
        """After an exception: nothing is copied any more, and no record is released."""
        self.device.drain()
        self._jobs.clear()
        self._num_crossing = self._num_ends = 0
        self._borrowed = None
        if self._in_use is not None:
            self._in_use.after = self.device.vacate(self._in_use.memory)
            self._in_use = None

    def _do_first(self) -> None:
        job = self._jobs[0]
        if job.event is not None:
            job.event.synchronize()
        self._jobs.popleft()
        self._num_crossing -= job.crosses
        self._num_ends -= job.ends
        job.action()


def buffer_bytes(section_bytes: int) -> int:
    unit = 4096
    return -(-(section_bytes + _MOST_TENSORS * ALIGNMENT) // unit) * unit


def kept_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(_aligned(tensor.numel() * dtype.itemsize) for tensor in tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _carve(memory: Tensor, like: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of the shapes of others, one after another in memory."""
    start = 0
    for tensor in like:
        size = tensor.numel() * dtype.itemsize
        yield memory[start : start + size].view(dtype).view(tensor.shape)
        start += _aligned(size)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def add_up(totals: Sequence[Tensor], parts: Sequence[Tensor], *, adds: bool) -> None:
    """Adds to the totals, or replaces them."""
    for total, part in zip(totals, parts, strict=True):
        total.add_(part) if adds else total.copy_(part)
