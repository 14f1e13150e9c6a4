"""The plan of activations is the best of all plans."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.training.offload.activations import (
    LayerActivations,
    StepSpeeds,
    memory_bytes,
    plan_activations,
)

LAYERS = st.lists(
    st.builds(
        LayerActivations,
        num_bytes=st.integers(0, 1000),
        recompute_s=st.integers(0, 64).map(lambda n: n / 16),
    ),
    min_size=1,
    max_size=4,
)
SECONDS = st.integers(0, 80).map(lambda n: n / 16)
SPEEDS = st.builds(
    StepSpeeds,
    forward_s=SECONDS,
    backward_s=SECONDS,
    forward_disk_s=SECONDS,
    backward_disk_s=SECONDS,
    write_bytes_per_s=st.sampled_from([50.0, 400.0, 3000.0]),
    read_bytes_per_s=st.sampled_from([50.0, 400.0, 3000.0]),
    swaps=st.booleans(),
)


def step_seconds(
    layers: list[LayerActivations], speeds: StepSpeeds, choices: tuple[str, ...] | list[str]
) -> float:
    """Predicted seconds of a step."""
    pairs = list(zip(layers, choices, strict=True))
    swapped = sum(layer.num_bytes for layer, choice in pairs if choice == "swap")
    again_s = sum(layer.recompute_s for layer, choice in pairs if choice == "recompute")
    forward_disk_s = speeds.forward_disk_s + swapped / speeds.write_bytes_per_s
    backward_disk_s = speeds.backward_disk_s + swapped / speeds.read_bytes_per_s
    return max(speeds.forward_s, forward_disk_s) + max(speeds.backward_s + again_s, backward_disk_s)


@given(LAYERS, SPEEDS, st.integers(0, 3000), st.integers(0, 500))
def test_no_plan_within_the_budget_is_faster(layers, speeds, budget, staging):
    found = plan_activations(layers, speeds, budget_bytes=budget, staging_bytes=staging)
    assert memory_bytes(layers, found, staging) <= budget
    allowed = ("keep", "recompute", "swap") if speeds.swaps else ("keep", "recompute")
    assert set(found) <= set(allowed)
    best = min(
        step_seconds(layers, speeds, choices)
        for choices in itertools.product(allowed, repeat=len(layers))
        if memory_bytes(layers, choices, staging) <= budget
    )
    # the solver's gap
    assert step_seconds(layers, speeds, found) <= best * (1 + 1e-5) + 1e-6


def test_each_of_the_three_has_its_case():
    layers = [LayerActivations(num_bytes=100, recompute_s=1.0)] * 4
    slow_disk = StepSpeeds(forward_s=4, backward_s=8, write_bytes_per_s=1, read_bytes_per_s=1)
    fast_disk = StepSpeeds(forward_s=4, backward_s=8, write_bytes_per_s=50, read_bytes_per_s=50)
    assert plan_activations(layers, slow_disk, budget_bytes=400) == ["keep"] * 4
    assert sorted(plan_activations(layers, slow_disk, budget_bytes=250)) == [
        "keep", "keep", "recompute", "recompute",
    ]  # fmt: skip
    # two layers' bytes hide behind the forward pass; with two more kept, nothing is exposed
    found = plan_activations(layers, fast_disk, budget_bytes=250)
    assert sorted(found) == ["keep", "keep", "swap", "swap"]
    assert step_seconds(layers, fast_disk, found) == 12
    assert plan_activations([], slow_disk, budget_bytes=0) == []


def test_a_programme_on_which_the_solver_fails_once_it_is_presolved():
    layers = [LayerActivations(num_bytes=size, recompute_s=1.0625) for size in (22, 175)]
    speeds = StepSpeeds(
        forward_s=0, backward_s=0, backward_disk_s=0.625, write_bytes_per_s=400,
        read_bytes_per_s=50,
    )  # fmt: skip
    found = plan_activations(layers, speeds, budget_bytes=175)
    assert step_seconds(layers, speeds, found) == 1.0625
