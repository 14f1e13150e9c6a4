"""Saves a loaded model as a checkpoint; its experts are copied from their files."""

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
    """How to divide and name the files of a checkpoint; ``max_shard_size`` in bytes, or such as
    ``"5GB"``."""

    max_shard_size: int | str = "50GB"
    variant: str | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> SaveOptions:
        """From the options of ``save_pretrained``. Raises UnsupportedUseError: one is unknown, or
        has no meaning for a loaded model."""
        rest = dict(options)
        known = {name: rest.pop(name) for name in ("max_shard_size", "variant") if name in rest}
        rest.pop("token", None)  # is for the hub
        rest.pop("save_peft_format", None)  # is for adapters
        for name, value in rest.items():
            if name in _MEANINGLESS and not value:
                continue
            if name in _NEEDED and value:
                continue
            reason = _MEANINGLESS.get(name) or _NEEDED.get(name) or "there is no such option"
            raise UnsupportedUseError(
                f"save_pretrained of a loaded model does not take {name}={value!r}: {reason}"
            )
        return SaveOptions(**known)

    def weights_name(self) -> str:
        """Name of the file when there is one."""
        middle = "" if self.variant is None else f".{self.variant}"
        return f"model{middle}.safetensors"

    def index_name(self) -> str:
        """Name of the index when there are several."""
        middle = "" if self.variant is None else f".{self.variant}"
        return f"model.safetensors.index{middle}.json"

    def is_weights(self, name: str) -> bool:
        """Whether a save with other sizes would have made this file."""
        stem = re.escape(self.weights_name().removesuffix(".safetensors"))
        of_series = re.fullmatch(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors", name)
        return name == self.index_name() or of_series is not None


def save_around_experts(
    model: PreTrainedModel,
    checkpoint_folder: Path,
    folder: Path,
    state: Mapping[str, Tensor],
    options: SaveOptions,
    versions: set[FileVersion],
) -> None:
    """Writes a loaded model as a checkpoint that transformers loads.

    The folder is replaced when all is whole; other files than weights are kept.

    Args:
        checkpoint_folder: has the experts.
        state: everything else, by the model's names.
        versions: of the files of the model's experts; a save over the checkpoint itself adds those
            that it wrote.

    Raises:
        CheckpointError: the checkpoint is not what it was when it was loaded.
        OSError: it cannot be written; what was there stays.
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
    stem = options.weights_name().removesuffix(".safetensors")
    shards: Any = split_state_dict_into_shards_factory(
        exporter.tensor_bytes(state),  # type: ignore[arg-type]
        get_storage_size=lambda num_bytes: num_bytes,  # type: ignore[arg-type,return-value]
        get_storage_id=lambda _: None,
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=options.max_shard_size,
    )
    with replace_folder(folder, keeps=lambda path: not options.is_weights(path.name)) as new:
        with tensors_of as source:
            exporter.write_around_experts(new, state, shards.tensor_to_filename, source)
        _require_same_files(experts, versions)  # nor were they replaced while they were copied
        model.config.dtype = model.dtype
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(new)
        if checkpoint.packed:
            _copy_quantization(checkpoint.folder, new)
        if model.can_generate():
            model.generation_config.save_pretrained(new)
        if shards.is_sharded:
            write_index(new / options.index_name(), shards.tensor_to_filename, shards.metadata)
        written = {file_version(path) for path in new.glob("*.safetensors")}
    if folder.samefile(checkpoint.folder):
        versions |= written


def _exporter_for(
    checkpoint: Checkpoint,
) -> tuple[ExpertMap, LikeCheckpoint, AbstractContextManager[TensorsOf | None]]:
    """Where a checkpoint's experts lie, what writes others like it, and what gives it experts. For
    a packed one, what writes the plain one that it was packed from."""
    bare = build_on_meta(checkpoint)
    experts = map_experts(bare, checkpoint)
    if checkpoint.runs is None:
        return experts, LikeCheckpoint(bare, checkpoint, experts), nullcontext()
    from moe_runtime.checkpoints.export import as_plain, unpacked

    return experts, LikeCheckpoint(bare, *as_plain(bare, checkpoint, experts)), unpacked(experts)


def _copy_quantization(source: Path, folder: Path) -> None:
    """Copies the settings of quantised weights to another folder."""
    files = source / "config.json", folder / "config.json"
    said, config = (parse_object(file.read_bytes(), has_infinity=True) for file in files)
    for name in QUANTIZATION_NAMES:
        if name in said:
            config[name] = said[name]
        for part, values in said.items():  # of a model whose text model has a part of its own
            if isinstance(values, dict) and name in values and isinstance(config.get(part), dict):
                config[part][name] = values[name]
    write_text(files[1], json.dumps(config, indent=2) + "\n")
    beside = source / QUANTIZATION_FILE
    if beside.is_file():
        shutil.copyfile(beside, folder / beside.name)


def _require_same_files(experts: ExpertMap, versions: set[FileVersion]) -> None:
    """CheckpointError where a file was replaced, changed or removed since it was opened."""
    layouts = experts.layouts.values()
    for path in sorted({extent.file for layout in layouts for extent in layout.extents}):
        if not path.exists() or file_version(path) not in versions:
            raise CheckpointError(
                f"{path} is not the file any more that this model's experts are read from, so "
                "they cannot be copied: put the file back, or load the checkpoint anew"
            )
