"""Experts of a checkpoint as the bytes of a packed one, each read, coded and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class ExpertPacker:
    """Experts read and packed one after another, the next one read meanwhile."""

    def __init__(
        self,
        experts: ExpertMap,
        forms: Sequence[Sequence[MatrixForm]],
        code: Code,
        source: ExpertSource,
        pool: ThreadPoolExecutor,
    ) -> None:
        self._experts = experts
        self._forms = forms
        self._code: Code = code
        self._source = source
        self._pool = pool

    def of(self, keys: Sequence[ExpertKey]) -> Iterator[tuple[Tensor, list[int]]]:
        """The bytes of each expert, and the rooms of its escapes."""
        slots = [aligned_bytes(self._experts.slot_bytes) for _ in range(2)]
        with ThreadPoolExecutor(1) as reader:
            reading: Future[None] = reader.submit(self._source.read, {keys[0]: slots[0]})
            for number, key in enumerate(keys):
                reading.result()
                if number + 1 < len(keys):
                    following = {keys[number + 1]: slots[(number + 1) % 2]}
                    reading = reader.submit(self._source.read, following)
                views = self._experts.layouts[key].views(slots[number % 2])
                yield self._packed(key.layer, views)

    def _packed(self, layer: int, views: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        forms = self._forms[layer]
        coded = zip(forms, self._pool.map(self._coded, forms, views), strict=True)
        found = {form.name: matrix for form, matrix in coded if matrix is not None}
        rooms = [_room(matrix) for matrix in found.values()]
        parts, num_bytes = lay_out_parts(forms, rooms, self._code)
        content = aligned_bytes(num_bytes)
        plain = dict(zip((form.name for form in forms), views, strict=True))
        for part in parts:
            into = content[part.offset : part.offset + part.num_bytes].view(part.dtype)
            matrix, _, kind = part.name.partition(".")
            if not kind:
                into.view(part.shape).copy_(plain[matrix])
                continue
            values = getattr(found[matrix], kind).flatten()
            into[: len(values)].copy_(values)
        return content, rooms

    def _coded(self, form: MatrixForm, view: Tensor) -> PlanesMatrix | None:
        if not form.is_coded(self._code):
            return None
        matrix = encode_planes(view if view.stride(-1) == 1 else view.contiguous())
        if not torch.equal(decode_planes(matrix).view(torch.int16), view.view(torch.int16)):
            raise CheckpointError(f"{form.name} does not come back from the lossless code")
        return matrix


def _room(matrix: PlanesMatrix) -> int:
    rows, cols = matrix.shape
    return aligned(len(matrix.escapes), aligned(max(1, rows * cols // _ROOM_SHARE), PART_ALIGNMENT))
