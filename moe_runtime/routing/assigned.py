"""Gates that do not take each token's own best experts: assignments, tables, masks.

S-BASE (Sinkhorn) and BASE give every expert its share of a group of tokens in training; evaluation
takes each token's best experts. No gradient goes through the assignment.

Gates that decide with a mask let tokens use different numbers of experts. A `Routing` has as many
columns as the widest token needs; finding that number waits for the device once.

Shape suffixes: T tokens, E experts, K choices of a token, G groups, S tokens of a group, C tokens
that an expert takes.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext, score_dtype
from moe_runtime.routing.capacity import Capacity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
        tolerance: On the CPU it ends when the mean change of the experts' scaling falls below this;
            elsewhere it makes all iterations, because looking would wait for the device.
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

    Every expert gets `ceil(S / E)` tokens of a group or fewer. Solved exactly on the host, cubic in
    the group: some hundred tokens a group are fine, thousands are not. `num_groups` divides a
    batch; `Sinkhorn` is the fast approximation.
    """

    fixed_top_k: ClassVar = 1

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


class Hash(Gate):
    """A fixed table says which experts a token number goes to; every weight is `1 / k`.

    Hash routing (Roller et al. 2021; HASH in the routed scaling laws). There are no losses.

    Args:
        frequencies: How often each token number occurs: the most frequent go first, to the experts
            with the least load. Without, a random table with equally many token numbers for each
            expert.
        seed: Of the random table.

    Attributes:
        table: `[vocab_size, k]` int64, a buffer that is saved.
    """

    default_loss_weights: ClassVar = {}
    is_linear: ClassVar = False

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        vocab_size: int,
        frequencies: Sequence[float] | None = None,
        seed: int = 0,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if self.loss_weights:
            raise ValueError("hash routing has no scores to train: it takes no loss_weights")
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1, got {vocab_size}")
        if frequencies is not None and len(frequencies) != vocab_size:
            raise ValueError(f"expected {vocab_size} frequencies, got {len(frequencies)}")
        self._frequencies, self._seed = frequencies, seed
        self.table: Tensor
        device = options.get("device")
        table = torch.empty(vocab_size, top_k, dtype=torch.int64, device=device)
        self.register_buffer("table", table)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if (weights := self._frequencies) is None:
            random = torch.Generator("cpu").manual_seed(self._seed)
            order = torch.randperm(len(self.table), generator=random, device="cpu").tolist()
            weights = [1.0] * len(order)
        else:
            order = sorted(range(len(weights)), key=lambda token: -weights[token])
        table = balanced_table(order, weights, self.num_experts, self.top_k)
        self.table.copy_(torch.tensor(table, device="cpu"))

    def decide(self, x_TD: Tensor, context: RoutingContext) -> Choice:
        ids_T = context.token_ids_T
        if ids_T is None:
            raise ValueError(f"{self.name}: hash routing needs token_ids, one for each token")
        if ids_T.shape != x_TD.shape[:1] or ids_T.dtype != torch.int64:
            raise ValueError(
                f"{self.name}: token_ids must be {x_TD.shape[0]} int64 numbers, got "
                f"{list(ids_T.shape)} of {ids_T.dtype}"
            )
        if ids_T.is_cpu and ids_T.numel() and not torch.compiler.is_compiling():
            low, high = int(ids_T.min()), int(ids_T.max())
            if low < 0 or high >= len(self.table):
                raise ValueError(
                    f"{self.name}: token_ids must be in [0, {len(self.table)}), got {low}..{high}"
                )
        no_scores_TE = x_TD.new_zeros(len(x_TD), self.num_experts, dtype=score_dtype(x_TD))
        return self.choose(no_scores_TE, context)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        """Looks up the table; `logits_TE` gives no more than shape and precision."""
        ids_TK = self.table[context.token_ids_T]
        weights_TK = torch.full(
            ids_TK.shape, 1 / self.top_k, dtype=logits_TE.dtype, device=logits_TE.device
        )
        return Choice(ids_TK, weights_TK, logits_TE, logits_TE.softmax(dim=-1))


def balanced_table(
    order: Sequence[int], frequencies: Sequence[float], num_experts: int, top_k: int
) -> list[list[int]]:
    """Experts of each token number, given out in `order` to the least loaded experts.

    Ties go to the expert with fewer tokens, then to the lower number.
    """
    table: list[list[int]] = [[]] * len(frequencies)
    heap = [(0.0, 0, expert) for expert in range(num_experts)]
    for token in order:
        chosen = [heapq.heappop(heap) for _ in range(top_k)]
        table[token] = [expert for _, _, expert in chosen]
        for load, num_tokens, expert in chosen:
            heapq.heappush(heap, (load + frequencies[token], num_tokens + 1, expert))
    return table


class ExpertChoice(Gate):
    """Each expert takes its best tokens (Zhou et al. 2022), so the load is uniform.

    With `p = softmax(logits)`, expert e takes the `C = ceil(factor * S * k / E)` tokens of a group
    of S with the highest `p[:, e]`, with those weights. The choice looks at later tokens too: do
    not use it for autoregressive generation.

    Args:
        top_k: Mean number of experts of a token.
        capacity: Only its factor counts; None means 1.
        max_experts_per_token: A token keeps its best so many experts (the paper's capped variant,
            without its linear programme). The number of columns is this one, without waiting for a
            device.
    """

    default_loss_weights: ClassVar = {}

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        max_experts_per_token: int | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if max_experts_per_token is not None and not 1 <= max_experts_per_token <= num_experts:
            raise ValueError(
                f"max_experts_per_token must be in 1..{num_experts}, got {max_experts_per_token}"
            )
        self.max_experts_per_token = max_experts_per_token

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        ranked_GSE = probs_TE.detach().unflatten(0, (self.num_groups, -1))
        group_size = ranked_GSE.shape[1]
        capacity = self.capacity or Capacity(1.0)
        num_taken = capacity.slots_per_expert(group_size, self.top_k, self.num_experts)
        taken_GCE = ranked_GSE.topk(min(num_taken, group_size), dim=1).indices
        is_taken_GSE = torch.zeros_like(ranked_GSE, dtype=torch.bool).scatter(1, taken_GCE, True)
        ids_TK, weights_TK = compact(
            is_taken_GSE.flatten(0, 1), probs_TE, self.max_experts_per_token
        )
        return Choice(ids_TK, weights_TK, logits_TE, probs_TE)

    def places(self, choice: Choice, capacity: Capacity) -> tuple[Tensor, Tensor]:
        slots_TK, _ = super().places(choice, capacity)
        return slots_TK, choice.ids_TK < self.num_experts  # no expert took too many


class DenseToSparse(Gate):
    """Dense-to-sparse (EvoMoE, Nie et al. 2021): all experts at first, fewer as training goes on.

    `p = softmax((logits + gumbel) / tau)`; experts with `p > threshold`, and always the best one,
    have weight `p`. `tau` falls linearly from `tau_start` to `tau_end` in `anneal_steps` calls of
    `after_step`. Gumbel noise is added in training only. The schedule is ours: the paper leaves it
    open.

    Args:
        top_k: Experts that a token uses at least (1 in the paper).
        threshold: None means `1 / (2 * num_experts)`.

    Attributes:
        num_steps: Calls of `after_step` so far, a buffer that is saved.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        tau_start: float = 2.0,
        tau_end: float = 0.3,
        anneal_steps: int = 10_000,
        threshold: float | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if not 0 < tau_end <= tau_start or anneal_steps < 1:
            raise ValueError(
                "expected 0 < tau_end <= tau_start and anneal_steps >= 1, got "
                f"tau_start={tau_start}, tau_end={tau_end}, anneal_steps={anneal_steps}"
            )
        self.threshold = 1 / (2 * num_experts) if threshold is None else threshold
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be in [0, 1), got {threshold}")
        self.tau_start, self.tau_end, self.anneal_steps = tau_start, tau_end, anneal_steps
        self.num_steps: Tensor
        device = options.get("device")
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64, device=device))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.num_steps.zero_()

    @property
    def tau(self) -> Tensor:
        progress = (self.num_steps / self.anneal_steps).clamp(max=1.0)
        return self.tau_start + (self.tau_end - self.tau_start) * progress

    @torch.no_grad()
    def after_step(self, group: ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """Counts a training step, unless it was skipped."""
        super().after_step(group, skipped=skipped)
        self.num_steps += not skipped

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        noisy_TE = logits_TE
        if self.training:
            uniform = torch.rand(
                logits_TE.shape,
                dtype=logits_TE.dtype,
                device=logits_TE.device,
                generator=context.generator,
            )
            # away from 0 and 1, where the double logarithm is infinite
            noisy_TE = logits_TE - torch.log(-torch.log(uniform.clamp(1e-7, 1 - 1e-7)))
        probs_TE = (noisy_TE / self.tau.to(logits_TE.dtype)).softmax(dim=-1)
        ranked_TE = probs_TE.detach()
        is_used_TE = ranked_TE > self.threshold
        is_used_TE = is_used_TE.scatter(1, ranked_TE.topk(self.top_k, dim=-1).indices, True)
        ids_TK, weights_TK = compact(is_used_TE, probs_TE)
        return Choice(ids_TK, weights_TK, logits_TE, probs_TE)


def compact(
    is_used_TE: Tensor, weights_TE: Tensor, num_columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """A mask with weights as `ids [T, K]` and `weights [T, K]`, the best of each token first.

    Args:
        num_columns: `K`, of which the best are kept; None means as many as the token with the most
            experts has (at least 1), which waits for the device.
    """
    num_experts = is_used_TE.shape[1]
    if num_columns is None:
        widest = is_used_TE.sum(dim=1).max() if len(is_used_TE) else is_used_TE.sum()
        num_columns = max(1, int(widest))
    ranked_TE = weights_TE.detach().masked_fill(~is_used_TE, -1.0)
    ids_TK = ranked_TE.topk(num_columns, dim=-1).indices
    is_used_TK = is_used_TE.gather(1, ids_TK)
    return (
        ids_TK.masked_fill(~is_used_TK, num_experts),
        weights_TE.gather(1, ids_TK).masked_fill(~is_used_TK, 0.0),
    )
