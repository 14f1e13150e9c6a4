"""What every request passes: keys and host names, the length of its body, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.responding import error_response
from moe_runtime.serving.http.schema import known_place
from moe_runtime.serving.http.server import Asked, Server

_OPEN_PATHS = frozenset({"/", "/health", "/ping"})
"""What reveals no text."""
_BODIES_AT_ONCE = 4
"""Bodies of the greatest length that are read at a time; no memory is reserved for more."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]]*)(:[0-9]*)?")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics"})


class RequestGate:
    """Lets requests through to an application; metrics name ``paths``, and no others."""

    def __init__(self, app: ASGIApp, server: Server, paths: Collection[str] = ()) -> None:
        self._app = app
        self._server = server
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started_s = time.perf_counter()
        request = Request(scope, receive)
        origin = self._shared_origin(request)
        status = 499  # the client disconnected
        end_s = asyncio.get_running_loop().time() + self._server.limits.seconds
        asked = scope["asked"] = Asked(request_id=_request_id(request), deadline_s=end_s)

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", asked.request_id.encode())
                message["headers"] = [*message.get("headers", ()), own]
                if origin:
                    shared = (b"access-control-allow-origin", origin.encode("latin-1"))
                    message["headers"] += [shared, (b"vary", b"origin")]
            try:
                async with asyncio.timeout(self._server.limits.sending_seconds):
                    await send(message)
            except TimeoutError:
                problem = "the client takes nothing of the answer"
                asked.failure = ApiError(problem, status=499, logged=problem)
                raise ConnectionError(problem) from None

        async def receive_some() -> Message:
            message = await receive()
            self._count(asked, len(message.get("body", b"")))
            return message

        try:
            refused = self._refusal(request, origin, asked)
            if refused is not None:
                await refused(scope, receive, answer)
            else:
                await self._app(scope, receive_some, answer)
        finally:
            self._server.forget_body(asked)
            self._record(request, status, asked, time.perf_counter() - started_s)

    def _count(self, asked: Asked, num_bytes: int) -> None:
        """Notes a part of a body; it has an end, and so have those of all requests together."""
        server, most = self._server, self._server.limits.body_bytes
        asked.body_bytes += num_bytes
        server.num_body_bytes += num_bytes
        if asked.body_bytes > most:
            raise _too_long(most)
        if server.num_body_bytes > _BODIES_AT_ONCE * most:
            raise ApiError(
                f"bodies of {_BODIES_AT_ONCE * most} bytes are being read, as many as may be; "
                "try again later",
                status=429,
                code="queue_full",
                headers={"retry-after": "1", "connection": "close"},
            )

    def _refusal(self, request: Request, origin: str | None, asked: Asked) -> Response | None:
        access, most = self._server.access, self._server.limits.body_bytes
        host = _host(request)
        if access.hosts is not None and host and host not in access.hosts:
            # A page of another site whose name was made to lead here. Browsers always give one.
            message = "this name of the server is not known; call it by its address"
            return error_response(ApiError(message, status=403, code="unknown_host"))
        if request.method == "OPTIONS" and origin:
            return Response(status_code=204, headers=_preflight(request))
        if {"content-length", "transfer-encoding"} <= set(request.headers):
            # Servers before this one may see another end of the body, and another request in it.
            problem = "a body has content-length or transfer-encoding, got both"
            closing = {"connection": "close"}
            return error_response(ApiError(problem, code="two_lengths", headers=closing))
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > most:
            return error_response(_too_long(most))
        asked.client = request.client.host if request.client else ""
        key = _given_key(request)
        if access.keys and request.scope["path"] not in _OPEN_PATHS:
            # all are compared, so that the time tells nothing
            same = [hmac.compare_digest(key.encode(), known.encode()) for known in access.keys]
            if not any(same):
                message = "expected one of the server's keys: Authorization: Bearer KEY"
                headers = {"www-authenticate": "Bearer"}
                return error_response(
                    ApiError(message, status=401, code="invalid_api_key", headers=headers)
                )
            asked.client = str(same.index(True))
        asked.owner = access.owner_of(key)
        return None

    def _shared_origin(self, request: Request) -> str | None:
        origin, origins = request.headers.get("origin"), self._server.access.origins
        return origin if origin and (origin in origins or "*" in origins) else None

    def _record(self, request: Request, status: int, asked: Asked, seconds: float) -> None:
        route, path = request.scope.get("route"), request.scope["path"]
        path = getattr(route, "path", path if path in self._paths else "other")
        generation, failure = asked.generation, asked.failure
        if generation is not None and generation.failure is not None:
            # a stream had begun as a success; what became of it counts
            status = generation.failure.status
            failure = failure or generation.failure
        self._server.metrics.responses.labels(path, str(status)).inc()
        fields: dict[str, Any] = {
            "method": request.method,
            "path": request.scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
            "id": asked.request_id,
        }
        if generation is not None:
            usage = generation.usage
            fields |= {
                "model": generation.model.name,
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "new_tokens": usage.completion_tokens,
                "finish": ",".join(generation.finish_reasons) or "none",
            }
        if asked.user:
            fields["user"] = asked.user
        if failure is not None:
            fields |= log_fields(failure)
        if status >= 400 or path not in _QUIET_PATHS:
            self._server.log("request", fields)


def log_fields(error: ApiError) -> dict[str, Any]:
    """What the log says of an error: its code and the field at fault.

    Messages and names of unknown fields quote what a client sent, so they are left out.
    """
    fields = {"error": error.logged or error.code or error.kind}
    place = known_place(error.param or "")
    return {**fields, "param": place} if place else fields


def _given_key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else scheme


def _too_long(most: int) -> ApiError:
    message = f"the body is longer than the {most} bytes that serve's --max-body lets it have"
    return ApiError(message, status=413, code="body_too_long", headers={"connection": "close"})


def _host(request: Request) -> str:
    host = request.headers.get("host", "").lower()
    found = _HOST.fullmatch(host)
    return host if found is None else found[1]


def _request_id(request: Request) -> str:
    """The client's own name of a request where it may stand in a log, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _preflight(request: Request) -> dict[str, str]:
    """What a page may send: OpenAI's own client has headers of its own, whatever they are."""
    wanted = request.headers.get("access-control-request-headers", "authorization, content-type")
    return {
        "access-control-allow-headers": wanted,
        "access-control-allow-methods": "GET, POST",
        "access-control-max-age": "600",
    }
