"""`ExpertStep` gives the bits of `expert_ffn` and `combine_assignments`, or leaves the call."""

import pytest
import torch

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.decode_step.prepared import STEP_ROWS, ExpertStep
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn

DIM, HIDDEN, EXPERTS = 48, 40, 6


def make_experts(dtype: torch.dtype, *, gate: bool = True) -> list[ExpertWeights]:
    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    return [
        ExpertWeights(
            matrix(HIDDEN, DIM) if gate else None,
            matrix(HIDDEN, DIM),
            matrix(DIM, HIDDEN),
            down_bias=matrix(DIM),
        )
        for _ in range(EXPERTS)
    ]


def one_by_one(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_R: list[int],
    experts: list[ExpertWeights],
    activation: str,
) -> torch.Tensor:
    """Every routed row in a call of its own."""
    num_choices = weights_TK.shape[1]
    rows_RD = x_TD.new_empty((len(ids_R), DIM))
    for row, expert in enumerate(ids_R):
        token = row // num_choices
        expert_ffn(x_TD, [experts[expert]], [1], [token], [row], rows_RD, activation=activation)  # type: ignore[arg-type]
    return combine_assignments(rows_RD, weights_TK)


@torch.no_grad()
@pytest.mark.parametrize(
    "ids_TK", [[[0, 1]], [[5, 2]], [[3, 3]], [[4, 1, 0], [1, 5, 4]], [[2], [2], [2]]], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["same dtype", "fp32 rows"])
def test_a_step_has_the_bits_of_its_rows_one_by_one(isa, library, ids_TK, dtype, wide):
    experts = make_experts(dtype, gate=dtype is not torch.float16)
    x_TD = torch.randn(len(ids_TK), DIM).to(torch.float32 if wide else dtype)
    weights_TK = torch.rand(len(ids_TK), len(ids_TK[0]))
    ids_R = [expert for row in ids_TK for expert in row]
    visited = sorted(set(ids_R))
    chosen = [experts[expert] for expert in visited]
    by_expert = sorted(range(len(ids_R)), key=lambda row: visited.index(ids_R[row]))
    counts = [ids_R.count(expert) for expert in visited]
    tokens = [row // len(ids_TK[0]) for row in by_expert]
    step = ExpertStep(experts[0].shape, "silu")
    for num_threads in (1, 3):
        library.set_num_threads(num_threads)
        found = step.layer(x_TD, weights_TK, [visited.index(e) for e in ids_R], chosen)
        rows_RD = x_TD.new_empty((len(ids_R), DIM))
        has_run = step.rows(x_TD, chosen, counts, tokens, by_expert, rows_RD)
        assert has_run == (found is not None)
        if found is None:
            assert isa == "portable"  # where torch takes most products in half precision
            continue
        expected = one_by_one(x_TD, weights_TK, ids_R, experts, "silu")
        assert torch.equal(found, expected)
        assert torch.equal(combine_assignments(rows_RD, weights_TK), expected)


@torch.no_grad()
def test_what_the_step_does_not_take_is_left_to_others(library):
    experts = make_experts(torch.float32)
    step = ExpertStep(experts[0].shape, "silu")
    x_TD, weights_TK = torch.randn(1, DIM), torch.rand(1, 2)
    others, room_RD = make_experts(torch.bfloat16), torch.empty(1, DIM)

    def takes(x=x_TD, weights=weights_TK, experts=experts, step=step):
        return step.layer(x, weights, [0, 1] * len(x), experts[:2]) is not None

    def takes_rows(x=x_TD, out=room_RD, experts=experts):
        return step.rows(x, experts[:1], [1], [0], [0], out)

    assert takes()
    assert takes(weights=torch.rand(2, 1).t())
    many = STEP_ROWS // 2 + 1
    assert not takes(torch.randn(many, DIM), torch.rand(many, 2))
    assert not takes(x_TD.double())
    assert not takes(x_TD[:, ::2])
    for weights in (weights_TK.double(), torch.rand(1, 60), torch.rand(1, 1)):
        assert not takes(weights=weights)
    assert not takes(experts=others)
    assert not takes(step=ExpertStep(experts[0].shape, "unheard of"))
    assert takes_rows()
    assert not takes_rows(x_TD.double(), room_RD.double())
    assert not takes_rows(out=room_RD.bfloat16())
    assert not takes_rows(x_TD[:, ::2])
    assert not takes_rows(out=room_RD.expand(DIM, DIM).t())
    assert not takes_rows(experts=others)
    with torch.enable_grad():
        assert not takes()
        assert not takes_rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes()


@torch.no_grad()
def test_a_row_of_no_expert_is_refused(library):
    experts = make_experts(torch.float32)
    step = ExpertStep(experts[0].shape, "silu")
    with pytest.raises(ValueError, match="expert_of_row must be in"):
        step.layer(torch.randn(1, DIM), torch.rand(1, 2), [0, 2], experts[:2])
