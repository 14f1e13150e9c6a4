"""`Routing`: which experts each token goes to, with which weights. Every gate produces one.

Shape suffixes: T tokens, E experts, K choices of a token, Z zero-computation experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

NO_LOSSES: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class ZeroRouting:
    """Choices of experts that have no weights to fetch (MoE++).

    Attributes:
        ids_TK: `[T, K]` int64 numbers of zero-computation experts; `num_experts` where the choice
            was an ordinary expert, or was dropped.
        weights_TK: `[T, K]`, 0 where there is no such expert.
        num_experts: How many zero-computation experts there are.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    num_experts: int


@dataclass(frozen=True, eq=False)
class Policy:
    """What is needed to reward choices that were sampled (RL-R).

    Attributes:
        log_probs_T: `[T]` logarithm of the probability that the choice had; differentiable.
        values_T: `[T]` reward that a baseline expects of the token; differentiable.
    """

    log_probs_T: Tensor
    values_T: Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """What a gate decided for `T` tokens. The order of decisions is always the same: score, bias,
    top-k, normalise, capacity.

    Attributes:
        ids_TK: `[T, K]` int64; an entry equal to `num_experts` is a slot that is not dispatched,
            because capacity ran out or because the token uses fewer than `K` experts.
        weights_TK: `[T, K]` in the precision of the gate; 0 where nothing is dispatched.
        num_experts: `E`, the experts that have weights.
        losses: Auxiliary losses by name, scalars, differentiable, without coefficients.
        demand_E: `[E]` int64: choices of each expert before capacity took any away; None means
            that there was no capacity.
        slots_TK: `[T, K]` int64: place of each dispatched choice among those of its expert (and
            group), -1 where nothing is dispatched; None without capacity.
        logits_TE: `[T, E]` raw scores of the gate (with the zero-computation experts' columns
            last, where there are any), which the next layer's gate may read; None for a gate
            without parameters.
        zero: Choices of zero-computation experts; None where there are none.
        policy: Of choices that were sampled and are to be rewarded; None of others.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    num_experts: int
    losses: Mapping[str, Tensor] = field(default_factory=lambda: NO_LOSSES)
    demand_E: Tensor | None = None
    slots_TK: Tensor | None = None
    logits_TE: Tensor | None = None
    zero: ZeroRouting | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without waiting for a device.

        Raises:
            ValueError: Shapes or dtypes do not fit.
        """
        if self.ids_TK.ndim != 2 or self.ids_TK.dtype != torch.int64:
            raise ValueError(
                f"ids must be int64 [T, K], got {self.ids_TK.dtype} {list(self.ids_TK.shape)}"
            )
        if self.weights_TK.shape != self.ids_TK.shape:
            raise ValueError(
                f"weights must be {list(self.ids_TK.shape)} like ids, "
                f"got {list(self.weights_TK.shape)}"
            )

    @property
    def counts_E(self) -> Tensor:
        """`[E]` int64: dispatched choices of each expert."""
        return expert_counts(self.ids_TK, self.num_experts)

    @property
    def is_dispatched_TK(self) -> Tensor:
        """`[T, K]` bool: the choices that reach an expert."""
        return self.ids_TK < self.num_experts


def expert_counts(ids: Tensor, num_experts: int) -> Tensor:
    """`[E]` int64: how often each expert occurs in `ids` (sentinels do not count).

    Unlike `bincount` it never waits for a device.
    """
    flat = ids.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
