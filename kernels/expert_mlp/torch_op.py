"""`expert_mlp` as operators that torch knows: shapes for the compiler, and the backward pass.

An operator takes tensors, numbers and strings only, so the experts and the activation travel in
pieces. The compiler sees one opaque call; what runs inside is chosen by the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_runtime.kernels.expert_mlp.experts import StackedExperts
from moe_runtime.kernels.expert_mlp.implementations.paths import path_of
from moe_runtime.kernels.expert_mlp.parameter_gradients import EVERY_GRADIENT, ParameterGradients
from moe_runtime.kernels.expert_mlp.rows import (
    Needs,
    RoutedBatch,
    SortedRows,
    already_sorted,
)
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.activation import ActivationSpec
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only, refuse

# Experts and what lies between their products, in pieces: what `StackedExperts` and the inverse of
# `ActivationSpec.numbers` take, and the implementation.
_EXPERTS = (
    "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, Tensor? slot_of_expert, "
    "bool has_gate, bool is_transposed, bool is_concatenated"
)
_NAMES = tuple(piece.split()[-1] for piece in _EXPERTS.split(", "))
_STATIC = "str function, float[] numbers, str impl"
FORWARD = "moe_runtime::expert_mlp"
BACKWARD = "moe_runtime::expert_mlp_backward"


def static_arguments(
    experts: StackedExperts, activation: ActivationSpec, impl: str
) -> tuple[Any, ...]:
    """What an operator is told beside tensors."""
    layout = (experts.has_gate, experts.is_transposed, experts.is_concatenated)
    return *layout, activation.function, activation.numbers(), impl


def _experts(*pieces: Any) -> tuple[StackedExperts, ActivationSpec]:
    """The experts and the formula of an operator's arguments."""
    *experts, function, numbers = pieces
    named = dict(zip(_NAMES, experts, strict=True))
    return StackedExperts(**named), ActivationSpec.from_numbers(function, numbers)


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
    """Runs the operator: tokens with `ids_TK` and `weights_TK`, or sorted rows with `counts_E`.

    Where nobody else looks at operators, what it runs is called at once: a decode step is as short
    as what stands in between.
    """
    keeps = wants_gradient((x, weights_TK, *experts.tensors()))
    if _is_unobserved(x, experts.down):
        known = None if counts_E is None else already_sorted(counts_E)
        batch = RoutedBatch(x, ids_TK, weights_TK, experts, activation, known)
        if keeps:
            return call_with_gradients(batch, EVERY_GRADIENT, impl=impl, recompute=recompute)
        return _infer(batch, impl)
    static = static_arguments(experts, activation, impl)
    out, *_ = torch.ops.moe_runtime.expert_mlp(
        x, ids_TK, weights_TK, counts_E, *experts.tensors(), experts.slot_of_expert, *static,
        keeps, recompute,
    )  # fmt: skip
    return out


def _is_unobserved(*tensors: Tensor) -> bool:
    """Whether no compiler, mode, subclass of tensors or transform takes part in this call."""
    return (
        not torch.compiler.is_compiling()
        and _get_current_dispatch_mode() is None
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in tensors)
    )


def _infer(batch: RoutedBatch, impl: str) -> Tensor:
    path = path_of(impl, batch.x_TD)
    with without_autocast(batch.x_TD.device.type):
        if batch.ids_TK is None:
            return path.forward(batch, keeps=False)[0]
        return path.infer(batch)


def _forward(
    x: Tensor, ids: Tensor | None, weights: Tensor | None, counts: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *pieces, impl, keeps, recompute = rest
    known = None if counts is None else already_sorted(counts)
    batch = RoutedBatch(x, ids, weights, *_experts(*pieces), known)
    if not keeps:
        return _infer(batch, impl), x.new_empty(0), *_no_rows(x)
    with without_autocast(x.device.type):
        out, z = path_of(impl, x).forward(batch, keeps=not recompute)
        return out, z, batch.rows.order_R, batch.rows.offsets_E1


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
    needs = Needs.of(needs_x, needs_weights, *needs_parameters)
    flat = [needs.x, needs.weights, *needs.parameters]
    gradients = torch.ops.moe_runtime.expert_mlp_backward(
        grad, x, weights, *rest, *ctx.static, flat
    )
    dx, dweights, *parameters = needs.chosen(gradients)
    num_rest = len(ctx.needs_input_grad) - 8
    return (dx, None, dweights, None, *parameters, *(None,) * num_rest)


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
    batch = RoutedBatch(x, None, weights, *_experts(*pieces), SortedRows(order, offsets))
    with without_autocast(x.device.type):
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
    FORWARD,
    _forward,
    mutates_args=(),
    schema=(
        f"(Tensor x, Tensor? ids, Tensor? weights, Tensor? counts, {_EXPERTS}, {_STATIC}, "
        "bool keeps, bool recompute) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
torch.library.register_fake(FORWARD, _forward_fake)
torch.library.register_autograd(FORWARD, _autograd_backward, setup_context=_setup_context)
torch.library.custom_op(
    BACKWARD,
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor grad, Tensor x, Tensor? weights, Tensor z, Tensor order, Tensor offsets, "
        f"{_EXPERTS}, {_STATIC}, bool[] needs) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
torch.library.register_fake(BACKWARD, _backward_fake)
torch.library.register_autograd(BACKWARD, refuse)


def call_with_gradients(
    batch: RoutedBatch, gradients: ParameterGradients, *, impl: str, recompute: bool
) -> Tensor:
    """`expert_mlp` outside the compiler: experts in any form, gradients as `gradients` says."""
    tensors = (batch.x_TD, batch.weights_TK, *batch.experts.tensors())
    keeps = wants_gradient(tensors) and not recompute
    return cast(Tensor, _ExpertMlp.apply(*tensors, batch, gradients, impl, keeps))


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd will step back to one of these."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, *rest: Any) -> Tensor:
        *parameters, batch, ctx.gradients, ctx.impl, keeps = rest
        experts, rows, ctx.activation = batch.experts, batch.rows, batch.activation
        with without_autocast(x_TD.device.type):
            out_TD, kept = path_of(ctx.impl, x_TD).forward(batch, keeps=keeps)
        ctx.save_for_backward(x_TD, weights_TK, kept, *rows, *parameters, experts.slot_of_expert)
        ctx.kind, ctx.names, ctx.static = type(experts), experts.names, experts.static()
        return out_TD

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, kept, order_R, offsets_E1, *parameters, slots = ctx.saved_tensors
        tensors = dict(zip(ctx.names, parameters, strict=True))
        if slots is not None:
            tensors["slot_of_expert"] = slots
        experts, rows = ctx.kind(**tensors, **ctx.static), SortedRows(order_R, offsets_E1)
        batch = RoutedBatch(x_TD, None, weights_TK, experts, ctx.activation, rows)
        needs = Needs.of(*ctx.needs_input_grad[:-4])
        with without_autocast(x_TD.device.type):
            found = path_of(ctx.impl, x_TD).backward(
                grads[0], batch, kept, needs=needs, parameter_gradients=ctx.gradients
            )
        given = needs.chosen(found.flat())
        if ctx.gradients.into is not None:
            given[2:] = [None] * len(parameters)
        return *given, *[None] * 4
