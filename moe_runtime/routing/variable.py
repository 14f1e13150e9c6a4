"""Gates that decide with a mask over all experts, so that tokens use different numbers of them.

A `Routing` has as many columns as the token with the most experts needs; finding that number waits
for the device once. Shape suffixes: T tokens, E experts, K choices, G groups, S tokens of a group,
C tokens that an expert takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.capacity import Capacity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ExpertChoice(Gate):
    """Each expert takes its best tokens (Zhou et al. 2022), so the load is uniform by design.

    `p = softmax(logits)` over the experts; expert e takes the `C = ceil(factor * S * k / E)` tokens
    of a group of S with the highest `p[:, e]`, with those weights. A token may get no expert or
    all of them. The choice looks at all tokens of the group, later ones included: do not use it
    for autoregressive generation.

    Args:
        top_k: Mean number of experts of a token.
        capacity: Only its factor counts; None means 1.
        max_experts_per_token: A token keeps its best so many experts (the paper's capped variant,
            without its linear programme: what is freed is not given to others), and the number of
            columns is this one, without waiting for a device.
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

    def places(self, choice: Choice, num_experts: int) -> tuple[Tensor, Tensor]:
        slots_TK, _ = super().places(choice, num_experts)
        return slots_TK, choice.ids_TK < num_experts  # nobody took too many


class DenseToSparse(Gate):
    """Dense-to-sparse (EvoMoE, Nie et al. 2021): all experts at first, fewer as training goes on.

    `p = softmax((logits + gumbel) / tau)`; the experts with `p > threshold` are used with weight
    `p`, and always the best one. `tau` falls linearly from `tau_start` to `tau_end` in
    `anneal_steps` calls of `after_step`, which makes `p` ever more one-sided. Gumbel noise is
    added in training only. The schedule is ours: the paper leaves it open.

    Args:
        top_k: Experts that a token uses at least (1 in the paper).
        threshold: None means `1 / (2 * num_experts)`.

    Attributes:
        num_steps: Calls of `after_step` so far, a buffer that is saved.

    Raises:
        ValueError: The schedule or the threshold cannot work.
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
        """The present temperature, a scalar."""
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
        num_columns: `K`; None means as many as the token with the most experts has (at least 1),
            which waits for the device. Of tokens with more, the best are kept.
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
