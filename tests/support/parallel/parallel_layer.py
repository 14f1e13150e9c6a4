"""A layer of experts in one process and in many, with the gradients of everything."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.parallel import ExpertSlots
from moe_runtime.routing import Routing

DIM_MODEL, DIM_HIDDEN = 6, 8


@dataclass
class Problem:
    """Tokens of all ranks, their routing, experts, and the gradient that comes from above."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor
    down_bias: Tensor
    grad_TD: Tensor
    tokens_of_rank: list[int]

    @property
    def num_experts(self) -> int:
        return self.gate_up.shape[0]

    def of_rank(self, values: Tensor, rank: int) -> Tensor:
        return values.split(self.tokens_of_rank)[rank].clone()

    @property
    def parameters(self) -> list[Tensor]:
        return [self.gate_up, self.down, self.gate_up_bias, self.down_bias]


def make_problem(
    tokens_of_rank: list[int],
    *,
    num_experts: int,
    num_choices: int,
    seed: int,
    skew: str = "even",
    dropped: float = 0.1,
    dim_model: int = DIM_MODEL,
    dim_hidden: int = DIM_HIDDEN,
) -> Problem:
    """A problem that is the same on every rank."""
    random = torch.Generator().manual_seed(seed)
    num_tokens = sum(tokens_of_rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    popularity_E = torch.ones(num_experts)
    if skew == "zipf":
        popularity_E = 1 / torch.arange(1, num_experts + 1)
    if skew == "one":
        popularity_E = torch.zeros(num_experts)
        popularity_E[-num_choices:] = 1
    ids_TK = torch.zeros((0, num_choices), dtype=torch.int64)
    if num_tokens:
        ids_TK = popularity_E.expand(num_tokens, -1).multinomial(num_choices, generator=random)
    weights_TK = normal(num_tokens, num_choices).abs() + 0.1
    is_dropped = torch.rand(num_tokens, num_choices, generator=random) < dropped
    return Problem(
        x_TD=normal(num_tokens, dim_model),
        ids_TK=ids_TK.masked_fill(is_dropped, num_experts),
        weights_TK=weights_TK.masked_fill(is_dropped, 0.0),
        gate_up=normal(num_experts, 2 * dim_hidden, dim_model) / 2,
        down=normal(num_experts, dim_model, dim_hidden) / 2,
        gate_up_bias=normal(num_experts, 2 * dim_hidden),
        down_bias=normal(num_experts, dim_model),
        grad_TD=normal(num_tokens, dim_model),
        tokens_of_rank=tokens_of_rank,
    )


@dataclass
class Answer:
    """What a layer gives: outputs and all gradients."""

    y_TD: Tensor
    x_grad: Tensor
    weights_grad: Tensor
    parameter_grads: list[Tensor]


def masked_experts(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, parameters: list[Tensor]
) -> Tensor:
    """Every expert on every token, times the weights of the tokens that chose it."""
    gate_up, down, gate_up_bias, down_bias = parameters
    y_TD = torch.zeros_like(x_TD)
    for expert in range(len(gate_up)):
        gate, up = (x_TD @ gate_up[expert].T + gate_up_bias[expert]).chunk(2, dim=1)
        out_TD = (F.silu(gate) * up) @ down[expert].T + down_bias[expert]
        share_T = (weights_TK * (ids_TK == expert)).sum(dim=1)
        y_TD = y_TD + share_T[:, None] * out_TD
    return y_TD


def dense_answer(problem: Problem) -> Answer:
    x_TD, weights_TK = problem.x_TD.clone(), problem.weights_TK.clone()
    parameters = [tensor.clone() for tensor in problem.parameters]
    leaves = [x_TD, weights_TK, *parameters]
    for leaf in leaves:
        leaf.requires_grad_()
    y_TD = masked_experts(x_TD, problem.ids_TK, weights_TK, parameters)
    grads = torch.autograd.grad(y_TD, leaves, problem.grad_TD)
    return Answer(y_TD.detach(), grads[0], grads[1], list(grads[2:]))


def rank_routing(problem: Problem, rank: int) -> tuple[Tensor, Routing]:
    """A rank's tokens and routing, as leaves that want gradients."""
    x_TD = problem.of_rank(problem.x_TD, rank).requires_grad_()
    weights_TK = problem.of_rank(problem.weights_TK, rank).requires_grad_()
    return x_TD, Routing(problem.of_rank(problem.ids_TK, rank), weights_TK, problem.num_experts)


def rank_parameters(problem: Problem, slots: ExpertSlots, rank: int) -> list[Tensor]:
    """The parameters of a rank's slots; NaN in empty ones, which nobody may read."""
    experts = slots.experts_of(rank)
    parameters = []
    for tensor in problem.parameters:
        own = torch.full((len(experts), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        for slot, expert in enumerate(experts):
            if expert >= 0:
                own[slot] = tensor[expert]
        parameters.append(own.requires_grad_())
    return parameters


def stack_of(parameters: list[Tensor]) -> StackedExperts:
    gate_up, down, gate_up_bias, down_bias = parameters
    return StackedExperts(
        gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def run_experts(rows_RD: Tensor, counts_S: Tensor, parameters: list[Tensor]) -> Tensor:
    return grouped_expert_mlp(
        rows_RD, counts_S, stack_of(parameters), activation="silu", impl="reference"
    )


def expert_gradients(
    problem: Problem, slots: ExpertSlots, parameters_of_rank: list[list[Tensor]]
) -> list[Tensor]:
    """Gradients by logical expert, summed over the ranks that hold a copy."""
    totals = [torch.zeros_like(tensor) for tensor in problem.parameters]
    for rank, parameters in enumerate(parameters_of_rank):
        for slot, expert in enumerate(slots.experts_of(rank)):
            for total, grad in zip(totals, parameters, strict=True):
                if expert >= 0:
                    total[expert] += grad[slot]
    return totals


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """fp64 sums of a few dozen terms near 1, in another order."""
    torch.testing.assert_close(
        actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}"
    )


def assert_equal_to_dense(problem: Problem, slots: ExpertSlots, answers: list[Answer]) -> None:
    expected = dense_answer(problem)
    assert_same(torch.cat([a.y_TD for a in answers]), expected.y_TD, "y")
    assert_same(torch.cat([a.x_grad for a in answers]), expected.x_grad, "x.grad")
    weights_grad = expected.weights_grad.masked_fill(problem.ids_TK == problem.num_experts, 0.0)
    assert_same(torch.cat([a.weights_grad for a in answers]), weights_grad, "weights.grad")
    totals = expert_gradients(problem, slots, [a.parameter_grads for a in answers])
    for actual, wanted in zip(totals, expected.parameter_grads, strict=True):
        assert_same(actual, wanted, "parameter gradients")
