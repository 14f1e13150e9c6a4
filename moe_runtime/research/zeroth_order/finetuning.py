"""`moe-runtime finetune --zeroth-order`: the settings of a run, and its training method."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from moe_runtime.research.zeroth_order.training import (
    PARAMETERS_ALONE,
    Untouched,
    ZerothOrder,
    ZerothOrderTraining,
    offload_zeroth_order,
)
from moe_runtime.training.finetune.settings import FinetuneConfig


@dataclass(frozen=True, slots=True)
class ForwardPassesAlone:
    """The training method: both sides go through the model at once, and blocks keep nothing."""

    settings: ZerothOrder
    state_format = PARAMETERS_ALONE
    num_sides = 2
    has_backward = False

    def offload(self, model: nn.Module, **places: Any) -> ZerothOrderTraining:
        return offload_zeroth_order(model, optimizer=self.settings, **places)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderConfig:
    """Training by forward passes alone: `eps` and `untouched` as of `ZerothOrder`."""

    eps: float = 1e-3
    untouched: Untouched = "dense_exact"

    def __post_init__(self) -> None:
        # the optimizer knows what its settings may be
        ZerothOrder(eps=self.eps, untouched=self.untouched)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderFinetuneConfig(FinetuneConfig):
    """A fine-tuning run without gradients."""

    zeroth_order: ZerothOrderConfig = field(default_factory=ZerothOrderConfig)

    def __post_init__(self) -> None:
        if self.lora is not None:
            raise ValueError("lora and zeroth_order are two ways to train; leave one of them out")
        if self.run.recompute:
            raise ValueError("zeroth_order has no backward pass to recompute for; leave it out")

    @property
    def method(self) -> ForwardPassesAlone:
        return ForwardPassesAlone(
            ZerothOrder(
                weight_decay=self.optimizer.weight_decay,
                seed=self.run.seed,
                **dataclasses.asdict(self.zeroth_order),
            )
        )
