"""A server over loopback in a thread of the test, a plain client, and a scripted engine."""

import atexit
import contextlib
import functools
import http.client
import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from warm_python import warm_python

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.inference.pictures import PictureReader
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http import starting
from moe_runtime.serving.http.answer_text import Vocabulary
from moe_runtime.serving.http.grammars import Grammars
from moe_runtime.serving.http.limits import LimitedProcess
from moe_runtime.serving.http.model_loader import ServeSettings
from moe_runtime.serving.http.model_table import ModelTable
from moe_runtime.serving.http.served_model import ChatTemplate, Place, ServedModel
from moe_runtime.serving.http.server import Access, Limits, Server
from moe_runtime.serving.http.starting import Ready
from moe_runtime.serving.requests import (
    EngineOptions,
    EngineStatistics,
    Event,
    GenerationRequest,
    OnEvent,
    Started,
)
from moe_runtime.types import RuntimeStats

HERMES = "{% if tools %}<tool_call>{% endif %}Who?"
TEMPLATE = """\
{%- if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %} \
<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" and loop.first %}
{{- raise_exception("a tool speaks first") }}{% endif %}
{{- message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}assistant:{% if enable_thinking %} <think>
{% elif enable_thinking is defined %} <think></think>
{% endif %}{% endif %}"""


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)


@dataclass
class Served:
    """A server that answers, its state, and what it logged."""

    address: str
    server: Server
    log: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> tuple[int, Any]:
        """Status and body of a response; JSON is parsed, anything else is text.

        A header that is None is not sent.
        """
        where = urlsplit(self.address)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=600)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        given = {} if raw is None else {"content-type": "application/json"}
        sent = {name: value for name, value in {**given, **(headers or {})}.items() if value}
        with contextlib.closing(connection):
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, sent)
            response = connection.getresponse()
            text = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text

    def answer(self, path: str, body: Any = None, **more: Any) -> Any:
        """The body of a response that is no refusal."""
        status, found = self.ask(path, body, **more)
        assert status == 200, found
        return found

    def refused(self, path: str, body: Any = None, status: int = 400, **more: Any) -> Any:
        """The error that a request gets."""
        found, answer = self.ask(path, body, **more)
        assert found == status, answer
        return answer["error"]

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The chunks of a stream, the last of which says that it is whole."""
        text = self.answer(path, {**body, "stream": True})
        *events, done, rest = text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


def table_of(models: Sequence[ServedModel]) -> ModelTable:
    """Models that are loaded and stay, and their adapters."""
    places: dict[str, Place] = {}
    for model in models:
        name = model.parent or model.name
        place = places.setdefault(name, Place(name, takes_pictures=model.pictures is not None))
        place.adapters += [] if model.parent is None else [model.name]
        place.served[model.name] = model
    loader: Any = SimpleNamespace(cancel=lambda: None)
    return ModelTable([*places.values()], loader)


@contextlib.contextmanager
def served(
    models: Sequence[ServedModel],
    limits: Limits | None = None,
    access: Access | None = None,
    drain_s: float = 10,
) -> Iterator[Served]:
    """Serves models until the block ends."""
    log: list[tuple[str, Mapping[str, Any]]] = []
    server = Server(
        models=table_of(models),
        limits=limits or Limits(),
        access=access or Access(),
        log=lambda event, fields: log.append((event, fields)),
    )
    stop = threading.Event()
    listening = starting.listen("127.0.0.1", 0)
    # Who connects before the loop has begun waits.
    starting.accept_clients(listening, 100)
    found = Served(starting.address_of(listening), server, log)
    options = {"is_stopping": stop.is_set, "drain_s": drain_s}
    thread = threading.Thread(target=starting.serve, args=(server, listening), kwargs=options)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def started(
    models: Sequence[str], loading: Mapping[str, Any], adapters: Sequence[str] = (), **more: Any
) -> Iterator[tuple[Served, Ready]]:
    """A server as the command starts it, until the block ends."""
    plain: dict[str, Any] = {"names": (), "host": "127.0.0.1", "port": 0, "drain_s": None}
    plain |= {"engine": EngineOptions(), "limits": Limits(), "access": Access()}
    settings = ServeSettings(models=models, adapters=adapters, loading=loading, **{**plain, **more})
    ready: queue.SimpleQueue[Ready | None] = queue.SimpleQueue()
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        heard: dict[str, Any] = {"log": lambda *_: None, "on_ready": ready.put}
        running = thread.submit(starting.run_server, settings, **heard, is_stopping=is_over.is_set)
        running.add_done_callback(lambda _: ready.put(None))
        try:
            found = ready.get()
            if found is not None:
                yield Served(found.address, server=cast(Any, None)), found
        finally:
            is_over.set()
        running.result()


@contextlib.contextmanager
def connected(site: Served) -> Iterator[socket.socket]:
    where = urlsplit(site.address)
    with socket.create_connection((where.hostname, where.port), timeout=600) as client:
        yield client


def response(client: socket.socket) -> tuple[int, Any]:
    """Status and JSON of what the server says next."""
    found = http.client.HTTPResponse(client)
    found.begin()
    return found.status, json.loads(found.read())


def model_of(name: str, engine: Any, tokenizer: Any, size: int, **fields: Any) -> ServedModel:
    """A model as the server knows it."""
    vocabulary = Vocabulary(tokenizer, size, [tokenizer.eos_token_id])
    templates, grammars = limited_processes()
    template = ChatTemplate(tokenizer, templates) if tokenizer.chat_template else None
    found = Grammars(vocabulary, grammars)
    return ServedModel(name, engine, vocabulary, template, found, **fields)


@contextlib.contextmanager
def served_pictures(folder: Path) -> Iterator[Served]:
    """Serves a vision-language model, `seeing`; prompts are cut into pieces shorter than most
    pictures."""
    tokenizer = load_tokenizer(folder)
    pictures = PictureReader.of(folder, read_config(folder), tokenizer)
    loaded: Any = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="1GiB", max_tokens=2048
    )
    options = EngineOptions(prompt_tokens=16, idle_prompt_tokens=16)
    with loaded.moe, Engine(loaded, options) as engine:
        model = model_of("seeing", engine, tokenizer, len(tokenizer), pictures=pictures)
        with served([model], Limits(body_bytes=1 << 24)) as found:
            yield found
        engine.check()


@functools.cache
def limited_processes() -> tuple[LimitedProcess, LimitedProcess]:
    """Where the servers of a test process render conversations and try grammars."""
    templates, grammars = (
        LimitedProcess(kind, warm_python()) for kind in ("templates", "grammars")
    )
    found = templates, grammars
    for process in found:
        atexit.register(process.close)
    return found


def served_engine(
    engine: Any, tokenizer: Any, limits: Limits | None = None, **options: Any
) -> contextlib.AbstractContextManager[Served]:
    """Serves one engine as `pocket` until the block ends."""
    return served([model_of("pocket", engine, tokenizer, 4096)], limits, **options)


class ScriptedEngine:
    """Answers each request at once with the events that ``script`` gives; ``asked`` and
    ``cancelled`` are set where that happens."""

    most_request_tokens = 1000
    failure = None

    def __init__(self, script: Callable[[GenerationRequest], Sequence[Event]]) -> None:
        self.script = script
        self.is_open = True
        self.asked = threading.Event()
        self.cancelled = threading.Event()

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> "ScriptedEngine":
        for event in (Started(), *self.script(request)):
            on_event(event)
        self.asked.set()
        return self

    def cancel(self) -> None:
        self.cancelled.set()

    def statistics(self) -> EngineStatistics:
        experts = RuntimeStats(
            **{"hits": 7, "late_hits": 1, "misses": 2, "bytes_read": 4096, "stall_s": 0.5},
            **{"replaced_choices": 6, "skipped_choices": 5, "stand_in_choices": 4},
            **{"useful_guesses": 3, "late_guesses": 1, "wasted_guesses": 4, "expert_slots": 8},
            **{"slot_bytes": 1 << 20, "expert_bytes": 1 << 25, "budget_bytes": 1 << 26},
            **{"policy": "lru", "kv_cache": "int8", "dense_bytes": 0, "load_s": 0.0},
            **{"baseline_rss_bytes": 0, "peak_rss_bytes": 0},
        )
        return EngineStatistics(
            **{"running": 1, "waiting": 2, "kv_tokens": 30, "kv_capacity": 100},
            **{"prefix_tokens": 10, "steps": 5, "preemptions": 1, "adapter_reads": 3},
            **{"adapter_bytes": 0, "prompt_tokens": 50, "prefix_hit_tokens": 20},
            **{"prefix_disk_hit_tokens": 16, "prefix_disk_failures": 1, "generated_tokens": 60},
            **{"finished": {"stop": 1}, "experts": experts},
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        pass
