"""A quantised weight whose numbers lie in the file in an order that no product reads.

They are put in order when an expert enters its slot or a dense weight is loaded, never on the disk.
Letters: N rows (outputs), K columns (inputs), G groups of columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from moe_runtime.checkpoints.formats.packed_weight import (
    SCALE_NAMES,
    PackedWeight,
    Packing,
    companion,
    other_groups,
    require_beside,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import SCALES, WeightFormat
from moe_runtime.kernels.quantized.storage_order import WORD_BITS, StorageOrder
from moe_runtime.memory.layout import TensorRange

_FIRST_CUT = 8
"""Rows or columns in whose multiples a weight is cut: those of a word of 4 bits a number."""


class PartOrder(NamedTuple):
    """How one tensor of a weight lies.

    Attributes:
        kind: of its `StorageOrder`; None where it is in order.
        per: how many rows or columns of the weight, whichever the tensor's first dimension goes
            along, one row of the tensor is for; 0 where it has one row for all.
    """

    kind: str | None
    per: int = 1


@dataclass(frozen=True, slots=True)
class ReorderedWeight(PackedWeight):
    """One matrix `[N, K]`, whose tensors are put in order.

    Attributes:
        along: what the first dimension of the tensors goes along.
        orders: how each part lies.
        adds_one: whether zero points are stored less one, as `StorageOrder` has it.
    """

    along: Literal["rows", "columns"] = "rows"
    orders: Mapping[str, PartOrder] = dataclasses.field(default_factory=dict)
    adds_one: bool = False

    def ranges(self, first: int, step: int, count: int) -> dict[str, TensorRange]:
        """As of any weight, but for the whole matrix only.

        Raises:
            UnsupportedModelError: the rows are some of the matrix.
            CheckpointError: a part is not where elements of its size can be read.
        """
        if (first, step, count) != (0, 1, self.num_rows):
            raise UnsupportedModelError(
                f"{self.name}: expected a matrix of an expert in tensors of its own, found rows "
                f"{first} to {first + (count - 1) * step} of {self.num_rows} to be one; such "
                f"checkpoints are not supported yet"
            )
        return self._cut(0, self.num_rows if self.along == "rows" else self.num_cols)

    def pieces(
        self, most_elements: int
    ) -> Iterator[tuple[slice, slice, Packing, dict[str, TensorRange]]]:
        """Cuts the weight along the first dimension of its tensors, each piece within a group."""
        is_by_rows = self.along == "rows"
        size, other = (self.num_rows, self.num_cols)[:: 1 if is_by_rows else -1]
        group = size if is_by_rows else self.format.group_cols or size
        step = max(1, most_elements // other // _FIRST_CUT) * _FIRST_CUT
        if group % _FIRST_CUT and group != size:
            group = step = size
        for begin in range(0, size, group):
            for first in range(begin, min(begin + group, size), step):
                last = min(first + step, begin + group, size)
                piece = slice(first, last), slice(None)
                rows, cols = piece if is_by_rows else piece[::-1]
                packing = Packing(self.format, self.num_cols if is_by_rows else last - first)
                yield rows, cols, packing, self._cut(first, last)

    def _cut(self, first: int, last: int) -> dict[str, TensorRange]:
        """Where the parts of some rows or columns lie."""
        is_by_rows, kind = self.along == "rows", self.format
        num_rows, num_cols = self.num_rows, self.num_cols
        size = num_rows if is_by_rows else num_cols
        rows, cols = (last - first, num_cols) if is_by_rows else (num_rows, last - first)
        groups = kind.scales_shape(rows, cols)
        named = {"codes": self.codes, "scales": self.scales, "zero_points": self.zero_points}
        found = {}
        for name, entry in named.items():
            if entry is None:
                continue
            order, per = self.orders[name]
            stored = _stored_rows(entry, size, per, first, last)
            if name == "codes":
                dtype, shape = torch.uint8, (rows, kind.row_bytes(cols))
                stride = stored.span_bytes // rows
            else:
                dtype, shape = torch.uint8 if name == "zero_points" else SCALES[kind.scales], groups
                stride = groups[1]
            described = replace(stored, dtype=dtype, shape=shape, stride=(stride, 1))
            if order is not None:
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


def by_columns(
    module: str,
    entries: Mapping[str, TensorEntry],
    codes: tuple[TensorEntry, PartOrder],
    sizes: tuple[int, int],
    group: int,
    zeros_kind: str,
    bits: int,
    *,
    adds_one: bool = False,
) -> ReorderedWeight:
    """A weight in the tensors `.qweight`, `.qzeros` and `.scales`, whose rows are columns.

    Args:
        module: whose weight.
        entries: all tensors.
        codes: the first of these tensors, checked already, and how it lies.
        sizes: `(N, K)`.
        group: columns of a group; 0 where all are one.
        zeros_kind: how the zero points lie.
        bits: of a code.
        adds_one: as `ReorderedWeight` has it.

    Raises:
        CheckpointError: another part is missing or not that of the weight.
    """
    (entry, order), (rows, cols) = codes, sizes
    scales, zeros = (
        companion(entries, module, [suffix], f"a part of {entry.name}")
        for suffix in (".scales", ".qzeros")
    )
    kind = WeightFormat(
        "uint4" if bits == 4 else "uint8", "f32", group_cols=group, has_zero_points=True
    )
    _require_rows(entry, rows, scales, zeros, bits)
    groups = kind.scales_shape(rows, cols)[1]
    require_beside(
        *(scales, entry, (groups, rows), ("F16", "BF16", "F32")),
        # where zero points agree with them, the configuration is wrong
        lambda: (
            other_groups(kind, sizes, scales.shape[::-1])
            if zeros.shape[:1] == scales.shape[:1]
            else ""
        ),
    )
    kind = replace(kind, scales=SCALE_NAMES[scales.dtype])
    require_beside(zeros, entry, (groups, _words(rows, bits)), ["I32"])
    return ReorderedWeight(
        *(f"{module}.weight", (), rows, cols, kind, entry, scales),
        zero_points=zeros,
        along="columns",
        orders={
            "codes": order,
            "scales": PartOrder("transposed", group),
            "zero_points": PartOrder(zeros_kind, group),
        },
        adds_one=adds_one,
    )


def _require_rows(
    codes: TensorEntry, rows: int, scales: TensorEntry, zeros: TensorEntry, bits: int
) -> None:
    """Checks the rows of codes where scales and zero points agree on another number, and bits.

    Raises:
        CheckpointError: codes are of that many rows, transposed or another format's; zero points
            are of other bits.
    """
    if len(scales.shape) != 2 or len(zeros.shape) != 2:
        return
    others, num_words = scales.shape[1], zeros.shape[1]
    beside = f"{scales.name} {[*scales.shape]} and {zeros.name} {[*zeros.shape]}"
    if others == rows:
        for likely in (2, 4, 8):
            if _words(rows, likely) == num_words != _words(rows, bits):
                raise CheckpointError(
                    f"{zeros.name}: expected {_words(rows, bits)} words, {rows} zero points of "
                    f"{bits} bits, found {num_words}, as of {likely} bits; correct bits in the "
                    "quantization_config of config.json"
                )
    elif num_words == _words(others, bits) != _words(rows, bits):
        # one has a word for several rows, the other for several columns
        sizes = (others, num_words) if codes.shape[1] == rows else (num_words, others)
        method = "awq" if codes.shape[1] == rows else "gptq"
        causes = [f"as quant_method {method} has them"] if codes.shape[1] == sizes[1] else []
        causes += ["transposed"] if codes.shape[0] == sizes[0] else []
        raise CheckpointError(
            f"{codes.name}: expected codes of {others} rows, as {beside} have, found those of "
            f"{rows} in {[*codes.shape]}; {' or '.join(causes) or 'damaged'}: correct the "
            "quantization_config of config.json, or fetch the checkpoint again"
        )


def _words(count: int, bits: int) -> int:
    return -(-count * bits // WORD_BITS)


def _stored_rows(entry: TensorEntry, size: int, per: int, first: int, last: int) -> TensorRange:
    """The elements of a tensor that belong to some of `size` rows or columns of a weight."""
    num_rows = -(-size // per) if per else 1
    begin, end = (first // per, -(-last // per)) if per else (0, 1)
    dtype = _ELEMENTS[entry.dtype]
    elements = entry.num_bytes // dtype.itemsize // num_rows
    offset = entry.offset + begin * elements * dtype.itemsize
    shape = ((end - begin) * elements,)
    return TensorRange.of(entry.file, entry.name, offset, dtype, shape, (1,))


_ELEMENTS = {
    "I32": torch.int32,
    "I8": torch.int8,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}
