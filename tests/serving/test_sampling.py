"""Each option of sampling does what its definition says, and nothing where it is not asked."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from engine_events import ask_all, request_of

from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions, GenerationRequest, SamplingOptions
from moe_runtime.serving.sampling import Sampler, token_logprobs

LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -3.0])


def sampler_of(prompt: tuple[int, ...] = (0,), **options: Any) -> Sampler:
    others = {
        name: options.pop(name)
        for name in ("stop_ids", "min_new_tokens", "constraint", "num_logprobs")
        if name in options
    }
    return Sampler(request_of(prompt, 10, sampling=SamplingOptions(**options), **others))


def shares(num: int = 400, **options: Any) -> list[float]:
    sampler = sampler_of(temperature=options.pop("temperature", 1.0), seed=0, **options)
    drawn = Counter(sampler.choose(LOGITS, []).token_id for _ in range(num))
    return [drawn[token] / num for token in range(len(LOGITS))]


def expected(logits: torch.Tensor) -> list[float]:
    return torch.softmax(logits, dim=0).tolist()


def within(found: list[float], wanted: list[float], num: int = 400) -> bool:
    """Five standard deviations of each share: one of ten million draws is beyond."""
    return all(
        abs(one - other) <= 5 * math.sqrt(other * (1 - other) / num)
        for one, other in zip(found, wanted, strict=True)
    )


NEVER = -torch.inf


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ({}, LOGITS),
        ({"temperature": 0.5}, LOGITS / 0.5),
        ({"temperature": 1e-20}, torch.tensor([0.0, NEVER, NEVER, NEVER, NEVER])),
        ({"top_k": 2}, torch.tensor([2.0, 1.0, NEVER, NEVER, NEVER])),
        # chances 0.59, 0.22, 0.13, 0.03, 0.004
        ({"top_p": 0.7}, torch.tensor([2.0, 1.0, NEVER, NEVER, NEVER])),
        ({"min_p": 0.2}, torch.tensor([2.0, 1.0, 0.5, NEVER, NEVER])),
        ({"logit_bias": {0: -100.0, 4: 4.0}}, torch.tensor([-98.0, 1.0, 0.5, -1.0, 1.0])),
        ({"repetition_penalty": 2.0, "prompt": (0, 3)}, torch.tensor([1.0, 1.0, 0.5, -2.0, -3.0])),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_tokens_are_drawn_as_the_options_say(options, changed):
    found = shares(**{"prompt": (1,), **options} if "prompt" in options else options)
    assert within(found, expected(changed))
    assert not within(found, expected(changed.flip(0)))


def test_penalties_count_the_answer_alone():
    sampler = sampler_of((0, 0, 0), presence_penalty=0.75, frequency_penalty=0.5)
    found = [sampler.choose(LOGITS, []).token_id for _ in range(4)]
    # token 0 falls to 0.75 and then 0.25, token 1 to -0.25
    assert found == [0, 1, 0, 2]


def test_seed_makes_an_answer_repeatable(pocket):
    def asked(seed: int | None) -> Any:
        sampling = SamplingOptions(temperature=1.0, seed=seed)
        return request_of((5, 6, 7), 12, sampling=sampling)

    with Engine(pocket, EngineOptions(exact=True)) as engine:
        answers = ask_all(engine, [asked(1), asked(2), asked(None), asked(1), asked(None)])
        (alone,) = ask_all(engine, [asked(1)])
    first, other, free, again, freely = (answer.ids for answer in answers)
    assert first == again == alone.ids
    assert first != other
    assert free != freely


def test_constraint_and_least_length_leave_tokens_out():
    class Odd:
        is_exhausted = False

        def allowed(self, generated_ids: Any) -> torch.Tensor | None:
            return None if generated_ids else torch.tensor([False, True, False, True])

    sampler = sampler_of(constraint=Odd())
    assert sampler.choose(LOGITS, []).token_id == 1
    assert sampler.choose(LOGITS, [1]).token_id == 0
    sampler = sampler_of(stop_ids=frozenset([0, 1]), min_new_tokens=1)
    assert sampler.choose(LOGITS, []).token_id == 2
    assert sampler.choose(LOGITS, [2]).token_id == 0


def test_log_probabilities_are_those_before_any_change():
    sampler = sampler_of(num_logprobs=2, temperature=0.1, seed=0, logit_bias={4: 100.0})
    token = sampler.choose(LOGITS, [])
    assert token.token_id == 4
    wanted = torch.log_softmax(LOGITS.double(), dim=0).tolist()
    # fp32 arithmetic on numbers below 8: a rounding is 2**-22 at most
    assert token.logprob == pytest.approx(wanted[4], abs=1e-5)
    assert token.top_logprobs == (
        (0, pytest.approx(wanted[0], abs=1e-5)),
        (1, pytest.approx(wanted[1], abs=1e-5)),
    )


def test_no_more_tokens_are_named_than_there_are():
    (found,) = token_logprobs(LOGITS[None], [3], 20)
    assert [token for token, _ in found.top] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"num_logprobs": 1}], ids=str)
def test_logits_that_are_no_numbers_choose_nothing(number, options):
    logits = torch.tensor([1.0, number])
    with pytest.raises(ValueError, match="not finite"):
        sampler_of(**{"temperature": 0.0, **options}).choose(logits, [])
    advice = "if none is, and it computes in float16, take --dtype bfloat16$"
    with pytest.raises(ValueError, match=f"not finite.*{advice}"):
        token_logprobs(logits[None], [1], 0)  # of a prompt


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
def test_sampling_option_out_of_range_is_refused_by_name(options):
    with pytest.raises(ValueError, match=rf"^{next(iter(options))} must"):
        SamplingOptions(**options)


def test_number_out_of_range_is_refused_by_name():
    for name in ("max_new_tokens", "min_new_tokens", "num_logprobs", "num_prompt_logprobs"):
        asked: dict[str, Any] = {"prompt_ids": (1,), "max_new_tokens": 1, name: -1}
        with pytest.raises(ValueError, match=rf"^{name} must be at least 0, got -1"):
            GenerationRequest(**asked)


def test_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        GenerationRequest(prompt_ids=(), max_new_tokens=1)
