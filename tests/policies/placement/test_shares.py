"""Experts divided among ranks of different size."""

from fractions import Fraction

import numpy as np
import pytest

from moe_runtime.policies.placement.shares import hold_by_shares, shares_of_ranks


@pytest.mark.parametrize(
    ("room", "speeds", "shares"),
    [
        ([30, 10], [1, 9], [30, 10]),  # not all fit: by memory
        ([20, 19], [1, 9], [20, 20]),  # nearly the same memory
        ([100, 100], [1, 3], [16, 48]),  # all fit: by speed
        ([100, 100], [8, 9], [32, 32]),  # nearly the same speed
        ([100, 30], [1, 3], [34, 30]),  # by speed, as far as memory allows
        ([64, 10, 64], [1, 1, 1], [27, 10, 27]),
    ],
)
def test_shares(room, speeds, shares):
    assert [*shares_of_ranks(room, speeds, 64)] == shares


def test_layers_together_meet_the_shares():
    shares = [Fraction(1), Fraction(2), Fraction(4)]
    holders = hold_by_shares([8] * 7, shares)
    numbers = np.bincount([rank for layer in holders for (rank,) in layer])
    assert numbers.tolist() == [8, 16, 32]
    # runs of experts, and never one more than the share of a layer
    for layer in holders:
        assert layer == sorted(layer)
        assert all(1 <= layer.count([rank]) <= 8 * s / 7 + 1 for rank, s in enumerate(shares))


def test_loads_are_balanced_by_share():
    loads_LE = np.array([[40, 1, 1, 1, 1, 1, 1, 14], [0] * 8])
    (layer, idle) = hold_by_shares([8, 8], [3, 1], loads_LE)
    on_first = sum(loads_LE[0, expert] for expert in range(8) if layer[expert] == [0])
    assert on_first == 45
    assert [len([held for held in one if held == [0]]) for one in (layer, idle)] == [6, 6]


def test_hot_experts_have_copies_where_there_is_room():
    loads_LE = np.array([[60, 9, 8, 7, 6, 5, 4, 1]])
    (layer,) = hold_by_shares([8], [1, 1, 1], loads_LE, num_copies=1)
    assert len(layer[0]) == 2
    assert all(len(held) == 1 for held in layer[1:])
