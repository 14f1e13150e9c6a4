"""`linear` against fp64, in every implementation, data type and instruction set."""

import itertools
import math

import pytest
import torch
from linear_bounds import DTYPES, assert_close_to_fp64, random

from moe_runtime.kernels.linear import ROWS_PER_CALL, UNLIMITED, linear, native_row_limit, op
from moe_runtime.kernels.linear.op import IMPLS, LinearImpl

SIZES = (1, 7, 63, 130, 1000)
ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 33)
# every pair of sizes with a few rows, and every number of rows with two pairs of sizes
SHAPES = [(n, k, r) for n, k in itertools.product(SIZES, SIZES) for r in (1, 5)] + [
    (n, k, r) for n, k in ((63, 130), (130, 63)) for r in ROWS
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_odd_shapes(isa, dtype, generator):
    for n, k, rows in SHAPES:
        x = random(generator, rows, k, dtype=dtype)
        weight = random(generator, n, k, dtype=dtype)
        bias = random(generator, n, dtype=dtype) if (n + k + rows) % 2 else None
        y = linear(x, weight, bias, impl="native")
        assert y.dtype == dtype
        assert_close_to_fp64(y, x, weight, bias)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_native_fp32_rows_with_narrow_weights(isa, weight_dtype, generator):
    for rows in (1, 5, 17):
        x = random(generator, rows, 130, dtype=torch.float32)
        weight = random(generator, 63, 130, dtype=weight_dtype)
        bias = random(generator, 63, dtype=weight_dtype)
        y = linear(x, weight, bias, impl="native")
        assert y.dtype == torch.float32
        assert_close_to_fp64(y, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_many_rows(isa, dtype, generator):
    """More rows than one group of panels holds, and more than one call of the C kernel takes."""
    for rows, dim_in in ((150, 1030), (2 * ROWS_PER_CALL + 3, 70)):
        x = random(generator, rows, dim_in, dtype=dtype)
        weight = random(generator, 37, dim_in, dtype=dtype)
        assert_close_to_fp64(linear(x, weight, impl="native"), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_row_strides(isa, dtype, generator):
    """Halves, every other row, columns cut out, and rows of x that are apart."""
    wide = random(generator, 64, 200, dtype=dtype)
    x_wide = random(generator, 10, 300, dtype=dtype)
    for weight in (wide[:32, :150], wide[32:, 50:], wide[0::2, 1:131], wide[1::2]):
        x = x_wide[::2, 7 : 7 + weight.shape[1]]
        assert_close_to_fp64(linear(x, weight, impl="native"), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_takes_weights_that_lie_transposed(isa, dtype, generator):
    """Of every odd size, cut out of wider memory whose other values are poison."""
    for n, k, rows in SHAPES:
        memory = torch.full((k + 1, n + 9), math.nan, dtype=dtype)
        memory[:k, 3 : 3 + n] = random(generator, k, n, dtype=dtype)
        x = random(generator, rows, k, dtype=dtype)
        weight = memory[:k, 3 : 3 + n].T
        bias = random(generator, n, dtype=dtype) if (n + k + rows) % 2 else None
        y = linear(x, weight, bias, impl="native")
        assert y.dtype == dtype
        assert_close_to_fp64(y, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_transposed_reads_rows_of_x_wherever_they_lie(isa, dtype, generator):
    """Rows that begin at odd elements, with poison around them, have the bits of their copies."""
    for k in (1, 2, 64, 67, 300):
        weight = random(generator, k, 150, dtype=dtype).T
        for first, width in ((0, k + 2), (1, k + 3), (3, k + 4)):
            memory = torch.full((40, width), math.nan, dtype=dtype)
            x = memory[:, first : first + k]
            x.copy_(random(generator, 40, k, dtype=dtype))
            y = linear(x, weight, impl="native")
            assert torch.equal(y, linear(x.clone(), weight, impl="native"))
            assert_close_to_fp64(y, x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_transposed_row_depends_on_no_other_and_on_no_thread(isa, dtype, library, generator):
    x = random(generator, ROWS_PER_CALL + 5, 67, dtype=dtype)
    weight = random(generator, 67, 150, dtype=dtype).T
    whole = linear(x, weight, impl="native")
    for rows in (slice(3, 4), slice(1, 9), slice(400, None)):
        assert torch.equal(linear(x[rows], weight, impl="native"), whole[rows])
    for count in (1, 3):
        library.set_num_threads(count)
        assert torch.equal(linear(x, weight, impl="native"), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_unaligned(isa, dtype, generator):
    """Tensors in a file begin at any even byte."""
    x = random(generator, 3, 130, dtype=dtype)
    source = random(generator, 9, 130, dtype=dtype)
    for offset in (2, 6, 34):
        memory = bytearray(offset) + bytearray(source.view(torch.uint8).numpy().tobytes())
        weight = torch.frombuffer(memory, dtype=dtype, offset=offset).view(9, 130)
        assert torch.equal(linear(x, weight, impl="native"), linear(x, source, impl="native"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_row_does_not_depend_on_others(isa, dtype, generator):
    x = random(generator, 40, 200, dtype=dtype)
    weight = random(generator, 71, 200, dtype=dtype)
    together = linear(x, weight, impl="native")
    for rows in (1, 2, 4, 5, 8, 16, 23):
        assert torch.equal(linear(x[:rows], weight, impl="native"), together[:rows])
    few = torch.cat([linear(x, part, impl="native") for part in weight.split(13)], dim=1)
    assert torch.equal(few, together)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_in_parts_and_portions_have_the_bits_of_one_pass(isa, dtype, generator):
    """Rows too long for the cache: k in several parts, the last with a rest, rows in portions."""
    dim_in, dim_out, num_rows = 9001, 37, 270
    x = random(generator, num_rows, dim_in, dtype=dtype)
    weight = random(generator, dim_out, dim_in, dtype=dtype)
    together = linear(x, weight, impl="native")
    for row in range(0, num_rows, 9):
        assert torch.equal(together[row : row + 1], linear(x[row : row + 1], weight, impl="native"))
    assert_close_to_fp64(together, x, weight, None)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_native_threads_do_not_change_bits(library, num_threads, generator):
    x = random(generator, 9, 700, dtype=torch.bfloat16)
    weight = random(generator, 900, 700, dtype=torch.bfloat16)
    library.set_num_threads(1)
    expected = linear(x, weight, impl="native")
    library.set_num_threads(num_threads)
    for _ in range(20):
        assert torch.equal(linear(x, weight, impl="native"), expected)


def test_native_keeps_nan_and_infinity(isa):
    x = torch.ones(1, 40, dtype=torch.bfloat16)
    weight = torch.ones(3, 40, dtype=torch.bfloat16)
    weight[0, 39], weight[1, 0] = torch.nan, torch.inf
    y = linear(x, weight, impl="native")
    assert torch.isnan(y[0, 0])
    assert torch.isinf(y[0, 1])
    assert y[0, 2] == 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_native_rounds_to_nearest_even(isa, dtype, generator):
    """Sums of two numbers are exact in fp32 here, so the output's rounding is all there is."""
    info = torch.finfo(dtype)
    step = info.eps / 2
    pairs = [[1, step], [1 + info.eps, step], [-1, -step], [1, step * 1.5], [1, -step / 2]]
    pairs += [[info.max, 0], [info.max, info.max * step / 2], [info.max, info.max], [0, 0]]
    x = torch.cat([torch.tensor(pairs), torch.randn(500, 2, generator=generator)]).to(dtype)
    if dtype == torch.float16:
        subnormal = torch.arange(40)[:, None] * torch.tensor([2.0**-24, 2.0**-22])
        x = torch.cat([x, subnormal.to(dtype)])
    for factor in (0.5, 1.0):  # with 1.0 the largest sums overflow, with 0.5 subnormals round
        weight = torch.full((1, 2), factor, dtype=dtype)
        expected = (x.float() * factor).sum(1).to(dtype)
        assert torch.equal(linear(x, weight, impl="native")[:, 0], expected)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "triton"])
def test_implementations_agree(library, impl, generator):
    x = random(generator, 2, 3, 50, dtype=torch.float32)
    weight = random(generator, 20, 50, dtype=torch.float32)
    bias = random(generator, 20, dtype=torch.float32)
    y = linear(x, weight, bias, impl=impl)
    assert y.shape == (2, 3, 20)
    assert_close_to_fp64(y, x, weight, bias)


def test_auto_takes_the_native_kernel_up_to_its_limit(isa, library, generator):
    """Their sums differ in order, so equal bits tell which one ran."""
    weight = random(generator, 64, 999, dtype=torch.float32)
    limit = native_row_limit(library, torch.float32)
    cases: list[tuple[int, LinearImpl]] = [(1, "native"), (min(limit, 600), "native")]
    if limit != UNLIMITED:
        cases.append((limit + 1, "torch"))
    for rows, impl in cases:
        x = random(generator, rows, 999, dtype=torch.float32)
        assert torch.equal(linear(x, weight), linear(x, weight, impl=impl))


def test_gradients_go_through_torch(generator):
    x = random(generator, 2, 30, dtype=torch.float32).requires_grad_()
    weight = random(generator, 5, 30, dtype=torch.float32).requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is not None
    # Four additions in any order, each within half a unit of a partial sum of absolute values.
    wide = weight.detach().double()
    bound = 4 * 2**-24 * wide.abs().sum(0)
    assert ((x.grad.double() - wide.sum(0)).abs() <= bound).all()


@pytest.mark.usefixtures("library")
def test_the_native_product_knows_no_gradients(generator):
    x = random(generator, 2, 30, dtype=torch.float32).requires_grad_()
    weight = random(generator, 5, 30, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        linear(x, weight, impl="native")
    with pytest.raises(ValueError, match="gradient"):
        linear(x, weight, impl="native")


def test_reference_is_differentiable(generator):
    x = torch.randn(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight, bias: linear(x, weight, bias, impl="reference"), (x, weight, bias)
    )


def test_empty(library):
    weight = torch.ones(5, 8)
    assert linear(torch.ones(0, 8), weight, impl="native").shape == (0, 5)
    assert linear(torch.ones(0, 8), weight).shape == (0, 5)
    assert linear(torch.ones(2, 8), torch.ones(0, 8), impl="native").shape == (2, 0)
    bias = torch.arange(5.0)
    for shape in ((0,), (3, 0), (2, 3, 0), (0, 3, 0)):  # of no values a sum is the bias
        found = linear(torch.ones(shape), torch.ones(5, 0), bias, impl="native")
        assert torch.equal(found, bias.expand(*shape[:-1], 5))
    assert torch.equal(linear(torch.ones(2, 0), torch.ones(3, 0), impl="native"), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(2, 8), torch.ones(4, 9), None, "expected x"),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(5), "expected bias"),
        (torch.ones(2, 8), torch.ones(8, 16)[::2, ::2], None, "unit stride"),
        (torch.ones(2, 8).double(), torch.ones(4, 8).double(), None, "fp32, bf16 and fp16"),
        (torch.ones(2, 8).half(), torch.ones(4, 8), None, "like the weights"),
        (torch.ones(2, 8), torch.ones(4, 8), torch.ones(4).half(), "bias must be"),
    ],
)
def test_native_refuses(library, x, weight, bias, message):
    with pytest.raises(ValueError, match=message):
        linear(x, weight, bias, impl="native")


def test_unknown_implementation():
    with pytest.raises(ValueError, match="impl must be one of"):
        linear(torch.ones(1, 2), torch.ones(3, 2), impl="fast")  # type: ignore[arg-type]


def test_auto_leaves_to_torch_what_it_cannot_do():
    weight = torch.arange(24, dtype=torch.float64).view(4, 6).T
    assert torch.equal(linear(torch.eye(4).double(), weight), weight.T.contiguous())
    with pytest.raises(RuntimeError, match="at least 1D"):
        linear(torch.tensor(1.0), torch.ones(1))


def test_torch_multiplies_half_precision_in_few_numbers_of_rows(monkeypatch):
    """oneDNN keeps code for each number of rows that it meets, up to 2.4 MiB."""
    seen = set()
    product = op.F.linear

    def noted(x, weight, bias=None):
        if x.dtype == torch.bfloat16:
            seen.add(len(x))
        return product(x, weight, bias)

    monkeypatch.setattr(op.F, "linear", noted)
    monkeypatch.setattr(op, "keeps_code", lambda _: True)
    generator = torch.Generator().manual_seed(0)
    for dim_out in (16, op.SMALL_WEIGHT // 256 + 1):
        weight = torch.randn(dim_out, 256, generator=generator).bfloat16()
        for num_rows in (1, 2, 40, 63, 65, 300, 513):
            x = torch.randn(num_rows, 256, generator=generator).bfloat16()
            with torch.no_grad():
                found = linear(x, weight, impl="torch").double()
            expected = x.double() @ weight.double().T
            # sums of 256 terms in fp32, in any order, then one rounding to bf16 (2**-9 of it)
            bound = expected.abs() * 2**-8 + 256 * 2**-23 * (
                x.abs().double() @ weight.abs().double().T
            )
            assert ((found - expected).abs() <= bound).all()
    assert seen <= {1, *op.ROWS_OF_A_PRODUCT}


def test_kept_code_is_counted_for_each_number_of_rows_that_torch_is_asked_for(monkeypatch):
    large, small = (1024, 512), (256, 512)
    monkeypatch.setattr(op, "keeps_code", lambda _: True)
    monkeypatch.setattr(op, "native_library", lambda: None)
    counted = op.kept_code_bytes({large, small}, torch.bfloat16, 40)
    # one row, and the products of 16, 32 and 48 rows, of the one weight that is not small
    assert counted == 4 * op.KEPT_CODE_BYTES
    every = op.kept_code_bytes({large}, torch.bfloat16, 10**6)
    assert every == (1 + len(op.ROWS_OF_A_PRODUCT)) * op.KEPT_CODE_BYTES
    monkeypatch.setattr(op, "keeps_code", lambda _: False)
    assert op.kept_code_bytes({large}, torch.bfloat16, 40) == 0
