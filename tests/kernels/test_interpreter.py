"""Triton's interpreter, in which builtins and programs are worked out once for each kind."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


@triton.jit
def _kernel(x_ptr, y_ptr, out_ptr, length, LENGTH: tl.constexpr):
    offs = tl.arange(0, LENGTH)
    place = out_ptr + tl.program_id(0) * 5 * LENGTH + offs
    x = tl.load(x_ptr + offs, mask=offs < length, other=0.0)
    y = tl.load(y_ptr + offs, mask=offs < length, other=-0.0)
    tl.store(place, x * x)
    tl.store(place + LENGTH, x * y)
    tl.store(place + 2 * LENGTH, y * 1)
    tl.store(place + 3 * LENGTH, y * 1.5)
    tl.store(place + 4 * LENGTH, x + tl.program_id(0))


def test_what_is_known_of_one_call_holds_for_others_of_its_kind_alone():
    """A square is no product of two, a program no other one, and 0.0 is not -0.0."""
    generator = torch.Generator().manual_seed(0)
    for length in (8, 5):
        x, y = torch.randn(2, 8, generator=generator)
        out = torch.full((2, 5, 8), torch.nan)
        _kernel[(2,)](x, y, out, length, LENGTH=8)
        x[length:], y[length:] = 0.0, -0.0
        for program in range(2):
            expected = torch.stack([x * x, x * y, y, y * 1.5, x + program])
            assert torch.equal(out[program], expected)
            assert torch.equal(out[program].signbit(), expected.signbit())


@triton.jit
def _counting(counts_ptr, x_ptr, out_ptr, seen_ptr, PARTS: tl.constexpr, LENGTH: tl.constexpr):
    """Rows of `x` are summed, as many as the program's count says; below 0: the largest of all."""
    own = tl.program_id(0)
    before = tl.load(seen_ptr + own)
    tl.store(seen_ptr + own, before + 1)
    count = tl.load(counts_ptr + own)
    offs = tl.arange(0, LENGTH)
    if count < 0:
        rows = tl.arange(0, PARTS)[:, None] * LENGTH + offs[None, :]
        found = tl.max(tl.load(x_ptr + rows), axis=0)
    else:
        found = tl.zeros([LENGTH], dtype=tl.float32)
        for row in range(count):
            found += tl.load(x_ptr + row * LENGTH + offs)
    tl.store(seen_ptr + tl.num_programs(0) + own, before)
    place = out_ptr + own * 2 * LENGTH + offs
    # wherever it is repeated, a sum has as many terms
    found = tl.sum(tl.broadcast_to(found[None, :], (PARTS, LENGTH)) + own, axis=0)
    low, high = tl.split(tl.reshape(found, (LENGTH // 2, 2)))
    half = tl.arange(0, LENGTH // 2)
    tl.store(place, tl.where(own % 2 == 0, found, -found))
    tl.store(out_ptr + own * 2 * LENGTH + LENGTH + half, low.to(tl.float16).to(tl.float32))
    tl.store(out_ptr + own * 2 * LENGTH + LENGTH + LENGTH // 2 + half, high * own)


def test_a_program_is_done_again_where_it_decides_as_another_one_did():
    """And what it stored before it decides otherwise is not read anew."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor([2, 2, 2, 2, 2, 2, -1, 3, 2, -1, 0, 4, 3, 1, -1], dtype=torch.int32)
    seen = torch.zeros(2, len(counts), dtype=torch.int32)
    for launch in range(1, 4):
        x = torch.randn(4, 8, generator=generator)
        out = torch.full((len(counts), 16), torch.nan)
        _counting[(len(counts),)](counts, x, out, seen, PARTS=4, LENGTH=8)
        for program, count in enumerate(counts.tolist()):
            found = x.amax(0) if count < 0 else torch.zeros(8)
            for row in range(count):
                found = found + x[row]
            found = (found + program).expand(4, 8).sum(0)
            expected = [found if program % 2 == 0 else -found]
            expected += [found[::2].half().float(), found[1::2] * program]
            assert torch.equal(out[program], torch.cat(expected))
        assert seen[0].eq(launch).all()
        assert seen[1].eq(launch - 1).all()
        counts = counts.roll(3)


def test_arguments_of_another_kind_are_another_program():
    x, y = torch.arange(8.0), torch.arange(8.0) + 1
    for length in (8, 8, 8, 3, 8):
        for y_then in (y, -y):
            out = torch.full((4, 5, 8), torch.nan)
            _kernel[(4,)](x, y_then, out, length, LENGTH=8)
            seen = torch.arange(8) < length
            product = torch.where(seen, x * y_then, -0.0 * x)
            assert torch.equal(out[:, 1], torch.where(seen, product, -0.0).expand(4, 8))
            assert torch.equal(out[3, 4], torch.where(seen, x, 0.0) + 3)
