"""The parts of a request's time, by a clock that the test moves."""

import re

import pytest

from moe_runtime.serving.http.metrics import Metrics, RequestTimes

WITHOUT_TOKENS = dict.fromkeys(("request_prefill_time", "request_decode_time"))


@pytest.mark.parametrize(
    ("started_s", "tokens_s", "ended_s", "expected"),
    [
        (
            103.0,
            (108.0, 110.0, 116.0),
            117.0,
            {
                **{"request_queue_time": 3, "request_prefill_time": 5, "request_decode_time": 8},
                **{"request_inference_time": 13, "e2e_request_latency": 17},
                **{"time_to_first_token": 8, "request_time_per_output_token": 4},
            },
        ),
        (102.0, (), 106.0, {"request_queue_time": 2, "request_inference_time": 4} | WITHOUT_TOKENS),
        (None, (), 105.0, {"request_queue_time": 5, "request_inference_time": 0} | WITHOUT_TOKENS),
    ],
    ids=["tokens", "no token", "never started"],
)
def test_queue_prefill_and_decode_add_up_to_the_last_token(started_s, tokens_s, ended_s, expected):
    metrics = Metrics(dict)
    times = RequestTimes(metrics, "pocket", clock=lambda: 100.0)
    if started_s is not None:
        times.started(0, started_s)
    for now_s in tokens_s:
        times.token(0, now_s)
    times.ended(0, ended_s, 5, len(tokens_s), "length")
    found = re.findall(rb"vllm:(\w+)_seconds_sum{[^}]*} (\S+)", metrics.text())
    sums = {name.decode(): float(value) for name, value in found}
    assert {name: sums.get(name) for name in expected} == expected
