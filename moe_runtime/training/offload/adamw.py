"""AdamW of offloaded training: its settings, and steps on one expert's record.

An expert without tokens has a gradient of zero, and AdamW still moves it. Those steps depend only
on the record and the learning rates, so `dense_exact` takes them when the expert is next needed, in
the same arithmetic and to the same bits.

With a rank, moments belong to the gradient's part in a subspace (GaLore): `R = P^T G` for a wide
matrix, `R = G P` for a tall one. A step of Adam on `R`, projected back, times a factor, is the step
of the matrix. `P` holds the singular vectors of the gradient with the largest singular values. It
is refreshed after a number of the expert's own updates.

Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); the arithmetic is
that of `torch.optim.AdamW(fused=True)`. Zhao et al., "GaLore: Memory-Efficient LLM Training by
Gradient Low-Rank Projection" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from moe_runtime.config import nearest, require_types
from moe_runtime.training.checkpoint import AMOUNT, COUNT, require_kinds
from moe_runtime.training.offload.records import (
    CHUNK_ELEMENTS,
    MomentStorage,
    RecordLayout,
    Sections,
    StateFormat,
)
from moe_runtime.training.optimizer import DenseAdamW

Untouched = Literal["dense_exact", "sparse_skip"]
Clip = Literal["two_phase", "delayed"]

NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "clip_norm", "galore_scale"), NUMBER),
    **dict.fromkeys(("galore_rank", "galore_refresh"), (int,)),
    "betas": (tuple, list),
    "delayed_update_after": (int, type(None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings of AdamW for ``offload_training``; no ``torch.optim`` optimizer.

    Values out of range raise a `ValueError`, values of a wrong type a `TypeError`.

    Attributes:
        lr: default learning rate of steps.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norms and biases do not decay.
        clip_norm: largest global norm of the gradients; 0 does not clip.
        clip: `two_phase` computes the norm of this step's gradients before it updates any expert,
            so gradients wait in the expert's tier until the backward pass is over. `delayed` scales
            by the norm of the last step (not at all in the first), and updates at once.
        untouched: experts that got no tokens: `dense_exact` treats their gradient as zero, as an
            optimizer of stacked parameters does; `sparse_skip` leaves them as they are, moments and
            step count included.
        loss_scale: factor of the losses; gradients are divided by it. `"dynamic"` begins with
            65,536, halves after every skipped step and doubles after 2,000 good ones.
        delayed_update_after: steps after which experts are updated with the last step's gradients,
            inside the backward pass (ZeRO-Offload; the paper waits for 40 steps). Other parameters
            are updated at once; the last gradients of a run are not used. None never delays.
        moments: format of experts' moments: `full` in the parameters' dtype; `bf16` with stochastic
            rounding; `fp8` with COAT's dynamic range expansion, 1 1/16 bytes an element. Only
            `full` gives the bits of AdamW in memory.
        galore_rank: rank of the subspace of the moments of experts' matrices (GaLore); 0 for none.
        galore_scale: factor of the steps from a subspace.
        galore_refresh: an expert's updates after which its subspaces are chosen again.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 0.0
    clip: Clip = "two_phase"
    untouched: Untouched = "dense_exact"
    loss_scale: float | Literal["dynamic"] = 1.0
    delayed_update_after: int | None = None
    moments: MomentStorage = "full"
    galore_rank: int = 0
    galore_scale: float = 0.25
    galore_refresh: int = 200

    def __post_init__(self) -> None:
        require_types(_TYPES, {name: getattr(self, name) for name in _TYPES})
        betas = {f"betas[{place}]": beta for place, beta in enumerate(self.betas)}
        require_types(dict.fromkeys(betas, NUMBER), betas)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        for name in ("lr", "weight_decay", "clip_norm", "eps"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                value = getattr(self, name)
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        known = {"clip": Clip, "untouched": Untouched, "moments": MomentStorage}
        for name, choices in known.items():
            if (value := getattr(self, name)) not in get_args(choices):
                raise ValueError(f"{name} is {value!r}; {nearest(str(value), get_args(choices))}")
        for name, least in (("delayed_update_after", 0), ("galore_rank", 0), ("galore_refresh", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not (self.galore_scale > 0 and math.isfinite(self.galore_scale)):
            raise ValueError(f"galore_scale must be positive, got {self.galore_scale}")
        if self.loss_scale != "dynamic" and not (
            isinstance(self.loss_scale, int | float) and 0 < self.loss_scale < math.inf
        ):
            raise ValueError(
                f"loss_scale must be a positive number or 'dynamic', got {self.loss_scale!r}"
            )

    @property
    def waits_for_norm(self) -> bool:
        """Whether updates of experts wait for all gradients."""
        return self.clip_norm > 0 and self.clip == "two_phase"

    @property
    def state_format(self) -> StateFormat:
        return StateFormat(
            moments=self.moments,
            rank=self.galore_rank,
            keeps_gradient=self.delayed_update_after is not None,
        )

    def dense(self, named: Mapping[str, Tensor]) -> DenseAdamW:
        return DenseAdamW(
            named, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay
        )

    def is_delayed(self, step: int) -> bool:
        """Whether a step (the first is 0) keeps its gradients for the next step."""
        return self.delayed_update_after is not None and step >= self.delayed_update_after

    def update_number(self, step: int) -> int | None:
        """The number of a step's update of AdamW, counted from 1; None for the one without."""
        if not self.is_delayed(step):
            return step + 1
        return None if step == self.delayed_update_after else step


def bytes_of_step(layout: RecordLayout, settings: AdamW) -> tuple[int, int]:
    """Most bytes read and written in a step for an expert on the disk that got tokens.

    An update in the backward pass reads and writes the state there. If the norm of all gradients
    comes first, the backward pass reads the parameters and writes the gradient; the update reads
    everything and writes the state. Frozen parameters are read for either pass.
    """
    parameters, state = layout.bytes_of(Sections.PARAMETERS), layout.state_bytes
    if not layout.trained:
        return 2 * parameters, 0
    if not layout.state.trains:
        return parameters, parameters
    if settings.waits_for_norm and settings.delayed_update_after is None:
        gradient = layout.bytes_of(Sections.GRADIENT)
        return 2 * parameters + state + gradient, gradient + state
    return parameters + state, state


class LossScale:
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
        require_kinds(state, {"value": AMOUNT, "good_steps": COUNT}, "the checkpoint's loss_scale")
        self.value, self._good_steps = float(state["value"]), state["good_steps"]


_MOMENTS = (Sections.MEAN, Sections.VARIANCE)


class UpdateStep(NamedTuple):
    """One step: its number for the bias correction, the first is 1, and its learning rate."""

    number: int
    rate: float


def take_steps(
    layout: RecordLayout,
    record: Tensor,
    settings: AdamW,
    steps: Sequence[UpdateStep],
    gradient: Tensor | None = None,
    *,
    refreshes: bool = False,
) -> None:
    """Takes steps in one pass over a record.

    Args:
        gradient: of the first step, scaled: ``[used]``; None for zero, as in the others.
        refreshes: choose the gradient's subspace again first, if there is one.
    """
    if layout.state.rank:
        _take_in_subspaces(layout, record, settings, steps, gradient, refreshes)
        return
    parameters = layout.flat(record, Sections.PARAMETERS)
    is_one_pass = len(steps) == 1 and gradient is not None and layout.codec.is_exact
    size = layout.used if is_one_pass else min(layout.used, CHUNK_ELEMENTS)
    zeros = parameters.new_zeros(0 if is_one_pass else size)
    for start in range(0, layout.used, size):
        stop = min(layout.used, start + size)
        for index, step in enumerate(steps):
            has_gradient = index == 0 and gradient is not None
            now = gradient[start:stop] if has_gradient else zeros[: stop - start]  # type: ignore[index]
            mean, variance = _decode(layout, record, start, stop)
            for part, decay in _parts(layout, settings, start, stop):
                some = parameters[start:stop][part]
                _adamw(some, now[part], mean[part], variance[part], settings, decay, step)
            _encode(layout, record, (mean, variance), start, step)


def _take_in_subspaces(
    layout: RecordLayout,
    record: Tensor,
    settings: AdamW,
    steps: Sequence[UpdateStep],
    gradient: Tensor | None,
    refreshes: bool,
) -> None:
    bases = layout.bases(record)
    weights = layout.split(layout.flat(record, Sections.PARAMETERS))
    gradients = [torch.zeros(())] * len(weights) if gradient is None else layout.split(gradient)
    if refreshes and gradient is not None:
        for basis, found in zip(bases, gradients, strict=True):
            if basis is not None:
                basis.copy_(leading_vectors(found, basis.shape[1]))
    for index, step in enumerate(steps):
        has_gradient = index == 0 and gradient is not None
        moments = _decode(layout, record, 0, layout.num_moments)
        for tensor, span, basis, weight, found in zip(
            layout.trained, layout.spans, bases, weights, gradients, strict=True
        ):
            low = moments[0].new_zeros(span.stop - span.start)
            if has_gradient:
                part = found if basis is None else project(found, basis)
                low[: part.numel()] = part.reshape(-1)
            move = torch.zeros_like(low)
            mean, variance = (moment[span.start : span.stop] for moment in moments)
            _adamw(move, low, mean, variance, settings, 0.0, step)
            move = move[: math.prod(span.shape)].view(span.shape)
            if tensor.decays:
                weight.mul_(1 - step.rate * settings.weight_decay)
            if basis is None:
                weight.add_(move)
            elif weight.shape[0] <= weight.shape[1]:
                weight.addmm_(basis, move, alpha=settings.galore_scale)
            else:
                weight.addmm_(move, basis.T, alpha=settings.galore_scale)
        _encode(layout, record, moments, 0, step)


def project(gradient: Tensor, basis: Tensor) -> Tensor:
    is_wide = gradient.shape[0] <= gradient.shape[1]
    return basis.T @ gradient if is_wide else gradient @ basis


def leading_vectors(gradient: Tensor, rank: int) -> Tensor:
    """Singular vectors of the smaller side with the largest singular values: ``[min(m, n), rank]``.

    As eigenvectors of the matrix' square they are many times cheaper than a singular value
    decomposition; fp64 keeps the precision of fp32 when squaring. The largest component of each is
    positive.
    """
    matrix = gradient.double()
    square = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    vectors = torch.linalg.eigh(square).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).to(gradient.dtype)


def _decode(layout: RecordLayout, record: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    mean, variance = (
        layout.codec.decode(layout.moment(record, section), start, stop, layout.dtype)
        for section in _MOMENTS
    )
    return mean, variance


def _encode(
    layout: RecordLayout,
    record: Tensor,
    moments: tuple[Tensor, Tensor],
    start: int,
    step: UpdateStep,
) -> None:
    for salt, (section, values) in enumerate(zip(_MOMENTS, moments, strict=True)):
        layout.codec.encode(values, layout.moment(record, section), start, step.number, salt)


def _parts(
    layout: RecordLayout, settings: AdamW, start: int, stop: int
) -> Iterator[tuple[slice, float]]:
    border = min(max(layout.decaying - start, 0), stop - start)
    if border:
        yield slice(0, border), settings.weight_decay
    if border < stop - start:
        yield slice(border, stop - start), 0.0


def _adamw(
    parameters: Tensor,
    gradient: Tensor,
    mean: Tensor,
    variance: Tensor,
    settings: AdamW,
    decay: float,
    step: UpdateStep,
) -> None:
    # the fused kernel of a device reads the step's number on the device
    number = parameters.new_full((), float(step.number), dtype=torch.float32)
    # torch.optim.AdamW(fused=True) calls it too
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        [parameters],
        [gradient],
        [mean],
        [variance],
        [],
        [number],
        lr=step.rate,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        weight_decay=decay,
        eps=settings.eps,
        amsgrad=False,
        maximize=False,
    )
