"""Capacity: who gets a place, against a queue that is served one choice at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.routing import Capacity, expert_slots, make_gate
from moe_runtime.routing.capacity import DROP_POLICIES

POLICIES = list(DROP_POLICIES)


def served(
    ids: Tensor, weights: Tensor, num_experts: int, policy: str, groups: int
) -> list[list[int]]:
    """The place of each choice when the choices of each group queue up as the policy says."""
    num_tokens, top_k = ids.shape
    places = [[-1] * top_k for _ in range(num_tokens)]
    size = num_tokens // groups
    for group in range(groups):
        tokens = list(range(group * size, (group + 1) * size))
        if policy == "priority":
            tokens.sort(key=lambda t: -weights[t].max().item())
        queue = [(t, k) for k in range(top_k) for t in tokens]
        if policy == "token":
            queue = [(t, k) for t in tokens for k in range(top_k)]
        if policy == "score":
            queue = [(t, k) for t in tokens for k in range(top_k)]
            queue.sort(key=lambda choice: -weights[choice].item())
        taken = [0] * (num_experts + 1)
        for t, k in queue:
            places[t][k] = taken[ids[t, k]]
            taken[ids[t, k]] += 1
    return places


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 20),
    top_k=st.integers(1, 4),
    num_experts=st.integers(1, 5),
    groups=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1000),
)
def test_places_against_queues(tokens, top_k, num_experts, groups, policy, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (tokens * groups, top_k)
    ids = torch.randint(num_experts + 1, shape, generator=generator)
    # few different weights, so that ties occur and stability matters
    weights = torch.randint(4, shape, generator=generator) / 4
    slots = expert_slots(ids, weights, num_experts, policy=policy, num_groups=groups)
    expected = served(ids, weights, num_experts, policy, groups)
    is_real = ids < num_experts
    assert torch.equal(
        slots[is_real], torch.tensor(expected, dtype=torch.int64).view(shape)[is_real]
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_have_no_gaps_and_no_expert_takes_too_many(policy):
    torch.manual_seed(0)
    gate = make_gate("softmax_topk", 8, 5, 2, capacity=Capacity(0.6, policy), num_groups=2)
    routing = gate(torch.randn(40, 8))
    limit = math.ceil(0.6 * 20 * 2 / 5)
    assert routing.slots_TK is not None
    for first in (0, 20):
        ids, slots = routing.ids_TK[first : first + 20], routing.slots_TK[first : first + 20]
        for expert in range(5):
            taken = sorted(slots[ids == expert].tolist())
            assert taken == list(range(len(taken)))
            assert len(taken) <= limit
    assert (routing.slots_TK[routing.ids_TK == 5] == -1).all()
    assert (routing.weights_TK[routing.ids_TK == 5] == 0).all()
    assert routing.demand_E is not None
    assert routing.demand_E.sum() == 80
    assert routing.counts_E.sum() < 80


def test_slots_per_expert_is_not_fooled_by_rounding():
    assert Capacity(1.1).slots_per_expert(100, 1, 10) == 11
    assert Capacity(1.0).slots_per_expert(10, 2, 3) == 7
    assert Capacity(0.01).slots_per_expert(1, 1, 64) == 1


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("policy", POLICIES)
def test_no_tensor_of_tokens_by_experts_by_places_is_ever_made(policy):
    """GShard's mask would have T E C = 524,288 elements here; scores have T E, choices T K."""
    gate = make_gate("softmax_topk", 8, 32, 2, capacity=Capacity(1.0, policy))
    x = torch.randn(512, 8)
    with LargestTensor() as largest:
        routing = gate(x)
        (routing.weights_TK.sum() + routing.losses["load_balance"]).backward()
    assert 512 * 32 <= largest.numel <= 2 * 512 * 32
