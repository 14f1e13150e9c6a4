"""`split_attention`: the Triton kernel against the specification, and that against transformers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as of_a_part
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as of_pairs
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb as of_all

from moe_runtime.kernels.decode_step.split_attention import (
    RowNorm,
    split_attention,
    turned_step,
)
from moe_runtime.kernels.rms_norm import FORMS, NormForm

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = {"scale": 0.3}


class Sizes(NamedTuple):
    """Sequences, heads of queries and of keys, widths of both and of values, angles, places."""

    batch: int = 1
    heads: int = 4
    key_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    num_angles: int = 16
    places: int = 9


def draw(sizes: Sizes, dtype: torch.dtype, form: NormForm | None, *, is_whole: bool = False) -> Any:
    """The operands, on the CPU; the cache is poison."""
    generator = torch.Generator().manual_seed(sum(sizes))
    b, h, g, d, v, r, s = sizes

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    widths = (h * d, g * d) if is_whole else (d, d)
    return {
        "qkv": (random(b, h * d), random(b, g * d), random(b, g * v)),
        "angles": (random(b, r), random(b, r)),
        "cache": tuple(torch.full((b, g, s, n), torch.nan, dtype=dtype) for n in (d, v)),
        "place": torch.tensor(s // 2),
        "norms": tuple(None if form is None else RowNorm(random(n), 1e-5, form) for n in widths),
    }


def moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(DEVICE).clone()
    if isinstance(value, RowNorm):
        return value._replace(weight=moved(value.weight))
    return tuple(map(moved, value)) if isinstance(value, tuple) else value


def triton(given: Any, **options: Any) -> list[Tensor]:
    """The output, and the cache afterwards."""
    given = {name: moved(value) for name, value in given.items()}
    options = {name: moved(value) for name, value in options.items()}
    with torch.no_grad():
        out = split_attention(**given, impl="triton", **(SCALE | options))
    return [part.cpu() for part in (out, *given["cache"])]


def reference(given: Any, **options: Any) -> list[Tensor]:
    given = given | {"cache": tuple(part.clone() for part in given["cache"])}
    return [split_attention(**given, impl="reference", **(SCALE | options)), *given["cache"]]


def turned(given: Any, **options: Any) -> list[Tensor]:
    cache = tuple(part.clone() for part in given["cache"])
    return [turned_step(**(given | {"cache": cache}), **options), *cache]


def assert_attends_as(found: list[Tensor], expected: list[Tensor]) -> None:
    """Both caches in the same bits; sums in other orders, of weights rounded to the type."""
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    eps = torch.finfo(found[0].dtype).eps
    magnitude = expected[2].nan_to_num().abs().amax(dim=(1, 2, 3)).double()[:, None, None]
    allowed = 4 * max(eps, 2.0**-18) * (magnitude + 1)
    assert found[0].dtype == expected[0].dtype
    assert ((found[0].double() - expected[0].double()).abs() <= allowed).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "pairs_share"),
    [
        (Sizes(), False),
        (Sizes(batch=16, heads=1, key_heads=1, dim=6, value_dim=10, num_angles=6, places=1), False),
        (Sizes(batch=3, heads=6, key_heads=3, dim=24, value_dim=7, num_angles=10), False),
        (Sizes(batch=2, dim=12, num_angles=6), True),
        (Sizes(heads=5, key_heads=5, dim=34, num_angles=3, places=33), True),
    ],
)
def test_the_first_token_of_a_cache(dtype, sizes, pairs_share):
    """It sees itself alone, whatever else the cache holds; its key is turned in the same bits."""
    given = draw(sizes, dtype, None)
    for angles in (given["angles"], tuple(part[:1] for part in given["angles"])):
        given |= {"angles": angles, "place": torch.tensor(0)}
        found = triton(given, pairs_share=pairs_share)
        assert_attends_as(found, reference(given, pairs_share=pairs_share))
    assert not found[1][:, :, 0].isnan().any()
    assert found[1][:, :, 1:].isnan().all()


def filled(sizes: Sizes, dtype: torch.dtype, places: Sequence[int]) -> Any:
    """As `draw`, for places of each sequence, and what lies before them in the cache."""
    given = draw(sizes, dtype, None)
    generator = torch.Generator().manual_seed(7)
    for part in given["cache"]:
        for row, place in zip(part, places, strict=True):
            row[:, :place] = torch.randn(row[:, :place].shape, generator=generator).to(dtype)
    return given | {"place": torch.tensor(places)}


LONG = Sizes(batch=3, heads=6, key_heads=2, dim=10, value_dim=14, num_angles=10, places=200)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_in_parts_that_are_not_full(dtype):
    """Four parts, of which sequences use one, two and all; masks of both kinds, sinks, windows."""
    generator = torch.Generator().manual_seed(3)
    given = filled(LONG, dtype, [199, 63, 64])
    shown = torch.rand(3, 200, generator=generator) < 0.7
    shown[:, 190:] = True
    hidden = torch.zeros(3, 400).masked_fill(~shown.repeat_interleave(2, 1), -torch.inf)[:, ::2]
    added = torch.randn(3, 200, generator=generator).to(dtype)
    sinks = torch.randn(6, generator=generator)
    for options in (
        {},
        {"mask_BS": shown},
        {"mask_BS": hidden, "sinks_H": sinks},
        {"mask_BS": added, "window": 70},
        {"window": 1},
        {"sinks_H": sinks.to(dtype), "window": 130, "mask_BS": shown},
    ):
        assert_attends_as(triton(given, **options), reference(given, **options))


def test_what_a_mask_hides_may_be_anything():
    """In the cache, and the token's own."""
    generator = torch.Generator().manual_seed(5)
    given = filled(LONG, torch.bfloat16, [199, 63, 64])
    shown = torch.rand(3, 200, generator=generator) < 0.7
    shown[torch.arange(3), given["place"]] = torch.tensor([True, False, False])
    for part in given["cache"]:
        part.masked_fill_(~shown[:, None, :, None], torch.nan)
    given["qkv"][2][1:] = torch.nan
    hidden = torch.zeros(3, 200).masked_fill(~shown, -torch.inf)
    for mask in (shown, hidden):
        found, expected = triton(given, mask_BS=mask), reference(given, mask_BS=mask)
        assert expected[0].isfinite().all()
        assert expected[0].any()
        assert found[0].isfinite().all()
        magnitude = expected[2].nan_to_num().abs().max()
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=float(magnitude / 32))


def test_who_sees_nothing_gets_nothing():
    given = filled(LONG, torch.float32, [199, 63, 64])
    for mask in (torch.zeros(3, 200, dtype=torch.bool), torch.full((3, 200), -torch.inf)):
        found, expected = triton(given, mask_BS=mask), reference(given, mask_BS=mask)
        assert not expected[0].any()
        assert torch.equal(found[0], expected[0])
        # all weight is that of the sinks
        assert not triton(given, mask_BS=mask, sinks_H=torch.ones(6))[0].any()


def test_the_bits_of_a_sequence_are_its_own():
    """Whatever others lie beside it, and whatever the parts that come first."""
    given = filled(LONG, torch.bfloat16, [199, 63, 130])
    together = triton(given)[0]
    for row in range(3):
        alone = {
            "qkv": tuple(part[row : row + 1] for part in given["qkv"]),
            "angles": tuple(part[row : row + 1] for part in given["angles"]),
            "cache": tuple(part[row : row + 1] for part in given["cache"]),
            "place": given["place"][row],
            "norms": given["norms"],
        }
        assert torch.equal(triton(alone)[0][0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_norms_are_those_of_rms_norm(dtype, form, is_whole):
    # a row longer than the values that are summed at a time
    sizes = Sizes(batch=2, heads=33, key_heads=3, dim=40, num_angles=20)
    given = draw(sizes, dtype, form, is_whole=is_whole) | {"place": torch.tensor(0)}
    found, exact = triton(given), reference(given)
    for ours, expected in zip(found[1:], exact[1:], strict=True):
        assert torch.equal(ours.isnan(), expected.isnan())
    # a sum in another order may move each rounding of the norm to the next number, and with it what
    # is made of two of them: of numbers below 16 in the norm, angles below 4 and their products
    kind = torch.finfo(dtype)
    torch.testing.assert_close(
        torch.cat([part.nan_to_num().flatten().double() for part in found]),
        torch.cat([part.nan_to_num().flatten().double() for part in exact]),
        rtol=8 * kind.eps, atol=64 * kind.eps,
    )  # fmt: skip
    pairs = zip(found, exact, strict=True)
    is_equal = torch.cat([(one == other)[~one.isnan()] for one, other in pairs])
    assert is_equal.float().mean() > 0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("turn", "num_angles", "pairs_share"),
    [(of_all, 16, False), (of_a_part, 6, False), (of_pairs, 8, True)],
)
def test_the_specification_has_the_bits_of_transformers(dtype, turn, num_angles, pairs_share):
    sizes = Sizes(batch=3, num_angles=num_angles)
    given = draw(sizes, dtype, None)
    query, key, value = (row.view(3, 1, -1, 16).transpose(1, 2) for row in given["qkv"])
    angles = (part[:, None] for part in given["angles"])
    query, key = turn(query, key, *angles)
    found = turned(given, pairs_share=pairs_share)
    assert torch.equal(found[0], query)
    assert torch.equal(found[1][:, :, 4:5], key)
    assert torch.equal(found[2][:, :, 4:5], value)
    assert found[1].isnan().sum() == 8 * key.numel()


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(("batch", "places"), [(0, 9), (1, 130), (3, 9)])
def test_a_place_is_moved_on_once_everybody_has_read_it(impl, batch, places):
    first = places - 5
    drawn = filled(Sizes(batch, places=places), torch.bfloat16, [first] * batch)
    drawn["place"] = torch.tensor(first)
    given, own = ({name: moved(value) for name, value in drawn.items()} for _ in range(2))
    counters = torch.zeros(1 + batch * 2, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        for place in range(first, places + 2):  # the last two are behind the end
            if impl == "reference" and place >= places:
                break
            found = split_attention(**given, **SCALE, counters=counters, impl=impl)
            assert given["place"] == place + 1
            assert not counters.any()
            at = torch.tensor(place, device=DEVICE)
            expected = split_attention(**(own | {"place": at}), **SCALE, impl=impl)
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    for ours, theirs in zip(given["cache"], own["cache"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_place_behind_the_end_leaves_the_cache_alone_and_shows():
    given = draw(Sizes(batch=2), torch.float32, "rounded")
    for place in (9, -1, 2**40):
        out, keys, values = triton(given | {"place": torch.tensor(place)})
        assert all(part.isnan().all() for part in (out, keys, values))
    strided = torch.tensor([[0, 1], [9, 1]])[:, 0]
    out, keys, _ = triton(given | {"place": strided})
    for part in (out, keys[:, :, :1]):
        assert [row.isnan().all().item() for row in part] == [False, True]


def test_what_does_not_fit_is_refused():
    given = draw(Sizes(batch=2), torch.float32, "rounded", is_whole=True)
    query, key, value = given["qkv"]
    for name, bad, message in (
        ("qkv", (query[:, 1:], key, value), r"queries must be \[2, H \* 16\], H a multiple of 2"),
        ("qkv", (query, key[:1], value), r"keys must be \[2, 32\], got \[1, 32\]"),
        ("qkv", (query, key.double(), value), "every tensor must be torch.float32 on cpu like"),
        ("angles", tuple(part[:, :7] for part in given["angles"]), "an even number of up to 16"),
        ("angles", (given["angles"][0], key), r"must be \[1, R\] or \[2, R\]"),
        ("norms", (RowNorm(key[0, :3], 1e-5), None), r"norm of queries must be \[16\] or \[64\]"),
        ("place", torch.zeros(2), r"place must be one int64 on cpu or \[2\], got torch.float32"),
        ("place", torch.zeros(1, dtype=torch.int64), r"or \[2\], got torch.int64 \[1\]"),
        ("counters", torch.zeros(5), r"counters must be int32 \[5\] on cpu, got torch.float32"),
        ("counters", torch.zeros(2, dtype=torch.int32), r"got torch.int32 \[2\] on cpu"),
        ("mask_BS", torch.zeros(2, 8), r"the mask must be \[2, 9\], got \[2, 8\]"),
        ("mask_BS", torch.zeros(2, 9, dtype=torch.int64), "bool or floating-point, got torch.int"),
        ("sinks_H", torch.zeros(3), r"sinks must be \[4\], got \[3\]"),
        ("window", -1, "at least one token, or is 0 for all, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            split_attention(**(given | SCALE | {name: bad}))
    given = {name: moved(value) for name, value in given.items()}
    with pytest.raises(ValueError, match="a contiguous cache, without gradients"):
        split_attention(**given, **SCALE, impl="triton")
