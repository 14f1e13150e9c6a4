"""The token scheduler: cheaper batches of the same sizes; and what a replay counts of it."""

import itertools

import numpy as np
import pytest
from harness.regrouping import regroup
from hypothesis import given, settings
from hypothesis import strategies as st
from regrouping import reads


def random_paths(seed: int, sequences: int, *, groups: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    paths = np.zeros((sequences, 4, 12), dtype=bool)
    for row in range(sequences):
        for layer in range(4):
            experts = rng.permutation(6)[:2] + 6 * (row % 2) if groups else rng.permutation(12)[:2]
            paths[row, layer, experts] = True
    return paths


def brute_force(paths: np.ndarray) -> int:
    n = len(paths)
    best = paths.size
    for chosen in itertools.combinations(range(n), (n + 1) // 2):
        side = np.isin(np.arange(n), chosen)
        touched = paths[side].any(axis=0).sum() + paths[~side].any(axis=0).sum()
        best = min(best, int(touched))
    return best


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_sizes_hold_nothing_is_lost_and_the_cost_never_rises(seed: int, sequences: int) -> None:
    paths = random_paths(seed, sequences)
    plan = regroup(paths)
    assert len(plan.first) == (sequences + 1) // 2
    assert sorted([*plan.first, *plan.second]) == list(range(sequences))
    touched = paths[plan.first].any(axis=0).sum() + paths[plan.second].any(axis=0).sum()
    assert plan.cost == touched
    assert brute_force(paths) <= plan.cost <= plan.cost_before


def test_on_random_paths_it_is_close_to_the_optimum() -> None:
    plans = [
        (regroup(random_paths(seed, 8)).cost, brute_force(random_paths(seed, 8)))
        for seed in range(25)
    ]
    found, best = np.array(plans).sum(axis=0)
    assert found <= 1.02 * best


def test_two_planted_routes_are_separated() -> None:
    paths = random_paths(3, 16, groups=2)
    plan = regroup(paths)
    assert {int(row) % 2 for row in plan.first} == {int(plan.first[0]) % 2}
    whole = [paths[start::2].any(axis=0).sum() for start in (0, 1)]
    assert plan.cost == sum(whole)
    assert plan.cost < plan.cost_before


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="two or more"):
        regroup(np.zeros((1, 2, 3), dtype=bool))


@pytest.mark.parametrize(
    ("how", "expected"),
    [("one batch", 2), ("two batches", 3), ("regrouped", 2), ("regrouped, foreseen", 2)],
)
def test_the_replay_counts_reads(how: str, expected: int) -> None:
    """Two sequences of each of two experts, and a cache of one that holds a third."""
    paths_NTLK = np.array([[[[1 + row % 2]]] * 2 for row in range(4)])
    assert reads(paths_NTLK, num_slots=1, num_experts=3, how=how) == expected
    assert reads(paths_NTLK, num_slots=3, num_experts=3, how=how) == 0
