"""Where each matrix of an expert lies in the files, once its parameter's origin is known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.checkpoints.formats import PackedWeight, Packing, Weight
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.memory.source import TensorRange

MATRICES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Names of an expert's tensors, in the order in which layouts list those that exist.

A quantised matrix is several tensors: `gate.codes`, `gate.scales` and so on."""

_aten = torch.ops.aten
_REARRANGEMENTS = (_aten.cat, _aten.stack, _aten.clone)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor whose elements were copied from others, laid along ``dim`` in turn."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[torch.Tensor, ...]


class Provenance(TorchDispatchMode):
    """Records, while active, how tensors on the meta device are made of those of ``source``."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, int] = {}
        self._copies: dict[int, _Copy] = {}
        # a storage's identity is its address, so none may be freed and its address used again
        self._alive: list[torch.Tensor] = []

    def source(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous meta tensor that stands for source ``index``."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._sources[_storage_of(tensor)] = index
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and not self._is_known(tensor):
                self._record(func, args, kwargs or {}, tensor)
        return out

    def locate(self, tensor: torch.Tensor, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds elements by ``int64`` offsets in a tensor's storage: source indices, and places
        there.
        """
        storage = _storage_of(tensor)
        if storage in self._sources:
            return np.full_like(offsets, self._sources[storage]), offsets
        copy = self._copies[storage]
        place = [*np.unravel_index(offsets.reshape(-1), copy.shape)]
        ends = np.cumsum([part.shape[copy.dim] for part in copy.parts])
        which = np.searchsorted(ends, place[copy.dim], side="right")
        place[copy.dim] = place[copy.dim] - np.concatenate(([0], ends))[which]
        inner = np.array([part.storage_offset() for part in copy.parts])[which]
        strides = np.array([part.stride() for part in copy.parts])
        for axis, of_parts in zip(place, strides.T, strict=True):
            inner += axis * of_parts[which]
        storages = [_storage_of(part) for part in copy.parts]
        if all(storage in self._sources for storage in storages):
            sources, positions = np.array([self._sources[s] for s in storages])[which], inner
        else:
            sources, positions = np.empty_like(inner), np.empty_like(inner)
            for number in np.unique(which):
                chosen = which == number
                found = self.locate(copy.parts[number], inner[chosen])
                sources[chosen], positions[chosen] = found
        return sources.reshape(offsets.shape), positions.reshape(offsets.shape)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return _storage_of(tensor) in self._sources or _storage_of(tensor) in self._copies

    def _record(self, func: Any, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        operation = func.overloadpacket
        if not out.is_contiguous() or operation not in _REARRANGEMENTS:
            raise UnsupportedModelError(
                f"the checkpoint's experts are converted by {func}, which is more than a "
                "rearrangement; such checkpoints are not supported yet"
            )
        dim, parts = 0, (args[0],)
        if operation is not _aten.clone:
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
            parts = tuple(args[0])
        if operation is _aten.stack:
            parts = tuple(part.unsqueeze(dim) for part in parts)
        self._alive += [out, *parts]
        self._copies[_storage_of(out)] = _Copy(tuple(out.shape), dim, parts)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, slots=True)
class PlacedMatrix:
    """Where one matrix of one expert lies."""

    name: str
    ranges: Mapping[str | None, TensorRange]  # its parts by name, or itself under None
    packing: Packing | None = None

    @property
    def described(self) -> str:
        if self.packing is not None:
            return self.packing.described
        return str(self.ranges[None].dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class MatrixRows:
    """A matrix of every expert as rows of a parameter: ``start``, ``start + step`` and so on."""

    parameter: str
    start: int
    step: int
    count: int
    out_dim: int


def expert_rows(
    module: torch.nn.Module, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, MatrixRows]]:
    """Says which rows of which parameter are an expert's gate, up and down, from the flags."""
    for parameter, tensor in parameters.items():
        is_bias = parameter.endswith("_bias")
        suffix = "_bias" if is_bias else ""
        out_dim = 1 if is_bias or not module.is_transposed else 2
        count = tensor.shape[out_dim]
        if not parameter.startswith("gate_up"):
            matrix = "up" if parameter.startswith("up") else "down"
            yield matrix + suffix, MatrixRows(parameter, 0, 1, count, out_dim)
        elif module.is_concatenated:
            yield "gate" + suffix, MatrixRows(parameter, 0, 1, count // 2, out_dim)
            yield "up" + suffix, MatrixRows(parameter, count // 2, 1, count // 2, out_dim)
        else:
            yield "gate" + suffix, MatrixRows(parameter, 0, 2, count // 2, out_dim)
            yield "up" + suffix, MatrixRows(parameter, 1, 2, count // 2, out_dim)


def place_matrix(
    name: str,
    rows: MatrixRows,
    parameters: Mapping[str, torch.Tensor],
    provenance: Provenance,
    entries: Sequence[Weight],
) -> list[PlacedMatrix]:
    """Where one matrix of each expert lies, as rows of one weight of the checkpoint."""
    tensor = parameters[rows.parameter]
    stride = tensor.stride()
    first = int(tensor.storage_offset()) + np.arange(tensor.shape[0])[:, None] * stride[0]
    starts = first + (rows.start + rows.step * np.arange(rows.count)) * stride[rows.out_dim]
    width = 1
    if tensor.dim() == 3:
        in_dim = 3 - rows.out_dim
        width = tensor.shape[in_dim]
        ends = starts + (width - 1) * stride[in_dim]
        seconds = starts + min(1, width - 1) * stride[in_dim]
        source, offset = provenance.locate(tensor, starts)
        _, second = provenance.locate(tensor, seconds)
        end_source, end = provenance.locate(tensor, ends)
        step = second - offset
        regular = (source == end_source) & (end == offset + step * (width - 1))
    else:
        source, offset = provenance.locate(tensor, starts)
        step, regular = np.ones_like(offset), np.ones_like(offset, dtype=bool)
    row_step = np.diff(offset, axis=1)
    regular &= (source == source[:, :1]) & (step == step[:, :1]) & (step >= 0)
    if not regular.all() or (row_step != row_step[:, :1]).any() or (row_step < 0).any():
        raise UnsupportedModelError(
            f"{entries[int(source[0, 0])].name}: the {name} weights of an expert are scattered "
            "over the file; such checkpoints are not supported yet"
        )
    found = []
    for expert in range(tensor.shape[0]):
        entry = entries[int(source[expert, 0])]
        shape = (rows.count, width) if tensor.dim() == 3 else (rows.count,)
        between = int(row_step[expert, 0]) if rows.count > 1 else width
        strides = (between, int(step[expert, 0])) if tensor.dim() == 3 else (between,)
        place = int(offset[expert, 0])
        if isinstance(entry, TensorEntry):
            found.append(PlacedMatrix(entry.name, {None: _range(entry, place, shape, strides)}))
        else:
            found.append(_packed_rows(entry, place, shape, strides))
    return found


def _range(
    entry: TensorEntry, position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRange:
    dtype = TORCH_DTYPES[entry.dtype]
    offset = entry.offset + position * dtype.itemsize
    return TensorRange.of(entry.file, entry.name, offset, dtype, shape, stride)


def _packed_rows(
    weight: PackedWeight, position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> PlacedMatrix:
    """The parts of a matrix of quantised rows, which must be whole."""
    first, column = divmod(position, weight.num_cols)
    step, odd = divmod(stride[0], weight.num_cols)
    if len(shape) != 2 or column or odd or shape[1] != weight.num_cols or stride[1] != 1:
        raise UnsupportedModelError(
            f"{weight.name}: the weights of an expert are cut along its columns, or transposed; "
            "quantised checkpoints of this kind are not supported yet"
        )
    return PlacedMatrix(weight.name, {**weight.ranges(first, step, shape[0])}, weight.packing)
