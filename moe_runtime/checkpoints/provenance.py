"""Where the elements of a converted tensor come from.

transformers turns the tensors of a checkpoint into those of the model by a table of operations:
stack the experts, concatenate gate and up, transpose, deinterleave. Running the same operations on
meta tensors, and noting what each of them copies from where, tells for every element of the result
in which checkpoint tensor it lies and where, whatever the names and the order of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.errors import UnsupportedModelError

_aten = torch.ops.aten
_REARRANGEMENTS = (_aten.cat, _aten.stack, _aten.clone)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor whose elements were copied from others, laid along ``dim`` in turn."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[torch.Tensor, ...]


class Provenance(TorchDispatchMode):
    """Records, while active, how tensors on the meta device are made of one another.

    ``source`` makes the tensors to start from; ``locate`` answers afterwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, int] = {}
        self._copies: dict[int, _Copy] = {}
        # a storage's identity is its address, so none may be freed and its address used again
        self._alive: list[torch.Tensor] = []

    def source(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous meta tensor that stands for source ``index``."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = index
        self._alive.append(tensor)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and not self._is_known(tensor):
                self._record(func, args, kwargs or {}, tensor)
        return out

    def locate(self, tensor: torch.Tensor, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Finds elements of a tensor in the sources.

        Args:
            tensor: a tensor made while recording.
            offsets: ``int64``, positions in the tensor's storage, in elements.

        Returns:
            Two ``int64`` arrays shaped as ``offsets``: the index of the source, and the position in
            it, in elements.
        """
        storage = _storage(tensor)
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
        storages = [_storage(part) for part in copy.parts]
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
        return _storage(tensor) in self._sources or _storage(tensor) in self._copies

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
        self._copies[_storage(out)] = _Copy(tuple(out.shape), dim, parts)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
