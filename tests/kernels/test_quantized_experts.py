"""Experts with quantised matrices: `expert_ffn` and what differentiates it."""

from __future__ import annotations

import pytest
import torch
from quantized_matrices import FP8_BLOCK, INT4, MXFP4, PUBLISHED, random_matrix

from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn, frozen_expert
from moe_runtime.kernels.quantized import WeightFormat

DIM, HIDDEN = 96, 160


def make_expert(
    kind: WeightFormat | tuple[WeightFormat, ...],
    generator: torch.Generator,
    bias_dtype: torch.dtype | None = None,
) -> ExpertWeights:
    kinds = kind if isinstance(kind, tuple) else (kind, kind, kind)
    shapes = ((HIDDEN, DIM), (HIDDEN, DIM), (DIM, HIDDEN))
    matrices = [random_matrix(k, *shape, generator) for k, shape in zip(kinds, shapes, strict=True)]
    if bias_dtype is None:
        return ExpertWeights(*matrices)
    biases = [torch.randn(n, generator=generator).to(bias_dtype) * 0.1 for n, _ in shapes]
    return ExpertWeights(*matrices, *biases)


def with_values(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The same expert with tensors for matrices."""
    matrices = [m.dequantize().to(dtype) for m in (weights.gate, weights.up, weights.down)]  # type: ignore[union-attr, call-arg]
    biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
    return ExpertWeights(*matrices, *(None if b is None else b.to(dtype) for b in biases))


def run(x_TD: torch.Tensor, weights: ExpertWeights, impl: str = "auto") -> torch.Tensor:
    out = torch.full_like(x_TD, torch.nan)
    rows = range(len(x_TD))
    expert_ffn(x_TD, [weights], [len(x_TD)], rows, rows, out, activation="silu", impl=impl)  # type: ignore[arg-type]
    return out


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_quantised_expert_computes_with_its_values(
    name: str, dtype: torch.dtype, generator: torch.Generator
) -> None:
    weights = make_expert(PUBLISHED[name], generator, bias_dtype=torch.bfloat16)
    x_TD = torch.randn(9, DIM, generator=generator).to(dtype)
    exact = run(x_TD.double(), with_values(weights, torch.float64), "reference")
    # of x, hidden values, the weights of a product with many rows, and the result: each is rounded
    # once, and a norm of independent roundings is at most that of the largest of them, twice
    allowed = {torch.bfloat16: 2 * 4 * 2.0**-9, torch.float32: 1000 * 2.0**-24}[dtype]
    for impl in ("auto", "torch", "reference"):
        assert relative_error(run(x_TD, weights, impl), exact) <= allowed


def test_formats_may_differ_within_an_expert_but_not_between_experts(
    generator: torch.Generator,
) -> None:
    mixed = make_expert((INT4, MXFP4, FP8_BLOCK), generator, bias_dtype=torch.float32)
    x_TD = torch.randn(3, DIM, generator=generator)
    exact = run(x_TD.double(), with_values(mixed, torch.float64), "reference")
    assert relative_error(run(x_TD, mixed), exact) <= 1000 * 2.0**-24
    other = make_expert((MXFP4, MXFP4, FP8_BLOCK), generator, bias_dtype=torch.float32)
    with pytest.raises(ValueError, match="must have one shape"):
        expert_ffn(x_TD, [mixed, other], [1, 1], [0, 1], [0, 1], x_TD.clone(), activation="silu")


def test_an_expert_with_a_matrix_as_it_is(generator: torch.Generator) -> None:
    quantised = make_expert(MXFP4, generator)
    down = with_values(quantised, torch.bfloat16).down
    mixed = ExpertWeights(quantised.gate, quantised.up, down)
    x_TD = torch.randn(2, DIM, generator=generator)
    exact = run(x_TD.double(), with_values(quantised, torch.float64), "reference")
    # every weight of this format is exact in bf16: what is left is fp32's roundings
    assert relative_error(run(x_TD, mixed), exact) <= 1000 * 2.0**-24


def test_tensors_beside_quantised_matrices_are_checked(generator: torch.Generator) -> None:
    weights = make_expert(MXFP4, generator)
    with pytest.raises(ValueError, match="must be bf16"):
        ExpertWeights(weights.gate, weights.up, torch.ones(DIM, HIDDEN))
    with pytest.raises(ValueError, match="down must be"):
        ExpertWeights(weights.gate, weights.up, weights.up)


def test_a_frozen_expert_gives_the_gradient_of_its_rows(generator: torch.Generator) -> None:
    weights = make_expert(INT4, generator)
    x_RD = torch.randn(4, DIM, generator=generator, requires_grad=True)
    y_RD = frozen_expert(x_RD, weights, "silu")
    (grad_RD,) = torch.autograd.grad(y_RD.square().sum(), x_RD)
    x64_RD = x_RD.detach().double().requires_grad_()
    exact = frozen_expert(x64_RD, with_values(weights, torch.float64), "silu")
    (exact_grad_RD,) = torch.autograd.grad(exact.square().sum(), x64_RD)
    assert relative_error(y_RD.detach(), exact.detach()) <= 1000 * 2.0**-24
    assert relative_error(grad_RD, exact_grad_RD) <= 1000 * 2.0**-24
