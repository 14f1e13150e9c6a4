"""`single_query_attention` against fp64."""

import pytest
import torch
from native_marks import needs_native
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_runtime.kernels.decode_step.rounded_rows import GROUP, round_rows, widen_rows
from moe_runtime.kernels.decode_step.single_query_attention import (
    native_attention,
    single_query_attention,
    single_query_attention_reference,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(dtype, *, batch=2, heads=6, groups=3, length=131, dim=20, width=33):
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(batch, heads, dim, generator=generator) * 2
    key = torch.randn(batch, groups, length, dim, generator=generator)
    value = torch.randn(batch, groups, length, width, generator=generator)
    mask = torch.randn(batch, length, generator=generator)
    mask[:, ::3] = torch.finfo(torch.float32).min
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def bound(dtype, value):
    # an average of values: one rounding to the type; scores of about 20 in fp32, twice rounded by
    # the exponential, move a weight by 20 + 2 units
    return (torch.finfo(dtype).eps / 2 + 50 * torch.finfo(torch.float32).eps) * value.abs().max()


@needs_native
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [{}, {"length": 1}, {"length": 64}, {"groups": 6}, {"groups": 1, "dim": 128, "width": 128}],
)
def test_against_fp64(sizes, dtype, masked):
    query, key, value, mask = operands(dtype, **sizes)
    added = mask if masked else None
    got = single_query_attention(query, key, value, added, 0.3, impl="native")
    wide = (query.double(), key.double(), value.double())
    exact = single_query_attention_reference(*wide, added, 0.3)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= bound(dtype, value)


@needs_native
@pytest.mark.parametrize("sinks_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_against_fp64(dtype, sinks_dtype):
    """As large as the scores, far above and far below them; one more logit whose weight is left."""
    query, key, value, mask = operands(dtype)
    sinks = torch.tensor([0.0, 5.0, 60.0, -60.0, 1e4, -1e4]).to(sinks_dtype)
    got = single_query_attention(query, key, value, mask, 0.3, sinks, impl="native")
    scores = 0.3 * query.double().unflatten(1, (3, 2)) @ key.double().transpose(-1, -2)
    scores = (scores + mask.double()[:, None, None]).flatten(1, 2)
    logits = torch.cat((scores, sinks.double().view(-1, 1).expand(2, 6, 1)), dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :-1]
    exact = (weights.unflatten(1, (3, 2)) @ value.double()).flatten(1, 2)
    assert (got.double() - exact).abs().max() <= bound(dtype, value)
    reference = single_query_attention(query, key, value, mask, 0.3, sinks, impl="reference")
    assert (reference.double() - exact).abs().max() <= bound(dtype, value)
    none = single_query_attention(query, key, value, mask, 0.3, impl="native")
    assert torch.equal(got[:, 5], none[:, 5])
    # the kernel's exponential ends at exp(-87)
    assert got[:, 4].abs().max() < 131 * 2e-38 * value.float().abs().max()


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("groups", "heads", "length", "dim", "width"),
    [(2, 2, 1, 32, 64), (1, 3, 131, 96, 32), (2, 10, 66, 64, 64), (1, 19, 5, 32, 96)],
)
def test_rounded_keys_and_values_against_fp64(dtype, groups, heads, length, dim, width):
    sizes = {"groups": groups, "heads": heads, "length": length, "dim": dim, "width": width}
    query, key, value, mask = operands(dtype, **sizes)
    rows = [
        torch.full((2, groups, 150, w // 32 * 34), 255, dtype=torch.uint8) for w in (dim, width)
    ]
    for room, tensor in zip(rows, (key, value), strict=True):
        room[:, :, :length] = round_rows(tensor)
    key_rows, value_rows = (room[:, :, :length] for room in rows)
    got = single_query_attention(query, key_rows, value_rows, mask, 0.3, impl="native")
    wide = [widen_rows(room, torch.float64) for room in (key_rows, value_rows)]
    exact = single_query_attention_reference(query.double(), *wide, mask, 0.3)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= bound(dtype, value)
    # one of several heads has its bits whatever the others are; one that is left over has others
    few = [
        t[:, : heads // groups] if t is query else t[:, :1] for t in (query, key_rows, value_rows)
    ]
    for rows_of_x in {2, 3, heads // groups} - {1} if heads > groups else ():
        some = single_query_attention(few[0][:, :rows_of_x], *few[1:], mask, 0.3, impl="native")
        assert torch.equal(some, got[:, :rows_of_x])


def test_rounding_keeps_every_value_within_half_a_scale():
    x = (
        torch.randn(3, 7, 96, generator=torch.Generator().manual_seed(1))
        * torch.logspace(-3, 4, 7)[:, None]
    )
    x[0, 0, :GROUP] = 0
    found = widen_rows(round_rows(x), torch.float64)
    most = x.double().unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True)
    scale = most / 127 * (1 + 2.0**-11)
    assert (
        (found - x.double()).unflatten(-1, (-1, GROUP)).abs() <= 0.5001 * scale + 2.0**-25
    ).all()
    largest = widen_rows(round_rows(torch.full((1, 1, GROUP), 1e30)), torch.float32)
    assert (largest == 127 * 65504.0).all()  # what codes can say at most, and no NaN


@needs_native
def test_where_everything_is_masked_a_sink_takes_all():
    query, key, value, mask = operands(torch.float32)
    mask[1] = torch.finfo(torch.float32).min
    got = single_query_attention(query, key, value, mask, 0.3, torch.zeros(6), impl="native")
    assert got[1].abs().max() < 131 * 2e-38 * value.abs().max()
    assert got[0].abs().max() > 0.1


def test_caches_with_room_behind_them_and_many_threads_change_no_bit(library):
    query, key, value, mask = operands(torch.bfloat16)
    expected = single_query_attention(query, key, value, mask, 0.3, impl="native")
    roomy = [torch.full((2, 3, 200, t.shape[-1]), float("nan")).to(t.dtype) for t in (key, value)]
    for room, tensor in zip(roomy, (key, value), strict=True):
        room[:, :, :131] = tensor
    library.set_num_threads(3)
    views = (room[:, :, :131] for room in roomy)
    assert torch.equal(single_query_attention(query, *views, mask, 0.3, impl="native"), expected)


@needs_native
def test_scores_beyond_the_range_of_exponentials():
    query, key, value, _ = operands(torch.float32)
    got = single_query_attention(query * 1e4, key, value, None, 1.0, impl="native")
    wide = (query.double() * 1e4, key.double(), value.double())
    # one weight is 1 and the others vanish
    assert torch.allclose(got.double(), single_query_attention_reference(*wide, None, 1.0))


def test_a_gradient_goes_through_torch():
    query, key, value, _ = operands(torch.float32)
    query.requires_grad_()
    single_query_attention(query, key, value, None, 1.0).sum().backward()
    assert query.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 4}, "key heads that divide them"), ({"length": 0}, "key heads that divide them")],
)
def test_sizes_that_cannot_be(change, message):
    query, key, value, _ = operands(torch.float32, **change)
    with pytest.raises(ValueError, match=message):
        single_query_attention(query, key, value, None, 1.0)


def test_what_does_not_fit():
    query, key, value, mask = operands(torch.float32)
    for arguments, message in [
        ((query[0], key, value, None), r"expected query \[B, H, D\]"),
        ((query, key[:, :, :, :3], value, None), "key and value must be"),
        ((query, key, value, mask.double()), "mask must be fp32"),
    ]:
        with pytest.raises(ValueError, match=message):
            single_query_attention(*arguments, 1.0)
    with pytest.raises(ValueError, match=r"sinks must be \[6\]"):
        single_query_attention(query, key, value, mask, 1.0, torch.zeros(3))
    with pytest.raises(ValueError, match="impl must be"):
        single_query_attention(query, key, value, None, 1.0, impl="cuda")  # type: ignore[arg-type]


@needs_native
def test_fake_rounded_caches_are_left_to_the_reference():
    query, cached = torch.randn(1, 2, GROUP), round_rows(torch.randn(1, 2, 3, GROUP))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(cached)
        assert native_attention(query, fake, fake, None, 1.0) is None
