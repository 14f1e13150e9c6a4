"""`token_sort` against Python's own stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_runtime.kernels.token_sort import IMPLS, SortedTokens, token_sort
from moe_runtime.kernels.token_sort.op import TokenSortImpl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMED = [impl for impl in IMPLS if impl != "auto"]


def expected(ids: list[int], num_experts: int) -> SortedTokens:
    keys = [i if 0 <= i < num_experts else num_experts for i in ids]
    order = sorted(range(len(ids)), key=lambda slot: keys[slot])
    counts = [keys.count(expert) for expert in range(num_experts)]
    offsets = [sum(counts[:expert]) for expert in range(num_experts + 1)]
    inverse = [order.index(slot) for slot in range(len(ids))]
    return SortedTokens(
        *[torch.tensor(x, dtype=torch.int64) for x in (counts, offsets, order, inverse)]
    )


def check(ids: Tensor, num_experts: int, impl: TokenSortImpl) -> None:
    found = token_sort(ids.to(DEVICE), num_experts, impl=impl)
    for name, value in expected(ids.reshape(-1).tolist(), num_experts)._asdict().items():
        result = getattr(found, name)
        assert result.dtype == torch.int64, name
        assert torch.equal(result.cpu(), value), name


@pytest.mark.parametrize("impl", NAMED)
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "num_experts"),
    [(0, 2, 4), (1, 1, 1), (1, 8, 128), (63, 3, 7), (64, 8, 8), (1000, 1, 5), (300, 2, 600)],
)
def test_equals_a_stable_sort(impl, num_tokens, num_choices, num_experts):
    """Also with ids that no expert has, on either side of the range."""
    check(torch.randint(-2, num_experts + 3, (num_tokens, num_choices)), num_experts, impl)


@pytest.mark.parametrize("impl", NAMED)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_one_expert_takes_everything(impl, dtype):
    check(torch.full((700, 1), 3, dtype=dtype), 5, impl)
    check(torch.full((7, 2), 5, dtype=dtype), 5, impl)
    check(torch.arange(6, dtype=dtype).view(2, 3).t(), 6, impl)


@settings(max_examples=25)
@given(ids=st.lists(st.integers(-1, 9), max_size=80), num_experts=st.integers(1, 9), data=st.data())
def test_any_ids(ids, num_experts, data):
    check(torch.tensor(ids, dtype=torch.int64), num_experts, data.draw(st.sampled_from(NAMED)))


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        token_sort(torch.zeros(2, 2, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match=r"int64, int32 or int16, got torch\.float32"):
        token_sort(torch.zeros(2, 2), 4)
    with pytest.raises(ValueError, match="one of auto, triton, torch, reference, got 'fast'"):
        token_sort(torch.zeros(2, 2, dtype=torch.int64), 4, impl="fast")  # type: ignore[arg-type]
