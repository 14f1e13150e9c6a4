"""Dense weights: everything of a model but its routed experts, loaded tensor by tensor.

Each tensor is read straight into memory of its own, so that loading needs no more than the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.formats import PackedWeight, Weight, shape_in_words
from moe_runtime.checkpoints.formats.packed_weight import Packing
from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.checkpoints.strict_json import FETCH_OR_CORRECT
from moe_runtime.errors import (
    CapacityError,
    CheckpointError,
    UnsupportedModelError,
    UnsupportedUseError,
)
from moe_runtime.kernels.decode_step.prepared import PreparedQuantizedLinear
from moe_runtime.kernels.linear import frozen_linear, quantized_linear, values_of
from moe_runtime.kernels.lossless import PlanesMatrix, encode_planes
from moe_runtime.kernels.lossless.reference import (
    GROUP_ROWS,
    TAIL_BYTES,
    coded_row_bytes,
    num_groups,
)
from moe_runtime.kernels.native import needs_torch
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.memory.source import (
    BLOCK_BYTES,
    READ_BYTES,
    CheckpointFile,
    TensorRange,
    aligned_bytes,
    host_view,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.expert_map import ExpertMap

    AnyMatrix = QuantizedMatrix | PlanesMatrix

ALIGNED_BYTES = 64
"""Alignment of dense weights. Without AVX2, MKL sums the product of one fp32 row in another order
unless 16 divides the address; the layout of a checkpoint must not change bits."""


class _LazyTensor:
    """A tensor that is read when transformers asks for it."""

    def __init__(self, entry: Weight, reader: DenseReader) -> None:
        self._entry = entry
        self._reader = reader

    def __getitem__(self, index: object) -> Tensor:
        tensor = self._reader.read(self._entry)
        return tensor if index is Ellipsis else tensor[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype


class DenseReader:
    """Reads dense weights, quantised ones as values of `dtype`, and reports progress.

    Without `fills` it reads nothing: the memory of a weight stays untouched zeros, which take none.
    """

    def __init__(
        self,
        entries: Iterable[Weight],
        dtype: torch.dtype,
        progress: Progress | None,
        *,
        fills: bool = True,
    ) -> None:
        entries = list(entries)
        self.dtype, self.fills = dtype, fills
        self._files: dict[Path, CheckpointFile] = {}
        for entry in entries:
            parts = [entry] if isinstance(entry, TensorEntry) else entry.parts.values()
            for part in parts:
                if part.file not in self._files:
                    self._files[part.file] = CheckpointFile(part.file)
        self._progress = progress
        self._done = 0
        self._total = sum(entry.num_bytes for entry in entries)

    def read(self, entry: Weight) -> Tensor:
        """The values of a weight, in new memory."""
        if not isinstance(entry, TensorEntry):
            values = read_values(self, entry, self.dtype)
        else:
            dtype = TORCH_DTYPES.get(entry.dtype)
            if dtype is None:
                raise UnsupportedModelError(
                    f"{entry.name} is {entry.dtype}, which nothing computes with; expected BF16, "
                    "F16 or F32"
                )
            flat = self.bytes_of(entry.name, entry.file, entry.offset, entry.num_bytes)
            values = flat.view(dtype).view(entry.shape)
        if entry.convert is not None:
            values = entry.convert(values)
        self.report(entry)
        return values

    def report(self, entry: Weight) -> None:
        """Counts a weight as read."""
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress("loading dense weights", self._done, self._total)

    def bytes_of(self, name: str, file: Path, offset: int, num_bytes: int) -> Tensor:
        """A range of a file as `uint8`, at a multiple of `ALIGNED_BYTES`."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        lead = offset % BLOCK_BYTES
        start, needed, excess = offset - lead, lead + num_bytes, lead % ALIGNED_BYTES
        memory = aligned_bytes(-(-needed // BLOCK_BYTES) * BLOCK_BYTES)
        if not self.fills:
            return memory[lead - excess : needed - excess]
        buffer = host_view(memory)
        try:
            for begin in range(0, len(buffer), READ_BYTES):
                part = buffer[begin : begin + READ_BYTES]
                wanted = min(len(part), needed - begin)
                self._files[file].read(start + begin, part, wanted)
                if excess:  # moved while it is still in the processor's cache
                    first, end = max(begin, lead), begin + wanted
                    buffer[first - excess : end - excess] = buffer[first:end]
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {name} from {file}: {error}") from None
        self._files[file].require_unchanged()
        return memory[lead - excess : needed - excess]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def load_dense(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    experts: ExpertMap,
    device: torch.device,
    progress: Progress | None,
    stored: Mapping[str, str] | None = None,
    *,
    fills: bool = True,
) -> None:
    """Loads all weights but the routed experts into a model on the meta device. ``stored`` maps
    entries to parameters of embeddings whose rows stay in the files. Without ``fills`` weights get
    their place and form, but no values."""
    reader = DenseReader(experts.dense_entries.values(), checkpoint.dtype, progress, fills=fills)
    config = private.LoadStateDictConfig(
        pretrained_model_name_or_path=str(checkpoint.folder),
        device_map={"": device},
        dtype=checkpoint.dtype,
        dtype_plan=private.dtype_plan(model, checkpoint.dtype),
        weight_mapping=cast(Any, experts.weight_mapping),
    )
    packed, stored = experts.packed_dense, stored or {}
    lazy = {
        name: _LazyTensor(entry, reader)
        for name, entry in experts.dense_entries.items()
        if name not in packed and name not in stored
    }
    try:
        _keep(model, experts, reader, device, stored)
        info, _ = private.convert_and_load_state_dict_in_model(model, lazy, config)
    finally:
        reader.close()
    for name, found, expected in sorted(info.mismatched_keys, key=str):
        weight = experts.dense_entries.get(name)
        shape = f"{[*found]}" if weight is None else shape_in_words(weight)
        raise CheckpointError(
            f"{name}: expected {[*expected]}, the checkpoint has {shape}; {FETCH_OR_CORRECT}"
        )
    for name, error in info.conversion_errors.items():
        raise CheckpointError(f"{name} cannot be converted: {error.strip().splitlines()[-1]}")
    _forget_expert_parameters(model, experts)
    info.missing_keys.difference_update(packed.values(), stored.values())
    info = private.finish_loading(model, config, info)
    if info.missing_keys:
        names = sorted(info.missing_keys)
        raise CheckpointError(
            f"{checkpoint.folder} lacks {len(names)} tensors of {type(model).__name__}, "
            f"among them {', '.join(names[:3])}"
        )


def _forget_expert_parameters(model: PreTrainedModel, experts: ExpertMap) -> None:
    for module in experts.modules:
        # some families initialise their experts from the block around them
        block = model.get_submodule(module.name.rpartition(".")[0])
        private.mark_as_initialized(block)
    gone = {f"{module.name}.{name}" for module in experts.modules for name in module.parameters}
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {key: tied[key] for key in tied if key not in gone}


_ELEMENTS_AT_ONCE = 2**16
"""Elements of a quantised weight dequantised at once: a few megabytes."""
_ROOM_SHARE = 8
"""One of this many weights of a linear layer may be an escape; trained layers need a quarter."""


def read_matrix(reader: DenseReader, weight: PackedWeight) -> QuantizedMatrix:
    """The codes of one matrix, in order, in new memory."""
    parts = weight.ranges(0, 1, weight.num_rows)
    matrix = weight.packing.matrix(_parts(reader, weight, parts))
    if weight.convert is not None:
        matrix = replace(matrix, codes=weight.convert(matrix.codes))
    reader.report(weight)
    return matrix


def coded_bytes(num_rows: int, num_cols: int) -> int:
    """The most bytes that a bf16 matrix may take in the lossless code."""
    starts_bytes, book_bytes = 4 * (num_groups(num_rows) + 1), 8
    room = num_rows * num_cols // _ROOM_SHARE + TAIL_BYTES
    return num_rows * coded_row_bytes(num_cols) + starts_bytes + book_bytes + room


def read_coded(reader: DenseReader, entry: TensorEntry) -> PlanesMatrix:
    """A bf16 matrix in the lossless code."""
    matrix = encode_planes(reader.read(entry))
    if matrix.nbytes > coded_bytes(*matrix.shape):
        raise CapacityError(
            f"{entry.name} does not fit in the lossless code: more than one weight in "
            f"{_ROOM_SHARE} has a rare exponent; load the model with cache_code none"
        )
    return matrix


def read_values(reader: DenseReader, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values of a weight as the model holds it, dequantised a few rows at a time."""
    memory = aligned_bytes(weight.total_rows * weight.num_cols * dtype.itemsize)
    values_RK = memory.view(dtype).view(weight.total_rows, weight.num_cols)
    for rows, ranges in weight.pieces(_ELEMENTS_AT_ONCE) if reader.fills else ():
        matrix = weight.packing.matrix(_parts(reader, weight, ranges))
        values_RK[rows] = matrix.dequantize(dtype)
    return weight.as_model_has(values_RK.view(*weight.lead, weight.num_rows, weight.num_cols))


def _parts(
    reader: DenseReader, weight: PackedWeight, ranges: Mapping[str, TensorRange]
) -> dict[str, Tensor]:
    return {
        name: part.view(reader.bytes_of(weight.name, part.file, part.offset, part.span_bytes))
        for name, part in ranges.items()
    }


_CONVERSIONS = frozenset(
    getattr(Tensor, name)
    for name in ("to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16", "contiguous")
)
"""Methods that return a tensor itself where there is nothing to convert."""

_READ_AS_VALUES = ("kv_b_proj",)
"""Linear layers whose weights latent attention splits into keys and values."""

_DATA: Any = Tensor.data
_READING_CODES = (Tensor.detach, _DATA.__get__)
_PUTTING_VALUES = (Tensor.copy_, _DATA.__set__)
_REFUSED = frozenset(
    getattr(Tensor, name)
    for name in ("data_ptr", "storage", "untyped_storage", "share_memory_", "requires_grad_")
)
"""Methods that would expose the address of values, which have no memory, or train them."""


class PackedTensor(AbsentTensor):
    """A frozen weight `[N, K]` held as codes; values are written out when asked for.

    Products with it read the codes. Whatever else reads it gets values, written out for every call;
    what would change them raises an ``UnsupportedUseError``.
    """

    matrix: AnyMatrix
    product: PreparedQuantizedLinear  # the product with few rows
    whole: PackedTensor | None = None  # the `join_packed` result that contains these rows

    @staticmethod
    def __new__(cls, matrix: AnyMatrix, dtype: torch.dtype) -> PackedTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        shape = torch.Size(matrix.shape)
        made: Any = AbsentTensor.__new__(cls, shape, dtype, matrix.device)
        made.matrix, made.product = matrix, PreparedQuantizedLinear(matrix)
        return made

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`(N, K)`; a fast path, since every step asks for it."""
        return torch.Size(self.matrix.shape)

    def alike(self) -> PackedTensor:
        """Another tensor with the same codes."""
        return PackedTensor(self.matrix, self.dtype)

    def values(self) -> Tensor:
        if torch.compiler.is_compiling():
            return self.matrix.dequantize(self.dtype)
        return values_of(self.matrix, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is nn.functional.linear
            and len(args) > 1
            and isinstance(args[1], PackedTensor)
            and not isinstance(args[0], PackedTensor)
        ):
            return _multiply(*args, **kwargs)
        if cls.describes(func, args, kwargs):
            # torch's own way to disable subclasses: no exception can leave it switched on
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs)
        own = args[0] if args else None
        if isinstance(own, PackedTensor):
            if func in _READING_CODES:
                return own.alike()
            if func is Tensor.__deepcopy__:  # codes never change
                return nn.Parameter(own.alike(), requires_grad=False)
            if func in _PUTTING_VALUES:
                given = args[1]
                if isinstance(given, PackedTensor) and given.matrix is own.matrix:
                    return own
                refuse_change()
            if (
                func in _CONVERSIONS
                and not kwargs.get("copy")
                and _is_unchanged_by(own, func, args, kwargs)
            ):
                return own
        if func in _REFUSED or getattr(func, "__name__", "") == "__set__":
            refuse_change()
        return with_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_change()

    def __repr__(self, **_: Any) -> str:
        return f"PackedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, {self.matrix.format})"


def refuse_change() -> Any:
    """Raises: a weight is in memory only as codes."""
    raise UnsupportedUseError(
        "this weight is quantised in the checkpoint, or in the code of cache_code, or an embedding "
        "in its file, and stays so: its values can be read and copied, but not changed, trained, "
        "shared or replaced; "
        "train adapters beside it, without merging them, or load bf16 with cache_code none"
    )


def packed_parameter(matrix: AnyMatrix, dtype: torch.dtype) -> nn.Parameter:
    """A frozen parameter of a linear layer, held as codes."""
    return nn.Parameter(PackedTensor(matrix, dtype), requires_grad=False)


def dense_memory(model: nn.Module) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """Each tensor in host memory that holds parameters, and a function that replaces it by an equal
    one."""
    seen: set[int] = set()
    for parameter in model.parameters():
        packed = [parameter, parameter.whole] if isinstance(parameter, PackedTensor) else []
        for weight in packed:
            matrix = getattr(weight, "matrix", None)
            if isinstance(matrix, QuantizedMatrix) and id(weight) not in seen:
                seen.add(id(weight))
                for name in ("codes", "scales", "zero_points", "global_scale"):
                    if (part := getattr(matrix, name)) is not None:
                        yield part, partial(_put_part, weight, name)
        if not isinstance(parameter, AbsentTensor) and parameter.is_cpu and parameter.numel():
            yield parameter.data, partial(_put_values, parameter)


def _put_part(weight: PackedTensor, name: str, part: Tensor) -> None:
    weight.matrix = replace(cast(QuantizedMatrix, weight.matrix), **{name: part})
    weight.product = PreparedQuantizedLinear(weight.matrix)


def _put_values(parameter: nn.Parameter, values: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = values


def join_packed(parts: Sequence[nn.Linear]) -> None:
    """Joins the codes of linear layers into one matrix; each layer keeps its rows of it."""
    matrices = [cast(PackedTensor, part.weight).matrix for part in parts]
    if all(isinstance(matrix, PlanesMatrix) for matrix in matrices):
        joined: Any = _join_coded(cast("list[PlanesMatrix]", matrices))
    elif any(isinstance(matrix, PlanesMatrix) for matrix in matrices):
        return
    else:
        joined = _join_quantized(cast("list[QuantizedMatrix]", matrices))
    if joined is None:
        return
    whole, first = PackedTensor(joined, parts[0].weight.dtype), 0
    for part in parts:
        end = first + part.out_features
        part.weight = packed_parameter(joined.part(first, end), whole.dtype)
        cast(PackedTensor, part.weight).whole = whole
        first = end


def _join_quantized(matrices: list[QuantizedMatrix]) -> QuantizedMatrix | None:
    kind, num_cols = matrices[0].format, matrices[0].num_cols
    group = kind.group_rows
    if (
        any((matrix.format, matrix.num_cols) != (kind, num_cols) for matrix in matrices)
        or kind.global_scale != "none"
        or group == 0
        or any(len(matrix.codes) % group for matrix in matrices[:-1])
    ):
        return None
    codes = torch.cat([matrix.codes for matrix in matrices])
    others = [
        None if column[0] is None else torch.cat(cast("list[Tensor]", column))
        for column in ([m.scales for m in matrices], [m.zero_points for m in matrices])
    ]
    return QuantizedMatrix(kind, num_cols, codes, *others)


def _join_coded(matrices: list[PlanesMatrix]) -> PlanesMatrix | None:
    num_cols = matrices[0].num_cols
    if any(len(m.coded) % GROUP_ROWS for m in matrices[:-1]):
        return None
    if any(matrix.num_cols != num_cols for matrix in matrices):
        return None
    joined = encode_planes(torch.cat([values_of(matrix, torch.bfloat16) for matrix in matrices]))
    planned = sum(coded_bytes(*matrix.shape) for matrix in matrices)
    return joined if joined.nbytes <= planned else None


def whole_of(weights: Sequence[Tensor | None]) -> PackedTensor | None:
    """The `join_packed` result of these weights; None unless they are all of it, in order."""
    whole = getattr(weights[0], "whole", None)
    if whole is None or any(getattr(weight, "whole", None) is not whole for weight in weights):
        return None
    places = [_address(cast(PackedTensor, weight).matrix) for weight in weights]
    return whole if places == sorted(set(places)) else None


def _address(matrix: AnyMatrix) -> int:
    rows = matrix.coded if isinstance(matrix, PlanesMatrix) else matrix.codes
    return rows.data_ptr()


def may_stay_packed(model: PreTrainedModel, name: str, weight: Weight) -> bool:
    """Whether a model only multiplies by a weight, as by that of a linear layer."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    if type(module) is not nn.Linear or own_name != "weight":
        return False
    if isinstance(weight, TensorEntry):
        is_bf16 = weight.dtype == "BF16" and module.weight.dtype == torch.bfloat16
        if not is_bf16 or weight.convert or len(weight.shape) != 2:
            return False
        is_shorter = coded_row_bytes(weight.shape[1]) < 2 * weight.shape[1]
        if path.rpartition(".")[2] in _READ_AS_VALUES or not is_shorter:
            return False
    elif weight.lead or weight.is_transposed or (weight.convert and not weight.moves_codes):
        return False
    return _is_own_weight(model, name, weight, module.weight)


def may_stay_in_file(model: PreTrainedModel, name: str, entry: Weight) -> bool:
    """Whether a model only looks up rows of a weight, which the file has as they are."""
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(module, nn.Embedding) or own_name != "weight" or module.max_norm is not None:
        return False
    is_plain = isinstance(entry, TensorEntry) and not entry.convert
    return (
        is_plain
        and TORCH_DTYPES.get(entry.dtype) == module.weight.dtype
        and _is_own_weight(model, name, entry, module.weight)
    )


def _is_own_weight(model: PreTrainedModel, name: str, weight: Weight, parameter: Tensor) -> bool:
    """Whether a weight has its parameter's shape, is not tied, and keeps the model's dtype."""
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    wide = private.dtype_plan(model, parameter.dtype)
    return (
        weight.shape == parameter.shape
        and name not in {*tied, *tied.values()}
        and not any(re.search(pattern.replace("*", ".*"), name) for pattern in wide)
    )


def _keep(
    model: PreTrainedModel,
    experts: ExpertMap,
    reader: DenseReader,
    device: torch.device,
    stored: Mapping[str, str],
) -> None:
    """Gives linear layers their codes and embeddings the rows that stay in their files."""
    parameters: dict[str, nn.Parameter] = {}
    for entry_name, name in experts.packed_dense.items():
        weight = experts.dense_entries[entry_name]
        read: Any = read_coded if isinstance(weight, TensorEntry) else read_matrix
        matrix = read(reader, weight)
        if device.type != "cpu":
            matrix = matrix.to(device)
        parameters[name] = packed_parameter(matrix, reader.dtype)
    for entry_name, name in stored.items():
        rows = StoredRows(cast(TensorEntry, experts.dense_entries[entry_name]))
        parameters[name] = nn.Parameter(RowsTensor(rows), requires_grad=False)
    for name, parameter in parameters.items():
        private.mark_as_initialized(parameter)
        path, _, own_name = name.rpartition(".")
        model.get_submodule(path).register_parameter(own_name, parameter)


def _multiply(input: Tensor, weight: PackedTensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: `[..., K]` to `[..., N]`."""
    y = weight.product(input, bias)
    return _between_graphs(input, weight, bias) if y is None else y


def _multiply_any(input: Tensor, weight: PackedTensor, bias: Tensor | None) -> Tensor:
    if forward_ad._current_level >= 0:
        return nn.functional.linear(input, weight.values(), bias)
    x_RK = input.reshape(-1, input.shape[-1])
    is_autocast = torch.is_autocast_enabled(input.device.type)
    multiply = frozen_linear if needs_torch(input, bias) else quantized_linear
    y_RN = multiply(x_RK, weight.matrix, bias)
    y_RN = y_RN if is_autocast else y_RN.to(input.dtype)
    return y_RN.view(*input.shape[:-1], len(weight))


# graphs break here; the product is the same as in other calls
_between_graphs: Any = torch.compiler.disable(_multiply_any)


def _is_unchanged_by(own: PackedTensor, func: Any, args: Any, kwargs: Any) -> bool:
    probe = torch.empty(0, dtype=own.dtype, device=own.device)
    converted = func(probe, *args[1:], **kwargs)
    return isinstance(converted, Tensor) and (
        (converted.dtype, converted.device) == (probe.dtype, probe.device)
    )


def with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with values instead of codes."""
    written: list[Tensor] = []

    def widened(part: Any) -> Any:
        if isinstance(part, PackedTensor):
            with torch.inference_mode(False):  # inference tensors have no version counter
                written.append(part.values())
            return written[-1]
        if isinstance(part, list | tuple) and any(isinstance(p, PackedTensor) for p in part):
            return type(part)(map(widened, part))
        return part

    args = [widened(part) for part in args]
    kwargs = {name: widened(part) for name, part in kwargs.items()}
    return _call_reading(func, args, kwargs, written)


class _ValuesView(Tensor):
    """A view of values that were written out. Writing to it is refused, since it would be lost."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = torch._C._disabled_torch_function_impl
        parts = [arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, _ValuesView)]
        return _call_reading(lambda *a, **k: call(func, types, a, k), args, kwargs or {}, parts)


def _call_reading(func: Any, args: Any, kwargs: Any, values: list[Any]) -> Any:
    """Calls a function that may read values; marks views of them as `_ValuesView`."""
    plainly = torch._C.DisableTorchFunctionSubclass
    with plainly():
        before = [part._version for part in values]
    result = func(*args, **kwargs)
    with plainly():
        if [part._version for part in values] != before:
            refuse_change()
        bases = {id(part if part._base is None else part._base) for part in values}

        def marked(one: Any) -> Any:
            is_view = isinstance(one, Tensor) and id(one._base) in bases
            return one.as_subclass(cast(Any, _ValuesView)) if is_view else one

        return (
            type(result)(map(marked, result)) if type(result) in (list, tuple) else marked(result)
        )


class StoredRows:
    """The rows ``[N, D]`` of a weight in its file. Raises CheckpointError: it cannot be opened."""

    def __init__(self, entry: TensorEntry) -> None:
        self.shape, self.dtype = entry.shape, TORCH_DTYPES[entry.dtype]
        self.device = torch.device("cpu")
        self._entry, self._file = entry, CheckpointFile(entry.file, direct=False)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of tokens ``[..., D]``; each token's row is read once.

        Raises:
            IndexError: a token is not one of the N.
            CheckpointError: the file has changed, or the disk reports an error.
        """
        tokens = ids.flatten().tolist()
        places = {token: place for place, token in enumerate(dict.fromkeys(tokens))}
        rows = torch.empty(len(places), self.shape[1], dtype=self.dtype)
        for token, row in zip(places, rows, strict=True):
            if not 0 <= token < self.shape[0]:
                raise IndexError("index out of range in self")  # as torch has it
            self._read(token, row)
        self._file.require_unchanged()
        return rows[[places[token] for token in tokens]].view(*ids.shape, self.shape[1])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(*self.shape, dtype=self.dtype)
        self._read(0, rows)
        self._file.require_unchanged()
        return rows.to(dtype)

    def _read(self, first: int, into: Tensor) -> None:
        entry, buffer = self._entry, host_view(into.flatten().view(torch.uint8))
        offset = entry.offset + first * self.shape[1] * self.dtype.itemsize
        try:
            self._file.read(offset, buffer, len(buffer))
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {entry.file}: {error}") from None


class RowsTensor(PackedTensor):
    """The weight of an embedding whose rows are `StoredRows`; other uses get all values."""

    matrix: Any

    @staticmethod
    def __new__(cls, rows: StoredRows) -> RowsTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        made: Any = AbsentTensor.__new__(cls, torch.Size(rows.shape), rows.dtype, rows.device)
        made.matrix = rows
        return made

    def values(self) -> Tensor:
        return self.matrix.dequantize(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding and isinstance(args[1], RowsTensor):
            return _look_up_uncompiled(args[1].matrix.look_up, args[0])
        if func is nn.functional.linear:
            return with_values(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    def alike(self) -> RowsTensor:
        return RowsTensor(self.matrix)

    def __repr__(self, **_: Any) -> str:
        return f"RowsTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


_look_up_uncompiled: Any = torch.compiler.disable(lambda look_up, ids: look_up(ids))


def round_activations(experts: ExpertMap, device: torch.device) -> None:
    """Makes all products with weights that stay quantised round their rows to int8."""
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"activations='int8' is for models on the CPU, got the device {device}"
        )
    is_rounded = False
    for packings in experts.packings:
        for name, packing in packings.items():
            if isinstance(packing, Packing) and packing.format.takes_int8_activations:
                packings[name] = packing._replace(format=_rounding(packing.format))
                is_rounded = True
    for name in experts.packed_dense:
        weight = experts.dense_entries[name]
        if isinstance(weight, PackedWeight) and weight.format.takes_int8_activations:
            experts.dense_entries[name] = replace(weight, format=_rounding(weight.format))
            is_rounded = True
    if not is_rounded:
        raise UnsupportedModelError(
            "activations='int8' needs weights in GGUF's blocks, or in MXFP4, in int4, or in int8 "
            "without zero points, in groups of 32, 64, 128, ... columns, that stay so in memory; "
            "this model has none: leave it out"
        )


def _rounding(kind: WeightFormat) -> WeightFormat:
    return replace(kind, int8_activations=True)
