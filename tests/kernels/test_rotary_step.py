"""`rotary_step`: the Triton kernel against the specification, and that against transformers."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as of_a_part
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as of_pairs
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb as of_all

from moe_runtime.kernels.decode_step.rotary_step import RowNorm, rotary_step
from moe_runtime.kernels.rms_norm import FORMS, NormForm

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
    """Queries, and the cache afterwards."""
    given = {name: moved(value) for name, value in given.items()}
    with torch.no_grad():
        query = rotary_step(**given, impl="triton", **options)
    return [part.cpu() for part in (query, *given["cache"])]


def reference(given: Any, **options: Any) -> list[Tensor]:
    given = given | {"cache": tuple(part.clone() for part in given["cache"])}
    return [rotary_step(**given, impl="reference", **options), *given["cache"]]


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
def test_turning_has_the_bits_of_the_specification(dtype, sizes, pairs_share):
    given = draw(sizes, dtype, None)
    for angles in (given["angles"], tuple(part[:1] for part in given["angles"])):
        given["angles"] = angles
        found = triton(given, pairs_share=pairs_share)
        for ours, expected in zip(found, reference(given, pairs_share=pairs_share), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    assert not found[1][:, :, sizes.places // 2].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_norms_are_those_of_rms_norm(dtype, form, is_whole):
    # a row longer than the values that are summed at a time
    sizes = Sizes(batch=2, heads=33, key_heads=3, dim=40, num_angles=20)
    given = draw(sizes, dtype, form, is_whole=is_whole)
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
    found = reference(given, pairs_share=pairs_share)
    assert torch.equal(found[0], query)
    assert torch.equal(found[1][:, :, 4:5], key)
    assert torch.equal(found[2][:, :, 4:5], value)
    assert found[1].isnan().sum() == 8 * key.numel()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_sequence_has_a_place_of_its_own(dtype):
    given = draw(Sizes(batch=3, value_dim=10), dtype, "rounded")
    places = [7, 0, 8]
    together = triton(given | {"place": torch.tensor(places)})
    exact = reference(given | {"place": torch.tensor(places)})
    for row, place in enumerate(places):
        alone = triton(given | {"place": torch.tensor(place)})
        for ours, expected, own in zip(together, exact, alone, strict=True):
            torch.testing.assert_close(ours[row], own[row], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(ours[row].isnan(), expected[row].isnan())
    strided = torch.tensor([[7, 1], [0, 1], [8, 1]])[:, 0]
    for ours, expected in zip(triton(given | {"place": strided}), together, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)
    query, keys, _ = triton(given | {"place": torch.tensor([7, 9, -1])})
    assert [row.isnan().all().item() for row in query] == [False, True, True]
    assert [row.isnan().all().item() for row in keys] == [False, True, True]


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_a_place_is_moved_on_once_everybody_has_read_it(impl, batch):
    drawn = draw(Sizes(batch), torch.bfloat16, "rounded")
    given, own = ({name: moved(value) for name, value in drawn.items()} for _ in range(2))
    arrivals = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        for place in range(4, 11):  # the last two are behind the end
            if impl == "reference" and place > 8:
                break
            found = rotary_step(**given, arrivals=arrivals, impl=impl)
            assert given["place"] == place + 1
            assert arrivals == 0
            expected = rotary_step(
                **(own | {"place": torch.tensor(place, device=DEVICE)}), impl=impl
            )
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    for ours, theirs in zip(given["cache"], own["cache"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_a_place_behind_the_end_leaves_the_cache_alone_and_shows():
    given = draw(Sizes(batch=2), torch.float32, "rounded")
    for place in (9, -1, 2**40):
        query, keys, values = triton(given | {"place": torch.tensor(place)})
        assert all(part.isnan().all() for part in (query, keys, values))
        assert keys.shape == (2, 2, 9, 16)


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
        ("arrivals", torch.zeros(1), r"arrivals must be int32 \[1\] on cpu, .* got torch.float32"),
        ("arrivals", torch.zeros(2, dtype=torch.int32), r"got torch.int32 \[2\] on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary_step(**(given | {name: bad}))
    given = {name: moved(value) for name, value in given.items()}
    with pytest.raises(ValueError, match="a contiguous cache, without gradients"):
        rotary_step(**given, impl="triton")
