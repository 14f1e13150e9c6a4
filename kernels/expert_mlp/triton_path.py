"""Triton kernels for the whole layer, forward and backward, without waiting for the device.

The backward pass keeps the input, pre-activations and routing; no gathered input, hidden values or
experts' outputs.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, S slots, D model, F hidden, Z = 2F with a
gate and F without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.combine.kernel import launch_combine_fwd
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS, decode_expert_mlp
from moe_runtime.kernels.expert_mlp.experts import (
    PackedExperts,
    RoutedExperts,
    StackedExperts,
    ids_in_slots,
)
from moe_runtime.kernels.expert_mlp.quantized import QuantizedExperts
from moe_runtime.kernels.expert_mlp.rows import EVERY_GRADIENT, ParameterGradients, RoutedBatch
from moe_runtime.kernels.expert_mlp.slotted import SlottedProducts
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.packed import takes_format
from moe_runtime.kernels.operands import ActivationSpec
from moe_runtime.kernels.triton_support import check_triton_dtype, require_triton


def infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts | QuantizedExperts,
    activation: ActivationSpec,
) -> Tensor:
    """The output ``[T, D]`` in the dtype of `x`, of experts without a `quantized_problem`."""
    if len(x_TD) <= MAX_TOKENS:
        return decode_expert_mlp(x_TD, ids_TK, weights_TK, experts, activation)
    # experts that take no part have no rows
    ids_TK = ids_in_slots(ids_TK, experts.slot_of_expert)
    products = SlottedProducts(x_TD, ids_TK, weights_TK, experts.num_experts, activation)
    products.add(experts)
    return products.sums()


class TritonPath:
    """The implementation `triton`; methods are as in `TorchPath`."""

    def infer(self, batch: RoutedBatch) -> Tensor:
        x_TD, ids_TK, weights_TK, experts = (
            batch.x_TD, batch.ids_TK, batch.weights_TK, batch.experts,
        )  # fmt: skip
        assert ids_TK is not None, "tokens have choices"
        assert weights_TK is not None, "tokens have gate weights"
        if isinstance(experts, PackedExperts):
            return self.forward(batch, keeps=False)[0]
        _check(x_TD)
        return infer(x_TD, ids_TK, weights_TK, experts, batch.activation)

    def forward(self, batch: RoutedBatch, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """Experts of several widths keep ``[2, V]``, or ``[1, V]`` of up."""
        _check(batch.x_TD)
        groups = _groups(batch)
        y_RD, kept = _products(batch, groups, keeps=keeps)
        if batch.weights_TK is None:
            return y_RD, kept
        inverse_R, num_rows = _inverse(batch.rows.order_R), groups.offsets_E1[-1:]
        out = launch_combine_fwd(y_RD, batch.weights_TK, inverse_R, num_rows, groups.num_choices)
        return out, kept

    def backward(
        self,
        grad_TD: Tensor,
        batch: RoutedBatch,
        kept: Tensor,
        needs: Sequence[bool],
        parameter_gradients: ParameterGradients = EVERY_GRADIENT,
    ) -> tuple[Tensor, ...]:
        x_TD, weights_TK, experts = batch.x_TD, batch.weights_TK, batch.experts
        _check(x_TD)
        num_choices, groups = batch.num_choices, _groups(batch)
        inputs = [_stack(matrix, experts) for matrix in experts.tensors()[: experts.num_inputs]]
        num_inputs = len(inputs)
        needs_x, needs_weights, *needs_parameters = needs
        if grad_TD.stride(1) != 1:
            grad_TD = grad_TD.contiguous()
        if not kept.numel():
            kept = _preactivations(batch, groups)
        scale_R = None if weights_TK is None else weights_TK.reshape(-1).contiguous()
        found = activation_backward(
            grad_TD,
            _down(experts),
            kept,
            scale_R,
            groups,
            batch.activation,
            experts.layout,
            down_bias_SD=experts.down_bias,
            needs_hidden=needs_parameters[num_inputs],
            needs_gate_weight_grad=needs_weights and weights_TK is not None,
        )
        # separate empty tensors: results of an operator may not share memory
        dx, dweights, *gradients = (x_TD.new_empty(0) for _ in range(2 + len(needs_parameters)))
        is_packed = isinstance(experts, PackedExperts)
        halves = found.dpre.split(1) if is_packed else (found.dpre,)
        if needs_x:
            # up first; the gate's part is added to it
            parts = [_input_grad(*pair, batch, groups) for pair in zip(halves, inputs, strict=True)]
            dx = parts.pop()
            for part in parts:
                dx += part
        if found.gate_weight_grad is not None and weights_TK is not None:
            dweights = found.gate_weight_grad.view(weights_TK.shape).to(weights_TK.dtype)
        into, slots = parameter_gradients.into, parameter_gradients.trained_slots(experts)
        own = groups if slots is experts.slot_of_expert else _groups(batch, slots)
        adds: dict[str, Any] = {"accumulates": into is not None}

        def start(place: int) -> Tensor:
            """Memory to write or add to; the kernels write that of every expert with a slot."""
            given = None if into is None else into[place]
            if given is None:
                make = torch.empty_like if slots is None else torch.zeros_like
                parameter = experts.tensors()[place]
                given = make(parameter, memory_format=torch.contiguous_format)
            gradients[place] = given
            return _stack(given, experts)

        for i, half in enumerate(halves):
            if needs_parameters[i]:
                weight_grad(half, x_TD, own, out_SNK=start(i), right_divisor=num_choices, **adds)
            if needs_parameters[num_inputs + 1 + i]:
                bias_grad(half, own, out_SN=start(num_inputs + 1 + i), **adds)
        if found.hidden is not None:
            out_SNK = start(num_inputs)
            if is_packed:
                weight_grad(
                    found.hidden, grad_TD, own, out_SNK=out_SNK, right_divisor=num_choices, **adds
                )
            else:
                weight_grad(
                    grad_TD, found.hidden, own, out_SNK=out_SNK, left_divisor=num_choices, **adds
                )
        if needs_parameters[-1]:
            bias_grad(grad_TD, own, out_SN=start(-1), divisor=num_choices, scale_R=scale_R, **adds)
        return dx, dweights, *gradients


def _products(batch: RoutedBatch, groups: Groups, *, keeps: bool) -> tuple[Tensor, Tensor]:
    """The experts' outputs in sorted order, and the pre-activations if they are kept."""
    x_TD, experts = batch.x_TD, batch.experts
    pre = _memory(batch, groups) if keeps else None
    hidden = _activated(batch, groups, pre)
    out_RD, down, bias = _rows_like(x_TD, groups), _down(experts), experts.down_bias
    y_RD = plain_product(hidden, down, groups, out=out_RD, bias_SN=bias)
    return y_RD, x_TD.new_empty(0) if pre is None else pre


def _activated(batch: RoutedBatch, groups: Groups, pre: Tensor | None) -> Tensor:
    """Hidden values of all rows; `pre` receives their pre-activations."""
    x_TD, experts, up = batch.x_TD, batch.experts, None
    if isinstance(experts, StackedExperts):
        matrix, bias = _stack(experts.gate_up, experts), experts.gate_up_bias
        out = x_TD.new_empty(groups.num_rows, experts.dim_hidden)
    else:
        matrix, bias = experts.up, experts.up_bias
        if experts.gate is not None:
            up, matrix, bias = (matrix, bias), experts.gate, experts.gate_bias
        matrix, bias = _stack(matrix, experts), None if bias is None else _stack(bias, experts)
        out = _memory(batch, groups)[:1] if pre is None else torch.empty_like(pre[:1])
    return activated_product(
        x_TD,
        matrix,
        groups,
        batch.activation,
        experts.layout,
        out=out,
        pre=pre,
        bias_SZ=bias,
        up=up,
        gathers=groups.order_R is not None,
    )


def _preactivations(batch: RoutedBatch, groups: Groups) -> Tensor:
    pre, experts = _memory(batch, groups), batch.experts
    if isinstance(experts, PackedExperts):
        _activated(batch, groups, pre)
        return pre
    return plain_product(
        batch.x_TD,
        _stack(experts.gate_up, experts),
        groups,
        out=pre,
        bias_SN=experts.gate_up_bias,
        gathers=groups.order_R is not None,
    )


def _memory(batch: RoutedBatch, groups: Groups) -> Tensor:
    """Memory for the pre-activations of all rows."""
    x_TD, experts = batch.x_TD, batch.experts
    if isinstance(experts, StackedExperts):
        return x_TD.new_empty(groups.num_rows, experts.dim_preactivation)
    waits = experts.waits
    size = int(groups.values_E1[-1]) if waits else experts.columns.most_values(groups.num_rows)
    return x_TD.new_empty(experts.num_inputs, size)


def _input_grad(dpre: Tensor, weight_SZD: Tensor, batch: RoutedBatch, groups: Groups) -> Tensor:
    dx_RD = plain_product(
        dpre, weight_SZD.transpose(1, 2), groups, out=_rows_like(batch.x_TD, groups)
    )
    if groups.order_R is None:
        return dx_RD
    num_rows = groups.offsets_E1[-1:]
    return launch_combine_fwd(
        dx_RD, None, _inverse(batch.rows.order_R), num_rows, groups.num_choices
    )


def _groups(batch: RoutedBatch, slots: Tensor | None = None) -> Groups:
    experts, rows = batch.experts, batch.rows
    columns = experts.columns if isinstance(experts, PackedExperts) else None
    slots = experts.slot_of_expert if slots is None else slots
    if batch.weights_TK is None:
        return Groups(rows.offsets_E1, batch.num_rows, slots, columns=columns)
    return Groups(rows.offsets_E1, batch.num_rows, slots, rows.order_R, batch.num_choices, columns)


def _rows_like(x_TD: Tensor, groups: Groups) -> Tensor:
    """Memory for one row of model width per routed row.

    Zeros in sorted order, as rows without an expert are returned too; `combine` skips those.
    """
    shape = (groups.num_rows, x_TD.shape[1])
    if groups.order_R is None:
        return x_TD.new_zeros(shape)
    return x_TD.new_empty(shape)


def _stack(tensor: Tensor, experts: RoutedExperts) -> Tensor:
    """A parameter as a view for the launchers, ``[S, N, K]`` or ``[S, N]``.

    Experts that differ in width each get the columns of all.
    """
    if isinstance(experts, PackedExperts):
        return tensor.expand(experts.num_experts, *tensor.shape)
    return tensor.transpose(1, 2) if experts.is_transposed and tensor.ndim == 3 else tensor


def _down(experts: RoutedExperts) -> Tensor:
    """The second product's matrices, ``[S, D, F]`` or ``[E, D, N]``."""
    down = _stack(experts.down, experts)
    return down.transpose(1, 2) if isinstance(experts, PackedExperts) else down


def _inverse(order_R: Tensor) -> Tensor:
    rows_R = torch.arange(len(order_R), device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, rows_R)


def _check(x_TD: Tensor) -> None:
    require_triton(x_TD.device)
    check_triton_dtype(x_TD)


def quantized_problem(x_TD: Tensor, experts: QuantizedExperts) -> str | None:
    """Why the kernels cannot read these experts, or None.

    Raises:
        ValueError: The device or dtype is unsupported.
        TritonUnavailableError: Triton is not installed.
    """
    require_triton(x_TD.device)
    check_triton_dtype(x_TD)
    gate, up, down = experts.gate, experts.up, experts.down
    for stack in (up, down):
        if not takes_format(stack.format):
            kind = stack.format
            what = "lies in such blocks" if kind.block_codes else f"has groups of {kind.group_cols}"
            return f"{kind} {what}"
    if gate is None:
        return None
    if gate.format != up.format:
        return f"gate and up have two formats, {gate.format} and {up.format}"
    for one, other in zip(_parts(gate), _parts(up), strict=True):
        if one is not None and other is not None and one.stride() != other.stride():
            return "gate and up lie at different strides"
    return None


def _parts(stack: Any) -> tuple[Tensor | None, ...]:
    return stack.codes, stack.scales, stack.zero_points, stack.global_scale
