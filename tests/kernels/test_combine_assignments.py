"""`combine_assignments` against fp64."""

import pytest
import torch
from native_marks import NATIVE, needs_native

from moe_runtime.kernels.combine import combine_assignments, combine_assignments_reference
from moe_runtime.kernels.native import native_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 8, 2048), (1, 1, 1), (3, 2, 63), (300, 3, 65), (0, 2, 8)]


def operands(sizes: tuple[int, int, int], dtype: torch.dtype, weights_dtype: torch.dtype):
    tokens, choices, dim = sizes
    generator = torch.Generator().manual_seed(tokens * 100 + choices)
    y = torch.randn(tokens * choices, dim, generator=generator).to(dtype)
    return y, torch.rand(tokens, choices, generator=generator).to(weights_dtype)


def exact(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = y.double().view(*weights.shape, y.shape[1])
    return (rows * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize("impl", [NATIVE, "reference"])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_against_fp64(sizes, dtype, weights_dtype, impl):
    y, weights = operands(sizes, dtype, weights_dtype)
    found = combine_assignments(y, weights, impl=impl)
    wanted = exact(y, weights)
    assert found.dtype == dtype
    # one rounding for each of K terms in fp32, and one to the type
    kind = torch.finfo(dtype)
    terms = exact(y.abs(), weights)
    bound = sizes[1] * 2**-23 * terms + kind.eps / 2 * wanted.abs() + kind.smallest_normal
    assert ((found.double() - wanted).abs() <= bound).all()


@needs_native
def test_threads_and_other_tokens_change_no_bit():
    library = native_library()
    assert library is not None
    y, weights = operands((9, 4, 100), torch.bfloat16, torch.float32)
    alone = torch.cat(
        [combine_assignments(y[4 * t : 4 * t + 4], weights[t : t + 1]) for t in range(9)]
    )
    before = library.num_threads
    try:
        for num_threads in (1, 3):
            library.set_num_threads(num_threads)
            assert torch.equal(combine_assignments(y, weights, impl="native"), alone)
    finally:
        library.set_num_threads(before)


@needs_native
def test_rows_apart_in_memory_are_summed_alike():
    y, weights = operands((3, 2, 40), torch.float32, torch.float32)
    apart = torch.stack((y, y), dim=-1)[..., 0]
    assert torch.equal(
        combine_assignments(apart, weights.t().contiguous().t()), combine_assignments(y, weights)
    )


def test_a_gradient_goes_through_torch():
    y, weights = operands((3, 2, 8), torch.float32, torch.float32)
    y.requires_grad_()
    combine_assignments(y, weights).sum().backward()
    assert y.grad is not None
    assert torch.allclose(y.grad, weights.reshape(-1, 1).expand(6, 8))
    if native_library() is not None:
        with pytest.raises(ValueError, match="no backward pass"):
            combine_assignments(y, weights, impl="native")


def test_fp64_stays_fp64():
    y, weights = operands((3, 2, 8), torch.float64, torch.float32)
    assert torch.allclose(combine_assignments(y, weights), exact(y, weights), rtol=1e-14)
    assert torch.equal(combine_assignments(y, weights), combine_assignments_reference(y, weights))


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"expected y \[T \* K, D\]"):
        combine_assignments(torch.zeros(5, 4), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="impl must be"):
        combine_assignments(torch.zeros(4, 4), torch.zeros(2, 2), impl="cuda")
