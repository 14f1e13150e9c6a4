"""`linear` of one row by the Triton kernel, and several layers of one row in one launch."""

import itertools
from typing import Any

import pytest
import torch
from linear_bounds import DTYPES, assert_close_to_fp64, random
from torch import Tensor
from triton_interpreter import repair_interpreter

from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.rms_norm import rms_norm

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE == "cpu":
        repair_interpreter()


def layer(
    generator: torch.Generator, n: int, k: int, dtype: torch.dtype, bias: bool
) -> list[Tensor | None]:
    weight = random(generator, n, k, dtype=dtype).to(DEVICE)
    return [weight, random(generator, n, dtype=dtype).to(DEVICE) if bias else None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_shapes(dtype, generator):
    for (n, k), bias in itertools.product(
        ((1, 1), (1, 64), (7, 3), (6, 130), (64, 2048), (5, 2880), (3, 4096)), (False, True)
    ):
        x = random(generator, 1, k, dtype=dtype).to(DEVICE)
        weight, bias_N = layer(generator, n, k, dtype, bias)
        y = linear(x, weight, bias_N, impl="triton")
        assert y.dtype == dtype
        assert_close_to_fp64(y, x, weight, bias_N)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("widths", [(64, 16, 16), (12, 4), (4, 8, 132), (34,)])
def test_layers_of_one_launch_have_the_bits_of_their_own(widths, bias, generator):
    """Weights lie anywhere, with rows at a distance; so does the row that they take."""
    layers = []
    for n in widths:
        weight, bias_N = layer(generator, n, 200, torch.bfloat16, bias)
        layers.append((weight[:, 8:104], bias_N))
    x = random(generator, 1, 1, 192, dtype=torch.bfloat16).to(DEVICE)[..., ::2]
    found = linears_of_a_row(x, *layers)
    assert found is not None
    for part, each in zip(found, layers, strict=True):
        assert part.shape == (1, 1, len(each[0]))
        assert torch.equal(part, linear(x, *each, impl="triton"))


def test_what_one_launch_does_not_take(generator):
    even, odd = (layer(generator, n, 8, torch.float32, True) for n in (4, 6))
    x = torch.ones(1, 8, device=DEVICE)
    assert linears_of_a_row(x, even, odd) is None
    assert linears_of_a_row(x, even, [even[0], None]) is None
    assert linears_of_a_row(x, even, even, even, even) is None
    assert linears_of_a_row(torch.ones(2, 8, device=DEVICE), even) is None
    assert linears_of_a_row(x.half(), even) is None
    assert linears_of_a_row(x, [even[0].T.contiguous().T, None]) is None
    assert linears_of_a_row(x, [even[0].clone().requires_grad_(), None]) is None
    # of one launch the threads of all layers would load what those of this one can
    wide = [torch.ones(4, 9, device=DEVICE)[:, :8], even[1]]
    shifted = [torch.ones(33, device=DEVICE)[1:].view(4, 8), even[1]]
    for other in (wide, shifted):
        assert linears_of_a_row(x, other) is not None
        assert linears_of_a_row(x, even, other) is None
    with torch.no_grad():
        assert linears_of_a_row(x, [even[0].clone().requires_grad_(), None]) is not None


@pytest.mark.parametrize(
    ("x", "weight", "named"),
    [
        (torch.ones(2, 3), torch.ones(4, 3), "one row"),
        (torch.ones(1, 3), torch.ones(4, 3, dtype=torch.bfloat16), "the same for all"),
        (torch.ones(1, 3), torch.ones(3, 4).T, "unit stride"),
        (torch.ones(1, 3), torch.ones(4, 3, requires_grad=True), "no gradients"),
    ],
)
def test_what_is_asked_for_and_cannot_be(x, weight, named):
    with pytest.raises(ValueError, match=named):
        linear(x.to(DEVICE), weight.to(DEVICE), impl="triton")


class Wrapping(Tensor):
    """As quantised and distributed weights are: whose values lie elsewhere."""

    @staticmethod
    def of(shape: torch.Size) -> Tensor:
        return Tensor._make_wrapper_subclass(Wrapping, shape, device=DEVICE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a kernel asked for values")


def test_what_torch_shall_multiply_or_refuse(generator):
    weight, bias_N = layer(generator, 4, 3, torch.float32, True)
    x, one = torch.ones(1, 3, device=DEVICE), torch.ones(1, device=DEVICE)
    assert linears_of_a_row(x, (weight, bias_N)) is not None
    for bias in (one, one[0], bias_N[:2], bias_N[None], bias_N.to("meta")):
        assert linears_of_a_row(x, (weight, bias)) is None
    assert linears_of_a_row(x, (weight.to("meta"), None)) is None
    assert linears_of_a_row(x, (Wrapping.of(weight.shape), None)) is None
    assert linears_of_a_row(one, (one[0], None)) is None
    rows = torch.randn(5, 1, 3, generator=generator).to(DEVICE)
    assert torch.vmap(lambda row: one * (linears_of_a_row(row, (weight, None)) is None))(rows).all()


@pytest.mark.gpu
def test_a_gpu_takes_it_for_one_row(generator):
    weight, bias_N = layer(generator, 40, 96, torch.bfloat16, True)
    rows = random(generator, 2, 96, dtype=torch.bfloat16).cuda()
    assert torch.equal(
        linear(rows[:1], weight, bias_N), linear(rows[:1], weight, bias_N, impl="triton")
    )
    assert torch.equal(
        linear(rows, weight, bias_N), torch.nn.functional.linear(rows, weight, bias_N)
    )
    with torch.autocast("cuda", torch.float16):
        assert linear(rows[:1], weight, bias_N).dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize("k", [2048, 4096])
def test_a_gpu_reads_parameters_early_in_a_graph_and_what_was_written_before_it(k, generator):
    """A kernel before it makes the row; the weight is written between two replays."""
    x = random(generator, 1, k, dtype=torch.bfloat16).cuda()
    scale = torch.ones(k, dtype=torch.bfloat16, device="cuda")
    weights = [random(generator, 4096, k, dtype=torch.bfloat16).cuda() for _ in range(3)]
    weight = torch.nn.Parameter(torch.empty_like(weights[0]), requires_grad=False)

    def step() -> Tensor:
        return linear(rms_norm(x, scale, 1e-6), weight, None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for values in weights:
        weight.copy_(values)
        x.add_(1)
        graph.replay()
        assert torch.equal(found, step())


@pytest.mark.gpu
def test_a_gpu_waits_for_weights_that_are_made_in_a_graph(generator):
    """By the kernel in front, which lets the next one begin before it ends."""
    rows = random(generator, 4096, 2048, dtype=torch.bfloat16).cuda()
    x = random(generator, 1, 2048, dtype=torch.bfloat16).cuda()
    scale = torch.ones(2048, dtype=torch.bfloat16, device="cuda")

    def step() -> Tensor:
        return linear(x, rms_norm(rows, scale, 1e-6), None)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        rows.mul_(-1)
        graph.replay()
        assert torch.equal(found, step())
