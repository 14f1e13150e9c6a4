"""Clients that are slow, ask for too much at once, or speak HTTP in an unusual way."""

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from http_server import HEAD, ScriptedEngine, Served, connected, response, served_engine
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moe_runtime.serving.http import chat, endpoints
from moe_runtime.serving.http.api_errors import FieldError
from moe_runtime.serving.http.endpoints import RequestGate
from moe_runtime.serving.http.grammars import Grammars
from moe_runtime.serving.http.schema import parse_body
from moe_runtime.serving.http.server import Access, Limits, Server
from moe_runtime.serving.http.starting import AddressError, accept_clients, listen
from moe_runtime.serving.requests import Finished, NewToken, PromptRead


def at_once() -> ScriptedEngine:
    return ScriptedEngine(lambda _: [PromptRead(0), NewToken(7), Finished("length")])


def serve_scripted(tokenizer: Any, **options: Any) -> contextlib.AbstractContextManager[Served]:
    return served_engine(at_once(), tokenizer, **options)


@pytest.mark.parametrize("more", [{"prompt": [[5]] * 900, "n": 128}, {"prompt": ["a"] * 50_000}])
def test_too_many_answers_are_refused_before_anything_is_made_of_them(staged, monkeypatch, more):
    site = staged()

    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("a prompt was encoded, or a request was made")

    monkeypatch.setattr(site.server.models["pocket"].vocabulary, "encode", fail)
    monkeypatch.setattr("moe_runtime.serving.http.generating.sampling_of", fail)
    status, found = site.ask("/v1/completions", more)
    assert (status, found["error"]["param"]) == (400, "prompt"), found
    assert f"{len(more['prompt']) * more.get('n', 1)} answers" in found["error"]["message"]


def test_a_body_that_does_not_come_is_given_up(tokenizer):
    with (
        serve_scripted(tokenizer, limits=Limits(body_seconds=0.05)) as site,
        connected(site) as one,
    ):
        one.sendall(HEAD % 100 + b'{"prompt"')
        status, found = response(one)
    assert (status, found["error"]["code"]) == (408, "timeout")
    assert "body" in found["error"]["message"]


def test_a_head_that_does_not_end_ends_the_connection(tokenizer, monkeypatch):
    """The first one of a connection, and one behind an answer, which uvicorn's own limit ends."""
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, timeout_keep_alive=0))
    with serve_scripted(tokenizer, limits=Limits(head_seconds=0.05)) as site:
        for sent in (b"", b"POST /v1/comple", HEAD % 100 + b"{" + b" " * 99 + b"GE"):
            # it may have ended before this was sent
            with connected(site) as one, contextlib.suppress(ConnectionError):
                one.sendall(sent)
                while one.recv(1 << 16):
                    pass


def test_a_body_that_does_not_come_holds_up_no_end(tokenizer):
    with contextlib.ExitStack() as serving, ThreadPoolExecutor(1) as threads:
        site = serving.enter_context(serve_scripted(tokenizer))
        with connected(site) as one:
            one.sendall(HEAD % 100 + b'{"prompt"')
            while not site.server.num_body_bytes:
                site.ask("/ping")
            stopping = threads.submit(serving.close)
            status, found = response(one)
            assert (status, found["error"]["code"]) == (503, "shutting_down")
            stopping.result(30)


def test_bodies_of_many_clients_together_have_an_end(tokenizer):
    limits = Limits(body_bytes=1000)
    with serve_scripted(tokenizer, limits=limits) as site, contextlib.ExitStack() as clients:
        waiting = [clients.enter_context(connected(site)) for _ in range(5)]
        for number, client in enumerate(waiting[:4]):
            client.sendall(HEAD % 1000 + b" " * 999)
            while site.server.num_body_bytes < 999 * (number + 1):
                site.ask("/ping")
        waiting[4].sendall(HEAD % 1000 + b" " * 999)
        status, found = response(waiting[4])
        assert (status, found["error"]["code"]) == (429, "queue_full")
        waiting[0].sendall(b" ")
        assert response(waiting[0])[0] == 400
        while site.server.num_body_bytes > 3 * 999:
            site.ask("/ping")
        assert site.ask("/v1/completions", {"prompt": [5], "max_tokens": 1})[0] == 200


def test_a_body_counts_until_the_engine_has_its_tokens(tokenizer, monkeypatch):
    bodies: list[weakref.ref[Any]] = []

    def parse(kind: Any, raw: bytes) -> Any:
        body = parse_body(kind, raw)
        bodies.append(weakref.ref(body))
        return body

    monkeypatch.setattr(endpoints, "parse_body", parse)
    engine = ScriptedEngine(lambda _: [PromptRead(0)])  # which never ends
    limits = Limits(body_bytes=1000)
    serving = served_engine(engine, tokenizer, limits, drain_s=0)
    with serving as site, contextlib.ExitStack() as clients:

        def open_one(path: str, more: dict[str, Any]) -> None:
            raw = json.dumps({"metadata": {"a": "x" * 800}, **more}).encode()
            engine.asked.clear()
            client = clients.enter_context(connected(site))
            client.sendall(HEAD.replace(b"/v1/completions", path.encode()) % len(raw) + raw)
            assert engine.asked.wait(600)

        for number in range(4):
            path, prompt = (
                ("/v1/completions", {"prompt": [5]}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            )[number % 2]
            open_one(path, {**prompt, "stream": number % 3 == 0})
        site.ask("/ping")  # the step that has asked the engine is over
        assert not site.server.num_body_bytes
        gc.collect()
        assert [body() for body in bodies] == [None] * 4
        # what is compiled of a grammar stays as long as the answer
        open_one("/v1/completions", {"prompt": [5], "response_format": {"type": "json_object"}})
        assert site.server.num_body_bytes > 800


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nothing_of_a_stream_that_failed_waits_for_the_garbage_collector(
    tokenizer, monkeypatch, path
):
    """Where reads fail for minutes, requests would fill memory between its runs."""
    streams: list[Callable[[], Any]] = []
    begin = endpoints.EventStream.__init__

    def note(self: Any, generation: Any, chunks: Any) -> None:
        streams.append(weakref.ref(generation))
        begin(self, generation, chunks)

    monkeypatch.setattr(endpoints.EventStream, "__init__", note)
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("error", "cannot read it")])
    with served_engine(engine, tokenizer, drain_s=0) as site:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                body = {"prompt": [5], "messages": [{"role": "user", "content": "a"}]}
                del body["prompt" if "chat" in path else "messages"]
                raw = json.dumps({**body, "stream": True}).encode()
                head = HEAD.replace(b"/v1/completions", path.encode()) % len(raw)
                # whoever closes first would decide what the server still does with the stream
                head = head.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
                with connected(site) as client:
                    client.sendall(head + raw)
                    received = b"".join(iter(partial(client.recv, 4096), b""))
                assert b"cannot read it" in received
            for _ in range(50):  # the server's loop has its own pace
                if any(stream() is not None for stream in streams):
                    site.ask("/ping")
            assert [stream() for stream in streams] == [None] * 3
        finally:
            gc.enable()


def test_only_names_of_the_server_are_answered(tokenizer):
    known = ("localhost", "LocalHost:80", "[::1]", "[::1]:8000")
    others = ("evil.example", "[", "[::1].evil.com", "[::1]x:80", "localhost:80.evil.com")
    others += ("localhost@evil.com", "[[::1]]", "::1", "localhost.evil.com")
    with serve_scripted(tokenizer, access=Access(hosts=["localhost", "[::1]"])) as site:
        for host in (*known, *others):
            status = 200 if host in known else 403
            assert site.ask("/ping", headers={"host": host})[0] == status, host
        with connected(site) as client:
            client.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
            assert response(client)[0] == 200


def test_a_host_that_is_none_is_no_fault(staged):
    with connected(staged()) as client:
        client.sendall(b"GET /nowhere HTTP/1.1\r\nhost: [\r\n\r\n")
        status, found = response(client)
        assert (status, found["error"]["code"]) == (404, "unknown_url")


def test_a_page_that_may_ask_may_send_the_headers_of_openais_client(tokenizer):
    wanted = {"access-control-request-headers": "authorization, content-type, x-stainless-os"}
    with serve_scripted(tokenizer, access=Access(origins=["http://page"])) as site:
        where = urlsplit(site.address)
        for origin, status in (("http://page", 204), ("http://other", 405)):
            asking = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
            with contextlib.closing(asking):
                headers = {"origin": origin, "access-control-request-method": "POST", **wanted}
                asking.request("OPTIONS", "/v1/chat/completions", headers=headers)
                found = asking.getresponse()
                found.read()
            assert found.status == status
            shown = found.headers["access-control-allow-origin"]
            assert shown == (origin if status == 204 else None)
            if status == 204:
                assert found.headers["access-control-allow-headers"] in wanted.values()


def test_a_method_that_is_none_says_which_there_are(staged):
    where = urlsplit(staged().address)
    asking = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
    with contextlib.closing(asking):
        asking.request("GET", "/v1/completions")
        found = asking.getresponse()
        assert (found.status, found.headers["allow"]) == (405, "POST")


def test_a_grammar_that_takes_long_holds_up_nobody_without_one(staged, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def compile_(self: Grammars, lark: str, param: str, owner: str) -> Any:
        begun.set()
        assert may_end.wait(600)
        raise FieldError(param, "took long")

    monkeypatch.setattr(Grammars, "compile", compile_)
    slow = {"prompt": "a", "response_format": {"type": "regex", "regex": "a"}}
    site = staged(at_once())
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(site.ask, "/v1/completions", slow)
        assert begun.wait(600)
        assert site.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert not asked.done()
        may_end.set()
        assert asked.result()[0] == 400


def test_a_client_that_takes_nothing_is_given_up(tokenizer):
    log: list[Mapping[str, Any]] = []
    server = Server(
        {}, Limits(sending_seconds=0.02), Access(), lambda _, fields: log.append(fields)
    )

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("text")(scope, receive, send)

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "query_string": b""}
    with pytest.raises(ConnectionError, match="does not read"):
        asyncio.run(RequestGate(page, server)(scope, receive, send))
    assert log[0]["error"] == "the client does not read the answer"


def test_a_server_whose_engine_has_ended_is_not_ready(staged):
    engine = ScriptedEngine(lambda _: [])
    site = staged(engine)
    assert site.ask("/health")[0] == 200
    engine.is_open = False
    assert site.ask("/health") == (503, {"alive": True, "ready": False})


def test_an_address_is_held_while_a_model_loads():
    with contextlib.closing(listen("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(AddressError, match=f"port {port}.*--port"):
            listen("127.0.0.1", port)
        accept_clients(first, 5)
        with pytest.raises(AddressError):
            listen("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = first.accept()
            # whoever closes first keeps the address for a while
            connection.close()
            client.recv(1)
    with contextlib.closing(listen("127.0.0.1", port)) as again:
        accept_clients(again, 5)


ONE_TOKEN = json.dumps({"prompt": [5], "max_tokens": 1}).encode()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_client_that_sends_no_more_is_answered(staged, version, is_late):
    told: list[Any] = []
    engine = ScriptedEngine(lambda _: [PromptRead(0)])
    submit = engine.submit
    engine.submit = lambda request, hear: (told.append(hear), submit(request, hear))[1]  # type: ignore[method-assign]
    site = staged(engine)
    with connected(site) as client:
        client.sendall(HEAD.replace(b"HTTP/1.1", b"HTTP/" + version) % len(ONE_TOKEN) + ONE_TOKEN)
        if not is_late:
            client.shutdown(socket.SHUT_WR)
        assert engine.asked.wait(600)
        if is_late:
            client.shutdown(socket.SHUT_WR)
        site.ask("/ping")
        for event in (NewToken(7), Finished("length")):
            told[0](event)
        status, found = response(client)
        assert (status, found["choices"][0]["finish_reason"]) == (200, "length")
        assert client.recv(1) == b""


def test_a_client_that_ends_within_its_body_has_gone_away(tokenizer):
    with serve_scripted(tokenizer, drain_s=0) as site, connected(site) as client:
        client.sendall(HEAD % 100 + ONE_TOKEN)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


THREE_TOKENS = {"prompt": [5, 6], "max_tokens": 3}


class SlowPreparation:
    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._real = chat.prepare_completion

    def __call__(self, *args: Any) -> Any:
        self.begun.set()
        assert self.may_end.wait(600)
        return self._real(*args)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowPreparation]:
    found = SlowPreparation()
    monkeypatch.setattr(chat, "prepare_completion", found)
    yield found
    found.may_end.set()


def without_tokens() -> ScriptedEngine:
    return ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])


def test_the_time_of_a_request_begins_with_its_arrival(tokenizer, slow):
    with served_engine(without_tokens(), tokenizer, Limits(seconds=0.05)) as site:
        status, found = site.ask("/v1/completions", THREE_TOKENS)
        assert not slow.may_end.is_set()
        slow.may_end.set()
    assert (status, found["error"]["code"]) == (408, "timeout")


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_prepared_when_the_server_ends_is_told_so(tokenizer, slow, stream):
    scripted = without_tokens()
    with contextlib.ExitStack() as serving, ThreadPoolExecutor(2) as threads:
        site = serving.enter_context(served_engine(scripted, tokenizer, drain_s=0))
        asked = threads.submit(site.ask, "/v1/completions", {**THREE_TOKENS, "stream": stream})
        assert slow.begun.wait(600)
        ending = threads.submit(serving.close)
        status, found = asked.result(600)
        slow.may_end.set()
        ending.result(600)
    assert (status, found["error"]["code"]) == (503, "shutting_down")
    assert not scripted.asked.is_set()
