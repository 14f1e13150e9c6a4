"""The log: a line for each request, and nothing that a client wrote in it."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from http_server import ScriptedEngine, Served, served_engine

from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.endpoints import log_fields
from moe_runtime.serving.requests import Finished, NewToken, PromptRead

SECRET = "my password is hunter2"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = {"function": {"name": "f", "arguments": SECRET}}


ENGINE = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])


@pytest.fixture(scope="module")
def own(tokenizer: Any) -> Iterator[Served]:
    with served_engine(ENGINE, tokenizer) as found:
        yield found


def logged(site: Served) -> Mapping[str, Any]:
    """The line of the only request since; it is written after its response is sent."""
    while not site.log:
        time.sleep(0.001)
    return site.log.pop()[1]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (CHAT, {"messages": SECRET}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": {"text": SECRET}}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages.0.tool_calls.0.function.arguments",
        ),
        (TEXT, {"prompt": "a", "stop": ["a", SECRET * 50]}, "stop.1"),
        (TEXT, {"prompt": "a", "logit_bias": {SECRET: 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "metadata": {SECRET: 1}}, "metadata"),
        (TEXT, {"prompt": "a", "response_format": {"type": SECRET}}, "response_format.type"),
        (TEXT, {"prompt": "a", "model": SECRET}, "model"),
        (TEXT, {"prompt": "a", SECRET: 1}, None),
        (TEXT, b'{"prompt": "a", "%s": 1, "%s": 2}' % ((SECRET.encode(),) * 2), None),
    ],
)
def test_refusals_are_logged_without_what_was_sent(own, path, body, place):
    status, found = own.ask(path, body)
    fields = logged(own)
    assert status in (400, 404)
    assert "hunter2" in found["error"]["message"]
    assert "hunter2" not in str(fields)
    assert fields.get("param") == place
    assert fields["error"] == (found["error"]["code"] or found["error"]["type"])


def test_the_name_of_a_user_is_cut(own):
    assert own.ask(TEXT, {"prompt": [5], "user": "u" * 10_000})[0] == 200
    assert logged(own)["user"] == "u" * 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_mistake_of_the_server_is_an_error_and_is_logged(own, monkeypatch, stream):
    events = [PromptRead(0), NewToken(5, math.nan), Finished("length")]
    monkeypatch.setattr(ENGINE, "script", lambda _: events)
    body = {"prompt": [5], "logprobs": 1}
    if stream:
        found = own.stream(TEXT, body)[-1]
    else:
        status, found = own.ask(TEXT, body)
        assert status == 500
    fields = logged(own)
    assert (found["error"]["code"], found["error"]["type"]) == ("internal_error", "server_error")
    assert fields["status"] == 500
    assert fields["error"].startswith("ValueError < ")
    assert "endpoints.py:" in fields["error"]


def test_what_the_server_itself_says_is_logged():
    own = ApiError("expert 3 cannot be read", status=500, logged="expert 3 cannot be read")
    assert log_fields(own) == {"error": "expert 3 cannot be read"}
