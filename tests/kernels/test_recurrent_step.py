"""`delta_rule_step` and `conv_step`: each implementation against fp64, and the same bits always."""

import itertools
from typing import Any, cast

import pytest
import torch
from native_marks import NATIVE
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_runtime.kernels.decode_step.recurrent_step import conv_step, delta_rule_step
from moe_runtime.kernels.native import native_library

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.fixture(params=["reference", NATIVE])
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


def delta_inputs(
    batch: int, heads: int, groups: int, keys: int, values: int, decays: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """State, query, key, value, log_decay, beta."""
    torch.manual_seed(0)
    query, key = (torch.randn(2, batch, groups, keys) / keys**0.5).to(dtype)
    value, beta = torch.randn(batch, heads, values).to(dtype), torch.rand(batch, heads).to(dtype)
    state, decay = torch.randn(batch, heads, keys, values), -torch.rand(batch, heads, decays)
    return state, query, key, value, decay, beta


@pytest.mark.parametrize("unit_eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "values"),
    [(1, 1, 1, 7), (3, 4, 2, 64), (2, 3, 3, 45), (0, 2, 1, 8)],
)
def test_delta_rule_against_fp64(batch, heads, groups, values, by_channel, dtype, unit_eps, impl):
    keys, scale = 13, 0.3
    decays = keys if by_channel else 1
    inputs = delta_inputs(batch, heads, groups, keys, values, decays, dtype)
    state, query, key, value, decay, beta = inputs
    exact, size = state.double(), state.abs().double()
    out = torch.empty(batch, heads, values).double()
    out_size = torch.empty_like(out)
    for row, head in itertools.product(range(batch), range(heads)):
        group = head // (heads // groups)
        q, k = query[row, group].double(), key[row, group].double()
        if unit_eps is not None:
            q, k = (x / (x.square().sum() + unit_eps).sqrt() for x in (q, k))
        q = q * scale
        factor = decay[row, head].double().exp().reshape(-1, 1)
        old, old_size = factor * exact[row, head], factor * size[row, head]
        learnt = beta[row, head].double() * (value[row, head].double() - k @ old)
        learnt_size = beta[row, head] * (value[row, head].double().abs() + k.abs() @ old_size)
        exact[row, head] = old + torch.outer(k, learnt)
        size[row, head] = old_size + torch.outer(k.abs(), learnt_size)
        out[row, head], out_size[row, head] = q @ exact[row, head], q.abs() @ size[row, head]
    found = delta_rule_step(*inputs, scale=scale, unit_eps=unit_eps, impl=impl)
    # a sum over the key's width within another, a sum of squares within, and single operations
    roundings = 3 * keys + 12
    assert ((state - exact).abs() <= roundings * EPS[torch.float32] * size).all()
    assert ((found - out).abs() <= roundings * EPS[torch.float32] * out_size).all()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    ("batch", "channels", "width", "taps"),
    [(1, 5, 4, 4), (2, 2500, 4, 4), (3, 7, 3, 4), (2, 6, 5, 2), (1, 3, 1, 1), (0, 4, 4, 4)],
)
def test_conv_against_fp64(batch, channels, width, taps, dtype, with_bias, impl):
    torch.manual_seed(0)
    state, x = torch.randn(batch, channels, width).to(dtype), torch.randn(batch, channels).to(dtype)
    weight = torch.randn(channels, taps).to(dtype)
    bias = torch.randn(channels).to(dtype) if with_bias else None
    inputs = torch.cat((state, x[..., None]), -1)
    terms = inputs[..., -taps:].double() * weight.double()
    shift = 0 if bias is None else bias.double()
    exact, size = terms.sum(-1) + shift, terms.abs().sum(-1) + abs(shift)
    found = conv_step(state, x, weight, bias, impl=impl)
    assert found.dtype is dtype
    bound = (taps + 1) * EPS[torch.float32] * size + EPS[dtype] * exact.abs()
    least = torch.finfo(dtype).smallest_normal * EPS[dtype]
    assert ((found - exact).abs() <= bound + least).all()
    assert torch.equal(state, inputs[..., 1:])


def test_a_sequence_has_the_same_bits_alone_beside_others_and_with_any_threads(library):
    batch = 5
    inputs = delta_inputs(batch, 6, 3, 20, 45, 1, torch.bfloat16)
    conv = (torch.randn(batch, 2500, 4), torch.randn(batch, 2500), torch.randn(2500, 4))
    runs: list[tuple[Tensor, ...]] = []
    for count in (1, 3):
        library.set_num_threads(count)
        states = inputs[0].clone(), conv[0].clone()
        out = delta_rule_step(states[0], *inputs[1:], unit_eps=1e-6, impl="native")
        mixed = conv_step(states[1], *conv[1:], impl="native")
        runs.append((out, mixed, *states))
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    out, mixed, *states = runs[0]
    for row in range(batch):
        own = slice(row, row + 1)
        state, parts = inputs[0][own].clone(), [part[own] for part in inputs[1:]]
        assert torch.equal(delta_rule_step(state, *parts, unit_eps=1e-6), out[own])
        assert torch.equal(state, states[0][own])
        state = conv[0][own].clone()
        assert torch.equal(conv_step(state, conv[1][own], conv[2]), mixed[own])
        assert torch.equal(state, states[1][own])


def test_what_does_not_fit_is_named_and_nothing_changes():
    state, *parts = delta_inputs(2, 4, 2, 8, 8, 1, torch.float32)
    kept = state.clone()
    query, key, value, decay, beta = parts
    wrong: dict[str, tuple[Tensor, ...]] = {
        "G a divisor of H": (state, query[:, :0], key, value, decay, beta),
        "expected query and key": (state, query, key[..., :3], value, decay, beta),
        "one dtype": (state, query, key.half(), value, decay, beta),
        "expected value": (state, query, key, value[:1], decay, beta),
        "expected log_decay": (state, query, key, value, decay[..., :0], beta),
        "must be fp32": (state.double(), query, key, value, decay, beta),
        "no gaps": (state.transpose(2, 3), query, key, value, decay, beta),
    }
    for words, arguments in wrong.items():
        with pytest.raises(ValueError, match=words):
            delta_rule_step(*arguments)
    with pytest.raises(ValueError, match="impl must be one of"):
        delta_rule_step(state, *parts, impl=cast(Any, "fast"))
    conv, x, taps = torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(3, 4)
    for words, others in {
        "expected state": (x[:, :2], taps, None),
        "expected taps": (x, torch.zeros(3, 6), None),
        "expected bias": (x, taps, taps),
        "one dtype": (x, taps.half(), None),
    }.items():
        with pytest.raises(ValueError, match=words):
            conv_step(conv, *others)
    with pytest.raises(ValueError, match="no gaps"):
        conv_step(torch.zeros(2, 4, 3).transpose(1, 2), x, taps)
    assert torch.equal(state, kept)


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_graph_that_needs_the_old_state_is_refused(impl):
    """As torch does when one of its own operations has changed it."""
    state, *parts = delta_inputs(1, 2, 2, 4, 4, 1, torch.float32)
    conv = torch.rand(1, 3, 4)
    factor = torch.ones((), requires_grad=True)
    losses = ((state * factor).sum(), (conv * factor).sum())
    with torch.no_grad():
        delta_rule_step(state, *parts, impl=impl)
        conv_step(conv, torch.rand(1, 3), torch.rand(3, 4), impl=impl)
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        assert delta_rule_step(state.clone(), *parts, impl=impl).shape == (1, 2, 4)


def test_fake_tensors_take_the_reference():
    with FakeTensorMode():
        found = conv_step(torch.empty(1, 3, 4), torch.empty(1, 3), torch.empty(3, 4))
        state, query, values = torch.empty(1, 2, 4, 4), torch.empty(1, 2, 4), torch.empty(1, 2, 4)
        gates = torch.empty(1, 2)
        mixed = delta_rule_step(state, query, query, values, gates[..., None], gates)
    assert (found.shape, mixed.shape) == ((1, 3), (1, 2, 4))


@pytest.mark.parametrize(("keys", "values"), [(0, 4), (4, 0), (8193, 1), (1, 8193)])
def test_widths_that_the_kernel_does_not_know(keys, values):
    state, query, key, *rest = delta_inputs(1, 1, 1, max(keys, 1), values, 1, torch.float32)
    state, query, key = state[:, :, :keys].contiguous(), query[..., :keys], key[..., :keys]
    if native_library() is not None:
        with pytest.raises(ValueError, match="keys and values of 1 to 8192"):
            delta_rule_step(state, query, key, *rest, impl="native")
    found = delta_rule_step(state.clone(), query, key, *rest)
    assert torch.equal(found, delta_rule_step(state, query, key, *rest, impl="reference"))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_gradients_are_refused(impl):
    state, *parts = delta_inputs(1, 2, 2, 4, 4, 1, torch.float32)
    parts[0].requires_grad_()
    with pytest.raises(ValueError, match="no gradients"):
        delta_rule_step(state, *parts, impl=impl)
    with torch.no_grad():
        delta_rule_step(state, *parts, impl=impl)
    taps = torch.zeros(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no gradients"):
        conv_step(torch.zeros(2, 3, 4), torch.zeros(2, 3), taps, impl=impl)
