"""Responses: JSON, streams of events, and what becomes of both where the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from moe_runtime.serving.http.api_errors import ApiError, raised_as_api_error
from moe_runtime.serving.http.generating import Generation
from moe_runtime.serving.http.server import Asked

CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request whose client disconnected."""


def client_went_away() -> ApiError:
    message = "the client went away"
    return ApiError(message, status=CLIENT_CLOSED_REQUEST, logged=message)


def json_bytes(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


class EventStream(StreamingResponse):
    """Chunks as server-sent events, and ``[DONE]``; a client that goes away cancels the rest."""

    def __init__(
        self, generation: Generation, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> None:
        self._generation = generation
        self._events = self._encoded(chunks)
        super().__init__(
            self._events,
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        Asked.of(scope).is_stream = True
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()
            await self._events.aclose()

    async def _encoded(
        self, chunks: AsyncGenerator[dict[str, Any], None]
    ) -> AsyncGenerator[bytes, None]:
        failure: ApiError | None = client_went_away()
        try:
            try:
                with raised_as_api_error():
                    async with contextlib.aclosing(chunks):
                        async for chunk in chunks:
                            yield b"data: " + json_bytes(chunk) + b"\n\n"
                failure = None
            except ApiError as error:
                # its traceback has this frame: a cycle, which keeps all of the request
                failure = error.with_traceback(None)
                failure.__context__ = None
                yield b"data: " + json_bytes(error.body()) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self._generation.failure = failure


async def whole(
    request: Request, generation: Generation, work: Coroutine[Any, Any, Any]
) -> Response:
    """Waits for an answer, unless the client goes away first."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return json_response(answer.result())
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        generation.cancel()
        for task in (answer, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ApiError):
                await task


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
