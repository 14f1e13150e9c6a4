"""Products of many rows with quantised weights: the bits of a product with their values."""

from __future__ import annotations

import pytest
import torch
from quantized_experts import with_values
from quantized_matrices import BLOCK_FORMATS, FP8_BLOCK, INT4, PUBLISHED, random_matrix

from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.linear import (
    ROWS_PER_CALL,
    linear,
    native_row_limit,
    quantized_linear,
    quantized_row_limit,
)
from moe_runtime.kernels.native import NativeLibrary
from moe_runtime.kernels.quantized import WeightFormat

FORMATS = PUBLISHED | {name: BLOCK_FORMATS[name] for name in ("q4_k", "q6_k", "q8_0", "iq4_nl")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sides(kind: WeightFormat) -> tuple[int, int]:
    """Odd sizes, as far as blocks allow."""
    return (512, 256) if kind.block_codes else (96, 160)


def skip_if_torch_takes_many(library: NativeLibrary, dtype: torch.dtype) -> None:
    if native_row_limit(library, dtype) <= ROWS_PER_CALL:
        pytest.skip("torch multiplies many rows here")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_layer(
    isa: str, name: str, dtype: torch.dtype, library: NativeLibrary, generator: torch.Generator
) -> None:
    skip_if_torch_takes_many(library, dtype)
    dim_in, _ = sides(FORMATS[name])
    weight = random_matrix(FORMATS[name], 77, dim_in, generator)
    bias = torch.randn(77, generator=generator).to(dtype)
    values = weight.dequantize().to(dtype)
    for rows in (quantized_row_limit(library) + 1, ROWS_PER_CALL + 3):
        x = torch.randn(rows, dim_in, generator=generator).to(dtype)
        found = quantized_linear(x, weight, bias)
        assert torch.equal(found, linear(x, values, bias, impl="native"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*FORMATS, "mixed"])
def test_experts_with_few_and_many_rows(
    isa: str, name: str, dtype: torch.dtype, library: NativeLibrary, generator: torch.Generator
) -> None:
    """Each expert's own rows decide: few are multiplied by codes, many by values."""
    skip_if_torch_takes_many(library, dtype)
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
