"""An expert whose slot is negative takes no part, whatever computes and whatever its gate weight.

Shape suffixes: T tokens, K top-k, E experts, S slots, D model, R rows.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from native_marks import NATIVE
from stacked_experts import DIM_MODEL, make_experts, make_routing, mlp_by_hand
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.op import grouped_expert_mlp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = pytest.param("triton", marks=pytest.mark.skipif(not HAS_TRITON, reason="needs Triton"))
IMPLS = ["reference", "torch", NATIVE, TRITON]
TABLE = (2, -1, 0)
# Two products one after another, of at most 37 terms below 8 in fp32: 2 * 37 * 8 * 2**-24 = 4e-5.
CLOSE = 1e-4


def silu_of_halves(z_RZ: Tensor) -> Tensor:
    gate, up = z_RZ.chunk(2, dim=-1)
    return F.silu(gate) * up


def device_of(impl: str) -> str:
    return DEVICE if impl == "triton" else "cpu"


def experts_of(table: tuple[int, ...], device: str) -> StackedExperts:
    """Leaves; the slot that a negative index would mean holds NaN."""
    experts = make_experts(3, num_slots=5, dtype=torch.float32, slot_of_expert=torch.tensor(table))
    parameters = {}
    for name, tensor in zip(experts.names, experts.tensors(), strict=True):
        tensor[-1] = torch.nan
        parameters[name] = tensor.to(device).requires_grad_()
    return replace(experts, slot_of_expert=torch.tensor(table, device=device), **parameters)


@pytest.mark.parametrize("num_tokens", [3, 20])  # Triton sorts more than 16 tokens
@pytest.mark.parametrize("differentiates", [False, True])
@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
def test_an_expert_without_a_slot_adds_nothing(impl, differentiates, num_tokens):
    """With a function as activation, too."""
    device, activation = device_of(impl), silu_of_halves if impl == "auto" else "silu"
    experts = experts_of(TABLE, device)
    x = torch.randn(num_tokens, DIM_MODEL, device=device)
    ids, weights = make_routing(num_tokens, 2, 3, dtype=torch.float32)
    ids[0, 0], ids[1, 1] = 1, 1
    absent = ids == 1
    weights = weights.masked_fill(absent, torch.inf).to(device).requires_grad_()
    with torch.set_grad_enabled(differentiates):
        out = expert_mlp(x, ids.to(device), weights, experts, activation=activation, impl=impl)
    known = replace(
        experts, **{name: getattr(experts, name).detach().cpu().double() for name in experts.names}
    )
    expected = mlp_by_hand(
        x.cpu().double(), ids.masked_fill(absent, -1), weights.detach().cpu().double(), known
    )
    torch.testing.assert_close(out.detach().cpu().double(), expected, rtol=CLOSE, atol=CLOSE)
    if not differentiates:
        return
    gradients = torch.autograd.grad(out.sum(), [weights, *experts.tensors()])
    assert (gradients[0].cpu()[absent] == 0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
    for gradient in gradients[1:]:
        assert (gradient[[1, 3, 4]] == 0).all()  # slots of nobody
        assert (gradient[[0, 2]] != 0).any()


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_of_an_expert_without_a_slot_are_zero(impl):
    device = device_of(impl)
    experts = experts_of(TABLE, device)
    x_RD, counts_E = torch.randn(9, DIM_MODEL, device=device), torch.tensor([2, 3, 4])
    with torch.no_grad():
        out_RD = grouped_expert_mlp(
            x_RD, counts_E.to(device), experts, activation="silu", impl=impl
        )
        others = replace(experts, slot_of_expert=torch.tensor([2, 1, 0], device=device))
        expected_RD = grouped_expert_mlp(
            x_RD, counts_E.to(device), others, activation="silu", impl=impl
        )
    assert (out_RD[2:5] == 0).all()
    for rows in (slice(2), slice(5, None)):
        assert torch.equal(out_RD[rows], expected_RD[rows])


@pytest.mark.parametrize("impl", ["torch", NATIVE])
def test_a_slot_that_there_is_not_is_refused(impl):
    """Where the host reads the table; a GPU is not waited for."""
    experts = experts_of((2, 5, 0), "cpu")
    x, ids = torch.randn(2, DIM_MODEL), torch.tensor([[0], [1]])
    with torch.no_grad(), pytest.raises(ValueError, match="must be below 5, got 5"):
        expert_mlp(x, ids, torch.ones(2, 1), experts, activation="silu", impl=impl)
