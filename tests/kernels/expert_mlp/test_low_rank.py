"""Adapters of experts beside their weights, against weights that have them merged, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_experts import DIM, HIDDEN, make_expert, relative_error, with_values
from quantized_matrices import MXFP4
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec, ExpertWeights, expert_ffn, frozen_expert
from moe_runtime.kernels.expert_mlp.low_rank import LowRankExpert, LowRankFactors
from moe_runtime.kernels.linear import ROWS_PER_CALL
from moe_runtime.kernels.native import NativeLibrary

COUNTS = (5, 1, 0, 8)
OAI = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def plain_expert(dtype: torch.dtype, generator: torch.Generator, *, gate: bool) -> ExpertWeights:
    def tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    first = tensor(HIDDEN, DIM) if gate else None
    return ExpertWeights(first, tensor(HIDDEN, DIM), tensor(DIM, HIDDEN))


def adapter(
    generator: torch.Generator, rank: int, dtype: torch.dtype, scale: float, matrices: str
) -> LowRankExpert:
    def factors(dim_out: int, dim_in: int) -> LowRankFactors:
        first = torch.randn(rank, dim_in, generator=generator) * dim_in**-0.5
        second = torch.randn(dim_out, rank, generator=generator) * rank**-0.5
        return LowRankFactors(first.to(dtype), second.to(dtype), scale)

    shapes = {"gate": (HIDDEN, DIM), "up": (HIDDEN, DIM), "down": (DIM, HIDDEN)}
    return LowRankExpert(
        **{name: factors(*shapes[name]) if name in matrices else None for name in shapes}
    )


def merged(weights: ExpertWeights, own: LowRankExpert | None) -> ExpertWeights:
    """The same expert in fp64, with an adapter in its weights."""
    if weights.shape.formats:
        weights = with_values(weights, torch.float64)
    found: dict[str, Any] = {}
    for name in ("gate", "up", "down"):
        matrix, factors = getattr(weights, name), None if own is None else getattr(own, name)
        found[name] = None if matrix is None else matrix.double()
        if factors is not None:
            product = factors.weights.down.double() @ factors.weights.up.double()
            found[name] = found[name] + factors.scale * product
    biases = {n: getattr(weights, f"{n}_bias") for n in found}
    return ExpertWeights(
        **found, **{f"{n}_bias": None if b is None else b.double() for n, b in biases.items()}
    )


@torch.no_grad()
@pytest.mark.parametrize("impl", ["native", "torch", "auto"])
@pytest.mark.parametrize(
    ("kind", "dtype", "matrices"),
    [
        ("plain", torch.float32, "gate up down"),
        ("plain", torch.bfloat16, "gate up down"),
        ("no gate", torch.float32, "up down"),
        ("plain", torch.float32, "up"),
        ("plain", torch.bfloat16, "down"),
        ("mxfp4", torch.bfloat16, "gate up down"),
        ("mxfp4", torch.float32, "gate down"),
    ],
)
def test_adapters_beside_weights_equal_merged_ones(
    library: NativeLibrary,
    impl: str,
    kind: str,
    dtype: torch.dtype,
    matrices: str,
    generator: torch.Generator,
) -> None:
    """Rows of two adapters of other ranks, scales and types, and of none, in one call."""
    experts = [
        make_expert(MXFP4, generator, bias_dtype=torch.bfloat16)
        if kind == "mxfp4"
        else plain_expert(dtype, generator, gate=kind == "plain")
        for _ in COUNTS
    ]
    activation = OAI if kind == "mxfp4" else "silu"
    choices = [
        [None, adapter(generator, 3, torch.float32, 0.5, matrices),
         adapter(generator, 8, torch.bfloat16, 2.0, matrices)]
        for _ in experts
    ]  # fmt: skip
    num_rows = sum(COUNTS)
    x_TD = torch.randn(7, DIM, generator=generator).to(dtype)
    tokens = torch.randint(0, 7, (num_rows,), generator=generator)
    places = torch.randperm(num_rows, generator=generator)
    rows = [(expert, row % 3) for expert, count in enumerate(COUNTS) for row in range(count)]
    adapters_R = [choices[expert][which] for expert, which in rows]

    exact = torch.empty(num_rows, DIM, dtype=torch.float64)
    own = [merged(experts[expert], choices[expert][which]) for expert, which in rows]
    expert_ffn(
        x_TD.double(), own, [1] * num_rows, tokens, places, exact, activation=activation,
        impl="reference",
    )  # fmt: skip
    out = torch.full((num_rows + 1, DIM), torch.nan, dtype=dtype)
    expert_ffn(
        x_TD, experts, COUNTS, tokens, places, out, activation=activation, impl=impl,  # type: ignore[arg-type]
        adapters_R=adapters_R,
    )  # fmt: skip
    assert torch.isnan(out[num_rows]).all()
    # sums of some hundred terms, and a rounding at each of four places between
    assert relative_error(out[:num_rows], exact) <= 8 * ROUNDOFF[dtype]
    alone = torch.empty_like(out)
    for row in range(num_rows):
        expert_ffn(
            x_TD, [experts[rows[row][0]]], [1], tokens[row : row + 1], places[row : row + 1],
            alone, activation=activation, impl=impl, adapters_R=adapters_R[row : row + 1],  # type: ignore[arg-type]
        )  # fmt: skip
    if impl == "native":
        assert torch.equal(out[:num_rows], alone[:num_rows])


@torch.no_grad()
def test_more_rows_than_a_call_takes(library: NativeLibrary, generator: torch.Generator) -> None:
    weights = plain_expert(torch.float32, generator, gate=True)
    own = adapter(generator, 4, torch.float32, 1.5, "gate up down")
    num_rows = ROWS_PER_CALL + 3
    x_TD, every = torch.randn(num_rows, DIM, generator=generator), range(num_rows)
    exact = torch.empty(num_rows, DIM, dtype=torch.float64)
    arguments = [num_rows], every, every
    expert_ffn(
        x_TD.double(), [merged(weights, own)], *arguments, exact, activation="silu",
        impl="reference",
    )  # fmt: skip
    for impl in ("native", "torch", "reference"):
        out = torch.empty_like(x_TD)
        expert_ffn(
            x_TD, [weights], *arguments, out, activation="silu", impl=impl,  # type: ignore[arg-type]
            adapters_R=[own] * num_rows,
        )  # fmt: skip
        assert relative_error(out, exact) <= 8 * ROUNDOFF[torch.float32], impl
    with pytest.raises(ValueError, match="counts add up to 515 rows, got 515 token ids"):
        expert_ffn(
            x_TD, [weights], *arguments, out, activation="silu", adapters_R=[own] * (num_rows - 1)
        )


def test_inputs_have_the_gradients_of_merged_weights(generator: torch.Generator) -> None:
    weights = plain_expert(torch.float32, generator, gate=True)
    own = adapter(generator, 4, torch.float32, 1.5, "gate up down")
    x_RD = torch.randn(6, DIM, generator=generator, requires_grad=True)
    grad_RO = torch.randn(6, DIM, generator=generator)
    (found,) = torch.autograd.grad(frozen_expert(x_RD, weights, "silu", [own] * 6), x_RD, grad_RO)
    wide = x_RD.detach().double().requires_grad_()
    y_RO = frozen_expert(wide, merged(weights, own), "silu")
    (exact,) = torch.autograd.grad(y_RO, wide, grad_RO.double())
    assert relative_error(found, exact) <= 16 * ROUNDOFF[torch.float32]
