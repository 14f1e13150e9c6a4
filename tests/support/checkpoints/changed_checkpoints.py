"""Quantised checkpoints with a part changed, and what is made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.expert_layer import bind_weights
from moe_runtime.kernels.quantized import QuantizedMatrix
from moe_runtime.memory.source import ExpertSource, aligned_bytes
from moe_runtime.types import ExpertKey

SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


class Originals:
    """Gives the folder of a sample by its name, written when it is asked for first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Path] = {}

    def __call__(self, name: str) -> Path:
        """The folder; not to be written to."""
        if name not in self._made:
            written = quantized_checkpoints.write(SAMPLES[name], self._folder / name)
            self._made[name] = written.folder
        return self._made[name]


def mapped(folder: Path) -> ExpertMap:
    checkpoint = open_checkpoint(folder, "auto")
    return map_experts(build_on_meta(checkpoint), checkpoint)


def changed(
    original: Path,
    folder: Path,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    **config: Any,
) -> Path:
    """A copy with other tensors, and other values in its quantization_config."""
    shutil.copytree(original, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def refusal(folder: Path, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as caught:
        mapped(folder)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def matrices_of_expert(folder: Path, key: ExpertKey) -> dict[str, QuantizedMatrix]:
    experts = mapped(folder)
    source, slot = ExpertSource(experts.layouts), aligned_bytes(experts.slot_bytes)
    try:
        source.read({key: slot})
        weights: Any = bind_weights(experts)(key, slot)
        return {name: getattr(weights, name) for name in ("gate", "up", "down")}
    finally:
        source.close()
