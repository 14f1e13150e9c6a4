"""Where the time of a request goes, by a clock that the test moves."""

import re
from collections.abc import Iterator

from moe_runtime.serving.http.metrics import Metrics, RequestTimes


def _sums(metrics: Metrics) -> dict[str, float]:
    found = re.findall(rb"vllm:(\w+)_seconds_sum{[^}]*} (\S+)", metrics.text())
    return {name.decode(): float(value) for name, value in found}


def _times(metrics: Metrics, arrived_s: float) -> RequestTimes:
    clock: Iterator[float] = iter([arrived_s])
    return RequestTimes(metrics, "pocket", clock=lambda: next(clock))


def test_queue_prefill_and_decode_add_up_to_the_last_token():
    metrics = Metrics(dict)
    times = _times(metrics, 100.0)
    times.started(0, 103.0)
    for now_s in (108.0, 110.0, 116.0):
        times.token(0, now_s)
    times.ended(0, 117.0, 5, 3, "length")
    sums = _sums(metrics)
    assert sums["request_queue_time"] == 3
    assert sums["request_prefill_time"] == 5
    assert sums["request_decode_time"] == 8
    assert sums["request_inference_time"] == 13
    assert sums["e2e_request_latency"] == 17  # the end comes a second after the last token
    assert sums["time_to_first_token"] == 8
    assert sums["request_time_per_output_token"] == 4  # the end behind the last token is no token


def test_an_answer_without_tokens_has_only_queue_and_inference_time():
    metrics = Metrics(dict)
    times = _times(metrics, 1.0)
    times.started(0, 2.0)
    times.ended(0, 6.0, 5, 0, "length")
    sums = _sums(metrics)
    assert (sums["request_queue_time"], sums["request_inference_time"]) == (1, 4)
    assert "request_prefill_time" not in sums
    assert "request_decode_time" not in sums


def test_an_answer_that_never_started_spent_its_time_in_the_queue():
    metrics = Metrics(dict)
    _times(metrics, 1.0).ended(0, 6.0, 5, 0, "stop")
    sums = _sums(metrics)
    assert (sums["request_queue_time"], sums["request_inference_time"]) == (5, 0)
