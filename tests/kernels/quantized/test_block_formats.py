"""Weights in ggml's blocks against the `gguf` package, which decodes them on its own."""

import numpy as np
import pytest
import torch
from quantized_matrices import BLOCK_FORMATS, any_blocks, assert_right, random_matrix
from torch import Tensor

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.linear.quantized import values_of
from moe_runtime.kernels.quantized import BLOCKS, QuantizedMatrix, QuantizedStack, WeightFormat

gguf = pytest.importorskip("gguf")
NAMES = sorted(BLOCKS)


def of_gguf(codes_NB: Tensor, name: str) -> Tensor:
    """The values that `gguf` gives, `fp32 [N, K]`."""
    kind = gguf.GGMLQuantizationType[name.removesuffix("_block").upper()]
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(codes_NB.numpy(), kind).copy())


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Of every value but NaN, whose bits nothing promises."""
    assert torch.equal(found.isnan(), expected.isnan())
    whole = ~expected.isnan()
    assert torch.equal(found[whole].view(torch.int32), expected[whole].view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_any_bytes_have_the_values_of_gguf(isa, name, generator):
    """All codes and scales: subnormal ones, infinities and NaN among them."""
    codes_NB = any_blocks(name, 900, generator).view(300, -1)
    matrix = QuantizedMatrix(WeightFormat(name), 3 * BLOCKS[name].num_codes, codes_NB)  # type: ignore[arg-type]
    expected = of_gguf(codes_NB, name)
    assert_same_bits(matrix.dequantize(), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(values_of(matrix, dtype).float(), expected.to(dtype).float())


def test_every_exponent_of_mxfp4_has_the_value_of_gguf(isa):
    codes_NB = torch.full((256, 17), 0xF1, dtype=torch.uint8)
    codes_NB[:, 0] = torch.arange(256, dtype=torch.uint8)
    matrix = QuantizedMatrix(WeightFormat("mxfp4_block"), 32, codes_NB)
    expected = of_gguf(codes_NB, "mxfp4_block")
    assert_same_bits(matrix.dequantize(), expected)
    assert_same_bits(values_of(matrix, torch.float32), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_blocks_against_fp64(isa, name, dtype, generator):
    """Few rows by codes; rows of the weight that a panel does not divide; every other row."""
    num_cols = 3 * BLOCKS[name].num_codes
    weight = random_matrix(BLOCK_FORMATS[name], 37, num_cols, generator)
    x_RK = torch.randn(7, num_cols, generator=generator).to(dtype)
    assert_right(weight, x_RK, torch.randn(37, generator=generator))
    every_other = QuantizedMatrix(weight.format, num_cols, weight.codes[1::2])
    both = quantized_linear(x_RK, weight, impl="native")
    assert torch.equal(quantized_linear(x_RK, every_other, impl="native"), both[:, 1::2])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_blocks_may_lie_in_one_place(isa, name, generator):
    one = random_matrix(BLOCK_FORMATS[name], 1, 2 * BLOCKS[name].num_codes, generator)
    same = QuantizedMatrix(one.format, one.num_cols, one.codes.expand(9, -1))
    x_RK = torch.randn(3, one.num_cols, generator=generator)
    for rows_RK in (x_RK[:1], x_RK):
        product = quantized_linear(rows_RK, one, impl="native")
        assert torch.equal(quantized_linear(rows_RK, same, impl="native"), product.expand(-1, 9))
    assert torch.equal(values_of(same, torch.float32), one.dequantize().expand(9, -1))


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "q8_0", "mxfp4_block"])
def test_a_row_by_blocks_has_the_same_bits_whatever_the_others_are(isa, library, name, generator):
    weight = random_matrix(BLOCK_FORMATS[name], 150, 256, generator)
    x_RK = torch.randn(17, 256, generator=generator).bfloat16()
    one_by_one = [quantized_linear(row, weight, impl="native") for row in x_RK.split(1)]
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        assert torch.equal(quantized_linear(x_RK, weight, impl="native"), torch.cat(one_by_one))


def test_rows_that_are_no_whole_blocks_and_other_scales_are_refused():
    codes = torch.zeros(2, 18, dtype=torch.uint8)
    with pytest.raises(ValueError, match="multiple of 32 columns, got 40"):
        QuantizedMatrix(WeightFormat("q4_0"), 40, codes)
    with pytest.raises(ValueError, match=r"codes must be uint8 \[N, 36\]"):
        QuantizedMatrix(WeightFormat("q4_0"), 64, codes)
    with pytest.raises(ValueError, match=r"scales must be none, got torch\.uint8"):
        QuantizedMatrix(WeightFormat("q4_0"), 32, codes, torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"scales must be none, got torch\.uint8"):
        QuantizedStack(WeightFormat("q4_0"), 32, codes[None], codes[None])
    with pytest.raises(ValueError, match="lie in its blocks"):
        WeightFormat("q4_0", "f16")
    with pytest.raises(ValueError, match="scales must be one of"):
        WeightFormat("uint4")
