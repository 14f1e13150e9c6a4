"""Gradients of parameters added to those there are, and those of some experts alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from stacked_experts import make_experts, make_routing
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ParameterGradients, StackedExperts, expert_mlp
from moe_runtime.kernels.native import native_library

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")
GPU = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = [
    "triton",
    "torch",
    pytest.param(
        "native", marks=pytest.mark.skipif(native_library() is None, reason="was not built")
    ),
]
LAYOUTS = [
    {},
    {"is_transposed": True, "is_concatenated": False},
    {"slot_of_expert": torch.tensor([3, 0, 5, 1]), "num_slots": 6, "has_gate": False},
]
# Sums of some tens of terms in fp32, relative to the largest.
TOLERANCE = 2e-5


def leaves(experts: StackedExperts, dtype: torch.dtype, device: str) -> StackedExperts:
    table = experts.slot_of_expert
    tensors = {n: getattr(experts, n).to(device, dtype).detach().requires_grad_() for n in NAMES}
    return replace(experts, **tensors, slot_of_expert=None if table is None else table.to(device))


def run(
    experts: StackedExperts, x: Tensor, ids: Tensor, weights: Tensor, **options: Any
) -> dict[str, Tensor | None]:
    """The output, and what autograd got."""
    like = experts.gate_up
    x = x.to(like).detach().requires_grad_()
    weights = weights.to(like).detach().requires_grad_()
    out = expert_mlp(x, ids.to(like.device), weights, experts, activation="silu", **options)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out))
    grads = {name: getattr(experts, name).grad for name in NAMES}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, **grads}


def assert_close(found: Tensor | None, exact: Tensor, name: str) -> None:
    assert found is not None, name
    error = (found.cpu().double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCE, f"{name}: {error:.1e}"


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_added_for_the_experts_that_train(impl, layout):
    """Four experts: two train, one of them without a row; one has rows and is frozen."""
    device = GPU if impl == "triton" else "cpu"
    drawn = make_experts(4, **layout)
    ids, weights = make_routing(11, 2, 4, dtype=torch.float64)
    ids[ids == 2] = 3
    x = torch.randn(11, drawn.dim_model)
    exact = run(leaves(drawn, torch.float64, "cpu"), x, ids, weights, impl="reference")
    trains = torch.tensor([True, True, True, False])
    slots = drawn.slots()
    trained = [slot for slot, does in zip(slots, trains.tolist(), strict=True) if does]
    others = sorted(set(range(len(drawn.gate_up))) - set(trained))

    experts = leaves(drawn, torch.float32, device)
    before = [torch.randn_like(t) if t is not None else None for t in experts.tensors()]
    into = tuple(None if t is None else t.clone() for t in before)
    gradients = ParameterGradients(into=into, trains_E=trains.to(device))
    found = run(experts, x, ids, weights, impl=impl, gradients=gradients, recompute=True)
    for name in ("out", "x", "weights"):
        value = exact[name]
        assert value is not None
        assert_close(found[name], value, name)
    for name, start, end in zip(NAMES, before, into, strict=True):
        assert found[name] is None
        assert start is not None
        assert end is not None
        expected, start = exact[name], start.cpu()
        assert expected is not None
        assert_close(end[trained], (start.double() + expected)[trained], name)
        # What nobody adds to keeps its bits: frozen, without an expert, without a row.
        for slot in (*others, slots[2]):
            assert torch.equal(end[slot].cpu(), start[slot])

    alone = run(
        leaves(drawn, torch.float32, device),
        *(x, ids, weights),
        impl=impl,
        gradients=ParameterGradients(trains_E=trains.to(device)),
    )
    for name in NAMES:
        value, expected = alone[name], exact[name]
        assert value is not None
        assert expected is not None
        assert_close(value[trained], expected[trained], name)
        assert (value[others] == 0).all()


def test_what_does_not_belong_together():
    experts = leaves(make_experts(3), torch.float32, "cpu")
    ids, weights = make_routing(4, 2, 3, dtype=torch.float32)
    x = torch.randn(4, experts.dim_model)
    whole = [torch.zeros_like(t) for t in experts.tensors() if t is not None]

    def call(**options: Any) -> None:
        known = {name: options.pop(name) for name in ("into", "trains_E") if name in options}
        options = {"activation": "silu", **options}
        expert_mlp(x, ids, weights, experts, gradients=ParameterGradients(**known), **options)

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"into": tuple(whole[:3])}, "into must be 4 tensors or None, got 3"),
        ({"into": (None, *whole[1:])}, "into lacks the gradient of gate_up, which needs one"),
        ({"into": (whole[0].double(), *whole[1:])}, r"gate_up must be .* got torch\.float64"),
        ({"trains_E": torch.ones(3)}, r"trains_E must be \[3\] of bool on cpu, got \[3\] of torch"),
        ({"trains_E": torch.ones(2, dtype=torch.bool)}, r"got \[2\] of torch\.bool"),
        ({"activation": torch.sin}, "goes with a formula as activation"),
        ({"impl": "reference"}, "goes with a formula as activation and another impl"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            call(**options)
    with torch.no_grad():
        call(trains_E=torch.ones(3, dtype=torch.bool))
