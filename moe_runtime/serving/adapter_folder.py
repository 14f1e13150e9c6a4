"""The files of an adapter of low rank (LoRA), in the form in which PEFT writes them.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).

Shape suffixes: I inputs, O outputs of a layer, N rows, R rank.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from moe_runtime.checkpoints.safetensors_index import read_header
from moe_runtime.digests import check_digests
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.serving.adapter_settings import AdapterSettings

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to the output of one linear layer: ``scale * (x @ A.T) @ B.T``."""

    first_RI: torch.Tensor
    second_OR: torch.Tensor
    scale: float

    def add_to(self, output_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Adds it in place; both are in fp32, as PEFT computes it."""
        low_NR = torch.nn.functional.linear(x_NI, self.first_RI)
        output_NO.addmm_(low_NR, self.second_OR.T, alpha=self.scale)


class AdapterFolder:
    """The files of one adapter, checked as far as that goes without the model.

    Attributes:
        folder: where they are.
        settings: of the adapter.
        num_bytes: of the adapter in memory.
        widths: inputs and outputs of the adapted layers, by name.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the settings and the headers.

        Raises:
            CheckpointError: they are missing or damaged, or not as `finetune` wrote them.
            UnsupportedModelError: the adapter is more than pairs of matrices beside linear layers.
        """
        self.folder = folder
        config = folder / "adapter_config.json"
        self._file = folder / "adapter_model.safetensors"
        for file in (config, self._file):
            if not file.is_file():
                raise CheckpointError(
                    f"{folder}: expected the folder of an adapter as PEFT writes it, but there is "
                    f"no {file.name}"
                )
        check_digests(folder)
        self.settings = AdapterSettings(config)
        self._state = self._state_of_file()
        self._layers = self._read_layers()
        self._scales = {
            layer: self.settings.scale(layer, parts["A"][0])
            for layer, parts in self._layers.items()
        }
        shapes = {
            layer: (parts["A"][1], parts["B"][0], parts["A"][0])
            for layer, parts in self._layers.items()
        }
        self.widths = {layer: (inputs, outputs) for layer, (inputs, outputs, _) in shapes.items()}
        self.num_bytes = sum(
            4 * rank * (inputs + outputs) for inputs, outputs, rank in shapes.values()
        )

    def workspace_bytes(self, num_rows: int) -> int:
        """What a pass of so many tokens needs beside that of the model."""
        return 4 * num_rows * max(inputs + 2 * outputs for inputs, outputs in self.widths.values())

    def pairs(self) -> dict[str, LowRankPair]:
        """The matrices, in fp32, by the names of their layers.

        They are copies: tensors of the file would change with it, and end the process where it is
        cut short.

        Raises:
            CheckpointError: they cannot be read, or are no longer those whose shapes were read.
        """
        found = {}
        with blamed_on(f"{self._file}: cannot be read"):
            self._require_same_file()  # a pipe in its place would be waited for
            with safe_open(self._file, framework="pt") as tensors:
                self._require_same_file()
                for layer in self._layers:
                    name = f"base_model.model.{layer}.lora_"
                    first, second = (
                        tensors.get_tensor(f"{name}{part}.weight").to(torch.float32, copy=True)
                        for part in "AB"
                    )
                    found[layer] = LowRankPair(first, second, self._scales[layer])
        return found

    def _require_same_file(self) -> None:
        if self._state_of_file() != self._state:
            raise CheckpointError(f"{self._file}: has changed; start the server anew")

    def _state_of_file(self) -> tuple[int, int]:
        state = self._file.stat()
        return state.st_size, state.st_mtime_ns

    def _read_layers(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of both matrices of each layer."""
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, tensor in sorted(read_header(self._file).items()):
            match = _TENSOR.fullmatch(name)
            if match is None or ".base_layer" in name:
                raise UnsupportedModelError(
                    f"{self._file}: {name} is no adapter of a linear layer beside the experts; "
                    "merge the adapter into a plain checkpoint, or train one of attention alone"
                )
            if len(tensor.shape) != 2 or tensor.dtype not in ("F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{self._file}: {name} must be a matrix of F32, F16 or BF16, got "
                    f"{tensor.dtype} of {list(tensor.shape)}"
                )
            layers.setdefault(match["layer"], {})[match["part"]] = tuple(tensor.shape)
        if not layers:
            raise CheckpointError(f"{self._file}: has no adapter")
        for layer, parts in layers.items():
            if len(parts) < 2 or parts["A"][0] != parts["B"][1]:
                raise CheckpointError(
                    f"{self._file}: {layer}.lora_{min(parts)} needs another matrix of its rank"
                )
            if not self.settings.targets(layer):
                raise CheckpointError(
                    f"{self._file}: has matrices for {layer}, which PEFT would ignore: "
                    "target_modules, exclude_modules or layers_to_transform of "
                    "adapter_config.json leave that layer out; mend the settings, or remove the "
                    "matrices"
                )
        return layers
