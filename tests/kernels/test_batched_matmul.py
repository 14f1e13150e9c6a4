"""`batched_matmul` against fp64, with the strides and sizes of caches that grew."""

import pytest
import torch

from moe_runtime.kernels.batched_matmul import (
    batched_matmul,
    batched_matmul_reference,
)
from moe_runtime.kernels.native import native_library

needs_native = pytest.mark.skipif(
    native_library() is None, reason="the native library needs a C compiler at installation"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def operands(shape, dtype, *, transpose_w):
    """x, and matrices that are a part of a larger cache, the rest of it NaN."""
    outer, inner, rows, num, cols = shape
    cache = torch.full((outer, inner, num + 3, cols + 5), torch.nan, dtype=dtype)
    w = cache[:, :, :num, :cols]
    w.copy_(torch.randn(outer, inner, num, cols))
    return torch.randn(outer, inner, rows, cols if transpose_w else num), w


@needs_native
@pytest.mark.parametrize("transpose_w", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1), (1, 16, 1, 300, 128), (2, 3, 4, 7, 63), (1, 2, 17, 1, 1000)]
)
def test_against_fp64(shape, dtype, transpose_w):
    x, w = operands(shape, dtype, transpose_w=transpose_w)
    exact = batched_matmul_reference(x.double(), w, transpose_w=transpose_w)
    found = batched_matmul(x, w, transpose_w=transpose_w, impl="native")
    assert found.dtype == torch.float32
    # one rounding for each term of a sum of products of at most this size
    terms = x.shape[-1]
    bound = (
        terms
        * 2**-24
        * batched_matmul_reference(x.double().abs(), w.abs(), transpose_w=transpose_w)
    )
    assert ((found - exact).abs() <= bound + 2**-24 * exact.abs()).all()


@needs_native
@pytest.mark.parametrize("transpose_w", [True, False])
def test_the_number_of_threads_changes_no_bit(transpose_w):
    library = native_library()
    assert library is not None
    x, w = operands((2, 5, 3, 33, 70), torch.bfloat16, transpose_w=transpose_w)
    before, found = library.num_threads, []
    for num_threads in (1, 2, 3):
        library.set_num_threads(num_threads)
        found.append(batched_matmul(x, w, transpose_w=transpose_w, impl="native"))
    library.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_native
def test_what_native_cannot_take_is_refused_by_name_and_computed_by_auto():
    x, w = operands((1, 2, 1, 9, 16), torch.float32, transpose_w=True)
    for other in (w.double(), w.transpose(2, 3).contiguous().transpose(2, 3)):
        with pytest.raises(ValueError, match="native"):
            batched_matmul(x, other, transpose_w=True, impl="native")
        exact = batched_matmul_reference(x, other, transpose_w=True)
        assert torch.equal(batched_matmul(x, other, transpose_w=True), exact)


def test_a_gradient_goes_through_torch():
    x, w = operands((1, 2, 1, 9, 16), torch.float32, transpose_w=True)
    x.requires_grad_()
    batched_matmul(x, w, transpose_w=True).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, w.sum(2, keepdim=True))


@pytest.mark.parametrize(
    ("x_shape", "w_shape"), [((1, 1, 1, 3), (1, 1, 2, 4)), ((1, 2, 1, 4), (1, 1, 2, 4))]
)
def test_shapes_that_do_not_fit(x_shape, w_shape):
    with pytest.raises(ValueError, match="got"):
        batched_matmul(torch.zeros(x_shape), torch.zeros(w_shape), transpose_w=True)
    with pytest.raises(ValueError, match="impl must be"):
        batched_matmul(
            torch.zeros(1, 1, 1, 4),
            torch.zeros(1, 1, 2, 4),
            transpose_w=True,
            impl="cuda",  # type: ignore[arg-type]
        )
