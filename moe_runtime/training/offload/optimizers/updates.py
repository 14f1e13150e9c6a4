"""Steps of AdamW on one expert's record: with a gradient, or those that it missed.

An expert without tokens has the gradient zero, and ordinary AdamW still moves it: moments decay,
the weights follow the first moment and decay. Those steps depend on nothing but the record and the
learning rates, so they can be made up for when the expert is next needed (`dense_exact`), in the
same arithmetic and hence to the same bits.

With a rank, moments belong to the gradient's part in a subspace (GaLore): `R = P^T G` for a matrix
that is wide and `R = G P` for one that is tall, a step of Adam on `R`, and its result projected
back, times a factor, is the step of the matrix; weight decay acts on the matrix. `P` holds the
singular vectors of the gradient with the largest singular values. It is chosen anew when the expert
itself had a number of updates, because rare experts see few gradients; moments stay as they are.

Sources: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019); the arithmetic is
that of `torch.optim.AdamW(fused=True)`. Zhao et al., "GaLore: Memory-Efficient LLM Training by
Gradient Low-Rank Projection" (2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.training.offload.optimizers.adamw import AdamW
from moe_runtime.training.offload.optimizers.moments import CHUNK_ELEMENTS
from moe_runtime.training.offload.states.records import (
    ExpertTensor,
    MomentSpan,
    RecordLayout,
    Sections,
)

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
        layout: of the record.
        record: at least parameters and moments.
        settings: of AdamW.
        steps: in order.
        gradient: of the first step, scaled: ``[used]``; None for zero, as it is in the others.
        refreshes: the gradient's subspace is chosen anew first, where there is one.
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
            move = _low_rank_step(
                layout, span, basis, found if has_gradient else None, moments, settings, step
            )
            _move(weight, tensor, move, basis, settings, step)
        _encode(layout, record, moments, 0, step)


def _low_rank_step(
    layout: RecordLayout,
    span: MomentSpan,
    basis: Tensor | None,
    gradient: Tensor | None,
    moments: tuple[Tensor, Tensor],
    settings: AdamW,
    step: UpdateStep,
) -> Tensor:
    """What a step without decay adds to a tensor, or to its part in the subspace."""
    size = span.stop - span.start
    low = moments[0].new_zeros(size)
    if gradient is not None:
        part = gradient if basis is None else project(gradient, basis)
        low[: part.numel()] = part.reshape(-1)
    move = torch.zeros_like(low)
    mean, variance = (moment[span.start : span.stop] for moment in moments)
    _adamw(move, low, mean, variance, settings, 0.0, step)
    return move[: math.prod(span.shape)].view(span.shape)


def _move(
    weight: Tensor,
    tensor: ExpertTensor,
    move: Tensor,
    basis: Tensor | None,
    settings: AdamW,
    step: UpdateStep,
) -> None:
    if tensor.decays:
        weight.mul_(1 - step.rate * settings.weight_decay)
    if basis is None:
        weight.add_(move)
    elif weight.shape[0] <= weight.shape[1]:
        weight.addmm_(basis, move, alpha=settings.galore_scale)
    else:
        weight.addmm_(move, basis.T, alpha=settings.galore_scale)


def project(gradient: Tensor, basis: Tensor) -> Tensor:
    """A matrix' part in a subspace of its smaller side: ``[r, n]`` or ``[m, r]``."""
    is_wide = gradient.shape[0] <= gradient.shape[1]
    return basis.T @ gradient if is_wide else gradient @ basis


def leading_vectors(gradient: Tensor, rank: int) -> Tensor:
    """Singular vectors of a matrix' smaller side with the largest singular values.

    They are eigenvectors of the matrix' square, whose smaller size makes them many times cheaper
    than a singular value decomposition; in fp64, where squaring loses nothing that fp32 had. Their
    signs, which solvers leave to chance, are such that the largest component is positive.

    Args:
        gradient: ``[m, n]``.
        rank: how many.

    Returns:
        ``[min(m, n), rank]``, orthonormal columns.
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
    """The parts of some elements that decay and that do not, relative to the first."""
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
    # the fused kernel of a device reads the step's number there
    number = parameters.new_full((), float(step.number), dtype=torch.float32)
    # what torch.optim.AdamW(fused=True) itself calls
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
