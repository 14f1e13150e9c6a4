"""One product per expert as a differentiable operator, for activations that only a model knows.

What lies between and after the products is then ordinary torch code, which autograd and the
compiler see; only the products are opaque to them.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, S slots, M in, N out, D model,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import StackedExperts, ids_in_slots
from moe_runtime.kernels.expert_mlp.reference import apply_activation
from moe_runtime.kernels.expert_mlp.rows import (
    Group,
    SortedRows,
    already_sorted,
    groups_between,
    sort_rows,
)
from moe_runtime.kernels.operands import precise_dtype, without_autocast
from moe_runtime.kernels.operands.activation import ActivationSpec, PreactivationFunction
from moe_runtime.kernels.operands.second_derivative import refuse

RowFunction = Callable[[Tensor], Tensor]
FORWARD = "moe_runtime::expert_projection"
BACKWARD = "moe_runtime::expert_projection_backward"


def composed_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec | PreactivationFunction,
    post_expert: RowFunction | None,
) -> Tensor:
    """`expert_mlp` with functions of the caller between and after the products."""
    num_tokens, top_k = ids_TK.shape
    ids_TK = ids_in_slots(ids_TK, experts.slot_of_expert)
    rows = sort_rows(ids_TK, experts.num_experts)
    y_RD = _rows(x_TD, rows.order_R // top_k, rows, experts, activation)
    if post_expert is not None:
        y_RD = post_expert(y_RD)
    inverse_R = torch.argsort(rows.order_R)
    dispatched = (ids_TK >= 0) & (ids_TK < experts.num_experts)
    weights_TK = torch.where(dispatched, weights_TK, 0).to(precise_dtype(x_TD))
    y_TKD = y_RD[inverse_R].view(num_tokens, top_k, -1).to(precise_dtype(x_TD))
    return (weights_TK[..., None] * y_TKD).sum(1).to(x_TD.dtype)


def composed_grouped_expert_mlp(
    x_RD: Tensor,
    counts_E: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec | PreactivationFunction,
) -> Tensor:
    """`grouped_expert_mlp` with a function of the caller between the products."""
    return _rows(x_RD, None, already_sorted(counts_E), experts, activation)


def _rows(
    x_TD: Tensor,
    tokens_R: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec | PreactivationFunction,
) -> Tensor:
    """The experts' outputs in sorted order."""
    gate_up, down, gate_up_bias, down_bias = experts.tensors()
    project = torch.ops.moe_runtime.expert_projection
    offsets, how = rows.offsets_E1, (experts.slot_of_expert, experts.is_transposed)
    z_RZ = project(x_TD.to(gate_up.dtype), tokens_R, offsets, gate_up, gate_up_bias, *how)
    hidden_RF = apply_activation(z_RZ, experts.layout, activation)
    return project(hidden_RF.to(down.dtype), None, offsets, down, down_bias, *how)


def _forward(
    x: Tensor,
    tokens: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slot_of_expert: Tensor | None,
    is_transposed: bool,
) -> Tensor:
    """``weight[e] @ x[tokens[r]] + bias[e]`` for the rows of each expert, zero after the last."""
    weight_SMN = weight if is_transposed else weight.mT
    out = x.new_zeros(len(x) if tokens is None else len(tokens), weight_SMN.shape[2])
    with without_autocast(x.device.type):
        for group in groups_between(offsets, slot_of_expert):
            some, matrix = _some(x, tokens, group), weight_SMN[group.slot]
            if bias is None:
                torch.mm(some, matrix, out=out[group.rows])
            else:
                torch.addmm(bias[group.slot], some, matrix, out=out[group.rows])
    return out


def _some(x: Tensor, tokens: Tensor | None, group: Group) -> Tensor:
    """The input rows of one expert."""
    return x[group.rows] if tokens is None else x.index_select(0, tokens[group.rows])


def _backward(
    grad: Tensor,
    x: Tensor,
    tokens: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    slot_of_expert: Tensor | None,
    is_transposed: bool,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    needs_x, needs_weight, needs_bias = needs
    precise = x.dtype if tokens is None else precise_dtype(x)
    grad_x = x.new_zeros(x.shape if needs_x else 0, dtype=precise)
    grad_weight = weight.new_zeros(weight.shape if needs_weight else 0)
    dim_out = grad.shape[1]
    grad_bias = weight.new_zeros((len(weight), dim_out) if needs_bias else 0)
    weight_SNM = weight.mT if is_transposed else weight
    with without_autocast(x.device.type):
        for group in groups_between(offsets, slot_of_expert):
            some_grad = grad[group.rows]
            if needs_x and tokens is None:
                torch.mm(some_grad, weight_SNM[group.slot], out=grad_x[group.rows])
            elif needs_x and tokens is not None:
                addend = (some_grad @ weight_SNM[group.slot]).to(precise)
                grad_x.index_put_((tokens[group.rows],), addend, accumulate=True)
            if needs_weight:
                some = _some(x, tokens, group)
                left, right = (some, some_grad) if is_transposed else (some_grad, some)
                grad_weight[group.slot].addmm_(left.T, right)
            if needs_bias:
                grad_bias[group.slot] += some_grad.to(precise_dtype(x)).sum(0).to(x.dtype)
    return grad_x.to(x.dtype), grad_weight, grad_bias


def _forward_fake(
    x: Tensor, tokens: Tensor | None, offsets: Tensor, weight: Tensor, *rest: Any
) -> Tensor:
    is_transposed = rest[-1]
    num_rows = x.shape[0] if tokens is None else tokens.shape[0]
    return x.new_empty(num_rows, weight.shape[2 if is_transposed else 1])


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    tokens: Tensor | None,
    offsets: Tensor,
    weight: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    needs_x, needs_weight, needs_bias = rest[-1]
    return (
        x.new_empty(x.shape if needs_x else 0),
        weight.new_empty(weight.shape if needs_weight else 0),
        weight.new_empty((weight.shape[0], grad.shape[1]) if needs_bias else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tokens, offsets, weight, _, slot_of_expert, ctx.is_transposed = inputs
    ctx.save_for_backward(x, tokens, offsets, weight, slot_of_expert)


def _autograd_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
    found = torch.ops.moe_runtime.expert_projection_backward(
        grad, *ctx.saved_tensors, ctx.is_transposed, needs
    )
    grad_x, grad_weight, grad_bias = (
        tensor if need else None for tensor, need in zip(found, needs, strict=True)
    )
    return grad_x, None, None, grad_weight, grad_bias, None, None


torch.library.custom_op(
    FORWARD,
    _forward,
    mutates_args=(),
    schema=(
        "(Tensor x, Tensor? tokens, Tensor offsets, Tensor weight, Tensor? bias, "
        "Tensor? slot_of_expert, bool is_transposed) -> Tensor"
    ),
)
torch.library.register_fake(FORWARD, _forward_fake)
torch.library.register_autograd(FORWARD, _autograd_backward, setup_context=_setup_context)
torch.library.custom_op(
    BACKWARD,
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x, Tensor? tokens, Tensor offsets, Tensor weight, "
        "Tensor? slot_of_expert, bool is_transposed, bool[] needs) -> (Tensor, Tensor, Tensor)"
    ),
)
torch.library.register_fake(BACKWARD, _backward_fake)
torch.library.register_autograd(BACKWARD, refuse)
