"""`expert_mlp` as operators that torch knows: shapes for the compiler, and the backward pass.

An operator takes tensors, numbers and strings only, so the experts and the activation travel in
pieces. The compiler sees one opaque call; what runs inside is chosen by the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.paths import path_of
from moe_runtime.kernels.expert_mlp.rows import (
    Needs,
    RoutedBatch,
    SortedRows,
    already_sorted,
    sort_rows,
)
from moe_runtime.kernels.operands.activation import ActivationSpec

# Layout flags, formula and implementation, as `static_arguments` gives them.
_STATIC = (
    "bool has_gate, bool is_transposed, bool is_concatenated, str function, float[] numbers, "
    "str impl"
)
_PARAMETERS = (
    "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, Tensor? slot_of_expert"
)
_FORWARD = "moe_runtime::expert_mlp"
_BACKWARD = "moe_runtime::expert_mlp_backward"


def static_arguments(
    experts: StackedExperts, activation: ActivationSpec, impl: str
) -> tuple[Any, ...]:
    """What an operator is told beside tensors."""
    layout = (experts.has_gate, experts.is_transposed, experts.is_concatenated)
    return *layout, activation.function, activation.numbers(), impl


def _experts(
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    slot_of_expert: Tensor | None,
    has_gate: bool,
    is_transposed: bool,
    is_concatenated: bool,
    function: str,
    numbers: list[float],
) -> tuple[StackedExperts, ActivationSpec]:
    """The experts and the formula of an operator's arguments."""
    experts = StackedExperts(
        gate_up=gate_up,
        down=down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        has_gate=has_gate,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        slot_of_expert=slot_of_expert,
    )
    return experts, ActivationSpec.from_numbers(function, numbers)


def call(
    x: Tensor,
    ids_TK: Tensor | None,
    weights_TK: Tensor | None,
    counts_E: Tensor | None,
    experts: StackedExperts,
    activation: ActivationSpec,
    *,
    impl: str,
    recompute: bool,
) -> Tensor:
    """Runs the operator: tokens with `ids_TK` and `weights_TK`, or sorted rows with `counts_E`."""
    wanted = [x, weights_TK, *experts.tensors()]
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in wanted)
    out, *_ = torch.ops.moe_runtime.expert_mlp(
        x,
        ids_TK,
        weights_TK,
        counts_E,
        *experts.tensors(),
        experts.slot_of_expert,
        *static_arguments(experts, activation, impl),
        keeps,
        recompute,
    )
    return out


def _forward(
    x: Tensor, ids: Tensor | None, weights: Tensor | None, counts: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *pieces, impl, keeps, recompute = rest
    experts, activation = _experts(*pieces)
    path = path_of(impl, x)
    with torch.autocast(x.device.type, enabled=False):
        if not keeps and ids is not None and weights is not None:
            out = path.infer(x, ids, weights, experts, activation)
            return out, x.new_empty(0), *_no_rows(x)
        if ids is not None:
            rows = sort_rows(ids, experts.num_experts)
        else:
            assert counts is not None
            rows = already_sorted(counts)
        batch = RoutedBatch(x, weights, rows, experts, activation)
        out, z = path.forward(batch, keeps=keeps and not recompute)
    if not keeps:
        return out, x.new_empty(0), *_no_rows(x)
    return out, z, rows.order_R, rows.offsets_E1


def _no_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.int64)


def _forward_fake(
    x: Tensor, ids: Tensor | None, weights: Tensor | None, counts: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    keeps, recompute = rest[-2:]
    if not keeps:
        return out, x.new_empty(0), *_no_rows(x)
    experts, _ = _experts(*rest[:-3])
    num_rows = x.shape[0] if ids is None else ids.numel()
    z = x.new_empty((0 if recompute else num_rows, experts.dim_preactivation))
    order = x.new_empty(0 if ids is None else num_rows, dtype=torch.int64)
    return out, z, order, x.new_empty(experts.num_experts + 1, dtype=torch.int64)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, weights, _, *rest = inputs
    _, z, order, offsets = output
    ctx.mark_non_differentiable(z, order, offsets)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weights, z, order, offsets, *rest[:5])
    ctx.static = rest[5:11]


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, weights, *rest = ctx.saved_tensors
    needs_x, _, needs_weights, _, *needs_parameters = ctx.needs_input_grad[:8]
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = [needs_x, needs_weights, *needs_parameters]
    gradients = torch.ops.moe_runtime.expert_mlp_backward(
        grad, x, weights, *rest, *ctx.static, needs
    )
    found = [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
    num_rest = len(ctx.needs_input_grad) - 8
    return (found[0], None, found[1], None, *found[2:], *(None,) * num_rest)


def _backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor | None,
    z: Tensor,
    order: Tensor,
    offsets: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    *pieces, impl, needs = rest
    batch = RoutedBatch(x, weights, SortedRows(order, offsets), *_experts(*pieces))
    with torch.autocast(x.device.type, enabled=False):
        return path_of(impl, x).backward(grad, batch, z, needs=Needs.of(*needs)).flat()


def _backward_fake(
    grad: Tensor, x: Tensor, weights: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    candidates = (x, weights, *rest[3:7])
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if need and tensor is not None
        else x.new_empty(0)
        for tensor, need in zip(candidates, rest[-1], strict=True)
    )


torch.library.custom_op(
    _FORWARD,
    _forward,
    mutates_args=(),
    schema=(
        f"(Tensor x, Tensor? ids, Tensor? weights, Tensor? counts, {_PARAMETERS}, {_STATIC}, "
        "bool keeps, bool recompute) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
torch.library.register_fake(_FORWARD, _forward_fake)
torch.library.register_autograd(_FORWARD, _autograd_backward, setup_context=_setup_context)
torch.library.custom_op(
    _BACKWARD,
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x, Tensor? weights, Tensor z, Tensor order, Tensor offsets, "
        f"{_PARAMETERS}, {_STATIC}, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
torch.library.register_fake(_BACKWARD, _backward_fake)
