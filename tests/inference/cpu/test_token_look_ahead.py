"""The native look-ahead gets only tensors that it can read."""

import torch
from native_marks import needs_native

from moe_runtime.inference.prediction import TokenLookAhead
from moe_runtime.kernels.decode_step.gate_ranking import MOST_TOKENS, GateRanking
from moe_runtime.policies.prediction import NextGate, Shape


@needs_native
def test_it_takes_few_tokens_of_its_widths_and_types():
    estimator = NextGate(Shape(num_layers=2, num_experts=6, top_k=2))
    gates = [GateRanking(torch.zeros(6, 8), None, estimator.num_ranks) for _ in range(2)]
    look_ahead = TokenLookAhead(estimator, [gates], torch.float32, 0.1, None)

    def takes(tokens: int, top_k: int = 2, dim: int = 8) -> bool:
        ids = torch.zeros(tokens, top_k, dtype=torch.int64)
        return look_ahead.takes(ids, torch.zeros(tokens, dim))

    assert takes(1)
    assert takes(MOST_TOKENS)
    assert not takes(MOST_TOKENS + 1)
    assert not takes(2, top_k=3)
    assert not takes(2, dim=7)
    ids, hidden = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 8)
    assert not look_ahead.takes(ids.int(), hidden)
    assert not look_ahead.takes(ids, hidden.bfloat16())
    assert not look_ahead.takes(ids.t(), torch.zeros(8, 2).t())
