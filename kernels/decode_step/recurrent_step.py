"""`delta_rule_step` and `conv_step`: one token's step in layers with recurrent state.

Shape suffixes: B sequences, H heads, G head groups with their own keys and queries, K key width,
V value width, C channels, L inputs that a convolution remembers, N taps.
"""

from __future__ import annotations

from struct import pack

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_runtime.kernels.decode_step.single_query_attention import Impl
from moe_runtime.kernels.native import DTYPE_CODES, chosen_library, kernel_problem, needs_torch

MOST_WIDTH = 8192  # of a head's keys and values, which the kernel keeps on the stack


def delta_rule_step(
    state_BHKV: Tensor,
    query_BGK: Tensor,
    key_BGK: Tensor,
    value_BHV: Tensor,
    log_decay: Tensor,
    beta_BH: Tensor,
    *,
    scale: float = 1.0,
    unit_eps: float | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """One step of the gated delta rule (Gated DeltaNet, 2024, equation 10).

    ``S = decay * S``; ``S += key (beta * (value - key . S))``; the result is ``query . S``.

    Args:
        state_BHKV: fp32, contiguous; updated in place.
        query_BGK: fp32, bf16 or fp16, the dtype of the key; G divides H.
        value_BHV: In any of these dtypes, like `beta_BH`.
        log_decay: At most 0: `[B, H, 1]`, or `[B, H, K]` per channel (Kimi Linear, 2025).
        beta_BH: Between 0 and 1.
        scale: Factor of the query.
        unit_eps: If given, queries and keys are divided by the root of their sum of squares plus
            this.
        impl: `native` (C, CPU), `reference` (torch), or `auto`: native if possible. Inference only.

    Returns:
        `[B, H, V]` in fp32. With the native kernel, a sequence's bits do not depend on the others
            or on threads.

    Raises:
        ValueError: Shapes do not fit, a gradient is needed, `impl` is unknown, or the named kernel
            cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    parts = (query_BGK, key_BGK, value_BHV, log_decay, beta_BH)
    problem = _delta_problem(state_BHKV, *parts)
    if problem:
        raise ValueError(problem)
    library = chosen_library(impl, _native_problem(state_BHKV, *parts))
    if library is None:
        return delta_rule_step_reference(state_BHKV, *parts, scale, unit_eps)
    query, key, value, decay, beta = (part.contiguous() for part in parts)
    decay = decay.float()
    batch, heads, keys, values = state_BHKV.shape
    out = state_BHKV.new_empty(batch, heads, values)
    numbers = (
        state_BHKV.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), beta.data_ptr(),
        decay.data_ptr(), out.data_ptr(), batch, heads, query.shape[1], keys, values,
        decay.shape[2], DTYPE_CODES[query.dtype], DTYPE_CODES[value.dtype], DTYPE_CODES[beta.dtype],
        library.shares_threads(),
    )  # fmt: skip
    library.delta_rule_step(pack("17q2d", *numbers, scale, -1 if unit_eps is None else unit_eps))
    _tell_of_change(state_BHKV)
    return out


def conv_step(
    state_BCL: Tensor,
    x_BC: Tensor,
    taps_CN: Tensor,
    bias_C: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """One step of a causal depthwise convolution: each channel's last N inputs times its taps.

    Args:
        state_BCL: Earlier inputs, contiguous, `L >= N - 1`; updated in place: `x` is appended.
        x_BC: fp32, bf16 or fp16, as all others.
        taps_CN: The last tap belongs to `x`.
        impl: As in `delta_rule_step`, like the errors.

    Returns:
        `[B, C]` in the dtype of `x`; sums are in fp32, rounded once.
    """
    bias = () if bias_C is None else (bias_C,)
    problem = _conv_problem(state_BCL, x_BC, taps_CN, bias_C)
    if problem:
        raise ValueError(problem)
    library = chosen_library(impl, _native_problem(state_BCL, x_BC, taps_CN, *bias))
    if library is None:
        return conv_step_reference(state_BCL, x_BC, taps_CN, bias_C)
    x, taps = x_BC.contiguous(), taps_CN.contiguous()
    bias_C = None if bias_C is None else bias_C.contiguous()
    batch, channels, width = state_BCL.shape
    out = x.new_empty(batch, channels)
    numbers = (
        state_BCL.data_ptr(), x.data_ptr(), taps.data_ptr(),
        0 if bias_C is None else bias_C.data_ptr(), out.data_ptr(), batch, channels, width,
        taps.shape[1], DTYPE_CODES[x.dtype], library.shares_threads(),
    )  # fmt: skip
    library.conv_step(pack("11q", *numbers))
    _tell_of_change(state_BCL)
    return out


def _delta_problem(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> str | None:
    """What is wrong with the arguments, or None."""
    if state.ndim != 4 or query.ndim != 3 or not query.shape[1] or state.shape[1] % query.shape[1]:
        return (
            "expected state [B, H, K, V] and query [B, G, K], G a divisor of H, got "
            f"{list(state.shape)} and {list(query.shape)}"
        )
    batch, heads, keys, values = state.shape
    if query.shape != (batch, query.shape[1], keys) or key.shape != query.shape:
        return (
            f"expected query and key [{batch}, G, {keys}], got {list(query.shape)} and "
            f"{list(key.shape)}"
        )
    if query.dtype is not key.dtype:
        return f"query and key must be of one dtype, got {query.dtype} and {key.dtype}"
    if value.shape != (batch, heads, values) or beta.shape != (batch, heads):
        return (
            f"expected value [{batch}, {heads}, {values}] and beta [{batch}, {heads}], got "
            f"{list(value.shape)} and {list(beta.shape)}"
        )
    if log_decay.shape not in ((batch, heads, 1), (batch, heads, keys)):
        return (
            f"expected log_decay [{batch}, {heads}, 1] or [{batch}, {heads}, {keys}], got "
            f"{list(log_decay.shape)}"
        )
    if state.dtype is not torch.float32:
        return f"the state must be fp32, got {state.dtype}"
    return _in_place_problem(state, query, key, value, log_decay, beta)


def _conv_problem(state: Tensor, x: Tensor, taps: Tensor, bias: Tensor | None) -> str | None:
    """What is wrong with the arguments, or None."""
    if state.ndim != 3 or x.shape != state.shape[:2]:
        return f"expected state [B, C, L] and x [B, C], got {list(state.shape)} and {list(x.shape)}"
    channels, width = state.shape[1:]
    if taps.ndim != 2 or len(taps) != channels or not 1 <= taps.shape[1] <= width + 1 or not width:
        return (
            f"expected taps [{channels}, N] of 1 to {width + 1} taps, got {list(taps.shape)} for a "
            f"state of {width}"
        )
    if bias is not None and bias.shape != (channels,):
        return f"expected bias [{channels}], got {list(bias.shape)}"
    dtypes = {tensor.dtype for tensor in (state, x, taps, bias) if tensor is not None}
    if len(dtypes) != 1:
        return f"all must be of one dtype, got {', '.join(sorted(map(str, dtypes)))}"
    return _in_place_problem(state, x, taps, bias)


def _in_place_problem(state: Tensor, *others: Tensor | None) -> str | None:
    if not state.is_contiguous():
        return f"the state is changed in place and must have no gaps, got strides {state.stride()}"
    if needs_torch(state, *others) and not isinstance(state, FakeTensor):
        return "a step changes the state in place and has no gradients; use torch.no_grad()"
    return None


def _tell_of_change(state: Tensor) -> None:
    """Marks the state as changed, so that a backward pass cannot use it as the old one."""
    if not state.is_inference():
        torch.autograd.graph.increment_version(state)


def _native_problem(*tensors: Tensor) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    widths = tensors[0].shape[2:] if tensors[0].ndim == 4 else ()
    if not all(1 <= width <= MOST_WIDTH for width in widths):
        return f"it knows keys and values of 1 to {MOST_WIDTH}, got {list(widths)}"
    return kernel_problem(*tensors)


def delta_rule_step_reference(
    state_BHKV: Tensor,
    query_BGK: Tensor,
    key_BGK: Tensor,
    value_BHV: Tensor,
    log_decay: Tensor,
    beta_BH: Tensor,
    scale: float,
    unit_eps: float | None,
) -> Tensor:
    """`delta_rule_step` in torch: small products read the states, two operations update them."""
    heads = state_BHKV.shape[1]
    query_BGK, key_BGK = query_BGK.float(), key_BGK.float()
    if unit_eps is not None:
        query_BGK, key_BGK = _unit_length(query_BGK, unit_eps), _unit_length(key_BGK, unit_eps)
    state, value = state_BHKV.flatten(0, 1), value_BHV.float().flatten(0, 1)
    decay = log_decay.float().exp().flatten(0, 1)[:, None]
    both = torch.stack((query_BGK * scale, key_BGK), dim=2)
    both = both.repeat_interleave(heads // query_BGK.shape[1], dim=1).flatten(0, 1)
    known = torch.bmm(both * decay, state)
    learnt = (value - known[:, 1]) * beta_BH.float().flatten()[:, None]
    # not a product: MKL rounds one sequence differently from several
    state.mul_(decay.transpose(1, 2)).addcmul_(both[:, 1, :, None], learnt[:, None])
    overlap = torch.linalg.vecdot(both[:, 0], both[:, 1])[:, None]
    return torch.addcmul(known[:, 0], overlap, learnt).view_as(value_BHV)


def conv_step_reference(
    state_BCL: Tensor, x_BC: Tensor, taps_CN: Tensor, bias_C: Tensor | None
) -> Tensor:
    """`conv_step` in torch: sums in fp32, rounded once."""
    inputs_BCL = torch.cat((state_BCL, x_BC[..., None]), dim=-1)
    state_BCL.copy_(inputs_BCL[..., 1:])
    products_BCN = inputs_BCL[..., -taps_CN.shape[1] :].float() * taps_CN.float()
    sums_BC = products_BCN.sum(-1)
    return (sums_BC if bias_C is None else sums_BC + bias_C.float()).to(x_BC.dtype)


def _unit_length(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)
