"""Errors in OpenAI's form: what a client reads where a request is refused or fails."""

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
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request that is refused or failed: what was expected, what came and what to change.

    ``param`` is the field at fault, ``code`` a word for programs; ``logged`` is what the log says
    instead, nothing that a client sent.
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
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def shutting_down() -> ApiError:
    message, closing = "the server is shutting down", {"connection": "close"}
    return ApiError(message, status=503, code="shutting_down", headers=closing)


def unsupported(param: str, problem: str) -> ApiError:
    """A field asks for what this model or this server cannot do."""
    return FieldError(param, problem, code="unsupported_parameter")


class FieldError(ApiError):
    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{param}: {problem}", param=param, code=code or "invalid_value")


class TooLongError(ApiError):
    """In the words that agents look for, which then shorten their conversation."""

    def __init__(self, message: str, length: str, most: int, param: str) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")
        self.of_anthropic = f"prompt is too long: {length} > {most} maximum"


def too_long(length: str, most: int, param: str) -> TooLongError:
    limit = f"this model's maximum context length is {most} tokens, prompt and answer together"
    return TooLongError(f"{param}: has {length}; {limit}", length, most, param)


def internal_error(error: Exception) -> ApiError:
    """The error that a client gets for a bug of the server.

    The log gets its class and where it came from: the message may quote a request.
    """
    frames = deque(traceback.walk_tb(error.__traceback__), maxlen=_MOST_FRAMES)
    name = type(error).__name__
    places = (f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in reversed(frames))
    return ApiError(
        f"{name}: {error}", status=500, code="internal_error", logged=" < ".join((name, *places))
    )


@contextlib.contextmanager
def raised_as_api_error() -> Iterator[None]:
    """Turns any other ``Exception`` within the block into an `ApiError`."""
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
