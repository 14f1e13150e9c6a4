"""Rows rounded to int8 before they are multiplied by integer codes: only where it is asked for."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from quantized_experts import assert_hidden_values_are_rounded_too, make_expert, run
from quantized_matrices import (
    BLOCK_FORMATS,
    FP8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    PUBLISHED,
    every_format,
    random_matrix,
)
from torch import Tensor

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.quantized import BLOCKS, QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.reference import int8_values


def rounding(kind: WeightFormat) -> WeightFormat:
    return replace(kind, int8_activations=True)


INTEGERS = {
    name: rounding(kind)
    for name, kind in (
        ("mxfp4", MXFP4),
        ("int4", INT4),
        ("awq", PUBLISHED["awq"]),
        ("int8", INT8),
    )
}
BLOCKED = {
    name: rounding(BLOCK_FORMATS[name])
    for name in sorted(BLOCKS)
    if BLOCK_FORMATS[name].takes_int8_activations
}
CODES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl"), slice(2, None)),
    **dict.fromkeys(("q4_1", "q5_1"), slice(4, None)),
    **dict.fromkeys(("q4_k", "q5_k"), slice(16, None)),
    **{"q2_k": slice(16, 80), "q3_k": slice(0, 96), "q6_k": slice(0, 192)},
    **{"iq4_xs": slice(8, None), "mxfp4_block": slice(1, None)},
}
"""The bytes of a block that are codes."""
LEAST = {"q8_0": 0x80, "mxfp4_block": 0xFF}
"""Bytes of the code whose value is furthest below zero; of others they are 0."""


def values_of(codes_NB: Tensor, name: str) -> Tensor:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.removesuffix("_block").upper()]
    return torch.from_numpy(gguf.dequantize(codes_NB.numpy(), kind).astype(np.float64))


def rounded_rows(x_RK: Tensor) -> Tensor:
    """The values of int8 codes of groups of 32: inverse, codes and scale as fp32 makes them."""
    padded = torch.nn.functional.pad(x_RK.float(), (0, -x_RK.shape[1] % 32))
    groups = padded.numpy().reshape(len(x_RK), -1, 32)
    largest = np.abs(groups).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups * inverse).astype(np.int64)
    scales = (largest / np.float32(127)).astype(np.float64)
    return torch.from_numpy((codes * scales).reshape(len(x_RK), -1))[:, : x_RK.shape[1]]


def assert_right(x_RK: Tensor, weight: QuantizedMatrix, impl: str = "native") -> None:
    """Against fp64 products of rounded rows.

    Sums of 16 or 32 products are exact integers. A term of the sum over groups is rounded with both
    scales, their product and the sum it joins. In blocks a minimum is added, by the scaled sum of
    the codes of x, and both are summed apart: with w the weight and m the minimum neither is more
    than |w| + |m|, and |m| at most the size of the least code (of signed ones of the table that is
    127 where 128 is subtracted).
    """
    name, num_sums = weight.format.codes, -(-x_RK.shape[1] // 32)
    if name in BLOCKS:
        least_NB = weight.codes.clone().view(-1, BLOCKS[name].num_bytes)
        least_NB[:, CODES[name]] = LEAST.get(name, 0)
        values, num_sums = values_of(weight.codes, name), 2 * num_sums
        minima = values_of(least_NB.view(weight.codes.shape), name).abs() * (128 / 127)
    else:
        values = weight.dequantize().double()
        minima = torch.zeros_like(values)
    rows = rounded_rows(x_RK)
    exact, size = rows @ values.T, rows.abs() @ (values.abs() + 2 * minima).T
    found = quantized_linear(x_RK, weight, impl=impl).double()  # type: ignore[arg-type]
    stored = torch.finfo(x_RK.dtype).eps / 2 * exact.abs()
    assert ((found - exact).abs() <= (num_sums + 12) * 2.0**-24 * size + stored).all()


def test_every_format_of_integers_against_fp64(isa, generator):
    """Rows that end within a step of 64 codes, within a group, and after an odd code."""
    kinds = [rounding(kind) for kind in every_format() if kind.takes_int8_activations]
    assert {kind.codes for kind in kinds} == {"e2m1", "uint4", "uint8", "int8"}
    for kind, (num_rows, num_cols, x_rows) in product(kinds, ((5, 161, 2), (33, 296, 7))):
        weight = random_matrix(kind, num_rows, num_cols, generator)
        for dtype in (torch.float32, torch.bfloat16):
            assert_right(torch.randn(x_rows, num_cols, generator=generator).to(dtype), weight)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", BLOCKED)
def test_blocks_against_fp64(isa, name, generator):
    """One row, a panel and several; a last step of one group and of an odd number of them."""
    num_codes = BLOCKS[name].num_codes
    for num_cols in (num_codes, 5 * num_codes, 2048 + 3 * num_codes):
        weight = random_matrix(BLOCKED[name], 19, num_cols, generator)
        for num_rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (14, torch.float32)):
            x_RK = torch.randn(num_rows, num_cols, generator=generator).to(dtype)
            assert_right(x_RK, weight)
        every_other = QuantizedMatrix(weight.format, num_cols, weight.codes[1::2])
        both = quantized_linear(x_RK, weight, impl="native")
        assert torch.equal(quantized_linear(x_RK, every_other, impl="native"), both[:, 1::2])


@pytest.mark.parametrize("kind", INTEGERS.values(), ids=INTEGERS)
@pytest.mark.parametrize(("num_rows", "num_cols"), [(1, 1), (130, 160), (3, 2880)])
def test_sizes_and_other_implementations(isa, kind, num_rows, num_cols, generator):
    weight = random_matrix(kind, num_rows, num_cols, generator)
    x_RK = torch.randn(70, num_cols, generator=generator)
    assert torch.equal(int8_values(x_RK), rounded_rows(x_RK).float())
    for impl in ("native", "reference"):
        assert_right(x_RK, weight, impl)
    # many rows too, which others multiply by values: the bits of the kernel
    assert torch.equal(
        quantized_linear(x_RK, weight), quantized_linear(x_RK, weight, impl="native")
    )


@pytest.mark.parametrize("name", [*INTEGERS, *BLOCKED])
def test_a_row_has_the_same_bits_whatever_the_others_are(isa, library, name, generator):
    weight = random_matrix((INTEGERS | BLOCKED)[name], 70, 768, generator)
    x_RK = torch.randn(40, 768, generator=generator).bfloat16()
    expected = torch.cat([quantized_linear(row, weight) for row in x_RK.split(1)])
    for num_threads, num_rows in ((1, 2), (3, 3), (1, 4), (3, 5), (1, 6), (3, 9), (1, 17), (3, 40)):
        library.set_num_threads(num_threads)
        assert torch.equal(quantized_linear(x_RK[:num_rows], weight), expected[:num_rows])


@pytest.mark.parametrize("kind", [INTEGERS["mxfp4"], BLOCKED["q4_k"]], ids=["mxfp4", "q4_k"])
def test_numbers_at_the_ends(isa, kind, generator):
    """A NaN or an infinity spoils its row alone; almost nothing is nothing; nothing overflows."""
    weight = random_matrix(kind, 9, 512, generator)
    x_RK = torch.randn(6, 512, generator=generator)
    x_RK[0, 3] = torch.nan
    x_RK[1, 300] = -torch.inf
    x_RK[2] = 0
    x_RK[3] *= 2.0**-110
    x_RK[4, :32] *= 2.0**100
    found = quantized_linear(x_RK, weight, impl="native")
    assert found[:2].isnan().all()
    assert (found[2:4] == 0).all()
    assert found[4:].isfinite().all()
    assert_right(x_RK[4:], weight)
    assert int8_values(x_RK)[0, 32:].isfinite().all()


def integers(kind: WeightFormat, code: int, zero: int | None = None) -> QuantizedMatrix:
    """256 columns of one code under scales of 1."""
    codes = torch.full((9, kind.row_bytes(256)), code, dtype=torch.uint8)
    groups = kind.scales_shape(9, 256)
    zeros = None if zero is None else torch.full(groups, zero, dtype=torch.uint8)
    return QuantizedMatrix(kind, 256, codes, torch.ones(groups), zeros)


def blocks(name: str, block: list[int]) -> QuantizedMatrix:
    codes = torch.tensor(block * (512 // BLOCKS[name].num_codes), dtype=torch.uint8)
    return QuantizedMatrix(BLOCKED[name], 512, codes.expand(9, -1).contiguous())


UINT4 = rounding(WeightFormat("uint4", "f32", group_cols=32, has_zero_points=True))


@pytest.mark.parametrize(
    ("weight", "value"),
    [
        (integers(UINT4, 0xFF, 0), 15),
        (integers(UINT4, 0, 16), -16),  # a zero point of 16, as in GPTQ's first version
        (integers(rounding(WeightFormat("int8", "f32")), 0x80), -128),
        (blocks("q8_0", [0x00, 0x3C, *[0x80] * 32]), -128),
        (blocks("q8_0", [0x00, 0x3C, *[0x7F] * 32]), 127),
        (blocks("iq4_nl", [0x00, 0x3C, *[0x00] * 16]), -127),
        (blocks("mxfp4_block", [127, *[0x77] * 16]), 6),
        (blocks("mxfp4_block", [127, *[0xFF] * 16]), -6),
        (blocks("q5_1", [0x00, 0x3C, 0, 0, *[0xFF] * 20]), 31),
        (blocks("q6_k", [*[0xFF] * 192, *[1] * 16, 0x00, 0x3C]), 31),
        (blocks("q6_k", [*[0x00] * 192, *[1] * 16, 0x00, 0x3C]), -32),
        (blocks("q6_k", [*[0x00] * 192, *[0xFF] * 16, 0x00, 0x3C]), 32),
    ],
    ids=lambda value: getattr(getattr(value, "format", None), "codes", value),
)
def test_the_largest_codes_are_summed_exactly(isa, weight, value):
    """By 127 in every place: pairs of the products just fit into 16 bits, or into 32."""
    for sign, num_rows in ((1.0, 1), (-1.0, 1), (-1.0, 5)):
        x_RK = torch.full((num_rows, weight.num_cols), 127 * sign)
        found = quantized_linear(x_RK, weight, impl="native")
        assert (found == value * 127 * weight.num_cols * sign).all()


EXPERTS = {
    **INTEGERS,
    "q8_0": BLOCKED["q8_0"],
    "three blocks": tuple(BLOCKED[name] for name in ("q4_1", "iq4_nl", "mxfp4_block")),
}


@pytest.mark.parametrize("kind", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("num_rows", [1, 9, 80])
def test_experts_round_their_hidden_values_too(isa, kind, num_rows, generator):
    weights = make_expert(kind, generator, bias_dtype=torch.bfloat16)
    x_TD, found = assert_hidden_values_are_rounded_too(weights, num_rows, generator)

    def exact(matrix: QuantizedMatrix) -> QuantizedMatrix:
        return replace(matrix, format=replace(matrix.format, int8_activations=False))

    matrices = [exact(getattr(weights, name)) for name in ("gate", "up", "down")]
    biases = [getattr(weights, f"{name}_bias") for name in ("gate", "up", "down")]
    assert not torch.equal(found, run(x_TD, type(weights)(*matrices, *biases)))


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
