"""Serves over TCP until somebody stops it; whoever is being answered gets the rest."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import math
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from moe_runtime.allocator import give_back_free_pages
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.budget import resident_bytes
from moe_runtime.serving.http.app import make_app
from moe_runtime.serving.http.server import Server

_LOOK_S = 0.05
_GIVE_BACK_S = 1.0
"""Seconds between two times that freed memory is given back, so that the budget holds for days."""
_CHURN_S, _CHURN_BYTES = 0.25, 2 * 2**20
"""It is given back so often where so much more has become resident meanwhile."""
_GOODBYE_S = 10
"""Seconds in which clients may take what was sent, once all answers are there."""


class AddressError(MoERuntimeError):
    """The server cannot listen at an address."""


def listen(host: str, port: int) -> socket.socket:
    """Takes an address, before a model is loaded for it; `accept_clients` comes later.

    Args:
        host: name or address.
        port: 0 for any that is free.

    Raises:
        AddressError: it is taken, or none of this machine.
    """
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
    """Whoever calls from now on waits for an answer instead of being refused.

    Raises:
        AddressError: somebody else answers there since.
    """
    host, port = listening.getsockname()[:2]
    try:
        # what an address is bound with, its connections inherit: they are no obstacle afterwards
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.listen(backlog)
    except OSError as error:
        raise _unusable(host, port, error) from None


def _bind(unbound: socket.socket, address: tuple[Any, ...]) -> None:
    """Takes an address for itself, so that a second server is refused while this one loads.

    Connections of a server that was there before may linger; then, and only then, it has to be
    shared, and who listens first has it.
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
    """The address as clients write it."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Protocol(H11Protocol):
    """Ends a connection whose next head is not whole in time; bodies have a limit of their own.

    Args:
        head_seconds: from the first byte of a head, or from the beginning of the connection.
        options: of uvicorn.
    """

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
        """The client sends no more: it may wait for its answer, or have gone away.

        Both look alike until something is sent. An interim response, or a stream's comment, which
        clients pass over, makes the system of one that has gone away refuse the connection.

        Returns:
            Whether the connection stays open.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        cycle.keep_alive = False
        if cycle.response_started:
            self.transport.write(self.conn.send(h11.Data(cycle.scope.get("comment", b""))) or b"")
        elif self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._look_after()
        return True

    def _look_after(self) -> None:
        """Ends a connection that the client's system refused."""
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
    """Leaves signals to the command."""

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

    Args:
        server: its models' engines stay the caller's to close.
        listening: a socket that is bound.
        is_stopping: whether to take no more requests; looked at all the time.
        drain_s: seconds that taken requests may still need; None for as long as they take.
        is_cut_off: whether they get no more time; looked at all the time then.
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
    with server.worker, server.grammar_worker:
        uvicorn_server = _Uvicorn(config)
        asyncio.run(_serve(uvicorn_server, server, listening, is_stopping, drain_s, is_cut_off))


async def _serve(
    uvicorn_server: uvicorn.Server,
    server: Server,
    listening: socket.socket,
    is_stopping: Callable[[], bool],
    drain_s: float | None,
    is_cut_off: Callable[[], bool],
) -> None:
    serving = asyncio.ensure_future(uvicorn_server.serve([listening]))
    giving = asyncio.ensure_future(_give_back_memory())
    while not is_stopping() and not serving.done():
        await asyncio.sleep(_LOOK_S)
    server.drain()
    server.log("draining", {})
    # Whoever asks hears that it drains until the last answer: uvicorn's own end closes the address.
    clock = asyncio.get_running_loop().time
    end_s = math.inf if drain_s is None else clock() + drain_s
    while uvicorn_server.server_state.tasks and not serving.done() and clock() < end_s:
        if is_cut_off():
            end_s = clock()
        await asyncio.sleep(_LOOK_S)
    server.shut_down()
    # Without an end of its own, it is clients who do not take the rest that are waited for now.
    left_s = _GOODBYE_S if drain_s is None else max(round(end_s - clock()), 1)
    uvicorn_server.config.timeout_graceful_shutdown = left_s
    uvicorn_server.should_exit = True
    await serving
    giving.cancel()


async def _give_back_memory() -> None:
    clock = asyncio.get_running_loop().time
    given_s, resident = clock(), resident_bytes()
    while True:
        await asyncio.sleep(_CHURN_S)
        if clock() - given_s >= _GIVE_BACK_S or resident_bytes() > resident + _CHURN_BYTES:
            await asyncio.to_thread(_collect_garbage)
            given_s, resident = clock(), resident_bytes()


def _collect_garbage() -> None:
    """Frees what waits for the garbage collector, then pages that are free.

    Cycles of requests that came to nothing keep blocks all over the heap. What was there before
    the first request is passed over, so that nobody waits.
    """
    if gc.get_freeze_count():
        gc.collect()
    give_back_free_pages()
