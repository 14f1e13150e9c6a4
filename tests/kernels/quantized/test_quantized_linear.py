"""Products of quantised weights against fp64 products of their values, on every instruction set."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch
from guarded_memory import assert_runs
from quantized_matrices import (
    AWQ,
    FP8_BLOCK,
    FP8_CHANNEL,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    PUBLISHED,
    assert_right,
    every_format,
    random_matrix,
)

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.linear.quantized import values_of
from moe_runtime.kernels.quantized import CODES, SCALES, QuantizedMatrix, WeightFormat

ALL_CODES = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("codes", CODES)
def test_every_format_against_fp64(isa, codes, generator):
    """Rows that end within a block of 128 codes, within a group, and after an odd code."""
    kinds = [kind for kind in every_format() if kind.codes == codes]
    for kind, (num_rows, num_cols, x_rows) in product(kinds, ((5, 161, 2), (1, 296, 7))):
        weight = random_matrix(kind, num_rows, num_cols, generator)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert_right(weight, torch.randn(x_rows, num_cols, generator=generator).to(dtype))
            assert torch.equal(values_of(weight, dtype), weight.dequantize(dtype))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("num_rows", "num_cols"), [(1, 1), (33, 32), (5, 40), (130, 160), (3, 2880)]
)
def test_odd_sizes(isa, name, num_rows, num_cols, generator):
    weight = random_matrix(PUBLISHED[name], num_rows, num_cols, generator)
    bias = torch.randn(num_rows, generator=generator)
    assert_right(weight, torch.randn(3, num_cols, generator=generator).bfloat16(), bias)


@pytest.mark.parametrize("name", ["mxfp4", "awq", "fp8-block", "mxfp8", "int8", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_whatever_the_others_are(isa, library, name, dtype, generator):
    """One row alone, up to 17 and many together; few weight rows or all; any number of threads."""
    weight = random_matrix(PUBLISHED[name], 150, 272, generator)
    x_RK = torch.randn(100, 272, generator=generator).to(dtype)
    one_by_one = [quantized_linear(row, weight, impl="native") for row in x_RK.split(1)]
    expected = torch.cat(one_by_one)
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        for num_rows in (*range(1, 18), 40, 100):
            found = quantized_linear(x_RK[:num_rows], weight, impl="native")
            assert torch.equal(found, expected[:num_rows])


@pytest.mark.parametrize("group", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_that_are_read_as_they_lie(isa, group, scales, generator):
    """One row of x by many weight rows; with E8M0 of 0 and 255, and subnormal fp16.

    What lies between rows of scales is NaN.
    """
    kind = WeightFormat("e2m1", scales, group_cols=group)
    weight = random_matrix(kind, 301, 1072, generator)
    odd = torch.tensor([0, 255, 1, 130] if scales == "e8m0" else [0.0, 1e-7, -1.0, 448.0])
    stored = weight.scales if scales == "e8m0" else weight.scales.float()
    stored[3::37, ::5] = odd.to(stored.dtype)[torch.arange(len(stored[3::37]))[:, None] % 4]
    apart = torch.nn.functional.pad(stored, (0, 9), value=255 if scales == "e8m0" else torch.nan)
    weight = replace(weight, scales=apart.to(weight.scales.dtype)[:, : stored.shape[1]])
    x_RK = torch.randn(2, 1072, generator=generator).bfloat16()
    alone = quantized_linear(x_RK[:1], weight, impl="native")
    beside = quantized_linear(x_RK, weight, impl="native")[:1]
    assert torch.equal(alone.isnan(), beside.isnan())
    assert torch.equal(alone.nan_to_num(0), beside.nan_to_num(0))
    values_NK = weight.dequantize().double()
    assert torch.equal(alone[0].isnan(), values_NK.isnan().any(1))
    kept = ~alone[0].isnan()
    assert_right(replace(weight, codes=weight.codes[kept], scales=weight.scales[kept]), x_RK[:1])


@pytest.mark.parametrize("kind", [NVFP4, AWQ], ids=["nvfp4", "awq"])
def test_the_longest_rows(isa, kind, generator):
    """Numbers of their groups lie on a thread's stack."""
    weight = random_matrix(kind, 30, 2**17, generator)
    assert_right(weight, torch.randn(9, 2**17, generator=generator))


@pytest.mark.parametrize(
    "kind", [MXFP4, INT4, AWQ, FP8_CHANNEL], ids=["mxfp4", "int4", "awq", "fp8"]
)
def test_rows_at_any_distance(isa, kind, generator):
    """Gate and up in turn, as gpt-oss has them."""
    fused = random_matrix(kind, 50, 160, generator)
    x_RK = torch.randn(2, 160, generator=generator).bfloat16()
    both = quantized_linear(x_RK, fused, impl="native")
    for first in (0, 1):
        zeros = None if fused.zero_points is None else fused.zero_points[first::2]
        half = replace(
            fused, codes=fused.codes[first::2], scales=fused.scales[first::2], zero_points=zeros
        )
        assert torch.equal(quantized_linear(x_RK, half, impl="native"), both[:, first::2])
        assert torch.equal(values_of(half, torch.float32), fused.dequantize()[first::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_at_the_ends_of_their_range(isa, dtype):
    """2 ** -127 is subnormal in fp32, 254 is the largest, 255 is NaN: in its row alone.

    Rows behind them let scales be read where they lie.
    """
    codes = torch.full((104, 32), 0x22, dtype=torch.uint8)  # 64 times 1.0
    scales = torch.tensor([[0, 0], [254, 0], [127, 255], [127, 128]], dtype=torch.uint8)
    scales = torch.nn.functional.pad(scales, (0, 0, 0, 100), value=127)
    weight = QuantizedMatrix(MXFP4, 64, codes, scales)
    x_RK = torch.zeros(1, 64, dtype=dtype)
    x_RK[0, 3], x_RK[0, 40] = 0.5, 2.0
    expected = [0.5 * 2.0**-127 + 2 * 2.0**-127, 2.0**126, torch.nan, 0.5 + 4.0]
    found = quantized_linear(x_RK, weight, impl="native")[0, :4]
    of_ones = quantized_linear(torch.ones_like(x_RK), weight, impl="native")[0, :4]
    # fp32 holds the first exactly; bf16 rounds it to its own subnormals
    for values in (found, of_ones):
        assert torch.equal(values.isnan(), torch.tensor([False, False, True, False]))
    for value, wanted in zip(found.tolist(), expected, strict=True):
        assert value != value or abs(value - wanted) <= 2.0**-134
    assert torch.equal(
        values_of(weight, torch.float32).nan_to_num(7.0), weight.dequantize().nan_to_num(7.0)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("code", ["e2m1", "e4m3", "uint4", "uint8", "int8"])
def test_every_code_by_itself(isa, code, dtype):
    """x picks one column at a time: subnormal codes, NaN and both zeros come out as they are."""
    kind = WeightFormat(code, "f32", zero=8 if code == "uint4" else 0)  # type: ignore[arg-type]
    num_cols = 256 * 8 // kind.bits
    weight = QuantizedMatrix(kind, num_cols, ALL_CODES[None], torch.ones(1, 1))
    expected = weight.dequantize()[0]
    is_nan = expected.isnan()
    assert is_nan.sum() == (2 if code == "e4m3" else 0)
    found = quantized_linear(torch.eye(num_cols, dtype=dtype), weight, impl="native")[:, 0].float()
    # a NaN spreads through the row, so the others are looked at without it
    assert found.isnan().all() == is_nan.any()
    whole = QuantizedMatrix(
        kind, num_cols, torch.where(ALL_CODES & 0x7F == 0x7F, 0, ALL_CODES)[None], torch.ones(1, 1)
    )
    found = quantized_linear(torch.eye(num_cols, dtype=dtype), whole, impl="native")[:, 0].float()
    assert torch.equal(found, whole.dequantize()[0])
    written = values_of(weight, torch.float32)[0]
    assert torch.equal(written.isnan(), is_nan)
    assert torch.equal(written[~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))


@pytest.mark.parametrize("kind", [FP8_BLOCK, MXFP8, FP8_CHANNEL], ids=["block", "mx", "channel"])
def test_normal_fp8_codes_with_and_without_a_special_one_among_them(isa, kind):
    """Codes are decoded by another way where one of 64 is zero, subnormal or NaN."""
    magnitudes = ALL_CODES & 0x7F
    normal = ALL_CODES[(magnitudes >= 8) & (magnitudes < 0x7F)]
    codes_NK = normal[torch.arange(256) % len(normal)].repeat(65, 1)
    codes_NK[torch.arange(64), torch.arange(64)] = 0x81  # one row has none
    scales = torch.ones(kind.scales_shape(65, 256))
    scales = torch.full_like(scales, 127).byte() if kind.scales == "e8m0" else scales
    weight = QuantizedMatrix(kind, 256, codes_NK, scales.to(SCALES[kind.scales]))
    found = quantized_linear(torch.eye(256).bfloat16(), weight, impl="native")
    assert torch.equal(found.float(), weight.dequantize().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 8, 15, 16, 17, 255])
def test_zero_points_of_every_size(isa, zero, dtype, generator):
    weight = random_matrix(AWQ, 3, 300, generator)
    assert weight.zero_points is not None
    weight.zero_points[1] = zero
    assert_right(weight, torch.randn(2, 300, generator=generator).to(dtype))


@pytest.mark.parametrize("num_rows", [4, 7])
@pytest.mark.parametrize("zero", [17, 255])
def test_a_zero_point_beyond_the_table_changes_no_other_row(isa, num_rows, zero, generator):
    """One row of x, with which several weight rows are multiplied at a time."""
    x = torch.randn(1, 300, generator=generator).bfloat16()
    for place in range(num_rows):
        weight = random_matrix(AWQ, num_rows, 300, generator)
        assert weight.zero_points is not None
        weight.zero_points[place] = zero
        assert_right(weight, x)


def test_groups_that_no_vector_fits(isa, generator):
    for group in (1, 7, 24, 384):
        kind = WeightFormat("uint4", "f16", group_cols=group, zero=8)
        weight = random_matrix(kind, 4, 500, generator)
        assert_right(weight, torch.randn(3, 500, generator=generator).bfloat16())


def test_no_rows_and_bad_ones(library, generator):
    weight = random_matrix(FP8_BLOCK, 5, 40, generator)
    assert quantized_linear(torch.empty(0, 40), weight, impl="native").shape == (0, 5)
    with pytest.raises(ValueError, match="x must be"):
        quantized_linear(torch.empty(2, 41), weight, impl="native")
    with pytest.raises(ValueError, match="fp32, bf16 or fp16"):
        quantized_linear(torch.empty(2, 40, dtype=torch.float64), weight, impl="native")
    gaps = replace(weight, codes=torch.empty(5, 80, dtype=torch.uint8)[:, ::2])
    with pytest.raises(ValueError, match="without gaps"):
        quantized_linear(torch.empty(2, 40), gaps, impl="native")


@pytest.mark.parametrize("kind", [MXFP8, NVFP4, INT8], ids=["mxfp8", "nvfp4", "int8"])
def test_many_rows_take_the_values(library, kind, generator):
    weight = random_matrix(kind, 70, 96, generator)
    x_RK = torch.randn(200, 96, generator=generator)
    bias = torch.randn(70, generator=generator).bfloat16()
    exact = x_RK.double() @ weight.dequantize().double().T + bias.double()
    for impl in ("auto", "torch", "reference"):
        found = quantized_linear(x_RK, weight, bias, impl=impl)  # type: ignore[arg-type]
        assert (found - exact).norm() <= 200 * 2.0**-24 * exact.norm()


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="protects memory in the Unix way")
def test_nothing_is_read_beyond_codes_and_scales(library):
    """Codes, scales and zero points end where unreadable memory begins."""
    assert_runs("""
import torch
from dataclasses import replace
from guarded_memory import at_the_end
from quantized_matrices import PUBLISHED, random_matrix
from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.native import native_library

library = native_library()
generator = torch.Generator().manual_seed(7)
for isa in library.isas():
    library.select_isa(isa)
    for name, kind in PUBLISHED.items():
        for n, k, rows in ((5, 31, 1), (90, 130, 1), (33, 272, 13)):
            weight = random_matrix(kind, n, k, generator)
            x = torch.randn(rows, k, generator=generator).bfloat16()
            guarded = replace(weight, codes=at_the_end(weight.codes),
                              scales=at_the_end(weight.scales),
                              zero_points=at_the_end(weight.zero_points))
            expected = quantized_linear(x, weight, impl="native")
            found = quantized_linear(x, guarded, impl="native")
            assert torch.equal(found, expected), (isa, name, n, k, rows)
""")
