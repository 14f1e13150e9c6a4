"""Triton's interpreter, in which builtins are worked out once for operands of one kind."""

from __future__ import annotations

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


def test_what_is_known_of_one_call_holds_for_others_of_its_kind_alone() -> None:
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
