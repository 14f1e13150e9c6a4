"""`expert_mlp`: validation and choice of the implementation.

Shape suffixes: T tokens, K top-k, R routed rows, E experts, D model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.expert_mlp.experts import PackedExperts, RoutedExperts, StackedExperts
from moe_runtime.kernels.expert_mlp.operators import (
    RowFunction,
    call,
    call_with_gradients,
    composed_expert_mlp,
    composed_rows,
    resolve_path,
    wants_gradient,
)
from moe_runtime.kernels.expert_mlp.quantized import QuantizedExperts
from moe_runtime.kernels.expert_mlp.reference import (
    expert_mlp_reference,
    grouped_expert_mlp_reference,
)
from moe_runtime.kernels.expert_mlp.rows import (
    EVERY_GRADIENT,
    ParameterGradients,
    RoutedBatch,
    already_sorted,
    groups_between,
    sort_rows,
)
from moe_runtime.kernels.expert_mlp.separate_experts import expert_ffn
from moe_runtime.kernels.operands import (
    Activation,
    ActivationName,
    ActivationSpec,
    PreactivationFunction,
    check_choice,
    check_like,
    precise_dtype,
    without_autocast,
)
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only

AnyExperts = TypeVar("AnyExperts", bound=RoutedExperts)
ExpertMlpImpl = Literal["auto", "triton", "native", "reference", "torch"]
IMPLS: tuple[ExpertMlpImpl, ...] = ("auto", "triton", "native", "reference", "torch")


def expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: RoutedExperts | QuantizedExperts,
    *,
    activation: Activation,
    impl: ExpertMlpImpl = "auto",
    recompute: bool = False,
    checks_ids: bool = False,
    post_expert: RowFunction | None = None,
    gradients: ParameterGradients | None = None,
) -> Tensor:
    """Runs every token through its experts and sums the results by gate weight.

    ``out[t] = sum over k of weights[t, k] * expert[ids[t, k]](x[t])``, differentiable in `x`,
    `weights` and every parameter. No token is dropped or padded.

    Args:
        x_TD: In the dtype of the experts; any floating dtype for quantised ones.
        ids_TK: int32 or int64. An id outside ``[0, E)`` marks a slot that is not dispatched: it
            adds zero, reads no weight and gets zero gradients.
        weights_TK: Gate weights, any floating dtype.
        experts: `StackedExperts` of one width, `PackedExperts` of any widths, or
            `QuantizedExperts`, which are frozen.
        activation: A name, an `ActivationSpec`, or a function of the pre-activations as they lie.
        impl: `auto` chooses by device, and takes `reference` for forward-mode and `torch.func`
            derivatives, which only it has. A named implementation never falls back.
        recompute: Computes pre-activations again in the backward pass instead of keeping them.
        checks_ids: Reports ids outside ``[-1, E]``; waits for the device.
        post_expert: Applied to the output rows ``[R, D]`` before they are weighted.
        gradients: Accumulates parameter gradients, or computes those of some experts only. Not for
            functions, nor for experts that differ in width.

    Returns:
        ``[T, D]`` in the dtype of `x`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, a name is unknown, or the implementation
            lacks the derivatives that are needed.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    spec = resolve_activation(activation)
    impl = differentiable_impl(impl)
    dtype = x_TD.dtype
    if isinstance(experts, QuantizedExperts):
        if gradients is not None:
            raise ValueError("quantised experts are frozen: they take no gradients=")
        if torch.is_autocast_enabled(x_TD.device.type) and dtype != torch.float64:
            x_TD = x_TD.to(torch.get_autocast_dtype(x_TD.device.type))
        if x_TD.ndim != 2 or x_TD.shape[1] != experts.dim_model or x_TD.device != experts.device:
            raise ValueError(
                f"x must be [*, {experts.dim_model}] on {experts.device}, got {list(x_TD.shape)} "
                f"on {x_TD.device}"
            )
    formula = spec if isinstance(spec, ActivationSpec) and post_expert is None else None
    if not isinstance(experts, QuantizedExperts):
        x_TD, experts = _autocast(x_TD, experts, formula, impl)
        _validate_rows("x", x_TD, experts)
    validate_routing(x_TD, ids_TK, weights_TK)
    if checks_ids:
        _check_ids(ids_TK, experts.num_experts)
    if isinstance(experts, QuantizedExperts):
        if impl != "reference" and formula is not None and not torch.compiler.is_compiling():
            how = (experts, formula, impl)
            if wants_gradient((x_TD, weights_TK)):
                out_TD = cast(Tensor, _Quantized.apply(x_TD, weights_TK, ids_TK, *how))
                return out_TD.to(dtype)
            return _infer_quantized(x_TD, ids_TK, weights_TK, *how).to(dtype)
        ids_TK, recompute = experts.named(ids_TK), True
        wide = precise_dtype(x_TD) if impl == "reference" else x_TD.dtype
        experts = experts.widened(ids_TK, wide)
    if isinstance(experts, PackedExperts):
        if gradients is not None or formula is None:
            raise ValueError("experts that differ in width take neither gradients= nor functions")
        if impl == "reference":
            out_TD = expert_mlp_reference(x_TD, ids_TK, weights_TK, experts, formula)
            return out_TD.to(dtype)
        products = replace(experts, down_bias=None)
        batch = RoutedBatch(x_TD, ids_TK, weights_TK, products, formula)
        out_TD = call_with_gradients(batch, EVERY_GRADIENT, impl=impl, recompute=recompute)
        if experts.down_bias is not None:
            bias_TD = _summed_bias(ids_TK, weights_TK, experts.down_bias)
            out_TD = out_TD + bias_TD.to(out_TD.dtype)
        return out_TD.to(dtype)
    if gradients is not None:
        if impl == "reference" or formula is None:
            raise ValueError("gradients= goes with a formula as activation and another impl")
        gradients.check(experts)
        if torch.is_grad_enabled():
            batch = RoutedBatch(x_TD, ids_TK, weights_TK, experts, formula)
            out_TD = call_with_gradients(batch, gradients, impl=impl, recompute=recompute)
            return out_TD.to(dtype)
    if impl == "reference":
        out_TD = expert_mlp_reference(x_TD, ids_TK, weights_TK, experts, spec, post_expert)
        return out_TD.to(dtype)
    if formula is None:
        _refuse_functions(impl)
        return composed_expert_mlp(x_TD, ids_TK, weights_TK, experts, spec, post_expert).to(dtype)
    return call(
        x_TD, ids_TK, weights_TK, None, experts, formula, impl=impl, recompute=recompute
    ).to(dtype)


def grouped_expert_mlp(
    x_RD: Tensor,
    counts_E: Tensor,
    experts: StackedExperts,
    *,
    activation: Activation,
    impl: ExpertMlpImpl = "auto",
    recompute: bool = False,
) -> Tensor:
    """Runs rows that are already sorted by expert.

    Args:
        x_RD: In the dtype of the experts, sorted by expert. Rows may follow those of the last
            expert.
        counts_E: ``[E]`` integers: rows of each expert, at most R in total.
        activation: As in `expert_mlp`, like `impl` and `recompute`.

    Returns:
        ``[R, D]`` in the dtype of `x`; zero in the rows after the last expert's.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or a name is unknown.
    """
    spec = resolve_activation(activation)
    impl = differentiable_impl(impl)
    dtype = x_RD.dtype
    formula = spec if isinstance(spec, ActivationSpec) else None
    x_RD, experts = _autocast(x_RD, experts, formula, impl)
    _validate_rows("x", x_RD, experts)
    if list(counts_E.shape) != [experts.num_experts] or counts_E.dtype.is_floating_point:
        raise ValueError(
            f"counts must be [{experts.num_experts}] integers, got {list(counts_E.shape)} of "
            f"{counts_E.dtype}"
        )
    if impl == "reference":
        return grouped_expert_mlp_reference(x_RD, counts_E.tolist(), experts, spec).to(dtype)
    if not isinstance(spec, ActivationSpec):
        _refuse_functions(impl)
        return composed_rows(x_RD, None, already_sorted(counts_E), experts, spec).to(dtype)
    return call(x_RD, None, None, counts_E, experts, spec, impl=impl, recompute=recompute).to(dtype)


def differentiable_impl(impl: ExpertMlpImpl) -> ExpertMlpImpl:
    """The implementation for a call that asks for `impl`, given the derivatives being computed.

    Raises:
        ValueError: The name is unknown, or it has no derivatives of this kind.
    """
    check_impl(impl)
    if impl == "reference" or torch.compiler.is_compiling():
        return impl
    functorch = torch._C._functorch  # type: ignore[attr-defined]
    transform = functorch.peek_interpreter_stack()
    is_forward = forward_ad._current_level >= 0
    is_backward = transform is not None and transform.key() == functorch.TransformType.Grad
    if not is_forward and not is_backward:
        return impl
    if impl == "auto":
        return "reference"
    raise ValueError(
        f"impl={impl!r} has no {'forward-mode' if is_forward else 'torch.func'} derivatives "
        f"({'jvp, jacfwd' if is_forward else 'grad, vjp, jacrev'}): use 'auto' or 'reference'"
    )


def _infer_quantized(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    impl: str,
) -> Tensor:
    """Computes from packed codes: by Triton on a GPU, by `expert_ffn` otherwise. Rounds no weight.

    Formats that Triton cannot read wait for the device.
    """
    with torch.no_grad(), without_autocast(x_TD.device.type):
        if resolve_path(impl, x_TD) == "triton":
            from moe_runtime.kernels.expert_mlp import triton_path

            problem = triton_path.quantized_problem(x_TD, experts)
            if problem is None:
                return triton_path.infer(x_TD, ids_TK, weights_TK, experts, activation)
            if impl == "triton":
                raise ValueError(f"impl='triton' cannot compute this: {problem}")
            impl = "torch"
        ids_TK = experts.named(ids_TK)
        rows = sort_rows(ids_TK, experts.num_experts)
        found = list(groups_between(rows.offsets_E1, experts.slot_of_expert))
        if not found:
            return torch.zeros_like(x_TD)
        out_RD = x_TD.new_zeros(ids_TK.numel(), experts.dim_model)
        sources_R = rows.order_R[: sum(group.num_rows for group in found)]
        expert_ffn(
            x_TD.contiguous(),
            [experts.weights(group.slot) for group in found],
            [group.num_rows for group in found],
            sources_R // ids_TK.shape[1],
            sources_R,
            out_RD,
            activation=activation,
            impl=cast(Literal["auto", "native", "torch"], impl),
        )
        # rows without an expert are zero, whatever their weight
        is_computed = (ids_TK >= 0) & (ids_TK < experts.num_experts)
        return combine_assignments(out_RD, weights_TK.where(is_computed, 0))


class _Quantized(torch.autograd.Function):
    """Gradients of `x` and the gate weights, from the experts' values rounded to the dtype of `x`.

    Only the backward pass writes these values out, for the experts that were used.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK, ids_TK)
        ctx.experts, ctx.activation, ctx.impl = rest
        return _infer_quantized(x_TD, ids_TK, weights_TK, *rest)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, ids_TK = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        inputs = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip((x_TD, weights_TK), needs, strict=True)
        ]
        ids_TK = ctx.experts.named(ids_TK)
        wide = ctx.experts.widened(ids_TK, x_TD.dtype)
        with torch.enable_grad(), without_autocast(x_TD.device.type):
            out_TD = call(
                inputs[0], ids_TK, inputs[1], None, wide, ctx.activation,
                impl=ctx.impl, recompute=False,
            )  # fmt: skip
            wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
            grad_TD = grads[0].detach().to(out_TD.dtype)
            found = iter(torch.autograd.grad(out_TD, wanted, grad_TD))
        given = [next(found) if need else None for need in needs]
        return *given, None, None, None, None


def _summed_bias(ids_TK: Tensor, weights_TK: Tensor, bias_ED: Tensor) -> Tensor:
    """`out[t] = sum_k weights[t, k] * bias[ids[t, k]]`, in fp32 (fp64 for fp64)."""
    precise = precise_dtype(bias_ED)
    num_experts = len(bias_ED)
    # the last column is for slots without an expert
    names = torch.where((ids_TK < 0) | (ids_TK > num_experts), num_experts, ids_TK).long()
    weights_TE1 = weights_TK.new_zeros(len(ids_TK), num_experts + 1, dtype=precise)
    for k in range(ids_TK.shape[1]):
        # one choice at a time, so that no two add to one place: the same bits in every run
        weights_TE1 = weights_TE1.scatter_add(
            1, names[:, k, None], weights_TK[:, k, None].to(precise)
        )
    return weights_TE1[:, :-1] @ bias_ED.to(precise)


def resolve_activation(activation: Activation) -> ActivationSpec | PreactivationFunction:
    """The formula of a name; formulas and functions as they are."""
    if isinstance(activation, str):
        return ActivationSpec(cast(ActivationName, activation))
    return activation


def _autocast(
    x: Tensor, experts: AnyExperts, formula: ActivationSpec | None, impl: str
) -> tuple[Tensor, AnyExperts]:
    """Input and parameters in the dtype of an enclosing `torch.autocast`, as for `F.linear`.

    Parameters stay as they are if the implementation rounds one expert at a time, to the same bits.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x, experts
    dtype = torch.get_autocast_dtype(device)
    x = x.to(dtype)
    rounds = isinstance(experts, StackedExperts) and formula is not None and x.is_cpu
    rounds = rounds and impl in ("auto", "native", "torch") and experts.dtype == torch.float32
    if rounds and wants_gradient((x, *experts.tensors())):
        return x, experts
    named = zip(experts.names, experts.tensors(), strict=True)
    return x, replace(experts, **{name: None if t is None else t.to(dtype) for name, t in named})


def check_impl(impl: str) -> None:
    """Raises ValueError for an unknown implementation."""
    check_choice(impl, IMPLS)


def _refuse_functions(impl: str) -> None:
    if impl not in ("auto", "torch"):
        raise ValueError(
            f"a function as activation or post_expert runs with impl='auto', 'torch' or "
            f"'reference'; got impl={impl!r}, which computes an ActivationSpec or a name only"
        )


def _validate_rows(name: str, x: Tensor, experts: RoutedExperts) -> None:
    if x.ndim != 2 or x.shape[1] != experts.dim_model:
        raise ValueError(f"{name} must be [*, {experts.dim_model}], got {list(x.shape)}")
    is_rounded = (
        torch.is_autocast_enabled(x.device.type) and x.dtype.itemsize < experts.dtype.itemsize
    )
    like = experts.tensors()[0]
    check_like(name, x, like.new_empty(0, dtype=x.dtype) if is_rounded else like, "the experts")


def validate_routing(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Checks that ids and gate weights belong to the tokens."""
    if ids_TK.ndim != 2 or ids_TK.shape[0] != x_TD.shape[0]:
        raise ValueError(f"ids must be [{x_TD.shape[0]}, K], got {list(ids_TK.shape)}")
    if ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64, got {ids_TK.dtype}")
    if weights_TK.shape != ids_TK.shape or not weights_TK.dtype.is_floating_point:
        raise ValueError(
            f"weights must be {list(ids_TK.shape)} of a floating dtype like ids, got "
            f"{list(weights_TK.shape)} of {weights_TK.dtype}"
        )
    if ids_TK.device != x_TD.device or weights_TK.device != x_TD.device:
        raise ValueError(
            f"ids and weights must be on {x_TD.device} like x, got {ids_TK.device} and "
            f"{weights_TK.device}"
        )


def _check_ids(ids_TK: Tensor, num_experts: int) -> None:
    wrong = (ids_TK < -1) | (ids_TK > num_experts)
    if bool(wrong.any()):
        token, slot = torch.nonzero(wrong)[0].tolist()
        raise ValueError(
            f"ids must be in [0, {num_experts}), or -1 or {num_experts} for a slot that is not "
            f"dispatched; got {int(ids_TK[token, slot])} for token {token}, slot {slot}"
        )
