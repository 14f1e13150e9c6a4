"""The application: endpoints behind the gate, and errors in OpenAI's form."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from moe_runtime.serving.http.api_errors import ApiError, internal_error
from moe_runtime.serving.http.endpoints import Endpoints
from moe_runtime.serving.http.gate import RequestGate
from moe_runtime.serving.http.responding import error_response
from moe_runtime.serving.http.server import Server


def make_app(server: Server) -> ASGIApp:
    """An ASGI application that answers requests to a server."""

    def failed(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(request, error)
        request.scope["log"]["failure"] = api_error
        return error_response(api_error)

    routes = Endpoints(server).routes()
    app = Starlette(
        routes=routes,
        exception_handlers={
            ApiError: failed,
            HTTPException: failed,
            Exception: failed,
        },
    )
    app.router.redirect_slashes = False
    return RequestGate(app, server, frozenset(route.path for route in routes))


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        asked = f"{request.method} {request.scope['path'][:200]}"
        known = "see /v1/models, /v1/completions, /v1/chat/completions, /metrics"
        return ApiError(
            f"{asked}: {error.detail}; {known}",
            status=error.status_code,
            code="unknown_url",
            headers=dict(error.headers or {}),
        )
    return internal_error(error)
