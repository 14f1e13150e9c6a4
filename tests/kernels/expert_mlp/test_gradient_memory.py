"""Gradients that are written over the memory of the ones before."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.torch_path import GradientMemory, gradient_memory
from moe_runtime.kernels.native import pages

NUM_EXPERTS, DIM_MODEL, DIM_HIDDEN = 5, 24, 16
HUGE_PAGE = 2 << 20


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_WORTH_IT", 1)


def make(dtype: torch.dtype) -> StackedExperts:
    torch.manual_seed(0)
    up = torch.randn(NUM_EXPERTS, 2 * DIM_HIDDEN, DIM_MODEL, dtype=dtype)
    down = torch.randn(NUM_EXPERTS, DIM_MODEL, DIM_HIDDEN, dtype=dtype)
    return StackedExperts(gate_up=up.requires_grad_(), down=down.requires_grad_())


def backward(experts: StackedExperts, step: int, num_tokens: int = 3) -> None:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_tokens, DIM_MODEL, generator=generator).to(experts.down.dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(2).indices
    weights = torch.rand(num_tokens, 2, generator=generator).to(x.dtype)
    expert_mlp(x, ids, weights, experts, activation="silu").square().sum().backward()


def fresh_gradients(dtype: torch.dtype, *steps: int) -> list[Tensor]:
    """Of parameters that have had no gradient before."""
    experts = make(dtype)
    for step in steps:
        backward(experts, step)
    return [experts.gate_up.grad, experts.down.grad]


def drop_gradients(experts: StackedExperts) -> None:
    """As `zero_grad`, after filling what later gradients must not show."""
    for parameter in (experts.gate_up, experts.down):
        parameter.grad.fill_(torch.nan)
        parameter.grad = None


def test_biases_and_transposed_weights_leave_nothing_of_old_gradients():
    def step(number: int, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        backward(StackedExperts(**parameters, is_transposed=True), number)
        return {name: parameter.grad for name, parameter in parameters.items()}

    def parameters() -> dict[str, Tensor]:
        plain = make(torch.float32)
        torch.manual_seed(1)
        values = {
            "gate_up": plain.gate_up.detach().mT.contiguous(),
            "down": plain.down.detach().mT.contiguous(),
            "gate_up_bias": torch.randn(NUM_EXPERTS, 2 * DIM_HIDDEN),
            "down_bias": torch.randn(NUM_EXPERTS, DIM_MODEL),
        }
        return {name: value.requires_grad_() for name, value in values.items()}

    reused = parameters()
    for number in range(4):
        found, expected = step(number, reused), step(number, parameters())
        for name, gradient in found.items():
            assert torch.equal(gradient, expected[name]), name
            gradient.fill_(torch.nan)
        found.clear()
        for parameter in reused.values():
            parameter.grad = None
        del gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_over_old_ones_have_the_bits_of_fresh_ones(dtype):
    experts, places = make(dtype), set()
    for step in range(6):
        backward(experts, step)
        assert [experts.gate_up.grad.tolist(), experts.down.grad.tolist()] == [
            gradient.tolist() for gradient in fresh_gradients(dtype, step)
        ]
        places.add(experts.gate_up.grad.data_ptr())
        drop_gradients(experts)
    assert len(places) == 1


def test_a_gradient_that_is_held_is_added_to_or_left_alone():
    experts = make(torch.float32)
    backward(experts, 0)
    backward(experts, 1)
    for gradient, expected in zip(
        (experts.gate_up.grad, experts.down.grad), fresh_gradients(torch.float32, 0, 1), strict=True
    ):
        assert torch.equal(gradient, expected)
    held, kept = experts.down.grad[2:], experts.down.grad.clone()
    experts.gate_up.grad = experts.down.grad = None
    backward(experts, 2)
    assert torch.equal(held, kept[2:])
    assert torch.equal(experts.down.grad, fresh_gradients(torch.float32, 2)[1])


def test_views_of_a_parameter_give_it_its_gradient():
    whole = make(torch.float32)
    views = whole.gate_up.view_as(whole.gate_up), whole.down.view_as(whole.down)
    backward(StackedExperts(gate_up=views[0], down=views[1]), 0)
    for parameter, expected in zip(
        (whole.gate_up, whole.down), fresh_gradients(torch.float32, 0), strict=True
    ):
        assert torch.equal(parameter.grad, expected)


def test_memory_goes_with_the_parameter():
    memory = GradientMemory()
    parameter = torch.nn.Parameter(torch.zeros(4, 8))
    gradient = memory.take(parameter, {1})
    array = weakref.ref(memory._kept[parameter].bytes)
    del gradient
    gc.collect()
    assert array() is not None
    del parameter
    gc.collect()
    assert array() is None
    assert gradient_memory() is gradient_memory()


@pytest.mark.parametrize(("first", "last"), [(0, 4), (1, 3), (0, 1), (3, 4)])
def test_a_cleared_part_is_zero_and_the_rest_is_what_it_was(first, last):
    part_size = HUGE_PAGE + 4096 + 12
    filled = pages.untouched_zeros(torch.empty(4, part_size, dtype=torch.uint8)).fill_(7)
    pages.clear(filled[first:last])
    is_cleared = torch.zeros(4, dtype=torch.bool)
    is_cleared[first:last] = True
    assert not filled[is_cleared].any()
    assert (filled[~is_cleared] == 7).all()
