"""Next-token cross-entropy without the logits of all tokens at once.

With a large vocabulary the logits are the largest tensor of a training step, kept from forward to
backward. Here a chunk of tokens at a time gets its logits, its loss and at once its gradients.
Sources: Liger-Kernel's fused linear cross-entropy (Hsu et al., 2024); Wijmans et al., "Cut Your
Losses in Large-Vocabulary Language Models" (2024).

Shapes: T tokens, D model width, V vocabulary.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.models.lm.layers import product_dtype

CHUNK_BYTES = 32 << 20  # bytes of the logits that there are at a time


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        compute_dtype: torch.dtype,
        is_grad_enabled: bool,  # within, it never is
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)  # type: ignore[attr-defined]
        num_tokens = len(hidden_TD)
        hidden, weight = hidden_TD.to(compute_dtype), weight_VD.to(compute_dtype)
        grad_hidden = torch.empty_like(hidden_TD) if needs_grad else None
        grad_weight = torch.zeros_like(weight_VD) if needs_grad else None
        each_T = torch.empty(num_tokens, dtype=_wide(compute_dtype), device=hidden.device)
        chunk = max(1, CHUNK_BYTES // (each_T.element_size() * len(weight)))
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            logits = (hidden[rows] @ weight.T).to(each_T.dtype)
            log_probs = torch.log_softmax(logits, dim=-1)
            targets = targets_T[rows, None]
            each_T[rows] = -log_probs.gather(1, targets).squeeze(1)
            if grad_hidden is None or grad_weight is None:
                continue
            # d loss / d logits = (probabilities - one-hot) / T
            grad_logits = log_probs.exp_()
            grad_logits.scatter_add_(1, targets, grad_logits.new_full(targets.shape, -1.0))
            grad_logits = grad_logits.div_(num_tokens).to(compute_dtype)
            grad_hidden[rows] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[rows]
        # leads to the inputs, as any output does, without keeping them
        link = each_T.new_empty(0)
        if grad_hidden is not None and grad_weight is not None:
            ctx.save_for_backward(grad_hidden, grad_weight, link)
        ctx.mark_non_differentiable(each_T)
        return each_T.sum() / num_tokens, each_T, link

    @staticmethod
    @first_derivatives_only(
        "this loss has no second derivatives: use torch.nn.functional.cross_entropy"
    )
    def backward(
        ctx: FunctionCtx, grad_loss: Tensor, *_: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight, _link = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None


def linear_cross_entropies(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of `hidden @ weight.T` against the targets, in nats.

    Args:
        hidden_TD: last hidden states `[T, D]`.
        weight_VD: output projection `[V, D]`.

    Returns:
        A scalar, float32 or wider; and `[T]`, that of each token, without a gradient.
    """
    if hidden_TD.ndim != 2 or targets_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"expected hidden [T, D] and targets [T], got {tuple(hidden_TD.shape)} and "
            f"{tuple(targets_T.shape)}"
        )
    if weight_VD.shape[1:] != hidden_TD.shape[1:]:
        raise ValueError(f"expected weight [V, {hidden_TD.shape[1]}], got {tuple(weight_VD.shape)}")
    device_type = hidden_TD.device.type
    dtype = product_dtype(device_type, hidden_TD.dtype)
    with without_autocast(device_type):
        loss, each_T, _ = _LinearCrossEntropy.apply(
            hidden_TD, weight_VD, targets_T, dtype, torch.is_grad_enabled()
        )
    return loss, each_T


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
