"""Where every expert of a model lies in the files of its checkpoint.

Derived from the model's own conversion table and the flags of its experts modules; no family is
known here by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.families import checkpoint_renamings
from moe_runtime.checkpoints.opening import TORCH_DTYPES, Checkpoint
from moe_runtime.checkpoints.provenance import Provenance
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.memory.layout import ExpertLayout, TensorRange, lay_out
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.transformers_private import WeightTransform

MATRICES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Names of an expert's tensors, in the order in which layouts list those that exist."""


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One module of a model that holds routed experts.

    Attributes:
        name: the module's path in the model.
        module: the module itself, as transformers made it.
        parameters: names of its parameters that hold one slice for each expert.
        num_experts: routed experts of the module.
    """

    name: str
    module: Any
    parameters: tuple[str, ...]
    num_experts: int


@dataclass(slots=True)
class ExpertMap:
    """Every expert's place in the checkpoint, and what is left for the dense part.

    Attributes:
        modules: the experts modules in model order; the position is the layer of an ``ExpertKey``.
        layouts: how to read each expert.
        matrices: for each layer, the names of the tensors that its layouts list.
        dense_entries: the checkpoint's tensors that belong to no expert.
        weight_mapping: the conversion table that transformers uses for this model.
    """

    modules: list[ExpertsModule]
    layouts: dict[ExpertKey, ExpertLayout] = field(default_factory=dict)
    matrices: list[tuple[str, ...]] = field(default_factory=list)
    dense_entries: dict[str, TensorEntry] = field(default_factory=dict)
    weight_mapping: list[WeightTransform] = field(default_factory=list)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds any of the experts."""
        return max(layout.slot_bytes for layout in self.layouts.values())

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the dense weights when they are computed with in ``dtype``."""
        elements = (math.prod(entry.shape) for entry in self.dense_entries.values())
        return sum(elements) * dtype.itemsize


def map_experts(model: PreTrainedModel, checkpoint: Checkpoint) -> ExpertMap:
    """Finds every routed expert of a model on the meta device in the checkpoint's files.

    Raises:
        UnsupportedModelError: the model has no routed experts, or none that can be read by range.
        CheckpointError: experts are missing or have another shape than the model's.
    """
    experts = ExpertMap(find_experts(model))
    experts.weight_mapping = [
        *checkpoint_renamings(model),
        *private.get_model_conversion_mapping(model),
    ]
    provenance = Provenance()
    entries = list(checkpoint.entries.values())
    converted = _convert(model, experts, entries, provenance)
    for layer, module in enumerate(experts.modules):
        slices = {}
        for parameter in module.parameters:
            name = f"{module.name}.{parameter}"
            if name not in converted:
                raise CheckpointError(f"{checkpoint.folder} has no tensors for {name}")
            stacked = converted[name]
            if getattr(module.module, "may_be_padded", False):
                stacked = stacked[: module.num_experts]
            expected, found = module.module.get_parameter(parameter).shape, stacked.shape
            if expected != found:
                raise CheckpointError(
                    f"{name}: expected {tuple(expected)}, the checkpoint gives {tuple(found)}"
                )
            slices[parameter] = stacked
        rows = dict(expert_rows(module.module, slices))
        experts.matrices.append(tuple(name for name in MATRICES if name in rows))
        ranges = {
            name: _ranges(name, view, slices, provenance, entries) for name, view in rows.items()
        }
        _require_one_type(module.name, ranges)
        for expert in range(module.num_experts):
            tensors = [ranges[name][expert] for name in experts.matrices[layer]]
            experts.layouts[ExpertKey(layer, expert)] = lay_out(tensors)
    return experts


def _require_one_type(name: str, ranges: Mapping[str, Sequence[TensorRange]]) -> None:
    """Refuses experts of a layer that one product could not take together."""
    for matrix, of_experts in ranges.items():
        types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in of_experts})
        if len(types) > 1:
            raise UnsupportedModelError(
                f"{name}: the {matrix} weights of some experts are {types[0]}, of others "
                f"{types[1]}; expected one type for all experts of a layer: save the checkpoint "
                "again in one type"
            )


def find_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    """Finds the modules that transformers marks as routed experts, in model order.

    Raises:
        UnsupportedModelError: there are none; says whether that is for want of experts.
    """
    found = []
    for name, module in model.named_modules():
        if private.is_experts_module(module):
            parameters = tuple(
                key
                for key, value in module.named_parameters(recurse=False)
                if key.removesuffix("_bias") in ("gate_up_proj", "up_proj", "down_proj")
            )
            num_experts = module.get_parameter(parameters[0]).shape[0]
            found.append(ExpertsModule(name, module, parameters, num_experts))
    if found:
        return found
    family = model.config.model_type
    if any(_sounds_like_experts(module) for module in model.modules()):
        raise UnsupportedModelError(
            f"{family} is a Mixture-of-Experts model whose experts transformers does not expose "
            "through its experts interface; this family is not supported yet"
        )
    raise UnsupportedModelError(
        f"{family} has no routed experts, so there is nothing to offload; "
        "it runs in plain transformers"
    )


def _sounds_like_experts(module: torch.nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "expert" in name or "moe" in name or "sparsemlp" in name


def _convert(
    model: PreTrainedModel,
    experts: ExpertMap,
    entries: list[TensorEntry],
    provenance: Provenance,
) -> dict[str, torch.Tensor]:
    """Runs the conversion of all expert tensors on stand-ins; what is dense goes to the map."""
    renamings = [
        entry for entry in experts.weight_mapping if isinstance(entry, private.WeightRenaming)
    ]
    converters = [
        entry for entry in experts.weight_mapping if isinstance(entry, private.WeightConverter)
    ]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    targets = {f"{m.name}.{parameter}" for m in experts.modules for parameter in m.parameters}
    prefix = model.base_model_prefix
    jobs: dict[str, Any] = {}
    order = sorted(range(len(entries)), key=lambda i: private.dot_natural_key(entries[i].name))
    for index in order:
        entry = entries[index]
        name, pattern = private.rename_source_key(entry.name, renamings, converters, prefix, state)
        if name not in state and entry.name in state:
            name, pattern = private.rename_source_key(entry.name, [], [], prefix, state)
        if name not in targets:
            if name in state:
                experts.dense_entries[entry.name] = entry
            continue
        job = jobs.get(name)
        if job is None:
            job = jobs[name] = (
                private.WeightRenaming(entry.name, name)
                if pattern is None
                else deepcopy(by_pattern[pattern])
            )
        stand_in = provenance.source(index, entry.shape, _float_dtype(entry))
        job.add_tensor(name, entry.name, pattern or entry.name, cast(Any, stand_in))
    converted: dict[str, torch.Tensor] = {}
    for name, job in jobs.items():
        try:
            with provenance:
                parts = job.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointError(
                f"the checkpoint's tensors for {name} do not fit together: "
                f"{str(error).splitlines()[0]}"
            ) from error
        for target, value in parts.items():
            converted[target] = value[0] if isinstance(value, list) else value
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        for one, other in ((target, source), (source, target)):
            if one in targets and one not in converted and other in converted:
                converted[one] = converted[other]
    return converted


def _float_dtype(entry: TensorEntry) -> torch.dtype:
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None or not dtype.is_floating_point:
        raise UnsupportedModelError(
            f"{entry.name} is {entry.dtype}: quantised experts are not supported yet; "
            "expected BF16, F16 or F32"
        )
    return dtype


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


def _ranges(
    name: str,
    rows: MatrixRows,
    parameters: Mapping[str, torch.Tensor],
    provenance: Provenance,
    entries: list[TensorEntry],
) -> list[TensorRange]:
    """One strided range of a file for each expert, for one of its matrices."""
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
    ranges = []
    for expert in range(tensor.shape[0]):
        entry = entries[int(source[expert, 0])]
        shape = (rows.count, width) if tensor.dim() == 3 else (rows.count,)
        between = int(row_step[expert, 0]) if rows.count > 1 else width
        strides = (between, int(step[expert, 0])) if tensor.dim() == 3 else (between,)
        ranges.append(_range(entry, int(offset[expert, 0]), shape, strides))
    return ranges


def _range(
    entry: TensorEntry, position: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> TensorRange:
    dtype = _float_dtype(entry)
    offset = entry.offset + position * dtype.itemsize
    if offset % dtype.itemsize:
        raise CheckpointError(
            f"{entry.file}: {entry.name} starts at byte {offset}, which is no multiple of its "
            f"{dtype.itemsize}-byte elements; save the checkpoint again with safetensors"
        )
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return TensorRange(entry.file, offset, (last + 1) * dtype.itemsize, dtype, shape, stride)
