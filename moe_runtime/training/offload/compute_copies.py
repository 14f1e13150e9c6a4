"""Copies of experts' weights where products are computed, and the links that carry them.

Records hold fp32 weights in host memory, pinned where a device computes. If the device or the dtype
of the products differs, a copy of the weights crosses a link in the products' dtype, and the
gradient crosses back. Some copies stay from one pass to the next until their expert's weights
change. No copy changes a bit.

On a device, the next expert's weights cross while one expert is computed, and the last one's
gradients are added to its record. Nothing is read, written or released before its event.

Sources: Ren et al., "ZeRO-Offload" (2021) for the parts that cross; Hecate (2025) for the choice of
copies: the experts used most, chosen again as loads drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.lab.record_tiers import UseCounts, spread
from moe_runtime.memory.device.cuda_device import CudaDevice, Event
from moe_runtime.memory.device.device_layout import ALIGNMENT
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.source import Slab, aligned_bytes
from moe_runtime.types import ExpertKey

_MOST_TENSORS = 4
"""Of an expert: two matrices and their biases."""

_IN_TURN = 2
"""Buffers of each kind: one is in use while the other is filled or emptied."""

DEVICE_BUFFERS = 2 * _IN_TURN + 1
"""On the device: weights, gradients that cross, and one micro-batch's gradients to be summed."""

HOST_BUFFERS = 2 * _IN_TURN
"""In pinned host memory: weights and gradients in the dtype of the products."""


@dataclass(slots=True)
class LinkTraffic:
    """Bytes between experts' records and the device or dtype of the products.

    Attributes:
        to_device_bytes: weights.
        from_device_bytes: gradients.
        kept_bytes: weights that did not cross because a copy had stayed.
    """

    to_device_bytes: int = 0
    from_device_bytes: int = 0
    kept_bytes: int = 0


class HostLink:
    """Products on the CPU: copies differ in dtype only, and nothing is asynchronous."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[object, ...], list[Tensor]] = {}

    def room(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
        """Bytes of a copy that stays."""
        return sum(tensor.numel() for tensor in tensors) * dtype.itemsize

    def keep(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Memory for a copy that stays."""
        return [torch.empty(tensor.shape, dtype=dtype) for tensor in tensors]

    def bring(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Copies an expert's weights into memory of `keep`, or into memory of their own."""
        copies = self.keep(tensors, dtype) if into is None else list(into)
        add_up(copies, tensors, adds=False)
        return copies

    def gradients(
        self, like: Sequence[Tensor], dtype: torch.dtype, *, is_part: bool = False
    ) -> list[Tensor]:
        """Memory for an expert's gradients; `is_part`: of one micro-batch, to be summed."""
        shapes = tuple(tensor.shape for tensor in like)
        if self._scratch and next(iter(self._scratch))[0] != shapes:
            self._scratch.clear()  # keep scratch memory of one kind of expert only
        place = (shapes, dtype, is_part)
        if place not in self._scratch:
            self._scratch[place] = self.keep(like, dtype)
        return self._scratch[place]

    def send_back(self, found: Sequence[Tensor], targets: Sequence[Tensor], *, adds: bool) -> None:
        """Adds gradients to those of the record, or replaces them."""
        add_up(targets, found, adds=adds)

    def release(self, action: Callable[[], object]) -> None:
        """Ends an expert's turn: `action` releases its record once nothing uses it."""
        action()

    def finish(self) -> None:
        """Waits for everything that was queued."""

    def abandon(self) -> None:
        """After an exception: nothing more is copied, and no record is released."""


class _Job(NamedTuple):
    """Work of the host after an event of the device.

    Attributes:
        event: None for at once.
        crosses: it empties a buffer of gradients.
        ends: it is an expert's last.
    """

    event: Event | None
    action: Callable[[], object]
    crosses: bool
    ends: bool


class _Buffer:
    """Memory of one expert's tensors, and the events after which it may be overwritten."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.after: Sequence[Any] = ()


class DeviceLink(HostLink):
    """Both directions between records and a device, for one expert after another.

    Args:
        section_bytes: of the largest expert's parameters in the dtype of its record.
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

    def room(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
        return sum(_aligned(tensor.numel() * dtype.itemsize) for tensor in tensors)

    def keep(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return list(_carve(self.device.allocate(self.room(tensors, dtype)), tensors, dtype))

    def bring(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Queues the copy of an expert's weights; the current stream waits for it.

        Args:
            tensors: in the record, which must not change before `release` calls its action.
            into: memory of `keep`; None for a buffer that `release` frees.
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
            add_up(sources, tensors, adds=False)
        parts = [(_bytes(a), _bytes(b)) for a, b in zip(sources, into, strict=True)]
        event = self.device.copy(parts, after, Priority.DEMAND)
        if staged is None:
            self._borrowed = event
        else:
            staged.after = [event]
        self.device.wait_here(event)
        return list(into)

    def gradients(
        self, like: Sequence[Tensor], dtype: torch.dtype, *, is_part: bool = False
    ) -> list[Tensor]:
        """Memory on the device for gradients; all but the last ones have crossed."""
        buffer = self._part
        if not is_part:
            while self._num_crossing >= _IN_TURN:
                self._do_first()
            self._gradients.rotate()
            buffer = self._gradients[0]
        return list(_carve(buffer.memory, like, dtype))

    def send_back(self, found: Sequence[Tensor], targets: Sequence[Tensor], *, adds: bool) -> None:
        """Queues the copy of gradients; the record has them when `release` calls its action."""
        arrivals = list(targets)
        is_direct = not adds and found[0].dtype == targets[0].dtype
        if not is_direct:
            self._staged_gradients.rotate()
            memory = self._staged_gradients[0].memory
            arrivals = list(_carve(memory, targets, found[0].dtype))

        def take() -> None:
            if not is_direct:
                add_up(targets, arrivals, adds=adds)

        parts = [(_bytes(a), _bytes(b)) for a, b in zip(found, arrivals, strict=True)]
        event = self.device.copy_back(parts)
        self._jobs.append(_Job(event, take, crosses=True, ends=False))
        self._num_crossing += 1

    def release(self, action: Callable[[], object]) -> None:
        """Ends an expert's turn once all its work is queued; its buffer may be filled after that.

        Args:
            action: releases the record; called when nothing uses it, at the end of the next
                expert's turn at the latest.
        """
        self._vacate()
        borrowed, self._borrowed = self._borrowed, None
        self._jobs.append(_Job(borrowed, action, crosses=False, ends=True))
        self._num_ends += 1
        while self._num_ends > 1:
            self._do_first()

    def finish(self) -> None:
        while self._jobs:
            self._do_first()

    def abandon(self) -> None:
        self.device.drain()
        self._jobs.clear()
        self._num_crossing = self._num_ends = 0
        self._borrowed = None
        self._vacate()

    def _vacate(self) -> None:
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
    """Bytes of a buffer for an expert with parameters of `section_bytes`."""
    unit = 4096
    return -(-(section_bytes + _MOST_TENSORS * ALIGNMENT) // unit) * unit


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _carve(memory: Tensor, like: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors of the given shapes, one after another in memory."""
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


@dataclass(slots=True)
class _Copy:
    step: int
    tensors: list[Tensor]
    num_bytes: int


class ComputeCopies:
    """Copies of experts' weights on the device, or in the dtype of products.

    Args:
        keys: all experts, in order.
        num_bytes: for copies that stay from one pass to the next; 0 keeps none.
        link: to the device that computes; None for the CPU.
    """

    def __init__(
        self, keys: Iterable[ExpertKey], num_bytes: int = 0, link: DeviceLink | None = None
    ) -> None:
        self.link = link or HostLink()
        self.traffic = LinkTraffic()
        self._keys = list(keys)
        self._num_bytes = num_bytes
        self.kept_bytes = 0
        self._tiers: set[ExpertKey] | None = None
        self._copies: dict[ExpertKey, _Copy] = {}
        self._uses = UseCounts(self._keys)
        self._used: set[ExpertKey] = set()

    def weights(
        self, key: ExpertKey, step: int, tensors: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """An expert's weights on the device and in the dtype of `like`.

        Args:
            step: of the weights; a kept copy of another step is refreshed.
            tensors: in the record; returned where nothing has to cross.
        """
        if not self._num_bytes and not crosses(tensors[0], like):
            return list(tensors)
        self._used.add(key)
        size = sum(tensor.numel() for tensor in tensors) * like.element_size()
        kept = self._copies.get(key)
        if kept is not None and crosses(kept.tensors[0], like):
            self._drop(key)
            kept = None
        if kept is not None and kept.step == step:
            self.traffic.kept_bytes += size
            return kept.tensors
        self.traffic.to_device_bytes += size
        if kept is None:
            room = self.link.room(tensors, like.dtype)
            if not self._may_stay(key, room):
                return self.link.bring(tensors, like.dtype)
            kept = _Copy(step, self.link.keep(tensors, like.dtype), room)
        self.link.bring(tensors, like.dtype, kept.tensors)
        kept.step = step
        if key not in self._copies:
            self._copies[key] = kept
            self.kept_bytes += kept.num_bytes
        return kept.tensors

    def send_back(self, found: Sequence[Tensor], targets: Sequence[Tensor], *, adds: bool) -> None:
        """Sends gradients to their expert's record, and counts the bytes."""
        sizes = (gradient.numel() * gradient.element_size() for gradient in found)
        self.traffic.from_device_bytes += sum(sizes)
        self.link.send_back(found, targets, adds=adds)

    def after_step(self) -> None:
        """Counts uses; the most used experts take the room of the least used."""
        tiers = self._tiers
        if tiers is None:
            return
        for arriving, leaving in self._uses.after_step(self._used, tiers.__contains__):
            tiers.add(arriving)
            tiers.remove(leaving)
            self._drop(leaving)
        self._used.clear()

    def forget(self) -> None:
        """Drops all copies, because weights were rolled back or loaded."""
        self.link.abandon()
        self._copies.clear()
        self.kept_bytes = 0
        self._used.clear()

    def _drop(self, key: ExpertKey) -> None:
        if (copy := self._copies.pop(key, None)) is not None:
            self.kept_bytes -= copy.num_bytes

    def _may_stay(self, key: ExpertKey, size: int) -> bool:
        if self._tiers is None:
            count = min(len(self._keys), self._num_bytes // max(1, size))
            self._tiers = set(spread(self._keys, count))
        return key in self._tiers and self.kept_bytes + size <= self._num_bytes


def crosses(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor has another device or dtype than the products."""
    return tensor.dtype != like.dtype or tensor.device != like.device
