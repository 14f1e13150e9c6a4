"""Moving rows between token order and routed order, differentiable, without atomic sums.

Every function here is paired with its adjoint: a gather of rows is undone by a sum over the places
that each token's choices went to, in the order of the choices. No sum depends on the order in which
a device happens to add, so the same input gives the same bits.

Shape suffixes: T tokens, K choices of a token, R routed rows, D model, A and B parts of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are formed in: fp32 for narrower types, otherwise the type itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def sum_places(y_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """`out[t] = sum over k of weights[t, k] * y[place[t, k]]`, added in the order of `k`.

    Args:
        y_RD: `[R, D]`.
        place_TK: `[T, K]` int64; an entry `R` or above stands for a row of zeros.
        weights_TK: `[T, K]`, or None for ones.

    Returns:
        `[T, D]` in the dtype of `y`, summed in `accumulation_dtype`.
    """
    num_rows = y_RD.shape[0]
    out_TD = y_RD.new_zeros(
        (place_TK.shape[0], y_RD.shape[1]), dtype=accumulation_dtype(y_RD.dtype)
    )
    if num_rows == 0:
        return out_TD.to(y_RD.dtype)
    for k in range(place_TK.shape[1]):
        place_T = place_TK[:, k]
        rows_TD = y_RD.index_select(0, place_T.clamp(max=num_rows - 1))
        # Whatever a missing choice's stand-in row holds, NaN included, must not reach the sum.
        rows_TD.masked_fill_((place_T >= num_rows).unsqueeze(1), 0)
        if weights_TK is None:
            out_TD += rows_TD
        else:
            out_TD.addcmul_(rows_TD.to(out_TD.dtype), weights_TK[:, k, None].to(out_TD.dtype))
    return out_TD.to(y_RD.dtype)


class _Expand(Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, source_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return x_TD.index_select(0, source_R)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, None, None]:
        (place_TK,) = ctx.saved_tensors
        return sum_places(grad_RD.contiguous(), place_TK), None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, place_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, source_R, place_TK)
        return sum_places(y_RD, place_TK, weights_TK)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TD: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        y_RD, weights_TK, source_R, place_TK = ctx.saved_tensors
        precise = accumulation_dtype(y_RD.dtype)
        grad_RD = grad_TD.index_select(0, source_R)
        grad_weights_TK = None
        weight_R = _to_rows(weights_TK, place_TK, source_R.shape[0]).unsqueeze(1)
        if ctx.needs_input_grad[1]:
            dots_R = (grad_RD.to(precise) * y_RD).sum(dim=1)
            grad_weights_TK = _from_rows(dots_R, place_TK).to(weights_TK.dtype)
        grad_y_RD = None
        if ctx.needs_input_grad[0]:
            grad_y_RD = (grad_RD.to(precise) * weight_R.to(precise)).to(y_RD.dtype)
        return grad_y_RD, grad_weights_TK, None, None


def _to_rows(values_TK: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    """`[R]`: the value of the choice that each row was made for."""
    out = values_TK.new_zeros(num_rows + 1)
    out[place_TK.clamp(max=num_rows)] = values_TK.detach()
    return out[:num_rows]


def _from_rows(values_R: Tensor, place_TK: Tensor) -> Tensor:
    """`[T, K]`: each choice's row's value; 0 for choices that have no row."""
    padded = torch.cat([values_R, values_R.new_zeros(1)])
    return padded[place_TK.clamp(max=values_R.shape[0])]


def expand_rows(x_TD: Tensor, source_R: Tensor, place_TK: Tensor) -> Tensor:
    """`[R, D]`: a copy of its token's row for every choice.

    Args:
        x_TD: `[T, D]`.
        source_R: `[R]` int64: the token of each row.
        place_TK: `[T, K]` int64: the row of each choice, `R` or above where it has none.
    """
    return _Expand.apply(x_TD, source_R, place_TK)  # pyright: ignore[reportReturnType]


def combine_rows(y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, place_TK: Tensor) -> Tensor:
    """`[T, D]`: every token's rows, weighted and summed in the order of its choices.

    Arguments as in `expand_rows`; differentiable in the rows and in the weights.
    """
    return _Combine.apply(y_RD, weights_TK, source_R, place_TK)  # pyright: ignore


class _Merge(Function):
    @staticmethod
    def forward(
        ctx: Any, a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor
    ) -> Tensor:
        ctx.save_for_backward(position_A, position_B)
        return _interleave(a_AD, b_BD, position_A, position_B)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        position_A, position_B = ctx.saved_tensors
        return grad_RD.index_select(0, position_A), grad_RD.index_select(0, position_B), None, None


class _Split(Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, position_A: Tensor, position_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(position_A, position_B)
        return y_RD.index_select(0, position_A), y_RD.index_select(0, position_B)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_AD: Tensor, grad_BD: Tensor
    ) -> tuple[Tensor, None, None]:
        return _interleave(grad_AD, grad_BD, *ctx.saved_tensors), None, None


def _interleave(a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor) -> Tensor:
    out_RD = a_AD.new_empty((a_AD.shape[0] + b_BD.shape[0], a_AD.shape[1]))
    out_RD.index_copy_(0, position_A, a_AD)
    out_RD.index_copy_(0, position_B, b_BD)
    return out_RD


def merge_rows(a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor) -> Tensor:
    """`[A + B, D]`: rows of two tensors, each written at its position.

    The positions together are a permutation of `0 .. A + B - 1`.
    """
    return _Merge.apply(a_AD, b_BD, position_A, position_B)  # pyright: ignore[reportReturnType]


def split_rows(y_RD: Tensor, position_A: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """Takes apart what `merge_rows` put together."""
    return _Split.apply(y_RD, position_A, position_B)  # pyright: ignore[reportReturnType]


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, *read: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in read]
        return y_RD.view_as(y_RD)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, ...]:
        return grad_RD, *(grad_RD.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def tie_rows(y_RD: Tensor, *read: Tensor) -> Tensor:
    """`y`, with other tensors among what it was computed from, and gradients of zero for them.

    A function of no rows may well return a constant; the exchange that brought no rows has to take
    part in the backward pass all the same, because other ranks do.
    """
    return _Tie.apply(y_RD, *read)  # pyright: ignore[reportReturnType]
