"""AdamW in memory, and gradients that are checked before they are used."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from moe_runtime.errors import CheckpointError
from moe_runtime.training.offload.dense_adamw import (
    DenseAdamW,
    StepOptimizer,
    StepOutcome,
    clip_scale,
)
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import OptimizerConfig


class Optimizer(StepOptimizer):
    """Gradients in, changed parameters out, all of it in memory."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, ranks: OneRank | None = None
    ) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise ValueError("the model has no trainable parameter")
        self._ranks = ranks or OneRank()
        self._clip_norm = config.clip_norm
        self._adamw = DenseAdamW(
            self._named,
            lr=config.peak_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def backward(self, parts: Sequence[Callable[[], Tensor]], *, rate: float) -> None:
        del rate  # for optimizers that update inside the backward pass
        is_done = False
        try:
            for part in parts:
                part().backward()
            is_done = True
        finally:
            if not is_done:  # a part of them would be added to the next step's
                self._adamw.forget()

    def step(self, rate: float) -> StepOutcome:
        self._ranks.reduce_gradients(self._named)
        norm = self._ranks.gradient_norm(self._named)
        bad: tuple[str, ...] = ()
        if not math.isfinite(norm):
            bad = self._adamw.bad_gradients() or ("the experts of another process",)
        if not bad:
            self._adamw.step(rate, clip_scale(norm, self._clip_norm))
        self._adamw.forget()
        return StepOutcome(norm, bad)

    def state_dict(self) -> dict[str, Any]:
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "experts" in state:
            raise CheckpointError("the checkpoint is of a run with a host_memory; give one")
        self._adamw.load_state_dict(state)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's states by parameter, in place: `exp_avg`, `exp_avg_sq` and `step`; zeros at
        first."""
        return self._adamw.moments()
