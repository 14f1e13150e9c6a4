"""`expert_mlp` of experts that stay quantised: from codes as they lie, on a CPU and on a GPU.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, E experts, D model, F hidden.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.expert_mlp.implementations.paths import resolve_path
from moe_runtime.kernels.expert_mlp.quantized.quantized_experts import QuantizedExperts
from moe_runtime.kernels.expert_mlp.rows import groups_between, sort_rows
from moe_runtime.kernels.expert_mlp.separate_experts import expert_ffn
from moe_runtime.kernels.expert_mlp.torch_op import call, wants_gradient
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.activation import ActivationSpec
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only


def quantized_expert_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    *,
    impl: str,
) -> Tensor:
    """The implementations of `expert_mlp`, whose arguments are checked already.

    Products read codes as they lie, and no weight is rounded: on a GPU by Triton, whatever the
    number of rows, on a CPU as in `expert_ffn`. Gradients of `x` and `weights` are those of the
    values, rounded to the dtype of `x`, of the experts that are used; they are written out for the
    backward pass alone. A compiler that traces this sees `expert_mlp` of the values.

    Raises:
        ValueError: `impl="triton"` cannot read a format.
    """
    if torch.compiler.is_compiling():
        ids_TK = experts.named(ids_TK)
        wide = experts.widened(ids_TK, x_TD.dtype)
        options: dict[str, Any] = {"impl": impl, "recompute": True}
        return call(x_TD, ids_TK, weights_TK, None, wide, activation, **options)
    if wants_gradient((x_TD, weights_TK)):
        return cast(Tensor, _Frozen.apply(x_TD, weights_TK, ids_TK, experts, activation, impl))
    return _infer(x_TD, ids_TK, weights_TK, experts, activation, impl)


def _infer(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    impl: str,
) -> Tensor:
    with torch.no_grad(), without_autocast(x_TD.device.type):
        if resolve_path(impl, x_TD) == "triton":
            from moe_runtime.kernels.expert_mlp.quantized import quantized_triton

            problem = quantized_triton.problem(x_TD, experts)
            if problem is None:
                return quantized_triton.infer(x_TD, ids_TK, weights_TK, experts, activation)
            if impl == "triton":
                raise ValueError(f"impl='triton' cannot compute this: {problem}")
            impl = "torch"
        return _by_expert(x_TD, ids_TK, weights_TK, experts, activation, impl)


def _by_expert(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: QuantizedExperts,
    activation: ActivationSpec,
    impl: str,
) -> Tensor:
    """Each expert's matrices where they lie, in C or torch; waits for a device."""
    ids_TK = experts.named(ids_TK)
    rows = sort_rows(ids_TK, experts.num_experts)
    found = list(groups_between(rows.offsets_E1, experts.slot_of_expert))
    out_RD = x_TD.new_zeros(ids_TK.numel(), experts.dim_model)
    if not found:
        return torch.zeros_like(x_TD)
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
    # rows that nobody computed are zero, and stay so whatever their weight
    is_computed = (ids_TK >= 0) & (ids_TK < experts.num_experts)
    return combine_assignments(out_RD, weights_TK.where(is_computed, 0))


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        experts: QuantizedExperts,
        activation: ActivationSpec,
        impl: str,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weights_TK, ids_TK)
        ctx.experts, ctx.activation, ctx.impl = experts, activation, impl
        return _infer(x_TD, ids_TK, weights_TK, experts, activation, impl)

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
