"""One matrix product per expert, in torch operations, on any device; forward and backward.

The backward pass needs the input, the pre-activations and the routing only. It makes no copy of all
routed rows: rows are gathered, multiplied and summed expert by expert, in memory that one expert
leaves to the next.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model, F hidden,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.activation import ActivationSpec
from moe_runtime.kernels.expert_mlp.experts import OneExpert, StackedExperts
from moe_runtime.kernels.expert_mlp.reference import precise_dtype
from moe_runtime.kernels.expert_mlp.rows import (
    Gradients,
    Group,
    Needs,
    SortedRows,
    groups,
    sort_rows,
)
from moe_runtime.kernels.expert_mlp.steps import TorchSteps
from moe_runtime.kernels.native.pages import untouched_zeros, with_huge_pages

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.parameter_gradients import ParameterGradients

STEPS = TorchSteps()


def infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """`forward` without anything kept."""
    rows = sort_rows(ids_TK, experts.num_experts)
    return forward(x_TD, weights_TK, rows, experts, activation, keeps=False)[0]


def forward(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    keeps: bool,
    steps: TorchSteps = STEPS,
) -> tuple[Tensor, Tensor]:
    """The layer's output, and the pre-activations when they are to be kept.

    Args:
        x_TD: Tokens, or rows in the order of their experts when `weights_TK` is None.
        weights_TK: Gate weights; None gives every row's own output in place of the sums.
        rows: Where each expert's rows are.
        experts: The parameters.
        activation: What lies between the products.
        keeps: Whether to return the pre-activations.
        steps: The operations of one expert.

    Returns:
        Output ``[T, D]`` in the dtype of `x`, and ``[R, Z]`` or an empty tensor.
    """
    num_rows = x_TD.shape[0] if weights_TK is None else weights_TK.numel()
    z_RZ = with_huge_pages(x_TD.new_empty(num_rows if keeps else 0, experts.dim_preactivation))
    found = list(groups(rows, experts))
    call = Call(x_TD, weights_TK, rows, found, activation, steps)
    sums_TD = call.new_sums()
    for group, one in zip(found, [experts.one(group.slot) for group in found], strict=True):
        call.run_forward(group, experts, one, z_RZ, sums_TD)
    return sums_TD.to(x_TD.dtype), z_RZ


def backward(
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    z_RZ: Tensor,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    needs: Needs,
    parameter_gradients: ParameterGradients | None = None,
    steps: TorchSteps = STEPS,
) -> Gradients:
    """Every gradient that is needed, from what `forward` was given and what it kept.

    Args:
        grad_TD: Gradient of the output.
        x_TD: As in `forward`, and so `weights_TK`, `rows`, `experts`, `activation`, `steps`.
        weights_TK: Gate weights or None.
        z_RZ: Pre-activations; empty when they are to be computed again.
        rows: Where each expert's rows are.
        experts: The parameters.
        activation: What lies between the products.
        needs: Which gradients.
        parameter_gradients: Where those of parameters are added to, and which experts have some.
        steps: The operations of one expert.
    """
    found = list(groups(rows, experts))
    call = Call(x_TD, weights_TK, rows, found, activation, steps)
    grad_TD = grad_TD.to(x_TD.dtype).contiguous()
    sums_TD = call.new_sums() if needs.x else x_TD.new_empty(0)
    into, slots = None, experts.slot_of_expert
    if parameter_gradients is not None:
        into, slots = parameter_gradients.into, parameter_gradients.trained_slots(experts)
    trained = set(range(experts.num_experts) if slots is None else slots.tolist())
    parameters = [
        x_TD.new_empty(0)
        if not need or tensor is None
        else untouched_zeros(tensor)
        if given is None
        else given
        for tensor, need, given in zip(
            experts.tensors(), needs[2:], into or (None,) * 4, strict=True
        )
    ]
    gradients = Gradients(sums_TD, torch.zeros_like(call.weights_R), *parameters)
    # Slots whose gradients something was written to.
    used: set[int] = set() if into is None else set(trained)
    frozen = needs._replace(gate_up=False, down=False, gate_up_bias=False, down_bias=False)
    for group, one in zip(found, [experts.one(group.slot) for group in found], strict=True):
        needed = needs if group.slot in trained else frozen
        is_first = group.slot not in used
        call.run_backward(group, experts, one, grad_TD, z_RZ, gradients, needed, is_first=is_first)
        used.add(group.slot)
    weights_grad = x_TD.new_empty(0)
    if needs.weights and weights_TK is not None:
        weights_grad = unsorted(gradients.weights, rows, weights_TK)
    return gradients._replace(x=sums_TD.to(x_TD.dtype), weights=weights_grad)


def unsorted(sorted_R: Tensor, rows: SortedRows, like_TK: Tensor) -> Tensor:
    """One value a sorted row, back where its slot is in ``[T, K]``."""
    values_TK = torch.empty_like(like_TK, memory_format=torch.contiguous_format)
    values_TK.view(-1)[rows.order_R] = sorted_R.to(like_TK.dtype)
    return values_TK


class Call:
    """What the experts of one call share: operands, routing, and memory used by each in turn.

    Every view that an expert needs is made before the first needs it, for all of them: between two
    products, which leave nothing of the interpreter in the processor's caches, it takes ten times
    as long.
    """

    def __init__(
        self,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        rows: SortedRows,
        found: Sequence[Group],
        activation: ActivationSpec,
        steps: TorchSteps,
    ) -> None:
        """Takes the arguments of `forward`, and the experts that will have their turn."""
        self.activation = activation
        self.steps = steps
        self.products = steps.products(x_TD.dtype)
        self.x_TD = x_TD.contiguous()
        # rows of x and of the output's gradient are widened as they are gathered
        self._dtype = self.products.operand_dtype(x_TD.dtype)
        self.tokens_R: Tensor | None = None
        self.weights_R = x_TD.new_empty(0, dtype=precise_dtype(x_TD))
        if weights_TK is not None:
            self.tokens_R = rows.order_R // weights_TK.shape[1]
            self.weights_R = weights_TK.flatten().to(precise_dtype(x_TD))[rows.order_R]
        self._groups = found
        self._views: dict[str, dict[Group, Tensor]] = {}

    def new_sums(self) -> Tensor:
        """Zeros to add rows of width D to; rows are sorted already: zeros to write them to."""
        dtype = self._dtype if self.tokens_R is None else precise_dtype(self.x_TD)
        return self.x_TD.new_zeros(self.x_TD.shape, dtype=dtype)

    def run_forward(
        self,
        group: Group,
        experts: StackedExperts,
        one: OneExpert,
        z_RZ: Tensor,
        sums_TD: Tensor,
    ) -> None:
        """One expert's outputs, added to `sums` or written there; its `z` unless that is empty."""
        z_nZ = self._preactivations(group, experts, one, z_RZ)
        kept_nZ = None
        if len(z_RZ) and z_RZ.dtype != z_nZ.dtype:
            kept_nZ = self._part("z_RZ", z_RZ, group)
        hidden_nF = self._buffer("hidden", group, experts.dim_hidden)
        self.steps.activate(z_nZ, experts, self.activation, hidden_nF, kept_nZ)
        # nothing reads the gathered rows any more, and their memory is in the cache
        y_nD = self._out_rows(group, sums_TD, "x")
        self.products.forward(hidden_nF, one.down_DF, one.down_bias, y_nD)
        self._add(group, y_nD, sums_TD, weighted=True)

    def run_backward(
        self,
        group: Group,
        experts: StackedExperts,
        one: OneExpert,
        grad_TD: Tensor,
        z_RZ: Tensor,
        gradients: Gradients,
        needs: Needs,
        *,
        is_first: bool,
    ) -> None:
        """One expert's part of all gradients; its own are added to unless it `is_first`.

        Args:
            group: The expert and its rows.
            experts: All experts, for their layout.
            one: Its parameters.
            grad_TD: Gradient of the output, contiguous, in the dtype of `x`.
            z_RZ: Kept pre-activations or nothing.
            gradients: Where to; `weights` has one element a sorted row.
            needs: Which gradients.
            is_first: Whether nothing was written to this slot's gradients before.
        """
        grad_nD = self._rows(grad_TD, group, "grad")
        z_nZ, grad_z_nZ = self._kept_preactivations(group, experts, one, z_RZ)
        hidden_nF = self._buffer("hidden", group, experts.dim_hidden)
        self.products.backward(grad_nD, one.down_DF, hidden_nF)
        weights_n = None
        if self.tokens_R is not None:
            weights_n = self._part("weights_R", self.weights_R, group)
        weight_grad_n = self.steps.activate_backward(
            z_nZ, hidden_nF, weights_n, experts, self.activation, grad_z_nZ
        )
        if self.tokens_R is not None:
            if one.down_bias is not None:
                weight_grad_n = weight_grad_n + grad_nD @ one.down_bias.to(grad_nD.dtype)
            self._part("grad_weights_R", gradients.weights, group).copy_(weight_grad_n)
        if needs.down:
            sides = (hidden_nF, grad_nD) if experts.is_transposed else (grad_nD, hidden_nF)
            self.products.outer(*sides, gradients.down[group.slot], is_first=is_first)
        if needs.down_bias:
            _add_sum(grad_nD, weights_n, gradients.down_bias[group.slot], is_first=is_first)
        if needs.gate_up:
            x_nD = self._rows(self.x_TD, group, "x")
            sides = (x_nD, grad_z_nZ) if experts.is_transposed else (grad_z_nZ, x_nD)
            self.products.outer(*sides, gradients.gate_up[group.slot], is_first=is_first)
        if needs.gate_up_bias:
            _add_sum(grad_z_nZ, None, gradients.gate_up_bias[group.slot], is_first=is_first)
        if needs.x:
            dx_nD = self._out_rows(group, gradients.x, "grad")
            self.products.backward(grad_z_nZ, one.gate_up_ZD, dx_nD)
            self._add(group, dx_nD, gradients.x, weighted=False)

    def _preactivations(
        self, group: Group, experts: StackedExperts, one: OneExpert, z_RZ: Tensor
    ) -> Tensor:
        """Computes them, in place where they are kept as they are, else in the shared memory."""
        if len(z_RZ) and z_RZ.dtype == self._dtype:
            z_nZ = self._part("z_RZ", z_RZ, group)
        else:
            z_nZ = self._buffer("z", group, experts.dim_preactivation)
        x_nD = self._rows(self.x_TD, group, "x")
        self.products.forward(x_nD, one.gate_up_ZD, one.gate_up_bias, z_nZ)
        return z_nZ

    def _kept_preactivations(
        self, group: Group, experts: StackedExperts, one: OneExpert, z_RZ: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pre-activations with the bits that were or would have been kept; memory like them."""
        if len(z_RZ):
            grad_z_nZ = self._buffer("z", group, experts.dim_preactivation)
            return self._part("z_RZ", z_RZ, group), grad_z_nZ
        z_nZ = self._preactivations(group, experts, one, z_RZ)
        return z_nZ.to(self.x_TD.dtype), z_nZ

    def _rows(self, source_TD: Tensor, group: Group, name: str) -> Tensor:
        """One expert's rows of tokens, or of rows that are sorted already."""
        if self.tokens_R is None and source_TD.dtype == self._dtype:
            return self._part(f"{name}_RD", source_TD, group)
        out_nD = self._buffer(name, group, source_TD.shape[1])
        if self.tokens_R is None:
            return out_nD.copy_(self._part(f"{name}_RD", source_TD, group))
        return self.steps.gather(source_TD, self._part("tokens_R", self.tokens_R, group), out_nD)

    def _out_rows(self, group: Group, sums_TD: Tensor, name: str) -> Tensor:
        """Where a product's rows go that `_add` takes: the memory of that name."""
        if self.tokens_R is None:
            return self._part("sums_RD", sums_TD, group)
        return self._buffer(name, group, sums_TD.shape[1])

    def _add(self, group: Group, rows_nD: Tensor, sums_TD: Tensor, *, weighted: bool) -> None:
        """Adds rows to their tokens; sorted rows are where they belong already."""
        if self.tokens_R is None:
            return
        weights_n = self._part("weights_R", self.weights_R, group) if weighted else None
        tokens_n = self._part("tokens_R", self.tokens_R, group)
        self.steps.add_rows(sums_TD, tokens_n, rows_nD, weights_n)

    def _part(self, name: str, rows_R: Tensor, group: Group) -> Tensor:
        """One expert's part of the sorted rows; a name stands for the same tensor all the time."""
        if name not in self._views:
            self._views[name] = {group: rows_R[group.rows] for group in self._groups}
        return self._views[name][group]

    def _buffer(self, name: str, group: Group, width: int) -> Tensor:
        """Memory that the experts of this call use one after another, ``[n, width]``."""
        if name not in self._views:
            sizes = {group: group.last - group.first for group in self._groups}
            flat = self.x_TD.new_empty(max(sizes.values()) * width, dtype=self._dtype)
            self._views[name] = {
                group: flat[: size * width].view(size, width) for group, size in sizes.items()
            }
        return self._views[name][group]


def _add_sum(rows_nA: Tensor, weights_n: Tensor | None, out_A: Tensor, *, is_first: bool) -> None:
    rows_nA = rows_nA.to(precise_dtype(rows_nA))
    if weights_n is not None:
        rows_nA = rows_nA * weights_n[:, None]
    total = rows_nA.sum(0)
    out_A.copy_(total if is_first else total + out_A)
