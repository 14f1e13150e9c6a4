"""Where the bytes of one expert lie: in the checkpoint's files, and in a slot of memory.

An expert is read as a few extents, ranges of a file grown to whole blocks for direct I/O, which lie
one after the other in a slot. Its tensors are views into the slot. No byte is moved after the read,
except quantised numbers whose order no product reads.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from moe_runtime.kernels.quantized.storage_order import StorageOrder

BLOCK_BYTES = 4096
"""Alignment of file offsets, lengths and addresses that direct I/O accepts everywhere."""

MERGE_GAP_BYTES = 64 * 1024
"""Ranges of a file closer than this are read as one."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor of an expert, as a strided view over bytes of a checkpoint file.

    Attributes:
        offset: absolute byte offset of the view's first element.
        span_bytes: bytes from the first element to the end of the last one.
        stride: in elements.
        order: how the numbers lie in the file, if not as the view has them.
    """

    file: Path
    offset: int
    span_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    order: "StorageOrder | None" = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers in the file, without padding of rows."""
        if self.order is not None and self.order.moves:
            return self.span_bytes
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, stored: torch.Tensor) -> torch.Tensor:
        """The numbers, given the bytes of the range (``uint8``)."""
        if self.order is not None:
            from moe_runtime.kernels.quantized.storage_order import put_in_order

            stored = put_in_order(self.order, stored)
        return stored.view(self.dtype).as_strided(self.shape, self.stride)

    @classmethod
    def of(
        cls,
        file: Path,
        name: str,
        offset: int,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> "TensorRange":
        """A view of elements of a file; ``name`` is that of the tensor, for the message. Raises
        CheckpointError: the offset is no multiple of the elements' size."""
        if offset % dtype.itemsize:
            raise CheckpointError(
                f"{file}: {name} starts at byte {offset}, which is no multiple of its "
                f"{dtype.itemsize}-byte elements; save the checkpoint again with safetensors"
            )
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        return cls(file, offset, (last + 1) * dtype.itemsize, dtype, shape, stride)


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of whole blocks of a file and its place in the slot.

    Attributes:
        offset: in the file, a multiple of the block size.
        num_bytes: a multiple of the block size; the file may end before that.
        needed_bytes: from ``offset`` to the end of the last tensor; all of them must arrive.
    """

    file: Path
    offset: int
    num_bytes: int
    needed_bytes: int
    slot_offset: int


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """What to read for one expert, and where its tensors are afterwards.

    Attributes:
        extents: the reads that fill a slot, in slot order.
        slot_offsets: byte offset in the slot of each of ``tensors``.
        read_offsets: where each was read to, before some are put in order.
        more_bytes: of the slot behind the extents, for tensors that are put in order.
    """

    extents: tuple[Extent, ...]
    tensors: tuple[TensorRange, ...]
    slot_offsets: tuple[int, ...]
    read_offsets: tuple[int, ...]
    more_bytes: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that can hold this expert."""
        last = self.extents[-1]
        return last.slot_offset + last.num_bytes + self.more_bytes

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the expert in the files, without alignment."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def steps(self) -> list[tuple["StorageOrder", int, int]]:
        """What is put in order after the read: order, from where, and to where in the slot."""
        places = zip(self.tensors, self.read_offsets, self.slot_offsets, strict=True)
        return [(t.order, source, place) for t, source, place in places if t.order is not None]

    @property
    def form(self) -> tuple[object, ...]:
        """Experts of one form have the same views of a slot."""
        return self.slot_offsets, tuple((t.dtype, t.shape, t.stride) for t in self.tensors)

    def views(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """The expert's tensors as views into a filled slot (``uint8``, at least ``slot_bytes``)."""
        views = []
        typed: dict[torch.dtype, torch.Tensor] = {}
        for tensor, start in zip(self.tensors, self.slot_offsets, strict=True):
            assert start + tensor.span_bytes <= slot.numel()
            if tensor.dtype not in typed:
                typed[tensor.dtype] = slot[: self.slot_bytes].view(tensor.dtype)
            base = typed[tensor.dtype]
            place = base.storage_offset() + start // tensor.dtype.itemsize
            views.append(base.as_strided(tensor.shape, tensor.stride, place))
        return views


def lay_out(tensors: Sequence[TensorRange]) -> ExpertLayout:
    """Plans the reads of one expert: neighbours share a read, and each read takes whole blocks."""
    extents: list[Extent] = []
    slot_offset = 0
    for file, start, end in _merge_ranges(tensors):
        offset = start // BLOCK_BYTES * BLOCK_BYTES
        num_bytes = -(-(end - offset) // BLOCK_BYTES) * BLOCK_BYTES
        extents.append(Extent(file, offset, num_bytes, end - offset, slot_offset))
        slot_offset += num_bytes
    read_at = tuple(_slot_offset(tensor, extents) for tensor in tensors)
    placed, end = [*read_at], slot_offset
    for number, tensor in enumerate(tensors):
        if tensor.order is not None and tensor.order.moves:
            placed[number] = end
            end += tensor.order.result_bytes
    more_bytes = -(-(end - slot_offset) // BLOCK_BYTES) * BLOCK_BYTES
    return ExpertLayout(tuple(extents), tuple(tensors), tuple(placed), read_at, more_bytes)


def _merge_ranges(tensors: Iterable[TensorRange]) -> list[tuple[Path, int, int]]:
    merged: list[tuple[Path, int, int]] = []
    ranges = sorted((t.file, t.offset, t.offset + t.span_bytes) for t in tensors)
    for file, start, end in ranges:
        if merged and merged[-1][0] == file and start <= merged[-1][2] + MERGE_GAP_BYTES:
            merged[-1] = (file, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((file, start, end))
    return merged


def _slot_offset(tensor: TensorRange, extents: Iterable[Extent]) -> int:
    for extent in extents:
        begin = tensor.offset - extent.offset
        if extent.file == tensor.file and 0 <= begin < extent.needed_bytes:
            return extent.slot_offset + begin
    raise AssertionError(f"no extent covers {tensor}")
