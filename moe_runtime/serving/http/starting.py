"""From models' names to a server over TCP, until it is stopped and all have their answers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
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
from moe_runtime.serving.http.kept_responses import KeptResponses
from moe_runtime.serving.http.model_loader import (
    ModelLoader,
    ServeSettings,
    adapters_of,
    names_of,
    user_cache,
)
from moe_runtime.serving.http.model_table import ModelTable, Place
from moe_runtime.serving.http.server import Asked, Log, Server

_LOOK_S = 0.05
_GIVE_BACK_S = 1.0
"""Seconds between two times that freed memory is given back, so that the budget holds for days."""
_CHURN_S, _CHURN_BYTES = 0.25, 2 * 2**20
"""It is given back so often where so much more has become resident meanwhile."""
_GOODBYE_S = 10
"""Seconds in which clients may take what was sent, once all answers are there."""


class AddressError(MoERuntimeError): ...


def listen(host: str, port: int) -> socket.socket:
    """Binds an address, before a model is loaded for it; `accept_clients` comes later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as undo:
            undo.callback(found.close)
            _bind(found, address)
            undo.pop_all()
    except OSError as error:
        raise _unusable(host, port, error) from None
    return found


def accept_clients(listening: socket.socket, backlog: int) -> None:
    """Accepts connections; they wait until the server answers."""
    host, port = listening.getsockname()[:2]
    try:
        # what an address is bound with, its connections inherit: they are no obstacle afterwards
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.listen(backlog)
    except OSError as error:
        raise _unusable(host, port, error) from None


def _bind(unbound: socket.socket, address: tuple[Any, ...]) -> None:
    """Binds an address alone, so that a second server is refused while this one loads.

    Connections of an earlier server may linger; only then is it shared, and the first process that
    listens gets it.
    """
    try:
        unbound.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        unbound.bind(address)


def _unusable(host: str, port: int, error: OSError) -> AddressError:
    reason = error.strerror or error
    return AddressError(
        f"cannot listen at {host} port {port}: {reason}; give another --host or --port"
    )


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(H11Protocol):
    """Ends a connection whose next head is not whole in time; bodies have a limit of their own."""

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
        """The client sends no more: it may wait for its answer, or have gone away; both look alike.

        An interim response, or a comment in a stream, which clients pass over, makes the system of
        one that has gone away refuse the connection. Returns whether the connection stays open.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if cycle.response_started:
            comment = b":\n\n" if Asked.of(cycle.scope).is_stream else b""
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


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    server: Server,
    listening: socket.socket,
    *,
    is_stopping: Callable[[], bool],
    drain_s: float | None,
    is_cut_off: Callable[[], bool] = lambda: False,
) -> None:
    """Answers requests until it is told to stop, then those that were taken.

    ``drain_s`` are seconds that taken requests may still need, None for as long as they take;
    ``is_cut_off`` ends that time.

    Raises:
        RankFailureError: another process of a divided model died or stalled, and requests ended.
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
    running = _Uvicorn(config)

    async def run() -> None:
        serving = asyncio.ensure_future(running.serve([listening]))
        giving = asyncio.ensure_future(_give_back_memory())
        while not is_stopping() and not serving.done() and server.failure is None:
            server.models.unload_idle()
            await asyncio.sleep(_LOOK_S)
        server.drain()
        server.log("draining", {})
        # Clients hear that it drains until the last answer: uvicorn's end closes the address.
        clock = asyncio.get_running_loop().time
        end_s = math.inf if drain_s is None else clock() + drain_s
        while running.server_state.tasks and not serving.done() and clock() < end_s:
            if is_cut_off():
                end_s = clock()
            await asyncio.sleep(_LOOK_S)
        server.shut_down()
        # Without a limit, only clients that do not read their answers are waited for.
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
    """Collects cycles of requests, which keep blocks all over the heap, then gives free pages back.

    What was there before the first request is frozen, so that no request waits.
    """
    if gc.get_freeze_count():
        gc.collect()
    give_back_free_pages()


_BACKLOG = 2048
_BODY_WITH_PICTURES = 64 << 20


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that answers; ``loaded`` are the models themselves, of places that have one."""

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
    """Loads models and answers requests until it is told to stop.

    ``on_ready`` is called when requests are answered from now on, ``on_answered`` when every client
    has its answer or its error.

    Raises:
        MoERuntimeError: a model cannot be loaded, or the address be taken.
        ValueError: an option is out of range, or two models or adapters have one name.
    """
    if settings.prefix_disk_bytes is not None and not settings.engine.reuses_prefixes:
        raise ValueError("--prefix-disk keeps what --no-prefix-cache does not: give one of them")
    if settings.access.shares_prefixes and not (
        settings.access.keys and settings.engine.reuses_prefixes
    ):
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
        # Connections from now on are answered, if a moment later.
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
    # A process that died while none was answered is missed when the engine ends.
    if server.failure is not None:
        raise server.failure
