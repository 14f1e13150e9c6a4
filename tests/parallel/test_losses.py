"""Losses that look at the tokens of all processes."""

from collections.abc import Callable

import torch
from parallel_checks import global_balance_gradients
from rank_pool import RankPool

from moe_runtime.routing import make_gate


def test_global_balance_of_all_ranks_is_load_balance_of_one_process(
    ranks: Callable[[int], RankPool],
) -> None:
    torch.manual_seed(0)
    weight, parts = torch.randn(5, 6).double(), torch.randn(2, 9, 6).double()
    found = ranks(2).run(global_balance_gradients, weight, parts)
    gate = make_gate("softmax_topk", 6, 5, 2, dtype=torch.float64)
    gate.load_state_dict({"weight": weight})
    loss = gate(parts.flatten(0, 1)).losses["load_balance"]
    loss.backward()
    torch.testing.assert_close(sum(value for value, _ in found) / 2, loss.detach())
    torch.testing.assert_close(sum(gradient for _, gradient in found) / 2, gate.weight.grad)
