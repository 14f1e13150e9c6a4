"""What OpenAI's own client gets from the server, with the pocket model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from http_server import Served

from moe_runtime import __version__

if TYPE_CHECKING:
    import openai  # a second that every process of the suite would pay

USER: Any = [{"role": "user", "content": "What is a list?"}]
PROMPT = "The for statement"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(site: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def greedy(pocket: Any, ids: list[int], num_new: int) -> list[int]:
    out = pocket.generate(torch.tensor([ids]), max_new_tokens=num_new, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_a_completion_is_the_text_of_generate(client, pocket, tokenizer):
    ids = tokenizer(PROMPT)["input_ids"]
    expected = tokenizer.decode(greedy(pocket, ids, 20))
    for prompt in (PROMPT, ids):
        answer = client.completions.create(
            model="pocket", prompt=prompt, max_tokens=20, temperature=0
        )
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 20)


def test_prompts_and_answers_have_indices(client, tokenizer):
    both = ["A class", "The list"]
    asked: dict[str, Any] = {"model": "pocket", "max_tokens": 6, "temperature": 1, "seed": 5}
    first = client.completions.create(prompt=both, n=2, **asked)
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    again = client.completions.create(prompt=both, n=2, **asked)
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts
    assert texts[0] != texts[1]
    assert client.completions.create(prompt=both[1], **asked).choices[0].text == texts[2]
    assert first.usage is not None
    assert first.usage.prompt_tokens == sum(len(tokenizer(text)["input_ids"]) for text in both)


def test_a_stream_is_the_whole_answer_in_pieces(client):
    asked: dict[str, Any] = {"model": "pocket", "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **asked)
    chunks = list(
        client.chat.completions.create(
            messages=USER,
            stream=True,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
            **asked,
        )
    )
    assert {one.system_fingerprint for one in (whole, *chunks)} == {f"moe-runtime-{__version__}"}
    *body, last = chunks
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in body)
    choices = [chunk.choices[0] for chunk in body]
    assert choices[0].delta.role == "assistant"
    assert "".join(one.delta.content or "" for one in choices) == whole.choices[0].message.content
    assert [one.finish_reason for one in choices if one.finish_reason] == ["length"]
    assert whole.choices[0].logprobs is not None
    tokens = [
        (token.token, round(token.logprob, 4), len(token.top_logprobs))
        for one in choices
        if one.logprobs
        for token in one.logprobs.content or ()
    ]
    assert tokens == [
        (token.token, round(token.logprob, 4), 2)
        for token in whole.choices[0].logprobs.content or ()
    ]


def test_a_stop_string_is_no_part_of_any_piece(client):
    asked: dict[str, Any] = {
        "model": "pocket",
        "prompt": PROMPT,
        "max_tokens": 30,
        "temperature": 0,
    }
    whole = client.completions.create(**asked).choices[0].text
    stop = whole[20:26]  # in the middle of tokens
    expected = whole[: whole.index(stop)]
    pieces = list(client.completions.create(stop=[stop], stream=True, **asked))
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_lm_eval_reads_the_likelihood_that_the_model_gives(site, pocket, tokenizer):
    texts = ["The for statement is used to iterate", "def f(x): return x"]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    body = {"model": "pocket", "prompt": prompts, "temperature": 0, "max_tokens": 1}
    answer = site.answer("/v1/completions", {**body, "logprobs": 1, "seed": 1234, "echo": True})
    for text, ids, choice in zip(texts, prompts, answer["choices"], strict=True):
        with torch.inference_mode():
            logits = pocket(torch.tensor([ids])).logits[0].double()
        expected = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]
        found = choice["logprobs"]["token_logprobs"]
        assert found[0] is None
        assert len(found) == len(ids) + 1
        torch.testing.assert_close(
            torch.tensor(found[1:-1], dtype=torch.float64), expected, atol=1e-4, rtol=0
        )
        greedy_ids = logits[:-1].argmax(-1).tolist()
        tops = choice["logprobs"]["top_logprobs"][1:-1]
        for token, best, top, own in zip(ids[1:], greedy_ids, tops, found[1:-1], strict=True):
            assert (max(top.values()) == own) == (token == best)
        assert choice["text"].startswith(text)
        offsets = choice["logprobs"]["text_offset"]
        assert offsets == [len(tokenizer.decode(ids[:at])) for at in range(len(ids) + 1)]


def test_a_required_tool_is_called(client):
    asked: dict[str, Any] = {
        "model": "pocket",
        "messages": USER,
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
        "temperature": 0,
    }
    named: Any = {"type": "function", "function": {"name": "weather"}}
    whole = client.chat.completions.create(tool_choice="required", **asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    assert whole.choices[0].message.content is None
    (call,) = whole.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    chunks = list(client.chat.completions.create(tool_choice=named, stream=True, **asked))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(delta.index, delta.function and delta.function.arguments) for delta in deltas] == [
        (0, call.function.arguments)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    # The result of the call goes back into the conversation.
    history = [
        *USER,
        whole.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "warm"},
    ]
    client.chat.completions.create(model="pocket", messages=history, tools=[TOOL], max_tokens=1)


def test_errors_are_those_of_openai(client):
    import openai

    with pytest.raises(openai.NotFoundError, match=r"no-such.* is not served here"):
        client.completions.create(model="no-such", prompt="a")
    with pytest.raises(openai.BadRequestError, match="suffix: is not supported") as caught:
        client.completions.create(model="pocket", prompt="a", suffix="b")
    assert (caught.value.param, caught.value.code) == ("suffix", "unsupported_parameter")
    asks_for_nothing = {"suffix": None, "best_of": None, "service_tier": None}
    client.completions.create(model="pocket", prompt="a", max_tokens=1, extra_body=asks_for_nothing)
    client.completions.create(model="pocket", prompt="a", max_tokens=1, best_of=1)
    with pytest.raises(openai.BadRequestError, match="context length is 512 tokens") as caught:
        client.completions.create(model="pocket", prompt="a", max_tokens=512)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="a tool speaks first"):
        client.chat.completions.create(
            model="pocket", messages=[{"role": "tool", "content": "x", "tool_call_id": "1"}]
        )


def test_models_are_listed(client):
    (model,) = client.models.list()
    assert model.id == "pocket"
    assert client.models.retrieve("pocket").model_dump()["max_model_len"] == 512
