"""The scaling laws against numbers that their paper states, and against what they must do."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_runtime.research.scaling_laws import ROUTED_LAWS, RoutedLaw, routed_law_of

LAWS = pytest.mark.parametrize("law", ROUTED_LAWS.values(), ids=ROUTED_LAWS.keys())


@pytest.mark.parametrize(
    ("name", "equivalent"), [("S-BASE", 5.2e7), ("RL-R", 4.9e7), ("HASH", 4.7e7)]
)
def test_five_million_parameters_with_128_experts(name, equivalent):
    """The paper gives 55 M for S-BASE; its rounded coefficients give these, to two digits."""
    found = ROUTED_LAWS[name].dense_equivalent(5e6, 128)
    assert float(f"{found:.1e}") == equivalent


def cutoff(law: RoutedLaw) -> float:
    """Parameters from which experts do not help any more."""
    return 10 ** (-law.b / law.c)


def test_the_cutoff_of_s_base():
    """937 B in the paper; 1 T with its rounded coefficients."""
    assert cutoff(ROUTED_LAWS["S-BASE"]) == pytest.approx(1e12, rel=0.01)


@LAWS
def test_one_expert_is_the_dense_model(law):
    assert law.saturated(1) == pytest.approx(law.e_start)
    assert law.saturated(1e12) == pytest.approx(law.e_max)
    assert law.dense_equivalent(3e7, 1) == pytest.approx(3e7)


@given(
    parameters=st.floats(1e6, 1e10),
    experts=st.integers(1, 500),
    name=st.sampled_from(sorted(ROUTED_LAWS)),
)
def test_more_of_either_lowers_the_loss(parameters, experts, name):
    law = ROUTED_LAWS[name]
    loss = law.loss(parameters, experts)
    assert law.loss(2 * parameters, experts) < loss
    assert law.loss(parameters, experts + 1) < loss, "below the cutoff"
    equivalent = law.dense_equivalent(parameters, experts)
    assert law.loss(equivalent) == pytest.approx(loss, rel=1e-9)
    assert math.isclose(equivalent, parameters, rel_tol=1e-6) or equivalent > parameters


@LAWS
def test_beyond_the_cutoff_experts_do_not_help(law):
    assert law.loss(10 * cutoff(law), 64) > law.loss(10 * cutoff(law), 1)


def test_gates_and_bad_numbers():
    assert [routed_law_of(gate) for gate in ("hash", "rl_r", "softmax_topk")] == [
        "HASH",
        "RL-R",
        "S-BASE",
    ]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ROUTED_LAWS["HASH"].saturated(0)
    with pytest.raises(ValueError, match="must be positive, got -1"):
        ROUTED_LAWS["HASH"].loss(-1)
