"""Bodies of requests: what reading one may cost, and what is said of those that are refused."""

import threading
import tracemalloc
from typing import Any

import pytest
from http_server import ScriptedEngine, Served

from moe_runtime.serving.http import endpoints
from moe_runtime.serving.http.api_errors import ApiError, TooLongError, too_long
from moe_runtime.serving.http.schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Message,
    named,
    parse_body,
)
from moe_runtime.serving.requests import (
    Event,
    Finished,
    GenerationRequest,
    PromptRead,
    QueueFullError,
)

MANY = 20_000
TEXT_MESSAGE = b'{"role":"user","content":"x"}'


def filled(unit: bytes, begin: bytes, end: bytes) -> bytes:
    return begin + b",".join([unit] * MANY) + end


@pytest.mark.parametrize(
    ("kind", "raw", "param"),
    [
        (ChatBody, filled(b"0", b'{"messages":[', b"]}"), "messages.0"),
        (CompletionBody, filled(b'"a"', b'{"prompt":"a","stop_token_ids":[', b"]}"), None),
        (CompletionBody, filled(b"0", b'{"prompt":"a","stop":[', b"]}"), "stop.0"),
        (DetokenizeBody, filled(b'"a"', b'{"tokens":[', b"]}"), "tokens.0"),
        (
            CompletionBody,
            b'{"prompt":"a",' + b",".join(b'"%d":0' % at for at in range(MANY)) + b"}",
            "0",
        ),
        (
            CompletionBody,
            b'{"prompt":"a","metadata":{' + b",".join(b'"%d":0' % at for at in range(MANY)) + b"}}",
            "metadata.0",
        ),
        (
            CompletionBody,
            b'{"prompt":"a","logit_bias":{'
            + b",".join(b'"%d":"x"' % at for at in range(MANY))
            + b"}}",
            "logit_bias.0",
        ),
    ],
)
def test_of_many_mistakes_the_first_is_enough(kind, raw, param):
    """Each that is collected takes hundreds of bytes, and its part of a body takes two."""
    tracemalloc.start()
    with pytest.raises(ApiError) as caught:
        parse_body(kind, raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60 * len(raw)
    assert caught.value.param == (param or "stop_token_ids.0")
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", ["a" * 100_000, "temperaturf" + "x" * 100_000])
def test_a_name_that_is_long_is_not_repeated(name):
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, b'{"prompt":"a","%s":1}' % name.encode())
    assert caught.value.code == "unknown_parameter"
    assert len(caught.value.message) < 200
    assert len(caught.value.param or "") < 80


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b'{"prompt":[' + b"[]," * 100_000 + b"[]]}", "mostly brackets"),
        (b'{"prompt":' + b"[" * 300 + b"]" * 300 + b"}", "deeper than 200 levels"),
        (b'{"prompt":' + b"9" * 2000 + b"}", "a number of 2000 characters"),
        (b'{"prompt":"a","temperature":NaN}', "NaN"),
        (b'{"prompt":"\xff"}', "no JSON"),
    ],
)
def test_what_is_no_json_that_is_taken(raw, complaint):
    with pytest.raises(ApiError, match=complaint) as caught:
        parse_body(CompletionBody, raw)
    assert caught.value.status == 400


def test_a_value_that_is_long_is_cut():
    with pytest.raises(ApiError) as caught:
        parse_body(ChatBody, b'{"messages":"%s"}' % (b"x" * 100_000))
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        (ChatBody, b'{"messages":[]}', "messages: is empty, send at least one message: {"),
        (
            CompletionBody,
            b'{"prompt":"a","stop":""}',
            "stop: is empty, send at least one character",
        ),
        (
            CompletionBody,
            b'{"prompt":"a","max_completion_tokens":3}',
            "max_completion_tokens: is no field of this request; did you mean max_tokens?",
        ),
        (CompletionBody, b'{"prompt":"a","max_tokns":3}', "did you mean max_tokens?"),
    ],
)
def test_a_refusal_says_what_to_send(kind, raw, message):
    with pytest.raises(ApiError) as caught:
        parse_body(kind, raw)
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("seed", -(2**63), 2**63 - 1),
        ("priority", -(2**63), 2**63 - 1),
        ("top_k", -1, 2**63 - 1),
        ("max_tokens", 0, 2**63 - 1),
        ("min_tokens", 0, 2**63 - 1),
        ("max_completion_tokens", 0, 2**63 - 1),
        ("top_logprobs", 0, 20),
        ("n", 1, 128),
    ],
)
def test_integers_out_of_range_are_told_the_range(field, least, most):
    def parse(value: object) -> ChatBody:
        text = b'{"messages":[%s],"%s":%s}' % (
            TEXT_MESSAGE,
            field.encode(),
            str(value).lower().encode(),
        )
        return parse_body(ChatBody, text)

    for value in (least, most):
        assert getattr(parse(value), field) == value
    assert getattr(parse("null"), field) is None
    for value in (least - 1, most + 1, 2**70, -(2**70), 1.5, True, '"7"'):
        with pytest.raises(ApiError) as caught:
            parse(value)
        error = caught.value.body()["error"]
        expected = f"{field}: expected an integer from {least} to {most}, got "
        assert (caught.value.status, error["param"]) == (400, field)
        assert error["message"].startswith(expected)
        assert "\n" not in error["message"]


def test_long_bodies_are_read_outside_the_loop(staged, monkeypatch):
    threads = []

    def parse(kind: Any, raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_body(kind, raw)

    monkeypatch.setattr(endpoints, "parse_body", parse)
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    site = staged(engine)
    for prompt in ([5], [5] * 900):
        body = {"prompt": prompt, "metadata": {"a": "x" * (len(prompt) * 20)}}
        assert site.ask("/v1/completions", body)[0] == 200
    assert [name.startswith("texts") for name in threads] == [False, True]


def test_messages_may_be_dumped_as_openais_client_has_them():
    raw = (
        b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b",'
        b'"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":null}]}'
    )
    (_, found) = parse_body(ChatBody, raw).messages
    assert found == Message(role="assistant", content="b")
    with pytest.raises(ApiError, match=r"messages.1.audio: is not supported"):
        parse_body(ChatBody, raw.replace(b'"audio":null', b'"audio":[1]'))
    with pytest.raises(ApiError, match="bogus: is no field"):
        parse_body(ChatBody, b'{"bogus":null,"messages":[' + TEXT_MESSAGE + b"]}")


def test_arguments_of_a_tool_are_an_object():
    raw = b'{"messages":[%s],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
    for schema in (b'{"type":"string"}', b'{"type":["object","null"]}'):
        with pytest.raises(ApiError, match="expected the schema of an object") as refused:
            parse_body(ChatBody, raw % (TEXT_MESSAGE, schema))
        assert refused.value.param == "tools.function.parameters"
    parse_body(ChatBody, raw % (TEXT_MESSAGE, b"{}"))


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "junk": 1}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("/v1/completions", {"best_of": True}, "best_of"),
        ("/v1/completions", {"best_of": 1.0}, "best_of"),
        ("/v1/completions", {"store": 0}, "store"),
        ("/v1/completions", {"response_format": {}}, "response_format.type"),
        ("/v1/completions", {"response_format": SCHEMA}, "response_format.json_schema.junk"),
        ("/tokenize", {"tools": [TOOL]}, "tools"),
        ("/tokenize", {"add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_what_would_have_no_effect_is_refused(staged, path, given, param):
    site = staged()
    assert site.refused(path, {"prompt": "a", **given})["param"] == param
    chat = {"messages": [{"role": "user", "content": "a"}], "response_format": {}}
    assert site.refused("/v1/chat/completions", chat)["param"] == "response_format.type"


@pytest.fixture
def refusing(staged: Any) -> tuple[Served, ScriptedEngine]:
    def script(request: GenerationRequest) -> list[Event]:
        raise QueueFullError("many wait")

    engine = ScriptedEngine(script)
    return staged(engine), engine


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_text_too_long_for_any_tokens_is_refused_before_it_is_encoded(
    refusing, tokenizer, monkeypatch, path
):
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
    assert (
        "characters; this model's maximum context length is 1000 tokens"
        in found["error"]["message"]
    )
    assert len(encoded) == 1


@pytest.mark.parametrize("text", ["😀𝔘𒀀🦑" * 800, "zq" * 2500], ids=["bytes", "letters"])
def test_a_text_that_is_far_too_long_is_not_encoded_as_a_whole(
    refusing, tokenizer, monkeypatch, text
):
    site, engine = refusing
    vocabulary, encoded = site.server.models["pocket"].vocabulary, []
    real = vocabulary._encode

    def encode(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return real(text, **options)

    monkeypatch.setattr(vocabulary, "_encode", encode)
    assert len(text) < vocabulary.longest_token * engine.most_request_tokens
    assert len(tokenizer(text)["input_ids"]) > 2 * engine.most_request_tokens
    assert site.refused("/v1/completions", {"prompt": text})["code"] == "context_length_exceeded"
    assert max(map(len, encoded), default=0) <= 2048
    assert sum(map(len, encoded)) < len(text)


def test_a_text_that_is_a_little_too_long_is_counted(refusing, tokenizer):
    site, engine = refusing
    text = "The store reads an expert. " * 150
    num_tokens = len(tokenizer(text)["input_ids"])
    most = engine.most_request_tokens
    assert most < num_tokens < 2 * most
    status, found = site.ask("/v1/completions", {"prompt": text})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert f"has {num_tokens} tokens" in found["error"]["message"]


def test_an_error_with_another_name_stays_what_it_is() -> None:
    with pytest.raises(TooLongError) as caught, named({"messages": "input"}):
        raise too_long("9 tokens", 4, "messages.0")
    assert caught.value.param == "input.0"
    assert caught.value.message.startswith("input.0: has 9 tokens; ")
    assert caught.value.of_anthropic == "prompt is too long: 9 tokens > 4 maximum"
