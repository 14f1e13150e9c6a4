"""AdamW on one expert's record, and the steps that it missed.

An expert without tokens has the gradient zero, and ordinary AdamW still moves it: moments decay,
the weights follow the first moment and decay. Those steps depend on nothing but the record and the
learning rates, so they can be made up for when the expert is next needed (`dense_exact`), in the
same arithmetic and hence to the same bits.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); the arithmetic is
that of `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moe_runtime.offload.records import RecordLayout, Sections

Untouched = Literal["dense_exact", "sparse_skip"]
Clip = Literal["two_phase", "delayed"]

REPLAY_ELEMENTS = 2**18
"""Elements that several missed steps are taken on before the next ones: they stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings of the optimizer.

    Attributes:
        lr: learning rate of steps that name no other.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norms and biases do not decay.
        clip_norm: largest global norm of the gradients; 0 does not clip.
        clip: `two_phase` knows the norm of this step's gradients before any expert is updated, so
            gradients wait on the expert's home until the backward pass is over. `delayed` scales by
            the norm of the step before (not at all in the first), and updates at once.
        untouched: experts that got no tokens: `dense_exact` treats their gradient as zero, as an
            optimizer of stacked parameters does; `sparse_skip` leaves them as they are, moments and
            step count included, as `torch.optim.AdamW` leaves a parameter without gradient.
        loss_scale: what losses are multiplied by before, and gradients divided by after the
            backward pass; `"dynamic"` halves it after every skipped step and doubles it after
            2,000 good ones, beginning with 65,536.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 0.0
    clip: Clip = "two_phase"
    untouched: Untouched = "dense_exact"
    loss_scale: float | Literal["dynamic"] = 1.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be at least 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.clip not in ("two_phase", "delayed"):
            raise ValueError(f"clip must be 'two_phase' or 'delayed', got {self.clip!r}")
        if self.untouched not in ("dense_exact", "sparse_skip"):
            raise ValueError(
                f"untouched must be 'dense_exact' or 'sparse_skip', got {self.untouched!r}"
            )
        if self.loss_scale != "dynamic" and not (
            isinstance(self.loss_scale, int | float) and 0 < self.loss_scale < math.inf
        ):
            raise ValueError(
                f"loss_scale must be a positive number or 'dynamic', got {self.loss_scale!r}"
            )

    @property
    def waits_for_norm(self) -> bool:
        """Whether no expert may be updated before all gradients are known."""
        return self.clip_norm > 0 and self.clip == "two_phase"


class LossScale:
    """The factor of the losses, and how it moves."""

    def __init__(self, setting: float | Literal["dynamic"]) -> None:
        self._is_dynamic = setting == "dynamic"
        self.value = 65_536.0 if setting == "dynamic" else float(setting)
        self._good_steps = 0

    def after_step(self, *, was_skipped: bool) -> None:
        """Halves after a skipped step, doubles after 2,000 good ones in a row, if dynamic."""
        if not self._is_dynamic:
            return
        self._good_steps = 0 if was_skipped else self._good_steps + 1
        if was_skipped:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == 2000:
            self.value, self._good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])


def update(
    layout: RecordLayout, record: Tensor, settings: AdamW, *, step: int, rate: float, scale: float
) -> None:
    """Takes one step with the record's own gradient, which is scaled in place first.

    Args:
        layout: of the record.
        record: all four sections.
        settings: of AdamW.
        step: number of the step for the bias correction, the first is 1.
        rate: learning rate.
        scale: factor of the gradient, from clipping; 1 leaves it alone.
    """
    gradient = layout.flat(record, Sections.GRADIENT)
    if scale != 1:
        gradient.mul_(scale)
    for part, decay in _parts(layout, settings):
        _take(part, layout, record, gradient[part], settings, decay, step, rate)


def replay(
    layout: RecordLayout, record: Tensor, settings: AdamW, *, steps: Sequence[tuple[int, float]]
) -> None:
    """Takes the steps that an expert without tokens missed, in one pass over its record.

    Args:
        layout: of the record.
        record: at least parameters and moments.
        settings: of AdamW.
        steps: number and learning rate of each missed step, in order.
    """
    zeros = torch.zeros(min(layout.used, REPLAY_ELEMENTS), dtype=layout.dtype)
    for part, decay in _parts(layout, settings):
        for start in range(part.start, part.stop, REPLAY_ELEMENTS):
            some = slice(start, min(part.stop, start + REPLAY_ELEMENTS))
            gradient = zeros[: some.stop - some.start]
            for step, rate in steps:
                _take(some, layout, record, gradient, settings, decay, step, rate)


def _parts(layout: RecordLayout, settings: AdamW) -> Iterator[tuple[slice, float]]:
    if layout.decaying:
        yield slice(0, layout.decaying), settings.weight_decay
    if layout.decaying < layout.used:
        yield slice(layout.decaying, layout.used), 0.0


def _take(
    part: slice,
    layout: RecordLayout,
    record: Tensor,
    gradient: Tensor,
    settings: AdamW,
    decay: float,
    step: int,
    rate: float,
) -> None:
    parameters, mean, variance = (
        layout.flat(record, section)[part]
        for section in (Sections.PARAMETERS, Sections.MEAN, Sections.VARIANCE)
    )
    # what torch.optim.AdamW(fused=True) itself calls
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [parameters],
        [gradient],
        [mean],
        [variance],
        [],
        [torch.tensor(float(step))],
        lr=rate,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
    )
