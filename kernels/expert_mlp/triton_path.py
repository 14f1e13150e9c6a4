"""Triton kernels for the whole layer, forward and backward, without waiting for the device.

Kept for the backward pass: the input, the pre-activations and the routing. There is no gathered
copy of the input, no copy of the hidden values and none of the experts' outputs.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, S slots, D model, F hidden, Z = 2F with a
gate and F without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.activation import ActivationSpec
from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.rows import Gradients, Needs, SortedRows
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.decode import MAX_TOKENS, decode_expert_mlp
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.kernels.triton_support import require_triton

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.parameter_gradients import ParameterGradients

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """The output ``[T, D]`` when nothing is kept for a backward pass."""
    _check(x_TD)
    if len(x_TD) <= MAX_TOKENS:
        return decode_expert_mlp(
            x_TD,
            ids_TK,
            weights_TK,
            _logical(experts.gate_up, experts),
            _logical(experts.down, experts),
            activation,
            has_gate=experts.has_gate,
            is_concatenated=experts.is_concatenated,
            gate_up_bias_SZ=experts.gate_up_bias,
            down_bias_SD=experts.down_bias,
            slot_of_expert=experts.slot_of_expert,
        )
    order = token_sort(ids_TK, experts.num_experts, impl="triton")
    groups = _groups(SortedRows(order.order_R, order.offsets_E1), ids_TK.shape[1], x_TD, experts)
    y_RD, _ = _products(x_TD, groups, experts, activation, keeps=False)
    return _combine(y_RD, weights_TK, order.inverse_R, groups)


def forward(
    x_TD: Tensor,
    weights_TK: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """The output, and the pre-activations ``[R, Z]`` of the sorted rows if it `keeps` them."""
    _check(x_TD)
    num_choices = 0 if weights_TK is None else weights_TK.shape[1]
    groups = _groups(rows, num_choices, x_TD, experts)
    y_RD, z_RZ = _products(x_TD, groups, experts, activation, keeps=keeps)
    if weights_TK is None:
        return y_RD, z_RZ
    return _combine(y_RD, weights_TK, _inverse(rows.order_R), groups), z_RZ


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
) -> Gradients:
    """The gradients that are needed; with empty `z_RZ` it computes the pre-activations again."""
    _check(x_TD)
    num_choices = 0 if weights_TK is None else weights_TK.shape[1]
    groups = _groups(rows, num_choices, x_TD, experts)
    gate_up_SZD, down_SDF = _logical(experts.gate_up, experts), _logical(experts.down, experts)
    if grad_TD.stride(1) != 1:
        grad_TD = grad_TD.contiguous()
    if not z_RZ.numel():
        z_RZ = plain_product(
            x_TD,
            gate_up_SZD,
            groups,
            out=x_TD.new_empty(groups.num_rows, experts.dim_preactivation),
            bias_SN=experts.gate_up_bias,
            gathers=num_choices > 0,
        )
    scale_R = None if weights_TK is None else weights_TK.reshape(-1).contiguous()
    found = activation_backward(
        grad_TD,
        down_SDF,
        z_RZ,
        scale_R,
        groups,
        activation,
        has_gate=experts.has_gate,
        is_concatenated=experts.is_concatenated,
        down_bias_SD=experts.down_bias,
        needs_hidden=needs.down,
        needs_dscale=needs.weights and weights_TK is not None,
    )
    # An empty tensor each: results of an operator may not share memory.
    dx, dgate_up, ddown, dgate_up_bias, ddown_bias = (x_TD.new_empty(0) for _ in range(5))
    dweights = x_TD.new_empty(0)
    if needs.x:
        dx = _input_grad(found.dpre, gate_up_SZD, rows, groups, x_TD)
    if found.dscale is not None and weights_TK is not None:
        dweights = found.dscale.view(weights_TK.shape).to(weights_TK.dtype)
    into, slots = (None,) * 4, experts.slot_of_expert
    adds = parameter_gradients is not None and parameter_gradients.into is not None
    if parameter_gradients is not None:
        into = parameter_gradients.into or into
        slots = parameter_gradients.trained_slots(experts)
    own = Groups(groups.offsets_E1, groups.num_rows, slots, groups.order_R, groups.num_choices)

    def start(given: Tensor | None, parameter: Tensor) -> Tensor:
        """Memory to write to or add to: the kernels write every expert's that has a slot."""
        if given is not None:
            return given
        make = torch.empty_like if slots is None else torch.zeros_like
        return make(parameter, memory_format=torch.contiguous_format)

    if needs.gate_up:
        dgate_up = start(into[0], experts.gate_up)
        out = _logical(dgate_up, experts)
        weight_grad(found.dpre, x_TD, own, out_SNK=out, right_divisor=num_choices, accumulates=adds)
    if needs.down and found.hidden is not None:
        ddown = start(into[1], experts.down)
        out = _logical(ddown, experts)
        weight_grad(
            grad_TD, found.hidden, own, out_SNK=out, left_divisor=num_choices, accumulates=adds
        )
    if needs.gate_up_bias and experts.gate_up_bias is not None:
        dgate_up_bias = start(into[2], experts.gate_up_bias)
        bias_grad(found.dpre, own, out_SN=dgate_up_bias, accumulates=adds)
    if needs.down_bias and experts.down_bias is not None:
        ddown_bias = start(into[3], experts.down_bias)
        bias_grad(
            grad_TD,
            own,
            out_SN=ddown_bias,
            divisor=num_choices,
            scale_R=scale_R,
            accumulates=adds,
        )
    return Gradients(dx, dweights, dgate_up, ddown, dgate_up_bias, ddown_bias)


def _products(
    x_TD: Tensor,
    groups: Groups,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """The experts' outputs in sorted order, and the pre-activations if they are kept."""
    num_rows = groups.num_rows
    z_RZ = x_TD.new_empty(num_rows if keeps else 0, experts.dim_preactivation)
    hidden_RF = activated_product(
        x_TD,
        _logical(experts.gate_up, experts),
        groups,
        activation,
        out=x_TD.new_empty(num_rows, experts.dim_hidden),
        pre=z_RZ if keeps else None,
        has_gate=experts.has_gate,
        is_concatenated=experts.is_concatenated,
        bias_SZ=experts.gate_up_bias,
        gathers=groups.order_R is not None,
    )
    y_RD = plain_product(
        hidden_RF,
        _logical(experts.down, experts),
        groups,
        out=_rows_like(x_TD, groups),
        bias_SN=experts.down_bias,
    )
    return y_RD, z_RZ


def _combine(y_RD: Tensor, weights_TK: Tensor, inverse_R: Tensor, groups: Groups) -> Tensor:
    num_rows = groups.offsets_E1[-1:]
    return launch_combine_fwd(y_RD, weights_TK, inverse_R, num_rows, groups.num_choices)


def _input_grad(
    dpre_RZ: Tensor, gate_up_SZD: Tensor, rows: SortedRows, groups: Groups, x_TD: Tensor
) -> Tensor:
    dx_RD = plain_product(
        dpre_RZ, gate_up_SZD.transpose(1, 2), groups, out=_rows_like(x_TD, groups)
    )
    if groups.order_R is None:
        return dx_RD
    num_rows = groups.offsets_E1[-1:]
    return launch_combine_fwd(dx_RD, None, _inverse(rows.order_R), num_rows, groups.num_choices)


def _groups(rows: SortedRows, num_choices: int, x_TD: Tensor, experts: StackedExperts) -> Groups:
    """The rows as the launchers take them; `num_choices` is 0 for rows that lie sorted in `x`."""
    if not num_choices:
        return Groups(rows.offsets_E1, len(x_TD), experts.slot_of_expert)
    num_rows = len(x_TD) * num_choices
    return Groups(rows.offsets_E1, num_rows, experts.slot_of_expert, rows.order_R, num_choices)


def _rows_like(x_TD: Tensor, groups: Groups) -> Tensor:
    """Memory for one model-wide row a routed row.

    Rows that no kernel writes are zero where somebody reads them: `combine` skips those without an
    expert, but a result in sorted order is handed out whole, and slot tables may leave experts out.
    """
    shape = (groups.num_rows, x_TD.shape[1])
    if groups.order_R is None or groups.slot_of_expert is not None:
        return x_TD.new_zeros(shape)
    return x_TD.new_empty(shape)


def _logical(stack: Tensor, experts: StackedExperts) -> Tensor:
    """Matrices with the summed dimension last, as a view."""
    return stack.transpose(1, 2) if experts.is_transposed else stack


def _inverse(order_R: Tensor) -> Tensor:
    rows_R = torch.arange(len(order_R), device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, rows_R)


def _check(x_TD: Tensor) -> None:
    require_triton(x_TD.device)
    if x_TD.dtype not in _DTYPES:
        raise ValueError(f"impl='triton' takes fp32, bf16 or fp16, got {x_TD.dtype}")
