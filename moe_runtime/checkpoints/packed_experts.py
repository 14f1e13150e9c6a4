"""The format of packed checkpoints: ``packed_experts.json``, and the layout of an expert.

An expert is one tensor of bytes, ``experts.LAYER.EXPERT``, in files of experts only, so that one
read past the page cache fetches it. A large expert begins at a whole block. Its matrices follow
each other in the order of `MATRICES`. In the code `planes` a bf16 matrix has four parts
(`kernels.lossless.PlanesMatrix`); other tensors are unchanged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

import torch

from moe_runtime.checkpoints.expert_map import MATRICES, MatrixRows, expert_rows
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.checkpoints.strict_json import one_line, parse_object
from moe_runtime.errors import CheckpointError
from moe_runtime.files import read_bounded
from moe_runtime.kernels.lossless import PlanesMatrix
from moe_runtime.kernels.lossless.reference import (
    BOOK_SIZE,
    TAIL_BYTES,
    coded_row_bytes,
    num_groups,
)
from moe_runtime.memory.source import BLOCK_BYTES, TensorRange, lay_out
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.checkpoints.expert_map import ExpertMap

Code = Literal["planes", "none"]
CODES: tuple[Code, ...] = get_args(Code)
MANIFEST_NAME = "packed_experts.json"
VERSION = 1
MATRIX_ALIGNMENT, PART_ALIGNMENT = 64, 8
"""Alignment of matrices, so that vectors do not cross cache lines, and of their other parts."""
ALIGNED_RUN_BYTES = 1 << 20
"""Experts of this many bytes begin at whole blocks; for smaller ones the padding would be too
large."""
_MAX_BYTES = 256 << 20
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Part(NamedTuple):
    """A matrix or bias of each expert of a layer, or a part of its code, with its place."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0  # within an expert's bytes

    @property
    def num_bytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    def is_coded(self, code: Code) -> bool:
        """Whether the lossless code is used; it makes short rows longer."""
        if code == "none" or self.dtype != torch.bfloat16 or len(self.shape) != 2:
            return False
        return coded_row_bytes(self.shape[1]) < 2 * self.shape[1]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The experts of one module."""

    module: str
    matrices: tuple[Part, ...]  # the matrices of each expert, in the order of the parts
    rooms: list[tuple[int, ...]]  # for each expert the escape bytes of each coded matrix

    def parts(self, expert: int, code: Code) -> tuple[list[Part], int]:
        return lay_out_parts(self.matrices, self.rooms[expert], code)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``packed_experts.json``."""

    code: Code
    layers: tuple[PackedLayer, ...]  # experts modules in model order
    files: list[str]

    def to_json(self) -> str:
        layers = [
            {
                "module": layer.module,
                "matrices": [
                    [form.name, str(form.dtype).removeprefix("torch."), list(form.shape)]
                    for form in layer.matrices
                ],
                "rooms": layer.rooms,
            }
            for layer in self.layers
        ]
        values = {"version": VERSION, "code": self.code, "files": self.files, "layers": layers}
        return json.dumps(values) + "\n"


def tensor_name(layer: int, expert: int) -> str:
    """An expert's name in the files."""
    return f"experts.{layer}.{expert}"


def lay_out_parts(
    matrices: Sequence[Part], rooms: Sequence[int], code: Code
) -> tuple[list[Part], int]:
    """The parts of an expert, and the bytes of its run."""
    parts: list[Part] = []
    end, left = 0, iter(rooms)

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        alignment = MATRIX_ALIGNMENT if len(shape) == 2 else PART_ALIGNMENT
        parts.append(Part(name, dtype, shape, aligned(end, alignment)))
        end = parts[-1].offset + parts[-1].num_bytes

    for form in matrices:
        if not form.is_coded(code):
            add(form.name, form.dtype, form.shape)
            continue
        rows, cols = form.shape
        add(f"{form.name}.coded", torch.uint8, (rows, coded_row_bytes(cols)))
        add(f"{form.name}.starts", torch.int32, (num_groups(rows) + 1,))
        add(f"{form.name}.book", torch.uint8, (BOOK_SIZE,))
        add(f"{form.name}.escapes", torch.uint8, (next(left),))
    return parts, aligned(end, BLOCK_BYTES if end >= ALIGNED_RUN_BYTES else MATRIX_ALIGNMENT)


def aligned(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def read_manifest(folder: Path) -> Manifest:
    """Reads and checks ``packed_experts.json``."""
    file = folder / MANIFEST_NAME
    try:
        found = parse_object(read_bounded(file, max_bytes=_MAX_BYTES))
        version = found.get("version")
        if version != VERSION:
            raise ValueError(f"expected version {VERSION}, found {version!r}; pack it again")
        if found.get("code") not in CODES:
            raise ValueError(f"expected code {' or '.join(CODES)}, found {found.get('code')!r}")
        layers = [_layer(value, found["code"]) for value in _of(found.get("layers"), list)]
        files = [_of(name, str) for name in _of(found.get("files"), list)]
        return Manifest(found["code"], tuple(layers), files)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read: {one_line(str(error))}") from None


def _layer(value: Any, code: Code) -> PackedLayer:
    fields = _of(value, dict)
    matrices = tuple(_form(form) for form in _of(fields.get("matrices"), list))
    num_coded = sum(form.is_coded(code) for form in matrices)
    rooms = [tuple(_of(room, list)) for room in _of(fields.get("rooms"), list)]
    for room in rooms:
        if len(room) != num_coded or any(_size(size) < TAIL_BYTES for size in room):
            raise ValueError(f"expected the room of {num_coded} matrices, found {list(room)}")
    return PackedLayer(_of(fields.get("module"), str), matrices, rooms)


def _form(value: Any) -> Part:
    fields = _of(value, list)
    if len(fields) != 3 or fields[1] not in _DTYPES or len(_of(fields[2], list)) not in (1, 2):
        raise ValueError(f"expected a matrix as name, type and shape, found {fields}")
    return Part(_of(fields[0], str), _DTYPES[fields[1]], tuple(map(_size, fields[2])))


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, found {value!r}")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError(f"expected a number of bytes or elements, found {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class PlanesPacking:
    """Makes a matrix from its parts in the lossless code."""

    num_cols: int  # K

    @property
    def described(self) -> str:
        return "bf16 in the lossless code"

    def matrix(self, parts: Mapping[str, torch.Tensor]) -> PlanesMatrix:
        return PlanesMatrix(
            self.num_cols, parts["coded"], parts["starts"], parts["escapes"], parts["book"]
        )


class PackedExpertIndex:
    """The experts of a packed checkpoint, each in one run of bytes."""

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.manifest: Manifest = read_manifest(folder)
        self._folder = folder
        self._entries = entries

    @property
    def names(self) -> set[str]:
        layers = enumerate(self.manifest.layers)
        return {
            tensor_name(at, expert) for at, found in layers for expert in range(len(found.rooms))
        }

    def fill(self, experts: ExpertMap) -> None:
        """Adds the place of every expert to the map."""
        layers, code = self.manifest.layers, self.manifest.code
        if len(layers) != len(experts.modules):
            self._refuse(f"{len(experts.modules)} layers of experts", str(len(layers)))
        for layer, (found, module) in enumerate(zip(layers, experts.modules, strict=True)):
            parameters = {name: module.module.get_parameter(name) for name in module.parameters}
            rows = dict(expert_rows(module.module, parameters))
            shapes = {name: _shape_of(rows[name], parameters) for name in MATRICES if name in rows}
            forms = {form.name: form.shape for form in found.matrices}
            own = (module.name, module.num_experts, shapes)
            if (found.module, len(found.rooms), forms) != own:
                self._refuse(
                    f"{module.num_experts} experts of {module.name} with matrices {shapes}",
                    f"{len(found.rooms)} of {found.module} with {forms}",
                )
            coded = (form for form in found.matrices if form.is_coded(code))
            experts.packings.append({form.name: PlanesPacking(form.shape[1]) for form in coded})
            for expert in range(len(found.rooms)):
                parts, num_bytes = found.parts(expert, code)
                if not expert:
                    experts.matrices.append(tuple(part.name for part in parts))
                entry = self._entry(tensor_name(layer, expert), num_bytes)
                ranges = [_range_of(entry, part) for part in parts]
                experts.layouts[ExpertKey(layer, expert)] = lay_out(ranges)

    def _entry(self, name: str, num_bytes: int) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None or (entry.dtype, entry.num_bytes) != ("U8", num_bytes):
            found = "no such tensor" if entry is None else f"{entry.num_bytes} of {entry.dtype}"
            self._refuse(f"{name} with {num_bytes} bytes", found)
        if entry.offset % MATRIX_ALIGNMENT:
            raise CheckpointError(
                f"{entry.file}: {name} begins at byte {entry.offset}, which is not a multiple of "
                f"{MATRIX_ALIGNMENT}; pack the checkpoint again"
            )
        return entry

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise CheckpointError(f"{self._folder}: expected {expected}, found {found}")


def _range_of(entry: TensorEntry, part: Part) -> TensorRange:
    stride = (*part.shape[1:], 1)
    offset = entry.offset + part.offset
    return TensorRange(entry.file, offset, part.num_bytes, part.dtype, part.shape, stride)


def _shape_of(rows: MatrixRows, parameters: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    sizes = parameters[rows.parameter].shape
    return (rows.count,) if len(sizes) == 2 else (rows.count, sizes[3 - rows.out_dim])
