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
    client_fields,
    parse_body,
)
from moe_runtime.serving.requests import (
    Event,
    Finished,
    GenerationRequest,
    PromptRead,
    QueueFullError,
)

MANY = 8_000
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


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (CompletionBody, b'{"prompt":"a","%s":1}' % (b"a" * 100_000)),
        (CompletionBody, b'{"prompt":"a","temperaturf%s":1}' % (b"x" * 100_000)),
        (ChatBody, b'{"messages":"%s"}' % (b"x" * 100_000)),
    ],
)
def test_long_names_and_values_are_cut(kind, raw):
    with pytest.raises(ApiError) as caught:
        parse_body(kind, raw)
    assert len(caught.value.message) < 400
    assert len(caught.value.param or "") < 80


@pytest.mark.parametrize(
    ("raw", "complaint"),
    [
        (b'{"prompt":[' + b"[]," * 100_000 + b"[]]}", "mostly brackets"),
        (b'{"prompt":' + b"[" * 300 + b"]" * 300 + b"}", "deeper than 200 levels"),
        (b'{"prompt":' + b"9" * 2000 + b"}", "a number of 2000 characters"),
        (b'{"prompt":"a","temperature":NaN}', "NaN"),
        (b'{"prompt":"\xff"}', "not valid JSON"),
    ],
)
def test_what_is_no_json_that_is_taken(raw, complaint):
    with pytest.raises(ApiError, match=complaint) as caught:
        parse_body(CompletionBody, raw)
    assert caught.value.status == 400


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
    with pytest.raises(ApiError, match="bogus: is not a field"):
        parse_body(ChatBody, b'{"bogus":null,"messages":[' + TEXT_MESSAGE + b"]}")


def test_arguments_of_a_tool_are_an_object():
    raw = b'{"messages":[%s],"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]}'
    for schema in (b'{"type":"string"}', b'{"type":["object","null"]}'):
        with pytest.raises(ApiError, match="expected the schema of an object") as refused:
            parse_body(ChatBody, raw % (TEXT_MESSAGE, schema))
        assert refused.value.param == "tools.function.parameters"
    parse_body(ChatBody, raw % (TEXT_MESSAGE, b"{}"))


USER = {"role": "user", "content": "a"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SOUND = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "a"}, "/tokenize": {"prompt": "a"}}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "junk": 1}}
TOOL = {"type": "function", "function": {"name": "f"}}
UNSUPPORTED, UNKNOWN, MISSING = (
    f"{word}_parameter" for word in ("unsupported", "unknown", "missing_required")
)
OTHER_THOUGHTS = {"messages": [{**USER, "reasoning": "a", "reasoning_content": "b"}]}
BIASES, RANGE = "ids from 0 to 4095, got ", "must lie in [1e-20, 1e+20]"


@pytest.mark.parametrize(
    ("path", "given", "param", "said"),
    [
        (CHAT, {"messages": []}, "messages", "is empty, send at least one message: {"),
        (CHAT, {"messages": "Hi"}, "messages", "invalid_type"),
        (CHAT, {"messages": [{**USER, "content": 1}]}, "messages.0.content", "invalid_type"),
        (CHAT, {"messages": [{**USER, "role": "boss"}]}, "messages.0.role", "invalid_value"),
        (CHAT, {"messages": [{**USER, "audio": {"id": "1"}}]}, "messages.0.audio", UNSUPPORTED),
        (CHAT, {"messages": None}, "messages", "invalid_type"),
        (CHAT, OTHER_THOUGHTS, "messages.reasoning", "differs from reasoning_content"),
        (CHAT, {"n": "2"}, "n", "invalid_type"),
        (CHAT, {"top_p": 2}, "top_p", "invalid_value"),
        (CHAT, {"top_p": "a"}, "top_p", "invalid_type"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
        (CHAT, {"bogus": 1}, "bogus", UNKNOWN),
        (CHAT, {"audio": {}}, "audio", UNSUPPORTED),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
        (CHAT, {"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
        (CHAT, {"prediction": {"type": "content", "content": "a"}}, "prediction", UNSUPPORTED),
        (CHAT, {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", UNSUPPORTED),
        (CHAT, {"response_format": {}}, "response_format.type", "expected one of"),
        (TEXT, {"response_format": SCHEMA}, "response_format.json_schema.junk", "known are name, "),
        (TEXT, {"prompt": [-1]}, "prompt", "token ids (integers from 0 on)"),
        (TEXT, {"length_penalty": 0.5}, "length_penalty", UNSUPPORTED),
        (TEXT, {"max_completion_tokens": 3}, "max_completion_tokens", "mean max_tokens?"),
        (TEXT, {"max_tokns": 3}, "max_tokns", "did you mean max_tokens?"),
        (TEXT, {"stream": "maybe"}, "stream", "boolean"),
        (TEXT, {"stream_options": {"bogus": 1}}, "stream_options.bogus", "not a field"),
        (TEXT, {"stream_options": {}}, "stream_options", "needs stream: true"),
        (TEXT, {"stop": ""}, "stop", "is empty, send at least one character"),
        (TEXT, {"stop": {"a": 1}}, "stop", "got"),
        (TEXT, {"stop": ["a"] * 17}, "stop", "at most 16 strings, got 17"),
        (TEXT, {"stop": ["a", {}]}, "stop.1", "string"),
        (TEXT, {"stop_token_ids": [4096]}, "stop_token_ids", "has token 4096, expected ids from 0"),
        (TEXT, {"stop_token_ids": ["a"]}, "stop_token_ids.0", "integer"),
        (TEXT, {"min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most the 4 of the answer"),
        (TEXT, {"str": 1}, "str", "not a field"),
        (TEXT, {"temperature": 1e-300}, "temperature", "at least 1e-20"),
        (TEXT, {"repetition_penalty": 1e300}, "repetition_penalty", RANGE),
        (TEXT, {"logit_bias": {"4096": 1}}, "logit_bias", f"{BIASES}'4096'"),
        (TEXT, {"n": 0}, "n", "an integer from 1 to 128, got 0"),
        (TEXT, {"seed": "x"}, "seed", "integer"),
        (TEXT, {"best_of": True}, "best_of", "expected 1, got "),
        (TEXT, {"store": 0}, "store", "boolean"),
        ("/tokenize", {"tools": [TOOL]}, "tools", "needs messages"),
        ("/tokenize", {"add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
    ],
)
def test_refusals_name_the_field_and_the_fault(staged, path, given, param, said):
    error = staged().refused(path, {**SOUND[path], **given})
    assert error["param"] == param
    assert said == error["code"] or said in error["message"]


def test_a_missing_field_has_a_code(staged):
    error = staged().refused(CHAT, {})
    assert (error["param"], error["code"]) == ("messages", MISSING)


@pytest.fixture
def refusing(staged: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Served, list[str]]:
    """A server whose queue is full, and the texts that it encodes."""

    def script(request: GenerationRequest) -> list[Event]:
        raise QueueFullError("many wait")

    site, encoded = staged(ScriptedEngine(script)), []
    vocabulary = site.server.models["pocket"].vocabulary
    real = vocabulary.encode

    def encode(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return real(text, **options)

    monkeypatch.setattr(vocabulary, "encode", encode)
    return site, encoded


MOST = ScriptedEngine.most_request_tokens


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_text_too_long_for_any_tokens_is_refused_before_it_is_encoded(refusing, tokenizer, path):
    site, encoded = refusing
    longest = max(tokenizer.get_vocab(), key=len)

    def ask(text: str, status: int) -> Any:
        messages = [{"role": "user", "content": text}]
        body = {"prompt": text} if path == TEXT else {"messages": messages}
        return site.refused(path, {**body, "max_tokens": 1}, status)

    # Almost as many of the longest tokens as the context has; the conversation has some, too.
    ask(tokenizer.convert_tokens_to_string([longest] * (MOST - 20)), 429)
    assert encoded
    encoded.clear()
    error = ask("a" * (len(longest) * MOST + 1), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"characters; this model's maximum context length is {MOST} tokens" in error["message"]
    assert not encoded


@pytest.mark.parametrize("text", ["😀𝔘𒀀🦑" * 800, "zq" * 2500], ids=["bytes", "letters"])
def test_a_text_that_is_far_too_long_is_not_encoded_as_a_whole(refusing, tokenizer, text):
    site, encoded = refusing
    assert len(text) < site.server.models["pocket"].vocabulary.longest_token * MOST
    assert len(tokenizer(text)["input_ids"]) > 2 * MOST
    assert site.refused(TEXT, {"prompt": text})["code"] == "context_length_exceeded"
    assert max(map(len, encoded), default=0) <= 2048
    assert sum(map(len, encoded)) < len(text)


def test_a_text_that_is_a_little_too_long_is_counted(refusing, tokenizer):
    text = "The store reads an expert. " * 150
    num_tokens = len(tokenizer(text)["input_ids"])
    assert MOST < num_tokens < 2 * MOST
    error = refusing[0].refused(TEXT, {"prompt": text})
    assert error["code"] == "context_length_exceeded"
    assert f"has {num_tokens} tokens" in error["message"]


def test_an_error_with_another_name_stays_what_it_is():
    with pytest.raises(TooLongError) as caught, client_fields({"messages": "input"}):
        raise too_long("9 tokens", 4, "messages.0")
    assert caught.value.param == "input.0"
    assert caught.value.message.startswith("input.0: has 9 tokens; ")
    assert caught.value.of_anthropic == "prompt is too long: 9 tokens > 4 maximum"
