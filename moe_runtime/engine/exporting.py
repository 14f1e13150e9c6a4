"""A changed model as a checkpoint like the one it was read from: same names, same files.

The places that the experts were read from are the places that they are written to, so a checkpoint
is written expert by expert, whatever its layout, and never is in memory as a whole.
"""

from __future__ import annotations

import bisect
import json
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.engine.checkpoint import TORCH_DTYPES, Checkpoint
from moe_runtime.engine.expert_map import ExpertMap
from moe_runtime.engine.expert_tensors import TensorsOf, matrices_of
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.folders import replace_folder
from moe_runtime.store.layout import TensorRange
from moe_runtime.store.safetensors_index import TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX_NAME = "model.safetensors.index.json"
COPY_BYTES = 2**24
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_NOT_COPIED = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")


@dataclass
class _Output:
    """One file of the new checkpoint.

    Attributes:
        path: the file.
        header: as safetensors has it, with its length before it.
        offsets: first byte of each tensor, by name.
        dtypes: of each tensor.
        num_bytes: of the file.
    """

    path: Path
    header: bytes = b""
    offsets: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype | None] = field(default_factory=dict)
    num_bytes: int = 0


class LikeCheckpoint:
    """Writes checkpoints of a model with the names and files of the one that it was read from.

    Args:
        model: transformers' model, as it was when the experts were mapped.
        checkpoint: what it was read from.
        experts: where its experts lie there.

    Raises:
        UnsupportedModelError: a dense tensor of the checkpoint cannot be had from the model.
    """

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, experts: ExpertMap) -> None:
        self._model = model
        self._checkpoint = checkpoint
        self._experts = experts
        self._sorted: dict[Path, list[TensorEntry]] = {}
        for entry in sorted(checkpoint.entries.values(), key=lambda entry: entry.offset):
            if entry.num_bytes:
                self._sorted.setdefault(entry.file, []).append(entry)
        self._dense_tensors({n: t.to("meta") for n, t in model.state_dict().items()})

    def write(
        self,
        folder: Path,
        state: Mapping[str, Tensor],
        tensors_of: TensorsOf,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a changed model.

        Args:
            folder: of the new checkpoint; replaced once the new one is whole.
            state: everything but the experts, under the names that the model has for it.
            tensors_of: gives one expert's slices of its module's parameters.
            dtype: of floating-point tensors; None keeps each as it was.

        Raises:
            OSError: it cannot be written; an older one stays as it was.
        """
        with replace_folder(folder) as new:
            outputs = self._plan(new, dtype)
            self._write_tensors(outputs, state, tensors_of)
            self._write_rest(new, outputs, dtype)

    def _plan(self, folder: Path, dtype: torch.dtype | None) -> dict[Path, _Output]:
        of_model = {*self._experts.dense_entries, *self._expert_names()}
        outputs: dict[Path, _Output] = {}
        for file, entries in self._by_file().items():
            output = outputs[file] = _Output(folder / file.name)
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            for entry in entries:
                kept = TORCH_DTYPES.get(entry.dtype)
                wanted = kept
                if dtype is not None and entry.name in of_model and kept is not None:
                    wanted = dtype if kept.is_floating_point else kept
                size = entry.num_bytes
                if wanted is not None:
                    size = math.prod(entry.shape) * wanted.itemsize
                name = entry.dtype if wanted is None else _NAMES[wanted]
                output.offsets[entry.name], output.dtypes[entry.name] = end, wanted
                header[entry.name] = {
                    "dtype": name,
                    "shape": list(entry.shape),
                    "data_offsets": [end, end + size],
                }
                end += size
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            output.header = len(text).to_bytes(8, "little") + text
            lead = len(output.header)
            output.offsets = {name: lead + offset for name, offset in output.offsets.items()}
            output.num_bytes = lead + end
        return outputs

    def _write_tensors(
        self,
        outputs: Mapping[Path, _Output],
        state: Mapping[str, Tensor],
        tensors_of: TensorsOf,
    ) -> None:
        files = {}
        try:
            for file, output in outputs.items():
                files[file] = os.open(output.path, os.O_RDWR | os.O_CREAT, 0o666)
                os.truncate(files[file], output.num_bytes)
                _write_at(files[file], output.header, 0)
            dense = self._dense_tensors(state)
            copied = {*self._checkpoint.entries} - dense.keys() - self._expert_names()
            for name, entry in self._checkpoint.entries.items():
                offset = outputs[entry.file].offsets[name]
                if name in dense:
                    dtype = outputs[entry.file].dtypes[name]
                    content = dense[name].detach().to("cpu", dtype).contiguous()
                    _write_tensor(files[entry.file], content, offset)
                elif name in copied:
                    _copy(entry, files[entry.file], offset)
            for place, content in self._expert_matrices(outputs, tensors_of):
                place.write(files[place.file], content)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _expert_matrices(
        self, outputs: Mapping[Path, _Output], tensors_of: TensorsOf
    ) -> Iterator[tuple[_Place, Tensor]]:
        """Every matrix of every expert, and where it goes."""
        for key, layout in self._experts.layouts.items():
            module = self._experts.modules[key.layer].module
            matrices = matrices_of(module, tensors_of(key))
            for name, found in zip(self._experts.matrices[key.layer], layout.tensors, strict=True):
                entry = self._entry_of(found)
                output = outputs[entry.file]
                dtype = output.dtypes[entry.name]
                assert dtype is not None, "experts have a dtype to compute with"
                first = (found.offset - entry.offset) // found.dtype.itemsize
                start = output.offsets[entry.name] + first * dtype.itemsize
                yield _Place(entry.file, start, found, dtype), matrices[name].to("cpu", dtype)

    def _write_rest(
        self, folder: Path, outputs: Mapping[Path, _Output], dtype: torch.dtype | None
    ) -> None:
        """Configuration, tokenizer, index: what is no tensor."""
        source = self._checkpoint.folder
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix not in _NOT_COPIED and path.name != INDEX_NAME:
                shutil.copyfile(path, folder / path.name)
        if (source / INDEX_NAME).is_file():
            total = sum(output.num_bytes - len(output.header) for output in outputs.values())
            weight_map = {name: e.file.name for name, e in self._checkpoint.entries.items()}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        if dtype is not None:
            path = folder / "config.json"
            config = json.loads(path.read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            config["dtype"] = str(dtype).removeprefix("torch.")
            path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _dense_tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the checkpoint that are no experts', by their names there."""
        from transformers.core_model_loading import revert_weight_conversion

        targets = {f"{m.name}.{name}" for m in self._experts.modules for name in m.parameters}
        state = {name: tensor for name, tensor in state.items() if name not in targets}
        reverted = revert_weight_conversion(self._model, dict(state))
        prefix = f"{self._model.base_model_prefix}."
        found = {}
        for name, entry in self._experts.dense_entries.items():
            names = (name, f"{prefix}{name}", name.removeprefix(prefix))
            tensor = next((reverted[n] for n in names if n in reverted), state.get(name))
            if tensor is None or tuple(tensor.shape) != entry.shape:
                raise UnsupportedModelError(
                    f"{self._model.config.model_type}: {name} of the checkpoint cannot be written "
                    "again from the model's parameters; this family cannot be exported"
                )
            found[name] = tensor
        return found

    def _by_file(self) -> dict[Path, list[TensorEntry]]:
        """The entries of each file, widest elements first, so that all are aligned."""
        files: dict[Path, list[TensorEntry]] = {}
        for entry in self._checkpoint.entries.values():
            files.setdefault(entry.file, []).append(entry)
        for entries in files.values():
            entries.sort(key=lambda e: (-e.num_bytes // max(1, math.prod(e.shape)), e.offset))
        return files

    def _expert_names(self) -> set[str]:
        ranges = (tensor for layout in self._experts.layouts.values() for tensor in layout.tensors)
        return {self._entry_of(found).name for found in ranges}

    def _entry_of(self, found: TensorRange) -> TensorEntry:
        entries = self._sorted[found.file]
        place = bisect.bisect_right(entries, found.offset, key=lambda entry: entry.offset)
        return entries[place - 1]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one matrix of one expert goes.

    Attributes:
        file: of the old checkpoint; the new one has one like it.
        start: first byte.
        found: shape and strides.
        dtype: of the new one.
    """

    file: Path
    start: int
    found: TensorRange
    dtype: torch.dtype

    def write(self, descriptor: int, content: Tensor) -> None:
        """Writes the elements one after another, or between those of other matrices."""
        shape, stride = self.found.shape, self.found.stride
        if torch.empty(shape, device="meta").stride() == stride:
            _write_tensor(descriptor, content.contiguous(), self.start)
            return
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        begin = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        lead, size = self.start - begin, (last + 1) * self.dtype.itemsize
        memory = mmap.mmap(descriptor, lead + size, offset=begin)
        flat = torch.frombuffer(memory, dtype=torch.uint8)[lead : lead + size].view(self.dtype)
        flat.as_strided(shape, stride, flat.storage_offset()).copy_(content)


def _write_tensor(descriptor: int, content: Tensor, offset: int) -> None:
    if content.numel():
        flat: Any = content.reshape(-1).view(torch.uint8).numpy()
        _write_at(descriptor, memoryview(flat), offset)


def _write_at(descriptor: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while len(view):
        done = os.pwrite(descriptor, view[:COPY_BYTES], offset)
        view, offset = view[done:], offset + done


def _copy(entry: TensorEntry, descriptor: int, offset: int) -> None:
    """A tensor that the model has no use for stays as it was."""
    with entry.file.open("rb") as file:
        for begin in range(0, entry.num_bytes, COPY_BYTES):
            file.seek(entry.offset + begin)
            part = file.read(min(COPY_BYTES, entry.num_bytes - begin))
            _write_at(descriptor, part, offset + begin)
