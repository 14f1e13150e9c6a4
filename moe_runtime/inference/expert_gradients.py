"""Gradients of experts that come and go: the backward pass holds them again.

Weights that autograd kept from the forward pass would be views of slots that other experts fill by
then. So only inputs are kept; the backward pass leases the experts and computes anew what it needs.
The experts themselves are frozen.

Shape suffixes: T tokens, K top-k, R routed rows = T * K, D model width, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.errors import UnsupportedUseError
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only

if TYPE_CHECKING:
    from moe_runtime.inference.expert_layer import OffloadedExperts


def refuse_tangents(*tensors: Tensor) -> None:
    """Refuses forward-mode differentiation.

    Raises:
        UnsupportedUseError: one of the tensors has a tangent.
    """
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise UnsupportedUseError(
            "a loaded model has no forward-mode derivative, since its experts come and go; use "
            "backward() or torch.autograd.grad"
        )


def differentiable_experts(
    experts: OffloadedExperts, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """What `experts` computes, ``[T, D]``, with gradients of hidden values and gate weights.

    Parameters that all experts share, of an activation or a norm, have gradients too.

    Raises:
        UnsupportedUseError: a transform of ``torch.func`` is under way, or shared parameters would
            be trained in several processes.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        raise UnsupportedUseError(
            "torch.func cannot differentiate a loaded model, since its experts come and go; use "
            "backward() or torch.autograd.grad"
        )
    parameters = [parameter for parameter in experts.parameters() if parameter.requires_grad]
    if parameters and experts.share is not None:
        raise UnsupportedUseError(
            f"parameters of the experts of layer {experts.layer} require gradients, which several "
            "processes cannot train; freeze them, or load the model in one process"
        )
    return cast(Tensor, _Experts.apply(experts, hidden_TD, ids_TK, weights_TK, *parameters))


_FIRST_ONLY = (
    "a loaded model's experts have first derivatives only; compute second ones with the model as "
    "transformers loads it"
)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: OffloadedExperts,
        hidden_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.experts = experts
        ctx.save_for_backward(hidden_TD, ids_TK, weights_TK, *parameters)
        return experts.compute(hidden_TD, ids_TK, weights_TK)

    @staticmethod
    @first_derivatives_only(_FIRST_ONLY, UnsupportedUseError)
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, ids_TK, weights_TK, *parameters = ctx.saved_tensors
        found: list[Tensor | None] = []
        try:
            with without_autocast(grad_TD.device.type):
                found = _gradients(ctx.experts, hidden_TD, ids_TK, weights_TK, parameters, grad_TD)
        finally:
            if not found:  # here, since torch may run this on a thread of its own
                ctx.experts.end_leases()
        grad_hidden_TD, grad_weights_TK, *rest = found
        return None, grad_hidden_TD, None, grad_weights_TK, *rest


def _gradients(
    experts: OffloadedExperts,
    hidden_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    parameters: Sequence[Tensor],
    grad_TD: Tensor,
) -> list[Tensor | None]:
    """Gradients of hidden values, gate weights and parameters, for that of the output.

    A row is computed with the others of its expert, and sums are in the order of a token's choices,
    or of experts: who was resident changes no bit.
    """
    num_tokens, top_k = ids_TK.shape
    dim = hidden_TD.shape[1]
    precise = torch.promote_types(hidden_TD.dtype, torch.float32)
    rows = experts.rows_of(ids_TK)
    own_rows = rows if experts.share is None else experts.share.own_rows(experts.layer, rows)
    # a row's gradient, and in the last column that of its gate weight
    grads_RX = grad_TD.new_zeros(num_tokens * top_k, dim + 1, dtype=precise)
    parts: dict[int, Sequence[Tensor | None]] = {}
    arriving = experts.each(own_rows, num_tokens)
    try:
        for expert, compute in arriving:
            rows_n = torch.tensor(own_rows[expert], device=hidden_TD.device)
            x_nD = hidden_TD[rows_n // top_k].requires_grad_()
            grad_nD = grad_TD[rows_n // top_k].to(precise)
            with torch.enable_grad():
                y_nD = compute(x_nD)
            grads_RX[rows_n, dim] = (grad_nD * y_nD.detach().to(precise)).sum(1)
            grad_nD = grad_nD * weights_TK.reshape(-1)[rows_n, None].to(precise)
            grad_x_nD, *parts[expert] = torch.autograd.grad(
                y_nD, (x_nD, *parameters), grad_nD.to(y_nD.dtype), allow_unused=True
            )
            grads_RX[rows_n, :dim] = grad_x_nD.to(precise)
    finally:
        arriving.close()
    if rows and experts.share is not None:
        experts.share.exchange(experts.layer, rows, grads_RX)
    by_expert = [parts[expert] for expert in sorted(parts)]
    return [
        grads_RX[:, :dim].unflatten(0, (num_tokens, top_k)).sum(1).to(hidden_TD.dtype),
        grads_RX[:, dim].view_as(weights_TK).to(weights_TK.dtype),
        *(_total(grads) for grads in zip(*by_expert, strict=True)),
    ]


def _total(grads: Sequence[Tensor | None]) -> Tensor | None:
    present = [grad for grad in grads if grad is not None]
    return torch.stack(present).sum(0) if present else None
