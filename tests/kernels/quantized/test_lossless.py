"""The lossless code of bf16 matrices: every bit comes back, and what is damaged is noticed."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_marks import NATIVE
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.decode_step.prepared import PreparedQuantizedLinear
from moe_runtime.kernels.linear import linear, quantized_linear
from moe_runtime.kernels.lossless import (
    PlanesMatrix,
    decode_planes,
    decode_reference,
    encode_planes,
    encode_planes_into,
    encode_reference,
)
from moe_runtime.kernels.lossless import planes as planes_module

SIZES = [(1, 1), (3, 64), (5, 63), (2, 65), (17, 130), (32, 64), (70, 512), (0, 64)]


def weights(rows: int, cols: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.02 * torch.randn(rows, cols, generator=generator)).bfloat16()


def any_bits(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Every pattern is as likely: infinities, NaNs with payloads, subnormals, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (rows, cols), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))


def parts(matrix: PlanesMatrix) -> tuple[Tensor, ...]:
    return matrix.coded, matrix.starts, matrix.escapes, matrix.book


@pytest.fixture(params=[NATIVE, "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(planes_module, "native_library", lambda: None)
    return request.param


@pytest.mark.parametrize("make", [weights, any_bits])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_every_bit_comes_back(implementation, make, rows, cols):
    weight = make(rows, cols)
    assert same_bits(decode_planes(encode_planes(weight)), weight)


@pytest.mark.parametrize("make", [weights, any_bits])
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_c_writes_what_the_specification_writes(library, make, rows, cols):
    weight = make(rows, cols, seed=1)
    expected = encode_reference(weight)
    assert all(map(torch.equal, parts(encode_planes(weight)), expected))


@pytest.mark.parametrize("make", [weights, any_bits])
def test_every_instruction_set_reads_and_writes_the_same(isa, make):
    weight = make(37, 321, seed=2)
    matrix = PlanesMatrix(321, *encode_reference(weight))
    assert same_bits(decode_planes(matrix), weight)
    assert all(map(torch.equal, parts(encode_planes(weight)), parts(matrix)))


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (5, 63), (37, 65), (70, 2880), (129, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_products_have_the_bits_of_those_with_the_matrix(isa, rows, cols, dtype):
    """For one row and for more than are decoded in registers."""
    weight, bias = weights(rows, cols, seed=5), weights(1, rows, seed=6)[0]
    weight[:, ::7] *= 2.0**60  # escapes in every row
    matrix = encode_planes(weight)
    for num_rows in (1, 2, 3, 5, 6, 7, 40):
        x = weights(num_rows, cols, seed=num_rows).to(dtype)
        for used in (None, bias):
            expected = linear(x, weight, used)
            assert torch.equal(quantized_linear(x, matrix, used), expected)
            found = PreparedQuantizedLinear(matrix)(x, used)
            assert found is None or torch.equal(found, expected)


@torch.inference_mode()
def test_what_fills_rows_up_is_finite():
    """Though most numbers are not: with no column of `x` it may give more than zero."""
    weight = torch.full((64, 65), -torch.inf, dtype=torch.bfloat16)
    weight[3] = 1
    matrix = encode_planes(weight)
    assert all(map(torch.equal, parts(matrix), encode_reference(weight)))
    x = torch.ones(2, 65, dtype=torch.bfloat16)
    assert torch.equal(quantized_linear(x, matrix), linear(x, weight))


@pytest.mark.parametrize("size", [1, 65])
def test_a_bias_of_another_length_is_refused(size):
    matrix, x = encode_planes(weights(64, 70)), weights(2, 70)
    bias = torch.ones(size, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert PreparedQuantizedLinear(matrix)(x, bias) is None
        with pytest.raises((RuntimeError, ValueError)):
            quantized_linear(x, matrix, torch.ones(65, dtype=torch.bfloat16))


def test_rows_of_a_matrix_are_a_matrix():
    weight = any_bits(100, 70, seed=7)
    matrix = encode_planes(weight)
    for first, end in ((0, 32), (32, 96), (64, 100), (96, 100), (0, 100)):
        part = matrix.part(first, end)
        assert same_bits(decode_planes(part), weight[first:end])
        assert same_bits(decode_reference(*parts(part), 70), weight[first:end])


@pytest.mark.parametrize("num_rows", [1, 8])
def test_products_notice_escapes_that_do_not_fit(library, num_rows):
    matrix = encode_planes(any_bits(70, 130, seed=8))
    for group in range(3):
        starts = matrix.starts.clone()
        starts[group + 1] = starts[group] if group < 2 else 2**30
        damaged = dataclasses.replace(matrix, starts=starts)
        x = torch.ones(num_rows, 130, dtype=torch.bfloat16)
        with pytest.raises(CheckpointError, match="damaged"), torch.inference_mode():
            quantized_linear(x, damaged)


def test_rows_at_any_distance():
    weight = any_bits(24, 96, seed=3)
    assert same_bits(decode_planes(encode_planes(weight[1::2, :70])), weight[1::2, :70])


def test_gaussian_weights_take_0_70_of_their_bytes():
    # 11 of 16 bits, and a byte for each of 2.4 % escapes: 0.6875 + 0.012
    weight = weights(512, 2048)
    assert encode_planes(weight).nbytes / weight.nbytes < 0.701


@pytest.mark.parametrize("room", [1, 64, 1000])
def test_escapes_may_have_more_room(implementation, room):
    weight = any_bits(9, 200, seed=5)
    matrix = encode_planes(weight)
    noise = torch.full((room,), 255, dtype=torch.uint8)
    roomy = dataclasses.replace(matrix, escapes=torch.cat((matrix.escapes, noise)))
    assert same_bits(decode_planes(roomy), weight)


@pytest.mark.parametrize("room", [0, 1, 77])
def test_parts_that_are_there_are_filled_again(implementation, room):
    """With what is left of another matrix in them; or nothing is, where escapes have no room."""
    weight = weights(70, 130, seed=3)
    expected = encode_planes(weight)
    rest = torch.full((room,), 255, dtype=torch.uint8)
    escapes = torch.cat((torch.full_like(expected.escapes, 255), rest))
    others = (torch.full_like(part, 77) for part in (expected.coded, expected.starts))
    into = PlanesMatrix(130, *others, escapes, torch.full_like(expected.book, 77))
    assert encode_planes_into(weight, into) == expected.escapes.numel()
    assert same_bits(decode_planes(into), weight)
    for name in ("coded", "starts", "book"):
        assert torch.equal(getattr(into, name), getattr(expected, name)), name
    one_less = dataclasses.replace(into, escapes=expected.escapes[:-1].clone())
    assert encode_planes_into(weight, one_less) == expected.escapes.numel()
    with pytest.raises(ValueError, match="expected parts of"):
        encode_planes_into(weight[1:], into)


def test_the_book_holds_the_most_frequent_exponents():
    weight = weights(64, 256)
    exponents = (weight.view(torch.int16).int() >> 7 & 255).flatten().tolist()
    by_count = sorted(set(exponents), key=lambda e: (-exponents.count(e), e))
    assert encode_planes(weight).book[:7].tolist() == by_count[:7]


@given(st.integers(0, 3), st.integers(0, 2**31), st.integers(1, 255))
def test_a_changed_byte_is_noticed_or_changes_no_other_row(part, place, change):
    weight = any_bits(36, 130, seed=4)
    matrix = encode_planes(weight)
    changed = [tensor.clone() for tensor in parts(matrix)]
    data = changed[part].view(torch.uint8).view(-1)
    data[place % len(data)] ^= change
    coded, starts, escapes, book = changed
    damaged = PlanesMatrix(130, coded, starts, escapes, book)
    expected = decode_reference(coded, starts, escapes, book, 130)
    if expected is None:
        with pytest.raises(CheckpointError, match="damaged"):
            decode_planes(damaged)
    else:
        assert same_bits(decode_planes(damaged), expected)


def test_parts_that_do_not_belong_together():
    matrix = encode_planes(weights(4, 64))
    for name, wrong in (
        ("coded", matrix.coded[:, :80]),
        ("starts", matrix.starts[:-1]),
        ("starts", matrix.starts.long()),
        ("escapes", matrix.escapes[:-1][:60]),
        ("book", matrix.book[:7]),
    ):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(matrix, **{name: wrong})


@pytest.mark.parametrize(
    "weight", [torch.zeros(2, 2), torch.zeros(4, dtype=torch.bfloat16), weights(4, 8).T]
)
def test_what_has_no_lossless_code(weight):
    with pytest.raises(ValueError, match=r"bf16 matrices|unit stride"):
        encode_planes(weight)
