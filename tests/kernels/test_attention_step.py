"""`attention_step` against fp64, and against its parts one by one."""

from typing import Any

import pytest
import torch
from attention_weights import DTYPES, LAYERS, make_layer, needs_native
from native_marks import NATIVE

from moe_runtime.kernels.decode_step.attention_step import (
    AttentionWeights,
    RowNorm,
    attention_step,
    attention_step_reference,
    attention_steps,
)
from moe_runtime.kernels.decode_step.rounded_rows import round_rows
from moe_runtime.kernels.decode_step.single_query_attention import single_query_attention
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.rms_norm import rms_norm


def make_inputs(
    layer: AttentionWeights,
    *,
    batch: int = 3,
    length: int = 9,
    turned: int = 14,
    rounds: bool = False,
) -> Any:
    """Arguments after the weights, with caches that are parts of larger ones."""
    generator = torch.Generator().manual_seed(length)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(layer.dtype)

    caches = []
    for dim in (layer.key_dim, layer.value_dim):
        cached = random(batch, layer.num_key_heads, length - 1, dim)
        room = torch.full((batch, layer.num_key_heads, length + 4, dim), torch.nan)
        room = room.to(layer.dtype)
        if rounds:
            cached, room = round_rows(cached), round_rows(room)
        room[:, :, : length - 1] = cached
        caches.append(room[:, :, :length])
    mask = torch.randn(batch, length, generator=generator)
    mask[:, 1:2] = torch.finfo(torch.float32).min
    angles = random(batch, turned), random(batch, turned)
    return random(batch, layer.qkv.shape[1]), *angles, *caches, mask


def call(layer: AttentionWeights, inputs: Any, impl: Any, **changes: Any) -> Any:
    x, *rest = inputs
    rest: Any = [None if part is None else part.clone() for part in rest]
    return attention_step(x, layer, *rest, impl=impl, **changes), rest[2], rest[3]


def one_by_one(layer: AttentionWeights, inputs: Any) -> Any:
    """The step as a model writes it, by the native kernels where there are any."""
    x, cos, sin, keys, values, mask = (part.clone() for part in inputs)
    batch, turned = len(x), cos.shape[1]
    qkv = linear(x, layer.qkv, layer.qkv_bias, impl="native")
    sizes = [layer.num_queries, layer.num_keys, layer.num_key_heads * layer.value_dim]
    query, key, value = qkv.split(sizes, dim=1)

    def heads(part, norm, dim):
        part = part.contiguous()
        if norm is not None:
            rows = part.view(batch, -1, len(norm.weight))
            part = rms_norm(rows, norm.weight, norm.eps, impl="native")
        return part.reshape(batch, -1, dim)

    if layer.pairs_share:
        cos, sin, turned = torch.cat((cos, cos), 1), torch.cat((sin, sin), 1), 2 * turned

    def turn(part):
        some, rest = part[..., :turned], part[..., turned:]
        half = turned // 2
        crossed = torch.cat((-some[..., half:], some[..., :half]), dim=-1)
        return torch.cat((some * cos[:, None] + crossed * sin[:, None], rest), dim=-1)

    key = turn(heads(key, layer.k_norm, layer.key_dim))
    value = heads(value, None, layer.value_dim)
    if keys.dtype is torch.uint8:
        key, value = round_rows(key), round_rows(value)
    keys[:, :, -1], values[:, :, -1] = key, value
    query = turn(heads(query, layer.q_norm, layer.key_dim))
    mixed = single_query_attention(
        query, keys, values, mask, layer.scale, layer.sinks, impl="native"
    )
    out = linear(mixed.flatten(1), layer.output, layer.output_bias, impl="native")
    return out, keys, values


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYERS)
def test_the_bits_are_those_of_the_parts(kind, dtype):
    options = dict(LAYERS[kind])
    turned = options.pop("turned", 14)
    layer = make_layer(dtype, **options)
    inputs = make_inputs(layer, turned=turned)
    for got, expected in zip(call(layer, inputs, "native"), one_by_one(layer, inputs), strict=True):
        assert torch.equal(got, expected)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["norm of all heads", "sinks"])
def test_a_token_is_rounded_into_its_place(kind, dtype):
    layer = make_layer(dtype, **{**LAYERS[kind], "key_dim": 64, "value_dim": 32})
    inputs = make_inputs(layer, rounds=True)
    native = call(layer, inputs, "native")
    for got, expected in zip(native, one_by_one(layer, inputs), strict=True):
        assert torch.equal(got, expected)
    # sums in another order may round a value to the next code
    assert (native[0] - call(layer, inputs, "reference")[0]).float().abs().max() < 0.05


@pytest.mark.parametrize("impl", [NATIVE, "reference"])
@pytest.mark.parametrize("kind", LAYERS)
def test_fp32_against_fp64(kind, impl):
    options = dict(LAYERS[kind])
    turned = options.pop("turned", 14)
    layer, exact = (make_layer(dtype, **options) for dtype in (torch.float32, torch.float64))
    inputs = make_inputs(layer, turned=turned)
    x, cos, sin, keys, values, mask = (part.double() for part in inputs)
    out = attention_step_reference(x, exact, cos, sin, keys, values, mask.float())
    expected = out, keys, values
    for got, wanted in zip(call(layer, inputs, impl), expected, strict=True):
        # sums of up to 56 products of order one, four stages one after another
        bound = 4 * 56 * torch.finfo(torch.float32).eps * wanted.abs().max()
        assert (got.double() - wanted).abs().max() <= bound


def test_a_sequence_does_not_depend_on_the_others_or_on_threads(library):
    layer = make_layer(torch.bfloat16, key_heads=2, norm="head")
    inputs = make_inputs(layer)
    together = call(layer, inputs, "native")
    library.set_num_threads(1)
    for b in range(3):
        alone = call(layer, [part[b : b + 1] for part in inputs], "native")
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_caches_of_their_own_lengths_are_gone_through_one_by_one(dtype):
    """By one call of the kernel, and in fp64 by torch."""
    layer = make_layer(dtype, key_heads=2, norm="head")
    alone, parts = [], []
    for length in (5, 1, 9):
        *given, _ = make_inputs(layer, length=length, batch=1)
        alone.append(call(layer, (*given, None), "auto"))
        parts.append(given)
    x, cos, sin, keys, values = zip(*parts, strict=True)
    cached = list(zip(keys, values, strict=True))
    out = attention_steps(torch.cat(x), layer, torch.cat(cos), torch.cat(sin), cached)
    for row, (expected, *places) in enumerate(alone):
        assert torch.equal(out[row : row + 1], expected)
        assert all(map(torch.equal, cached[row], places))


@needs_native
def test_angles_of_one_position_serve_all_sequences_and_a_mask_may_be_missing():
    layer = make_layer(torch.float32)
    x, cos, sin, keys, values, _ = make_inputs(layer, length=1)
    shared = call(layer, (x, cos[:1], sin[:1], keys, values, None), "native")
    repeated = (cos[:1].repeat(3, 1), sin[:1].repeat(3, 1))
    for one, other in zip(
        shared, call(layer, (x, *repeated, keys, values, None), "native"), strict=True
    ):
        assert torch.equal(one, other)


def test_what_native_cannot_take_is_refused_by_name_and_computed_by_auto():
    layer = make_layer(torch.float64)
    inputs = make_inputs(layer)
    assert torch.equal(call(layer, inputs, "auto")[0], call(layer, inputs, "reference")[0])
    if native_library() is not None:
        with pytest.raises(ValueError, match="cannot compute this"):
            call(layer, inputs, "native")
        few = make_layer(torch.float32)
        with pytest.raises(ValueError, match="1 to 512 sequences"):
            call(few, [part[:0] for part in make_inputs(few)], "native")


def test_a_gradient_goes_through_torch():
    layer = make_layer(torch.float32)
    x, *rest = make_inputs(layer)
    x.requires_grad_()
    attention_step(x, layer, *rest).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("number", "wrong", "message"),
    [
        (0, torch.zeros(3, 4), r"x must be \[B, 33\]"),
        (1, torch.zeros(3, 13), "even number"),
        (1, torch.zeros(3, 16), "cos and sin must be"),
        (3, torch.zeros(3, 4, 0, 14), "place for the new token"),
        (3, torch.zeros(2, 4, 9, 14), r"key and value must be \[3, 4, S, 14\]"),
        (4, torch.zeros(3, 3, 9, 14), "key and value must be"),
        (5, torch.zeros(3, 8), r"mask must be fp32 \[3, 9\]"),
    ],
)
def test_what_does_not_fit(number, wrong, message):
    layer = make_layer(torch.float32)
    inputs = list(make_inputs(layer))
    inputs[number] = wrong
    with pytest.raises(ValueError, match=message):
        call(layer, inputs, "auto")


def test_angles_of_another_number_of_sequences_and_an_unknown_impl():
    layer = make_layer(torch.float32)
    x, cos, sin, *rest = make_inputs(layer)
    with pytest.raises(ValueError, match="of 1 or 3 sequences"):
        call(layer, (x, cos[:2], sin[:2], *rest), "auto")
    with pytest.raises(ValueError, match="impl must be"):
        call(layer, (x, cos, sin, *rest), "cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": torch.zeros(5, 33)}, "qkv must be"),
        ({"output": torch.zeros(33, 5)}, "output must be"),
        ({"qkv_bias": torch.zeros(5)}, "qkv_bias must be"),
        ({"q_norm": RowNorm(torch.zeros(5), 1e-5)}, "the weight of q_norm must be"),
        ({"sinks": torch.zeros(5)}, "sinks must be"),
        ({"num_key_heads": 3}, "key heads that divide them"),
        ({"output": torch.zeros(33, 56, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_weights_that_do_not_belong_together(change, message):
    layer = make_layer(torch.float32)
    names = ("qkv", "output", "num_heads", "num_key_heads", "key_dim", "value_dim", "scale")
    with pytest.raises(ValueError, match=message):
        AttentionWeights(**{name: getattr(layer, name) for name in names} | change)
