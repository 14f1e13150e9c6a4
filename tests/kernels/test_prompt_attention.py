"""`prompt_attention` against fp64."""

import pytest
import torch
from native_marks import needs_native

from moe_runtime.kernels.decode_step.prompt_attention import (
    Sight,
    prompt_attention,
    prompt_attention_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype, *, batch=2, heads=6, groups=3, queries=37, length=150, dim=20, width=33):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, heads, queries, dim, generator=generator) * 2
    key = torch.randn(batch, groups, length, dim, generator=generator)
    value = torch.randn(batch, groups, length, width, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def exact(query, key, value, sight, scale, sinks=None):
    """Softmax over the keys that each query sees, one after another."""
    shared, places = (
        query.shape[1] // key.shape[1],
        range(sight.place, query.shape[2] + sight.place),
    )
    keys, values = (part.double().repeat_interleave(shared, 1) for part in (key, value))
    mixed = []
    for number, place in enumerate(places):
        first = 0 if sight.window is None else max(0, place - sight.window + 1)
        seen = slice(first, min(place + 1, key.shape[2]))
        logits = scale * (keys[:, :, seen] @ query[:, :, number].double().unsqueeze(-1)).squeeze(-1)
        if sinks is not None:
            own = sinks.double().view(-1, 1).expand(*logits.shape[:2], 1)
            logits = torch.cat((logits, own), -1)
        weights = torch.softmax(logits, -1)[..., : keys[:, :, seen].shape[2]]
        mixed.append(torch.einsum("bhs,bhsv->bhv", weights, values[:, :, seen]))
    return torch.stack(mixed, 1)


def bound(dtype, value):
    # an average of values, rounded to the type; weights in bf16 are rounded before their product;
    # scores of about 20 in fp32, twice rounded by the exponential, move a weight by 20 + 2 units
    roundings = 1 if dtype == torch.bfloat16 else 0.5
    error = roundings * torch.finfo(dtype).eps + 50 * torch.finfo(torch.float32).eps
    return error * value.abs().max()


SIGHTS = [
    Sight(0),
    Sight(113),
    Sight(113, 1),
    Sight(20, 29),
    Sight(149),
    Sight(100, 128),
    Sight(0, 500),
]


@needs_native
@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(dtype, sight):
    query, key, value = operands(dtype)
    got = prompt_attention(query, key, value, sight, 0.3, impl="native")
    assert got.dtype == dtype
    expected = exact(query, key, value, sight, 0.3)
    assert (got.double() - expected).abs().max() <= bound(dtype, value)
    reference = prompt_attention(query, key, value, sight, 0.3, impl="reference")
    assert (reference.double() - expected).abs().max() <= bound(dtype, value)


SIZES = [
    {"heads": 16, "groups": 1, "dim": 64, "width": 64, "batch": 1},
    {"heads": 2, "groups": 2, "dim": 192, "width": 128, "queries": 5, "batch": 1},
    {"heads": 1, "groups": 1, "queries": 131, "length": 131, "dim": 1, "width": 1},
    {"queries": 1, "length": 1},
    {"heads": 3, "queries": 400, "length": 401, "dim": 7, "width": 31, "batch": 1},
]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes, dtype):
    query, key, value = operands(dtype, **sizes)
    sight = Sight(key.shape[2] - query.shape[2], 77)
    got = prompt_attention(query, key, value, sight, 0.3, impl="native")
    expected = exact(query, key, value, sight, 0.3)
    assert (got.double() - expected).abs().max() <= bound(dtype, value)


@needs_native
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(dtype, window):
    """As large as the scores, far above and far below them."""
    query, key, value = operands(dtype)
    sinks = torch.tensor([0.0, 5.0, 60.0, -60.0, 1e4, -1e4]).to(dtype)
    sight = Sight(113, window)
    got = prompt_attention(query, key, value, sight, 0.3, sinks, impl="native")
    expected = exact(query, key, value, sight, 0.3, sinks)
    assert (got.double() - expected).abs().max() <= bound(dtype, value)
    none = prompt_attention(query, key, value, sight, 0.3, impl="native")
    assert torch.equal(got[:, :, 5], none[:, :, 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_a_prompt_and_many_threads_change_no_bit(dtype, library):
    """Nor do views of caches with room behind them."""
    query, key, value = operands(dtype, queries=150)
    sinks = torch.randn(6)
    for window in (None, 60):
        sight = Sight(0, window)
        library.set_num_threads(1)
        expected = prompt_attention(query, key, value, sight, 0.3, sinks, impl="native")
        library.set_num_threads(3)
        found, first = [], 0
        for count in (1, 64, 5, 80):
            end = first + count
            rooms = [
                torch.full((2, 3, 200, t.shape[-1]), float("nan")).to(dtype) for t in (key, value)
            ]
            for room, tensor in zip(rooms, (key, value), strict=True):
                room[:, :, :end] = tensor[:, :, :end]
            views = (room[:, :, :end] for room in rooms)
            some = query[:, :, first:end]
            found.append(
                prompt_attention(some, *views, Sight(first, window), 0.3, sinks, impl="native")
            )
            first = end
        assert torch.equal(torch.cat(found, 1), expected)


@needs_native
def test_scores_beyond_the_range_of_exponentials_and_numbers_that_are_none():
    query, key, value = operands(torch.float32)
    got = prompt_attention(query * 1e4, key, value, Sight(113), 1.0, impl="native")
    # one weight is 1 and the others vanish
    expected = prompt_attention_reference(
        query.double() * 1e4, key.double(), value.double(), Sight(113), 1.0
    )
    assert torch.allclose(got.double(), expected)
    query[0, 2, 7, 3] = float("nan")
    got = prompt_attention(query, key, value, Sight(113), 1.0, impl="native")
    assert got[0, 7, 2].isnan().all()
    assert got.isnan().sum() == got.shape[-1]


def test_a_gradient_goes_through_torch():
    query, key, value = operands(torch.float32)
    query.requires_grad_()
    prompt_attention(query, key, value, Sight(113), 1.0).sum().backward()
    assert query.grad is not None


def test_what_does_not_fit():
    query, key, value = operands(torch.float32)
    for arguments, message in [
        ((query[0], key, value, Sight(0)), r"expected query \[B, H, Q, D\]"),
        ((query, key[:, :, :, :3], value, Sight(0)), "key and value must be"),
        ((query[:, :4], key, value, Sight(0)), "key heads that divide them"),
        ((query, key, value, Sight(-1)), "place must be at least 0"),
        ((query, key, value, Sight(0, 0)), "window at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            prompt_attention(*arguments, 1.0)
    with pytest.raises(ValueError, match=r"sinks must be \[6\]"):
        prompt_attention(query, key, value, Sight(0), 1.0, torch.zeros(3))
    with pytest.raises(ValueError, match="impl must be"):
        prompt_attention(query, key, value, Sight(0), 1.0, impl="cuda")  # type: ignore[arg-type]
