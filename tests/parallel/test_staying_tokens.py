"""ExFlow's exchange: the hidden states of one process, and the bytes that hops imply."""

import pytest
import torch
from staying import WIDTH, model_of, spread

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.research.staying_tokens import hidden_states

HOLDERS = [[[0, 3, 5], [1, 2, -1], [4, -1, -1]], [[2, 4], [1, 3], [0, 5]], [[5, 1], [0, 2], [3, 4]]]
ROW = WIDTH * 8


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(3 * 7).view(3, 7) * 11 % 50


def routed(model, ids) -> torch.Tensor:
    """`[layers, tokens, K]`: choices of a process alone."""
    found = []
    for layer in model.routed_layers():
        layer.gate.register_forward_hook(lambda _m, _i, routing: found.append(routing.ids_TK))
    with torch.no_grad():
        model.hidden_states(ids)
    return torch.stack(found)


@pytest.mark.parametrize("stays", [True, False])
def test_tokens_that_stay_become_what_they_do_at_home(stays, ids, ranks):
    model = model_of()
    chosen_LTK = routed(model, ids)
    expected = model.hidden_states(ids)
    found = ranks(3).run(spread, ids, HOLDERS, stays)
    for states, _ in found:
        torch.testing.assert_close(states, expected, rtol=1e-10, atol=1e-12)
    moved, implied, context = (sum(counts) for counts in zip(*(c for _, c in found), strict=True))
    rank_of = [
        {expert: rank for rank, held in enumerate(own) for expert in held} for own in HOLDERS
    ]
    hops = others = 0
    for token in range(21):
        here = token * 3 // 21
        for layer, own in enumerate(rank_of):
            first, second = (own[int(expert)] for expert in chosen_LTK[layer, token])
            if stays:
                hops, here = hops + (first != here), first
            others += (first != here) + (second != here)
    assert (moved, implied) == (hops * ROW, 2 * others * ROW)
    assert context == 4 * 21 * 2 * 2 * 2 * 4 * 8  # layers, tokens, ranks, keys and values


def test_gates_and_experts_that_tokens_cannot_leave_are_refused(ids):
    for changes, reason in (
        ({"gate": "expert_choice"}, "looks at more than a token"),
        ({"capacity_factor": 1.5}, "without capacity"),
        ({}, "spread them with `spread_experts`"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            hidden_states(model_of(**changes), ids)
