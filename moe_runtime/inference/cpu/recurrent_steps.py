"""Steps of one token in layers with recurrent states: linear attention and Mamba 2.

transformers' functions for a CPU allocate several tensors of the states' size at every step. Here
states change where they lie, and so do the inputs that a short convolution remembers. Several
tokens of Mamba 2 are left to transformers, in chunks of a size for a CPU.

Shape suffixes: B sequences, H heads, G groups of heads (with inputs of their own), P values of a
head, N states of each.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.kernels.native import DTYPE_CODES, needs_torch
from moe_runtime.kernels.recurrent_step import conv_step, delta_rule_step

SCAN_CHUNK, SCAN_STEP = 64, 16
"""Positions of a chunk of Mamba 2: GPUs take 256; and those in whose multiples short ones are."""

NORM_EPS = 1e-6
"""What keeps families from dividing by zero where queries and keys get unit length."""


def use_recurrent_steps(layer: torch.nn.Module) -> None:
    """Gives a layer a ``forward`` whose steps of one token are those of this file.

    Its code is the layer's own. A layer that takes such steps by no known function is left alone.
    """
    if "forward" not in vars(layer) and _with_steps(type(layer).forward) is not None:
        vars(layer)["forward"] = _Forward(layer)


def mamba2_step(
    state_BHPN: Tensor, x_BHP: Tensor, dt_BH: Tensor, A_H: Tensor, B_BGN: Tensor, C_BGN: Tensor
) -> Tensor:
    """A step of a state space with one decay a head (Mamba 2, 2024, section 5).

    ``S = exp(dt * A) * S + x (dt * B)``; the result is ``S . C``.

    Args:
        state_BHPN: fp32 without gaps; changed in place.
        x_BHP: in any precision, as what follows.
        dt_BH: at least 0.
        A_H: below 0.
        B_BGN: what the states take in.
        C_BGN: what is read of them.

    Returns:
        ``[B, H, P]`` in fp32.
    """
    in_group = state_BHPN.shape[1] // B_BGN.shape[1]
    B, C = (part.repeat_interleave(in_group, dim=1)[:, :, None] for part in (B_BGN, C_BGN))
    decay = torch.exp(dt_BH.float() * A_H.float())[..., None, None]
    taken = dt_BH[..., None, None] * B
    state_BHPN.mul_(decay).addcmul_(x_BHP.float()[..., None], taken.float())
    # as a row: torch is five times slower with a column
    read = torch.bmm(C.float().flatten(0, 1), state_BHPN.flatten(0, 1).transpose(1, 2))
    return read.view_as(x_BHP)


class _Forward:
    """The ``forward`` of a layer, with steps of this file."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer

    def __call__(self, *args: Any, **options: Any) -> Any:
        forward = type(self._layer).forward
        ours = None if torch.compiler.is_compiling() else _with_steps(forward)
        return (forward if ours is None else ours)(self._layer, *args, **options)


class _Globals(dict[str, Any]):
    """Those of a module as they are now, with our steps for the functions that were compared."""

    def __init__(self, own: dict[str, Any], steps: dict[str, functools.partial[Any]]) -> None:
        super().__init__()
        self._own, self._steps = own, steps

    def __missing__(self, name: str) -> Any:
        found, step = self._own[name], self._steps.get(name)
        return found if step is None or step.args[0] is not found else step


@functools.cache
def _with_steps(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """A class's own function, which finds our steps under the names it calls them by.

    None where there are none, or where somebody else than transformers has wrapped it.
    """
    function: Any = forward
    while hasattr(function, "__wrapped__"):
        if not function.__globals__["__name__"].startswith("transformers."):
            return None
        function = function.__wrapped__
    if not inspect.isfunction(function):
        return None
    names = _STEPS.keys() & function.__code__.co_names & function.__globals__.keys()
    theirs = {name: function.__globals__[name] for name in names}
    steps = {
        name: functools.partial(_STEPS[name][0], own)
        for name, own in theirs.items()
        if _compute_the_same(own, *_STEPS[name])
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
    """transformers' function of this rule, whose last state is copied to the first one's place."""
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
    """transformers' function of this step, which changes the state in place."""
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
    """transformers' function of this step, which changes the remembered inputs in place."""
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


def _compute_the_same(
    theirs: Callable[..., Any], step: Callable[..., Any], sample: Callable[[], dict[str, Tensor]]
) -> bool:
    """Whether a family's function differs from ours by roundings alone."""
    results = []
    for function in (inspect.unwrap(theirs), functools.partial(step, None)):
        arguments = sample()
        try:
            result = function(**arguments)
        except TypeError:  # it takes other arguments, or ours asks for it
            return False
        changed = [arguments[name] for name in ("state", "conv_state") if name in arguments]
        results.append(result if isinstance(result, tuple) else (result, *changed))
    return all(torch.allclose(*pair, rtol=1e-4, atol=1e-6) for pair in zip(*results, strict=True))


def _random() -> Callable[..., Tensor]:
    """Numbers of the type that states have, whatever torch's default is."""
    generator = torch.Generator("cpu").manual_seed(0)
    return functools.partial(torch.rand, generator=generator, dtype=torch.float32, device="cpu")


def _delta_sample(*, by_channel: bool) -> dict[str, Any]:
    """Arguments of ``_delta_rule``, with a key so short that it shows how its length is taken."""
    random = _random()
    shape = (2, 1, 3, 4)
    query, key, value = random(3, *shape)
    key[0] *= NORM_EPS**0.5
    return {
        **{"query": query, "key": key, "value": value, "initial_state": random(2, 3, 4, 4)},
        **{"g": -random(shape if by_channel else shape[:3]), "beta": random(shape[:3])},
        **{"output_final_state": True, "use_qk_l2norm_in_kernel": True},
    }


def _mamba2_sample() -> dict[str, Any]:
    """Arguments of ``_mamba2``."""
    random = _random()
    batch, heads, groups, dim, num_states = 2, 4, 2, 3, 8
    return {
        **{"state": random(batch, heads, dim, num_states), "hidden_states": random(2, heads, dim)},
        "dt": random(batch, heads, 1).expand(-1, -1, dim),
        "A": (-random(heads))[:, None, None].expand(-1, dim, num_states),
        **{"B": random(batch, groups, num_states), "C": random(batch, groups, num_states)},
        "D": random(heads)[:, None].expand(-1, dim),
        "dt_bias": random(heads)[:, None].expand(-1, dim),
        **{"dt_softplus": True, "z": random(batch, heads, dim)},
    }


def _conv_sample() -> dict[str, Any]:
    """Arguments of ``_causal_conv``."""
    random = _random()
    return {
        **{"hidden_states": random(2, 3, 1), "conv_state": random(2, 3, 4)},
        **{"weight": random(3, 4), "bias": random(3), "activation": "silu"},
    }


def _mamba2_scan(
    theirs: Callable[..., Any], hidden_states: Tensor, *args: Any, chunk_size: int, **options: Any
) -> Any:
    """transformers' function for several tokens, which takes the same result from any chunks.

    It computes every pair of positions of a chunk, and chunks that are not full as well.
    """
    if hidden_states.is_cpu:
        num_tokens = -(-hidden_states.shape[1] // SCAN_STEP) * SCAN_STEP
        chunk_size = min(chunk_size, SCAN_CHUNK, max(num_tokens, SCAN_STEP))
    return theirs(hidden_states, *args, chunk_size=chunk_size, **options)


_SCAN = "mamba2_chunk_scan"
_STEPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "torch_recurrent_gated_delta_rule": (
        _delta_rule,
        functools.partial(_delta_sample, by_channel=False),
    ),
    "recurrent_kimi_delta_attention": (
        _delta_rule,
        functools.partial(_delta_sample, by_channel=True),
    ),
    "mamba2_selective_state_update": (_mamba2, _mamba2_sample),
    "causal_conv1d_update": (_causal_conv, _conv_sample),
}
"""What stands for transformers' functions, by their names, and arguments to compare both with."""


def _are_packed(options: dict[str, Any]) -> bool:
    """Whether rows hold several sequences, which transformers' functions refuse."""
    return any(options.get(name) is not None for name in ("cu_seqlens", "seq_idx"))


def _can_change(state: Tensor, *parts: Tensor | None) -> bool:
    """Whether a recurrent state can be changed where it lies.

    Without our kernels MKL's products read it: their sums depend on how rows are aligned, and those
    of a sequence alone begin elsewhere than beside others, unless all begin at multiples of 16
    bytes.
    """
    return (
        state.dtype is torch.float32
        and state.shape[-1] % 4 == 0
        and _can_change_in_place(state, *parts)
    )


def _can_change_in_place(state: Tensor, *parts: Tensor | None) -> bool:
    """Whether a tensor on the CPU can be changed with nothing to be differentiated."""
    return (
        state.is_cpu
        and state.is_contiguous()
        and not needs_torch(state, *parts)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )
