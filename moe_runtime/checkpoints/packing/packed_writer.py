"""Packed checkpoints: every expert one run of bytes, in the lossless code or as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.opening import QUANT_METHOD, Checkpoint
from moe_runtime.checkpoints.packing.encoding import pack_expert
from moe_runtime.checkpoints.packing.manifest import (
    MANIFEST_NAME,
    Code,
    Manifest,
    MatrixForm,
    PackedLayer,
    tensor_name,
)
from moe_runtime.checkpoints.packing.staging import header_of
from moe_runtime.checkpoints.packing.writer import CheckpointWriter, Experts, GrowingFile
from moe_runtime.checkpoints.safetensors_index import PACKED_INDEX_NAME
from moe_runtime.memory.layout import BLOCK_BYTES
from moe_runtime.memory.slab import host_view
from moe_runtime.types import ExpertKey

_LEAST_RATIO = {"planes": 0.65, "none": 1.0}
"""No trained weights get smaller than this share of their bytes: the entropy of their code."""


class PackedWriter(CheckpointWriter):
    """Writes experts packed.

    Args:
        checkpoint: where they are from.
        experts: where they lie there.
        code: `planes` for the lossless code of bf16 matrices; `none` only lays experts out.
    """

    stage = "packing experts"
    index_name = PACKED_INDEX_NAME
    report_name = MANIFEST_NAME

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap, code: Code) -> None:
        super().__init__(checkpoint, experts)
        self._code: Code = code
        self._forms = [self._forms_of(layer) for layer in range(len(experts.modules))]

    @property
    def settings(self) -> dict[str, Any]:
        """The code."""
        return {"code": self._code}

    @property
    def replaced(self) -> set[str]:
        """The tensors that hold experts."""
        return TensorFinder(self.checkpoint.entries.values()).of_experts(self.experts)

    def units(self) -> Iterable[list[ExpertKey]]:
        """Each expert alone."""
        return ([key] for key in sorted(self.experts.layouts))

    def file_name(self, number: int, num_files: int) -> str:
        """Experts and dense weights have files of different names."""
        if number == num_files:
            return "dense.safetensors"
        return f"experts-{number + 1:05}-of-{num_files:05}.safetensors"

    def tensors_of(self, keys: Sequence[ExpertKey]) -> Iterable[str]:
        """One for each expert."""
        return [tensor_name(key.layer, key.expert) for key in keys]

    def least_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """What experts take that could not be smaller."""
        size = sum(self.experts.layouts[key].tensor_bytes for key in keys)
        return int(size * _LEAST_RATIO[self._code])

    def write_file(self, file: GrowingFile, keys: Sequence[ExpertKey], experts: Experts) -> None:
        """Writes one expert behind the other, and before them the header, whose room is left."""
        layouts, names = self.experts.layouts, [*self.tensors_of(keys)]
        most = sum(2 * layouts[key].slot_bytes + BLOCK_BYTES for key in keys)
        _, header = header_of([(name, "U8", (most,), most) for name in names], BLOCK_BYTES)
        lead = end = len(header)
        for key, views in experts:
            content, rooms = pack_expert(self._forms[key.layer], views, self._code, file.pool)
            file.put(host_view(content), end)
            file.notes.append(rooms)
            end += len(content)
        sizes = [size for _, size, _ in file.pieces]
        tensors = zip(names, sizes, strict=True)
        # its numbers are no longer than those that room was left for
        _, header = header_of([(name, "U8", (size,), size) for name, size in tensors], lead)
        file.put(header, 0)

    def quantization(self) -> Mapping[str, Any]:
        """What only this runtime reads."""
        return {"quant_method": QUANT_METHOD, "code": self._code}

    def report(self, notes: Mapping[ExpertKey, list[Any]], files: list[str]) -> str:
        """The manifest."""
        layers = []
        for layer, module in enumerate(self.experts.modules):
            keys = [ExpertKey(layer, expert) for expert in range(module.num_experts)]
            rooms = [tuple(notes[key]) for key in keys]
            layers.append(PackedLayer(module.name, self._forms[layer], rooms))
        return Manifest(self._code, tuple(layers), files).to_json()

    def _forms_of(self, layer: int) -> tuple[MatrixForm, ...]:
        layout = self.experts.layouts[ExpertKey(layer, 0)]
        pairs = zip(self.experts.matrices[layer], layout.tensors, strict=True)
        return tuple(MatrixForm(name, found.dtype, tuple(found.shape)) for name, found in pairs)
