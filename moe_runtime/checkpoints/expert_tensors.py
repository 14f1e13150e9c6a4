"""Experts of a checkpoint as the tensors that their module in transformers would have.

A module stacks gate and up in one parameter, transposed or interleaved as its flags say; both it
and files are seen here as six matrices of `[out, in]`, see `expert_map.MATRICES`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.dense_weights import DenseReader
from moe_runtime.checkpoints.expert_map import ExpertMap, expert_rows
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.linear import values_of
from moe_runtime.memory.source import ExpertSource, TensorRange, aligned_bytes
from moe_runtime.types import ExpertKey


def matrices_of(module: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An expert's matrices `[out, in]` and biases `[out]` as views into a module's parameters."""
    stacked = {name: tensor[None] for name, tensor in named.items()}
    found = {}
    for name, rows in expert_rows(module, stacked):
        tensor = named[rows.parameter]
        by_rows = tensor.T if rows.out_dim == 2 else tensor
        found[name] = by_rows[rows.start :: rows.step][: rows.count]
    return found


class CheckpointExperts:
    """Reads the experts of a checkpoint one after another."""

    def __init__(
        self,
        experts: ExpertMap,
        parameters: Sequence[Sequence[str]],
        dtype: torch.dtype,
        *,
        io_threads: int = 4,
    ) -> None:
        self._experts = experts
        self._parameters = parameters
        self._dtype = dtype
        self._source = ExpertSource(experts.layouts, io_threads=io_threads)
        self._slot = aligned_bytes(experts.slot_bytes)

    def tensors_of(self, key: ExpertKey) -> list[Tensor]:
        self._source.read({key: self._slot})
        module = self._experts.modules[key.layer].module
        named = {
            name: torch.empty(module.get_parameter(name).shape[1:], dtype=self._dtype)
            for name in self._parameters[key.layer]
        }
        fill_matrices(self._experts, key, self._slot, named)
        return list(named.values())

    def close(self) -> None:
        self._source.close()


def fill_matrices(
    experts: ExpertMap, key: ExpertKey, slot: Tensor, named: Mapping[str, Tensor]
) -> None:
    """Copies an expert from a filled slot into its slices of a module's parameters."""
    into = matrices_of(experts.modules[key.layer].module, named)
    for name, found in experts.matrices_in(key, slot).items():
        view = found if isinstance(found, Tensor) else values_of(found, into[name].dtype)
        into[name].copy_(view)


TensorsOf = Callable[[ExpertKey], Mapping[str, Tensor]]
"""Gives one expert's slices of its module's parameters, by name."""


class TensorFinder:
    """Finds the tensor of a checkpoint that a range of a file lies in."""

    def __init__(self, entries: Iterable[TensorEntry]) -> None:
        self._sorted: dict[Path, list[TensorEntry]] = {}
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.num_bytes:
                self._sorted.setdefault(entry.file, []).append(entry)

    def entry_of(self, found: TensorRange) -> TensorEntry:
        """The tensor containing the first element of a range."""
        entries = self._sorted[found.file]
        place = bisect.bisect_right(entries, found.offset, key=lambda entry: entry.offset)
        return entries[place - 1]

    def of_experts(self, experts: ExpertMap) -> set[str]:
        ranges = (tensor for layout in experts.layouts.values() for tensor in layout.tensors)
        return {self.entry_of(found).name for found in ranges}


def verify_weights(
    checkpoint: Checkpoint, experts: ExpertMap, progress: Progress | None = None
) -> None:
    """Reads all experts and then all other weights; refuses NaN and infinite values."""
    finder = TensorFinder(checkpoint.entries.values())
    source, slot = ExpertSource(experts.layouts), aligned_bytes(experts.slot_bytes)
    done, total = 0, sum(layout.tensor_bytes for layout in experts.layouts.values())
    try:
        for key, layout in experts.layouts.items():
            source.read({key: slot})
            named = dict(zip(experts.matrices[key.layer], layout.tensors, strict=True))
            for matrix, found in experts.matrices_in(key, slot).items():
                values = found if isinstance(found, Tensor) else values_of(found, torch.float32)
                if not values.isfinite().all():
                    parts = [part for name, part in named.items() if name.split(".")[0] == matrix]
                    whose = f" ({matrix} of expert {key.expert} of MoE layer {key.layer})"
                    _refuse_values([finder.entry_of(part).name for part in parts], values, whose)
            done += layout.tensor_bytes
            if progress is not None:
                progress("verifying experts", done, total)
    finally:
        source.close()
    reader = DenseReader(experts.dense_entries.values(), torch.float32, progress)
    try:
        for name, entry in experts.dense_entries.items():
            values = reader.read(entry)
            may_be_infinite = name in experts.buffers  # for example bounds of clipping
            if values.isnan().any() or not (may_be_infinite or values.isfinite().all()):
                parts = [entry] if isinstance(entry, TensorEntry) else entry.parts.values()
                _refuse_values([part.name for part in parts], values)
    finally:
        reader.close()


def _refuse_values(names: Iterable[str], values: Tensor, whose: str = "") -> None:
    count = int(values.isfinite().logical_not().sum())
    raise CheckpointError(
        f"{' with '.join(dict.fromkeys(names))}{whose}: expected finite numbers, found {count} of "
        f"{values.numel()} NaN or infinite; fetch the checkpoint again"
    )
