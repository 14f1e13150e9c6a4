"""One matrix product per expert, in torch operations, on any device; forward and backward.

The backward pass needs the input, the pre-activations and the routing only. It makes no copy of all
routed rows: rows are gathered, multiplied and summed expert by expert.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, n rows of one expert, D model, F hidden,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.activation import ActivationSpec, split_preactivations
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.rows import (
    Gradients,
    Group,
    Needs,
    SortedRows,
    groups,
    sort_rows,
)
from moe_runtime.kernels.native.pages import with_huge_pages


class TorchSteps:
    """What happens between the products, for `forward` and `backward`."""

    def product(self, x_nK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_nN: Tensor) -> None:
        """``x @ weight.T + bias`` into `out`."""
        if bias is None:
            torch.mm(x_nK, weight_NK.T, out=out_nN)
        else:
            torch.addmm(bias, x_nK, weight_NK.T, out=out_nN)

    def activate(self, z_nZ: Tensor, experts: StackedExperts, activation: ActivationSpec) -> Tensor:
        """Hidden values ``[n, F]`` of pre-activations, computed in fp32 or better."""
        gate, up = _halves(z_nZ.to(_precise(z_nZ)), experts)
        return activation(gate, up).to(z_nZ.dtype)

    def activate_backward(
        self,
        z_nZ: Tensor,
        grad_nF: Tensor,
        weights_n: Tensor | None,
        experts: StackedExperts,
        activation: ActivationSpec,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Steps back over the activation, with the gate weight still to be multiplied.

        Args:
            z_nZ: Pre-activations.
            grad_nF: Gradient of the hidden values for a gate weight of one.
            weights_n: Gate weights; None stands for ones.
            experts: For the layout of `z`.
            activation: What lies between.

        Returns:
            The gradient of `z`; the hidden values times gate weight ``[n, F]``; the gradient of the
            gate weights ``[n]`` in fp32 or better.
        """
        precise = _precise(z_nZ)
        gate, up = _halves(z_nZ.to(precise), experts)
        grad = grad_nF.to(precise)
        hidden = activation(gate, up)
        grad_weights_n = (grad * hidden).sum(1)
        if weights_n is not None:
            weights_n1 = weights_n.to(precise)[:, None]
            grad, hidden = grad * weights_n1, hidden * weights_n1
        gate_grad, up_grad = activation.backward(gate, up, grad)
        grad_z = torch.empty_like(z_nZ)
        out_gate, out_up = _halves(grad_z, experts)
        out_up.copy_(up_grad)
        if out_gate is not None and gate_grad is not None:
            out_gate.copy_(gate_grad)
        return grad_z, hidden.to(z_nZ.dtype), grad_weights_n

    def add_rows(
        self, sums_TD: Tensor, tokens_n: Tensor, rows_nD: Tensor, weights_n: Tensor | None
    ) -> None:
        """``sums[tokens[i]] += weights[i] * rows[i]``, always in the same order."""
        rows_nD = rows_nD.to(sums_TD.dtype)
        if weights_n is not None:
            rows_nD = rows_nD * weights_n.to(sums_TD.dtype)[:, None]
        if sums_TD.is_cuda:
            # index_add_ would sum by atomics, in any order; this one sorts first
            sums_TD.index_put_((tokens_n,), rows_nD, accumulate=True)
        else:
            sums_TD.index_add_(0, tokens_n, rows_nD)


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
        steps: The operations between the products.

    Returns:
        Output ``[T, D]`` in the dtype of `x`, and ``[R, Z]`` or an empty tensor.
    """
    num_rows = x_TD.shape[0] if weights_TK is None else weights_TK.numel()
    z_RZ = with_huge_pages(x_TD.new_empty(num_rows if keeps else 0, experts.dim_preactivation))
    sums_TD = x_TD.new_zeros(x_TD.shape, dtype=x_TD.dtype if weights_TK is None else _precise(x_TD))
    for group in groups(rows, experts):
        run_group(group, x_TD, weights_TK, rows, experts, activation, z_RZ, sums_TD, steps=steps)
    return sums_TD.to(x_TD.dtype), z_RZ


def run_group(
    group: Group,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    z_RZ: Tensor,
    sums_TD: Tensor,
    *,
    steps: TorchSteps,
) -> None:
    """One expert's part of `forward`: its rows' outputs, added to `sums` or written there.

    Args:
        group: The expert and its rows.
        x_TD: As in `forward`, and so the other arguments.
        weights_TK: Gate weights or None.
        rows: Where the rows are.
        experts: The parameters.
        activation: What lies between the products.
        z_RZ: Receives the pre-activations, unless empty.
        sums_TD: ``[T, D]`` in fp32 or better; rows of the input's dtype without gate weights.
        steps: The operations between the products.
    """
    here = slice(group.first, group.last)
    tokens_n, weights_n = _routing_of(group, rows, weights_TK)
    z_nZ = z_RZ[here] if len(z_RZ) else x_TD.new_empty(_count(group), experts.dim_preactivation)
    _preactivations(x_TD, tokens_n, group, experts, steps, z_nZ)
    hidden_nF = steps.activate(z_nZ, experts, activation)
    _, down_DF = experts.matrices(group.slot)
    _, down_bias = experts.biases(group.slot)
    if tokens_n is None:
        steps.product(hidden_nF, down_DF, down_bias, sums_TD[here])
    else:
        y_nD = x_TD.new_empty(_count(group), x_TD.shape[1])
        steps.product(hidden_nF, down_DF, down_bias, y_nD)
        steps.add_rows(sums_TD, tokens_n, y_nD, weights_n)


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
        steps: The operations between the products.
    """
    gradients = _allocate(x_TD, weights_TK, experts, needs)
    grad_TD = grad_TD.to(x_TD.dtype)
    used: set[int] = set()
    for group in groups(rows, experts):
        run_group_backward(
            group, grad_TD, x_TD, weights_TK, z_RZ, rows, experts, activation, gradients,
            needs=needs, steps=steps, is_first=group.slot not in used,
        )  # fmt: skip
        used.add(group.slot)
    _zero_unused(gradients, used, experts.gate_up.shape[0])
    return gradients._replace(x=gradients.x.to(x_TD.dtype))


def run_group_backward(
    group: Group,
    grad_TD: Tensor,
    x_TD: Tensor,
    weights_TK: Tensor | None,
    z_RZ: Tensor,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    gradients: Gradients,
    *,
    needs: Needs,
    steps: TorchSteps,
    is_first: bool,
) -> None:
    """One expert's part of `backward`: added to the input's gradient, written to its own.

    Args:
        group: The expert and its rows.
        grad_TD: Gradient of the output, in the dtype of `x`.
        x_TD: As in `forward`, and so the other arguments.
        weights_TK: Gate weights or None.
        z_RZ: Pre-activations; empty when they are to be computed again.
        rows: Where the rows are.
        experts: The parameters.
        activation: What lies between the products.
        gradients: Of the whole call: `x` in fp32 or better, and slots as `experts` has them.
        needs: Which gradients.
        steps: The operations between the products.
        is_first: Whether the parameters' gradients are written; otherwise they are added to.
    """
    tokens_n, weights_n = _routing_of(group, rows, weights_TK)
    here = slice(group.first, group.last)
    out_grad_nD = grad_TD[here] if tokens_n is None else grad_TD.index_select(0, tokens_n)
    if len(z_RZ):
        z_nZ = z_RZ[here]
    else:
        z_nZ = x_TD.new_empty(_count(group), experts.dim_preactivation)
        _preactivations(x_TD, tokens_n, group, experts, steps, z_nZ)
    _, down_DF = experts.matrices(group.slot)
    hidden_grad_nF = out_grad_nD @ down_DF
    z_grad_nZ, hidden_nF, weight_grad_n = steps.activate_backward(
        z_nZ, hidden_grad_nF, weights_n, experts, activation
    )
    if needs.weights:
        _, down_bias = experts.biases(group.slot)
        if down_bias is not None:
            weight_grad_n = weight_grad_n + (out_grad_nD @ down_bias).to(weight_grad_n.dtype)
        gradients.weights.view(-1)[rows.order_R[here]] = weight_grad_n.to(gradients.weights.dtype)
    _parameter_gradients(
        gradients, group, experts, needs, x_TD, tokens_n, weights_n,
        out_grad_nD, hidden_nF, z_grad_nZ, is_first=is_first,
    )  # fmt: skip
    if needs.x:
        gate_up_ZD, _ = experts.matrices(group.slot)
        if tokens_n is None:
            torch.mm(z_grad_nZ, gate_up_ZD, out=gradients.x[here])
        else:
            steps.add_rows(gradients.x, tokens_n, z_grad_nZ @ gate_up_ZD, None)


def _count(group: Group) -> int:
    return group.last - group.first


def _routing_of(
    group: Group, rows: SortedRows, weights_TK: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Token and gate weight of each row of a group; None and None when rows are sorted in `x`."""
    if weights_TK is None:
        return None, None
    order_n = rows.order_R[group.first : group.last]
    return order_n // weights_TK.shape[1], weights_TK.flatten()[order_n]


def _preactivations(
    x_TD: Tensor,
    tokens_n: Tensor | None,
    group: Group,
    experts: StackedExperts,
    steps: TorchSteps,
    z_nZ: Tensor,
) -> None:
    x_nD = _rows_of(x_TD, tokens_n, group)
    gate_up_ZD, _ = experts.matrices(group.slot)
    gate_up_bias, _ = experts.biases(group.slot)
    steps.product(x_nD, gate_up_ZD, gate_up_bias, z_nZ)


def _rows_of(x_TD: Tensor, tokens_n: Tensor | None, group: Group) -> Tensor:
    return x_TD[group.first : group.last] if tokens_n is None else x_TD.index_select(0, tokens_n)


def _parameter_gradients(
    gradients: Gradients,
    group: Group,
    experts: StackedExperts,
    needs: Needs,
    x_TD: Tensor,
    tokens_n: Tensor | None,
    weights_n: Tensor | None,
    out_grad_nD: Tensor,
    hidden_nF: Tensor,
    z_grad_nZ: Tensor,
    *,
    is_first: bool,
) -> None:
    """Writes one expert's parameter gradients, or adds to them when its slot was written before."""
    slot = group.slot
    if needs.down:
        left, right = (
            (hidden_nF, out_grad_nD) if experts.is_transposed else (out_grad_nD, hidden_nF)
        )
        _outer(left, right, gradients.down[slot], is_first=is_first)
    if needs.gate_up:
        x_nD = _rows_of(x_TD, tokens_n, group)
        left, right = (x_nD, z_grad_nZ) if experts.is_transposed else (z_grad_nZ, x_nD)
        _outer(left, right, gradients.gate_up[slot], is_first=is_first)
    if needs.gate_up_bias:
        _add_sum(z_grad_nZ, None, gradients.gate_up_bias[slot], is_first=is_first)
    if needs.down_bias:
        _add_sum(out_grad_nD, weights_n, gradients.down_bias[slot], is_first=is_first)


def _outer(left_nA: Tensor, right_nB: Tensor, out_AB: Tensor, *, is_first: bool) -> None:
    torch.addmm(out_AB, left_nA.T, right_nB, beta=0 if is_first else 1, out=out_AB)


def _add_sum(rows_nA: Tensor, weights_n: Tensor | None, out_A: Tensor, *, is_first: bool) -> None:
    rows_nA = rows_nA.to(_precise(rows_nA))
    if weights_n is not None:
        rows_nA = rows_nA * weights_n.to(rows_nA.dtype)[:, None]
    total = rows_nA.sum(0)
    out_A.copy_(total if is_first else total + out_A)


def _allocate(
    x_TD: Tensor, weights_TK: Tensor | None, experts: StackedExperts, needs: Needs
) -> Gradients:
    """Gradients to write into: those that rows add up to are zero, the others not yet anything."""
    sums = x_TD.new_empty(0)
    if needs.x:
        sums = x_TD.new_zeros(
            x_TD.shape, dtype=x_TD.dtype if weights_TK is None else _precise(x_TD)
        )
    return Gradients(
        sums,
        torch.zeros_like(weights_TK)
        if needs.weights and weights_TK is not None
        else x_TD.new_empty(0),
        *(
            with_huge_pages(torch.empty_like(tensor))
            if need and tensor is not None
            else x_TD.new_empty(0)
            for tensor, need in zip(experts.tensors(), needs[2:], strict=True)
        ),
    )


def _zero_unused(gradients: Gradients, used: set[int], num_slots: int) -> None:
    """Experts without rows have gradient zero; the others were written in full."""
    for tensor in gradients[2:]:
        if tensor.numel():
            for slot in range(num_slots):
                if slot not in used:
                    tensor[slot].zero_()


def _halves(z_nZ: Tensor, experts: StackedExperts) -> tuple[Tensor | None, Tensor]:
    return split_preactivations(
        z_nZ, has_gate=experts.has_gate, is_concatenated=experts.is_concatenated
    )


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
