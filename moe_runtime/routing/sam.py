"""SAM, switch and mixture (HetuMoE, Nie et al. 2022): one group of experts, then k within it."""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.topk import normalize, renormalizes


class Sam(Gate):
    """All k experts of a token lie in one group (one device), chosen by the group's score.

    `p = softmax(logits)`; a group's score is the sum (or the maximum) of its experts' p; the best
    group's k best experts are used, with weights p divided by their sum if `renormalize` (by
    default where k is 2 or more). The loss `alignment` is the mean over the tokens of
    `sum_e max(0, p_e - p_k)` over the experts e outside the group, `p_k` being the weakest chosen:
    what the token loses by staying in its group. (The form of that loss is our reading: the paper
    gives none.)

    Args:
        num_expert_groups: Groups of experts, consecutive ones.
        group_score: `sum` or `max`.

    Raises:
        ValueError: Groups that do not divide, or that hold fewer than `top_k` experts.
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
        if num_expert_groups < 1 or num_experts % num_expert_groups:
            raise ValueError(
                f"num_expert_groups must divide num_experts={num_experts}, got {num_expert_groups}"
            )
        if num_experts // num_expert_groups < top_k:
            raise ValueError(
                f"a group holds {num_experts // num_expert_groups} experts, fewer than "
                f"top_k={top_k}; lower num_expert_groups"
            )
        if group_score not in ("sum", "max"):
            raise ValueError(f"group_score must be 'sum' or 'max', got {group_score!r}")
        self.num_expert_groups = num_expert_groups
        self.group_score = group_score
        self.renormalize = renormalizes(renormalize, top_k)

    def choose(self, logits_TE: Tensor, context: RoutingContext) -> Choice:
        probs_TE = logits_TE.softmax(dim=-1)
        grouped_TGM = probs_TE.detach().unflatten(1, (self.num_expert_groups, -1))
        scores_TG = grouped_TGM.sum(dim=-1) if self.group_score == "sum" else grouped_TGM.amax(-1)
        groups = torch.arange(self.num_expert_groups, device=logits_TE.device)
        is_outside_TGM = (scores_TG.argmax(dim=-1)[:, None] != groups)[:, :, None]
        is_outside_TE = is_outside_TGM.expand_as(grouped_TGM).flatten(1)
        ids_TK = probs_TE.detach().masked_fill(is_outside_TE, -1.0).topk(self.top_k, dim=-1).indices
        chosen_TK = probs_TE.gather(1, ids_TK)
        weights_TK = normalize(chosen_TK) if self.renormalize else chosen_TK

        def alignment_loss() -> Tensor:
            excess_TE = (probs_TE - chosen_TK[:, -1:]).clamp(min=0) * is_outside_TE
            return excess_TE.sum() / max(1, len(excess_TE))

        return Choice(ids_TK, weights_TK, logits_TE, probs_TE, {"alignment": alignment_loss})
