"""`expert_mlp`: the specification against a brute force, and what is refused."""

import pytest
import torch
from stacked_experts import DIM_MODEL, LAYOUTS, make_experts, make_routing, mlp_by_hand

from moe_runtime.kernels.expert_mlp import ActivationSpec, StackedExperts, expert_mlp
from moe_runtime.kernels.expert_mlp.op import grouped_expert_mlp


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["random", "gaps", "one"])
def test_reference_against_brute_force(layout, kind):
    experts = make_experts(5, **layout)
    x = torch.randn(7, DIM_MODEL, dtype=torch.float64)
    ids, weights = make_routing(7, 3, 5, kind=kind, dtype=torch.float64)
    out = expert_mlp(x, ids, weights, experts, activation="silu", impl="reference")
    # Same sums in another order, in fp64.
    torch.testing.assert_close(out, mlp_by_hand(x, ids, weights, experts), rtol=1e-12, atol=1e-12)


def test_slot_table():
    table = torch.tensor([6, 0, 3, 5])
    experts = make_experts(4, num_slots=7, slot_of_expert=table)
    x = torch.randn(9, DIM_MODEL, dtype=torch.float64)
    ids, weights = make_routing(9, 2, 4, dtype=torch.float64)
    out = expert_mlp(x, ids, weights, experts, activation="silu", impl="reference")
    torch.testing.assert_close(out, mlp_by_hand(x, ids, weights, experts), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reference_gradcheck(layout):
    experts = make_experts(3, dim_model=5, dim_hidden=4, **layout)
    ids, weights = make_routing(4, 2, 3, kind="gaps", dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)

    def function(x, weights, gate_up, down, gate_up_bias, down_bias):  # type: ignore[no-untyped-def]
        some = StackedExperts(
            gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias, **layout
        )
        return expert_mlp(x, ids, weights, some, activation="silu", impl="reference")

    inputs = [t.requires_grad_() for t in (x, weights, *experts.tensors()) if t is not None]
    assert torch.autograd.gradcheck(function, inputs)


def test_grouped_leaves_zeros_after_the_last_row():
    experts = make_experts(3)
    x = torch.randn(8, DIM_MODEL, dtype=torch.float64)
    x[6:] = torch.nan
    counts = torch.tensor([2, 0, 4])
    out = grouped_expert_mlp(x, counts, experts, activation="silu", impl="reference")
    ids = torch.tensor([[0], [0], [2], [2], [2], [2]])
    expected = mlp_by_hand(x[:6], ids, torch.ones(6, 1, dtype=torch.float64), experts)
    torch.testing.assert_close(out[:6], expected, rtol=1e-12, atol=1e-12)
    assert (out[6:] == 0).all()


def test_gpt_oss_formula():
    spec = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)
    gate, up = torch.randn(50, dtype=torch.float64) * 6, torch.randn(50, dtype=torch.float64) * 6
    low_gate, low_up = gate.clamp(max=7), up.clamp(-7, 7)
    expected = (low_up + 1) * low_gate * torch.sigmoid(1.702 * low_gate)
    torch.testing.assert_close(spec(gate, up), expected)
    assert ActivationSpec.from_numbers(spec.function, spec.numbers()) == spec


BAD_ARGUMENTS = [
    ({"impl": "fast"}, r"impl must be one of auto, .*got 'fast'"),
    ({"activation": "swish"}, r"activation must be one of silu, .*got 'swish'"),
    ({"x": torch.zeros(4, 3)}, r"x must be \[\*, 37\], got \[4, 3\]"),
    ({"x": torch.zeros(4, 37)}, r"x must be torch.float64 on cpu .*got torch.float32"),
    ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"ids must be \[4, K\], got \[3, 2\]"),
    ({"ids": torch.zeros(4, 2)}, r"ids must be int32 or int64, got torch.float32"),
    ({"weights": torch.zeros(4, 3)}, r"weights must be \[4, 2\] .*got \[4, 3\]"),
    ({"ids": torch.full((4, 2), 9), "checks_ids": True}, r"ids must be in \[0, 3\).*got 9 for"),
]


@pytest.mark.parametrize(("change", "message"), BAD_ARGUMENTS, ids=lambda value: str(value)[:30])
def test_bad_arguments(change, message):
    arguments = {
        "x": torch.zeros(4, DIM_MODEL, dtype=torch.float64),
        "ids": torch.zeros(4, 2, dtype=torch.int64),
        "weights": torch.zeros(4, 2, dtype=torch.float64),
        "experts": make_experts(3),
        "activation": "silu",
    } | change
    positional = [arguments.pop(name) for name in ("x", "ids", "weights", "experts")]
    with pytest.raises(ValueError, match=message):
        expert_mlp(*positional, **arguments)


def test_experts_that_do_not_fit():
    good = make_experts(3)
    with pytest.raises(ValueError, match=r"down must be \[3, 37, 21\].*got \[3, 21, 37\]"):
        StackedExperts(gate_up=good.gate_up, down=good.down.mT)
    with pytest.raises(ValueError, match=r"must be torch.float64 on cpu like gate_up"):
        StackedExperts(gate_up=good.gate_up, down=good.down.float())
    with pytest.raises(ValueError, match="width must be even, got 21"):
        StackedExperts(gate_up=good.gate_up[:, :21], down=good.down)
