"""The layout of an expert in a slot of a device, the same for every expert of a layer.

In host memory an expert has the layout of its file. On a device all experts of a layer have one
layout, so one kernel takes the whole slab as a stack and finds each expert by its slot.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from moe_runtime.memory.source import ExpertLayout, Extent

ALIGNMENT = 256
"""Bytes: tensors begin at multiples of it, so that kernels load 16 bytes at once."""

_FOLLOWS = {"up": "gate", "up_bias": "gate_bias"}
"""Tensors directly after others, so that the two are one tensor of the stack."""


class CopyPart(NamedTuple):
    """Bytes of one copy: offsets in the host's slot and in the device's slot."""

    source: int
    place: int
    num_bytes: int


class _Run(NamedTuple):
    """Tensors whose bytes are interleaved, for example gate and up row by row."""

    first: int
    end: int
    members: tuple[int, ...]


def lay_out_on_device(layout: ExpertLayout, names: Sequence[str]) -> ExpertLayout:
    """The same tensors one after the other, ``down`` first as in most files: then an expert is one
    copy."""
    places, end, last = [0] * len(names), 0, ""
    for run in sorted(
        _runs(layout), key=lambda run: (names[run.members[0]] != "down", run.members)
    ):
        name = names[run.members[0]]
        if _FOLLOWS.get(name) != last:
            end = _aligned(end)
        for member in run.members:
            places[member] = end + layout.slot_offsets[member] - run.first
        end += run.end - run.first
        last = names[run.members[-1]]
    extent = Extent(layout.extents[0].file, 0, _aligned(end), end, 0)
    return ExpertLayout((extent,), layout.tensors, tuple(places), tuple(places), 0)


def copy_parts(layout: ExpertLayout, on_device: ExpertLayout) -> tuple[CopyPart, ...]:
    """The copies that bring an expert to a device, as few as possible."""
    found: list[CopyPart] = []
    for run in _runs(layout):
        place = on_device.slot_offsets[run.members[0]]
        place -= layout.slot_offsets[run.members[0]] - run.first
        if found and found[-1].source + found[-1].num_bytes == run.first:
            before = found[-1]
            if before.place + before.num_bytes == place:
                found[-1] = before._replace(num_bytes=run.end - before.source)
                continue
        found.append(CopyPart(run.first, place, run.end - run.first))
    return tuple(found)


def parts_alike(experts: Sequence[Sequence[CopyPart]]) -> list[list[CopyPart]] | None:
    """The copies of several experts, cut so that all fill the same places of a slot; None if their
    bytes differ."""
    cuts = sorted({c for parts in experts for _, at, size in parts for c in (at, at + size)})
    found: list[list[CopyPart]] = []
    for parts in experts:
        cut_parts: list[CopyPart] = []
        for source, place, num_bytes in sorted(parts, key=lambda part: part.place):
            inside = cuts[bisect_left(cuts, place) : bisect_right(cuts, place + num_bytes)]
            cut_parts += [
                CopyPart(source + first - place, first, end - first)
                for first, end in pairwise(inside)
            ]
        found.append(cut_parts)
    filled = {tuple((part.place, part.num_bytes) for part in parts) for parts in found}
    return found if len(filled) == 1 else None


class SlabViews(NamedTuple):
    """The slots of a slab as stacks of the experts' tensors, logically ``[S, rows, columns]``.

    Attributes:
        gate_up: ``[S, 2F, D]``, or ``[S, F, D]`` without a gate.
        down: ``[S, D, F]``.
        gate_up_bias: ``[S, 2F]``, ``[S, F]`` or None.
        down_bias: ``[S, D]`` or None.
        is_concatenated: the gate's rows come before those of up; otherwise they alternate.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    has_gate: bool
    is_concatenated: bool


def stack_slots(
    memory: Tensor, slot_bytes: int, layout: ExpertLayout, names: Sequence[str]
) -> SlabViews | None:
    """All slots as stacks; None if tensors are quantised, or gate and up are not one tensor."""
    num_slots = len(memory) // slot_bytes
    if any("." in name for name in names) or len({t.dtype for t in layout.tensors}) != 1:
        return None
    base = memory.view(layout.tensors[0].dtype)
    stride = slot_bytes // base.element_size()

    def stack(name: str, *, twice: int = 0) -> Tensor:
        """A tensor of all slots; a second one begins ``twice`` elements later."""
        member = names.index(name)
        tensor = layout.tensors[member]
        shape, strides = [*tensor.shape], [*tensor.stride]
        if twice:
            shape[0], strides[0] = 2 * shape[0], min(strides[0], twice)
        start = layout.slot_offsets[member] // base.element_size() + base.storage_offset()
        return base.as_strided((num_slots, *shape), (stride, *strides), start)

    found: dict[str, Tensor | None] = {}
    is_concatenated = True
    for first, second in (("gate", "up"), ("gate_bias", "up_bias")):
        if first not in names:
            found[first] = stack(second) if second in names else None
            continue
        gate, up = (layout.tensors[names.index(name)] for name in (first, second))
        starts = (layout.slot_offsets[names.index(name)] for name in (first, second))
        distance = -int.__sub__(*starts) // base.element_size()
        is_behind = distance == gate.shape[0] * gate.stride[0]
        is_between = 2 * distance == gate.stride[0]
        if gate.shape != up.shape or gate.stride != up.stride or not (is_behind or is_between):
            return None
        if first == "gate":
            is_concatenated = is_behind
        elif is_concatenated != is_behind:
            return None
        found[first] = stack(first, twice=distance)
    down_bias = stack("down_bias") if "down_bias" in names else None
    gate_up = found["gate"]
    assert gate_up is not None, "an expert has up"
    return SlabViews(
        gate_up, stack("down"), found["gate_bias"], down_bias, "gate" in names, is_concatenated
    )


def _runs(layout: ExpertLayout) -> list[_Run]:
    """In the order of their first tensors."""
    spans = sorted(
        (start, start + _span_bytes(layout, member), member)
        for member, start in enumerate(layout.slot_offsets)
    )
    runs: list[_Run] = []
    for first, end, member in spans:
        if runs and first < runs[-1].end:
            before = runs[-1]
            members = tuple(sorted((*before.members, member)))
            runs[-1] = _Run(before.first, max(before.end, end), members)
        else:
            runs.append(_Run(first, end, (member,)))
    assert all(one.end <= other.first for one, other in pairwise(runs))
    return runs


def _span_bytes(layout: ExpertLayout, member: int) -> int:
    """From the first element of a tensor in its slot to the end of the last one."""
    tensor = layout.tensors[member]
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True))
    return (last + 1) * tensor.dtype.itemsize


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
