"""Products of many rows with quantised weights: the bits of a product with their values."""

import pytest
import torch
from quantized_experts import with_values
from quantized_matrices import (
    BLOCK_FORMATS,
    FP8_BLOCK,
    INT4,
    PUBLISHED,
    every_format,
    random_matrix,
)
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.linear import (
    ROWS_PER_CALL,
    linear,
    op,
    quantized_linear,
    quantized_row_limit,
)
from moe_runtime.kernels.linear.quantized import write_values
from moe_runtime.kernels.native import NativeLibrary
from moe_runtime.kernels.quantized import CODES, SCALES, QuantizedMatrix, WeightFormat

FORMATS = PUBLISHED | {name: BLOCK_FORMATS[name] for name in ("q4_k", "q6_k", "q8_0", "iq4_nl")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

EXTREME_BITS = (
    *(0x7FFFFFFF, 0x7FC00000, 0xFF800001, 0x7F800000, 0xFF800000),  # NaN and infinities
    *(0x7F7FFFFF, 0x7B800000, 0x7B7FFFFF, 0x04FFFFFF, 0x05000000),  # about 2^127, 2^120 and 2^-117
    *(0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x40490FDB),
)
"""Scales in fp32, of which some products are subnormal, infinite or NaN."""


def any_matrix(
    kind: WeightFormat, num_rows: int, num_cols: int, generator: torch.Generator
) -> QuantizedMatrix:
    """All codes, zero points and scales, whatever their products are."""

    def bytes_of(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)

    rows, groups = kind.scales_shape(num_rows, num_cols)
    element = SCALES[kind.scales]
    scales = bytes_of(rows, groups * element.itemsize).view(element)
    if kind.scales == "f32":
        extreme = torch.tensor(EXTREME_BITS).to(torch.int32).view(torch.float32)
        chosen = torch.randint(0, len(extreme), scales.shape, generator=generator)
        is_extreme = bytes_of(*scales.shape) < 64
        scales = torch.where(is_extreme, extreme[chosen], scales)
    return QuantizedMatrix(
        kind,
        num_cols,
        bytes_of(num_rows, kind.row_bytes(num_cols)),
        scales,
        bytes_of(rows, groups) if kind.has_zero_points else None,
        None if kind.global_scale == "none" else torch.tensor([3e-3]),
    )


@pytest.mark.parametrize("codes", CODES)
def test_values_of_any_codes_and_scales(isa, codes, generator):
    """Rows that end within a group, within a vector and after an odd code; each type once."""
    kinds = [kind for kind in (*every_format(), *PUBLISHED.values()) if kind.codes == codes]
    kinds.append(WeightFormat(codes, "f16", group_cols=48))  # type: ignore[arg-type]
    for number, kind in enumerate(kinds):
        for turn, (num_rows, num_cols) in enumerate(((130, 161), (9, 544), (3, 15))):
            weight = any_matrix(kind, num_rows, num_cols, generator)
            dtype = DTYPES[(number + turn) % 3]
            expected = weight.dequantize(dtype)
            wide = torch.full((num_rows, num_cols + 9), 7, dtype=dtype)
            found = write_values(weight, dtype, wide[:, :num_cols])
            is_nan = expected.isnan()
            assert torch.equal(found.isnan(), is_nan)
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(found[~is_nan].view(bits), expected[~is_nan].view(bits))
            assert (wide[:, num_cols:] == 7).all()


def sides(kind: WeightFormat) -> tuple[int, int]:
    """Odd sizes, as far as blocks allow."""
    return (512, 256) if kind.block_codes else (96, 160)


@pytest.fixture
def _takes_many(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels multiply any number of rows, also where torch is faster."""
    monkeypatch.setitem(op._ROW_LIMITS, isa, op._ALL_ROWS)
    monkeypatch.setattr(NativeLibrary, "has_matrix_units", False)


@pytest.mark.usefixtures("_takes_many")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer(isa, name, dtype, library, generator):
    dim_in, _ = sides(FORMATS[name])
    weight = random_matrix(FORMATS[name], 77, dim_in, generator)
    bias = torch.randn(77, generator=generator).to(dtype)
    values = weight.dequantize().to(dtype)
    for rows in (quantized_row_limit(library) + 1, ROWS_PER_CALL + 3):
        x = torch.randn(rows, dim_in, generator=generator).to(dtype)
        found = quantized_linear(x, weight, bias)
        assert torch.equal(found, linear(x, values, bias, impl="native"))


@pytest.mark.usefixtures("_takes_many")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, DTYPES[place % 3]) for place, name in enumerate((*FORMATS, *["mixed"] * 3))],
    ids=str,
)
def test_experts_with_few_and_many_rows(isa, name, dtype, library, generator):
    """Each expert's own rows decide: few are multiplied by codes, many by values."""
    kinds = [FORMATS[name]] * 3 if name in FORMATS else [INT4, FP8_BLOCK, INT4]
    dim, hidden = sides(kinds[0])
    shapes = ((hidden, dim), (hidden, dim), (dim, hidden))
    experts = [
        ExpertWeights(
            *(random_matrix(k, *s, generator) for k, s in zip(kinds, shapes, strict=True)),
            *(torch.randn(rows, generator=generator).to(dtype) * 0.1 for rows, _ in shapes),
        )
        for _ in range(4)
    ]
    plain = [with_values(expert, dtype) for expert in experts]
    counts = [3, quantized_row_limit(library) + 6, 0, ROWS_PER_CALL + 38]
    x_TD = torch.randn(100, dim, generator=generator).to(dtype)
    token_ids = torch.randint(100, (sum(counts),), generator=generator)
    places = torch.randperm(sum(counts), generator=generator)

    def run(weights: list[ExpertWeights], impl: str) -> list[torch.Tensor]:
        out = torch.full((sum(counts), dim), torch.nan, dtype=dtype)
        expert_ffn(x_TD, weights, counts, token_ids, places, out, activation="silu", impl=impl)  # type: ignore[arg-type]
        return list(out[places].split(counts))

    found, by_values, by_codes = run(experts, "auto"), run(plain, "native"), run(experts, "native")
    assert torch.equal(found[0], by_codes[0])
    assert torch.equal(found[1], by_values[1])
    assert torch.equal(found[3], by_values[3])
