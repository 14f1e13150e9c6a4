"""The longest wait that the benchmark of an elastic service counts."""

import time

import pytest

from moe_runtime.benchmarks.elastic import TokenTimes


def test_waits_that_overlap_the_stretch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = TokenTimes(2)
    for request, moment in [(0, 1.0), (1, 1.5), (0, 2.0), (1, 6.5), (0, 3.0), (0, 3.5)]:
        monkeypatch.setattr(time, "perf_counter", lambda moment=moment: moment)
        times.add(request, token=7)
    assert times.longest_wait_s(0.0, 10.0) == 5.0
    assert times.longest_wait_s(3.0, 3.2) == 5.0  # the second request waits all the while
    assert times.longest_wait_s(0.0, 1.2) == 1.0
    assert times.longest_wait_s(7.0, 9.0) == 0.0
