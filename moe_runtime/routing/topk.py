"""Top-k gates over softmax or sigmoid scores, with selection bias and expert groups.

Sources: top-k softmax, Shazeer et al. 2017 and Mixtral (softmax over the chosen scores, which
equals renormalising), Qwen-MoE and OLMoE (softmax before, with or without renormalising); sigmoid
scores, selection bias and expert groups, DeepSeek-V3. Shape suffixes: T tokens, E experts, K
choices of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Self, Unpack, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext, is_made_again
from moe_runtime.routing.value import Routing, expert_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SoftmaxOrder = Literal["before", "after"]


class SoftmaxTopK(Gate):
    """The k highest scores; weights are softmax probabilities.

    `softmax="before"`: `p = softmax(logits)`, weights `p` of the chosen, divided by their sum if
    `renormalize`. `softmax="after"`: softmax over the chosen logits alone (what Mixtral and
    gpt-oss do; equal to `before` with renormalising).

    Args:
        softmax: Before or after the selection; `after` needs `top_k` of 2 or more.
        renormalize: Weights of a token add up to 1. None means that they do, but for `top_k=1`,
            where the weight is the probability itself (Switch, Megatron).
        scale: Factor of the weights.
        bias_update_rate: Step of the aux-loss-free selection bias (DeepSeek-V3 uses 1e-3); 0
            means no bias. See `after_step`.

    Raises:
        ValueError: An unknown `softmax`, one that gives a single choice the weight 1, or as `Gate`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        softmax: SoftmaxOrder = "before",
        renormalize: bool | None = None,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if softmax not in get_args(SoftmaxOrder):
            raise ValueError(f"softmax must be 'before' or 'after', got {softmax!r}")
        if softmax == "after" and top_k == 1:
            raise ValueError(_CONSTANT_WEIGHT.format('softmax="after"'))
        self.softmax = softmax
        self.renormalize = renormalizes(renormalize, top_k)
        self.scale = scale
        self.bias_update_rate = bias_update_rate
        self.expert_bias: Tensor | None
        self.load_E: Tensor | None = None
        if bias_update_rate:
            device = options.get("device")
            bias_E = torch.zeros(num_experts, dtype=torch.float32, device=device)
            self.register_buffer("expert_bias", bias_E)
            self.load_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        else:
            self.expert_bias = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in `nn.Module`, but the bias stays fp32: a step of 1e-3 is lost in bf16."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        moved = self.expert_bias
        if before is not None and moved is not None and moved.dtype != torch.float32:
            self.expert_bias = before.to(moved.device)
        return self

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Scores that experts are chosen by and weighted with."""
        return logits_TE.softmax(dim=-1)

    def select(self, scores_TE: Tensor) -> Tensor:
        """`[T, K]` int64: the best experts of each token, best first."""
        ranked = scores_TE.detach()
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        return ranked.topk(self.top_k, dim=-1).indices

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        scores_TE = self.scores(logits_TE)
        ids_TK = self.select(scores_TE)
        if self.softmax == "after":
            weights_TK = logits_TE.gather(1, ids_TK).softmax(dim=-1)
        else:
            weights_TK = scores_TE.gather(1, ids_TK)
            if self.renormalize:
                weights_TK = normalize(weights_TK)
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        return Choice(ids_TK, weights_TK, logits_TE, self.shares(scores_TE))

    def shares(self, scores_TE: Tensor) -> Tensor:
        """Scores as shares of 1 in each row, for the losses."""
        return scores_TE

    def finish(self, choice: Choice, context: RoutingContext) -> Routing:
        is_training = self.training and torch.is_grad_enabled()
        if self.load_E is not None and is_training and not is_made_again():
            self.load_E += expert_counts(choice.ids_TK, self.num_experts)
        return super().finish(choice, context)

    @torch.no_grad()
    def after_step(self, group: ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """Moves the selection bias against the load seen since the last call: `bias += rate *
        sign(mean(load) - load)`, minus the mean of the step (DeepSeek-V3; torchtitan).

        Activation checkpointing, of some calls or of all, counts a load once.

        Args:
            group: As of `Gate`; the loads of these processes are added up.
            skipped: As of `Gate`.
        """
        super().after_step(group, skipped=skipped)
        if self.expert_bias is None or self.load_E is None:
            return
        if not skipped:
            if (group := group or self._replicas) is not None:
                torch.distributed.all_reduce(self.load_E, group=group)
            load_E = self.load_E.double()
            step = self.bias_update_rate * torch.sign(load_E.mean() - load_E)
            self.expert_bias += step - step.mean()
        self.load_E.zero_()


class SigmoidTopK(SoftmaxTopK):
    """The k highest scores, which are independent sigmoids (DeepSeek-V3, Llama 4).

    Weights are the sigmoids of the chosen, divided by their sum if `renormalize`. The selection
    bias decides who is chosen and never enters a weight.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        renormalize: bool | None = None,
        scale: float = 1.0,
        bias_update_rate: float = 0.0,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            renormalize=renormalize,
            scale=scale,
            bias_update_rate=bias_update_rate,
            **options,
        )

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def shares(self, scores_TE: Tensor) -> Tensor:
        return normalize(scores_TE)


class GroupLimitedTopK(SoftmaxTopK):
    """Top-k within the best groups of experts, so that a token reaches few devices (DeepSeek).

    Experts form `num_expert_groups` equal runs. A group's score is the sum of its
    `group_score_experts` best (biased) scores; the `num_limited_groups` best groups stay, and the
    k best experts among them are chosen.

    Args:
        num_expert_groups: Groups of experts.
        num_limited_groups: Groups that a token may use.
        group_score_experts: Experts that count for a group's score: 2 in DeepSeek-V3, 1 in V2;
            Megatron takes `top_k / num_limited_groups`.
        score: `sigmoid` (V3) or `softmax` (V2).

    Raises:
        ValueError: Groups that do not divide, or that hold fewer than `top_k` experts.
    """

    default_loss_weights: ClassVar = {"sequence_balance": 1e-4}

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_expert_groups: int = 1,
        num_limited_groups: int = 1,
        group_score_experts: int = 2,
        score: Literal["sigmoid", "softmax"] = "sigmoid",
        renormalize: bool | None = None,
        scale: float = 1.0,
        bias_update_rate: float = 1e-3,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(
            hidden_size,
            num_experts,
            top_k,
            renormalize=renormalize,
            scale=scale,
            bias_update_rate=bias_update_rate,
            **options,
        )
        if num_expert_groups < 1 or num_experts % num_expert_groups:
            raise ValueError(
                f"num_expert_groups must divide num_experts={num_experts}, got {num_expert_groups}"
            )
        group_size = num_experts // num_expert_groups
        if not 1 <= num_limited_groups <= num_expert_groups:
            raise ValueError(
                f"num_limited_groups must be in 1..{num_expert_groups}, got {num_limited_groups}"
            )
        if num_limited_groups * group_size < top_k:
            raise ValueError(
                f"{num_limited_groups} groups of {group_size} experts cannot give top_k={top_k}; "
                f"raise num_limited_groups or lower num_expert_groups"
            )
        if score not in ("sigmoid", "softmax"):
            raise ValueError(f"score must be 'sigmoid' or 'softmax', got {score!r}")
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.group_score_experts = min(group_score_experts, group_size)
        self.score = score

    def scores(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid() if self.score == "sigmoid" else logits_TE.softmax(dim=-1)

    def shares(self, scores_TE: Tensor) -> Tensor:
        return normalize(scores_TE) if self.score == "sigmoid" else scores_TE

    def select(self, scores_TE: Tensor) -> Tensor:
        ranked = scores_TE.detach()
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        grouped_TGM = ranked.unflatten(1, (self.num_expert_groups, -1))
        group_scores_TG = grouped_TGM.topk(self.group_score_experts, dim=-1).values.sum(dim=-1)
        best_TL = group_scores_TG.topk(self.num_limited_groups, dim=-1).indices
        is_open_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter(1, best_TL, True)
        limited_TGM = grouped_TGM.masked_fill(~is_open_TG[:, :, None], -torch.inf)
        return limited_TGM.flatten(1).topk(self.top_k, dim=-1).indices


class RoundRobinTopK(SoftmaxTopK):
    """Perfectly balanced choices in turn, with the weights of their real scores.

    For benchmarks: it takes the skew of a random model out of a measurement.
    """

    default_loss_weights: ClassVar = {}

    def select(self, scores_TE: Tensor) -> Tensor:
        choices = torch.arange(scores_TE.shape[0] * self.top_k, device=scores_TE.device)
        return (choices % self.num_experts).view(-1, self.top_k)


_CONSTANT_WEIGHT = (
    "{} gives the one choice of top_k=1 the weight 1 whatever its score, so the gate would get no "
    "gradient from the task; leave it out: the weight is then the gate's probability"
)


def renormalizes(asked: bool | None, top_k: int) -> bool:
    """Whether the weights of a token are divided by their sum: they are, unless there is only one.

    Raises:
        ValueError: It was asked for a single choice, whose weight would always be 1.
    """
    if asked and top_k == 1:
        raise ValueError(_CONSTANT_WEIGHT.format("renormalize=True"))
    return top_k > 1 if asked is None else asked


def normalize(weights: Tensor) -> Tensor:
    """Rows that add up to 1; a row of zeros stays one."""
    return F.normalize(weights, p=1, dim=-1, eps=1e-20)
