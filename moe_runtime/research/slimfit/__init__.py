"""Weights that changed least are frozen for a step, and autograd keeps no inputs for them.

Source: Ardakani et al., "SlimFit: Memory-Efficient Fine-Tuning of Transformer-based Models Using
Training Dynamics" (2023): inter-layer scheduling. Weights are frozen kind by kind, so that every
step keeps equally much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.training.checkpoint import AMOUNT, require_kinds
from moe_runtime.training.optimizer import Optimizer, StepOutcome
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import OptimizerConfig

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def distance(before: Tensor, after: Tensor) -> float:
    """The mean of `|after - before| / |before|` over the elements that were not 0."""
    changes = ((after - before) / before).abs()[before != 0]
    return float(changes.mean(dtype=torch.float64)) if len(changes) else math.inf


class SlimFit(Optimizer):
    """AdamW in memory that leaves out weights whose last change was small.

    A frozen weight keeps its distance, so it is trained again when others change less. Weights that
    were never trained come first. Biases need no inputs and are always trained.

    Args:
        share: of the weights of a kind that a step freezes, rounded down. Of one kind are weights
            whose names differ in numbers only.

    Attributes:
        distances: of each weight at the last step that trained it; infinite before.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        ranks: OneRank | None = None,
        *,
        share: float,
    ) -> None:
        super().__init__(model, config, ranks)
        self._kinds: dict[str, list[str]] = {}
        for name in self._named:
            if not name.endswith("bias"):
                self._kinds.setdefault(_NUMBER.sub("*", name), []).append(name)
        self._share = share
        self.distances = {name: math.inf for names in self._kinds.values() for name in names}

    def frozen(self) -> list[str]:
        """The weights that the next step leaves alone."""
        return [
            name
            for names in self._kinds.values()
            for name in sorted(names, key=self.distances.__getitem__)[
                : math.floor(self._share * len(names))
            ]
        ]

    def backward(self, parts: Sequence[Callable[[], Tensor]], *, rate: float) -> None:
        frozen = [self._named[name] for name in self.frozen()]
        try:
            for parameter in frozen:
                parameter.requires_grad_(False)
            super().backward(parts, rate=rate)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def step(self, rate: float) -> StepOutcome:
        before = {
            name: self._named[name].detach().clone()
            for name in self.distances
            if self._named[name].grad is not None
        }
        outcome = super().step(rate)
        if not outcome.bad_parameters:
            for name, weight in before.items():
                self.distances[name] = distance(weight, self._named[name].detach())
        return outcome

    def state_dict(self) -> dict[str, Any]:
        known = {name: None if math.isinf(d) else d for name, d in self.distances.items()}
        return {**super().state_dict(), "distances": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kinds = dict.fromkeys(self.distances, AMOUNT.or_none())
        found = state.get("distances")
        require_kinds(found, kinds, "the distances of weights")
        super().load_state_dict({name: part for name, part in state.items() if name != "distances"})
        self.distances = {
            name: math.inf if d is None else d for name, d in dict(found or {}).items()
        }
