"""What a request may ask, and the words in which it is refused what it may not."""

import math
from typing import Any

import pytest

from moe_runtime.serving.requests import GenerationRequest, SamplingOptions


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": 1e-300},  # 0 in fp32, which divides the logits
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"seed": 2**63},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: math.nan}},
    ],
)
def test_sampling_option_out_of_range_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(options))} must"):
        SamplingOptions(**options)


def test_number_out_of_range_is_refused_by_name() -> None:
    for name in ("max_new_tokens", "min_new_tokens", "num_logprobs", "num_prompt_logprobs"):
        asked: dict[str, Any] = {"prompt_ids": (1,), "max_new_tokens": 1, name: -1}
        with pytest.raises(ValueError, match=rf"^{name} must be at least 0, got -1"):
            GenerationRequest(**asked)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        GenerationRequest(prompt_ids=(), max_new_tokens=1)
