"""`latent_attention` against fp64, where keys and values are expanded."""

import pytest
import torch
from native_marks import needs_native

from moe_runtime.kernels.decode_step.latent_attention import Tokens, latent_attention
from moe_runtime.kernels.native import native_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [
    {},
    {"lengths": (1,), "heads": 1},
    {"lengths": (513, 1, 1024, 2), "heads": 20, "rank": 40, "value_dim": 70},
    {"rank": 33, "turned_dim": 7, "key_dim": 9, "value_dim": 11, "heads": 5},
    {"turned_dim": 0},
]


def operands(
    dtype, *, lengths=(131, 7, 600), heads=3, rank=64, key_dim=16, turned_dim=8, value_dim=24
):
    generator = torch.Generator().manual_seed(rank)

    def random(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    query = random(len(lengths), heads, key_dim + turned_dim, scale=2)
    weight = random(heads, key_dim + value_dim, rank, scale=rank**-0.5)
    tokens = []
    for length in lengths:
        mask = torch.randn(length, generator=generator)
        mask[1::3] = torch.finfo(torch.float32).min
        mask = mask if length % 2 else None
        tokens.append(Tokens(random(length, rank), random(length, turned_dim), mask))
    return query, tokens, weight


def in_fp64(query, tokens, weight, scale):
    wide = [Tokens(t.latents.double(), t.turned.double(), t.mask) for t in tokens]
    return latent_attention(query.double(), wide, weight.double(), scale, impl="reference")


@needs_native
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(isa, dtype, sizes):
    query, tokens, weight = operands(dtype, **sizes)
    got = latent_attention(query, tokens, weight, 0.3, impl="native")
    exact = in_fp64(query, tokens, weight, 0.3)
    values = torch.cat([t.latents for t in tokens]).double() @ weight.double().mT
    # an average of values, rounded to the type once; scores of about 20 and values of sums of
    # `rank` products in fp32, whose errors are far below the square root of the terms' number
    bound = torch.finfo(dtype).eps / 2 + 100 * torch.finfo(torch.float32).eps
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= bound * values.abs().max()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_others_nor_threads_nor_room_behind_tokens_change_a_bit(isa, library, dtype):
    query, tokens, weight = operands(dtype, heads=13, lengths=(131, 7, 600, 131, 40))
    library.set_num_threads(1)
    expected = torch.cat(
        [
            latent_attention(query[i : i + 1], tokens[i : i + 1], weight, 0.3, impl="native")
            for i in range(len(tokens))
        ]
    )
    roomy = []
    for latents, turned, mask in tokens:
        rooms = [
            torch.full((len(p) + 9, p.shape[1] + 3), torch.nan).to(dtype) for p in (latents, turned)
        ]
        views = [r[: len(p), : p.shape[1]] for r, p in zip(rooms, (latents, turned), strict=True)]
        for view, part in zip(views, (latents, turned), strict=True):
            view.copy_(part)
        roomy.append(Tokens(*views, mask))
    for num_threads in (1, 3, 16):
        library.set_num_threads(num_threads)
        assert torch.equal(latent_attention(query, roomy, weight, 0.3, impl="native"), expected)


def test_a_gradient_goes_through_torch():
    query, tokens, weight = operands(torch.float32)
    weight.requires_grad_()
    latent_attention(query, tokens, weight, 1.0).sum().backward()
    assert weight.grad is not None
    if native_library() is not None:
        with pytest.raises(ValueError, match="no backward pass"):
            latent_attention(query, tokens, weight, 1.0, impl="native")


def test_what_does_not_fit():
    query, tokens, weight = operands(torch.float32)
    latents, turned, mask = tokens[0]
    for arguments, message in [
        ((query[:2], tokens, weight), "tokens of as many"),
        ((query[:0], [], weight), "B at least 1"),
        ((query, tokens, weight[:2]), "must be of 3 heads, got 2"),
        ((query[:1], [Tokens(latents[:0], turned[:0])], weight), "latents and turned must be"),
        ((query[:1], [Tokens(latents, turned[:5])], weight), "latents and turned must be"),
        ((query[:1], [Tokens(latents, latents)], weight), "does not fit 64 turned ones"),
        ((query[:1], [Tokens(latents, turned, mask[:5])], weight), r"mask must be \[131\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            latent_attention(*arguments, 1.0)
    with pytest.raises(ValueError, match="impl must be"):
        latent_attention(query, tokens, weight, 1.0, impl="cuda")
