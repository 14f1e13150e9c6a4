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


@pytest.mark.parametrize("factor", [0.25, 1.0, 1.5, 4.0])
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_room_that_follows_the_load_drops_the_same(factor, skew):
    """Tutel's negative factor makes room for the busiest expert, but at most what `f` makes.

    It is counted here as published, in places of a padded buffer.
    """
    tokens, top_k, num_experts = 32, 2, 8
    logits = torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(1))
    logits[:, 0] += skew
    gate = make_gate("softmax_topk", num_experts, num_experts, top_k, capacity=Capacity(factor))
    gate.weight.data = torch.eye(num_experts)
    routing, dropless = gate(logits), make_gate("softmax_topk", 8, 8, top_k)
    dropless.load_state_dict(gate.state_dict())
    demand = dropless(logits).counts_E
    busiest, fixed = int(demand.max()), top_k * int(factor * tokens / num_experts)
    assert torch.equal(routing.demand_E, demand)
    assert torch.equal(routing.counts_E, demand.clamp(max=min(busiest, fixed)))
    assert int(routing.counts_E.sum()) == int(routing.is_dispatched_TK.sum()), "nothing is padded"


def test_slots_per_expert_is_not_fooled_by_rounding():
    assert Capacity(1.1).slots_per_expert(100, 1, 10) == 11
    assert Capacity(1.0).slots_per_expert(10, 2, 3) == 7
    assert Capacity(0.01).slots_per_expert(1, 1, 64) == 1


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "1", True, False])
def test_bad_factor(factor):
    with pytest.raises(ValueError, match="capacity_factor must be positive"):
        Capacity(factor)


def test_bad_policy():
    with pytest.raises(ValueError, match="policy must be one of choice, token, priority, score"):
        Capacity(1.0, "tokn")


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


def test_einsum_form_equals_sparse_form():
    """GShard's dense combine tensor `[T, E, C]` gives what ids, slots and weights give."""
    torch.manual_seed(0)
    gate = make_gate("gshard", 8, 4, 2, capacity=Capacity(0.7))
    x = torch.randn(16, 8)
    routing = gate(x)
    capacity = math.ceil(0.7 * 2 * 16 / 4)
    combine = torch.zeros(16, 4, capacity)
    for t in range(16):
        for k in range(2):
            if routing.ids_TK[t, k] < 4:
                combine[t, routing.ids_TK[t, k], routing.slots_TK[t, k]] = routing.weights_TK[t, k]
    dispatch = (combine > 0).float()
    assert dispatch.sum(dim=0).max() <= 1, "two tokens share a slot"
    experts = torch.randn(4, 8, 8)
    inside = torch.einsum("td,tec->ecd", x, dispatch)
    dense = torch.einsum("ecd,tec->td", torch.einsum("ecd,edf->ecf", inside, experts), combine)
    sparse = torch.zeros(16, 8)
    for t in range(16):
        for k in range(2):
            if routing.ids_TK[t, k] < 4:
                sparse[t] += routing.weights_TK[t, k] * (x[t] @ experts[routing.ids_TK[t, k]])
    torch.testing.assert_close(dense, sparse)
