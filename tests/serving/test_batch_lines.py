"""Lines of a file of prompts: what they may ask, and what is said of those that ask wrongly."""

import json
from dataclasses import replace
from typing import Any

import pytest

from moe_runtime.serving.batches.batch_run import PromptLine, read_lines
from moe_runtime.serving.requests import SamplingOptions

DEFAULTS = SamplingOptions(temperature=0.5, seed=3, repetition_penalty=1.1)


def read(*lines: Any) -> list[PromptLine]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return read_lines(text, "in.jsonl", max_new_tokens=7)


def batch(url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def test_plain_lines_and_those_of_openai_ask_the_same():
    fields: dict[str, Any] = {
        **{"max_tokens": 5, "temperature": 0, "top_k": -1, "top_p": 0.9, "min_p": None},
        **{"stop": "END", "stop_token_ids": [4], "logit_bias": {"17": -1}, "ignore_eos": True},
        **{"seed": 11, "min_tokens": 2, "n": 1, "stream": False, "user": "me", "model": "m"},
    }
    plain, wrapped = read({"prompt": "Hi", **fields}, "", batch(prompt="Hi", **fields))
    assert (plain.place, wrapped.place) == ("in.jsonl, line 1", "in.jsonl, line 3")
    assert (plain.custom_id, wrapped.custom_id) == (None, "a")
    for line in (plain, wrapped):
        assert (line.prompt, line.messages, line.model) == ("Hi", None, "m")
        assert (line.max_new_tokens, line.min_new_tokens, line.ignore_eos) == (5, 2, True)
        assert (line.stops, line.stop_ids) == (("END",), {4})
        assert replace(DEFAULTS, **line.sampling) == SamplingOptions(
            top_p=0.9, seed=11, repetition_penalty=1.1, logit_bias={17: -1.0}
        )


def test_what_a_line_does_not_say_is_as_the_command_says():
    text, ids = read('"Hi"', {"prompt": [5, 6]})
    assert (text.prompt, ids.prompt) == ("Hi", [5, 6])
    assert text.sampling == ids.sampling == {}
    assert text.max_new_tokens == 7


def test_conversations_have_texts_or_parts_that_are_texts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "c"}, {"role": "user", "content": parts}]
    (line,) = read(batch("/v1/chat/completions", messages=messages, max_completion_tokens=3))
    assert line.messages == [messages[0], {"role": "user", "content": "a\nb"}]
    assert line.max_new_tokens == 3


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: expected JSON, found expecting property name"),
        ('"\x01"', "line 2: expected JSON, found invalid control character at character 2"),
        ("not json", "found expecting value at character 1"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' twice"),
        ("[1]", "expected a JSON string or an object"),
        ("{}", "messages is missing"),
        ('{"prompt": "a", "temperature": NaN}', "found NaN, which JSON does not have"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ('{"prompt": [' + "9" * 100_000 + "]}", "a number of 100000 characters"),
        ("[" * 100_000, "mostly brackets"),
        ('{"prompt":' + "[" * 1000 + " " * 20_000 + "1" + "]" * 1000 + "}", "line 2: "),
        ({"prompt": 3}, "prompt: expected a text or token ids, got 3"),
        ({"prompt": [1, -1]}, "prompt: expected token ids"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens: expected a whole number, got true"),
        ({"prompt": "a", "temperature": -1}, "temperature must be 0"),
        ({"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty must lie in [1e-20"),
        ({"prompt": "a", "top_k": -2}, "top_k must be at least 0"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens must be at least 0"),
        ({"prompt": "a", "stop": [""]}, "stop: expected a text"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias: expected token ids"),
        ({"prompt": "a", "n": True}, "n may only be 1 here, got true"),
        ({"prompt": "a", "logprobs": 0}, "logprobs may only be false here, got 0"),
        ({"prompt": "a", "min_tokens": 6, "max_tokens": 5}, "min_tokens: expected at most the 5"),
        ({"prompt": "a", "min_tokens": 8}, "min_tokens: expected at most the 7"),
        (
            {"prompt": "a", "max_tokens": 3, "max_completion_tokens": 9},
            "max_tokens is the old name of max_completion_tokens; give one",
        ),
        ({"prompt": "a", "n": 2}, "n may only be 1 here, got 2"),
        ({"prompt": "a", "temprature": 1}, "temprature is not supported; known are frequency"),
        ({"prompt": "a", "messages": []}, "has a prompt and messages"),
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "parts of content must be"),
        ({"messages": [{**IMAGE, "role": "system"}]}, "pictures may be in those of the user"),
        ({"messages": [{"role": "user"}]}, "content must be text, got null"),
        ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "tool_call_id is not supported"),
        (batch("/v1/embeddings", input="a"), "url: expected /v1/chat/completions or"),
        (batch(prompt="a") | {"method": "GET"}, 'method: expected POST, got "GET"'),
        (batch(prompt="a") | {"more": 1}, "more is not a field of OpenAI's batch format"),
        ({"custom_id": "b", "method": "POST", "url": "/v1/completions"}, "body is missing"),
        (batch(prompt="a") | {"custom_id": 3}, "custom_id: expected text, got 3"),
        (batch(prompt="a") | {"custom_id": "first"}, "'first' is that of line 1 too"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(line, complaint):
    first = batch(prompt="a") | {"custom_id": "first"}
    with pytest.raises(ValueError, match=r"^in\.jsonl, line 2: ") as caught:
        read(first, line)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_without_lines_is_refused():
    with pytest.raises(ValueError, match=r"in\.jsonl: holds no prompts"):
        read("", " ")
