"""`rms_norm` against fp64 and against torch."""

import pytest
import torch
from native_marks import NATIVE, needs_native

from moe_runtime.kernels.rms_norm import FORMS, rms_norm, rms_norm_reference
from moe_runtime.kernels.rms_norm.op import add_rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IMPLS = ["reference", NATIVE, "triton"]


def operands(rows: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + dim)
    x = torch.randn(rows, dim, generator=generator) * 3
    return x.to(dtype), torch.randn(dim, generator=generator).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "dim"), [(1, 1), (1, 64), (3, 65), (2, 127), (5, 2048), (1, 5003)]
)
def test_against_fp64(rows, dim, dtype, impl, form):
    x, weight = operands(rows, dim, dtype)
    factor = weight.double() + (form == "plus_one")
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * factor
    place = DEVICE if impl == "triton" else "cpu"
    got = rms_norm(x.to(place), weight.to(place), 1e-5, form=form, impl=impl).cpu()
    assert got.dtype == dtype
    # one or two roundings to the type, each of half a unit (where that is subnormal, of the
    # smallest number), and a sum of fp32 squares of which no partial sum has over 80 terms
    kind = torch.finfo(dtype)
    relative = kind.eps + 100 * torch.finfo(torch.float32).eps
    bound = relative * exact.abs() + kind.smallest_normal * kind.eps * (1 + weight.double().abs())
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_added_to_the_mean_of_small_rows(impl):
    place = DEVICE if impl == "triton" else "cpu"
    x = torch.full((2, 64), 2.0**-10, device=place)
    got = rms_norm(x, torch.ones(64, device=place), 3 * 2.0**-20, impl=impl)
    assert got.cpu().sub(0.5).abs().max() < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_is_rounded_before_it_meets_its_weights(dtype, impl):
    """The mean of its squares is nine."""
    place = DEVICE if impl == "triton" else "cpu"
    x = torch.tensor([1.0, 5.0, -3.0, 1.0]).repeat(24).to(dtype)
    weight = operands(1, 96, dtype)[1]
    normed = x.double() / 3
    expected = (normed.to(dtype).double() * weight.double()).to(dtype)
    assert not torch.equal(expected, (normed * weight.double()).to(dtype))
    got = rms_norm(x[None].to(place), weight.to(place), 1e-12, impl=impl).cpu()
    assert torch.equal(got[0], expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1, 1), (3, 65), (2, 2048)])
def test_a_sum_and_its_norm_have_the_bits_of_the_two_one_by_one(rows, dim, dtype, impl, form):
    place = DEVICE if impl == "triton" else "cpu"
    x, weight = (part.to(place) for part in operands(rows, dim, dtype))
    residual = operands(rows + 1, dim, dtype)[0][1:].to(place) / 3
    total, normed = add_rms_norm(x, residual, weight, 1e-5, form=form, impl=impl)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-5, form=form, impl=impl))
    wide = torch.full((rows, 2, dim + 3), torch.nan, dtype=dtype, device=place)
    wide[:, 0, :dim], wide[:, 1, :dim] = x, residual
    parts = wide[:, 0, :dim], wide[:, 1, :dim]
    found = add_rms_norm(*parts, weight, 1e-5, form=form, impl=impl)
    assert all(map(torch.equal, found, (total, normed)))


def test_a_residual_of_another_kind_is_refused():
    x, weight = operands(2, 8, torch.float32)
    for residual in (x[:1], x.bfloat16()):
        with pytest.raises(ValueError, match="expected a residual of the shape and dtype of x"):
            add_rms_norm(x, residual, weight, 1e-5)
    with pytest.raises(ValueError, match="impl must be one of auto, triton, reference"):
        add_rms_norm(x, x, weight, 1e-5, impl="native")
    with pytest.raises(ValueError, match="no gradients"):
        add_rms_norm(
            x.to(DEVICE), x.to(DEVICE).requires_grad_(), weight.to(DEVICE), 1e-5, impl="triton"
        )


@pytest.mark.parametrize("impl", [NATIVE, "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_or_on_strides(dtype, impl):
    place = DEVICE if impl == "triton" else "cpu"
    x, weight = (operand.to(place) for operand in operands(7, 96, dtype))
    together = rms_norm(x, weight, 1e-6, impl=impl)
    if impl == "native":  # few rows are for the calling thread, many for all
        many = rms_norm(x.repeat(29, 1), weight, 1e-6, impl="auto")
        assert torch.equal(many, together.repeat(29, 1))
    for row in range(7):
        assert torch.equal(rms_norm(x[row], weight, 1e-6, impl=impl), together[row])
    wide = torch.empty(7, 200, dtype=dtype, device=place)
    wide[:, :96] = x
    assert torch.equal(rms_norm(wide[:, :96], weight, 1e-6, impl=impl), together)
    heads, narrow = x.view(7, 3, 32).transpose(0, 1), weight[:32].contiguous()
    found = rms_norm(heads, narrow, 1e-6, impl=impl)
    assert torch.equal(found, rms_norm(heads.contiguous(), narrow, 1e-6, impl=impl))


@needs_native
def test_zeros_infinities_and_nans_behave_as_in_torch():
    x = torch.zeros(3, 70)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    weight = torch.ones(70)
    got = rms_norm(x, weight, 1e-6, impl="native")
    assert torch.equal(got.isnan(), rms_norm_reference(x, weight, 1e-6).isnan())
    assert torch.equal(got[0], torch.zeros(70))


def test_a_gradient_goes_through_torch():
    x, weight = operands(2, 32, torch.float32)
    x.requires_grad_()
    rms_norm(x, weight, 1e-6).sum().backward()
    mine = x.grad
    x.grad = None
    torch.nn.functional.rms_norm(x, (32,), weight, 1e-6).sum().backward()
    assert mine is not None
    torch.testing.assert_close(mine, x.grad)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"expected x \[\.\.\., D\]"):
        rms_norm(torch.zeros(2, 3), torch.zeros(4), 1e-6, impl="reference")
    with pytest.raises(ValueError, match="form must be one of rounded, wide, plus_one, got 'x'"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3), 1e-6, form="x")
    with pytest.raises(ValueError, match="impl must be"):
        rms_norm(torch.zeros(2, 3), torch.zeros(3), 1e-6, impl="cuda")


@needs_native
def test_native_refuses_what_it_cannot_take():
    for x, weight in [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16)),
        (torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(6)[::2]),
        (torch.zeros(2, 3, requires_grad=True), torch.zeros(3)),
    ]:
        with pytest.raises(ValueError, match="cannot compute this"):
            rms_norm(x, weight, 1e-6, impl="native")


def test_what_the_triton_kernel_cannot_take_is_refused():
    x, weight = (operand.to(DEVICE) for operand in operands(2, 8, torch.float32))
    for bad in (x.bfloat16(), x[:0], x.clone().requires_grad_()):
        with pytest.raises(ValueError, match="impl='triton' takes fp32, bf16 and fp16"):
            rms_norm(bad, weight, 1e-6, impl="triton")
