"""Experts that come into slots a few at a time give the bits of one call with all of them."""

import random
from dataclasses import replace

import pytest
import torch
from stacked_experts import make_experts, make_routing

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.slotted import SlottedProducts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K = 6, 3


def placed(experts: StackedExperts, chosen: list[int], slots: list[int]) -> StackedExperts:
    """A slab that holds these experts in these slots, and NaN in all others."""
    table = torch.full((E,), -1, dtype=torch.int32)
    table[chosen] = torch.tensor(slots, dtype=torch.int32)
    tensors = {}
    for name, tensor in zip(experts.names, experts.tensors(), strict=True):
        slab = tensor.new_full((E + 2, *tensor.shape[1:]), torch.nan)
        slab[slots] = tensor[chosen]
        tensors[name] = slab.to(DEVICE)
    return replace(experts, slot_of_expert=table.to(DEVICE), **tensors)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("num_tokens", "layout", "dtype"),  # up to 16 tokens by other kernels than from there on
    [
        (1, {"has_gate": False, "is_transposed": True}, torch.bfloat16),
        (1, {}, torch.bfloat16),
        (1, {"is_concatenated": False}, torch.float32),
        (5, {"is_concatenated": False}, torch.float32),
        (20, {}, torch.bfloat16),
        (20, {"is_transposed": True}, torch.float32),
    ],
)
def test_the_bits_do_not_depend_on_who_comes_when_or_where(num_tokens, layout, dtype):
    torch.manual_seed(3)
    experts = make_experts(E, dtype=dtype, **layout)
    x = torch.randn(num_tokens, experts.dim_model).to(DEVICE, dtype)
    ids, weights = (t.to(DEVICE) for t in make_routing(num_tokens, K, E, dtype=torch.float32))
    ids[0, -1] = -1
    everything = placed(experts, [*range(E)], [*range(E)])
    expected = expert_mlp(x, ids, weights, everything, activation="silu", impl="triton")
    wide = replace(
        everything, **{n: None if t is None else t.double() for n, t in named(everything)}
    )
    exact = expert_mlp(x.double(), ids, weights.double(), wide, activation="silu", impl="reference")
    torch.testing.assert_close(expected.double(), exact, rtol=2e-2, atol=2e-2)
    drawn = random.Random(num_tokens)
    for num_each in (1, 4):
        order, slots = drawn.sample(range(E), E), drawn.sample(range(E + 2), E)
        products = SlottedProducts(x, ids, weights, E, "silu")
        for first in range(0, E, num_each):
            part = slice(first, first + num_each)
            products.add(placed(experts, order[part], slots[part]))
        assert torch.equal(products.sums(), expected)


def named(experts: StackedExperts) -> list[tuple[str, torch.Tensor | None]]:
    return [*zip(experts.names, experts.tensors(), strict=True)]


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_without_experts_the_output_is_zero(num_tokens):
    x, weights = torch.ones(num_tokens, 8, device=DEVICE), torch.ones(num_tokens, K, device=DEVICE)
    ids = torch.full((num_tokens, K), E, device=DEVICE)
    assert torch.equal(SlottedProducts(x, ids, weights, E, "silu").sums(), torch.zeros_like(x))
