"""Gates that take the k best experts of each token, by their scores or within groups.

Sources: top-k softmax, Shazeer et al. 2017 and Mixtral (softmax over the chosen scores, which
equals renormalising), Qwen-MoE and OLMoE (softmax before); sigmoid scores, selection bias and
expert groups, DeepSeek-V3. Shape suffixes: T tokens, E experts, K choices of a token, G groups, M
experts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Self, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_runtime.routing.base import (
    Choice,
    Gate,
    GateOptions,
    RoutingContext,
    is_made_again,
    place_of,
    score_dtype,
)
from moe_runtime.routing.capacity import Capacity
from moe_runtime.routing.losses import squared_variation
from moe_runtime.routing.value import Routing, expert_counts

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Score = Literal["softmax", "sigmoid"]


class TopKOptions(GateOptions, total=False):
    """Keyword arguments that every `TopK` takes."""

    renormalize: bool | None
    scale: float
    bias_update_rate: float


class TopK(Gate):
    """The k highest scores, with an optional selection bias.

    The bias decides which experts are chosen and never enters a weight.

    Args:
        renormalize: Weights of a token add up to 1. None means that they do, but for `top_k=1`,
            where the weight is the probability itself (Switch, Megatron).
        scale: Factor of the weights.
        bias_update_rate: Step of the aux-loss-free selection bias (DeepSeek-V3 uses 1e-3); 0
            means no bias. See `after_step`.

    Attributes:
        score: What experts are chosen by and weighted with: shares of 1, or independent sigmoids.
    """

    score: Score = "softmax"

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
        super().__init__(hidden_size, num_experts, top_k, **options)
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

    def weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        """`[T, K]`: of the chosen, before `scale`."""
        weights_TK = scores_TE.gather(1, ids_TK)
        return normalize(weights_TK) if self.renormalize else weights_TK

    def biased(self, scores_TE: Tensor) -> Tensor:
        """What the choice looks at: the scores, with the selection bias."""
        ranked = scores_TE.detach()
        return ranked if self.expert_bias is None else ranked + self.expert_bias

    def select(self, scores_TE: Tensor) -> Tensor:
        """`[T, K]` int64: the best experts of each token, best first."""
        return self.biased(scores_TE).topk(self.top_k, dim=-1).indices

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        is_softmax = self.score == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if is_softmax else logits_TE.sigmoid()
        ids_TK = self.select(scores_TE)
        weights_TK = self.weights(logits_TE, scores_TE, ids_TK)
        if self.scale != 1.0:
            weights_TK = weights_TK * self.scale
        shares_TE = scores_TE if is_softmax else normalize(scores_TE)
        return Choice(ids_TK, weights_TK, logits_TE, shares_TE)

    def finish(self, choice: Choice, context: RoutingContext) -> Routing:
        is_training = self.training and torch.is_grad_enabled()
        if self.load_E is not None and is_training and not is_made_again():
            self.load_E += expert_counts(choice.ids_TK, self.num_experts)
        return super().finish(choice, context)

    @torch.no_grad()
    def after_step(self, group: ProcessGroup | None = None, *, skipped: bool = False) -> None:
        """Moves the selection bias against the load since the last call: `bias += rate *
        sign(mean(load) - load)`, minus the mean of the step (DeepSeek-V3; torchtitan).

        The loads of the processes of `group` are added up. Activation checkpointing counts a load
        once.
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


class SoftmaxTopK(TopK):
    """The k highest scores; weights are softmax probabilities.

    `softmax="before"`: `p = softmax(logits)`, weights `p` of the chosen, divided by their sum if
    `renormalize`. `softmax="after"`: softmax over the chosen logits alone (what Mixtral and
    gpt-oss do; equal to `before` with renormalising).

    Args:
        softmax: Before or after the selection; `after` needs `top_k` of 2 or more.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        softmax: Literal["before", "after"] = "before",
        **options: Unpack[TopKOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        require_choice("softmax", softmax, "before", "after")
        if softmax == "after" and top_k == 1:
            raise ValueError(_CONSTANT_WEIGHT.format('softmax="after"'))
        self.softmax = softmax

    def weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor) -> Tensor:
        if self.softmax == "after":
            return logits_TE.gather(1, ids_TK).softmax(dim=-1)
        return super().weights(logits_TE, scores_TE, ids_TK)


class SigmoidTopK(TopK):
    """The k highest scores, which are independent sigmoids (DeepSeek-V3, Llama 4).

    Weights are the sigmoids of the chosen, divided by their sum if `renormalize`.
    """

    score = "sigmoid"


class GroupLimitedTopK(TopK):
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
        score: Score = "sigmoid",
        **options: Unpack[TopKOptions],
    ) -> None:
        options.setdefault("bias_update_rate", 1e-3)
        super().__init__(hidden_size, num_experts, top_k, **options)
        group_size = _group_size(num_experts, num_expert_groups)
        if not 1 <= num_limited_groups <= num_expert_groups:
            raise ValueError(
                f"num_limited_groups must be in 1..{num_expert_groups}, got {num_limited_groups}"
            )
        if num_limited_groups * group_size < top_k:
            raise ValueError(
                f"{num_limited_groups} groups of {group_size} experts cannot give top_k={top_k}; "
                f"raise num_limited_groups or lower num_expert_groups"
            )
        require_choice("score", score, "sigmoid", "softmax")
        self.num_expert_groups = num_expert_groups
        self.num_limited_groups = num_limited_groups
        self.group_score_experts = min(group_score_experts, group_size)
        self.score = score

    def select(self, scores_TE: Tensor) -> Tensor:
        grouped_TGM = self.biased(scores_TE).unflatten(1, (self.num_expert_groups, -1))
        group_scores_TG = grouped_TGM.topk(self.group_score_experts, dim=-1).values.sum(dim=-1)
        best_TL = group_scores_TG.topk(self.num_limited_groups, dim=-1).indices
        ids_TK, _ = _best_within(grouped_TGM, best_TL, self.top_k)
        return ids_TK


class RoundRobinTopK(SoftmaxTopK):
    """Perfectly balanced choices in turn, with the weights of their real scores.

    For benchmarks: it takes the skew of a random model out of a measurement.
    """

    default_loss_weights: ClassVar = {}

    def select(self, scores_TE: Tensor) -> Tensor:
        choices = torch.arange(scores_TE.shape[0] * self.top_k, device=scores_TE.device)
        return (choices % self.num_experts).view(-1, self.top_k)


class CosineTopK(TopK):
    """`logits = cos(P x, m_e) * exp(min(t, log 100))`, then top-k softmax.

    Chi et al. 2022; Tutel's `cosine_top`. Scores do not depend on the length of a token, which
    keeps representations from collapsing onto the experts' directions.

    Args:
        projection_size: Width that tokens are projected to.
        temperature: The scores start with the factor `1 / temperature`.

    Attributes:
        projector: `[P, D]`.
        centers: `[E, P]`, a direction for each expert.
        log_scale: Scalar, `t`.
    """

    is_linear: ClassVar = False
    max_scale: ClassVar[float] = 100.0

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        projection_size: int = 256,
        temperature: float = 0.5,
        **options: Unpack[TopKOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if projection_size < 1 or not temperature > 0:
            raise ValueError(
                "projection_size and temperature must be positive, got "
                f"{projection_size} and {temperature}"
            )
        self.temperature = temperature
        place = place_of(options)
        self.projector = nn.Parameter(torch.empty(projection_size, hidden_size, **place))
        self.centers = nn.Parameter(torch.empty(num_experts, projection_size, **place))
        self.log_scale = nn.Parameter(torch.empty((), **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projector, std=1 / math.sqrt(self.hidden_size))
        nn.init.normal_(self.centers, std=0.01)
        nn.init.constant_(self.log_scale, math.log(1 / self.temperature))

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        precise = score_dtype(x_TD)
        projected_TP = F.linear(x_TD.to(precise), self.projector.to(precise))
        centers_EP = F.normalize(self.centers.to(precise), dim=-1)
        cosines_TE = F.linear(F.normalize(projected_TP, dim=-1), centers_EP)
        return cosines_TE * self.log_scale.to(precise).clamp(max=math.log(self.max_scale)).exp()


class NoisyTopK(Gate):
    """`H = x W + N(0, 1) * (softplus(x W_noise) + 1e-2)`; weights: softmax over the top-k of H.

    Shazeer et al. 2017. For one choice the weight is its probability among all experts. Noise is
    added in training only. Losses: `importance`, and `load`, the squared coefficient of variation
    of the expected number of tokens of each expert, which is differentiable in scores and noise.

    Attributes:
        noise_weight: `[E, D]`, zero at the start.
    """

    default_loss_weights: ClassVar = {"importance": 0.01, "load": 0.01}
    own_loss_names: ClassVar = ("load",)
    noise_floor: ClassVar[float] = 1e-2

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, **options: Unpack[GateOptions]
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        self.noise_weight = nn.Parameter(torch.zeros(num_experts, hidden_size, **place_of(options)))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.zeros_(self.noise_weight)

    def decide(self, x_TD: Tensor, context: RoutingContext) -> Choice:
        clean_TE = self.logits(x_TD, context)
        self.check_logits(clean_TE)
        if not self.training:
            return self._choose(clean_TE, clean_TE, None)
        precise = score_dtype(x_TD)
        raw_TE = F.linear(x_TD.to(precise), self.noise_weight.to(precise))
        sigma_TE = F.softplus(raw_TE) + self.noise_floor
        noise_TE = torch.randn(
            sigma_TE.shape, dtype=precise, device=x_TD.device, generator=context.generator
        )
        return self._choose(clean_TE, clean_TE + noise_TE * sigma_TE, sigma_TE)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        return self._choose(logits_TE, logits_TE, None)

    def _choose(self, clean_TE: Tensor, noisy_TE: Tensor, sigma_TE: Tensor | None) -> Choice:
        num_ranked = min(self.top_k + 1, self.num_experts)
        best, ranked_ids = noisy_TE.topk(num_ranked, dim=-1)
        ids_TK = ranked_ids[:, : self.top_k]
        if self.top_k == 1:
            weights_TK = noisy_TE.softmax(dim=-1).gather(1, ids_TK)
        else:
            weights_TK = best[:, : self.top_k].softmax(dim=-1)

        def load_loss() -> Tensor:
            if sigma_TE is None or num_ranked == self.top_k:
                counts_E = expert_counts(ids_TK, self.num_experts)
                return squared_variation(counts_E.to(clean_TE.dtype))
            return squared_variation(self.expected_load(clean_TE, noisy_TE, sigma_TE, best))

        return Choice(ids_TK, weights_TK, clean_TE, clean_TE.softmax(dim=-1), {"load": load_loss})

    def expected_load(
        self, clean_TE: Tensor, noisy_TE: Tensor, sigma_TE: Tensor, best_TK1: Tensor
    ) -> Tensor:
        """`[E]`: expected tokens of each expert if its own noise were drawn again.

        Args:
            best_TK1: `[T, k + 1]`, the best noisy scores, best first.
        """
        kth, next_best = best_TK1[:, -2, None], best_TK1[:, -1, None]
        # the k-th best of the others: for a chosen expert that is the (k+1)-th of all
        threshold_TE = torch.where(noisy_TE > next_best, next_best, kth)
        odds = (clean_TE - threshold_TE) / sigma_TE
        return (0.5 * (1 + torch.erf(odds / math.sqrt(2)))).sum(dim=0)


class Switch(Gate):
    """Top-1: `p = softmax(logits)`, `e = argmax p`, weight `p[e]` (not renormalised).

    Switch Transformer, Fedus et al. 2021. In training the gate's input is multiplied by noise from
    `U(1 - jitter, 1 + jitter)`; the paper's jitter is 0.01.
    """

    fixed_top_k: ClassVar = 1

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 1,
        *,
        jitter: float = 0.01,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {jitter}")
        self.jitter = jitter

    def logits(self, x_TD: Tensor, context: RoutingContext) -> Tensor:
        if self.training and self.jitter:
            noise = torch.rand(
                x_TD.shape, dtype=x_TD.dtype, device=x_TD.device, generator=context.generator
            )
            x_TD = x_TD * (1 - self.jitter + 2 * self.jitter * noise)
        return super().logits(x_TD, context)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        weights_T1, ids_T1 = probs_TE.max(dim=-1, keepdim=True)
        return Choice(ids_T1, weights_T1, logits_TE, probs_TE)


class GShard(Gate):
    """Top-2 of the softmax, normalised; the second expert is used with probability `2 * g2`.

    Lepikhin et al. 2020. In evaluation, or without `random_second`, the second expert is always
    used. With capacity, second choices take places after all first choices of their group (policy
    `choice`); a choice that is not used takes none, and its weight is lost.
    """

    default_loss_weights: ClassVar = {"first_choice_balance": 0.01}
    fixed_top_k: ClassVar = 2

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        random_second: bool = True,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        self.random_second = random_second

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        best_T2, ids_T2 = probs_TE.topk(2, dim=-1)
        weights_T2 = normalize(best_T2)
        if self.random_second and self.training:
            draws_T = torch.rand(
                len(logits_TE), device=logits_TE.device, generator=context.generator
            )
            is_used_T = 2 * weights_T2[:, 1] > draws_T
            is_used_T2 = torch.stack([torch.ones_like(is_used_T), is_used_T], dim=1)
            ids_T2 = ids_T2.masked_fill(~is_used_T2, self.num_experts)
            weights_T2 = weights_T2.masked_fill(~is_used_T2, 0.0)
        return Choice(ids_T2, weights_T2, logits_TE, probs_TE)


class Prototype(Gate):
    """Experts form `k` equal runs; each run's softmax gives a token its best expert there.

    k-top-1 prototyping (M6-T, Yang et al. 2021). The weight is the probability within the run, so a
    token's weights do not add up to 1. With `top_k=1` this is Switch without jitter. M6-T found
    that a balance loss does not help, so none is on by default.

    Args:
        top_k: Prototypes, and experts of a token.
        slots: `k`: an expert's capacity grows with k as usual; `1`: it is that of top-1 routing, so
            that the work does not grow with k.
    """

    default_loss_weights: ClassVar = {}

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        slots: Literal["k", "1"] = "k",
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if num_experts % top_k:
            raise ValueError(
                f"the prototypes (top_k={top_k}) must divide num_experts={num_experts}"
            )
        require_choice("slots", slots, "k", "1")
        self.slots = slots

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TKM = logits_TE.unflatten(1, (self.top_k, -1)).softmax(dim=-1)
        weights_TK, within_TK = probs_TKM.max(dim=-1)
        first_K = torch.arange(self.top_k, device=logits_TE.device) * probs_TKM.shape[2]
        return Choice(within_TK + first_K, weights_TK, logits_TE, probs_TKM.flatten(1) / self.top_k)

    def slot_limit(self, capacity: Capacity, group_size: int) -> int | Tensor:
        top_k = self.top_k if self.slots == "k" else 1
        return capacity.slots_per_expert(group_size, top_k, self.num_experts)


class Sam(Gate):
    """All k experts of a token lie in one group (one device), chosen by the group's score.

    SAM, switch and mixture (HetuMoE, Nie et al. 2022). `p = softmax(logits)`; a group's score is
    the sum (or the maximum) of its experts' p. The best group's k best experts have weights p,
    divided by their sum if `renormalize` (by default where k is 2 or more). The loss `alignment` is
    the mean over the tokens of `sum_e max(0, p_e - p_k)` over the experts e outside the group,
    `p_k` being the weakest chosen. (The form of that loss is our reading: the paper gives none.)

    Args:
        num_expert_groups: Groups of consecutive experts.
        group_score: `sum` or `max`.
    """

    default_loss_weights: ClassVar = {"load_balance": 0.01, "alignment": 0.01}
    own_loss_names: ClassVar = ("alignment",)

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        num_expert_groups: int = 1,
        group_score: Literal["sum", "max"] = "sum",
        renormalize: bool | None = None,
        **options: Unpack[GateOptions],
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        group_size = _group_size(num_experts, num_expert_groups)
        if group_size < top_k:
            raise ValueError(
                f"a group holds {group_size} experts, fewer than top_k={top_k}; lower "
                "num_expert_groups"
            )
        require_choice("group_score", group_score, "sum", "max")
        self.num_expert_groups = num_expert_groups
        self.group_score = group_score
        self.renormalize = renormalizes(renormalize, top_k)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        grouped_TGM = probs_TE.detach().unflatten(1, (self.num_expert_groups, -1))
        scores_TG = grouped_TGM.sum(dim=-1) if self.group_score == "sum" else grouped_TGM.amax(-1)
        best_T1 = scores_TG.argmax(dim=-1, keepdim=True)
        ids_TK, is_outside_TE = _best_within(grouped_TGM, best_T1, self.top_k)
        chosen_TK = probs_TE.gather(1, ids_TK)
        weights_TK = normalize(chosen_TK) if self.renormalize else chosen_TK

        def alignment_loss() -> Tensor:
            excess_TE = (probs_TE - chosen_TK[:, -1:]).clamp(min=0) * is_outside_TE
            return excess_TE.sum() / max(1, len(excess_TE))

        return Choice(ids_TK, weights_TK, logits_TE, probs_TE, {"alignment": alignment_loss})


_CONSTANT_WEIGHT = (
    "{} gives the one choice of top_k=1 the weight 1 whatever its score, so the gate would get no "
    "gradient from the task; leave it out: the weight is then the gate's probability"
)


def renormalizes(asked: bool | None, top_k: int) -> bool:
    """Whether the weights of a token are divided by their sum: by default for k above 1."""
    if asked and top_k == 1:
        raise ValueError(_CONSTANT_WEIGHT.format("renormalize=True"))
    return top_k > 1 if asked is None else asked


def normalize(weights: Tensor) -> Tensor:
    """Rows that add up to 1; a row of zeros stays one."""
    return F.normalize(weights, p=1, dim=-1, eps=1e-20)


def require_choice(name: str, value: object, *choices: str) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")


def _best_within(grouped_TGM: Tensor, groups_TL: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`[T, K]` int64: the best experts of some groups; `[T, E]`: which experts are in others."""
    is_open_TG = torch.zeros_like(grouped_TGM[:, :, 0], dtype=torch.bool)
    is_open_TG = is_open_TG.scatter(1, groups_TL, True)
    is_outside_TE = (~is_open_TG[:, :, None]).expand_as(grouped_TGM).flatten(1)
    ranked_TE = grouped_TGM.flatten(1).masked_fill(is_outside_TE, -torch.inf)
    return ranked_TE.topk(top_k, dim=-1).indices, is_outside_TE


def _group_size(num_experts: int, num_expert_groups: int) -> int:
    if num_expert_groups < 1 or num_experts % num_expert_groups:
        raise ValueError(
            f"num_expert_groups must divide num_experts={num_experts}, got {num_expert_groups}"
        )
    return num_experts // num_expert_groups
