"""Experts in fp32 under autocast on the CPU: rounded one by one, to the bits of a rounded copy."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.operands import ActivationSpec

NUM_EXPERTS, DIM, HIDDEN = 5, 24, 40
PLAIN = ActivationSpec("silu")


def parameters(*, bias: bool, transposed: bool) -> list[Tensor | None]:
    shapes = [(NUM_EXPERTS, 2 * HIDDEN, DIM), (NUM_EXPERTS, DIM, HIDDEN)]
    if transposed:
        shapes = [(e, k, n) for e, n, k in shapes]
    found: list[Tensor | None] = [torch.randn(shape) * 0.2 for shape in shapes]
    found += (
        [torch.randn(NUM_EXPERTS, 2 * HIDDEN), torch.randn(NUM_EXPERTS, DIM)]
        if bias
        else [None] * 2
    )
    return [None if t is None else t.requires_grad_() for t in found]


def stacked(tensors: list[Tensor | None], *, transposed: bool) -> StackedExperts:
    gate_up, down, gate_up_bias, down_bias = tensors
    assert gate_up is not None
    assert down is not None
    return StackedExperts(
        gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias,
        is_transposed=transposed,
    )  # fmt: skip


def routed(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, choices (one expert gets none, some slots are empty) and gate weights."""
    ids = torch.randint(-1, NUM_EXPERTS - 1, (num_tokens, 2))
    return torch.randn(num_tokens, DIM), ids, torch.rand(num_tokens, 2)


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 150])
def test_outputs_and_gradients_are_those_of_rounded_copies(num_tokens, bias, transposed, impl):
    tensors = parameters(bias=bias, transposed=transposed)
    x, ids, weights = routed(num_tokens)
    copies = [None if t is None else t.detach().bfloat16().requires_grad_() for t in tensors]
    rounded = x.bfloat16().requires_grad_()
    expected = expert_mlp(
        rounded, ids, weights, stacked(copies, transposed=transposed), activation=PLAIN, impl=impl
    )
    expected.float().square().sum().backward()
    x.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = expert_mlp(
            x, ids, weights, stacked(tensors, transposed=transposed), activation=PLAIN, impl=impl
        )
    assert torch.equal(found, expected.to(found.dtype))
    found.to(torch.bfloat16).float().square().sum().backward()
    assert x.grad is not None
    assert rounded.grad is not None
    assert torch.equal(x.grad, rounded.grad.float())
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not None and copy is not None:
            assert tensor.grad is not None
            assert copy.grad is not None
            assert tensor.grad.dtype == torch.float32
            assert torch.equal(tensor.grad, copy.grad.float())


class _LargestHalf(TorchDispatchMode):
    """Values of the largest tensor in half precision that an operation gave."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16:
                self.largest = max(self.largest, tensor.numel())
        return out


def test_no_copy_of_all_experts_is_rounded():
    tensors = parameters(bias=False, transposed=False)
    x, ids, weights = routed(9)
    with _LargestHalf() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        out = expert_mlp(x, ids, weights, stacked(tensors, transposed=False), activation=PLAIN)
        out.sum().backward()
    assert 0 < seen.largest < NUM_EXPERTS * DIM * HIDDEN


def test_without_autocast_another_dtype_is_refused():
    x, ids, weights = routed(3)
    experts = stacked(parameters(bias=False, transposed=False), transposed=False)
    with pytest.raises(ValueError, match=r"x must be torch\.float32"):
        expert_mlp(x.bfloat16(), ids, weights, experts, activation=PLAIN)
