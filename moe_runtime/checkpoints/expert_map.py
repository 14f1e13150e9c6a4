"""The place of every expert in the files of a checkpoint.

Derived from the model's conversion table and the flags of its experts modules, not from its family.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.dense_weights import coded_bytes, may_stay_in_file, may_stay_packed
from moe_runtime.checkpoints.families import checkpoint_renamings
from moe_runtime.checkpoints.formats import BESIDE_WEIGHTS, Weight, shape_in_words, sign_of
from moe_runtime.checkpoints.formats.packed_weight import PackedWeight, Packing
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.checkpoints.strict_json import FETCH_OR_CORRECT, TOP_KS, one_line
from moe_runtime.errors import CheckpointError, MoERuntimeWarning, UnsupportedModelError
from moe_runtime.memory.source import ExpertLayout, TensorRange, lay_out
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.packed_experts import PlanesPacking


MATRICES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
"""Names of an expert's tensors, in the order of layouts.

A quantised matrix is several tensors: `gate.codes`, `gate.scales` and so on."""

_aten = torch.ops.aten
_REARRANGEMENTS = (_aten.cat, _aten.stack, _aten.clone)

LEAST_EMBEDDING_BYTES = 256 * 2**20
"""Smallest embedding whose rows may stay in the file. A row takes about 0.1 ms from a disk, and
smaller embeddings free memory for few experts."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tensor whose elements are copies of others, concatenated along ``dim``."""

    shape: tuple[int, ...]
    dim: int
    parts: tuple[torch.Tensor, ...]


class Provenance(TorchDispatchMode):
    """Records, while active, how meta tensors are made from those of ``source``."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, int] = {}
        self._copies: dict[int, _Copy] = {}
        # a storage is identified by its address, so none may be freed and its address reused
        self._alive: list[torch.Tensor] = []

    def source(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous meta tensor that represents source ``index``."""
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
        """Source indices and places there of elements, given as ``int64`` offsets in a tensor's
        storage."""
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
    """The place of one matrix of one expert."""

    name: str
    ranges: Mapping[str | None, TensorRange]  # by part; None for the matrix itself
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
    """The rows of parameters that are an expert's gate, up and down, from the module's flags."""
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
    """The place of one matrix of each expert, as rows of one weight of the checkpoint."""
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
    """The parts of a matrix made of whole quantised rows."""
    first, column = divmod(position, weight.num_cols)
    step, odd = divmod(stride[0], weight.num_cols)
    if len(shape) != 2 or column or odd or shape[1] != weight.num_cols or stride[1] != 1:
        raise UnsupportedModelError(
            f"{weight.name}: the weights of an expert are cut along its columns, or transposed; "
            "quantised checkpoints of this kind are not supported yet"
        )
    return PlacedMatrix(weight.name, {**weight.ranges(first, step, shape[0])}, weight.packing)


@dataclass(frozen=True, slots=True)
class ExpertsModule:
    """One module of a model that holds routed experts."""

    name: str  # the module's path in the model
    module: Any  # the module itself, as transformers made it
    parameters: tuple[str, ...]  # names of its parameters that hold one slice for each expert
    num_experts: int


@dataclass(slots=True)
class ExpertMap:
    """The place of every expert in the checkpoint, and the dense weights."""

    modules: list[ExpertsModule]  # in model order: the layers of an ``ExpertKey``
    top_k: int  # experts that a token visits in a layer
    layouts: dict[ExpertKey, ExpertLayout] = field(default_factory=dict)
    # tensor names in the layouts of each layer
    matrices: list[tuple[str, ...]] = field(default_factory=list)
    # formats of quantised or coded matrices in each layer
    packings: list[dict[str, Packing | PlanesPacking]] = field(default_factory=list)
    dense_entries: dict[str, Weight] = field(default_factory=dict)  # no expert's
    dense_names: set[str] = field(default_factory=set)  # their names in the model
    buffers: set[str] = field(default_factory=set)  # those that are buffers; may be infinite
    # entries and parameters of weights that stay codes
    packed_dense: dict[str, str] = field(default_factory=dict)
    # entries and parameters of embeddings whose rows may stay in their files
    embeddings: dict[str, str] = field(default_factory=dict)
    weight_mapping: list[private.WeightTransform] = field(default_factory=list)
    type_names: list[str] = field(default_factory=list)  # types of experts in the files, each once
    unused: dict[str, str] = field(default_factory=dict)  # by model name
    least_slot_bytes: int = 0  # for experts that other processes hold now

    @property
    def slot_bytes(self) -> int:
        own_bytes = max(layout.slot_bytes for layout in self.layouts.values())
        return max(own_bytes, self.least_slot_bytes)

    @property
    def scratch_bytes(self) -> int:
        """Scratch bytes needed to reorder an expert after reading it."""
        steps = (step for layout in self.layouts.values() for step in layout.reorderings)
        return max((order.scratch_bytes for order, *_ in steps), default=0)

    @property
    def largest_quantised(self) -> int:
        """Values of the largest matrix kept quantised or coded; 0 if none is."""
        dense = (math.prod(self.dense_entries[name].shape) for name in self.packed_dense)
        return max(self.largest_in_experts, *dense, 0)

    @property
    def largest_in_experts(self) -> int:
        """As ``largest_quantised``, for experts only."""
        sizes = []
        for key, layout in self.layouts.items():
            for name, tensor in zip(self.matrices[key.layer], layout.tensors, strict=True):
                matrix, _, part = name.partition(".")
                if part in ("codes", "coded"):
                    num_cols = self.packings[key.layer][matrix].num_cols
                    sizes.append(math.prod(tensor.shape[:-1]) * num_cols)
        return max(sizes, default=0)

    @property
    def embedding_bytes(self) -> int:
        return sum(self.dense_entries[name].num_bytes for name in self.embeddings)

    def matrices_in(self, key: ExpertKey, slot: Tensor) -> dict[str, Any]:
        """Views of an expert's matrices and biases; parts of a quantised matrix become one."""
        views = self.layouts[key].views(slot)
        named = dict(zip(self.matrices[key.layer], views, strict=True))
        matrices: dict[str, Any] = {name: view for name, view in named.items() if "." not in name}
        for matrix, packing in self.packings[key.layer].items():
            lead = f"{matrix}."
            parts = {n.removeprefix(lead): v for n, v in named.items() if n.startswith(lead)}
            matrices[matrix] = packing.matrix(parts)
        return matrices

    def tie(self, model: PreTrainedModel) -> None:
        """Ties the parameters of a meta model as loading the checkpoint will."""
        found = {f"{m.name}.{name}" for m in self.modules for name in m.parameters}
        missing = model.state_dict().keys() - self.dense_names - found
        model.tie_weights(missing_keys=missing, recompute_mapping=False)

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the dense weights in memory, computed with in ``dtype``."""
        return sum(
            math.prod(entry.shape) * dtype.itemsize
            if name not in self.packed_dense
            else coded_bytes(*entry.shape)
            if isinstance(entry, TensorEntry)
            else entry.resident_bytes
            for name, entry in self.dense_entries.items()
        )


def map_experts(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    *,
    codes_dense: bool = False,
    may_be_dense: bool = False,
) -> ExpertMap:
    """Finds every routed expert of a meta model in the checkpoint's files."""
    modules = find_experts(model, may_be_dense=may_be_dense)
    experts = ExpertMap(modules, chosen_per_token(model, modules))
    experts.weight_mapping = [
        *checkpoint_renamings(model),
        *checkpoint.conversions,
        *private.get_model_conversion_mapping(model),
    ]
    provenance = Provenance()
    entries = checkpoint.weights
    named = {entry.name: entry for entry in entries}
    plain = {name: entry for name, entry in checkpoint.entries.items() if name in named}
    converted = _convert(model, experts, entries, provenance, checkpoint.dtype, codes_dense)
    if checkpoint.runs is not None:
        checkpoint.runs.fill(experts)
    for layer, module in enumerate(experts.modules if checkpoint.runs is None else ()):
        slices = {}
        for parameter in module.parameters:
            name = f"{module.name}.{parameter}"
            stacked, sources = converted.get(name, (None, ()))
            is_padded = getattr(module.module, "may_be_padded", False)
            if is_padded and isinstance(stacked, Tensor):
                stacked = stacked[: module.num_experts]
            expected = module.module.get_parameter(parameter).shape
            if not isinstance(stacked, Tensor) or stacked.shape != expected:
                if not is_padded:
                    _require_all_experts(sources, module.num_experts, plain)
                _refuse_parameter(name, sources, named, plain, expected, stacked)
            slices[parameter] = stacked
        rows = dict(expert_rows(module.module, slices))
        placed = {
            name: place_matrix(name, rows[name], slices, provenance, entries)
            for name in MATRICES
            if name in rows
        }
        for of_experts in placed.values():
            # conversions stack experts by their order, whatever their numbers
            _require_all_experts([one.name for one in of_experts], module.num_experts, plain)
        _require_one_type(module.name, placed)
        first = {name: found[0] for name, found in placed.items()}
        experts.matrices.append(
            tuple(
                name if part is None else f"{name}.{part}"
                for name, found in first.items()
                for part in found.ranges
            )
        )
        experts.packings.append(
            {name: found.packing for name, found in first.items() if found.packing is not None}
        )
        for expert in range(module.num_experts):
            parts = (found[expert].ranges.values() for found in placed.values())
            experts.layouts[ExpertKey(layer, expert)] = lay_out([*itertools.chain(*parts)])
    experts.type_names = _type_names(experts)
    unused = private.unexpected_names(model, experts.unused)
    # these tensors only describe activations or shapes
    ignored = BESIDE_WEIGHTS if checkpoint.packed else ()
    if names := sorted(experts.unused[name] for name in unused if not name.endswith(ignored)):
        _name_unused(model, checkpoint, names)
    return experts


def _name_unused(model: PreTrainedModel, checkpoint: Checkpoint, names: list[str]) -> None:
    """Names weights that no part of the model takes; `transformers` ignores them, too."""
    origins, where = checkpoint.origins, one_line(str(checkpoint.folder))
    shown = ", ".join(origins.get(name, name) for name in names[:3])
    what = f"{len(names)} that {type(model).__name__} has no place for, such as {shown}"
    if origins:
        expected = (
            "expected a file that llama.cpp's converter wrote, without additions, found tensors,"
        )
        raise UnsupportedModelError(f"{where}: {expected} {what}")
    words = f"of its tensors, {what}, are not used, as in transformers"
    warnings.warn(f"{where}: {words}", MoERuntimeWarning, stacklevel=4)


def _type_names(experts: ExpertMap) -> list[str]:
    names: set[str] = set()
    for layer, matrices in enumerate(experts.matrices):
        packings = experts.packings[layer]
        names.update(packing.described for packing in packings.values())
        layout = experts.layouts[ExpertKey(layer, 0)]
        for name, tensor in zip(matrices, layout.tensors, strict=True):
            if "." not in name and (not packings or not name.endswith("_bias")):
                names.add(str(tensor.dtype).removeprefix("torch."))
    return sorted(names)


def _require_one_type(name: str, placed: Mapping[str, Sequence[PlacedMatrix]]) -> None:
    """Refuses experts of a layer that one product cannot take together."""
    for matrix, of_experts in placed.items():
        kinds = [(one.described, one.packing) for one in of_experts]
        usual = Counter(kinds).most_common(1)[0][0]
        for expert, kind in enumerate(kinds):
            if kind == usual:
                continue
            # formats with the same description differ in their details
            part = 0 if kind[0] != usual[0] else 1
            raise UnsupportedModelError(
                f"{name}: expected one type for all experts of a layer, found the {matrix} weights "
                f"of expert {expert}, {of_experts[expert].name}, in {kind[part]}, those of others "
                f"in {usual[part]}: save the checkpoint again in one type"
            )
    first = {matrix: of_experts[0] for matrix, of_experts in placed.items()}
    own_kind = {n: "bfloat16" if p.packing else p.described for n, p in first.items()}
    are_apart = {kind for n, kind in own_kind.items() if not n.endswith("_bias")} == {"bfloat16"}
    alike: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for matrix, found in first.items():
        # plain matrices of a quantised expert are bf16; its biases may have another type
        is_apart = are_apart and matrix.endswith("_bias")
        alike[is_apart][own_kind[matrix]] = f"{matrix} is {found.described}"
    for kinds in alike.values():
        if len(kinds) > 1:
            raise UnsupportedModelError(
                f"{name}: of an expert's tensors, {' and '.join(kinds.values())}; expected one "
                "type for them, or bfloat16 beside quantised ones: save the checkpoint again so"
            )


def find_experts(model: torch.nn.Module, *, may_be_dense: bool = False) -> list[ExpertsModule]:
    """The routed experts modules of a model, in model order. Raises UnsupportedModelError if there
    are none, unless the model ``may_be_dense``."""
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
    if found or may_be_dense:
        return found
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
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
    entries: Sequence[Weight],
    provenance: Provenance,
    dtype: torch.dtype,
    codes_dense: bool,
) -> dict[str, tuple[Tensor | str, set[str]]]:
    """Runs the conversion of all expert tensors on placeholders; adds dense weights to the map."""
    mapping = experts.weight_mapping
    renamings = [entry for entry in mapping if isinstance(entry, private.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, private.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state, buffers = model.state_dict(), dict(model.named_buffers())
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
                if state[name].is_floating_point():
                    _value_dtype(entry, dtype)
                experts.dense_entries[entry.name] = entry
                experts.dense_names.add(name)
                if name in buffers:
                    experts.buffers.add(entry.name)
                if pattern is None:
                    may_be_codes = codes_dense or not isinstance(entry, TensorEntry)
                    if may_be_codes and may_stay_packed(model, name, entry):
                        experts.packed_dense[entry.name] = name
                    is_large = entry.num_bytes >= LEAST_EMBEDDING_BYTES
                    if is_large and may_stay_in_file(model, name, entry):
                        experts.embeddings[entry.name] = name
            else:
                experts.unused[name] = entry.name
            continue
        job = jobs.get(name)
        if job is None:
            job = jobs[name] = (
                private.WeightRenaming(entry.name, name)
                if pattern is None
                else deepcopy(by_pattern[pattern])
            )
        placeholder = _placeholder(index, entry, provenance, dtype)
        job.add_tensor(name, entry.name, pattern or entry.name, cast(Any, placeholder))
    converted: dict[str, tuple[Tensor | str, set[str]]] = {}
    for name, job in jobs.items():
        try:
            with provenance:
                parts = job.convert(name, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            parts = {name: str(error).splitlines()[0]}
        for target, value in parts.items():
            found = value[0] if isinstance(value, list) else value
            converted[target] = found, job.layer_targets[name]
    for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        for one, other in ((target, source), (source, target)):
            if one in targets and one not in converted and other in converted:
                converted[one] = converted[other]
    return converted


def _placeholder(index: int, entry: Weight, provenance: Provenance, dtype: torch.dtype) -> Tensor:
    if isinstance(entry, TensorEntry):
        return provenance.source(index, entry.shape, _value_dtype(entry, dtype))
    sizes = (*entry.lead, entry.num_rows, entry.num_cols)
    return entry.as_model_has(provenance.source(index, sizes, dtype))


def _value_dtype(entry: Weight, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight's values: its own, or the compute dtype if it is quantised."""
    if not isinstance(entry, TensorEntry):
        return dtype
    stored = TORCH_DTYPES.get(entry.dtype)
    if stored is None or not stored.is_floating_point:
        raise UnsupportedModelError(
            f"{entry.name} is {entry.dtype}, and no part of a weight that the checkpoint's "
            "configuration calls quantised; expected BF16, F16 or F32"
        )
    return stored


def chosen_per_token(model: PreTrainedModel, modules: Sequence[ExpertsModule]) -> int:
    """The most experts that a token visits in a layer, from the model's configuration."""
    text = model.config.get_text_config()
    values = [getattr(text, name, None) for name in TOP_KS]
    counts = [
        count
        for value in values
        for count in (value if isinstance(value, list | tuple) else [value])
        if type(count) is int
    ]
    most = max((experts.num_experts for experts in modules), default=1)
    return min(max(counts, default=1), most)


_NUMBERED = re.compile(r"(.*\.)(\d+)(\..*)")


def _require_all_experts(
    names: Iterable[str], num_experts: int, entries: Mapping[str, TensorEntry]
) -> None:
    """Refuses experts of a layer whose numbers do not match the configuration."""
    by_stem: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            by_stem[match[1], match[3]].add(int(match[2]))
    for (head, tail), numbers in sorted(by_stem.items()):
        if len(numbers) < 2:
            continue
        # some families go on counting from the experts of another module
        first = 0 if min(numbers) < num_experts else min(numbers)
        last = first + num_experts - 1
        for number in sorted(numbers.symmetric_difference(range(first, last + 1))):
            name = f"{head}{number}{tail}"
            found = f"expert {number}" if number in numbers else "no such tensor"
            raise CheckpointError(
                f"{name}: expected experts {first} to {last}, as the configuration says, found "
                f"{found}; {_remedy(entries, name.removesuffix('weight'))}"
            )


def _refuse_parameter(
    name: str,
    sources: Iterable[str],
    named: Mapping[str, Weight],
    entries: Mapping[str, TensorEntry],
    shape: Sequence[int],
    found: Tensor | str | None,
) -> NoReturn:
    """Raises: a stacked parameter of experts cannot be made from its sources."""
    weights = [named[source] for source in sorted(sources)]
    if not weights:
        match = _NUMBERED.fullmatch(name)
        layer = f"{match[1]}{match[2]}." if match else name
        raise CheckpointError(
            f"the checkpoint has no tensors for {name}; {_remedy(entries, layer, 'expert')}"
        )
    by_stem: dict[str, list[Weight]] = defaultdict(list)
    for weight in weights:
        by_stem[_NUMBERED.sub(r"\1#\3", weight.name)].append(weight)
    for alike in by_stem.values():
        usual = Counter(tuple(weight.shape) for weight in alike).most_common(1)[0][0]
        for weight in alike:
            if tuple(weight.shape) != usual:
                raise CheckpointError(
                    f"{weight.name}: expected {[*usual]} as other experts have, found "
                    f"{shape_in_words(weight)}; fetch the checkpoint again"
                )
    gives = found if isinstance(found, str) else tuple(getattr(found, "shape", ()))
    shapes = ", ".join(f"{weight.name} {shape_in_words(weight)}" for weight in weights[:2])
    raise CheckpointError(
        f"{name}: expected {tuple(shape)}, as the configuration says, the checkpoint gives "
        f"{gives}: {shapes}{' and others' if len(weights) > 2 else ''}; {FETCH_OR_CORRECT}"
    )


def _remedy(entries: Mapping[str, TensorEntry], lead: str, word: str = "") -> str:
    """Advice that names a part of a quantised weight found in the place of a missing weight."""
    sign = sign_of([name for name in entries if name.startswith(lead) and word in name])
    if not sign:
        return FETCH_OR_CORRECT
    return (
        f"found {sign}: correct the quantization_config of config.json, or fetch the checkpoint "
        "again"
    )
