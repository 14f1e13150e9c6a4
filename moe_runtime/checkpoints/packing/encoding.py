"""Experts of a checkpoint, read one after another, and as the bytes of a packed one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.packing.manifest import (
    PART_ALIGNMENT,
    Code,
    MatrixForm,
    aligned,
    lay_out_parts,
)
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.lossless import PlanesMatrix, decode_planes, encode_planes
from moe_runtime.memory.slab import aligned_bytes
from moe_runtime.memory.source import ExpertSource
from moe_runtime.types import ExpertKey

_ROOM_SHARE = 1024
"""Escapes get room in steps of this part of a matrix, so that few forms of experts occur."""


def read_ahead(
    source: ExpertSource, experts: ExpertMap, keys: Sequence[ExpertKey]
) -> Iterator[tuple[ExpertKey, dict[str, Tensor]]]:
    """Each expert's tensors by the names of `ExpertMap.matrices`, the next one read meanwhile.

    They are views, which hold until the next expert is asked for.
    """
    slots = [aligned_bytes(experts.slot_bytes) for _ in range(2)]
    with ThreadPoolExecutor(1) as reader:
        reading: Future[None] = reader.submit(source.read, {keys[0]: slots[0]})
        for number, key in enumerate(keys):
            reading.result()
            if number + 1 < len(keys):
                following = {keys[number + 1]: slots[(number + 1) % 2]}
                reading = reader.submit(source.read, following)
            views = experts.layouts[key].views(slots[number % 2])
            yield key, dict(zip(experts.matrices[key.layer], views, strict=True))


def pack_expert(
    forms: Sequence[MatrixForm], views: Mapping[str, Tensor], code: Code, pool: ThreadPoolExecutor
) -> tuple[Tensor, list[int]]:
    """The bytes of an expert, and the rooms of its escapes.

    Raises:
        CheckpointError: a matrix does not come back from the code.
    """
    coded = [form for form in forms if form.is_coded(code)]
    matrices = [*pool.map(_coded, coded, (views[form.name] for form in coded))]
    found = {form.name: matrix for form, matrix in zip(coded, matrices, strict=True)}
    rooms = [_room(matrix) for matrix in matrices]
    parts, num_bytes = lay_out_parts(forms, rooms, code)
    content = aligned_bytes(num_bytes)
    for part in parts:
        into = content[part.offset : part.offset + part.num_bytes].view(part.dtype)
        matrix, _, kind = part.name.partition(".")
        if not kind:
            into.view(part.shape).copy_(views[matrix])
            continue
        values = getattr(found[matrix], kind).flatten()
        into[: len(values)].copy_(values)
    return content, rooms


def _coded(form: MatrixForm, view: Tensor) -> PlanesMatrix:
    matrix = encode_planes(view if view.stride(-1) == 1 else view.contiguous())
    if not torch.equal(decode_planes(matrix).view(torch.int16), view.view(torch.int16)):
        raise CheckpointError(f"{form.name} does not come back from the lossless code")
    return matrix


def _room(matrix: PlanesMatrix) -> int:
    rows, cols = matrix.shape
    return aligned(len(matrix.escapes), aligned(max(1, rows * cols // _ROOM_SHARE), PART_ALIGNMENT))
