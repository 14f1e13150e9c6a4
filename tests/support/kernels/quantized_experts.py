"""Small experts with quantised matrices, and what they compute."""

from __future__ import annotations

import torch
from quantized_matrices import random_matrix

from moe_runtime.kernels.expert_mlp import ActivationSpec, ExpertWeights, expert_ffn
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
    matrices = [m.dequantize().to(dtype) for m in (weights.gate, weights.up, weights.down)]
    biases = (weights.gate_bias, weights.up_bias, weights.down_bias)
    return ExpertWeights(*matrices, *(None if b is None else b.to(dtype) for b in biases))


def run(
    x_TD: torch.Tensor,
    weights: ExpertWeights,
    impl: str = "auto",
    activation: str | ActivationSpec = "silu",
) -> torch.Tensor:
    out = torch.full_like(x_TD, torch.nan)
    rows = range(len(x_TD))
    expert_ffn(x_TD, [weights], [len(x_TD)], rows, rows, out, activation=activation, impl=impl)
    return out


def relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return ((y.double() - exact).norm() / exact.norm()).item()


def assert_hidden_values_are_rounded_too(
    weights: ExpertWeights, num_rows: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """What an expert is given and computes: a group of 32 is at most `sqrt(32) / 254` off, relative
    to its norm; x and hidden values."""
    x_TD = torch.randn(num_rows, 96, generator=generator)
    exact = run(x_TD.double(), with_values(weights, torch.float64), "reference")
    found = run(x_TD, weights)
    assert relative_error(found, exact) <= 3 * 32**0.5 / 254
    assert relative_error(found, run(x_TD, weights, "reference").double()) <= 32**0.5 / 254
    assert torch.equal(found, torch.cat([run(row, weights) for row in x_TD.split(1)]))
    return x_TD, found
