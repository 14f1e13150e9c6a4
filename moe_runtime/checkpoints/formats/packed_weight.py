"""A quantised weight of a checkpoint: its shape, and the place of its parts in the files.

Shape suffixes: N rows (outputs), K columns (inputs) of a matrix, G groups of columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor

from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import SCALES, QuantizedMatrix, ScaleName, WeightFormat
from moe_runtime.kernels.quantized.storage_order import StorageOrder
from moe_runtime.memory.source import TensorRange

CONFIG = "quantization_config of config.json"
"""The usual place of quantisation settings."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A part of the configuration; refuses values of wrong types; missing values are None."""

    values: Mapping[str, Any]
    place: str = CONFIG

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        return self._checked(name, lambda value: isinstance(value, str), "a name")

    def size(self, name: str) -> int | None:
        return self._checked(name, _is_size, "a positive whole number")

    def choice(self, name: str, known: Iterable[object]) -> Any:
        """A value that must be one of the known ones; types must match, too."""
        value, known = self.get(name), tuple(known)
        if not any(type(value) is type(item) and value == item for item in known):
            self.unsupported(f"{name} {clipped(value)}", " or ".join(map(repr, known)))
        return value

    def group(self, name: str) -> int:
        """Columns of a group; 0 for all columns of a row, written as -1."""
        if self.get(name) == -1:
            return 0
        return self.size(name) or self.refuse(name, "-1 or a positive whole number")

    def block(self, name: str) -> tuple[int, int] | None:
        expected = "two positive whole numbers, rows and columns of a block"
        value = self._checked(name, _is_pair, expected)
        return value and (value[0], value[1])

    def names(self, name: str) -> list[str]:
        """A list of texts; empty if missing."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "a list of names")
        return value

    def part(self, name: str) -> Settings:
        """A required object."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return Settings(value, f"{name} in the {self.place}")

    def _checked(self, name: str, is_sound: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(name)
        if value is not None and not is_sound(value):
            self.refuse(name, expected)
        return value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises: a value is not sound."""
        found = clipped(self.get(name))
        raise CheckpointError(f"{self.place}: expected {name} to be {expected}, found {found}")

    def unsupported(self, found: str, expected: str) -> NoReturn:
        """Raises: the setting is sound, but not supported."""
        raise UnsupportedModelError(
            f"{self.place}: {found} cannot be read yet; expected {expected}"
        )


def matches(module: str, targets: Iterable[str]) -> bool:
    """Whether a module's name matches one of these names and patterns (`re:...`)."""
    for target in targets:
        if target == module:
            return True
        if target.startswith("re:"):
            try:
                found = re.match(target[3:], module)
            except (re.error, OverflowError, RecursionError) as error:
                raise CheckpointError(
                    f"{CONFIG}: expected {clipped(target)} to be a regular "
                    f"expression, found one with a fault: {error}"
                ) from None
            if found:
                return True
    return False


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


class Contents(ExitStack):
    """Reads the few tensors whose content decides how a weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, BinaryIO] = {}

    def numbers(self, entry: TensorEntry, count: int) -> torch.Tensor:
        """The numbers of a one-dimensional tensor."""
        if entry.dtype not in ("I32", "I64") or entry.shape != (count,):
            raise CheckpointError(
                f"{entry.name}: expected I32 or I64 [{count}], found {entry.dtype} "
                f"{list(entry.shape)}"
            )
        try:
            if entry.file not in self._files:
                self._files[entry.file] = self.enter_context(entry.file.open("rb"))
            file = self._files[entry.file]
            file.seek(entry.offset)
            content = bytearray(file.read(entry.num_bytes))
            if len(content) < entry.num_bytes:
                raise EOFError(f"the file ends at byte {entry.offset + len(content)}")
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {entry.file}: {error}") from None
        return torch.frombuffer(content, dtype=TORCH_DTYPES[entry.dtype])


SCALE_NAMES: Mapping[str, ScaleName] = {
    "F32": "f32",
    "BF16": "bf16",
    "F16": "f16",
    "F8_E4M3": "e4m3",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
}
"""Kinds of scales by the safetensors name of their element type."""
_NAMES = {"e2m1": "fp4", "e4m3": "fp8", "uint4": "int4", "uint8": "int8", "int8": "int8"}


class Packing(NamedTuple):
    """The format of a matrix; makes a `QuantizedMatrix` from its parts."""

    format: WeightFormat
    num_cols: int

    @property
    def described(self) -> str:
        """The format in words, such as `int4 with zero points and f16 scales for 1 x 128`."""
        kind = self.format
        if kind.scales == "none":
            name = kind.codes.removesuffix("_block")
            return f"{name} in ggml's blocks" if kind.block_codes > 1 else name
        sizes = ("all" if size == 0 else str(size) for size in (kind.group_rows, kind.group_cols))
        zeros = "zero points and " if kind.has_zero_points else ""
        return f"{_NAMES[kind.codes]} with {zeros}{kind.scales} scales for {' x '.join(sizes)}"

    def matrix(self, parts: Mapping[str, Tensor]) -> QuantizedMatrix:
        """The matrix made of parts with the names of `PackedWeight.ranges`."""
        others = (parts.get(name) for name in ("scales", "zero_points", "global_scale"))
        return QuantizedMatrix(self.format, self.num_cols, parts["codes"], *others)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One weight as a model has it, one matrix or a stack of them, in several tensors of a file.

    One matrix may lie in an order that no product reads. It is put in order when an expert enters
    its slot or a dense weight is loaded, never on the disk.
    """

    name: str  # the weight's name in the conversion table of transformers
    lead: tuple[int, ...]  # sizes of the stack: `()` for one matrix, `(E,)` for E experts
    num_rows: int  # N
    num_cols: int  # K
    format: WeightFormat
    codes: TensorEntry  # `[*lead, N, bytes of a row]`; rows may end with padding
    scales: TensorEntry | None = None  # `[*lead, groups of rows, of columns]`, or in blocks
    zero_points: TensorEntry | None = None
    global_scale: TensorEntry | None = None  # one number, or one for each matrix, or None
    is_transposed: bool = False  # whether the model holds `[*lead, K, N]`
    convert: Callable[[Tensor], Tensor] | None = None  # converts values of the file to the model's
    moves_codes: bool = False  # whether it only moves values, so that it applies to codes, too
    # the kind of `StorageOrder` of each part, None for a part in order; empty if all are in order
    orders: Mapping[str, str | None] = field(default_factory=dict)
    adds_one: bool = False  # whether zero points are stored less one, see `StorageOrder`

    @property
    def shape(self) -> tuple[int, ...]:
        sides = (self.num_rows, self.num_cols)
        return self.lead + (sides[::-1] if self.is_transposed else sides)

    @property
    def dtype(self) -> str:
        return self.codes.dtype

    @property
    def packing(self) -> Packing:
        return Packing(self.format, self.num_cols)

    @property
    def parts(self) -> dict[str, TensorEntry]:
        names = ("codes", "scales", "zero_points", "global_scale")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.parts.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes of one matrix in memory, in order."""
        return sum(
            part.order.result_bytes
            if part.order is not None and part.order.moves
            else part.span_bytes
            for part in self.ranges(0, 1, self.num_rows).values()
        )

    @property
    def total_rows(self) -> int:
        return math.prod(self.lead) * self.num_rows

    def as_model_has(self, values: Tensor) -> Tensor:
        """Converts `[*lead, N, K]` to the model's layout."""
        return values.transpose(-1, -2) if self.is_transposed else values

    def pieces(self, most_elements: int) -> Iterator[tuple[slice, dict[str, TensorRange]]]:
        """Cuts all matrices into rows of about this many elements, with the places of their parts.

        A matrix in another order is one piece.
        """
        if self.orders:
            yield slice(0, self.num_rows), self.ranges(0, 1, self.num_rows)
            return
        group = max(1, self.format.group_rows)
        most = max(1, most_elements // self.num_cols)
        most = most // group * group or most
        for start in range(0, self.total_rows, self.num_rows):
            for begin in range(0, self.num_rows, max(group, most)):
                end = min(begin + max(group, most), self.num_rows)
                for row in range(begin, end, most):
                    first, count = start + row, min(most, end - row)
                    yield slice(first, first + count), self.ranges(first, 1, count)

    def ranges(self, first: int, step: int, count: int) -> dict[str, TensorRange]:
        """The places of the parts of `count` rows; `Packing.matrix` makes `[count, K]` of them."""
        if self.orders:
            if (first, step, count) != (0, 1, self.num_rows):
                raise UnsupportedModelError(
                    f"{self.name}: expected a matrix of an expert in tensors of its own, found "
                    f"rows {first} to {first + (count - 1) * step} of {self.num_rows} to be one; "
                    f"such checkpoints are not supported yet"
                )
            return self._reordered()
        kind = self.format
        number, row = divmod(first, self.num_rows)
        last = row + (count - 1) * step
        rows = kind.group_rows
        is_whole = rows < 2 or row // rows == last // rows or (row % rows == 0 and step == 1)
        if last >= self.num_rows or not is_whole:
            raise UnsupportedModelError(
                f"{self.name}: expected the rows of an expert's matrix to begin with a group of "
                f"{rows} that share scales, found rows {row} to {last} of {self.num_rows}, each "
                f"{step} after the other; such checkpoints are not supported yet"
            )
        group_rows, group_cols = kind.scales_shape(self.num_rows, self.num_cols)
        groups = (kind.scales_shape(count, self.num_cols)[0], group_cols)
        start = (number * group_rows + (row // rows if rows else 0)) * group_cols
        strides = (group_cols * (step if rows == 1 else 1), 1)
        row_bytes = self.codes.num_bytes // self.total_rows
        used = (count, kind.row_bytes(self.num_cols))
        found: dict[str, TensorRange] = {}
        for name, entry in self.parts.items():
            dtype, position, shape, stride = torch.uint8, start, groups, strides
            if name == "codes":
                position, shape, stride = first * row_bytes, used, (step * row_bytes, 1)
            elif name == "scales":
                dtype = SCALES[kind.scales]
            elif name == "global_scale":
                position = number if math.prod(entry.shape) > 1 else 0
                dtype, shape, stride = torch.float32, (1,), (1,)
            offset = entry.offset + position * dtype.itemsize
            found[name] = TensorRange.of(entry.file, entry.name, offset, dtype, shape, stride)
        return found

    def _reordered(self) -> dict[str, TensorRange]:
        kind, found = self.format, dict[str, TensorRange]()
        groups = kind.scales_shape(self.num_rows, self.num_cols)
        for name, entry in self.parts.items():
            stored_dtype = TORCH_DTYPES[entry.dtype]
            sizes = (entry.num_bytes // stored_dtype.itemsize,)
            stored = TensorRange.of(entry.file, entry.name, entry.offset, stored_dtype, sizes, (1,))
            dtype, shape, stride = torch.uint8, groups, groups[1]
            if name == "codes":
                shape = (self.num_rows, kind.row_bytes(self.num_cols))
                stride = stored.span_bytes // self.num_rows
            elif name == "scales":
                dtype = SCALES[kind.scales]
            described = replace(stored, dtype=dtype, shape=shape, stride=(stride, 1))
            if (order := self.orders[name]) is not None:
                put = self._order(order, name, stored, shape)
                described = replace(described, order=put)
            found[name] = described
        return found

    def _order(
        self, kind: str, name: str, stored: TensorRange, shape: tuple[int, int]
    ) -> StorageOrder:
        rows, cols, bits = shape[0], shape[1], self.format.bits
        if kind == "transposed":
            cols, bits = stored.shape[0] // rows, stored.dtype.itemsize * 8
        elif name == "codes":
            cols = stored.span_bytes * 8 // bits // rows
        return StorageOrder(kind, rows, cols, bits, self.adds_one and name == "zero_points")


def part_of(
    entries: Mapping[str, TensorEntry], name: str, suffixes: Iterable[str], what: str
) -> TensorEntry:
    """The tensor called `name` with one of these suffixes."""
    names = [name + suffix for suffix in suffixes]
    for found in names:
        if found in entries:
            return entries[found]
    raise CheckpointError(
        f"expected {what} in {' or '.join(names)}, found no such tensor; fetch the checkpoint "
        "again, or correct how its configuration quantises weights"
    )


def codes_of_modules(
    entries: Mapping[str, TensorEntry], suffix: str, *others: str
) -> Iterator[tuple[str, TensorEntry]]:
    """Names without `suffix` of tensors that have it, and the tensors, which are codes."""
    for name, entry in entries.items():
        for other in others:
            if name.endswith(other):
                part_of(entries, name.removesuffix(other), [suffix], f"the codes of {name}")
        if name.endswith(suffix):
            yield name.removesuffix(suffix), entry


def require_beside(
    entry: TensorEntry,
    of: TensorEntry,
    shape: Sequence[int],
    dtypes: Sequence[str],
    place: str = CONFIG,
) -> None:
    """Checks type and sizes of a part that belongs to codes; dimensions of size 1 do not count."""
    if entry.dtype not in dtypes or _without_ones(entry.shape) != _without_ones(shape):
        raise CheckpointError(
            f"{entry.name}: expected {' or '.join(dtypes)} {list(shape)} beside {of.name} "
            f"{of.dtype} {list(of.shape)}, found {entry.dtype} {list(entry.shape)}; fetch the "
            f"checkpoint again, or correct the {place}"
        )


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def codes_shape(
    entry: TensorEntry, dtypes: Sequence[str], dims: Sequence[int] = (2, 3), place: str = CONFIG
) -> tuple[int, ...]:
    """The sizes of codes; checks their type and number of dimensions."""
    if entry.dtype not in dtypes or len(entry.shape) not in dims or 0 in entry.shape:
        expected = f"{' or '.join(dtypes)} of {' or '.join(map(str, dims))} dimensions"
        raise CheckpointError(
            f"{entry.name}: expected {expected}, as the {place} says, found "
            f"{entry.dtype} {list(entry.shape)}"
        )
    return entry.shape


def one_number(entry: TensorEntry, num_matrices: int = 1) -> TensorEntry:
    """A global scale: one fp32 number, or one for each matrix."""
    if entry.dtype != "F32" or math.prod(entry.shape) not in (1, num_matrices):
        found = f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(f"{entry.name}: expected one F32 number, found {found}")
    return entry


def with_scales(
    name: str,
    codes: TensorEntry,
    sizes: Sequence[int],
    scales: TensorEntry,
    dtypes: Sequence[str],
    kind: WeightFormat,
    *,
    global_scale: TensorEntry | None = None,
    is_transposed: bool = False,
    place: str = CONFIG,
) -> PackedWeight:
    """A weight `(*lead, N, K)` with checked scales, their type in its format."""
    *lead, rows, cols = sizes
    shape = (*lead, *kind.scales_shape(rows, cols))
    require_beside(scales, codes, shape, dtypes, place)
    return PackedWeight(
        *(name, tuple(lead), rows, cols, replace(kind, scales=SCALE_NAMES[scales.dtype])),
        *(codes, scales, None, global_scale, is_transposed),
    )
