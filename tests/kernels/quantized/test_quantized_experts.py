"""Experts with quantised matrices: `expert_ffn` and what differentiates it."""

from __future__ import annotations

import pytest
import torch
from quantized_experts import DIM, HIDDEN, make_expert, relative_error, run, with_values
from quantized_matrices import FP8_BLOCK, INT4, MXFP4, PUBLISHED, random_matrix

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.decode_step.prepared import ExpertStep
from moe_runtime.kernels.expert_mlp import (
    ActivationSpec,
    ExpertWeights,
    expert_ffn,
    frozen_expert,
)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_quantised_expert_computes_with_its_values(isa, name, dtype, generator):
    weights = make_expert(PUBLISHED[name], generator, bias_dtype=torch.bfloat16)
    x_TD = torch.randn(9, DIM, generator=generator).to(dtype)
    exact = run(x_TD.double(), with_values(weights, torch.float64), "reference")
    # of x, hidden values, the weights of a product with many rows, and the result: each is rounded
    # once, and a norm of independent roundings is at most that of the largest of them, twice
    is_half = dtype != torch.float32
    allowed = 2 * 4 * torch.finfo(dtype).eps / 4 if is_half else 1000 * 2.0**-24
    for impl in ("auto", "native", "torch", "reference"):
        assert relative_error(run(x_TD, weights, impl), exact) <= allowed


def test_formats_may_differ_within_an_expert_but_not_between_experts(generator):
    mixed = make_expert((INT4, MXFP4, FP8_BLOCK), generator, bias_dtype=torch.float32)
    x_TD = torch.randn(3, DIM, generator=generator)
    exact = run(x_TD.double(), with_values(mixed, torch.float64), "reference")
    assert relative_error(run(x_TD, mixed), exact) <= 1000 * 2.0**-24
    other = make_expert((MXFP4, MXFP4, FP8_BLOCK), generator, bias_dtype=torch.float32)
    with pytest.raises(ValueError, match="must have one shape"):
        expert_ffn(x_TD, [mixed, other], [1, 1], [0, 1], [0, 1], x_TD.clone(), activation="silu")


def test_an_expert_with_a_matrix_as_it_is(generator):
    quantised = make_expert(MXFP4, generator)
    down = with_values(quantised, torch.bfloat16).down
    mixed = ExpertWeights(quantised.gate, quantised.up, down)
    x_TD = torch.randn(2, DIM, generator=generator)
    exact = run(x_TD.double(), with_values(quantised, torch.float64), "reference")
    # every weight of this format is exact in bf16: what is left is fp32's roundings
    assert relative_error(run(x_TD, mixed), exact) <= 1000 * 2.0**-24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_biases_of_gate_and_up_may_lie_in_turn(isa, dtype, generator):
    apart = make_expert(MXFP4, generator, bias_dtype=dtype)
    pair = torch.stack((apart.gate_bias, apart.up_bias), dim=-1).flatten()  # type: ignore[arg-type]
    in_turn = ExpertWeights(
        apart.gate, apart.up, apart.down, pair[0::2], pair[1::2], apart.down_bias
    )
    x_TD = torch.randn(3, DIM, generator=generator).bfloat16()
    assert torch.equal(run(x_TD, in_turn, "native"), run(x_TD, apart, "native"))


def test_tensors_beside_quantised_matrices_are_checked(generator):
    weights = make_expert(MXFP4, generator)
    with pytest.raises(ValueError, match="not quantised bf16"):
        ExpertWeights(weights.gate, weights.up, torch.ones(DIM, HIDDEN))
    with pytest.raises(ValueError, match="down must be"):
        ExpertWeights(weights.gate, weights.up, weights.up)


def test_a_frozen_expert_gives_the_gradient_of_its_rows(generator):
    weights = make_expert(INT4, generator)
    x_RD = torch.randn(4, DIM, generator=generator, requires_grad=True)
    y_RD = frozen_expert(x_RD, weights, "silu")
    (grad_RD,) = torch.autograd.grad(y_RD.square().sum(), x_RD)
    x64_RD = x_RD.detach().double().requires_grad_()
    exact = frozen_expert(x64_RD, with_values(weights, torch.float64), "silu")
    (exact_grad_RD,) = torch.autograd.grad(exact.square().sum(), x64_RD)
    assert relative_error(y_RD.detach(), exact.detach()) <= 1000 * 2.0**-24
    assert relative_error(grad_RD, exact_grad_RD) <= 1000 * 2.0**-24


FORMULAS = [
    ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0),
    ActivationSpec("silu", limit=2.0, clamps_after=True),
    ActivationSpec("gelu_tanh", limit=3.0),
    ActivationSpec("silu", gate_softcap=2.0, up_softcap=3.0),
    ActivationSpec("silu"),
]
"""Gates as gpt-oss, Step 3, DeepSeek-V4 and Inkling 2 have them, and a plain one."""


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.function)
@pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("quantised", [True, False], ids=["mxfp4", "tensors"])
def test_a_formula_is_computed_in_the_kernel(isa, formula, gate, quantised, generator):
    weights = make_expert(MXFP4, generator, bias_dtype=torch.float32)
    exact_weights = with_values(weights, torch.float64)
    if not quantised:
        weights = with_values(weights, torch.float32)
    if not gate:
        names = ("up", "down", "up_bias", "down_bias")
        weights, exact_weights = (
            ExpertWeights(gate=None, **{name: getattr(w, name) for name in names})
            for w in (weights, exact_weights)
        )
    x_TD = 6 * torch.randn(7, DIM, generator=generator)  # far enough for the bounds to act
    exact = run(x_TD.double(), exact_weights, "reference", formula)
    assert relative_error(run(x_TD, weights, "native", formula), exact) <= 1000 * 2.0**-24


def test_a_plain_formula_has_the_bits_of_its_name(library, generator):
    weights = make_expert(INT4, generator)
    x_TD = torch.randn(3, DIM, generator=generator).bfloat16()
    by_name = run(x_TD, weights, "native", "gelu")
    assert torch.equal(run(x_TD, weights, "native", ActivationSpec("gelu")), by_name)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["silu", FORMULAS[0]], ids=["silu", "gpt-oss"])
@pytest.mark.parametrize("kind", [MXFP4, FP8_BLOCK], ids=["mxfp4", "fp8-block"])
def test_a_step_has_the_bits_of_its_experts_one_by_one(isa, library, kind, activation, generator):
    experts = [make_expert(kind, generator, bias_dtype=torch.bfloat16) for _ in range(5)]
    ids_R = [0, 3, 4, 3, 2, 0]
    x_TD = torch.randn(3, DIM, generator=generator).bfloat16()
    weights_TK = torch.rand(3, 2, generator=generator)
    rows_RD = torch.empty(6, DIM, dtype=torch.bfloat16)
    for row, expert in enumerate(ids_R):
        rows_RD[row] = run(x_TD[row // 2, None], experts[expert], activation=activation)[0]
    step = ExpertStep(experts[0].shape, activation)
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        found = step.layer(x_TD, weights_TK, ids_R, experts)
        assert found is not None
        assert torch.equal(found, combine_assignments(rows_RD, weights_TK))


def test_hidden_values_in_pieces_of_a_block(isa, library, generator):
    """Many rows make items of 32 hidden values, a quarter of what a product takes at once."""
    shapes = ((192, 2048), (192, 2048), (40, 192))
    weights = ExpertWeights(*(random_matrix(FP8_BLOCK, *shape, generator) for shape in shapes))
    x_TD = torch.randn(6, 2048, generator=generator).bfloat16()

    def rows(num_rows: int) -> torch.Tensor:
        out = torch.full((num_rows, 40), torch.nan, dtype=torch.bfloat16)
        every = range(num_rows)
        expert_ffn(x_TD, [weights], [num_rows], every, every, out, activation="silu", impl="native")
        return out

    library.set_num_threads(3)
    assert torch.equal(rows(6)[:1], rows(1))
    exact = torch.full((6, 40), torch.nan, dtype=torch.float64)
    expert_ffn(
        x_TD.double(), [with_values(weights, torch.float64)], [6], range(6), range(6), exact,
        activation="silu", impl="reference",
    )  # fmt: skip
    assert relative_error(rows(6), exact) <= 2 * 3 * 2.0**-9
