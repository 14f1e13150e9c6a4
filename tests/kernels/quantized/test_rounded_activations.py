"""Products that round what they multiply to int8, against their definition in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quantized_matrices import (
    AWQ,
    FP8_BLOCK,
    INT4,
    INT8,
    MXFP4,
    PUBLISHED,
    every_format,
    random_matrix,
)
from torch import Tensor

from moe_runtime.errors import UnsupportedUseError
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn, frozen_expert
from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.native import NativeLibrary
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.reference import round_to_int8

GROUP = 32


def rounding(weight: QuantizedMatrix) -> QuantizedMatrix:
    return replace(weight, format=replace(weight.format, rounds_x=True))


def assert_right(weight: QuantizedMatrix, x_RK: Tensor, impl: str = "native") -> None:
    """Within the roundings of K sums, of the scales of weight and x, and one of the result."""
    rounded, values = round_to_int8(x_RK).double(), weight.dequantize().double()
    exact, magnitude = rounded @ values.T, rounded.abs() @ values.abs().T
    allowed = (weight.num_cols + 12) * 2.0**-24 * magnitude + 2.0**-126
    if x_RK.dtype == torch.bfloat16:
        allowed += 2.0**-8 * exact.abs()
    found = quantized_linear(x_RK, rounding(weight), impl=impl)  # type: ignore[arg-type]
    assert found.dtype == x_RK.dtype
    assert ((found.double() - exact).abs() <= allowed).all()


def test_each_group_becomes_multiples_of_its_largest_magnitude(generator: torch.Generator) -> None:
    """By a loop over numbers."""
    x_RK = torch.randn(3, 75, generator=generator)
    x_RK[1, 32:64] = 0
    x_RK[2, 64:] = 1e-44
    found = round_to_int8(x_RK)
    for row, rounded in zip(x_RK, found, strict=True):
        for first in range(0, 75, GROUP):
            group = row[first : first + GROUP]
            step = group.abs().max() / 127
            # half a step, and what fp32 rounds on the way
            allowed = step * (0.5 + 2.0**-14) if step > 1e-38 else group.abs().max()
            assert ((rounded[first : first + GROUP] - group).abs() <= allowed).all()
            if step > 1e-38:
                steps = rounded[first : first + GROUP] / step
                assert torch.allclose(steps, steps.round(), rtol=0, atol=2.0**-14)


@pytest.mark.parametrize("codes", ["e2m1", "uint4", "uint8", "int8"])
def test_every_format_against_fp64(isa: str, codes: str, generator: torch.Generator) -> None:
    """Rows that end within a block of 128 codes, within a group, and after an odd code."""
    for kind in (kind for kind in every_format() if kind.codes == codes):
        for num_rows, num_cols, x_rows in ((5, 161, 2), (1, 296, 7)):
            weight = random_matrix(kind, num_rows, num_cols, generator)
            for dtype in (torch.float32, torch.bfloat16):
                assert_right(weight, torch.randn(x_rows, num_cols, generator=generator).to(dtype))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("impl", ["native", "auto", "torch", "reference"])
def test_odd_sizes_by_every_way(isa: str, name: str, impl: str, generator: torch.Generator) -> None:
    for num_rows, num_cols in ((1, 1), (33, 32), (5, 40), (130, 160)):
        weight = random_matrix(PUBLISHED[name], num_rows, num_cols, generator)
        assert_right(weight, torch.randn(60, num_cols, generator=generator), impl)


@pytest.mark.parametrize("kind", [MXFP4, INT4, AWQ, INT8], ids=["mxfp4", "int4", "awq", "int8"])
def test_a_row_has_the_same_bits_whatever_the_others_are(
    isa: str, library: NativeLibrary, kind: WeightFormat, generator: torch.Generator
) -> None:
    weight = rounding(random_matrix(kind, 150, 272, generator))
    x_RK = torch.randn(70, 272, generator=generator).bfloat16()
    expected = torch.cat([quantized_linear(row, weight) for row in x_RK.split(1)])
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        for num_rows in (*range(1, 18), 70):
            found = quantized_linear(x_RK[:num_rows], weight)
            assert torch.equal(found, expected[:num_rows])


@pytest.mark.parametrize("kind", [MXFP4, INT4, INT8], ids=["mxfp4", "int4", "int8"])
def test_a_group_that_is_not_finite_makes_its_row_nan(
    isa: str, kind: WeightFormat, generator: torch.Generator
) -> None:
    weight = rounding(random_matrix(kind, 4, 200, generator))
    x_RK = torch.randn(5, 200, generator=generator)
    x_RK[0, 199], x_RK[2, 0], x_RK[3, 70], x_RK[4, :] = torch.inf, torch.nan, -torch.inf, 0
    found = quantized_linear(x_RK, weight, impl="native")
    assert found.isnan().all(1).tolist() == [True, False, True, True, False]
    assert not found[4].any()
    assert found[1].isfinite().all()


def make_expert(kind: WeightFormat, generator: torch.Generator) -> ExpertWeights:
    shapes = ((160, 96), (160, 96), (96, 160))
    return ExpertWeights(*(rounding(random_matrix(kind, *shape, generator)) for shape in shapes))


@pytest.mark.parametrize("kind", [MXFP4, INT4, AWQ, INT8], ids=["mxfp4", "int4", "awq", "int8"])
@pytest.mark.parametrize("impl", ["native", "auto", "torch"])
def test_an_expert_rounds_its_inputs_and_its_hidden_values(
    isa: str, kind: WeightFormat, impl: str, generator: torch.Generator
) -> None:
    """A hidden value may go the other way only where it lies close to the middle of a step."""
    weights = make_expert(kind, generator)
    x_TD = torch.randn(70, 96, generator=generator)
    gate, up, down = (
        matrix.dequantize().double()  # type: ignore[union-attr, call-arg]
        for matrix in (weights.gate, weights.up, weights.down)
    )
    rounded = round_to_int8(x_TD).double()
    hidden = torch.nn.functional.silu(rounded @ gate.T) * (rounded @ up.T)
    groups = hidden.unflatten(1, (-1, GROUP))
    step = groups.abs().amax(-1, keepdim=True) / 127
    from_middle = ((groups / step).frac().abs() - 0.5).abs()
    may_move = torch.where(from_middle < 2.0**-8, step, step * 2.0**-14).flatten(1)
    exact = round_to_int8(hidden).double() @ down.T
    allowed = may_move @ down.abs().T + 1000 * 2.0**-24 * hidden.abs() @ down.abs().T
    out, rows = torch.full_like(x_TD, torch.nan), range(70)
    expert_ffn(x_TD, [weights], [70], rows, rows, out, activation="silu", impl=impl)  # type: ignore[arg-type]
    assert ((out.double() - exact).abs() <= allowed).all()


def test_rounded_rows_have_no_gradient(generator: torch.Generator) -> None:
    x_RD = torch.randn(4, 96, generator=generator, requires_grad=True)
    with pytest.raises(UnsupportedUseError, match="no gradient"):
        frozen_expert(x_RD, make_expert(INT4, generator), "silu")
    with pytest.raises(UnsupportedUseError, match="no gradient"):
        quantized_linear(x_RD, rounding(random_matrix(FP8_BLOCK, 8, 96, generator)))
