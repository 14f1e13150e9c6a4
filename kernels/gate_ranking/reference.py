"""What a ranking is, in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear


def rank_reference(
    hidden_BD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, num_ranks: int
) -> Tensor:
    """The experts of largest logit, the largest first, of equals the first: `[B, num_ranks]`."""
    bias = None if bias_E is None else bias_E.float()
    logits_BE = linear(hidden_BD.float(), weight_ED.float(), bias)
    return logits_BE.argsort(dim=1, descending=True, stable=True)[:, :num_ranks]
