"""Numbers as people read them: units of their size, and no digit that is not certain."""

from typing import Any

import pytest

from moe_runtime.benchmarks.suite.figures import figure, unit_for, with_half


@pytest.mark.parametrize(
    ("unit", "values", "expected"),
    [
        ("bytes", [2.42e5, 1.0], "242 kB"),
        ("bytes/s", [1.26e9], "1.26 GB/s"),
        ("s", [0.0123, 0.5], "12.3 ms"),
        ("s", [3e-12], "0.003 ns"),
        ("s", [0.0], "0 s"),
        ("tokens/s", [1317.4], "1317 tokens/s"),
    ],
)
def test_the_unit_is_that_of_the_largest(unit, values, expected):
    factor, name = unit_for(unit, values)
    assert f"{figure(values[0] * factor)} {name}" == expected


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (1414.0, 6963.0, "1400 ± 7000"),
        (5.0123, 0.034, "5.012 ± 0.034"),
        (68.4321, 1.27, "68.4 ± 1.3"),
        (0.0, 0.5, "0.00 ± 0.50"),
        (12.0, 1e-9, "12"),
        (12.0, 0.0, "12"),
    ],
)
def test_digits_end_where_the_interval_does(mean, half, expected):
    assert with_half({"mean": mean, "low": mean - half, "high": mean + half}, 1.0) == expected
    # In another unit the same digits stand, elsewhere.
    summary: dict[str, Any] = {"mean": mean / 1e3, "low": (mean - half) / 1e3}
    assert with_half({**summary, "high": (mean + half) / 1e3}, 1e3) == expected


def test_one_repetition_has_no_interval():
    assert with_half({"mean": 0.25, "low": None, "high": None}, 1e3) == "250"
