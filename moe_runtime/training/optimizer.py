"""AdamW with decay where it belongs, and gradients that are checked before they are used."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.training.config import OptimizerConfig


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step did.

    Attributes:
        gradient_norm: global norm of the gradients before clipping.
        bad_parameters: parameters whose gradients were not finite; the step was skipped if any.
    """

    gradient_norm: float
    bad_parameters: tuple[str, ...] = ()


class Optimizer:
    """Gradients in, changed parameters out: backward, clip, step.

    The loop knows nothing else of the optimizer, so that one which keeps its states elsewhere, or
    takes its steps inside the backward, can stand in its place.

    Args:
        model: its trainable parameters are updated.
        config: AdamW's settings and the clipping.

    Raises:
        ValueError: the model has no trainable parameter.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise ValueError("the model has no trainable parameter")
        self._clip_norm = config.clip_norm
        self._adamw = torch.optim.AdamW(
            list(_groups(self._named, config.weight_decay)),
            lr=config.peak_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def backward(self, loss: Tensor) -> None:
        """Adds the loss's gradients to those since the last step."""
        loss.backward()

    def step(self, rate: float) -> StepOutcome:
        """Clips, updates and forgets the gradients.

        A step whose gradients are not finite changes nothing.

        Args:
            rate: learning rate.
        """
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        bad = () if math.isfinite(norm) else tuple(self._bad_gradients())
        if not bad:
            if self._clip_norm and norm > self._clip_norm:
                for gradient in gradients:
                    gradient.mul_(self._clip_norm / norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return StepOutcome(norm, bad)

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave.

        Raises:
            ValueError: the state belongs to other parameters.
        """
        self._adamw.load_state_dict(state)

    def _bad_gradients(self) -> Iterator[str]:
        for name, parameter in self._named.items():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                yield name


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of them, never to norms and biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _groups(named: Mapping[str, Tensor], weight_decay: float) -> Iterator[dict[str, Any]]:
    """AdamW's two groups of parameters; either may be empty."""
    decaying = [p for name, p in named.items() if decays(name, p)]
    others = [p for name, p in named.items() if not decays(name, p)]
    for parameters, decay in ((decaying, weight_decay), (others, 0.0)):
        yield {"params": parameters, "weight_decay": decay}
