"""Hash routing (Roller et al. 2021; HASH in the routed scaling laws): a table, nothing trained."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext, score_dtype


class Hash(Gate):
    """A fixed table says which experts a token number goes to; every weight is `1 / k`.

    With `frequencies` the table is balanced: token numbers, the most frequent first, go to the
    experts with the least load so far. Without, it is a random one with equally many token numbers
    for each expert. Losses have nothing to train here, so there are none.

    Args:
        vocab_size: Token numbers.
        frequencies: How often each occurs, `vocab_size` numbers.
        seed: Of the random table.

    Attributes:
        table: `[vocab_size, k]` int64, a buffer that is saved.

    Raises:
        ValueError: Sizes that cannot work, or losses were asked for.
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
        """The table that the arguments describe."""
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
