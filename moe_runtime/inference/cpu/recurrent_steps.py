"""Steps of one token in layers with recurrent states: linear attention and Mamba 2.

transformers' functions for a CPU allocate several tensors of the states' size in every step. These
change recurrent states and the inputs of short convolutions in place.

Shape suffixes: B sequences, H heads, G groups of heads (with inputs of their own), P values of a
head, N states of each.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.inference.known_classes import RECURRENT_LAYERS, class_name, is_theirs
from moe_runtime.inference.sequence_cache import each_row
from moe_runtime.kernels.decode_step.recurrent_step import conv_step, delta_rule_step
from moe_runtime.kernels.native import DTYPE_CODES, needs_torch

SCAN_CHUNK, SCAN_STEP = 64, 16
"""Chunk of Mamba 2 for a CPU (256 on GPUs); chunks of short prompts are multiples of the second."""

NORM_EPS = 1e-6
"""Epsilon of the families' norms of queries and keys."""


def use_recurrent_steps(layer: torch.nn.Module) -> None:
    """Gives a known layer a ``forward`` with the steps of this file."""
    is_known = class_name(layer) in RECURRENT_LAYERS and "forward" not in vars(layer)
    if is_known and _with_steps(type(layer).forward) is not None:
        vars(layer)["forward"] = _Forward(layer)


def mamba2_step(
    state_BHPN: Tensor, x_BHP: Tensor, dt_BH: Tensor, A_H: Tensor, B_BGN: Tensor, C_BGN: Tensor
) -> Tensor:
    """A step of a state space with one decay a head (Mamba 2, 2024, section 5).

    ``S = exp(dt * A) * S + x (dt * B)``; returns ``S . C``, ``[B, H, P]`` in fp32. The state is
    fp32 without gaps and changed in place; ``dt`` is at least 0, ``A`` below 0.
    """
    in_group = state_BHPN.shape[1] // B_BGN.shape[1]
    B, C = (part.repeat_interleave(in_group, dim=1)[:, :, None] for part in (B_BGN, C_BGN))
    decay = torch.exp(dt_BH.float() * A_H.float())[..., None, None]
    taken = dt_BH[..., None, None] * B
    state_BHPN.mul_(decay).addcmul_(x_BHP.float()[..., None], taken.float())
    # a row vector: torch is five times slower with a column
    read = torch.bmm(C.float().flatten(0, 1), state_BHPN.flatten(0, 1).transpose(1, 2))
    return read.view_as(x_BHP)


class _Forward:
    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self._layer).forward
        ours = None if torch.compiler.is_compiling() else _with_steps(forward)
        return (ours or forward)(self._layer, *args, **options)


class _Globals(dict[str, Any]):
    """The current globals of a module, with our steps instead of its functions."""

    def __init__(self, own: dict[str, Any], steps: dict[str, functools.partial[Any]]) -> None:
        super().__init__()
        self._own, self._steps = own, steps

    def __missing__(self, name: str) -> Any:
        found, step = self._own[name], self._steps.get(name)
        return found if step is None or step.args[0] is not found else step


@functools.cache
def _with_steps(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a class's ``forward`` that calls our steps. None if it has no such calls, or a
    program wrapped it."""
    if not is_theirs(forward):
        return None
    function: Any = inspect.unwrap(forward)
    names = _STEPS.keys() & function.__code__.co_names & function.__globals__.keys()
    theirs = {name: function.__globals__[name] for name in names}
    steps = {
        name: functools.partial(_STEPS[name], own) for name, own in theirs.items() if is_theirs(own)
    }
    if not steps:
        return None
    if (scan := function.__globals__.get(_SCAN)) is not None:
        steps[_SCAN] = functools.partial(_mamba2_scan, scan)
    return types.FunctionType(
        function.__code__,
        _Globals(function.__globals__, steps),
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _delta_rule(
    theirs: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Replaces transformers' function; writes the last state over the first."""
    rows = None if initial_state is None else each_row(initial_state)
    if rows is not None:
        mixed = []
        for own, row in zip(zip(query, key, value, g, beta, strict=True), rows, strict=True):
            q, k, v, decay, b = (part[None] for part in own)
            found, last = _delta_rule(
                theirs, q, k, v, decay, b, row, True, use_qk_l2norm_in_kernel, **options
            )
            row.copy_(cast(Tensor, last))
            mixed.append(found)
        return torch.cat(mixed), initial_state
    if (
        initial_state is None
        or not output_final_state
        or query.shape[1] != 1
        or _are_packed(options)
        or query.dtype is not key.dtype
        or not g.shape[:3] == beta.shape == value.shape[:3]
        or initial_state.shape[:2] != (len(query), value.shape[2])
        or not _can_change(initial_state, query, key, value, g, beta)
    ):
        return theirs(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            **options,
        )
    log_decay = g[:, 0] if g.ndim == 4 else g[:, 0, :, None]
    mixed_BHV = delta_rule_step(
        initial_state,
        query[:, 0],
        key[:, 0],
        value[:, 0],
        log_decay,
        beta[:, 0],
        scale=query.shape[-1] ** -0.5,
        unit_eps=NORM_EPS if use_qk_l2norm_in_kernel else None,
    )
    return mixed_BHV[:, None].to(query.dtype), initial_state


def _mamba2(
    theirs: Callable[..., Any],
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    if (rows := each_row(state)) is not None:
        parts = (hidden_states, dt, B, C) if z is None else (hidden_states, dt, B, C, z)
        found = []
        for row, own in zip(rows, zip(*parts, strict=True), strict=True):
            x, dt_1, B_1, C_1, *gate = (part[None] for part in own)
            named = {"z": gate[0] if gate else None, "dt_bias": dt_bias, **options}
            y = _mamba2(theirs, row, x, dt_1, A, B_1, C_1, D, dt_softplus=dt_softplus, **named)
            found.append(y)
        return torch.cat(found)
    is_one_a_head = dt.stride(2) == 0 and A.stride()[1:] == (0, 0)
    if (
        not is_one_a_head
        or _are_packed(options)
        or not _can_change(state, hidden_states, dt, A, B, C, D, dt_bias, z)
    ):
        parts = (state, hidden_states, dt, A, B, C, D)
        return theirs(*parts, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt_BH = F.softplus(dt[..., 0]) if dt_softplus else dt[..., 0]
    y = mamba2_step(state, hidden_states, dt_BH, A[:, 0, 0], B, C).to(C.dtype)
    if D is not None:
        y = y + hidden_states * D
    if z is not None:
        y = y * F.silu(z)
    return y.to(hidden_states.dtype)


def _causal_conv(
    theirs: Callable[..., Any],
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    if (rows := each_row(conv_state)) is not None:
        pairs = zip(hidden_states.split(1), rows, strict=True)
        return torch.cat(
            [_causal_conv(theirs, x, row, weight, bias, activation) for x, row in pairs]
        )
    own = (conv_state, hidden_states, weight, *(() if bias is None else (bias,)))
    if (
        hidden_states.shape[-1] != 1
        or activation not in (None, "silu", "swish")
        or not 0 < weight.shape[-1] <= conv_state.shape[-1] + 1
        or len({part.dtype for part in own}) != 1
        or conv_state.dtype not in DTYPE_CODES
        or not _can_change_in_place(conv_state, *own)
    ):
        return theirs(hidden_states, conv_state, weight, bias, activation)
    out_BC = conv_step(conv_state, hidden_states[..., 0], weight, bias)
    return (out_BC if activation is None else F.silu(out_BC))[..., None]


def _mamba2_scan(
    theirs: Callable[..., Any], hidden_states: Tensor, *args: Any, chunk_size: int, **options: Any
) -> Any:
    """transformers' function for several tokens, with chunks for a CPU."""
    if hidden_states.is_cpu:
        num_tokens = -(-hidden_states.shape[1] // SCAN_STEP) * SCAN_STEP
        chunk_size = min(chunk_size, SCAN_CHUNK, max(num_tokens, SCAN_STEP))
    return theirs(hidden_states, *args, chunk_size=chunk_size, **options)


_SCAN = "mamba2_chunk_scan"
_STEPS: dict[str, Callable[..., Any]] = {
    "torch_recurrent_gated_delta_rule": _delta_rule,
    "recurrent_kimi_delta_attention": _delta_rule,
    "mamba2_selective_state_update": _mamba2,
    "causal_conv1d_update": _causal_conv,
}
"""Replacements of transformers' functions, by their names."""


def _are_packed(options: dict[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


def _can_change(state: Tensor, *parts: Tensor | None) -> bool:
    """Whether a recurrent state can change in place. MKL's sums depend on alignment: rows at
    multiples of 16 bytes have the same bits alone and in a batch."""
    return (
        state.dtype is torch.float32
        and state.shape[-1] % 4 == 0
        and _can_change_in_place(state, *parts)
    )


def _can_change_in_place(state: Tensor, *parts: Tensor | None) -> bool:
    """Whether a tensor on the CPU can change in place, without gradients."""
    return (
        state.is_cpu
        and state.is_contiguous()
        and not needs_torch(state, *parts)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


MAX_TAPS = 8
"""Most taps; longer convolutions were not compared with torch."""
PORTION = 2**16
"""Output values per portion, which bounds the fp32 memory of a prompt."""


def use_shifted_products(layer: torch.nn.Conv1d) -> None:
    """Gives a depthwise layer a weight that turns ``conv1d`` into sums of shifted products."""
    is_depthwise = layer.groups == layer.in_channels == layer.out_channels
    if is_depthwise and type(layer.weight) is torch.nn.Parameter and _slow_types():
        layer.weight = _DepthwiseWeight.of(layer.weight)


def shifted_products(x_BCL: Tensor, taps_C1K: Tensor, bias_C: Tensor | None, pad: int) -> Tensor:
    """A depthwise convolution with fp32 sums, rounded once.

    Products of two half-precision values are exact in fp32: a position has the same bits in any
    batch.

    Args:
        x_BCL: ``[B, C, L]``, in bf16 or fp16.
        taps_C1K: ``[C, 1, K]`` in the same type, K at most ``L + 2 * pad``.
        bias_C: ``[C]``, or None.
        pad: zeros on both sides, fewer than K.

    Returns:
        ``[B, C, L + 2 * pad - K + 1]`` in the type of ``x``, contiguous by position if ``x`` is.
    """
    batch, channels, length = x_BCL.shape
    taps_KC1 = taps_C1K.float().permute(2, 0, 1).contiguous()
    bias_C1 = None if bias_C is None else bias_C.float()[:, None]
    size = length + 2 * pad - len(taps_KC1) + 1
    portion = max(1, PORTION // max(1, batch * channels))
    if size <= portion or needs_torch(x_BCL, taps_C1K, bias_C):
        return _outputs(x_BCL, taps_KC1, bias_C1, pad, 0, size)
    if x_BCL.stride(1) == 1:
        y_BCN = x_BCL.new_empty(batch, size, channels).transpose(1, 2)
    else:
        y_BCN = x_BCL.new_empty(batch, channels, size)
    for first in range(0, size, portion):
        last = min(first + portion, size)
        y_BCN[..., first:last] = _outputs(x_BCL, taps_KC1, bias_C1, pad, first, last)
    return y_BCN


def _outputs(
    x_BCL: Tensor, taps_KC1: Tensor, bias_C1: Tensor | None, pad: int, first: int, last: int
) -> Tensor:
    """Positions ``first`` to ``last`` of the output."""
    begin, end = first - pad, last - pad + len(taps_KC1) - 1
    length, size = x_BCL.shape[-1], last - first
    wide = x_BCL[..., max(begin, 0) : min(end, length)].float()
    if begin < 0 or end > length:
        wide = F.pad(wide, (max(-begin, 0), max(end - length, 0)))
    if bias_C1 is None:
        sums = wide[..., :size] * taps_KC1[0]
    else:
        sums = torch.addcmul(bias_C1, wide[..., :size], taps_KC1[0])
    for tap in range(1, len(taps_KC1)):
        sums.addcmul_(wide[..., tap : tap + size], taps_KC1[tap])
    return sums.to(x_BCL.dtype)


class _DepthwiseWeight(torch.nn.Parameter):
    """Taps for calls of ``torch.nn.functional.conv1d``; families squeeze and unsqueeze them
    before."""

    @staticmethod
    def of(weight: Tensor) -> torch.nn.Parameter:
        own = weight.detach().as_subclass(cast(Any, _DepthwiseWeight))
        return cast(torch.nn.Parameter, own.requires_grad_(weight.requires_grad))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        # as torch itself disables subclasses; an exception cannot leave them disabled
        call = torch._C._disabled_torch_function_impl
        if func is F.conv1d:
            return call(_conv1d, types, args, kwargs)
        result = call(func, types, args, kwargs)
        if func is Tensor.squeeze or func is Tensor.unsqueeze:
            return result.as_subclass(cast(Any, cls))
        return result


def _conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    pad = padding[0] if isinstance(padding, tuple) else padding
    if (
        weight.dtype not in _slow_types()
        or {input.dtype, weight.dtype if bias is None else bias.dtype} != {weight.dtype}
        or (input.ndim, weight.ndim) != (3, 3)
        or weight.shape[:2] != (input.shape[1], 1)
        or not isinstance(pad, int)
        or not 0 <= pad < weight.shape[2] <= min(MAX_TAPS, input.shape[2] + 2 * pad)
        or {*_sizes(stride), *_sizes(dilation)} != {1}
        or groups != len(weight)
        or not (input.is_cpu and weight.is_cpu)
        or torch.is_autocast_enabled("cpu")
    ):
        return F.conv1d(input, weight, bias, stride, padding, dilation, groups)
    return shifted_products(input, weight, bias, pad)


def _sizes(size: Any) -> Any:
    return (size,) if isinstance(size, int) else size


@functools.cache
def _slow_types() -> frozenset[torch.dtype]:
    """Half-precision types without oneDNN convolutions on this processor."""
    if not torch.backends.mkldnn.is_available():
        return frozenset((torch.bfloat16, torch.float16))
    ops = torch.ops.mkldnn
    fast = {
        torch.bfloat16: ops._is_mkldnn_bf16_supported(),
        torch.float16: ops._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_fast in fast.items() if not is_fast)
