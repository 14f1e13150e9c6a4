"""What the log says of errors: never a text that a client sent."""

from __future__ import annotations

from typing import Any

from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.schema import known_place

MOST_USER = 100
"""Characters of the name that a client gives its user."""


def log_fields(error: ApiError) -> dict[str, Any]:
    """The code of an error and the field that is at fault.

    Messages quote what a client sent, and so do the names of fields that are none.
    """
    fields = {"error": error.logged or error.code or error.kind}
    place = known_place(error.param or "")
    return {**fields, "param": place} if place else fields
