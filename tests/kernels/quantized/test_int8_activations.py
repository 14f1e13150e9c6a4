"""Rows rounded to int8 before they are multiplied by integer codes: only where it is asked for."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from quantized_experts import assert_hidden_values_are_rounded_too, make_expert, run
from quantized_matrices import FP8_BLOCK, INT4, INT8, MXFP4, PUBLISHED, every_format, random_matrix

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.reference import int8_values

KINDS = {"mxfp4": MXFP4, "int4": INT4, "awq": PUBLISHED["awq"], "int8": INT8}


def rounding(kind: WeightFormat) -> WeightFormat:
    return replace(kind, int8_activations=True)


def assert_right(x_RK: torch.Tensor, weight: QuantizedMatrix, impl: str = "native") -> None:
    """Against fp64 products of the rounded rows.

    Sums of 32 products are exact integers. A term of the sum over groups is rounded with both
    scales, their product and the sum it joins; lanes and halves are added at the end.
    """
    num_groups = -(-x_RK.shape[1] // 32)
    values, rows = weight.dequantize().double(), int8_values(x_RK).double()
    exact, size = rows @ values.T, rows.abs() @ values.abs().T
    found = quantized_linear(x_RK, weight, impl=impl).double()  # type: ignore[arg-type]
    stored = torch.finfo(x_RK.dtype).eps / 2 * exact.abs()
    assert ((found - exact).abs() <= (num_groups + 12) * 2.0**-24 * size + stored).all()


def test_every_format_that_takes_them_against_fp64(isa, generator):
    """Rows that end within a step of 64 codes, within a group, and after an odd code."""
    kinds = [rounding(kind) for kind in every_format() if kind.takes_int8_activations]
    assert {kind.codes for kind in kinds} == {"e2m1", "uint4", "uint8", "int8"}
    for kind, (num_rows, num_cols, x_rows) in product(kinds, ((5, 161, 2), (33, 296, 7))):
        weight = random_matrix(kind, num_rows, num_cols, generator)
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(torch.randn(x_rows, num_cols, generator=generator).to(dtype), weight)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (130, 160), (3, 2880)])
def test_sizes_and_other_implementations(isa, kind, num_rows, num_cols, generator):
    weight = random_matrix(rounding(kind), num_rows, num_cols, generator)
    x_RK = torch.randn(70, num_cols, generator=generator)
    for impl in ("native", "reference"):
        assert_right(x_RK, weight, impl)
    # many rows too, which others multiply by values: the bits of the kernel
    assert torch.equal(
        quantized_linear(x_RK, weight), quantized_linear(x_RK, weight, impl="native")
    )


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_row_has_the_same_bits_whatever_the_others_are(isa, library, kind, generator):
    weight = random_matrix(rounding(kind), 150, 272, generator)
    x_RK = torch.randn(200, 272, generator=generator).bfloat16()
    expected = torch.cat([quantized_linear(row, weight) for row in x_RK.split(1)])
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        for num_rows in (*range(1, 10), 17, 40, 200):
            assert torch.equal(quantized_linear(x_RK[:num_rows], weight), expected[:num_rows])


def test_numbers_at_the_ends(isa, generator):
    """A NaN or an infinity spoils its row alone; almost nothing is nothing; nothing overflows."""
    weight = random_matrix(rounding(MXFP4), 9, 96, generator)
    x_RK = torch.randn(6, 96, generator=generator)
    x_RK[0, 3] = torch.nan
    x_RK[1, 40] = -torch.inf
    x_RK[2] = 0
    x_RK[3] *= 2.0**-110
    x_RK[4, :32] *= 2.0**100
    found = quantized_linear(x_RK, weight, impl="native")
    assert found[:2].isnan().all()
    assert (found[2:4] == 0).all()
    assert found[4:].isfinite().all()
    assert_right(x_RK[4:], weight)
    assert int8_values(x_RK)[0, 32:].isfinite().all()


def test_the_largest_products_of_int4_are_summed_exactly(isa):
    """15 and -16, a zero point of 16 that GPTQ's first version has, by 127 in every place."""
    kind = rounding(WeightFormat("uint4", "f32", group_cols=32, has_zero_points=True))
    for code, zero in ((15, 0), (0, 16)):
        codes = torch.full((9, 128), code * 17, dtype=torch.uint8)
        zeros = torch.full((9, 8), zero, dtype=torch.uint8)
        weight = QuantizedMatrix(kind, 256, codes, torch.ones(9, 8), zeros)
        for sign in (1.0, -1.0):
            found = quantized_linear(torch.full((5, 256), 127 * sign), weight, impl="native")
            assert (found == (code - zero) * 127 * 256 * sign).all()


def test_the_largest_products_of_int8_are_summed_exactly(isa):
    """-128 by -127 in every place: pairs of them just fit into 16 bits."""
    kind = rounding(WeightFormat("int8", "f32"))
    codes = torch.full((4, 256), -128, dtype=torch.int8).view(torch.uint8)
    weight = QuantizedMatrix(kind, 256, codes, torch.ones(4, 1))
    for sign in (1.0, -1.0):
        found = quantized_linear(torch.full((5, 256), 127 * sign), weight, impl="native")
        assert (found == -128 * 127 * 256 * sign).all()


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("num_rows", [1, 9, 80])
def test_experts_round_their_hidden_values_too(isa, kind, num_rows, generator):
    weights = make_expert(rounding(kind), generator, bias_dtype=torch.bfloat16)
    x_TD, found = assert_hidden_values_are_rounded_too(weights, num_rows, generator)
    assert not torch.equal(found, run(x_TD, make_exact(weights)))


def make_exact(weights):
    def exact(matrix):
        return replace(matrix, format=replace(matrix.format, int8_activations=False))

    matrices = {name: exact(getattr(weights, name)) for name in ("gate", "up", "down")}
    biases = {f"{name}_bias": getattr(weights, f"{name}_bias") for name in matrices}
    return type(weights)(**matrices, **biases)


@pytest.mark.parametrize(
    "kind",
    [
        FP8_BLOCK,
        PUBLISHED["nvfp4"],
        WeightFormat("uint8", "f32", group_cols=32, has_zero_points=True),
    ],
)
def test_formats_that_do_not_take_them_are_refused(kind):
    assert not kind.takes_int8_activations
    with pytest.raises(ValueError, match="rounded to int8 for blocks, and for e2m1 and integers"):
        rounding(kind)
