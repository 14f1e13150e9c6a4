"""Whom a gate prefers: the native call against a sort in fp64."""

import pytest
import torch

from moe_runtime.kernels.decode_step.gate_ranking import GateRanking


def exact(rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: sums of their products are exact in fp32 whatever their order."""
    generator = torch.Generator().manual_seed(rows * dim)
    return torch.randint(-4, 5, (rows, dim), generator=generator).to(dtype)


def wanted(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: int):
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    return [
        sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:ranks]
        for row in logits.tolist()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("experts", "dim", "ranks"), [(1, 1, 1), (7, 33, 4), (64, 130, 64)])
@pytest.mark.parametrize("rows", [1, 3])
def test_ranks_are_those_of_the_exact_logits_and_equals_keep_their_order(
    dtype, experts, dim, ranks, rows
):
    weight, hidden = exact(experts, dim, dtype), exact(rows, dim, dtype)
    bias = exact(1, experts, torch.float32)[0]
    for own_bias in (None, bias):
        found = GateRanking(weight, own_bias, ranks)(hidden)
        assert found == wanted(hidden, weight, own_bias, ranks)


def test_mixed_types_strided_gates_and_types_that_only_torch_knows():
    weight = exact(10, 48, torch.bfloat16)[:, :40]  # rows lie further apart than they are long
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        hidden = exact(1, 40, dtype)
        assert GateRanking(weight, None, 5)(hidden) == wanted(hidden, weight, None, 5)
    hidden = exact(1, 80, torch.float32)[:, ::2]
    assert GateRanking(weight, None, 5)(hidden) == wanted(hidden, weight, None, 5)
    half = exact(10, 40, torch.float16)
    assert GateRanking(half, None, 5)(half[:1]) == wanted(half[:1], half, None, 5)


def test_logits_that_are_no_numbers_still_name_different_experts():
    weight = torch.full((6, 8), float("nan"))
    weight[4] = 1.0
    (ranked,) = GateRanking(weight, None, 6)(torch.ones(1, 8))
    assert sorted(ranked) == list(range(6))


def test_gates_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least 5"):
        GateRanking(torch.ones(4, 8), None, 5)
    with pytest.raises(ValueError, match=r"bias must be \[4\]"):
        GateRanking(torch.ones(4, 8), torch.ones(3), 2)
    with pytest.raises(RuntimeError, match="shapes"):
        GateRanking(torch.ones(4, 8), None, 2)(torch.ones(1, 7))
