"""The configuration of a fine-tuning run, and its training method."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from moe_runtime.training.offload.adamw import AdamW
from moe_runtime.training.offload.entry import offload_training
from moe_runtime.training.offload.offloaded_training import ExpertTraining
from moe_runtime.training.offload.records import StateFormat
from moe_runtime.training.run_config import DataConfig, OptimizerConfig, RunConfig
from moe_runtime.training.train_plan import optimizer_settings


class TrainingMethod(Protocol):
    """A method that trains every parameter of a model with its experts off memory.

    Attributes:
        state_format: contents of an expert's record.
        num_sides: simultaneous forward passes of each micro-batch.
        has_backward: blocks keep activations for a backward pass.
    """

    @property
    def state_format(self) -> StateFormat: ...

    @property
    def num_sides(self) -> int: ...

    @property
    def has_backward(self) -> bool: ...

    def offload(self, model: nn.Module, **places: Any) -> ExpertTraining: ...


@dataclass(frozen=True, slots=True)
class Backpropagation:
    settings: AdamW
    num_sides = 1
    has_backward = True

    @property
    def state_format(self) -> StateFormat:
        return self.settings.state_format

    def offload(self, model: nn.Module, **places: Any) -> ExpertTraining:
        return offload_training(model, optimizer=self.settings, **places)


LORA_PLACES = ("attention", "experts")
ExportDtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Adapters of low rank; the rest of the model is not trained.

    Attributes:
        scale: factor of an adapter's product; PEFT calls it alpha over rank.
        places: layers with adapters: `attention`, `experts`, or both.
        rslora: divide alpha by the root of the rank instead (Kalajdzievski, 2023).
        dropout: share of an adapter's inputs that a step drops; only on attention.
        dora: also train the norm of each weight row (Liu et al., 2024); only on attention.
        start: folder of an adapter of the same form with the first weights.
    """

    rank: int
    scale: float = 2.0
    places: tuple[str, ...] = LORA_PLACES
    rslora: bool = False
    dropout: float = 0.0
    dora: bool = False
    start: Path | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"the rank of adapters must be at least 1, got {self.rank}")
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"the scale of adapters must be positive, got {self.scale}")
        unknown = [place for place in self.places if place not in LORA_PLACES]
        if unknown or not self.places:
            raise ValueError(
                f"adapters are for {' and '.join(LORA_PLACES)}, got {', '.join(unknown) or 'none'}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if "experts" in self.places and (self.dropout or self.dora):
            raise ValueError(
                f"{'dora' if self.dora else 'dropout'} is for adapters on attention, since PEFT "
                "has none on stacked experts that could load it: give adapters to attention alone"
            )

    @property
    def alpha(self) -> float:
        return self.scale * self.rank

    @property
    def factor(self) -> float:
        """Factor of an adapter's product."""
        return self.alpha / math.sqrt(self.rank) if self.rslora else self.scale


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """A whole fine-tuning run.

    Attributes:
        model: folder of a checkpoint, or the name of a repository on the hub.
        lora: train adapters only; None trains every parameter.
        merge: also write the checkpoint with the adapters merged into its weights.
        export_dtype: of the exported checkpoint; `auto` keeps each tensor's.
    """

    model: str
    run: RunConfig
    data: DataConfig
    optimizer: OptimizerConfig
    lora: LoraConfig | None = None
    merge: bool = False
    export_dtype: ExportDtype = "auto"

    @property
    def method(self) -> TrainingMethod:
        """The training method for every parameter; unused with adapters."""
        return Backpropagation(optimizer_settings(self))
