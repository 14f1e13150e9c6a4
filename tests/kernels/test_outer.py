"""The gradient of a matrix by the native kernel, against fp64 products of the same values."""

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.linear.op import ROWS_PER_CALL, outer_into

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# lines, A, B: one, odd, whole vectors and panels, and more than one call takes
SHAPES = [
    (1, 1, 1), (2, 6, 32), (3, 5, 7), (7, 13, 33), (16, 12, 64), (33, 100, 31), (129, 18, 150),
    (5, ROWS_PER_CALL + 7, 40),
]  # fmt: skip


def placed(values: Tensor, first: int) -> Tensor:
    """The same values cut out of wider memory whose other values are poison."""
    rows, columns = values.shape
    memory = torch.full((rows + 1, columns + first + 2), math.nan, dtype=values.dtype)
    memory[:rows, first : first + columns] = values
    return memory[:rows, first : first + columns]


def bound(left: Tensor, right: Tensor, before: Tensor) -> Tensor:
    """A sum of n fp32 products is off by n + 1 units of their sum of magnitudes, then rounded."""
    sizes = left.double().abs().T @ right.double().abs() + before.double().abs()
    unit = torch.finfo(left.dtype).eps / 2
    return sizes * ((len(left) + 2) * 2**-23) + 1.01 * unit * sizes + 1e-7


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_products_of_every_size(isa, dtype, adds, generator):
    for lines, a, b in SHAPES:
        left, right, before = (
            placed(torch.randn(shape, generator=generator).to(dtype), first)
            for shape, first in (((lines, a), 1), ((lines, b), 3), ((a, b), 2))
        )
        expected = left.double().T @ right.double() + (before.double() if adds else 0)
        out = placed(before if adds else torch.full((a, b), math.nan, dtype=dtype), 1)
        outer_into(left, right, out, adds=adds)
        assert torch.all((out.double() - expected).abs() <= bound(left, right, before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_beside_the_result_is_written(isa, dtype, generator):
    left, right = (torch.randn(9, n, generator=generator).to(dtype) for n in (11, 21))
    memory = torch.full((13, 30), 7.0, dtype=dtype)
    outer_into(left, right, memory[1:12, 4:25], adds=False)
    memory[1:12, 4:25] = 7.0
    assert torch.equal(memory, torch.full_like(memory, 7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_threads_nor_other_columns_change_a_bit(isa, dtype, library, generator):
    left, right = (torch.randn(67, n, generator=generator).to(dtype) for n in (90, 150))
    whole = torch.empty(90, 150, dtype=dtype)
    outer_into(left, right, whole, adds=False)
    part = torch.empty(31, 64, dtype=dtype)
    outer_into(left[:, 5:36], right[:, 32:96], part, adds=False)
    assert torch.equal(part, whole[5:36, 32:96])
    for count in (1, 3):
        library.set_num_threads(count)
        again = torch.empty_like(whole)
        outer_into(left, right, again, adds=False)
        assert torch.equal(again, whole)


def test_infinity_and_nan_stay_where_they_belong(isa):
    left, right = torch.zeros(3, 2), torch.ones(3, 4)
    left[1, 0], left[2, 1] = math.inf, math.nan
    out = torch.empty(2, 4)
    outer_into(left, right, out, adds=False)
    assert torch.all(out[0] == math.inf)
    assert torch.all(out[1].isnan())
