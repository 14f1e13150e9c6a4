"""Writes a changed model as a checkpoint with the names and files of its source.

Experts are written to the places that they were read from, one by one, never all in memory.
"""

from __future__ import annotations

import fnmatch
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.checkpoints.checkpoint import Checkpoint, require_plain
from moe_runtime.checkpoints.dense_weights import DenseReader
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import (
    CheckpointExperts,
    TensorFinder,
    TensorsOf,
    matrices_of,
)
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    TORCH_DTYPES,
    TensorEntry,
    copy_tensor,
    widest_first,
    write_at,
    write_index,
)
from moe_runtime.errors import UnsupportedModelError, UnsupportedUseError
from moe_runtime.files import replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NOT_COPIED = (
    *(f"*{end}" for end in (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")),
    *("*.index.json", "adapter_*", "trainer_state*"),
    *("readme*", "*model*card*", "*model*index*", "*result*", "*metric*", "*benchmark*"),
    *("eval*", "*[._-]eval*"),
)
"""Weights, indices of weights, and texts about the first checkpoint only."""


@dataclass
class _Output:
    path: Path
    tensors: dict[str, TensorEntry]
    header: bytes = b""  # in the format of safetensors, length included
    offsets: dict[str, int] = field(default_factory=dict)  # first byte of each tensor, by name
    num_bytes: int = 0

    def __post_init__(self) -> None:
        offsets, self.header, size = widest_first(self.tensors.values())
        self.offsets = {name: len(self.header) + offset for name, offset in offsets.items()}
        self.num_bytes = len(self.header) + size

    def dtype_of(self, name: str) -> torch.dtype | None:
        return TORCH_DTYPES.get(self.tensors[name].dtype)


class LikeCheckpoint:
    """Writes checkpoints with the names and files of the one that the model was read from.

    Attributes:
        rounded: tensors around the experts of which the model has fewer digits than the files.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, experts: ExpertMap) -> None:
        for entry in checkpoint.entries.values():
            if entry.file.suffix != ".safetensors":
                raise UnsupportedModelError(
                    f"{entry.file}: only checkpoints of safetensors files can be written again; "
                    "load this one in transformers, and save it from there"
                )
        self._model = model
        self._checkpoint = checkpoint
        self._experts = experts
        self._finder = TensorFinder(checkpoint.entries.values())
        held = self._dense_tensors({n: t.to("meta") for n, t in model.state_dict().items()})
        self.rounded = [name for name, own in held.items() if _is_rounded(own, experts, name)]

    def tensor_bytes(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        """Bytes of each tensor that `write_around_experts` writes, by name."""
        sizes = {name: entry.num_bytes for name, entry in self._checkpoint.entries.items()}
        dense = self._dense_tensors(state, same_shapes=False)
        packed = self._checkpoint.packed
        return sizes | {n: tensor.nbytes for n, tensor in dense.items() if n not in packed}

    def write(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        tensors_of: TensorsOf,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a changed model."""
        require_plain(self._checkpoint, "training")
        with replace_folder(folder) as new:
            of_model = {*self._experts.dense_entries, *self._expert_names()}
            wanted = {} if dtype is None else dict.fromkeys(of_model, dtype)
            outputs = self._plan(new, self._own_files(), wanted)
            self._write_tensors(outputs, self._dense_tensors(state), tensors_of)
            self._write_rest(new, outputs, dtype)

    def write_around_experts(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        file_of: Mapping[str, str],
        tensors_of: TensorsOf | None = None,
    ) -> None:
        """Writes the dense tensors of a model; experts are those of the checkpoint."""
        dense = self._dense_tensors(state, same_shapes=False)
        quantised = {n: dense.pop(n) for n in self._checkpoint.packed if n in dense}
        self._require_unchanged(quantised)
        outputs = self._plan(folder, file_of, {name: t.dtype for name, t in dense.items()}, dense)
        self._write_tensors(outputs, dense, tensors_of)

    def _require_unchanged(self, quantised: Mapping[str, Tensor]) -> None:
        """Refuses values that differ from the codes', since nothing is quantised again."""
        weights = [self._checkpoint.packed[name] for name in quantised]
        reader = DenseReader(weights, self._checkpoint.dtype, None)
        with closing(reader):
            for weight in weights:
                found = quantised[weight.name].detach().cpu()
                wanted = reader.read(weight).to(found.dtype)
                if not torch.equal(_bits(found), _bits(wanted)):
                    raise UnsupportedUseError(
                        f"{weight.name}: its values are not those of the checkpoint's codes any "
                        "more, and are not quantised anew; save adapters by themselves, or train "
                        "a plain checkpoint"
                    )

    def _own_files(self) -> dict[str, str]:
        return {name: entry.file.name for name, entry in self._checkpoint.entries.items()}

    def _plan(
        self,
        folder: Path,
        file_of: Mapping[str, str],
        dtypes: Mapping[str, torch.dtype],
        dense: Mapping[str, Tensor] | None = None,
    ) -> dict[str, _Output]:
        """The place of each tensor, with the named dtypes and the shapes in `dense`."""
        files: dict[str, dict[str, TensorEntry]] = {}
        for entry in sorted(self._checkpoint.entries.values(), key=lambda entry: entry.offset):
            shape = entry.shape
            if dense is not None and entry.name in dense:
                shape = tuple(dense[entry.name].shape)
            dtype, size = TORCH_DTYPES.get(entry.dtype), entry.num_bytes
            if dtype is not None:
                if dtype.is_floating_point:
                    dtype = dtypes.get(entry.name, dtype)
                size = math.prod(shape) * dtype.itemsize
            name = entry.dtype if dtype is None else _NAMES[dtype]
            planned = replace(entry, dtype=name, shape=shape, num_bytes=size)
            files.setdefault(file_of[entry.name], {})[entry.name] = planned
        return {file: _Output(folder / file, tensors) for file, tensors in files.items()}

    def _write_tensors(
        self,
        outputs: Mapping[str, _Output],
        dense: Mapping[str, Tensor],
        tensors_of: TensorsOf | None,
    ) -> None:
        """Writes the given tensors and copies the others, experts too unless they are given."""
        place_of = {name: output for output in outputs.values() for name in output.offsets}
        written = self._expert_names() if tensors_of is not None else set()
        with ExitStack() as stack:
            files: dict[Path, int] = {}
            for output in outputs.values():
                files[output.path] = stack.enter_context(output.path.open("w+b")).fileno()
                os.truncate(files[output.path], output.num_bytes)
                write_at(files[output.path], output.header, 0)
            for name, entry in self._checkpoint.entries.items():
                output = place_of[name]
                file, offset = files[output.path], output.offsets[name]
                if name in dense:
                    content = dense[name].detach().to("cpu", output.dtype_of(name)).contiguous()
                    _write_tensor(file, content, offset)
                elif name not in written:
                    copy_tensor(entry, file, offset)
            if tensors_of is not None:
                self._write_experts(files, place_of, tensors_of)

    def _write_experts(
        self, files: Mapping[Path, int], place_of: Mapping[str, _Output], tensors_of: TensorsOf
    ) -> None:
        for key, layout in self._experts.layouts.items():
            matrices = matrices_of(self._experts.modules[key.layer].module, tensors_of(key))
            for name, found in zip(self._experts.matrices[key.layer], layout.tensors, strict=True):
                entry = self._finder.entry_of(found)
                output = place_of[entry.name]
                dtype = output.dtype_of(entry.name)
                assert dtype is not None, "experts have a dtype to compute with"
                first = (found.offset - entry.offset) // found.dtype.itemsize
                start = output.offsets[entry.name] + first * dtype.itemsize
                content = matrices[name].to("cpu", dtype)
                _write_matrix(files[output.path], content, start, found.stride)

    def _write_rest(
        self, folder: Path, outputs: Mapping[str, _Output], dtype: torch.dtype | None
    ) -> None:
        source = self._checkpoint.folder
        for path in sorted(source.iterdir()):
            name = path.name.lower()
            if path.is_file() and not any(fnmatch.fnmatchcase(name, one) for one in _NOT_COPIED):
                shutil.copyfile(path, folder / path.name)
        if (source / INDEX_FILE_NAME).is_file():
            total = sum(output.num_bytes - len(output.header) for output in outputs.values())
            write_index(folder / INDEX_FILE_NAME, self._own_files(), {"total_size": total})
        if dtype is not None:
            path = folder / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _dense_tensors(
        self, state: Mapping[str, Tensor], *, same_shapes: bool = True
    ) -> dict[str, Tensor]:
        targets = {f"{m.name}.{name}" for m in self._experts.modules for name in m.parameters}
        state = {name: tensor for name, tensor in state.items() if name not in targets}
        reverted = private.revert_weight_conversion(self._model, dict(state))
        prefix = f"{self._model.base_model_prefix}."
        found = {}
        for name, entry in self._experts.dense_entries.items():
            names = (name, f"{prefix}{name}", name.removeprefix(prefix))
            tensor = next((reverted[n] for n in names if n in reverted), state.get(name))
            if tensor is None or (same_shapes and tuple(tensor.shape) != entry.shape):
                raise UnsupportedModelError(
                    f"{self._model.config.model_type}: {name} of the checkpoint cannot be written "
                    "again from the model's parameters; this family cannot be exported"
                )
            found[name] = tensor
        return found

    def _expert_names(self) -> set[str]:
        return self._finder.of_experts(self._experts)


def _is_rounded(held: Tensor, experts: ExpertMap, name: str) -> bool:
    dtype = TORCH_DTYPES.get(experts.dense_entries[name].dtype)
    if dtype is None or not (dtype.is_floating_point and held.is_floating_point()):
        return False
    return torch.finfo(held.dtype).eps > torch.finfo(dtype).eps


def _write_matrix(descriptor: int, content: Tensor, start: int, stride: tuple[int, ...]) -> None:
    """Writes a matrix; its elements may alternate with those of other matrices."""
    shape = content.shape
    if torch.empty(shape, device="meta").stride() == stride:
        _write_tensor(descriptor, content.contiguous(), start)
        return
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    lead, size = start - begin, (last + 1) * content.element_size()
    memory = mmap.mmap(descriptor, lead + size, offset=begin)
    flat = torch.frombuffer(memory, dtype=torch.uint8)[lead : lead + size].view(content.dtype)
    flat.as_strided(shape, stride, flat.storage_offset()).copy_(content)


def _bits(tensor: Tensor) -> Tensor:
    """A tensor's bytes: equal for equal NaN, different for zeros of other signs."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _write_tensor(descriptor: int, content: Tensor, offset: int) -> None:
    if content.numel():
        flat: Any = content.reshape(-1).view(torch.uint8).numpy()
        write_at(descriptor, memoryview(flat), offset)


def as_plain(
    model: PreTrainedModel, checkpoint: Checkpoint, experts: ExpertMap
) -> tuple[Checkpoint, ExpertMap]:
    """The plain checkpoint, whose file of experts does not exist yet, and its experts."""
    assert checkpoint.runs is not None
    state = {}
    for described, layer in zip(experts.modules, checkpoint.runs.manifest.layers, strict=True):
        if type(described.module).__module__.startswith("moe_runtime."):
            raise UnsupportedModelError(
                f"{checkpoint.folder}: experts of {model.config.model_type} cannot be given the "
                "names again that they had before they were packed; save the model of the "
                "checkpoint that was packed"
            )
        dtypes = {form.name: form.dtype for form in layer.matrices}
        for name in described.parameters:
            matrix = name.replace("gate_up_proj", "up").replace("_proj", "")
            parameter = described.module.get_parameter(name).detach()
            state[f"{described.name}.{name}"] = parameter.to(dtypes[matrix])
    runs = checkpoint.runs.names
    entries = {name: entry for name, entry in checkpoint.entries.items() if name not in runs}
    file, end = checkpoint.folder / "unpacked.safetensors", 0
    for name, tensor in private.revert_weight_conversion(model, state).items():
        shape, size = tuple(tensor.shape), math.prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = TensorEntry(name, file, _NAMES[tensor.dtype], shape, end, size)
        end += size
    plain = replace(checkpoint, entries=entries, packed={}, runs=None)
    return plain, map_experts(model, plain)


@contextmanager
def unpacked(experts: ExpertMap) -> Iterator[TensorsOf]:
    """Gives experts of a packed checkpoint in their modules' layout, in fp32."""
    names = [described.parameters for described in experts.modules]
    with closing(CheckpointExperts(experts, names, torch.float32)) as source:
        yield lambda key: dict(zip(names[key.layer], source.tensors_of(key), strict=True))
