"""`Routing`: which experts each token goes to, with which weights. Every gate produces one.

Shape suffixes: T tokens, E experts, K choices of a token, Z zero-computation experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The data to reward sampled choices (RL-R).

    Attributes:
        log_probs_T: `[T]` logarithm of the probability that the choice had; differentiable.
        values_T: `[T]` reward that a baseline expects of the token; differentiable.
    """

    log_probs_T: Tensor
    values_T: Tensor


@dataclass(frozen=True, eq=False)
class Routing:
    """The decision of a gate for `T` tokens, in the order score, bias, top-k, normalise, capacity.

    Attributes:
        ids_TK: `[T, K]` int64; `num_experts` where nothing is dispatched, because capacity ran out
            or because the token uses fewer than `K` experts.
        weights_TK: `[T, K]` in the precision of the gate; 0 where nothing is dispatched.
        num_experts: `E`, the experts that have weights.
        losses: Auxiliary losses by name, scalars, differentiable, without coefficients.
        demand_E: `[E]` int64: choices of each expert before capacity; None without capacity.
        slots_TK: `[T, K]` int64: place of each dispatched choice among those of its expert (and
            group), -1 where nothing is dispatched; None without capacity.
        logits_TE: `[T, E]` raw scores of the gate (columns of zero-computation experts last), which
            the next layer's gate may read; None for a gate without parameters.
        zero: Choices of zero-computation experts; None where there are none.
        policy: Of choices that were sampled and are to be rewarded, padding left out.
        rows_R: `[R]` int64: numbers of the tokens that are not padding; None means all.
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
    rows_R: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids_TK.ndim != 2 or self.ids_TK.dtype != torch.int64:
            raise ValueError(
                f"ids must be int64 [T, K], got {self.ids_TK.dtype} {list(self.ids_TK.shape)}"
            )
        if self.weights_TK.shape != self.ids_TK.shape:
            raise ValueError(
                f"weights must be {list(self.ids_TK.shape)} like ids, "
                f"got {list(self.weights_TK.shape)}"
            )

    def among_padding(self, rows_R: Tensor, num_tokens: int) -> Routing:
        """The same choices as those of the tokens `rows_R` of a batch; the others get no expert."""

        def spread(values_R: Tensor, padding: float) -> Tensor:
            whole_T = values_R.new_full((num_tokens, *values_R.shape[1:]), padding)
            return whole_T.index_copy(0, rows_R, values_R)

        slots, logits, zero = self.slots_TK, self.logits_TE, self.zero
        return replace(
            self,
            ids_TK=spread(self.ids_TK, self.num_experts),
            weights_TK=spread(self.weights_TK, 0.0),
            slots_TK=None if slots is None else spread(slots, -1),
            logits_TE=None if logits is None else spread(logits, 0.0),
            zero=zero
            and ZeroRouting(
                spread(zero.ids_TK, zero.num_experts),
                spread(zero.weights_TK, 0.0),
                zero.num_experts,
            ),
            rows_R=rows_R,
        )

    def without_padding(self) -> Routing:
        """The choices of the tokens `rows_R` alone, for the experts."""
        rows, zero = self.rows_R, self.zero
        if rows is None:
            return self
        if zero is not None:
            zero = ZeroRouting(zero.ids_TK[rows], zero.weights_TK[rows], zero.num_experts)
        return Routing(self.ids_TK[rows], self.weights_TK[rows], self.num_experts, zero=zero)

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
