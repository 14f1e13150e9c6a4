"""Requests that no client should send: refused in OpenAI's form, never a fault of the server."""

import json
from random import Random
from typing import Any

import pytest
from bad_input_values import VALUES, damaged_json
from http_server import Served

SOUND: dict[str, Any] = {
    "/v1/completions": {
        "model": "pocket",
        "prompt": ["The list", "A class"],
        "max_tokens": 2,
        "temperature": 0.5,
        "top_k": 5,
        "n": 1,
        "stop": ["zz"],
        "logit_bias": {"7": 1.5},
        "logprobs": 1,
        "echo": True,
        "seed": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "regex", "regex": "a+"},
    },
    "/v1/chat/completions": {
        "model": "pocket",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ],
        "max_tokens": 2,
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
        "logprobs": True,
        "top_logprobs": 1,
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/tokenize": {"prompt": "The list", "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6]},
}


def check(site: Served, path: str, raw: bytes) -> int:
    status, answer = site.ask(path, raw)
    assert status < 500, (path, raw[:500], answer)
    if status >= 400:
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"] or len(error["message"]) < 2000
    elif isinstance(answer, str):
        assert "internal_error" not in answer
    return status


def fuzz(site: Served, rng: Random, times: int) -> list[int]:
    found = []
    for _ in range(times):
        path = rng.choice(sorted(SOUND))
        if rng.random() < 0.15:
            raw = bytearray(json.dumps(SOUND[path]).encode())
            for _ in range(rng.randrange(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            found.append(check(site, path, bytes(raw)))
            continue
        body = damaged_json(rng, SOUND[path], rng.randrange(1, 4))
        if isinstance(body, dict) and rng.random() < 0.2:
            body[rng.choice(("foo", "\ud800", ""))] = rng.choice(VALUES)
        found.append(check(site, path, json.dumps(body).encode()))
    return found


def test_sound_requests_are_answered(site: Served) -> None:
    assert [check(site, path, json.dumps(body).encode()) for path, body in SOUND.items()] == [
        200
    ] * len(SOUND)


def test_damaged_requests_are_refused_in_openais_form(site: Served) -> None:
    found = fuzz(site, Random(1), 120)
    assert 400 in found
    assert 200 in found


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_damaged_requests_are_refused_in_openais_form(site: Served, seed: int) -> None:
    fuzz(site, Random(100 + seed), 500)
