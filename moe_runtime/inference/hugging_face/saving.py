"""Saves a loaded model as a checkpoint, with experts copied from their files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint, require_plain
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import TensorsOf
from moe_runtime.checkpoints.export import LikeCheckpoint
from moe_runtime.checkpoints.opening import QUANTIZATION_FILE, build_on_meta, open_checkpoint
from moe_runtime.checkpoints.safetensors_index import write_index
from moe_runtime.checkpoints.strict_json import QUANTIZATION_NAMES, parse_object
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.files import replace_folder, write_text
from moe_runtime.memory.source import FileVersion, file_version

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MEANINGLESS = {
    "push_to_hub": "save first, then call model.push_to_hub",
    "distributed_checkpoint": "leave it out: one process writes the whole checkpoint",
}
_NEEDED = {
    "safe_serialization": "the files are safetensors",
    "save_original_format": "names and layout are those of the checkpoint that was loaded",
}


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Sizes and names of a checkpoint's files; ``max_shard_size`` in bytes or as ``"5GB"``."""

    max_shard_size: int | str = "50GB"
    variant: str | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> SaveOptions:
        """Reads the options of ``save_pretrained``. Raises UnsupportedUseError: one is not
        supported."""
        rest = dict(options)
        known = {name: rest.pop(name) for name in ("max_shard_size", "variant") if name in rest}
        for name in ("token", "save_peft_format"):  # for the hub and for adapters
            rest.pop(name, None)
        for name, value in rest.items():
            if (name in _NEEDED and value) or (name in _MEANINGLESS and not value):
                continue
            reason = _MEANINGLESS.get(name) or _NEEDED.get(name) or "there is no such option"
            raise UnsupportedUseError(
                f"save_pretrained of a loaded model does not take {name}={value!r}: {reason}"
            )
        return SaveOptions(**known)

    @property
    def _ending(self) -> str:
        return "" if self.variant is None else f".{self.variant}"

    @property
    def stem(self) -> str:
        """The name of a single file, without its suffix."""
        return f"model{self._ending}"

    @property
    def index_name(self) -> str:
        """The name of the index of several files."""
        return f"model.safetensors.index{self._ending}.json"

    def is_weights(self, name: str) -> bool:
        """Whether a save with any shard size could have written this file."""
        series = rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors"
        return name == self.index_name or re.fullmatch(series, name) is not None


def save_around_experts(
    model: PreTrainedModel,
    checkpoint_folder: Path,
    folder: Path,
    state: Mapping[str, Tensor],
    options: SaveOptions,
    versions: set[FileVersion],
) -> None:
    """Writes a loaded model as a checkpoint that transformers loads.

    The folder is replaced after all files are complete; other files than weights are kept.

    Args:
        checkpoint_folder: the source of the experts.
        state: all other weights, by the model's names.
        versions: of the files of experts. A save over the checkpoint itself adds the new files.

    Raises:
        CheckpointError: the checkpoint changed since it was loaded.
        OSError: writing fails; the old files stay.
        UnsupportedModelError: experts of the family cannot be unpacked.
        UnsupportedUseError: quantised weights were changed, or a packed checkpoint would be
            overwritten.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    checkpoint = open_checkpoint(checkpoint_folder, model.dtype)
    if checkpoint.folder.is_file():
        require_plain(checkpoint, "saving")
    if checkpoint.runs is not None and folder.exists() and folder.samefile(checkpoint.folder):
        raise UnsupportedUseError(
            f"{folder} is the packed checkpoint that this model is read from, and a plain one "
            "would be written: name another folder"
        )
    experts, exporter, tensors_of = _exporter_for(checkpoint)
    _require_same_files(experts, versions)
    shards: Any = split_state_dict_into_shards_factory(
        exporter.tensor_bytes(state),  # type: ignore[arg-type]
        get_storage_size=lambda num_bytes: num_bytes,  # type: ignore[arg-type,return-value]
        get_storage_id=lambda _: None,
        filename_pattern=f"{options.stem}{{suffix}}.safetensors",
        max_shard_size=options.max_shard_size,
    )
    with replace_folder(folder, keeps=lambda path: not options.is_weights(path.name)) as new:
        with tensors_of as source:
            exporter.write_around_experts(new, state, shards.tensor_to_filename, source)
        _require_same_files(experts, versions)  # nor did they change during the copy
        model.config.dtype = model.dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(new)
        if checkpoint.packed:
            _copy_quantization(checkpoint.folder, new)
        if model.can_generate():
            model.generation_config.save_pretrained(new)
        if shards.is_sharded:
            write_index(new / options.index_name, shards.tensor_to_filename, shards.metadata)
        written = {file_version(path) for path in new.glob("*.safetensors")}
    if folder.samefile(checkpoint.folder):
        versions |= written


def _exporter_for(
    checkpoint: Checkpoint,
) -> tuple[ExpertMap, LikeCheckpoint, AbstractContextManager[TensorsOf | None]]:
    """The map of a checkpoint's experts, a writer for checkpoints like it, and the source of
    experts. For a packed checkpoint, the writer makes the plain one."""
    bare = build_on_meta(checkpoint)
    experts = map_experts(bare, checkpoint)
    if checkpoint.runs is None:
        return experts, LikeCheckpoint(bare, checkpoint, experts), nullcontext()
    from moe_runtime.checkpoints.export import as_plain, unpacked

    return experts, LikeCheckpoint(bare, *as_plain(bare, checkpoint, experts)), unpacked(experts)


def _copy_quantization(source: Path, folder: Path) -> None:
    files = source / "config.json", folder / "config.json"
    said, config = (parse_object(file.read_bytes(), has_infinity=True) for file in files)
    for name in QUANTIZATION_NAMES:
        if name in said:
            config[name] = said[name]
        for part, values in said.items():  # such as text_config
            if isinstance(values, dict) and name in values and isinstance(config.get(part), dict):
                config[part][name] = values[name]
    write_text(files[1], json.dumps(config, indent=2) + "\n")
    beside = source / QUANTIZATION_FILE
    if beside.is_file():
        shutil.copyfile(beside, folder / beside.name)


def _require_same_files(experts: ExpertMap, versions: set[FileVersion]) -> None:
    """Raises CheckpointError: a file was replaced, changed or removed since it was opened."""
    layouts = experts.layouts.values()
    for path in sorted({extent.file for layout in layouts for extent in layout.extents}):
        if not path.exists() or file_version(path) not in versions:
            raise CheckpointError(
                f"{path} is not the file any more that this model's experts are read from, so "
                "they cannot be copied: put the file back, or load the checkpoint anew"
            )
