"""Balanced assignment in training: S-BASE (Sinkhorn) and BASE (linear assignment).

Training routes by an assignment that gives every expert its share of a group of tokens; evaluation
takes each token's best experts. No gradient goes through the assignment: the weight of a chosen
expert is a function of its raw score. Shape suffixes: T tokens, E experts, K choices of a token,
G groups, S tokens of a group.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.switch import require_top_k


class AssignmentGate(Gate):
    """Weight `sigmoid(logit)` for one expert, softmax over the logits of the chosen for more."""

    default_loss_weights: ClassVar = {}

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        if self.training and len(logits_TE):
            groups = logits_TE.detach().unflatten(0, (self.num_groups, -1)).unbind()
            ids_TK = torch.cat([self.assign(logits_SE) for logits_SE in groups])
        else:
            ids_TK = logits_TE.detach().topk(self.top_k, dim=-1).indices
        chosen_TK = logits_TE.gather(1, ids_TK)
        weights_TK = chosen_TK.sigmoid() if self.top_k == 1 else chosen_TK.softmax(dim=-1)
        return Choice(ids_TK, weights_TK, logits_TE, logits_TE.softmax(dim=-1))

    @abstractmethod
    def assign(self, logits_SE: Tensor) -> Tensor:
        """`[S, K]` int64 experts for the tokens of one group."""


class Sinkhorn(AssignmentGate):
    """S-BASE (Clark et al. 2022): the top-k of the optimal transport plan with uniform marginals.

    Args:
        max_iterations: Of Sinkhorn's algorithm, in the logarithmic domain.
        tolerance: On the CPU it ends when the mean change of the experts' scaling falls below
            this; elsewhere it makes all iterations, because looking would wait for the device.

    Raises:
        ValueError: `max_iterations` is below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        max_iterations: int = 50,
        tolerance: float = 1e-4,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if max_iterations < 1:
            raise ValueError(f"max_iterations must be at least 1, got {max_iterations}")
        self.max_iterations = max_iterations
        self.tolerance = tolerance

    def assign(self, logits_SE: Tensor) -> Tensor:
        plan_SE = log_transport_plan(logits_SE, self.max_iterations, self.tolerance)
        return plan_SE.topk(self.top_k, dim=-1).indices


class Base(AssignmentGate):
    """BASE (Lewis et al. 2021): the assignment of tokens to experts with the highest total score.

    Every expert gets `ceil(S / E)` tokens of a group or fewer. Solved exactly on the host (SciPy's
    `linear_sum_assignment`, cubic in the group: some hundred tokens a group are fine, thousands
    are not; `num_groups` divides a batch, and `Sinkhorn` is the fast approximation).

    Args:
        top_k: Must be 1.

    Raises:
        ValueError: `top_k` is not 1.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        require_top_k(self, 1)

    def assign(self, logits_SE: Tensor) -> Tensor:
        return best_assignment(logits_SE)[:, None]


# A compiler takes either for one call: one would unroll, the other leaves torch.
@torch.library.custom_op(
    "moe_runtime::log_transport_plan",
    mutates_args=(),
    schema="(Tensor logits, int max_iterations, float tolerance) -> Tensor",
)
def log_transport_plan(logits_SE: Tensor, max_iterations: int, tolerance: float) -> Tensor:
    """Logarithm of the plan `diag(a) exp(logits) diag(b)` with row sums 1/S and column sums 1/E.

    The columns are scaled last, so that their sums are exact and those of the rows approximate.
    """
    num_tokens, num_experts = logits_SE.shape
    log_b_E = logits_SE.new_zeros(num_experts)
    log_a_S = logits_SE.new_zeros(num_tokens)
    for _ in range(max_iterations):
        log_a_S = -math.log(num_tokens) - (logits_SE + log_b_E).logsumexp(dim=1)
        before_E = log_b_E
        log_b_E = -math.log(num_experts) - (logits_SE + log_a_S[:, None]).logsumexp(dim=0)
        if logits_SE.is_cpu and float((log_b_E - before_E).abs().mean()) <= tolerance:
            break
    return log_a_S[:, None] + logits_SE + log_b_E


@log_transport_plan.register_fake
def _(logits_SE: Tensor, max_iterations: int, tolerance: float) -> Tensor:
    return torch.empty_like(logits_SE)


@torch.library.custom_op(
    "moe_runtime::best_assignment", mutates_args=(), schema="(Tensor logits) -> Tensor"
)
def best_assignment(logits_SE: Tensor) -> Tensor:
    """`[S]` int64: the experts that maximise the sum of scores, each used `ceil(S / E)` times or
    fewer."""
    from scipy.optimize import linear_sum_assignment

    num_tokens, num_experts = logits_SE.shape
    scores = logits_SE.double().cpu().numpy().repeat(math.ceil(num_tokens / num_experts), axis=1)
    _, columns = linear_sum_assignment(scores, maximize=True)
    experts_S = torch.from_numpy(columns) // math.ceil(num_tokens / num_experts)
    return experts_S.to(logits_SE.device)


@best_assignment.register_fake
def _(logits_SE: Tensor) -> Tensor:
    return logits_SE.new_empty(logits_SE.shape[0], dtype=torch.int64)
