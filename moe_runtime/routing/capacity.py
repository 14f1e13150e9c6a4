"""Capacity: an expert takes at most so many choices.

Shape suffixes: T tokens, E experts, K choices of a token, N = T * K choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_runtime.config import is_number

DropPolicy = Literal["choice", "token", "priority", "score"]
DROP_POLICIES: tuple[str, ...] = get_args(DropPolicy)


@dataclass(frozen=True)
class Capacity:
    """How many choices an expert takes from a group of tokens, and which come first.

    An expert takes `ceil(factor * tokens * k / experts)` choices from each group; those beyond it
    are dropped. Rows travel and are computed without padding, so Tutel's factor 0 (room for the
    busiest expert) is no capacity at all, and its negative one is the positive one.

    Attributes:
        factor: 1 is just enough for a uniform load.
        policy: `choice`: all first choices in token order, then all second choices (GShard, Tutel).
            `token`: token after token (Megatron's "position"). `priority`: as `choice`, but tokens
            with a higher best weight first (Tutel's batch-prioritised routing). `score`: the
            choices with the highest weights (Megatron's "probs").
    """

    factor: float
    policy: DropPolicy = "choice"

    def __post_init__(self) -> None:
        if not (is_number(self.factor) and self.factor > 0):
            raise ValueError(
                "capacity_factor must be positive and finite (None means dropless), got "
                f"{self.factor!r}"
            )
        if self.policy not in DROP_POLICIES:
            raise ValueError(f"policy must be one of {', '.join(DROP_POLICIES)}, got {self.policy}")

    def slots_per_expert(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Choices that an expert takes from a group of `num_tokens` tokens."""
        # rounded first: 1.1 * 10 is 11.000000000000002, and its ceiling must be 11
        return math.ceil(round(self.factor * num_tokens * top_k / num_experts, 9))


def expert_slots(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, *, policy: DropPolicy, num_groups: int = 1
) -> Tensor:
    """`[T, K]` int64: the place of each choice among those of its expert within its group.

    Places count from 0 without gaps, in the order that `policy` says; those of sentinels mean
    nothing. Memory is O(T K), never O(T E).

    Args:
        ids_TK: int64 [T, K], the chosen experts; `num_experts` is the sentinel of no choice.
        weights_TK: [T, K], by which some policies order.
        num_groups: equal groups of consecutive tokens, each with places of its own.
    """
    num_tokens, top_k = ids_TK.shape
    order_N = _order(ids_TK, weights_TK, policy)
    group_T = torch.arange(num_tokens, device=ids_TK.device) // max(1, num_tokens // num_groups)
    keys_N = (group_T[:, None] * (num_experts + 1) + ids_TK).reshape(-1)
    sorted_keys, inner = keys_N[order_N].sort(stable=True)
    order_N = order_N[inner]
    places = torch.arange(num_tokens * top_k, device=ids_TK.device)
    first = torch.searchsorted(sorted_keys, sorted_keys)  # where the run of equal keys begins
    slots_N = torch.empty_like(places)
    slots_N[order_N] = places - first
    return slots_N.view(num_tokens, top_k)


def _order(ids_TK: Tensor, weights_TK: Tensor, policy: DropPolicy) -> Tensor:
    """The flat choices (`t * K + k`) in the order in which they ask for a place."""
    num_tokens, top_k = ids_TK.shape
    choices_TK = torch.arange(num_tokens * top_k, device=ids_TK.device).view(num_tokens, top_k)
    if policy == "token":
        return choices_TK.reshape(-1)
    weights_TK = weights_TK.detach()
    if policy == "score":
        return weights_TK.reshape(-1).sort(descending=True, stable=True).indices
    if policy == "priority":
        best_T = weights_TK.amax(dim=1)
        choices_TK = choices_TK[best_T.sort(descending=True, stable=True).indices]
    return choices_TK.t().reshape(-1)
