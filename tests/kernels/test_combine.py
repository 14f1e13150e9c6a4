"""`combine` against a loop over tokens in fp64, forward and backward."""

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.combine.op import CombineImpl
from moe_runtime.kernels.token_sort import SortedTokens, token_sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS: list[CombineImpl] = ["triton", "torch"]
# fp32 sums of K terms, rounded once to the dtype of the result: half a unit in the last place, but
# a whole one for bf16, which Triton's interpreter truncates.
TOLERANCE = {torch.float32: 2.0**-21, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}


def by_loop(y_RD: Tensor, weights_TK: Tensor | None, ids_TK: Tensor, order: SortedTokens) -> Tensor:
    """Every token's own sum, only over slots with an expert."""
    num_tokens, num_choices = ids_TK.shape
    num_experts = len(order.counts_E)
    out = []
    for t in range(num_tokens):
        total = torch.zeros(y_RD.shape[1], dtype=torch.float64)
        for k in range(num_choices):
            if 0 <= int(ids_TK[t, k]) < num_experts:
                row = y_RD[int(order.inverse_R[t * num_choices + k])]
                total = total + (row if weights_TK is None else weights_TK[t, k] * row)
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "dim"), [(1, 1, 16), (21, 3, 97), (5, 8, 1100)]
)
def test_forward_and_gradients(impl, dtype, num_tokens, num_choices, dim):
    """Rows of slots without an expert are NaN, as memory that nobody wrote may be."""
    num_experts = 4
    ids = torch.randint(0, num_experts + 1, (num_tokens, num_choices))
    order = token_sort(ids, num_experts, impl="reference")
    y = torch.randn(num_tokens * num_choices, dim).to(dtype)
    y[int(order.offsets_E1[-1]) :] = torch.nan
    weights = torch.rand(num_tokens, num_choices)
    dout = torch.randn(num_tokens, dim).to(dtype)

    exact_y, exact_w = y.double().requires_grad_(), weights.double().requires_grad_()
    exact = by_loop(exact_y, exact_w, ids, order)
    exact.backward(dout.double()) if exact.requires_grad else None

    device_order = SortedTokens(*[tensor.to(DEVICE) for tensor in order])
    y_in = y.to(DEVICE).requires_grad_()
    w_in = weights.to(DEVICE).requires_grad_()
    out = combine(y_in, w_in, device_order, impl=impl)
    out.backward(dout.to(DEVICE))
    assert out.dtype == dtype
    assert y_in.grad is not None
    assert w_in.grad is not None
    bound = TOLERANCE[dtype]
    magnitude = float(y.detach().nan_to_num().abs().max()) * num_choices
    zeros = torch.zeros(1, dtype=torch.float64)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=bound, atol=bound * magnitude)
    want_dy = zeros.expand(y.shape) if exact_y.grad is None else exact_y.grad
    want_dw = zeros.expand(weights.shape) if exact_w.grad is None else exact_w.grad
    torch.testing.assert_close(y_in.grad.cpu().double(), want_dy, rtol=bound, atol=2.0**-20)
    # A dot product over D in fp32.
    torch.testing.assert_close(w_in.grad.cpu().double(), want_dw, rtol=2e-6, atol=2e-7 * dim)


@pytest.mark.parametrize("impl", IMPLS)
def test_without_weights_and_non_contiguous(impl):
    ids = torch.randint(0, 3, (9, 2))
    order = token_sort(ids, 3, impl="reference")
    y = torch.randn(33, 18).t()
    out = combine(
        y.to(DEVICE),
        None,
        SortedTokens(*[tensor.to(DEVICE) for tensor in order]),
        num_choices=2,
        impl=impl,
    )
    exact = by_loop(y.double(), None, ids, order)
    torch.testing.assert_close(out.cpu().double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens(impl):
    order = token_sort(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), 3, impl="reference")
    y = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    weights = torch.zeros(0, 2, device=DEVICE, requires_grad=True)
    out = combine(y, weights, order, impl=impl)
    out.sum().backward()
    assert out.shape == (0, 8)


def test_gradients_of_the_specification():
    ids = torch.randint(0, 4, (5, 3))
    order = token_sort(ids, 3, impl="reference")
    y = torch.randn(15, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda y, weights: combine(y, weights, order, impl="reference"), (y, weights)
    )


def test_bad_arguments():
    order = token_sort(torch.zeros(2, 2, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match=r"y must be \[4, D\], got \[3, 8\]"):
        combine(torch.zeros(3, 8), torch.zeros(2, 2), order)
    with pytest.raises(ValueError, match=r"weights must be \[2, 2\] .* got \[3, 2\]"):
        combine(torch.zeros(4, 8), torch.zeros(3, 2), order)
    with pytest.raises(ValueError, match="num_choices is needed"):
        combine(torch.zeros(4, 8), None, order)
    with pytest.raises(ValueError, match=r"fp32, bf16 or fp16, got torch\.float64"):
        combine(
            torch.zeros(4, 8).double().to(DEVICE),
            torch.zeros(2, 2).to(DEVICE),
            SortedTokens(*[tensor.to(DEVICE) for tensor in order]),
            impl="triton",
        )
