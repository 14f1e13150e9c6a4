"""Quantised checkpoints that others read too: which tensors, and what ``config.json`` says.

Experts are written apart in a format of compressed-tensors, those of gpt-oss in MXFP4 as gpt-oss
has them. https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import TensorFinder
from moe_runtime.checkpoints.opening import Checkpoint, build_on_meta
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import SCALES, ScaleName, WeightFormat
from moe_runtime.memory.layout import TensorRange
from moe_runtime.types import ExpertKey

Scheme = Literal["mxfp4", "int4", "int8", "fp8"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

_GROUPS = (128, 32)
"""Columns that share the scale of integers: the first that divides all rows."""
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


class Field(NamedTuple):
    """A tensor that holds a part of a weight, or of a stack of weights.

    Attributes:
        part: `codes`, `scales`, or `shape`, the sizes of the weight.
        name: of the tensor.
        dtype: as safetensors names it.
        shape: its sizes.
        width: bytes of an element.
    """

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.width


class Target(NamedTuple):
    """A weight of the new checkpoint.

    Attributes:
        name: of the weight, or of the stack that it lies in.
        matrices: of an expert; the weight has a row of each in turn.
        shape: N, K.
        place: in the stack.
        num_stacked: weights in the stack; 0 for a weight of its own.
    """

    name: str
    matrices: tuple[str, ...]
    shape: tuple[int, int]
    place: int = 0
    num_stacked: int = 0


class QuantizedLayout:
    """Where a scheme puts the experts of a checkpoint.

    Attributes:
        scheme: its name.
        kind: what codes and scales mean.
        is_stacked: whether the experts of a layer share tensors, as in gpt-oss.
        targets: the weights that each expert is written as.
        replaced: the tensors of the checkpoint that held them.

    Raises:
        UnsupportedModelError: the scheme has no form for these experts.
    """

    def __init__(self, checkpoint: Checkpoint, experts: ExpertMap, scheme: Scheme) -> None:
        self.scheme: Scheme = scheme
        self._checkpoint = checkpoint
        self._finder = TensorFinder(checkpoint.entries.values())
        self.is_stacked = scheme == "mxfp4" and checkpoint.config.model_type == "gpt_oss"
        self.replaced: set[str] = set()
        self.targets: dict[ExpertKey, list[Target]] = {}
        for key in sorted(experts.layouts):
            pairs = zip(experts.matrices[key.layer], experts.layouts[key].tensors, strict=True)
            found = {name: tensor for name, tensor in pairs if len(tensor.shape) == 2}
            self.replaced |= {self._finder.entry_of(tensor).name for tensor in found.values()}
            num_experts = experts.modules[key.layer].num_experts
            make = self._stacked if self.is_stacked else self._apart
            self.targets[key] = [*make(key, found, num_experts)]
        self.kind = self._kind()
        if not self.is_stacked:
            self._require_names()

    def fields(self, target: Target) -> list[Field]:
        """The tensors of a weight."""
        kind, (rows, cols) = self.kind, target.shape
        groups = kind.scales_shape(rows, cols)
        dtype, width = _DTYPES[kind.scales], SCALES[kind.scales].itemsize
        if self.is_stacked:
            blocks = (target.num_stacked, rows, cols // _MX_GROUP)
            return [
                Field("codes", f"{target.name}_blocks", "U8", (*blocks, _MX_GROUP // 2), 1),
                Field("scales", f"{target.name}_scales", dtype, blocks, width),
            ]
        scales = Field("scales", f"{target.name}_scale", dtype, groups, width)
        if kind.codes == "e4m3":
            return [Field("codes", target.name, "F8_E4M3", target.shape, 1), scales]
        packed, row_bytes = f"{target.name}_packed", kind.row_bytes(cols)
        if kind.codes == "e2m1":
            return [Field("codes", packed, "U8", (rows, row_bytes), 1), scales]
        shape = Field("shape", f"{target.name}_shape", "I64", (2,), 8)
        return [Field("codes", packed, "I32", (rows, row_bytes // 4), 4), scales, shape]

    def quantization(self) -> dict[str, Any]:
        """The quantisation part of ``config.json``."""
        dense = sorted(self._dense_modules())
        if self.is_stacked:
            return {"quant_method": "mxfp4", "modules_to_not_convert": dense}
        weights: dict[str, Any] = {
            "num_bits": self.kind.bits,
            "type": "float" if self.kind.codes.startswith("e") else "int",
            "symmetric": True,
            "strategy": "group" if self.kind.group_cols else "channel",
            "dynamic": False,
        }
        if self.kind.group_cols:
            weights["group_size"] = self.kind.group_cols
        if self.kind.scales == "e8m0":
            weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        group = {"targets": [_EXPERTS], "weights": weights, "format": _FORMATS[self.scheme]}
        return {
            "quant_method": "compressed-tensors",
            "format": _FORMATS[self.scheme],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": dense,
        }

    def _stacked(
        self, key: ExpertKey, found: Mapping[str, TensorRange], num_experts: int
    ) -> Iterator[Target]:
        """An expert as a part of the tensors that it lay in, those with rows in turn together."""
        names = {matrix: self._finder.entry_of(tensor).name for matrix, tensor in found.items()}
        for name in dict.fromkeys(names.values()):
            matrices = tuple(matrix for matrix in found if names[matrix] == name)
            rows, cols = found[matrices[0]].shape
            sizes = (len(matrices) * rows, cols)
            yield Target(name, matrices, sizes, key.expert, num_experts)

    def _apart(
        self, key: ExpertKey, found: Mapping[str, TensorRange], num_experts: int
    ) -> Iterator[Target]:
        """Each matrix of an expert, under the name that it had, or that it has in others' files."""
        for matrix, tensor in found.items():
            rows, cols = tensor.shape
            entry = self._finder.entry_of(tensor)
            name = entry.name
            if entry.shape != (rows, cols) or not name.endswith(".weight"):
                stack = name.removesuffix(".weight").rpartition(".")[0]
                name = f"{stack}.{key.expert}.{matrix}_proj.weight"
            yield Target(name, (matrix,), (rows, cols))

    def _kind(self) -> WeightFormat:
        """What codes and scales mean, the same for all experts.

        Raises:
            UnsupportedModelError: rows are no multiple of a group, or scales have no type.
        """
        if self.scheme == "mxfp4":
            self._group((_MX_GROUP,))
            return WeightFormat("e2m1", "e8m0", group_cols=_MX_GROUP)
        dtypes = {self._checkpoint.entries[name].dtype for name in self.replaced}
        scales = _SCALE_NAMES["BF16" if len(dtypes) > 1 else dtypes.pop()]
        if self.scheme == "fp8":
            return WeightFormat("e4m3", scales)
        bits = 4 if self.scheme == "int4" else 8
        group = self._group(_GROUPS)
        codes = "uint4" if bits == 4 else "uint8"
        return WeightFormat(codes, scales, group_cols=group, zero=1 << (bits - 1))

    def _group(self, sizes: Iterable[int]) -> int:
        widths = sorted({target.shape[1] for found in self.targets.values() for target in found})
        for size in sizes:
            if not any(width % size for width in widths):
                return size
        raise UnsupportedModelError(
            f"{self._checkpoint.folder}: {self.scheme} takes groups of 32 columns, and experts "
            f"have {' and '.join(map(str, widths))}; expected multiples of 32, or fp8"
        )

    def _require_names(self) -> None:
        """Refuses experts that the model's conversion table would not find under their new names.

        Raises:
            UnsupportedModelError: it would not.
        """
        targets = [target for found in self.targets.values() for target in found]
        pattern = _EXPERTS.removeprefix("re:")
        unknown = [target.name for target in targets if not re.match(pattern, target.name)]
        if not unknown and any(t.name not in self._checkpoint.entries for t in targets):
            unknown = self._not_found(targets)
        if unknown:
            model = self._checkpoint.config.model_type
            advice = "; expected --quantize mxfp4" if model == "gpt_oss" else ""
            raise UnsupportedModelError(
                f"{self._checkpoint.folder}: {self.scheme} needs weights for each expert, and "
                f"transformers knows no {unknown[0]} in {model}{advice}"
            )

    def _not_found(self, targets: Sequence[Target]) -> list[str]:
        """The weights, if a checkpoint that had them as they are would not be read."""
        dtype = self._checkpoint.entries[min(self.replaced)].dtype
        width = SCALES[_SCALE_NAMES[dtype]].itemsize
        entries = {n: e for n, e in self._checkpoint.entries.items() if n not in self.replaced}
        for name, _, shape, *_ in targets:
            size = math.prod(shape) * width
            entries[name] = TensorEntry(name, self._checkpoint.folder, dtype, shape, 0, size)
        apart = replace(self._checkpoint, entries=entries)
        try:
            map_experts(build_on_meta(apart), apart)
        except (CheckpointError, UnsupportedModelError):
            return [target.name for target in targets]
        return []

    def _dense_modules(self) -> set[str]:
        """Patterns of the modules whose weights stay as they are, one for those of all layers."""
        modules = (
            name.removesuffix(".weight")
            for name, entry in self._checkpoint.entries.items()
            if name not in self.replaced and name.endswith(".weight") and len(entry.shape) == 2
        )
        if self.is_stacked:
            return {re.sub(r"\.\d+\.", ".*.", name) for name in modules}
        return {"re:" + _any_layer(name) + "$" for name in modules}


def _any_layer(name: str) -> str:
    return re.sub(r"\\\.\d+(?=\\\.)", lambda _: r"\.\d+", re.escape(name))
