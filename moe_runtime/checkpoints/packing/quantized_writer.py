"""Writes checkpoints with quantised experts, and the error of quantising.

Formats are those of compressed-tensors (https://github.com/vllm-project/compressed-tensors), and
MXFP4 of gpt-oss for gpt-oss.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.opening import build_on_meta
from moe_runtime.checkpoints.packing.writer import CheckpointWriter, Experts, GrowingFile
from moe_runtime.checkpoints.safetensors_index import TensorEntry, header_of
from moe_runtime.checkpoints.strict_json import parse_object
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import SCALES, QuantizedMatrix, ScaleName, WeightFormat
from moe_runtime.kernels.quantized.rounding import quantize
from moe_runtime.memory.source import TensorRange, host_view
from moe_runtime.types import ExpertKey

Scheme = Literal["mxfp4", "int4", "int8", "fp8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
REPORT_NAME = "quantized_experts.json"

_GROUPS = (128, 32)  # columns of an integer scale; the first that divides all rows is used
_MX_GROUP = 32
_SCALE_NAMES: Mapping[str, ScaleName] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_DTYPES = {"e8m0": "U8", "bf16": "BF16", "f16": "F16", "f32": "F32"}
_FORMATS = {
    "mxfp4": "mxfp4-pack-quantized",
    "int4": "pack-quantized",
    "int8": "pack-quantized",
    "fp8": "float-quantized",
}
_EXPERTS = r"re:.*\.experts\.\d+\..*"


@dataclass(frozen=True, slots=True)
class MatrixError:
    """Relative errors of a layer's quantised matrices."""

    module: str
    matrix: str  # `gate`, `up` or `down`
    relative_rms: float  # root of squared errors over squared weights, of all experts
    worst_expert: int  # the expert with the largest error
    worst_relative_rms: float


class Report(NamedTuple):
    """The scheme and files of a quantised folder."""

    scheme: str
    files: list[str]


def read_report(folder: Path) -> Report | None:
    """The report in a folder; None if it was not written quantised."""
    try:
        values = parse_object((folder / REPORT_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    scheme, files = values.get("quantize"), values.get("files")
    if scheme not in SCHEMES or not isinstance(files, list):
        return None
    return Report(scheme, [name for name in files if isinstance(name, str)])


class _Field(NamedTuple):
    """A tensor that holds a part of a weight, or of a stack of weights."""

    part: str  # `codes`, `scales`, or `shape` (sizes of the weight)
    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int  # bytes of an element

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.width


class _Target(NamedTuple):
    name: str  # of the weight, or of its stack
    matrices: tuple[str, ...]  # of an expert; rows of these matrices alternate
    shape: tuple[int, int]  # N, K
    place: int = 0
    num_stacked: int = 0  # weights in the stack; 0 without a stack


class QuantizedWriter(CheckpointWriter):
    """Writes experts quantised; ``errors`` has the errors of all matrices after writing."""

    stage = "quantising experts"
    report_name = REPORT_NAME

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap, scheme: Scheme) -> None:
        super().__init__(checkpoint, experts)
        self.errors: list[MatrixError] = []
        self.settings = {"quantize": scheme}
        self.replaced = set()
        self.expert_bytes = 0
        self._scheme: Scheme = scheme
        # experts of a layer of gpt-oss share tensors
        self._is_stacked = scheme == "mxfp4" and checkpoint.config.model_type == "gpt_oss"
        self._targets: dict[ExpertKey, list[_Target]] = {}
        finder = TensorFinder(checkpoint.entries.values())
        for key in sorted(experts.layouts):
            pairs = zip(experts.matrices[key.layer], experts.layouts[key].tensors, strict=True)
            found = {  # biases stay unchanged
                name: (tensor, finder.entry_of(tensor))
                for name, tensor in pairs
                if len(tensor.shape) == 2
            }
            self.replaced |= {entry.name for _, entry in found.values()}
            self.expert_bytes += sum(tensor.num_bytes for tensor, _ in found.values())
            self._targets[key] = [*(self._stacked if self._is_stacked else _apart)(key, found)]
        self._kind = self._make_kind()
        if not self._is_stacked:
            self._require_names()

    def units(self) -> Iterable[list[ExpertKey]]:
        units: dict[object, list[ExpertKey]] = {}
        for key in self._targets:
            units.setdefault(key.layer if self._is_stacked else key, []).append(key)
        return units.values()

    def file_name(self, number: int, num_files: int) -> str:
        return f"model-{number + 1:05}-of-{num_files + 1:05}.safetensors"

    def tensors_of(self, keys: Sequence[ExpertKey]) -> Iterable[str]:
        return [field.name for field in self._fields(keys)]

    def least_bytes(self, keys: Sequence[ExpertKey]) -> int:
        return sum(field.num_bytes for field in self._fields(keys))

    def write_file(self, file: GrowingFile, keys: Sequence[ExpertKey], experts: Experts) -> None:
        tensors = [(f.name, f.dtype, f.shape, f.num_bytes) for f in self._fields(keys)]
        offsets, header = header_of(tensors)
        file.put(header, 0)
        for key, views in experts:
            targets = self._targets[key]
            found = file.pool.map(self._quantized, targets, [views] * len(targets))
            squares: list[float] = []
            for target, (matrix, of_target) in zip(targets, found, strict=True):
                squares += of_target
                for field in self._fields_of(target):
                    content = host_view(_part(field, target, matrix).flatten().view(torch.uint8))
                    place = len(header) + offsets[field.name] + target.place * len(content)
                    file.put(content, place)
            if not all(map(math.isfinite, squares)):
                raise CheckpointError(
                    f"expert {key.expert} of {self.experts.modules[key.layer].name}: its weights "
                    "are too large for the squares of their errors"
                )
            file.notes.append(squares)

    def quantization(self) -> Mapping[str, Any]:
        modules = [
            name.removesuffix(".weight")
            for name, entry in self.checkpoint.entries.items()
            if name not in self.replaced and name.endswith(".weight") and len(entry.shape) == 2
        ]
        # one pattern for the unchanged modules of all layers
        if self._is_stacked:
            dense = {re.sub(r"\.\d+\.", ".*.", name) for name in modules}
            return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(dense)}
        dense = {
            "re:" + re.sub(r"\\\.\d+(?=\\\.)", lambda _: r"\.\d+", re.escape(name)) + "$"
            for name in modules
        }
        kind = self._kind
        weights: dict[str, Any] = {
            "num_bits": kind.bits,
            "type": "float" if kind.codes.startswith("e") else "int",
            "symmetric": True,
            "strategy": "group" if kind.group_cols else "channel",
            "dynamic": False,
        }
        if kind.group_cols:
            weights["group_size"] = kind.group_cols
        if kind.scales == "e8m0":
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        name = _FORMATS[self._scheme]
        return {
            "quant_method": "compressed-tensors",
            "format": name,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {"targets": [_EXPERTS], "weights": weights, "format": name}
            },
            "ignore": sorted(dense),
        }

    def report(self, notes: Mapping[ExpertKey, list[Any]], files: list[str]) -> str:
        self.errors = [*self._errors(notes)]
        errors = [asdict(error) for error in self.errors]
        return json.dumps({**self.settings, "errors": errors, "files": files}, indent=2) + "\n"

    def _fields(self, keys: Sequence[ExpertKey]) -> list[_Field]:
        """The tensors of a file in order: aligned, and if possible each expert in one run."""
        experts = [
            [field for target in self._targets[key] for field in self._fields_of(target)]
            for key in keys
        ]
        shapes = {field.name: field for found in experts for field in found if field.width == 8}
        runs = [
            sorted((f for f in found if f.width < 8), key=lambda field: -field.width)
            for found in experts
        ]
        if any(sum(field.num_bytes for field in run) % run[0].width for run in runs):
            runs = [sorted((f for run in runs for f in run), key=lambda field: -field.width)]
        # experts of a layer may share tensors
        return [*shapes.values(), *{field.name: field for run in runs for field in run}.values()]

    def _fields_of(self, target: _Target) -> list[_Field]:
        kind, name, (rows, cols) = self._kind, target.name, target.shape
        dtype, width = _DTYPES[kind.scales], SCALES[kind.scales].itemsize
        if self._is_stacked:
            blocks = (target.num_stacked, rows, cols // _MX_GROUP)
            return [
                _Field("codes", f"{name}_blocks", "U8", (*blocks, _MX_GROUP // 2), 1),
                _Field("scales", f"{name}_scales", dtype, blocks, width),
            ]
        scales = _Field("scales", f"{name}_scale", dtype, kind.scales_shape(rows, cols), width)
        if kind.codes == "e4m3":
            return [_Field("codes", name, "F8_E4M3", target.shape, 1), scales]
        packed, row_bytes = f"{name}_packed", kind.row_bytes(cols)
        if kind.codes == "e2m1":
            return [_Field("codes", packed, "U8", (rows, row_bytes), 1), scales]
        shape = _Field("shape", f"{name}_shape", "I64", (2,), 8)
        return [_Field("codes", packed, "I32", (rows, row_bytes // 4), 4), scales, shape]

    def _quantized(
        self, target: _Target, views: Mapping[str, Tensor]
    ) -> tuple[QuantizedMatrix, list[float]]:
        """A weight, and the squares of the errors and values of each of its matrices."""
        plain = torch.stack([views[name] for name in target.matrices], 1).float()
        try:
            matrix = quantize(plain.flatten(0, 1), self._kind)
        except ValueError as error:
            raise CheckpointError(f"{target.name}, place {target.place}: {error}") from None
        errors = matrix.dequantize().view_as(plain).sub_(plain)
        pairs = [(errors[:, n], plain[:, n]) for n in range(len(target.matrices))]
        return matrix, [float(part.double().square().sum()) for pair in pairs for part in pair]

    def _errors(self, notes: Mapping[ExpertKey, list[Any]]) -> Iterator[MatrixError]:
        for layer, module in enumerate(self.experts.modules):
            keys = [ExpertKey(layer, expert) for expert in range(module.num_experts)]
            matrices = (name for target in self._targets[keys[0]] for name in target.matrices)
            for number, name in enumerate(matrices):
                pairs = [notes[key][2 * number : 2 * number + 2] for key in keys]
                each = [_root(*pair) for pair in pairs]
                worst = max(range(len(each)), key=each.__getitem__)
                whole = _root(sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
                yield MatrixError(module.name, name, whole, worst, each[worst])

    def _stacked(
        self, key: ExpertKey, found: Mapping[str, tuple[TensorRange, TensorEntry]]
    ) -> Iterator[_Target]:
        """An expert's parts of stacked tensors; matrices with alternating rows stay together."""
        for name in dict.fromkeys(entry.name for _, entry in found.values()):
            matrices = tuple(matrix for matrix in found if found[matrix][1].name == name)
            rows, cols = found[matrices[0]][0].shape
            num_experts = self.experts.modules[key.layer].num_experts
            yield _Target(name, matrices, (len(matrices) * rows, cols), key.expert, num_experts)

    def _make_kind(self) -> WeightFormat:
        if self._scheme == "mxfp4":
            self._group((_MX_GROUP,))
            return WeightFormat("e2m1", "e8m0", group_cols=_MX_GROUP)
        dtypes = {self.checkpoint.entries[name].dtype for name in self.replaced}
        scales = _SCALE_NAMES["BF16" if len(dtypes) > 1 else dtypes.pop()]
        if self._scheme == "fp8":
            return WeightFormat("e4m3", scales)
        bits = 4 if self._scheme == "int4" else 8
        group = self._group(_GROUPS)
        codes = "uint4" if bits == 4 else "uint8"
        return WeightFormat(codes, scales, group_cols=group, zero=1 << (bits - 1))

    def _group(self, sizes: Iterable[int]) -> int:
        widths = sorted({target.shape[1] for found in self._targets.values() for target in found})
        for size in sizes:
            if not any(width % size for width in widths):
                return size
        raise UnsupportedModelError(
            f"{self.checkpoint.folder}: {self._scheme} takes groups of 32 columns, and experts "
            f"have {' and '.join(map(str, widths))}; expected multiples of 32, or fp8"
        )

    def _require_names(self) -> None:
        """Refuses experts whose new names the model's conversion table does not know."""
        targets = [target for found in self._targets.values() for target in found]
        pattern = _EXPERTS.removeprefix("re:")
        unknown = [target.name for target in targets if not re.match(pattern, target.name)]
        if not unknown and any(t.name not in self.checkpoint.entries for t in targets):
            unknown = self._not_found(targets)
        if unknown:
            model = self.checkpoint.config.model_type
            advice = "; expected --quantize mxfp4" if model == "gpt_oss" else ""
            raise UnsupportedModelError(
                f"{self.checkpoint.folder}: {self._scheme} needs weights for each expert, and "
                f"transformers knows no {unknown[0]} in {model}{advice}"
            )

    def _not_found(self, targets: Sequence[_Target]) -> list[str]:
        """The weights' names if a checkpoint with these names cannot be read, else none."""
        dtype = self.checkpoint.entries[min(self.replaced)].dtype
        width = SCALES[_SCALE_NAMES[dtype]].itemsize
        entries = {n: e for n, e in self.checkpoint.entries.items() if n not in self.replaced}
        for name, _, shape, *_ in targets:
            size = math.prod(shape) * width
            entries[name] = TensorEntry(name, self.checkpoint.folder, dtype, shape, 0, size)
        apart = replace(self.checkpoint, entries=entries)
        try:
            map_experts(build_on_meta(apart), apart)
        except (CheckpointError, UnsupportedModelError):
            return [target.name for target in targets]
        return []


def _apart(
    key: ExpertKey, found: Mapping[str, tuple[TensorRange, TensorEntry]]
) -> Iterator[_Target]:
    """Each matrix of an expert, under its own name or its usual name."""
    for matrix, (tensor, entry) in found.items():
        rows, cols = tensor.shape
        name = entry.name
        if entry.shape != (rows, cols) or not name.endswith(".weight"):
            stack = name.removesuffix(".weight").rpartition(".")[0]
            name = f"{stack}.{key.expert}.{matrix}_proj.weight"
        yield _Target(name, (matrix,), (rows, cols))


def _part(field: _Field, target: _Target, matrix: QuantizedMatrix) -> Tensor:
    if field.part == "shape":
        return torch.tensor(target.shape)
    part = matrix.codes if field.part == "codes" else matrix.scales
    assert part is not None
    return part.contiguous()


def _root(error: float, weight: float) -> float:
    """Matrices of zeros have no error."""
    return math.sqrt(error / weight) if weight else 0.0
