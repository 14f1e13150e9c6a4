"""Clients that end their side of a connection: some wait for an answer, some have gone away."""

import json
import socket
from typing import Any

import pytest
from http_server import HEAD, ScriptedEngine, connected, model_of, response, served

from moe_runtime.serving.requests import Finished, NewToken, PromptRead

BODY = json.dumps({"prompt": [5], "max_tokens": 1}).encode()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_client_that_sends_no_more_is_answered(
    staged: Any, version: bytes, is_late: bool
) -> None:
    """Its end comes with the request, or while the answer is made; the connection ends then."""
    told: list[Any] = []
    engine = ScriptedEngine(lambda _: [PromptRead(0)])
    submit = engine.submit
    engine.submit = lambda request, hear: (told.append(hear), submit(request, hear))[1]  # type: ignore[method-assign]
    site = staged(engine)
    with connected(site) as client:
        client.sendall(HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) % len(BODY) + BODY)
        if not is_late:
            client.shutdown(socket.SHUT_WR)
        assert engine.asked.wait(30)
        if is_late:
            client.shutdown(socket.SHUT_WR)
        site.ask("/ping")
        for event in (NewToken(7), Finished("length")):
            told[0](event)
        status, found = response(client)
        assert (status, found["choices"][0]["finish_reason"]) == (200, "length")
        assert client.recv(1) == b""


def site_of(tokenizer: Any, engine: ScriptedEngine) -> Any:
    return served([model_of("pocket", engine, tokenizer, 4096)], drain_s=0)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_has_gone_away_cancels_its_request(tokenizer: Any, streams: bool) -> None:
    engine = ScriptedEngine(lambda _: [PromptRead(0)])  # which never ends
    with site_of(tokenizer, engine) as site:
        raw = json.dumps({"prompt": [5], "max_tokens": 1, "stream": streams}).encode()
        with connected(site) as client:
            client.sendall(HEAD % len(raw) + raw)
            assert engine.asked.wait(30)
        assert engine.cancelled.wait(30)


def test_a_client_that_ends_within_its_body_has_gone_away(tokenizer: Any) -> None:
    with site_of(tokenizer, ScriptedEngine(lambda _: [])) as site, connected(site) as client:
        client.sendall(HEAD % 100 + BODY)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
