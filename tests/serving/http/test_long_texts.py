"""Texts that are too long: encoding takes hundreds of bytes a token, and no budget has them."""

from typing import Any

import pytest
from http_server import ScriptedEngine, Served

from moe_runtime.serving.requests import Event, GenerationRequest, QueueFullError


@pytest.fixture
def refusing(staged: Any) -> tuple[Served, ScriptedEngine]:
    """A server whose engine takes no request, however long it is."""

    def script(request: GenerationRequest) -> list[Event]:
        raise QueueFullError("many wait")

    engine = ScriptedEngine(script)
    return staged(engine), engine


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_too_long_for_any_tokens_is_refused_before_it_is_encoded(
    refusing: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Encoding takes hundreds of bytes a token, and a body may have megabytes of text."""
    longest = max(tokenizer.get_vocab(), key=len)
    site, engine = refusing
    vocabulary, encoded = site.server.models["pocket"].vocabulary, []
    real = vocabulary.encode

    def encode(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return real(text, **options)

    monkeypatch.setattr(vocabulary, "encode", encode)

    def ask(text: str) -> tuple[int, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"prompt": text} if path == "completions" else {"messages": messages}
        return site.ask(f"/v1/{path}", {**body, "max_tokens": 1})

    # As many of the longest tokens as may be, less a few for the conversation's own.
    fits = tokenizer.convert_tokens_to_string([longest] * (engine.most_request_tokens - 20))
    status, found = ask(fits)
    assert (status, len(encoded)) == (429, 1), found
    status, found = ask("a" * (len(longest) * engine.most_request_tokens + 1))
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert "characters; prompt and answer may have 1000 tokens" in found["error"]["message"]
    assert len(encoded) == 1


@pytest.mark.parametrize("text", ["😀𝔘𒀀🦑" * 800, "zq" * 2500], ids=["bytes", "letters"])
def test_a_text_that_is_far_too_long_is_not_encoded_as_a_whole(
    refusing: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Although its characters are fewer than those of as many of the longest tokens."""
    site, engine = refusing
    vocabulary, encoded = site.server.models["pocket"].vocabulary, []
    real = vocabulary._encode

    def encode(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return real(text, **options)

    monkeypatch.setattr(vocabulary, "_encode", encode)
    assert len(text) < vocabulary.longest_token * engine.most_request_tokens
    assert len(tokenizer(text)["input_ids"]) > 2 * engine.most_request_tokens
    status, found = site.ask("/v1/completions", {"prompt": text})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert max(map(len, encoded), default=0) <= 2048
    assert sum(map(len, encoded)) < len(text)


def test_a_text_that_is_a_little_too_long_is_counted(refusing: Any, tokenizer: Any) -> None:
    site, engine = refusing
    text = "The store reads an expert. " * 150
    num_tokens = len(tokenizer(text)["input_ids"])
    most = engine.most_request_tokens
    assert most < num_tokens < 2 * most
    status, found = site.ask("/v1/completions", {"prompt": text})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert f"has {num_tokens} tokens" in found["error"]["message"]
