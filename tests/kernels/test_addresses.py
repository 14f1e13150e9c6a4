"""Operands whose last element lies past 2 ** 31: the bits of the same operands lying together.

Only the pages that are written of such a buffer are ever there.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns, expert_topology, sdd
from moe_runtime.kernels.combine.kernel import launch_combine_bwd, launch_combine_fwd
from moe_runtime.kernels.expert_mlp import ActivationSpec, StackedExperts
from moe_runtime.kernels.expert_mlp.decode import decode_expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.operands import GateLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SILU = ActivationSpec("silu")
NUM_ROWS, DIM_D, DIM_F = 5, 16, 16


def far_apart(near: Tensor, dim: int) -> Tensor:
    """A copy in which neighbours along `dim` are so far apart that the last passes 2 ** 31."""
    strides = list(near.contiguous().stride())
    strides[dim] = 2**31 // (near.shape[dim] - 1) + 64
    extent = 1 + sum((n - 1) * stride for n, stride in zip(near.shape, strides, strict=True))
    assert extent > 2**31
    memory = torch.empty(extent, dtype=near.dtype, device=near.device)
    return memory.as_strided(near.shape, strides).copy_(near)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape).to(DEVICE, torch.float16)


def groups() -> Groups:
    """Three experts; five rows of five tokens with one choice each."""
    order = torch.tensor([4, 0, 3, 1, 2], device=DEVICE)
    return Groups(torch.tensor([0, 2, 3, 5], device=DEVICE), NUM_ROWS, None, order, num_choices=1)


def gradient_of_activation(dout: Tensor, down: Tensor, pre: Tensor) -> Sequence[Tensor | None]:
    scale = torch.full((NUM_ROWS,), 0.5, device=DEVICE)
    return activation_backward(dout, down, pre, scale, groups(), SILU, GateLayout())


def gradient_of_weights(left: Tensor, right: Tensor, out: Tensor) -> Sequence[Tensor]:
    found = weight_grad(
        left, right, groups(), out_SNK=out, left_divisor=1, right_divisor=1, accumulates=True
    )
    return [found, bias_grad(left, groups(), out_SN=left.new_zeros(out.shape[:2]), divisor=1)]


def activated(x: Tensor, weight: Tensor, out: Tensor, pre: Tensor) -> Sequence[Tensor]:
    activated_product(x, weight, groups(), SILU, GateLayout(), out=out, pre=pre, gathers=True)
    return [out, pre]


def combined(y: Tensor, dout: Tensor) -> Sequence[Tensor | None]:
    one = groups()
    rows, num_rows = torch.arange(NUM_ROWS, device=DEVICE), one.offsets_E1[-1:]
    weights = torch.full((NUM_ROWS, 1), 0.5, device=DEVICE)
    inverse = torch.empty_like(one.order_R).scatter_(0, one.order_R, rows)
    out = launch_combine_fwd(y, weights, inverse, num_rows, 1)
    grads = launch_combine_bwd(
        dout, y, weights, one.order_R, num_rows, 1, needs_dy=True, needs_dweights=True
    )
    return [out, *grads]


def plain(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    offsets = torch.tensor([0, 2, 3, 5], device=DEVICE)
    return [grouped_gemm(x, weight, offsets, impl="triton")]


def block_sparse(a: Tensor, b: Tensor) -> Sequence[Tensor]:
    columns = ExpertColumns.of((16, 24), block_columns=32, device=DEVICE)
    offsets = torch.tensor([0, 2, 5], device=DEVICE)
    topology = expert_topology(offsets, columns, num_rows=NUM_ROWS, block_rows=16)
    return [sdd(a, b, topology, impl="triton")]


def few_tokens(x: Tensor, gate_up: Tensor, down: Tensor) -> Sequence[Tensor]:
    ids = torch.tensor([[0, 2], [2, 1], [1, 1]], device=DEVICE)
    weights = torch.full((3, 2), 0.5, device=DEVICE)
    return [decode_expert_mlp(x, ids, weights, StackedExperts(gate_up=gate_up, down=down), SILU)]


def one_token(x: Tensor, gate_up: Tensor, down: Tensor) -> Sequence[Tensor]:
    """Weights whose rows are whole, wherever these and the slots lie."""
    ids, weights = torch.tensor([[2, 0, 2]], device=DEVICE), torch.full((1, 3), 0.5, device=DEVICE)
    gate_up, down = (one if one.stride(2) == 1 else one.contiguous() for one in (gate_up, down))
    return [
        decode_expert_mlp(x[:1], ids, weights, StackedExperts(gate_up=gate_up, down=down), SILU)
    ]


SHAPES: dict[Callable[..., Sequence[Tensor | None]], list[tuple[int, ...]]] = {
    gradient_of_activation: [(NUM_ROWS, DIM_D), (3, DIM_D, DIM_F), (NUM_ROWS, 2 * DIM_F)],
    gradient_of_weights: [(NUM_ROWS, DIM_F), (NUM_ROWS, DIM_D), (3, DIM_F, DIM_D)],
    activated: [(NUM_ROWS, DIM_D), (3, 2 * DIM_F, DIM_D), (NUM_ROWS, DIM_F), (NUM_ROWS, 2 * DIM_F)],
    plain: [(NUM_ROWS, DIM_D), (3, DIM_F, DIM_D)],
    block_sparse: [(NUM_ROWS, DIM_D), (DIM_D, 40)],
    combined: [(NUM_ROWS, DIM_D), (NUM_ROWS, DIM_D)],
    few_tokens: [(3, DIM_D), (3, 2 * DIM_F, DIM_D), (3, DIM_D, DIM_F)],
    one_token: [(3, DIM_D), (3, 2 * DIM_F, DIM_D), (3, DIM_D, DIM_F)],
}


@pytest.mark.parametrize("call", SHAPES, ids=lambda call: call.__name__)
def test_past_two_to_the_31(call):
    """All operands by their rows or slots, then the matrices by their other dimensions."""
    near = [draw(*shape) for shape in SHAPES[call]]
    expected = call(*(t.clone() for t in near))
    for dim in range(max(t.ndim for t in near)):
        moved = [far_apart(t, dim) if dim < max(1, 3 * (t.ndim - 2)) else t.clone() for t in near]
        for one, other in zip(expected, call(*moved), strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(one, other)
