"""Rows rounded to int8 by blocks of GGUF files, against the values that `gguf` gives them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from quantized_experts import assert_hidden_values_are_rounded_too, make_expert
from quantized_matrices import BLOCK_FORMATS, random_matrix
from torch import Tensor

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.quantized import BLOCKS, QuantizedMatrix, WeightFormat

gguf = pytest.importorskip("gguf")
NAMES = [name for name in sorted(BLOCKS) if BLOCK_FORMATS[name].takes_int8_activations]
ROUNDING = {name: replace(BLOCK_FORMATS[name], int8_activations=True) for name in NAMES}
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
    kind = gguf.GGMLQuantizationType[name.removesuffix("_block").upper()]
    return torch.from_numpy(gguf.dequantize(codes_NB.numpy(), kind).astype(np.float64))


def rounded_rows(x_RK: Tensor) -> Tensor:
    """What int8 codes of groups of 32 stand for: inverse, codes and scale as fp32 makes them."""
    groups = x_RK.float().numpy().reshape(len(x_RK), -1, 32)
    largest = np.abs(groups).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(groups * inverse).astype(np.int64)
    scales = (largest / np.float32(127)).astype(np.float64)
    return torch.from_numpy((codes * scales).reshape(len(x_RK), -1))


def assert_right(x_RK: Tensor, weight: QuantizedMatrix, name: str) -> None:
    """Against fp64 products of rounded rows.

    Sums of 16 or 32 products are exact integers. What is added is a code's sum by two scales, whose
    product is rounded, and a minimum by the scaled sum of the codes of x; both are summed apart.
    With w the weight and m the minimum neither is more than |w| + |m|, and |m| at most the size of
    the least code (of signed ones of the table that is 127 where 128 is subtracted).
    """
    least_NB = weight.codes.clone().view(-1, BLOCKS[name].num_bytes)
    least_NB[:, CODES[name]] = LEAST.get(name, 0)
    values = values_of(weight.codes, name)
    minima = values_of(least_NB.view(weight.codes.shape), name).abs() * (128 / 127)
    rows = rounded_rows(x_RK)
    exact, size = rows @ values.T, rows.abs() @ (values.abs() + 2 * minima).T
    found = quantized_linear(x_RK, weight, impl="native").double()
    stored = torch.finfo(x_RK.dtype).eps / 2 * exact.abs()
    assert ((found - exact).abs() <= (weight.num_cols / 16 + 12) * 2.0**-24 * size + stored).all()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", NAMES)
def test_products_against_fp64(isa, name, generator):
    """One row, a panel and several; a last step of one group and of an odd number of them."""
    num_codes = BLOCKS[name].num_codes
    for num_cols in (num_codes, 5 * num_codes, 2048 + 3 * num_codes):
        weight = random_matrix(ROUNDING[name], 19, num_cols, generator)
        for num_rows, dtype in ((1, torch.float32), (3, torch.bfloat16), (14, torch.float32)):
            x_RK = torch.randn(num_rows, num_cols, generator=generator).to(dtype)
            assert_right(x_RK, weight, name)
        every_other = QuantizedMatrix(weight.format, num_cols, weight.codes[1::2])
        both = quantized_linear(x_RK, weight, impl="native")
        assert torch.equal(quantized_linear(x_RK, every_other, impl="native"), both[:, 1::2])


@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_whatever_the_others_are(isa, library, name, generator):
    weight = random_matrix(ROUNDING[name], 70, 768, generator)
    x_RK = torch.randn(40, 768, generator=generator).bfloat16()
    expected = torch.cat([quantized_linear(row, weight) for row in x_RK.split(1)])
    for num_threads, num_rows in ((1, 2), (3, 3), (1, 4), (3, 5), (1, 6), (3, 9), (1, 17), (3, 40)):
        library.set_num_threads(num_threads)
        assert torch.equal(quantized_linear(x_RK[:num_rows], weight), expected[:num_rows])


@pytest.mark.parametrize(
    ("name", "block", "value"),
    [
        ("q8_0", [0x00, 0x3C, *[0x80] * 32], -128),
        ("q8_0", [0x00, 0x3C, *[0x7F] * 32], 127),
        ("iq4_nl", [0x00, 0x3C, *[0x00] * 16], -127),
        ("mxfp4_block", [127, *[0x77] * 16], 6),
        ("mxfp4_block", [127, *[0xFF] * 16], -6),
        ("q5_1", [0x00, 0x3C, 0, 0, *[0xFF] * 20], 31),
        ("q6_k", [*[0xFF] * 192, *[1] * 16, 0x00, 0x3C], 31),
        ("q6_k", [*[0x00] * 192, *[1] * 16, 0x00, 0x3C], -32),
        ("q6_k", [*[0x00] * 192, *[0xFF] * 16, 0x00, 0x3C], 32),
    ],
)
def test_the_largest_codes_are_summed_exactly(isa, name, block, value):
    """By 127 in every place: pairs of the products just fit into 16 bits, or into 32."""
    num_blocks = 512 // BLOCKS[name].num_codes
    codes = torch.tensor(block * num_blocks, dtype=torch.uint8).expand(9, -1).contiguous()
    weight = QuantizedMatrix(ROUNDING[name], 512, codes)
    for sign, num_rows in ((1.0, 1), (-1.0, 1), (-1.0, 5)):
        found = quantized_linear(torch.full((num_rows, 512), 127 * sign), weight, impl="native")
        assert (found == value * 127 * 512 * sign).all()


def test_numbers_at_the_ends(isa, generator):
    """A NaN or an infinity spoils its row alone; almost nothing is nothing."""
    weight = random_matrix(ROUNDING["q4_k"], 9, 512, generator)
    x_RK = torch.randn(6, 512, generator=generator)
    x_RK[0, 3] = torch.nan
    x_RK[1, 300] = -torch.inf
    x_RK[2] = 0
    x_RK[3] *= 2.0**-110
    found = quantized_linear(x_RK, weight, impl="native")
    assert found[:2].isnan().all()
    assert (found[2:4] == 0).all()
    assert_right(x_RK[4:], weight, "q4_k")


@pytest.mark.parametrize("names", [("q8_0",) * 3, ("q4_1", "iq4_nl", "mxfp4_block")], ids=str)
@pytest.mark.parametrize("num_rows", [1, 9, 80])
def test_experts_round_their_hidden_values_too(isa, names, num_rows, generator):
    kinds: tuple[WeightFormat, ...] = tuple(ROUNDING[name] for name in names)
    weights = make_expert(kinds, generator, bias_dtype=torch.bfloat16)
    assert_hidden_values_are_rounded_too(weights, num_rows, generator)
