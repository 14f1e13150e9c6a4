"""Gradients of parameters added to those there are, and those of some experts alone."""

from typing import Any

import pytest
import torch
from native_marks import NATIVE
from stacked_experts import assert_all_close, leaves, make_experts, make_routing, run_layer

from moe_runtime.kernels.expert_mlp import ParameterGradients, expert_mlp

GPU = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = [
    {},
    {"is_transposed": True, "is_concatenated": False},
    {"slot_of_expert": torch.tensor([3, 0, 5, 1]), "num_slots": 6, "has_gate": False},
]
# Sums of some tens of terms in fp32, relative to the largest.
TOLERANCE = 2e-5


@pytest.mark.parametrize("impl", ["triton", "torch", NATIVE])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_added_for_the_experts_that_train(impl, layout):
    """Four experts: two train, one of them without a row; one has rows and is frozen."""
    device = GPU if impl == "triton" else "cpu"
    experts = make_experts(4, **layout)
    ids, weights = make_routing(11, 2, 4, dtype=torch.float32)
    ids[ids == 2] = 3
    call = experts, torch.randn(11, experts.dim_model), (ids, weights)
    exact = run_layer("reference", torch.float64, *call)
    parameters = {name: exact.pop(name) for name in experts.names}
    trains = torch.tensor([True, True, True, False])
    slots = experts.slots()
    trained = [slot for slot, does in zip(slots, trains.tolist(), strict=True) if does]
    others = sorted(set(range(len(experts.gate_up))) - set(trained))

    before = {name: torch.randn(value.shape) for name, value in parameters.items()}
    into = tuple(value.clone().to(device) for value in before.values())
    gradients = ParameterGradients(into=into, trains_E=trains.to(device))
    found = run_layer(impl, torch.float32, *call, gradients=gradients, recompute=True)
    assert_all_close(found, exact, TOLERANCE)  # autograd gets none of the parameters
    added = {name: end.cpu() for name, end in zip(before, into, strict=True)}
    assert_all_close(
        {name: end[trained] for name, end in added.items()},
        {name: (before[name].double() + value)[trained] for name, value in parameters.items()},
        TOLERANCE,
    )
    # Without an addend bits stay: of frozen experts, slots without an expert, experts without rows.
    for slot in (*others, slots[2]):
        assert all(torch.equal(added[name][slot], before[name][slot]) for name in before)

    alone = ParameterGradients(trains_E=trains.to(device))
    found = run_layer(impl, torch.float32, *call, gradients=alone)
    assert_all_close(
        {name: found[name][trained] for name in parameters},
        {name: value[trained] for name, value in parameters.items()},
        TOLERANCE,
    )
    assert not any(found[name][others].any() for name in parameters)


def test_what_does_not_belong_together():
    experts = leaves(make_experts(3), torch.float32)
    ids, weights = make_routing(4, 2, 3, dtype=torch.float32)
    x = torch.randn(4, experts.dim_model)
    whole = [torch.zeros_like(t) for t in experts.tensors()]

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
