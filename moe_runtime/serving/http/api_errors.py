"""Errors that clients get, in OpenAI's form."""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_runtime.serving.requests import EngineClosedError, QueueFullError, RequestTooLongError

_MOST_FRAMES = 4
_MOST_MESSAGE = 2000
_STATUS_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Of statuses other than that of an invalid request."""


class ApiError(Exception):
    """A request that is refused or failed.

    ``param`` is the field at fault, ``code`` is for programs. ``logged`` is for the log: messages
    may quote the request.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        is_short = len(message) <= _MOST_MESSAGE
        self.message = message if is_short else f"{message[:_MOST_MESSAGE]}..."
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.logged = logged

    @property
    def kind(self) -> str:
        return _STATUS_TYPES.get(self.status, "invalid_request_error")

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def shutting_down() -> ApiError:
    message, closing = "the server is shutting down", {"connection": "close"}
    return ApiError(message, status=503, code="shutting_down", headers=closing)


def unsupported(param: str, problem: str) -> ApiError:
    """A field asks for something that this model or server cannot do."""
    return FieldError(param, problem, code="unsupported_parameter")


class FieldError(ApiError):
    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{param}: {problem}", param=param, code=code or "invalid_value")


class TooLongError(ApiError):
    """Agents look for these words, and then shorten their conversation."""

    def __init__(self, message: str, length: str, most: int, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.of_anthropic = f"prompt is too long: {length} > {most} maximum"


def too_long(length: str, most: int, param: str) -> TooLongError:
    limit = f"this model's maximum context length is {most} tokens, prompt and answer together"
    return TooLongError(f"{param}: has {length}; {limit}", length, most, param)


def internal_error(error: Exception) -> ApiError:
    """The error of a bug in the server; the log gets its class and the lines of code."""
    frames = deque(traceback.walk_tb(error.__traceback__), maxlen=_MOST_FRAMES)
    name = type(error).__name__
    places = (f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in reversed(frames))
    return ApiError(
        f"{name}: {error}", status=500, code="internal_error", logged=" < ".join((name, *places))
    )


@contextlib.contextmanager
def raised_as_api_error() -> Iterator[None]:
    """Turns other exceptions into an `ApiError`."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        raise internal_error(error) from error


def of_engine(error: Exception) -> ApiError:
    if isinstance(error, QueueFullError):
        return ApiError(str(error), status=429, code="queue_full", headers={"retry-after": "1"})
    if isinstance(error, EngineClosedError):
        return ApiError(str(error), status=503, code="shutting_down")
    if isinstance(error, RequestTooLongError):
        length = f"{error.num_tokens} tokens"
        return TooLongError(str(error), length, error.most_tokens, "max_tokens")
    # Messages of `SamplingOptions` and `GenerationRequest` begin with the field's name.
    word = str(error).partition(" ")[0]
    return ApiError(str(error), param=word if word.replace("_", "").isalpha() else None)
