"""The specification of `token_sort`: plain torch on any device, without host synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor


def token_sort_reference(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`(counts_E, offsets_E1, order_R, inverse_R)`, all int64; see `token_sort`."""
    ids_R = ids_TK.reshape(-1)
    is_real = (ids_R >= 0) & (ids_R < num_experts)
    keys_R = torch.where(is_real, ids_R, num_experts).to(torch.int64)
    order_R = torch.argsort(keys_R, stable=True)
    slots_R = torch.arange(len(ids_R), device=ids_R.device)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, slots_R)
    # bincount would ask the GPU for its largest value and wait for the answer.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_R.device)
    counts_E = counts.scatter_add_(0, keys_R, torch.ones_like(keys_R))[:num_experts]
    offsets_E1 = torch.nn.functional.pad(counts_E.cumsum(0), (1, 0))
    return counts_E, offsets_E1, order_R, inverse_R
