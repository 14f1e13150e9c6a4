"""Misses replayed in virtual time: small cases that can be counted by hand."""

import numpy as np
import pytest
from harness.hybrid_replay import HOW, Machine, Replay

# An expert takes the CPU 2, the link 3 and the device half a second; nothing else takes time.
MACHINE = Machine(cpu_s={1: [2.0], 2: [2.0]}, copy_s=3.0, product_s=0.5, return_s=0.0)


def step_seconds(how: str, steps: list[list[int]], num_slots: int = 1) -> list[float]:
    """Of one layer that begins with expert 0 and then routes to these, for one sequence."""
    layers = Replay(MACHINE, num_slots, 8, how)
    layers.start(np.zeros((1, 1, 1, 1), dtype=np.int64))
    paths_NTLK = np.array(steps, dtype=np.int64)[None, :, None, :]
    return layers.run(paths_NTLK).spent_s


def test_what_is_copied_stays() -> None:
    assert step_seconds("all copied", [[1], [1], [2], [1]]) == [3.5, 0.5, 3.5, 3.5]


def test_what_the_cpu_computes_changes_nothing() -> None:
    assert step_seconds("all on the CPU", [[1], [1], [0]]) == [2.0, 2.0, 0.5]


def test_both_at_once_and_predicted_to_the_second() -> None:
    layers = Replay(MACHINE, 2, 8, "hybrid")
    layers.start(np.zeros((1, 1, 1, 1), dtype=np.int64))
    found = layers.run(np.array([[1, 2], [3, 4], [3, 5]])[None, :, None, :])
    # the first finds out the CPU's speed; then one is copied while the other is computed
    assert found.spent_s == [3.5, 3.5, 2.0]
    assert found.predicted_s == pytest.approx(found.spent_s)
    assert (found.copied, found.computed) == (2, 3)


def test_a_split_ends_both_sides_at_once() -> None:
    layers = Replay(MACHINE, 2, 8, "hybrid, one split")
    layers.start(np.zeros((1, 1, 1, 1), dtype=np.int64))
    layers.speeds.computed(1, 2.0)
    found = layers.run(np.array([[1]])[None, :, None, :])
    # share s of 2 seconds on the CPU = (1 - s) of 3 on the link and half a second: s = 0.7
    assert found.spent_s == pytest.approx([1.4])


def test_ways_have_names() -> None:
    assert {step_seconds(how, [[0]])[0] for how in HOW} == {0.5}
