"""`expert_mlp` one expert at a time, for experts that are in memory only while they are used.

It takes the same steps in the same order as the whole layer on a CPU, so it has the bits of
resident experts. With a function as activation the last bits differ: resident experts sum rows in
the order of the choices, here they come expert by expert.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden, Z = 2F with
a gate and F without.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.operators import path_of
from moe_runtime.kernels.expert_mlp.products import AdaptedProducts, Adapter, Products
from moe_runtime.kernels.expert_mlp.rows import Group, SortedRows, sort_rows
from moe_runtime.kernels.expert_mlp.torch_path import Call, TorchPath, TorchSteps
from moe_runtime.kernels.operands import (
    ActivationSpec,
    GateLayout,
    PreactivationFunction,
    precise_dtype,
)


class FunctionSteps(TorchSteps):
    """The steps around an activation that is a function; autograd differentiates it."""

    def __init__(self, function: PreactivationFunction) -> None:
        self._function = function

    def activate(
        self, z_nZ: Tensor, layout: GateLayout, hidden_nF: Tensor, kept_nZ: Tensor | None = None
    ) -> None:
        assert kept_nZ is None, "products of the dtype of x leave z where it is kept"
        hidden_nF.copy_(self._function(z_nZ))

    def activate_backward(
        self,
        z_nZ: Tensor,
        layout: GateLayout,
        hidden_nF: Tensor,
        weights_n: Tensor | None,
        grad_z_nZ: Tensor,
    ) -> Tensor:
        with torch.enable_grad():
            z_nZ = z_nZ.detach().requires_grad_()
            hidden = self._function(z_nZ)
        precise, grad_nF = precise_dtype(z_nZ), hidden_nF
        weight_grad_n = (grad_nF.to(precise) * hidden.detach().to(precise)).sum(1)
        weighted = hidden.detach()
        if weights_n is not None:
            weights_n1 = weights_n.to(z_nZ.dtype)[:, None]
            grad_nF, weighted = grad_nF * weights_n1, weighted * weights_n1
        (found_nZ,) = torch.autograd.grad(hidden, z_nZ, grad_nF)
        hidden_nF.copy_(weighted)
        grad_z_nZ.copy_(found_nZ)
        return weight_grad_n


class StreamedExperts:
    """One call of a layer that gets its experts one after another.

    Forward: `begin_forward`, `forward` for every expert of `experts` in ascending order (which
    decides how sums are rounded), `output`. Backward likewise. Ids of no expert are skipped.

    Args:
        weights_TK: Gate weights; None for rows that are sorted by expert already, `K = 1`, whose
            own outputs are wanted.
        activation: A formula, or a function of the pre-activations as they lie.
        impl: As in `expert_mlp`; on a GPU the products are torch's.

    Attributes:
        experts: The experts that have rows, ascending.
        z_RZ: Kept pre-activations of the sorted rows, or empty.
    """

    def __init__(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor | None,
        num_experts: int,
        activation: ActivationSpec | PreactivationFunction,
        impl: str = "auto",
    ) -> None:
        self.x_TD = x_TD
        self._is_sorted = weights_TK is None
        self.weights_TK = x_TD.new_empty(0) if weights_TK is None else weights_TK
        self._num_rows = ids_TK.numel()
        self.rows: SortedRows = sort_rows(ids_TK, num_experts)
        self._bounds: list[int] = self.rows.offsets_E1.tolist()
        self.experts = [e for e in range(num_experts) if self._bounds[e] < self._bounds[e + 1]]
        self.z_RZ = x_TD.new_empty(0)
        if isinstance(activation, ActivationSpec):
            path = path_of(impl, x_TD)
            self._steps = (path if isinstance(path, TorchPath) else TorchPath()).steps(activation)
        else:
            self._steps = FunctionSteps(activation)
        self._call: Call | None = None

    def give_up_tensors(self) -> tuple[Tensor, ...]:
        """Hands the tensors for the backward pass to autograd and drops them here."""
        tensors = (self.x_TD, self.weights_TK, self.z_RZ, *self.rows)
        nothing = torch.empty(0)
        self.x_TD = self.weights_TK = self.z_RZ = nothing
        self.rows = SortedRows(nothing, nothing)
        return tensors

    def take_tensors(
        self, x_TD: Tensor, weights_TK: Tensor, z_RZ: Tensor, order_R: Tensor, offsets_E1: Tensor
    ) -> None:
        self.x_TD, self.weights_TK, self.z_RZ = x_TD, weights_TK, z_RZ
        self.rows = SortedRows(order_R, offsets_E1)

    def num_rows(self, expert: int) -> int:
        return self._bounds[expert + 1] - self._bounds[expert]

    def begin_forward(self, dim_preactivation: int, *, keeps: bool) -> None:
        """Allocates the output, and the pre-activations if they are kept."""
        num_rows = self._num_rows if keeps else 0
        self.z_RZ = self.x_TD.new_empty(num_rows, dim_preactivation)
        self._begin().begin_forward(self.z_RZ)

    def forward(
        self, expert: int, weights: StackedExperts, adapters: Sequence[Adapter] = ()
    ) -> None:
        """Adds one expert's part of the output.

        `weights` has its parameters in slot 0. `adapters` are of its two matrices, or empty.
        """
        assert self._call is not None, "begin_forward comes first"
        self._call.products = self._products_with(weights, adapters)
        self._call.forward(self._group(expert), weights.one(0))

    def output(self) -> Tensor:
        """`[T, D]` in the dtype of `x`, after every expert."""
        return self._end()

    def begin_backward(self, grad_TD: Tensor) -> None:
        """Takes the output's gradient and allocates those of `x` and the gate weights."""
        self._begin().begin_backward(grad_TD, self.z_RZ)

    def backward(
        self,
        expert: int,
        weights: StackedExperts,
        out: Sequence[Tensor | None] | None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """Adds one expert's part of the gradients.

        `out` receives the gradients of the tensors of `weights`; None for frozen ones, or for all
        of them, for example if `adapters` learn instead.
        """
        assert self._call is not None, "begin_backward comes first"
        self._call.products = self._products_with(weights, adapters)
        if adapters:
            learned = [own.gradients for own in adapters]
            out = [None if pair is None else pair[0][None] for pair in learned] + [None, None]
        self._call.backward(
            self._group(expert), weights, weights.one(0), out or [None] * len(weights.tensors()),
            needs_x=True, is_first=True,
        )  # fmt: skip

    def input_gradients(self) -> tuple[Tensor, Tensor]:
        """Gradients of `x` and of the gate weights (empty without), after every expert."""
        assert self._call is not None, "begin_backward comes first"
        grad_weights_TK = self.weights_TK
        if not self._is_sorted:
            grad_weights_TK = self._call.weights_grad(self.weights_TK)
        return self._end(), grad_weights_TK

    def _products_with(self, weights: StackedExperts, adapters: Sequence[Adapter]) -> Products:
        assert self._call is not None
        if not adapters:
            return self._products
        matrices = (weights.gate_up, weights.down)
        by_place = {one.data_ptr(): own for one, own in zip(matrices, adapters, strict=True)}
        return AdaptedProducts(self._products, by_place, is_turned=weights.is_transposed)

    def _begin(self) -> Call:
        groups = [self._group(expert) for expert in self.experts]
        weights_TK = None if self._is_sorted else self.weights_TK
        self._call = Call(self.x_TD, weights_TK, self.rows, groups, self._steps)
        self._products = self._call.products
        return self._call

    def _end(self) -> Tensor:
        assert self._call is not None, "there was a beginning"
        sums_TD = self._call.sums()
        self._call = None
        return sums_TD

    def _group(self, expert: int) -> Group:
        return Group(0, self._bounds[expert], self._bounds[expert + 1])
