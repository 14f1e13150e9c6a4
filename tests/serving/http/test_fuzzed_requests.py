"""Requests that no client should send: refused in the API's form, never a fault of the server."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import picture_checkpoints as pc
import pytest
from bad_input_values import VALUES, damaged_json
from http_server import Served, served_pictures

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CALL = {"call_id": "1", "name": "f", "arguments": "{}"}
SOUND: dict[str, Any] = {
    "/v1/completions": {
        **{"model": "pocket", "prompt": ["The list", "A class"], "max_tokens": 2, "n": 1},
        **{"temperature": 0.5, "top_k": 5, "stop": ["zz"], "logit_bias": {"7": 1.5}, "seed": 3},
        **{"logprobs": 1, "echo": True, "response_format": {"type": "regex", "regex": "a+"}},
        **{"stream": True, "stream_options": {"include_usage": True}},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        **{"model": "pocket", "max_tokens": 2, "tool_choice": "required"},
        **{"logprobs": True, "top_logprobs": 1},
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "x"}]},
            {"type": "function_call", **CALL},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        **{"model": "pocket", "instructions": "Be brief.", "max_output_tokens": 2},
        **{"text": {"format": {"type": "text"}}, "stream": True},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        **{"model": "pocket", "max_tokens": 2, "tool_choice": {"type": "any"}},
        "thinking": {"type": "disabled"},
    },
    "/tokenize": {"prompt": "The list", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6]},
}


def asked(*content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*content]}]


IMAGE = {"type": "input_image", "image_url": pc.data_url(pc.picture(0))}
SOURCE = {"type": "url", "url": pc.data_url(pc.picture(1))}
PICTURES: dict[str, Any] = {
    "/v1/chat/completions": {
        **{"messages": asked(*pc.content_of([pc.picture(0), "Hi"])), "max_tokens": 2}
    },
    "/v1/responses": {"input": asked(IMAGE), "max_output_tokens": 2},
    "/v1/messages": {"messages": asked({"type": "image", "source": SOURCE}), "max_tokens": 2},
}
"""For a model that takes pictures."""


def check(site: Served, path: str, raw: bytes) -> int:
    status, answer = site.ask(path, raw)
    assert status < 500, (path, raw[:500], answer)
    if status >= 400:
        error = answer["error"]
        is_of_openai = path != "/v1/messages"
        assert set(error) == {"message", "type", *(("param", "code") if is_of_openai else ())}
        assert error["message"]
        assert "\n" not in error["message"] or len(error["message"]) < 2000
    elif isinstance(answer, str):
        assert "internal_error" not in answer
    return status


def fuzz(site: Served, rng: Random, times: int, sound: dict[str, Any] = SOUND) -> list[int]:
    found = []
    for _ in range(times):
        path = rng.choice(sorted(sound))
        if rng.random() < 0.15:
            raw = bytearray(json.dumps(sound[path]).encode())
            for _ in range(rng.randrange(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            found.append(check(site, path, bytes(raw)))
            continue
        body = damaged_json(rng, sound[path], rng.randrange(1, 4))
        if isinstance(body, dict) and rng.random() < 0.2:
            body[rng.choice(("foo", "\ud800", ""))] = rng.choice(VALUES)
        found.append(check(site, path, json.dumps(body).encode()))
    return found


def test_sound_requests_are_answered(site):
    for path, body in SOUND.items():
        assert check(site, path, json.dumps(body).encode()) == 200, path


def test_damaged_requests_are_refused(site):
    found = fuzz(site, Random(1), 120)
    assert 400 in found
    assert 200 in found


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    name = "Qwen3VLMoeForConditionalGeneration"
    folder = pc.save_seeing_checkpoint(name, tmp_path_factory.mktemp("seeing"))
    with served_pictures(folder) as found:
        yield found


@pytest.mark.long
def test_damaged_pictures_are_refused(seeing):
    for path, body in PICTURES.items():
        assert check(seeing, path, json.dumps(body).encode()) == 200, path
    found = fuzz(seeing, Random(3), 30, PICTURES)
    assert 400 in found
    assert 200 in found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_damaged_requests_are_refused(site, seed):
    fuzz(site, Random(100 + seed), 500)
