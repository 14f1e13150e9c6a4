"""`attention_heads` against fp64, and against its parts one by one."""

import itertools
from typing import Any

import pytest
import torch
from attention_weights import DTYPES, LAYERS, make_layer, needs_native

from moe_runtime.kernels.decode_step.attention_step import (
    AttentionWeights,
    RowNorm,
    attention_heads,
    heads_reference,
    rotated,
)
from moe_runtime.kernels.rms_norm import rms_norm

KINDS = ("plain", "grouped", "norm of a head", "norm of all heads", "angles of some pairs")


def make(
    kind: str, dtype: torch.dtype, *, batch: int, tokens: int, shared: bool
) -> tuple[AttentionWeights, Any]:
    """A layer, and queries, keys and angles, some of them parts of larger tensors."""
    options = dict(LAYERS[kind])
    turned = options.pop("turned", 10)
    layer = make_layer(dtype, **options)
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    both = random(batch, tokens, layer.num_queries + layer.num_keys)
    query, key = both.split([layer.num_queries, layer.num_keys], dim=-1)
    cos, sin = (random(1 if shared else batch, tokens, turned) for _ in "cs")
    return query, key, layer, cos, sin


def one_by_one(layer: AttentionWeights, values: torch.Tensor, norm: RowNorm | None, angles: Any):
    """Heads of queries or of keys, by the native norm and torch's operations."""
    batch, tokens, width = values.shape
    if norm is not None:
        groups = values.reshape(batch, tokens, -1, len(norm.weight))
        values = rms_norm(groups, norm.weight, norm.eps, impl="native").reshape(values.shape)
    if layer.pairs_share:
        angles = [torch.cat((part, part), -1) for part in angles]
    rows = [part.expand(batch, -1, -1).flatten(0, 1) for part in angles]
    heads = rotated(values.reshape(batch * tokens, width // layer.key_dim, layer.key_dim), *rows)
    return heads.unflatten(0, (batch, tokens)).transpose(1, 2)


@needs_native
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 7), (3, 21)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_parts(kind, dtype, sizes, shared):
    inputs = make(kind, dtype, batch=sizes[0], tokens=sizes[1], shared=shared)
    query, key, layer, *angles = inputs
    with torch.inference_mode():
        found = attention_heads(*inputs)
    pairs = ((query, layer.q_norm), (key, layer.k_norm))
    for got, (values, norm) in zip(found, pairs, strict=True):
        assert torch.equal(got, one_by_one(layer, values, norm, angles))


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_against_fp64(kind):
    query, key, layer, cos, sin = make(kind, torch.float32, batch=2, tokens=5, shared=False)
    options = {name: value for name, value in LAYERS[kind].items() if name != "turned"}
    wide = make_layer(torch.float64, **options)
    expected = heads_reference(query.double(), key.double(), wide, cos.double(), sin.double())
    for way in (attention_heads, heads_reference):
        for got, wanted in zip(way(query, key, layer, cos, sin), expected, strict=True):
            # a mean of at most 56 squares, a root, and two products of order one
            bound = (56 + 8) * torch.finfo(torch.float32).eps * wanted.abs().max()
            assert (got.double() - wanted).abs().max() <= bound


def test_a_row_does_not_depend_on_the_others_or_on_threads(library):
    inputs = make("norm of a head", torch.bfloat16, batch=2, tokens=9, shared=False)
    query, key, layer, cos, sin = inputs
    with torch.inference_mode():
        together = attention_heads(*inputs)
        library.set_num_threads(1)
        for b, t in itertools.product(range(2), range(9)):
            q, k, c, s = (part[b : b + 1, t : t + 1] for part in (query, key, cos, sin))
            for one, all_ in zip(attention_heads(q, k, layer, c, s), together, strict=True):
                assert torch.equal(one[0, :, 0], all_[b, :, t])


def test_gradients_are_those_of_the_reference():
    inputs = make("norm of all heads", torch.float32, batch=1, tokens=3, shared=True)
    gradients = []
    for way in (attention_heads, heads_reference):
        query, key = (part.clone().requires_grad_() for part in inputs[:2])
        outs = way(query, key, *inputs[2:])
        (outs[0].square().sum() + outs[1].sum()).backward()
        gradients.append((query.grad, key.grad))
    for got, wanted in zip(*gradients, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("change", ["width", "tokens", "angles"])
def test_shapes_that_do_not_fit_are_refused(change):
    query, key, layer, cos, sin = make("plain", torch.float32, batch=2, tokens=3, shared=True)
    if change == "width":
        query = query[..., 1:]
    elif change == "tokens":
        key = key[:, 1:]
    else:
        cos, sin = cos[..., 1:], sin[..., 1:]
    with pytest.raises(ValueError, match="expected queries"):
        attention_heads(query, key, layer, cos, sin)
