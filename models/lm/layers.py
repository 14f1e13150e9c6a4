"""Linear maps, norms and the loss of the language model.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); Liger-Kernel's fused
linear cross-entropy (Hsu et al., 2024); Wijmans et al., "Cut Your Losses in Large-Vocabulary
Language Models" (2024). Forward and backward take fewer passes over memory than torch's.

Shapes: T tokens, D model width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from moe_runtime.kernels.linear import is_faster_widened
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only


def product_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which operands of `dtype` are multiplied."""
    if not torch.is_autocast_enabled(device_type):
        return dtype
    narrow = torch.get_autocast_dtype(device_type)
    library = native_library() if device_type == "cpu" else None
    return torch.float32 if library and is_faster_widened(library, narrow) else narrow


class Linear(nn.Linear):
    """`nn.Linear` whose result has autocast's dtype, independent of the product's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        is_autocast = torch.is_autocast_enabled(device_type) and input.dtype != torch.float64
        if not is_autocast or product_dtype(device_type, input.dtype) != torch.float32:
            return super().forward(input)
        with torch.autocast(device_type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            y = F.linear(input.float(), self.weight.float(), bias)
        return y.to(torch.get_autocast_dtype(device_type))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        # this norm needs no tensor for the squares
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square() / x.shape[-1]
        scale = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        normed = (wide * scale).to(x.dtype)
        return normed.mul_(weight) if normed.dtype == weight.dtype else normed * weight

    @staticmethod
    @first_derivatives_only("this norm has no second derivatives: use torch.nn.functional.rms_norm")
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors  # type: ignore[attr-defined]
        normed = x.to(scale.dtype) * scale
        grad = grad_y.to(scale.dtype)
        summed = tuple(range(x.ndim - weight.ndim))
        # few passes over memory, which are the whole cost
        both = grad * normed
        grad_weight = both.sum(dim=summed)
        wide_weight = weight.to(both.dtype)
        inner = both @ wide_weight if weight.ndim == 1 else torch.linalg.vecdot(both, wide_weight)
        inner = inner.unsqueeze(-1).div_(x.shape[-1])
        torch.mul(grad, wide_weight, out=both)
        grad_x = both.addcmul_(normed, inner, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the sum in float32 or wider.

    `x` is `[..., D]`, `weight` `[D]` or the trailing dimensions of `x`, such as `[heads, D]`. The
    result has the dtype that both promote to.
    """
    return _RMSNorm.apply(x, weight, eps)


class RMSNorm(nn.Module):
    """RMS normalisation of the last dimension with a gain; `eps` is added to the mean square."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


CHUNK_BYTES = 32 << 20  # bytes of the logits in memory at a time


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        compute_dtype: torch.dtype,
        is_grad_enabled: bool,  # within, it is always off
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
        # an output that leads to the inputs without keeping them
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
    """Mean cross-entropy of `hidden @ weight.T` against the targets, in nats, computed in chunks of
    tokens.

    Hidden states are `[T, D]`, the projection `[V, D]`. The mean is float32 or wider; the second
    result `[T]` has that of each token, without a gradient.
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
