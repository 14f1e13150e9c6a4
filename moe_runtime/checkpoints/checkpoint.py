"""A checkpoint folder or GGUF file whose headers have been read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.checkpoints.families import give_experts_interface
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.memory.source import FileStamp

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from moe_runtime.checkpoints.formats import PackedWeight, Weight
    from moe_runtime.checkpoints.packed_experts import PackedExpertIndex
    from moe_runtime.checkpoints.transformers_private import WeightTransform

Progress = Callable[[str, int, int], None]
"""Called with the current stage, the bytes done and the total bytes."""

QUANT_METHOD = "moe_runtime"  # the name of packed checkpoints in ``config.json``

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that models compute in


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The headers of a checkpoint folder or GGUF file."""

    folder: Path  # the folder, or the GGUF file
    config: PreTrainedConfig
    entries: dict[str, TensorEntry]  # every tensor of the checkpoint by name
    dtype: torch.dtype  # the type in which the model computes
    # quantised weights, by the names in the model's conversion table
    packed: dict[str, PackedWeight] = field(default_factory=dict)
    runs: PackedExpertIndex | None = None  # experts that `moe-runtime pack` wrote
    conversions: Sequence[WeightTransform] = ()  # applied before the model's own conversion table
    # changes the model on the meta device so that it takes these weights
    adapt: Callable[[PreTrainedModel], None] = give_experts_interface
    stamps: Mapping[Path, FileStamp] = field(default_factory=dict)  # before headers were read
    # GGUF tensor names by the names used here; empty for other checkpoints
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> list[Weight]:
        """Every weight once: quantised weights, and tensors that belong to no quantised weight or
        run."""
        runs = set() if self.runs is None else self.runs.names
        plain = plain_entries(self.entries, self.packed)
        return [*(entry for entry in plain if entry.name not in runs), *self.packed.values()]

    @property
    def is_plain(self) -> bool:
        """Whether every weight is stored plainly in safetensors files, neither quantised nor
        packed."""
        return not self.packed and self.runs is None and not self.folder.is_file()

    def require_unchanged(self) -> None:
        """Refuses files that were written or replaced after opening."""
        for path, stamp in self.stamps.items():
            stamp.require(path, path)


def plain_entries(
    entries: dict[str, TensorEntry], packed: dict[str, PackedWeight]
) -> list[TensorEntry]:
    parts = {entry.name for weight in packed.values() for entry in weight.parts.values()}
    return [entry for entry in entries.values() if entry.name not in parts]


def require_plain(checkpoint: Checkpoint, purpose: str) -> None:
    """Refuses quantised and packed checkpoints where they are unsupported, such as in training."""
    if checkpoint.packed or checkpoint.folder.is_file():
        raise UnsupportedModelError(
            f"{checkpoint.folder}: {purpose} of quantised weights or GGUF files is not supported "
            "yet; expected a safetensors checkpoint in bf16, fp16 or fp32"
        )
    if checkpoint.runs is not None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: {purpose} of a packed checkpoint is not supported; take the one "
            "that it was packed from"
        )
