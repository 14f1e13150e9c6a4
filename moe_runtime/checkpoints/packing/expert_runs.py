"""Where the experts of a packed checkpoint lie: by its own word, checked against the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_runtime.checkpoints.expert_map import MATRICES, ExpertMap
from moe_runtime.checkpoints.expert_places import MatrixRows, expert_rows
from moe_runtime.checkpoints.packing.manifest import (
    MATRIX_ALIGNMENT,
    Manifest,
    PackedLayer,
    Part,
    read_manifest,
    tensor_name,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.lossless import PlanesMatrix
from moe_runtime.memory.layout import ExpertLayout, TensorRange, lay_out
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, slots=True)
class PlanesPacking:
    """What makes a matrix of the parts of one in the lossless code.

    Attributes:
        num_cols: K.
    """

    num_cols: int

    @property
    def described(self) -> str:
        """The type, for messages and tables."""
        return "bf16 in the lossless code"

    def matrix(self, parts: Mapping[str, torch.Tensor]) -> PlanesMatrix:
        """The matrix whose parts these are."""
        return PlanesMatrix(
            self.num_cols, parts["coded"], parts["starts"], parts["escapes"], parts["book"]
        )


class PackedExpertIndex:
    """The experts of a packed checkpoint, each of which lies in one run of bytes.

    Args:
        folder: of the checkpoint.
        entries: all its tensors.

    Raises:
        CheckpointError: what it says of itself and its files do not belong together.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.manifest: Manifest = read_manifest(folder)
        self._folder = folder
        self._entries = entries

    @property
    def names(self) -> set[str]:
        """The tensors that hold experts."""
        layers = enumerate(self.manifest.layers)
        return {
            tensor_name(at, expert) for at, found in layers for expert in range(len(found.rooms))
        }

    def fill(self, experts: ExpertMap) -> None:
        """Notes where every expert lies.

        Raises:
            CheckpointError: these are not the experts of the model, or not where they should be.
        """
        layers = self.manifest.layers
        if len(layers) != len(experts.modules):
            raise CheckpointError(
                f"{self._folder}: expected {len(experts.modules)} layers of experts, found "
                f"{len(layers)}"
            )
        for layer, (found, module) in enumerate(zip(layers, experts.modules, strict=True)):
            parameters = {name: module.module.get_parameter(name) for name in module.parameters}
            rows = dict(expert_rows(module.module, parameters))
            shapes = {name: _shape(rows[name], parameters) for name in MATRICES if name in rows}
            self._require_layer(found, module.name, module.num_experts, shapes)
            experts.matrices.append(tuple(part.name for part in self._parts(layer, 0)[0]))
            experts.packings.append({**self._packings(found)})
            for expert, layout in enumerate(self._layouts(layer)):
                experts.layouts[ExpertKey(layer, expert)] = layout

    def _require_layer(
        self,
        found: PackedLayer,
        module: str,
        num_experts: int,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        forms = {form.name: form.shape for form in found.matrices}
        if (found.module, len(found.rooms), forms) != (module, num_experts, dict(shapes)):
            raise CheckpointError(
                f"{self._folder}: expected {num_experts} experts of {module} with matrices "
                f"{dict(shapes)}, found {len(found.rooms)} of {found.module} with {forms}"
            )

    def _packings(self, layer: PackedLayer) -> dict[str, PlanesPacking]:
        """How those matrices that are coded are written."""
        coded = (form for form in layer.matrices if form.is_coded(self.manifest.code))
        return {form.name: PlanesPacking(form.shape[1]) for form in coded}

    def _layouts(self, layer: int) -> Iterator[ExpertLayout]:
        """How to read each expert of a layer.

        Raises:
            CheckpointError: an expert is not where its files should have it.
        """
        for expert in range(len(self.manifest.layers[layer].rooms)):
            name, (parts, num_bytes) = tensor_name(layer, expert), self._parts(layer, expert)
            entry = self._entries.get(name)
            if entry is None or (entry.dtype, entry.num_bytes) != ("U8", num_bytes):
                found = "no such tensor" if entry is None else f"{entry.num_bytes} of {entry.dtype}"
                raise CheckpointError(
                    f"{self._folder}: expected {name} with {num_bytes} bytes, found {found}"
                )
            if entry.offset % MATRIX_ALIGNMENT:
                raise CheckpointError(
                    f"{entry.file}: {name} begins at byte {entry.offset}, which is no multiple of "
                    f"{MATRIX_ALIGNMENT}; pack the checkpoint again"
                )
            yield lay_out([_range(entry, part) for part in parts])

    def _parts(self, layer: int, expert: int) -> tuple[list[Part], int]:
        return self.manifest.layers[layer].parts(expert, self.manifest.code)


def _range(entry: TensorEntry, part: Part) -> TensorRange:
    stride = (*part.shape[1:], 1)
    offset = entry.offset + part.offset
    return TensorRange(entry.file, offset, part.num_bytes, part.dtype, part.shape, stride)


def _shape(rows: MatrixRows, parameters: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    sizes = parameters[rows.parameter].shape
    return (rows.count,) if len(sizes) == 2 else (rows.count, sizes[3 - rows.out_dim])
