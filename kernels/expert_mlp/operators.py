"""`expert_mlp` and the products of experts as operators that torch and its compiler know.

Operators take tensors, numbers and strings only, so experts and activation are passed in pieces.
The compiler sees one opaque call; the device decides what runs inside.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, S slots, M in, N out, D model,
Z = 2F with a gate and F without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_runtime.kernels.expert_mlp.experts import StackedExperts, ids_in_slots
from moe_runtime.kernels.expert_mlp.native_path import NativePath
from moe_runtime.kernels.expert_mlp.reference import apply_activation
from moe_runtime.kernels.expert_mlp.rows import (
    EVERY_GRADIENT,
    Group,
    ParameterGradients,
    RoutedBatch,
    SortedRows,
    already_sorted,
    groups_between,
    sort_rows,
)
from moe_runtime.kernels.expert_mlp.torch_path import TorchPath
from moe_runtime.kernels.native import DTYPE_CODES, native_library, require_native
from moe_runtime.kernels.operands import (
    ActivationSpec,
    PreactivationFunction,
    precise_dtype,
    without_autocast,
)
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only, refuse

if TYPE_CHECKING:
    from moe_runtime.kernels.expert_mlp.triton_path import TritonPath


def path_of(impl: str, x: Tensor) -> TorchPath | TritonPath:
    """The implementation of a name; arguments and errors as in `resolve_path`."""
    name = resolve_path(impl, x)
    if name == "triton":
        from moe_runtime.kernels.expert_mlp.triton_path import TritonPath

        return TritonPath()
    return NativePath() if name == "native" else TorchPath()


def resolve_path(impl: str, x: Tensor) -> str:
    """The name of the implementation: `auto` is `triton` on a GPU, `native` on a CPU if it can take
    `x`, else `torch`.

    Raises:
        NativeUnavailableError: `impl="native"` and the library was not built.
        ValueError: `impl="native"` cannot take `x`.
    """
    is_native = x.is_cpu and x.dtype in DTYPE_CODES
    if impl == "native":
        require_native()
        if not is_native:
            raise ValueError(
                f"impl='native' needs fp32, bf16 or fp16 on the CPU, got {x.dtype} on {x.device}"
            )
    if impl != "auto":
        return impl
    if x.is_cuda:
        return "triton"
    return "native" if is_native and native_library() is not None else "torch"


# The pieces: fields of `StackedExperts`, arguments of `ActivationSpec.from_numbers`, and `impl`.
_EXPERTS = (
    "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, Tensor? slot_of_expert, "
    "bool has_gate, bool is_transposed, bool is_concatenated"
)
_NAMES = tuple(piece.split()[-1] for piece in _EXPERTS.split(", "))
_STATIC = "str function, float[] numbers, str impl"
FORWARD = "moe_runtime::expert_mlp"
BACKWARD = "moe_runtime::expert_mlp_backward"


def _experts(*pieces: Any) -> tuple[StackedExperts, ActivationSpec]:
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
    """Runs the operator on tokens (`ids_TK` and `weights_TK`) or sorted rows (`counts_E`).

    If no mode, transform or compiler observes operators, the implementation is called directly,
    which keeps decode steps short.
    """
    keeps = wants_gradient((x, weights_TK, *experts.tensors()))
    if _is_unobserved(x, experts.down):
        known = None if counts_E is None else already_sorted(counts_E)
        batch = RoutedBatch(x, ids_TK, weights_TK, experts, activation, known)
        if keeps:
            return call_with_gradients(batch, EVERY_GRADIENT, impl=impl, recompute=recompute)
        return _infer(batch, impl)
    out, *_ = torch.ops.moe_runtime.expert_mlp(
        x, ids_TK, weights_TK, counts_E, *(getattr(experts, name) for name in _NAMES),
        activation.function, activation.numbers(), impl, keeps, recompute,
    )  # fmt: skip
    return out


def _is_unobserved(*tensors: Tensor) -> bool:
    """Whether no compiler, dispatch mode, tensor subclass or transform takes part in this call."""
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
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    needs_x, _, needs_weights, _, *needs_parameters = ctx.needs_input_grad[:8]
    needs = [needs_x, needs_weights, *needs_parameters]
    found = torch.ops.moe_runtime.expert_mlp_backward(grad, *ctx.saved_tensors, *ctx.static, needs)
    dx, dweights, *parameters = _chosen(found, needs)
    num_rest = len(ctx.needs_input_grad) - 8
    return (dx, None, dweights, None, *parameters, *(None,) * num_rest)


def _chosen(gradients: Iterable[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    return [grad if need else None for grad, need in zip(gradients, needs, strict=True)]


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
        return path_of(impl, x).backward(grad, batch, z, needs)


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


def _register(
    name: str,
    schema: str,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> None:
    torch.library.custom_op(name, forward, mutates_args=(), schema=schema)
    torch.library.register_fake(name, fake)
    torch.library.register_autograd(name, backward, setup_context=setup_context)


_register(
    FORWARD,
    f"(Tensor x, Tensor? ids, Tensor? weights, Tensor? counts, {_EXPERTS}, {_STATIC}, "
    "bool keeps, bool recompute) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward, _forward_fake, _autograd_backward, _setup_context,
)  # fmt: skip
_register(
    BACKWARD,
    "(Tensor grad, Tensor x, Tensor? weights, Tensor z, Tensor order, Tensor offsets, "
    f"{_EXPERTS}, {_STATIC}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward, _backward_fake, refuse,
)  # fmt: skip


def call_with_gradients(
    batch: RoutedBatch, gradients: ParameterGradients, *, impl: str, recompute: bool
) -> Tensor:
    """`expert_mlp` outside the compiler, with experts in any form."""
    tensors = (batch.x_TD, batch.weights_TK, *batch.experts.tensors())
    keeps = wants_gradient(tensors) and not recompute
    return cast(Tensor, _ExpertMlp.apply(*tensors, batch, gradients, impl, keeps))


def wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, *rest: Any) -> Tensor:
        *parameters, batch, ctx.gradients, ctx.impl, keeps = rest
        experts, rows, ctx.activation = batch.experts, batch.rows, batch.activation
        with without_autocast(x_TD.device.type):
            out_TD, kept = path_of(ctx.impl, x_TD).forward(batch, keeps=keeps)
        if keeps and not any(ctx.needs_input_grad[2 : 2 + experts.num_inputs]):
            x_TD = x_TD.new_empty(1).expand_as(x_TD)  # frozen experts need its shape alone
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
        needs = ctx.needs_input_grad[:-4]
        with without_autocast(x_TD.device.type):
            found = path_of(ctx.impl, x_TD).backward(grads[0], batch, kept, needs, ctx.gradients)
        given = _chosen(found, needs)
        if ctx.gradients.into is not None:
            given[2:] = [None] * len(parameters)
        return *given, *[None] * 4


RowFunction = Callable[[Tensor], Tensor]
PROJECTION = "moe_runtime::expert_projection"
PROJECTION_BACKWARD = "moe_runtime::expert_projection_backward"


def composed_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: StackedExperts,
    activation: ActivationSpec | PreactivationFunction,
    post_expert: RowFunction | None,
) -> Tensor:
    """`expert_mlp` with functions of the caller between and after the products.

    These are ordinary torch code for autograd and the compiler; only the products are opaque.
    """
    num_tokens, top_k = ids_TK.shape
    ids_TK = ids_in_slots(ids_TK, experts.slot_of_expert)
    rows = sort_rows(ids_TK, experts.num_experts)
    y_RD = composed_rows(x_TD, rows.order_R // top_k, rows, experts, activation)
    if post_expert is not None:
        y_RD = post_expert(y_RD)
    inverse_R = torch.argsort(rows.order_R)
    dispatched = (ids_TK >= 0) & (ids_TK < experts.num_experts)
    weights_TK = torch.where(dispatched, weights_TK, 0).to(precise_dtype(x_TD))
    y_TKD = y_RD[inverse_R].view(num_tokens, top_k, -1).to(precise_dtype(x_TD))
    return (weights_TK[..., None] * y_TKD).sum(1).to(x_TD.dtype)


def composed_rows(
    x_TD: Tensor,
    tokens_R: Tensor | None,
    rows: SortedRows,
    experts: StackedExperts,
    activation: ActivationSpec | PreactivationFunction,
) -> Tensor:
    """The experts' outputs in sorted order; rows of `x` are read by token, or in their order."""
    gate_up, down, gate_up_bias, down_bias = experts.tensors()
    project = torch.ops.moe_runtime.expert_projection
    offsets, how = rows.offsets_E1, (experts.slot_of_expert, experts.is_transposed)
    z_RZ = project(x_TD.to(gate_up.dtype), tokens_R, offsets, gate_up, gate_up_bias, *how)
    hidden_RF = apply_activation(z_RZ, experts.layout, activation)
    return project(hidden_RF.to(down.dtype), None, offsets, down, down_bias, *how)


def _project(
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


def _project_backward(
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


def _project_fake(
    x: Tensor, tokens: Tensor | None, offsets: Tensor, weight: Tensor, *rest: Any
) -> Tensor:
    is_transposed = rest[-1]
    num_rows = x.shape[0] if tokens is None else tokens.shape[0]
    return x.new_empty(num_rows, weight.shape[2 if is_transposed else 1])


def _project_backward_fake(
    grad: Tensor, x: Tensor, tokens: Tensor | None, offsets: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needs_x, needs_weight, needs_bias = rest[-1]
    return (
        x.new_empty(x.shape if needs_x else 0),
        weight.new_empty(weight.shape if needs_weight else 0),
        weight.new_empty((weight.shape[0], grad.shape[1]) if needs_bias else 0),
    )


def _project_setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, tokens, offsets, weight, _, slot_of_expert, ctx.is_transposed = inputs
    ctx.save_for_backward(x, tokens, offsets, weight, slot_of_expert)


def _project_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    needs = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
    found = torch.ops.moe_runtime.expert_projection_backward(
        grad, *ctx.saved_tensors, ctx.is_transposed, needs
    )
    grad_x, grad_weight, grad_bias = _chosen(found, needs)
    return grad_x, None, None, grad_weight, grad_bias, None, None


_register(
    PROJECTION,
    "(Tensor x, Tensor? tokens, Tensor offsets, Tensor weight, Tensor? bias, "
    "Tensor? slot_of_expert, bool is_transposed) -> Tensor",
    _project, _project_fake, _project_autograd, _project_setup_context,
)  # fmt: skip
_register(
    PROJECTION_BACKWARD,
    "(Tensor grad, Tensor x, Tensor? tokens, Tensor offsets, Tensor weight, "
    "Tensor? slot_of_expert, bool is_transposed, bool[] needs) -> (Tensor, Tensor, Tensor)",
    _project_backward, _project_backward_fake, refuse,
)  # fmt: skip

# Floating-point operations for torch's counter: every choice counts, dispatched or not, and only
# products count, as in torch's own formulas. (Importing torch's registry would import Triton.)
Shape = Sequence[int]


def _expert_mlp(
    x: Shape, ids: Shape | None, _weights: Any, _counts: Any, gate_up: Shape, down: Shape,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    num_rows = x[0] if ids is None else math.prod(ids)
    return 2 * num_rows * (math.prod(gate_up[1:]) + math.prod(down[1:]))


def _expert_mlp_backward(
    _grad: Any, x: Shape, weights: Shape | None, z: Shape, _order: Any, _offsets: Any,
    gate_up: Shape, down: Shape, *rest: Any, **_: Any,
) -> int:  # fmt: skip
    needs_x, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, _ = rest[-1]
    num_rows = x[0] if weights is None else math.prod(weights)
    is_recomputed = z[0] == 0
    through_down = needs_x or needs_weights or needs_gate_up or needs_gate_up_bias
    products_up = needs_x + needs_gate_up + is_recomputed
    products_down = through_down + needs_down
    return 2 * num_rows * (
        products_up * math.prod(gate_up[1:]) + products_down * math.prod(down[1:])
    )  # fmt: skip


def _expert_projection(
    x: Shape, tokens: Shape | None, _offsets: Any, weight: Shape, *_: Any, **__: Any
) -> int:
    return 2 * (x if tokens is None else tokens)[0] * math.prod(weight[1:])


def _expert_projection_backward(grad: Shape, *rest: Any, **_: Any) -> int:
    weight, (needs_x, needs_weight, _) = rest[3], rest[-1]
    return 2 * grad[0] * math.prod(weight[1:]) * (needs_x + needs_weight)


FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = {
    getattr(torch.ops.moe_runtime, name.partition("::")[2]): formula
    for name, formula in (
        (FORWARD, _expert_mlp),
        (BACKWARD, _expert_mlp_backward),
        (PROJECTION, _expert_projection),
        (PROJECTION_BACKWARD, _expert_projection_backward),
    )
}
"""For ``FlopCounterMode(custom_mapping=FLOP_FORMULAS)`` of ``torch.utils.flop_counter``."""
