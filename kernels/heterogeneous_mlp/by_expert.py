"""`heterogeneous_mlp` on a CPU: the products of one expert after another, forward and backward.

The same steps as `expert_mlp` takes there: C kernels around the products and for few rows, torch's
products for many, memory that one expert leaves to the next.

Shape suffixes: T tokens, K choices a token, R sorted rows, n rows of one expert, D model, F hidden
columns of one expert, Z = 2F with a gate and F without.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.expert_mlp.reference import precise_dtype
from moe_runtime.kernels.expert_mlp.rows import groups_between
from moe_runtime.kernels.expert_mlp.steps import TorchSteps
from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExpert, PackedExperts
from moe_runtime.kernels.heterogeneous_mlp.gradients import Gradients, Needs
from moe_runtime.kernels.native.pages import untouched_zeros
from moe_runtime.kernels.token_sort import SortedTokens


class _Piece(NamedTuple):
    """One expert that has rows: which, and where its kept pre-activations are."""

    expert: PackedExpert
    rows: slice
    kept: slice


class ByExpert:
    """The implementation `torch`, and with the C kernels' steps `native`.

    Args:
        steps: The operations of one expert.
    """

    def __init__(self, steps: TorchSteps) -> None:
        self._steps = steps

    def forward(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        keeps: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output ``[T, D]``, and the pre-activations of all experts in one flat tensor."""
        run = _Run(x_TD, weights_TK, order, experts, activation, self._steps)
        sums_TD = run.new_sums()
        kept = x_TD.new_empty(run.num_kept if keeps else 0)
        for piece in run.pieces:
            z_nZ = run.preactivations(piece)
            kept_nZ = kept[piece.kept].view(z_nZ.shape) if keeps else None
            hidden_nF = z_nZ.new_empty(len(z_nZ), piece.expert.dim_hidden)
            self._steps.activate(z_nZ, piece.expert, activation, hidden_nF, kept_nZ)
            y_nD = z_nZ.new_empty(len(z_nZ), x_TD.shape[1])
            run.products.forward(hidden_nF, piece.expert.down.T, None, y_nD)
            run.add(piece, y_nD, sums_TD, run.weights_R[piece.rows])
        return sums_TD.to(x_TD.dtype), (kept,)

    def backward(
        self,
        grad_TD: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        kept: tuple[Tensor, ...],
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        needs: Needs,
    ) -> Gradients:
        """The gradients that are needed; with nothing kept the pre-activations again."""
        run = _Run(x_TD, weights_TK, order, experts, activation, self._steps)
        grad_TD = grad_TD.to(x_TD.dtype).contiguous()
        sums_TD = run.new_sums()
        grad_weights_R = torch.zeros_like(run.weights_R)
        found = {
            name: untouched_zeros(tensor)
            for name, tensor in experts.differentiated().items()
            if tensor is not None and getattr(needs, name)
        }
        (kept_flat,) = kept
        for piece in run.pieces:
            expert, rows = piece.expert, piece.rows
            if kept_flat.numel():
                z_nZ = kept_flat[piece.kept].view(-1, expert.dim_preactivation)
            else:
                # With the bits that would have been kept.
                z_nZ = run.preactivations(piece).to(x_TD.dtype)
            grad_nD = run.rows_of(piece, grad_TD)
            hidden_nF = grad_nD.new_empty(len(grad_nD), expert.dim_hidden)
            run.products.forward(grad_nD, expert.down, None, hidden_nF)
            grad_z_nZ = grad_nD.new_empty(z_nZ.shape)
            grad_weights_R[rows] = self._steps.activate_backward(
                z_nZ, hidden_nF, run.weights_R[rows], expert, activation, grad_z_nZ
            )
            if needs.down:
                run.products.outer(hidden_nF, grad_nD, found["down"][expert.rows], is_first=True)
            x_nD = run.rows_of(piece, run.x_TD) if needs.gate or needs.up else grad_nD
            for name, columns in expert.halves():
                if getattr(needs, name):
                    out_FD = found[name][expert.rows]
                    run.products.outer(grad_z_nZ[:, columns], x_nD, out_FD, is_first=True)
                if getattr(needs, f"{name}_bias"):
                    sums_F = grad_z_nZ[:, columns].to(precise_dtype(x_TD)).sum(0)
                    found[f"{name}_bias"][expert.rows] = sums_F
                if needs.x:
                    dx_nD = torch.empty_like(grad_nD)
                    run.products.backward(grad_z_nZ[:, columns], getattr(expert, name), dx_nD)
                    run.add(piece, dx_nD, sums_TD, None)
        weights = None
        if needs.weights:
            weights = torch.empty_like(weights_TK, memory_format=torch.contiguous_format)
            weights.view(-1)[order.order_R] = grad_weights_R.to(weights.dtype)
        x = sums_TD.to(x_TD.dtype) if needs.x else None
        return Gradients(x=x, weights=weights, **found)


class _Run:
    """What the experts of one call share."""

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        steps: TorchSteps,
    ) -> None:
        self.products = steps.products(x_TD.dtype)
        self.x_TD = x_TD.contiguous()
        # Rows of x and of the output's gradient are widened as they are gathered.
        self._dtype = self.products.operand_dtype(x_TD.dtype)
        self.weights_R = weights_TK.flatten().to(precise_dtype(x_TD))[order.order_R]
        self.pieces = list(_pieces(order, experts))
        self.num_kept = self.pieces[-1].kept.stop if self.pieces else 0
        self._steps = steps
        self._tokens_R = order.order_R // weights_TK.shape[1]

    def new_sums(self) -> Tensor:
        return self.x_TD.new_zeros(self.x_TD.shape, dtype=precise_dtype(self.x_TD))

    def rows_of(self, piece: _Piece, source_TD: Tensor) -> Tensor:
        tokens_n = self._tokens_R[piece.rows]
        out_nD = source_TD.new_empty(len(tokens_n), source_TD.shape[1], dtype=self._dtype)
        return self._steps.gather(source_TD, tokens_n, out_nD)

    def preactivations(self, piece: _Piece) -> Tensor:
        expert = piece.expert
        x_nD = self.rows_of(piece, self.x_TD)
        z_nZ = x_nD.new_empty(len(x_nD), expert.dim_preactivation)
        for name, columns in expert.halves():
            weight_FD, bias_F = getattr(expert, name), getattr(expert, f"{name}_bias")
            self.products.forward(x_nD, weight_FD, bias_F, z_nZ[:, columns])
        return z_nZ

    def add(
        self, piece: _Piece, rows_nD: Tensor, sums_TD: Tensor, weights_n: Tensor | None
    ) -> None:
        self._steps.add_rows(sums_TD, self._tokens_R[piece.rows], rows_nD, weights_n)


def _pieces(order: SortedTokens, experts: PackedExperts) -> Iterator[_Piece]:
    parts, first = list(experts.parts()), 0
    for group in groups_between(order.offsets_E1, None):
        expert = parts[group.slot]
        size = (group.last - group.first) * expert.dim_preactivation
        yield _Piece(expert, group.rows, slice(first, first + size))
        first += size
