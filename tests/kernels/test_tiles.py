"""Every shipped tile, in every kernel that uses it, against plain torch in fp64."""

from dataclasses import dataclass

import pytest
import torch
from low_precision import UNIT_ROUNDOFF
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.grouped_gemm.backward import activation_backward, bias_grad, weight_grad
from moe_runtime.kernels.grouped_gemm.forward import activated_product, plain_product
from moe_runtime.kernels.grouped_gemm.groups import Groups
from moe_runtime.kernels.grouped_gemm.tile import TILES_16_BIT, TILES_32_BIT, Tile
from moe_runtime.kernels.operands import GateLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SILU = ActivationSpec("silu")
SHIPPED = [
    pytest.param(kind, tile, dtype, id=f"{kind}-{tile.block_m}x{tile.block_n}-{dtype}")
    for dtype, tables in ((torch.bfloat16, TILES_16_BIT), (torch.float32, TILES_32_BIT))
    for kind, table in tables.items()
    for _, tile in table
]


@dataclass(frozen=True)
class Rows:
    """Three experts, one without rows, none of whose sizes a tile divides."""

    offsets: tuple[int, ...] = (0, 70, 70, 83)
    dim_k: int = 44
    dim_n: int = 70

    @property
    def groups(self) -> Groups:
        return Groups(torch.tensor(self.offsets, device=DEVICE), self.offsets[-1])

    def parts(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]

    def draw(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return (torch.randn(shape) * shape[-1] ** -0.5).to(DEVICE, dtype)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Four roundings in `dtype` of the largest value, and those of sums of up to 83 in fp32."""
    error = float((found.double() - exact).abs().max())
    budget = 4 * UNIT_ROUNDOFF[dtype] + 83 * UNIT_ROUNDOFF[torch.float32]
    assert error <= budget * float(exact.abs().max())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("kind", "tile", "dtype"), SHIPPED)
def test_every_shipped_tile(kind, tile, dtype):
    case = Rows()
    num_rows = case.offsets[-1]
    x = case.draw(num_rows, case.dim_k, dtype=dtype)
    groups, parts = case.groups, case.parts()
    if kind == "plain":
        weight = case.draw(3, case.dim_n, case.dim_k, dtype=dtype)
        out = plain_product(x, weight, groups, out=x.new_empty(num_rows, case.dim_n), tile=tile)
        exact = [x[p].double() @ w.double().T for p, w in zip(parts, weight, strict=True)]
        close(out, torch.cat(exact), dtype)
    elif kind == "gated":
        weight = case.draw(3, 2 * case.dim_n, case.dim_k, dtype=dtype)
        out = activated_product(
            x,
            weight,
            groups,
            SILU,
            GateLayout(),
            out=x.new_empty(num_rows, case.dim_n),
            pre=None,
            tile=tile,
        )
        z = [x[p].double() @ w.double().T for p, w in zip(parts, weight, strict=True)]
        close(out, SILU(*torch.cat(z).chunk(2, dim=1)), dtype)
    elif kind == "down_act_backward":
        down = case.draw(3, case.dim_k, case.dim_n, dtype=dtype)
        pre = case.draw(num_rows, 2 * case.dim_n, dtype=dtype)
        found = activation_backward(
            x, down, pre, None, groups, SILU, GateLayout(), tile=tile, needs_gate_weight_grad=False
        )
        d = torch.cat([x[p].double() @ w.double() for p, w in zip(parts, down, strict=True)])
        gate, up = pre.double().chunk(2, dim=1)
        dgate, dup = SILU.backward(gate, up, d)
        assert dgate is not None
        close(found.dpre, torch.cat([dgate, dup], dim=1), dtype)
        assert found.hidden is not None
        close(found.hidden, SILU(gate, up), dtype)
    else:
        left = case.draw(num_rows, case.dim_n, dtype=dtype)
        out = weight_grad(
            left, x, groups, out_SNK=x.new_empty(3, case.dim_n, case.dim_k), tile=tile
        )
        exact = torch.stack([left[p].double().T @ x[p].double() for p in parts])
        close(out, exact, dtype)


PERSISTENT = Tile(128, 64, 32, 4, 3, is_persistent=True)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dims", [(64, 72), (48, 136)], ids=["even", "uneven"])
def test_persistent_programs(dims, *, is_transposed):
    """By descriptors, or by pointers where nothing else reads the operands, to the same values."""
    dim_k, dim_n = dims
    case = Rows((0, 300, 300, 313, 330), dim_k, dim_n)
    slots = torch.tensor([3, 0, -1, 1], device=DEVICE)
    num_rows, is_given = 336, torch.arange(336) < 300
    is_given |= (torch.arange(336) >= 313) & (torch.arange(336) < 330)
    order = torch.randperm(num_rows).to(DEVICE)
    groups = Groups(torch.tensor(case.offsets, device=DEVICE), num_rows, slots, order, 3)
    x = case.draw(num_rows, dim_k, dtype=torch.bfloat16)
    tokens = case.draw(num_rows // 3, dim_k, dtype=torch.bfloat16)
    weight = case.draw(4, 2 * dim_n, dim_k, dtype=torch.bfloat16)
    if is_transposed:
        weight = weight.mT.contiguous().mT
    parts = [(0, 300, 3), (313, 330, 1)]
    out = plain_product(x, weight, groups, out=x.new_zeros(num_rows, 2 * dim_n), tile=PERSISTENT)
    exact = [x[a:b].double() @ weight[slot].double().T for a, b, slot in parts]
    close(out[is_given], torch.cat(exact), torch.bfloat16)
    assert out[~is_given].eq(0).all()
    hidden, pre = x.new_zeros(num_rows, dim_n), x.new_zeros(num_rows, 2 * dim_n)
    activated_product(
        tokens, weight, groups, SILU, GateLayout(), out=hidden, pre=pre, gathers=True,
        tile=PERSISTENT,
    )  # fmt: skip
    rows = tokens[order // 3].double()
    z = torch.cat([rows[a:b] @ weight[slot].double().T for a, b, slot in parts])
    close(pre[is_given], z, torch.bfloat16)
    close(hidden[is_given], SILU(*z.chunk(2, dim=1)), torch.bfloat16)
    assert hidden[~is_given].eq(0).all()


def test_persistent_programs_without_a_row():
    groups = Groups(torch.zeros(4, dtype=torch.int64, device=DEVICE), 9)
    x = torch.full((9, 64), torch.nan, device=DEVICE).bfloat16()
    weight = torch.ones(3, 128, 64, device=DEVICE).bfloat16()
    assert plain_product(x, weight, groups, out=x.new_zeros(9, 128), tile=PERSISTENT).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_added_to_those_there_are(dtype):
    """beta = 1: what lies in the gradient stays, for experts without rows to the last bit."""
    case = Rows()
    left = case.draw(case.offsets[-1], case.dim_n, dtype=dtype)
    right = case.draw(case.offsets[-1], case.dim_k, dtype=dtype)
    before = case.draw(3, case.dim_n, case.dim_k, dtype=dtype)
    found = weight_grad(left, right, case.groups, out_SNK=before.clone(), accumulates=True)
    sums = [left[p].double().T @ right[p].double() for p in case.parts()]
    close(found, torch.stack(sums) + before.double(), dtype)
    assert torch.equal(found[1], before[1])
    bias = case.draw(3, case.dim_n, dtype=dtype)
    found = bias_grad(left, case.groups, out_SN=bias.clone(), accumulates=True)
    sums = [left[p].double().sum(0) for p in case.parts()]
    close(found, torch.stack(sums) + bias.double(), dtype)
    assert torch.equal(found[1], bias[1])
