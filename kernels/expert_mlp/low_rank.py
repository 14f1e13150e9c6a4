"""Adapters of low rank beside the matrices of all experts of a layer, as products of their own.

`x @ (W + scale * B @ A).T` is `x @ W.T + (x @ (scale * A).T) @ B.T`: the second part needs no
weights of the experts, so it is computed for all rows at once, whoever is in memory.

Shape suffixes: R sorted rows, E experts, I inputs of a matrix, N its outputs, L rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor, nn

from moe_runtime.kernels.grouped_gemm.backward import weight_grad
from moe_runtime.kernels.grouped_gemm.forward import plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups


class LowRank:
    """`scale * B @ A` of one matrix of every expert, by Triton kernels.

    Args:
        first_ELI: `A`; what `learn` finds is added to its `grad`.
        second_ENL: `B`, likewise.
        scale: Factor of the product.
        x: Whose dtype the products have.
    """

    def __init__(
        self, first_ELI: nn.Parameter, second_ENL: nn.Parameter, scale: float, x: Tensor
    ) -> None:
        self._parameters = first_ELI, second_ENL
        self._scale = scale
        self._first_ELI = (first_ELI.detach() * scale).to(x.dtype)
        self._second_ENL = second_ENL.detach().to(x.dtype)

    def forward(self, x: Tensor, groups: Groups, *, gathers: bool) -> Tensor:
        """What is added to the product of the rows: `[R, N]`.

        Args:
            x: `[R, I]` in sorted order, or `[T, I]` if `gathers`.
            groups: The rows of all experts.
            gathers: As in `plain_product`.
        """
        inner_RL = self._inner(x, groups, gathers=gathers)
        return _product(inner_RL, self._second_ENL, groups)

    def backward(self, grad: Tensor, groups: Groups, *, gathers: bool) -> tuple[Tensor, Tensor]:
        """What is added to the gradient of the product's input: `[R, I]`.

        Returns:
            That, and `grad @ B`, which `learn` takes.
        """
        inner_RL = _product(grad, self._second_ENL.transpose(1, 2), groups, gathers=gathers)
        return _product(inner_RL, self._first_ELI.transpose(1, 2), groups), inner_RL

    def learn(
        self,
        x: Tensor,
        grad: Tensor,
        grad_inner_RL: Tensor,
        groups: Groups,
        *,
        x_divisor: int = 0,
        grad_divisor: int = 0,
    ) -> None:
        """Adds to the gradients of `A` and `B`; rows are summed in their order.

        Args:
            x: The product's input, times the weights of its rows if the gradient has none.
            grad: The gradient of what the product gave.
            grad_inner_RL: What `backward` returned for this gradient.
            groups: The rows of all experts.
            x_divisor: 0 if `x` is in sorted order, else row r reads `order[r] // divisor`.
            grad_divisor: The same for `grad`.
        """
        first, second = self._parameters
        inner_RL = self._inner(x, groups, gathers=x_divisor > 0)
        grad_ELI, grad_ENL = (_gradient(parameter) for parameter in (first, second))
        # the rank is the narrow side of both tiles
        grad_EIL, grad_inner_RL = grad_ELI.transpose(1, 2), grad_inner_RL * self._scale
        sums: dict[str, Any] = {"accumulates": True}
        weight_grad(x, grad_inner_RL, groups, out_SNK=grad_EIL, left_divisor=x_divisor, **sums)
        weight_grad(grad, inner_RL, groups, out_SNK=grad_ENL, left_divisor=grad_divisor, **sums)

    def _inner(self, x: Tensor, groups: Groups, *, gathers: bool) -> Tensor:
        return _product(x, self._first_ELI, groups, gathers=gathers)


def _product(x: Tensor, weight_ENI: Tensor, groups: Groups, *, gathers: bool = False) -> Tensor:
    _, dim_n, dim_i = weight_ENI.shape
    tile = groups.choose_tile("plain", x, dim_n, dim_i, weight_ENI)
    # no deeper than the rank, where that is summed over
    depth = max(16, triton.next_power_of_2(dim_i))
    tile = replace(tile, block_k=min(tile.block_k, depth))
    out_RN = x.new_empty(groups.num_rows, dim_n)
    return plain_product(x, weight_ENI, groups, out=out_RN, gathers=gathers, tile=tile)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Of a parameter, to be added to."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
