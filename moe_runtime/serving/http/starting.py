"""Starts a server over TCP from names of models, runs it, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_runtime.allocator import give_back_free_pages
from moe_runtime.checkpoints.opening import find_checkpoint
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.budget import resident_bytes
from moe_runtime.inference.lossy import LossyRules
from moe_runtime.serving.digest_files import DigestFiles
from moe_runtime.serving.http.endpoints import make_app
from moe_runtime.serving.http.model_loader import (
    ModelLoader,
    ServeSettings,
    adapters_of,
    names_of,
    user_cache,
)
from moe_runtime.serving.http.model_table import ModelTable
from moe_runtime.serving.http.served_model import Place
from moe_runtime.serving.http.server import KeptResponses, Log, RequestState, Server

_LOOK_S = 0.05
_GIVE_BACK_S = 1.0
"""Seconds after which freed memory goes back to the system, so that the budget holds for days."""
_CHURN_S, _CHURN_BYTES = 0.25, 2 * 2**20
"""Freed memory goes back sooner when resident memory grows by so many bytes."""
_GOODBYE_S = 10
"""Seconds in which clients may read the ends of their answers."""


class AddressError(MoERuntimeError): ...


def listen(host: str, port: int) -> socket.socket:
    """Binds an address before models load; `accept_clients` follows."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as undo:
            undo.callback(found.close)
            # Without SO_REUSEADDR, a second server is refused while this one loads. Connections of
            # an earlier server may linger: then the first server that listens gets the address.
            try:
                found.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                found.bind(address)
            undo.pop_all()
    except OSError as error:
        raise _unusable(host, port, error) from None
    return found


def accept_clients(listening: socket.socket, backlog: int) -> None:
    """Accepts connections; they wait until the server answers."""
    host, port = listening.getsockname()[:2]
    try:
        # Connections inherit the option, so that a later server can bind the address.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.listen(backlog)
    except OSError as error:
        raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError) -> AddressError:
    reason = error.strerror or error
    return AddressError(
        f"cannot listen at {host} port {port}: {reason}; give another --host or --port"
    )


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(H11Protocol):
    """Limits the time of heads, and finds clients that have disconnected."""

    def __init__(self, *, head_seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._head_seconds = head_seconds
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it waits for its answer, or it has disconnected.

        Clients skip interim responses, and comments in streams. Such a message makes the system of
        a disconnected client reset the connection. Returns whether the connection stays open.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if cycle.response_started:
            comment = b":\n\n" if RequestState.of(cycle.scope).is_stream else b""
            self.transport.write(self.conn.send(h11.Data(comment)) or b"")
        elif self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look_after()
        return True

    def _look_after(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_S, self._look_after)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self._head_seconds, self.transport.close)

    def _forget(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def serve(
    server: Server,
    listening: socket.socket,
    *,
    is_stopping: Callable[[], bool],
    drain_s: float | None,
    is_cut_off: Callable[[], bool] = lambda: False,
) -> None:
    """Answers requests until ``is_stopping``, then drains.

    Running requests have ``drain_s`` seconds (None for no limit) or until ``is_cut_off``.

    Raises:
        RankFailureError: another process of a divided model died or stalled.
    """
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        make_app(server),
        http=functools.partial(_Protocol, head_seconds=server.limits.head_seconds),  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
    )
    running = uvicorn.Server(config)
    running.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]

    async def run() -> None:
        serving = asyncio.ensure_future(running.serve([listening]))
        giving = asyncio.ensure_future(_give_back_memory())
        while not is_stopping() and not serving.done() and server.failure is None:
            server.models.unload_idle()
            await asyncio.sleep(_LOOK_S)
        server.drain()
        server.log("draining", {})
        # The address stays open, and new requests get an error, until the last answer.
        clock = asyncio.get_running_loop().time
        end_s = math.inf if drain_s is None else clock() + drain_s
        while running.server_state.tasks and not serving.done() and clock() < end_s:
            if is_cut_off():
                end_s = clock()
            await asyncio.sleep(_LOOK_S)
        server.shut_down()
        # Without a limit, all answers are complete, and only slow clients are left.
        left_s = _GOODBYE_S if drain_s is None else max(round(end_s - clock()), 1)
        config.timeout_graceful_shutdown = left_s
        running.should_exit = True
        await serving
        giving.cancel()

    with contextlib.closing(server.models), server.worker, server.grammar_worker:
        asyncio.run(run())
    if server.failure is not None:
        raise server.failure


async def _give_back_memory() -> None:
    clock = asyncio.get_running_loop().time
    given_s, resident = clock(), resident_bytes()
    while True:
        await asyncio.sleep(_CHURN_S)
        if clock() - given_s >= _GIVE_BACK_S or resident_bytes() > resident + _CHURN_BYTES:
            await asyncio.to_thread(_collect_garbage)
            given_s, resident = clock(), resident_bytes()


def _collect_garbage() -> None:
    # Cycles of requests keep pages all over the heap. Older objects are frozen, so this is fast.
    if gc.get_freeze_count():
        gc.collect()
    give_back_free_pages()


_BACKLOG = 2048
_BODY_WITH_PICTURES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers; ``loaded`` are the models that are loaded."""

    address: str
    places: Sequence[Place]
    loaded: Sequence[Any]


def run_server(
    settings: ServeSettings,
    *,
    log: Log,
    on_ready: Callable[[Ready], None],
    is_stopping: Callable[[], bool],
    is_cut_off: Callable[[], bool] = lambda: False,
    on_answered: Callable[[], None] = lambda: None,
    progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Loads models and answers requests until ``is_stopping``.

    Calls ``on_ready`` when the server answers requests, and ``on_answered`` when every client has
    its answer or error.

    Raises:
        MoERuntimeError: a model cannot be loaded, or the address cannot be used.
        ValueError: an option is out of range, or two models or adapters have the same name.
    """
    reuses_prefixes = settings.engine.reuses_prefixes
    if settings.prefix_disk_bytes is not None and not reuses_prefixes:
        raise ValueError("--prefix-disk needs the prefix cache: leave --no-prefix-cache out")
    if settings.access.shares_prefixes and not (settings.access.keys and reuses_prefixes):
        raise ValueError(
            "--share-prefixes shares the prefix cache between API keys: give --api-keys, and leave "
            "--no-prefix-cache out"
        )
    if settings.engine.exact:
        LossyRules.refuse_exact(settings.loading)
    names = names_of(settings.models, settings.names)
    choices = adapters_of(settings.adapters, names)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(listen(settings.host, settings.port))
        folders = [find_checkpoint(model, progress=progress) for model in settings.models]
        loader = stack.enter_context(
            contextlib.closing(ModelLoader(settings, names, folders, choices, progress))
        )
        if not settings.on_demand:
            loader.load_all()
        most_open = settings.engine.most_running + settings.engine.most_waiting
        limits = replace(settings.limits, choices=min(settings.limits.choices, most_open))
        body_bytes = settings.body_bytes
        if body_bytes is None:
            is_seeing = any(place.takes_pictures for place in loader.places)
            body_bytes = _BODY_WITH_PICTURES if is_seeing else limits.body_bytes
        responses = None
        if (disk_bytes := settings.prefix_disk_bytes) is not None:
            responses = DigestFiles(user_cache("prefixes"), disk_bytes, "responses")
        server = Server(
            models=ModelTable(loader.places, loader, idle_s=settings.idle_s, log=log),
            limits=replace(limits, body_bytes=body_bytes),
            access=settings.access,
            log=log,
            loads_adapters=settings.loads_adapters,
            is_divided=settings.is_divided,
            kept=KeptResponses(responses),
        )
        accept_clients(listening, _BACKLOG)
        on_ready(Ready(address_of(listening), loader.places, loader.loaded()))
        serve(
            server,
            listening,
            is_stopping=is_stopping,
            is_cut_off=is_cut_off,
            drain_s=settings.drain_s,
        )
        on_answered()
    # The end of the engine may find that another process has died.
    if server.failure is not None:
        raise server.failure
