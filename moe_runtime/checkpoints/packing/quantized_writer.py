"""Quantised checkpoints: experts in fewer bits, everything else as it is, and the error made."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.opening import Checkpoint
from moe_runtime.checkpoints.packing.schemes import (
    SCHEMES,
    Field,
    QuantizedLayout,
    Scheme,
    Target,
)
from moe_runtime.checkpoints.packing.staging import header_of
from moe_runtime.checkpoints.packing.writer import CheckpointWriter, Experts, GrowingFile
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.quantized import QuantizedMatrix
from moe_runtime.kernels.quantized.rounding import quantize
from moe_runtime.memory.slab import host_view
from moe_runtime.types import ExpertKey

REPORT_NAME = "quantized_experts.json"


@dataclass(frozen=True, slots=True)
class MatrixError:
    """How far the matrices of a layer are from what they were.

    Attributes:
        module: the experts module of the layer.
        matrix: `gate`, `up` or `down`.
        relative_rms: root of the sum of squared differences to that of squared weights, over the
            experts.
        worst_expert: the expert whose own is the largest.
        worst_relative_rms: its own.
    """

    module: str
    matrix: str
    relative_rms: float
    worst_expert: int
    worst_relative_rms: float


class QuantizedWriter(CheckpointWriter):
    """Writes experts quantised.

    Args:
        checkpoint: where they are from.
        experts: where they lie there.
        scheme: how.

    Raises:
        UnsupportedModelError: the scheme has no form for these experts.
    """

    stage = "quantising experts"
    report_name = REPORT_NAME

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap, scheme: Scheme) -> None:
        super().__init__(checkpoint, experts)
        self._layout = QuantizedLayout(checkpoint, experts, scheme)
        self.errors: list[MatrixError] = []

    @property
    def expert_bytes(self) -> int:
        """Bytes of the matrices, as they were; biases stay as they are."""
        return sum(
            math.prod(tensor.shape) * tensor.dtype.itemsize
            for layout in self.experts.layouts.values()
            for tensor in layout.tensors
            if len(tensor.shape) == 2
        )

    @property
    def settings(self) -> dict[str, Any]:
        """The scheme."""
        return {"quantize": self._layout.scheme}

    @property
    def replaced(self) -> set[str]:
        """The tensors that hold matrices of experts."""
        return self._layout.replaced

    def units(self) -> Iterable[list[ExpertKey]]:
        """Each expert alone, or those of a layer, which share tensors."""
        if not self._layout.is_stacked:
            return [[key] for key in self._layout.targets]
        layers: dict[int, list[ExpertKey]] = {}
        for key in self._layout.targets:
            layers.setdefault(key.layer, []).append(key)
        return layers.values()

    def file_name(self, number: int, num_files: int) -> str:
        """As transformers names them."""
        return f"model-{number + 1:05}-of-{num_files + 1:05}.safetensors"

    def tensors_of(self, keys: Sequence[ExpertKey]) -> Iterable[str]:
        """Codes, scales and so on."""
        return [field.name for field in self._fields(keys)]

    def least_bytes(self, keys: Sequence[ExpertKey]) -> int:
        """Just what they take."""
        return sum(field.num_bytes for field in self._fields(keys))

    def write_file(self, file: GrowingFile, keys: Sequence[ExpertKey], experts: Experts) -> None:
        """Writes codes and scales of each expert where the header has them."""
        tensors = [(f.name, f.dtype, f.shape, f.num_bytes) for f in self._fields(keys)]
        offsets, header = header_of(tensors)
        file.put(header, 0)
        for key, views in experts:
            targets = self._layout.targets[key]
            found = file.pool.map(self._quantized, targets, [views] * len(targets))
            squares: dict[str, tuple[float, float]] = {}
            for target, (matrix, of_target) in zip(targets, found, strict=True):
                squares |= of_target
                for field in self._layout.fields(target):
                    content = host_view(_part(field, target, matrix).flatten().view(torch.uint8))
                    place = len(header) + offsets[field.name] + target.place * len(content)
                    file.put(content, place)
            names = self._matrices(key.layer)
            if not all(math.isfinite(number) for name in names for number in squares[name]):
                raise CheckpointError(
                    f"expert {key.expert} of {self.experts.modules[key.layer].name}: its weights "
                    "are too large for the squares of their errors"
                )
            file.notes.append([number for name in names for number in squares[name]])

    def quantization(self) -> Mapping[str, Any]:
        """What compressed-tensors or gpt-oss says there."""
        return self._layout.quantization()

    def report(self, notes: Mapping[ExpertKey, list[Any]], files: list[str]) -> str:
        """The files and the errors, which stay in `errors` too."""
        self.errors = [*self._errors(notes)]
        values = {
            **self.settings,
            "errors": [asdict(error) for error in self.errors],
            "files": files,
        }
        return json.dumps(values, indent=2) + "\n"

    def _matrices(self, layer: int) -> list[str]:
        targets = self._layout.targets[ExpertKey(layer, 0)]
        return [name for target in targets for name in target.matrices]

    def _fields(self, keys: Sequence[ExpertKey]) -> list[Field]:
        """The tensors of a file in its order: aligned, and if they can, an expert's in one run."""
        experts = [
            [field for target in self._layout.targets[key] for field in self._layout.fields(target)]
            for key in keys
        ]
        shapes = {field.name: field for found in experts for field in found if field.width == 8}
        runs = [
            sorted((f for f in found if f.width < 8), key=lambda field: -field.width)
            for found in experts
        ]
        if any(sum(field.num_bytes for field in run) % run[0].width for run in runs):
            runs = [sorted((f for run in runs for f in run), key=lambda field: -field.width)]
        # the experts of a layer may share tensors
        return [*shapes.values(), *{field.name: field for run in runs for field in run}.values()]

    def _quantized(
        self, target: Target, views: Mapping[str, Tensor]
    ) -> tuple[QuantizedMatrix, dict[str, tuple[float, float]]]:
        """A weight, and for its matrices the sums of squares of their errors and of themselves."""
        plain = torch.stack([views[name] for name in target.matrices], 1).float()
        try:
            matrix = quantize(plain.flatten(0, 1), self._layout.kind)
        except ValueError as error:
            raise CheckpointError(f"{target.name}, place {target.place}: {error}") from None
        errors = matrix.dequantize().view_as(plain).sub_(plain)
        squares = {
            name: (_square(errors[:, number]), _square(plain[:, number]))
            for number, name in enumerate(target.matrices)
        }
        return matrix, squares

    def _errors(self, notes: Mapping[ExpertKey, list[Any]]) -> Iterator[MatrixError]:
        for layer, module in enumerate(self.experts.modules):
            keys = [ExpertKey(layer, expert) for expert in range(module.num_experts)]
            for number, name in enumerate(self._matrices(layer)):
                pairs = [notes[key][2 * number : 2 * number + 2] for key in keys]
                each = [_root(*pair) for pair in pairs]
                worst = max(range(len(each)), key=each.__getitem__)
                whole = _root(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
                yield MatrixError(module.name, name, whole, worst, each[worst])


class Report(NamedTuple):
    """What a folder that was written quantised says of itself."""

    scheme: str
    files: list[str]


def read_report(folder: Path) -> Report | None:
    """How a folder was written quantised; None where it was not, or does not say it."""
    try:
        values = parse_object((folder / REPORT_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    scheme, files = values.get("quantize"), values.get("files")
    if scheme not in SCHEMES or not isinstance(files, list):
        return None
    return Report(scheme, [name for name in files if isinstance(name, str)])


def _part(field: Field, target: Target, matrix: QuantizedMatrix) -> Tensor:
    if field.part == "shape":
        return torch.tensor(target.shape)
    part = matrix.codes if field.part == "codes" else matrix.scales
    assert part is not None
    return part.contiguous()


def _square(values: Tensor) -> float:
    return float(values.double().square().sum())


def _root(error: float, weight: float) -> float:
    """Relative to nothing, there is no error: matrices of zeros are written exactly."""
    return math.sqrt(error / weight) if weight else 0.0
