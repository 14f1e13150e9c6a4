"""Moving rows between token order and routed order, differentiable, without atomic sums.

The adjoint of a gather is a sum over the places of each token's choices, in their order: the same
input gives the same bits.

Shape suffixes: T tokens, K choices of a token, R routed rows, D model, A and B parts of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_runtime.kernels.operands.second_derivative import first_derivatives_only

SPREAD = (
    "spread experts have no second derivatives: make the layer without group= and with "
    "impl='reference' (in transformers, experts_implementation='eager' without DistributedConfig)"
)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are formed in: fp32 for narrower types, otherwise the type itself."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def sum_places(y_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """`out[t] = sum over k of weights[t, k] * y[place[t, k]]`, added in the order of `k`.

    An entry of `place_TK` of `R` or above means a row of zeros. Summed in
    `accumulation_dtype`, returned in the dtype of `y`.
    """
    num_rows, dim = y_RD.shape
    num_tokens, num_choices = place_TK.shape
    if num_rows == 0 or num_choices == 0:
        return y_RD.new_zeros((num_tokens, dim))
    # Every row has one choice: with as many rows as choices, none is missing.
    has_gaps = num_rows < place_TK.numel()
    precise = accumulation_dtype(y_RD.dtype)
    out_TD = y_RD.new_empty((num_tokens, dim), dtype=precise)
    rows_TD = y_RD.new_empty((num_tokens, dim))
    for k in range(num_choices):
        place_T = place_TK[:, k]
        torch.index_select(y_RD, 0, place_T.clamp(max=num_rows - 1), out=rows_TD)
        if has_gaps:
            # The row read for a missing choice, which may hold NaN, must not reach the sum.
            rows_TD.masked_fill_((place_T >= num_rows).unsqueeze(1), 0)
        if weights_TK is None:
            out_TD = out_TD.copy_(rows_TD) if k == 0 else out_TD.add_(rows_TD)
            continue
        weight_T1 = weights_TK[:, k, None].to(precise)
        if k == 0:
            torch.mul(rows_TD, weight_T1, out=out_TD)
        else:
            out_TD.addcmul_(rows_TD.to(precise), weight_T1)
    return out_TD.to(y_RD.dtype)


class Later:
    """Rows for the second of two autograd nodes, and their gradient for the first.

    The first node makes rows that leave early; the second makes the rest while they travel. The
    first node gets both gradients.
    """

    def __init__(self, rows: Tensor, index: Tensor) -> None:
        self.rows = rows
        self.index = index
        self.grad: Tensor | None = None


class _Expand(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        source_R: Tensor,
        place_TK: Tensor,
        sizes: Sequence[int],
        kept: Later,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(place_TK)
        ctx.kept = kept
        sources = source_R[: sum(sizes)].split(list(sizes))
        return *(x_TD.index_select(0, source) for source in sources), x_TD.new_zeros(1)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, *grads_RD: Tensor) -> tuple[Tensor, None, None, None, None]:
        (place_TK,) = ctx.saved_tensors
        kept: Later = ctx.kept
        grad_BD = kept.grad
        if grad_BD is None:
            grad_BD = grads_RD[0].new_zeros((kept.index.shape[0], grads_RD[0].shape[1]))
        parts = [grad for grad in (*grads_RD[:-1], grad_BD) if grad.shape[0]]
        grad_RD = parts[0] if len(parts) == 1 else torch.cat([*grads_RD[:-1], grad_BD])
        return sum_places(grad_RD.contiguous(), place_TK), None, None, None, None


class _Kept(Function):
    """The second half of a pair: rows that stay, written into `out` where there is one."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, kept: Later, out: list[Tensor]) -> Tensor:
        ctx.kept = kept
        if not out:
            return kept.rows.index_select(0, kept.index)
        torch.index_select(kept.rows, 0, kept.index, out=out[0])
        return alias(out[0])

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor, None, None]:
        ctx.kept.grad = grad_BD
        return grad_BD.new_zeros(1), None, None


class _Combine(Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, place_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_TK, source_R, place_TK)
        return sum_places(y_RD, place_TK, weights_TK)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
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


class Expansion:
    """A copy of its token's row for every choice, in parts; `last` makes the last part.

    Args:
        source_R: int64: the token of each row.
        place_TK: int64: the row of each choice, `R` or above where it has none.
        sizes: Rows of each part but the last.
    """

    def __init__(
        self, x_TD: Tensor, source_R: Tensor, place_TK: Tensor, sizes: Sequence[int]
    ) -> None:
        self._later = Later(x_TD.detach(), source_R[sum(sizes) :])
        *self.parts, self._token = _Expand.apply(  # pyright: ignore[reportGeneralTypeIssues]
            x_TD, source_R, place_TK, sizes, self._later
        )

    def last(self) -> Tensor:
        return _Kept.apply(self._token, self._later, [])  # pyright: ignore[reportReturnType]


def combine_rows(y_RD: Tensor, weights_TK: Tensor, source_R: Tensor, place_TK: Tensor) -> Tensor:
    """`[T, D]`: every token's rows, weighted and summed in the order of its choices."""
    return _Combine.apply(y_RD, weights_TK, source_R, place_TK)  # pyright: ignore


def alias(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that autograd takes for another one.

    For nodes that write into parts of one buffer.
    """
    return tensor.new_empty(0).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


class _Merge(Function):
    @staticmethod
    def forward(
        ctx: Any, a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor
    ) -> Tensor:
        ctx.save_for_backward(position_A, position_B)
        return _interleave(a_AD, b_BD, position_A, position_B)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        position_A, position_B = ctx.saved_tensors
        return grad_RD.index_select(0, position_A), grad_RD.index_select(0, position_B), None, None


class _SplitGoing(Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, position_A: Tensor, position_B: Tensor, kept: Later
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(position_A, position_B)
        ctx.kept = kept
        return y_RD.index_select(0, position_A), y_RD.new_zeros(1)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_AD: Tensor, grad_token: Tensor) -> tuple[Tensor, None, None, None]:
        position_A, position_B = ctx.saved_tensors
        grad_BD = ctx.kept.grad
        if grad_BD is None:
            grad_BD = grad_AD.new_zeros((position_B.shape[0], grad_AD.shape[1]))
        return _interleave(grad_AD, grad_BD, position_A, position_B), None, None, None


class _Assemble(Function):
    @staticmethod
    def forward(ctx: Any, buffer: list[Tensor], *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[0] for part in parts]
        return alias(buffer[0])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor | None, ...]:
        return None, *grad_RD.split(ctx.sizes)


def _interleave(a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor) -> Tensor:
    out_RD = a_AD.new_empty((a_AD.shape[0] + b_BD.shape[0], a_AD.shape[1]))
    out_RD.index_copy_(0, position_A, a_AD)
    out_RD.index_copy_(0, position_B, b_BD)
    return out_RD


def merge_rows(a_AD: Tensor, b_BD: Tensor, position_A: Tensor, position_B: Tensor) -> Tensor:
    """`[A + B, D]`: rows of two tensors, each written at its position (together a permutation)."""
    return _Merge.apply(a_AD, b_BD, position_A, position_B)  # pyright: ignore[reportReturnType]


class Splitting:
    """Takes apart what `merge_rows` put together; `second` makes the second part later."""

    def __init__(self, y_RD: Tensor, position_A: Tensor, position_B: Tensor) -> None:
        self._later = Later(y_RD.detach(), position_B)
        self.first_AD, self._token = _SplitGoing.apply(  # pyright: ignore[reportGeneralTypeIssues]
            y_RD, position_A, position_B, self._later
        )

    def second(self, out_BD: Tensor) -> Tensor:
        """The second part, written into `out_BD`."""
        return _Kept.apply(self._token, self._later, [out_BD])  # pyright: ignore[reportReturnType]


def assembled_rows(buffer_RD: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The buffer into which the parts were written, one after another, as computed from them."""
    return _Assemble.apply([buffer_RD], *parts)  # pyright: ignore[reportReturnType]


class _Tie(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, *read: Tensor) -> Tensor:
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in read]
        return y_RD.view_as(y_RD)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RD: Tensor
    ) -> tuple[Tensor, ...]:
        return grad_RD, *(grad_RD.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def tie_rows(y_RD: Tensor, *read: Tensor) -> Tensor:
    """`y`, with gradients of zero for other tensors that it was computed from.

    An exchange that brought no rows takes part in the backward pass, because other ranks do.
    """
    return _Tie.apply(y_RD, *read)  # pyright: ignore[reportReturnType]
