"""Experts of different widths: the block-sparse paths against one expert after another in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from low_precision import assert_as_good_as_eager, assert_rounded_only
from stacked_experts import make_routing
from torch import Tensor

from moe_runtime.kernels.block_sparse import ExpertColumns
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.heterogeneous_mlp import PackedExperts, heterogeneous_mlp
from moe_runtime.kernels.heterogeneous_mlp.op import HeterogeneousMlpImpl, choose_block_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (21, 64, 1, 40)
SWIGLU = ActivationSpec("silu")
# A gate of zero and an up of zero give something else than zero.
OFFSET = ActivationSpec("silu", alpha=1.702, limit=0.7, up_offset=1.0)


def packed(
    widths: tuple[int, ...], dim: int, dtype: torch.dtype, *, has_gate: bool = True
) -> PackedExperts:
    shape = (sum(widths), dim)
    gate, up, down = (torch.randn(shape).to(dtype) for _ in range(3))
    columns = ExpertColumns.of(widths, block_columns=16)
    scale = dim**-0.5
    return PackedExperts(
        gate=gate * scale if has_gate else None, up=up * scale, down=down * 0.2, columns=columns
    )


def run(
    impl: HeterogeneousMlpImpl,
    dtype: torch.dtype,
    experts: PackedExperts,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    activation: ActivationSpec,
) -> dict[str, Tensor]:
    """Output and every gradient, on the CPU."""
    device = DEVICE if impl == "triton" else "cpu"
    leaves = {
        name: tensor.to(device, dtype).detach().requires_grad_()
        for name in ("gate", "up", "down")
        if (tensor := getattr(experts, name)) is not None
    }
    columns = ExpertColumns.of(experts.columns.widths, block_columns=16, device=device)
    x = x.to(device, dtype).detach().requires_grad_()
    ids, weights = routing[0].to(device), routing[1].to(device).detach().requires_grad_()
    out = heterogeneous_mlp(
        x,
        ids,
        weights,
        PackedExperts(**{"gate": None, **leaves}, columns=columns),
        activation=activation,
        block_rows=16,
        impl=impl,
    )
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(out.shape, generator=generator).bfloat16()
    out.backward(grad.to(out))
    found = {"out": out.detach(), "x": x.grad, "weights": weights.grad}
    found |= {name: leaf.grad for name, leaf in leaves.items()}
    return {name: value.cpu() for name, value in found.items() if value is not None}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "kind", "dtype", "activation", "has_gate"),
    [
        (13, 2, "gaps", torch.float32, SWIGLU, True),
        (1, 1, "random", torch.bfloat16, OFFSET, True),
        (63, 4, "random", torch.bfloat16, SWIGLU, True),
        (40, 1, "one", torch.float32, ActivationSpec("relu2"), False),
    ],
)
def test_against_fp64(
    num_tokens: int,
    top_k: int,
    kind: str,
    dtype: torch.dtype,
    activation: ActivationSpec,
    has_gate: bool,
) -> None:
    experts = packed(WIDTHS, 24, dtype, has_gate=has_gate)
    x = torch.randn(num_tokens, 24).to(dtype)
    routing = make_routing(num_tokens, top_k, len(WIDTHS), kind=kind, dtype=torch.float32)
    exact = run("reference", torch.float64, experts, x, routing, activation)
    eager = run("torch", dtype, experts, x, routing, activation)
    found = run("triton", dtype, experts, x, routing, activation)
    assert found.keys() == eager.keys() == exact.keys()
    for name, value in exact.items():
        assert_as_good_as_eager(found[name], eager[name], value.double(), name, dtype=dtype)
        if name != "weights":
            assert_rounded_only(eager[name], value, name)


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_gradients(impl: HeterogeneousMlpImpl) -> None:
    """In fp64, which the CPU path computes in as well."""
    experts = packed((2, 17, 1), 3, torch.float64)
    assert experts.gate is not None
    ids, weights = make_routing(5, 2, 3, kind="gaps", dtype=torch.float64)

    def output(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        parameters = replace(experts, gate=gate, up=up, down=down)
        return heterogeneous_mlp(x, ids, weights, parameters, activation=OFFSET, impl=impl)

    tensors = (torch.randn(5, 3).double(), weights, experts.gate, experts.up, experts.down)
    assert torch.autograd.gradcheck(output, [t.requires_grad_() for t in tensors])


def test_waiting_changes_no_bit_of_the_output() -> None:
    experts = packed(WIDTHS, 24, torch.float32)
    experts = PackedExperts(
        gate=experts.gate if experts.gate is None else experts.gate.to(DEVICE),
        up=experts.up.to(DEVICE),
        down=experts.down.to(DEVICE),
        columns=ExpertColumns.of(WIDTHS, block_columns=16, device=DEVICE),
    )
    ids, weights = (t.to(DEVICE) for t in make_routing(30, 2, 4, dtype=torch.float32))
    x = torch.randn(30, 24, device=DEVICE)
    outputs = [
        heterogeneous_mlp(
            x, ids, weights, experts, activation=SWIGLU, impl="triton", block_rows=16, waits=waits
        )
        for waits in (False, True)
    ]
    assert torch.equal(*outputs)


def test_block_rows_are_filled_by_an_average_expert() -> None:
    found = [choose_block_rows(rows, 4) for rows in (1, 64, 127, 128, 300, 512, 10**6)]
    assert found == [16, 16, 16, 32, 64, 128, 128]


def test_bad_arguments() -> None:
    experts = packed(WIDTHS, 8, torch.float32)
    x, ids, weights = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    wrong = [
        ((x[:, 1:], ids, weights), r"x must be \[T, 8\], got \[3, 7\]"),
        ((x.double(), ids, weights), r"x must be torch\.float32 .* got torch\.float64"),
        ((x, ids[1:], weights), r"ids must be \[3, K\], got \[2, 2\]"),
        ((x, ids, weights[:, 1:]), r"weights must be \[3, 2\] .* got \[3, 1\]"),
    ]
    for operands, message in wrong:
        with pytest.raises(ValueError, match=message):
            heterogeneous_mlp(*operands, experts, activation=SWIGLU)
    ids[0, 1] = 5
    with pytest.raises(ValueError, match=r"ids must lie in \[0, 4\) .* got 5 at \[0, 1\]"):
        heterogeneous_mlp(x, ids, weights, experts, activation=SWIGLU, checks_ids=True)
    with pytest.raises(ValueError, match=r"up must be \[126, D\] .* got \[125, 8\]"):
        replace(experts, up=experts.up[1:])
    with pytest.raises(ValueError, match=r"down must be \[126, 8\] like up, got \[125, 8\]"):
        replace(experts, down=experts.down[1:])
