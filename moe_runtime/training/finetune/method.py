"""How a fine-tuned model is trained: the part of a run that a research room can replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from moe_runtime.training.offload.expert_training import ExpertTraining
from moe_runtime.training.offload.offloading import offload_training
from moe_runtime.training.offload.optimizers.adamw import AdamW
from moe_runtime.training.offload.states.records import StateFormat


class TrainingMethod(Protocol):
    """A way to train every parameter of a model whose experts live elsewhere."""

    @property
    def state_format(self) -> StateFormat:
        """What an expert's record holds."""
        ...

    @property
    def num_sides(self) -> int:
        """Forward passes of each micro-batch that go through the model at once."""
        ...

    @property
    def has_backward(self) -> bool:
        """Whether blocks keep activations for a backward pass."""
        ...

    def offload(self, model: nn.Module, **places: Any) -> ExpertTraining:
        """Sends the experts away; `places` are the keywords that say where to.

        Raises:
            CapacityError: a budget or the disk is too small.
            CheckpointError: the folder cannot be written.
        """
        ...


@dataclass(frozen=True, slots=True)
class Backpropagation:
    """Gradients and AdamW.

    Attributes:
        settings: of AdamW.
    """

    settings: AdamW
    num_sides = 1
    has_backward = True

    @property
    def state_format(self) -> StateFormat:
        """Parameters, moments and gradients, as the settings have them."""
        return self.settings.state_format

    def offload(self, model: nn.Module, **places: Any) -> ExpertTraining:
        """As `offload_training`."""
        return offload_training(model, optimizer=self.settings, **places)
