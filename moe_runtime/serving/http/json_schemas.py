"""JSON schemas as the grammar library takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_OF_NAMES = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keys whose value has a schema for each of some names."""
_OF_VALUES = frozenset({"enum", "const", "default", "example", "examples"})
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of texts that the library enforces; any other says what a text means."""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates show calls. Room for spaces is room for a model that finds no next word."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
_OUTER = "root"
_PATTERN_PART = re.compile(r"(?P<unreadable>\\[1-9]|\\k[<{']|\(\?(?:<?[=!]|[>(]))|\\.", re.DOTALL)
"""Back references, look-around, atomic and conditional groups; and any other escape."""


def grammar_schema(schema: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Adds the library's settings to a schema, and removes unknown formats of texts.

    Args:
        schema: as it was given.
        is_strict: keywords that the library lacks stay, and are refused by it; they and patterns
            that it cannot read are left out otherwise.
    """

    def change(one: dict[str, Any]) -> dict[str, Any]:
        kept = dict(one)
        if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
            del kept["format"]
        if not is_strict:
            if not _is_readable(kept.get("pattern", "")):
                del kept["pattern"]
            if isinstance(named := kept.get("patternProperties"), dict):
                kept["patternProperties"] = {
                    pattern: value for pattern, value in named.items() if _is_readable(pattern)
                }
        return kept

    spacing = _ONE_LINE if is_strict else _ONE_LINE | _LENIENT
    return {"x-guidance": spacing} | _changed(schema, change)


def schema_within(part: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema as a schema of its own, whose references still lead into the root."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        to = one.get("$ref")
        if not isinstance(to, str) or to[:2] not in ("#", "#/"):
            return one
        return {**one, "$ref": f"#/$defs/{_OUTER}{to[1:]}"}

    found = _changed(part, change)
    if not isinstance(found, dict) or found == part:
        return found if isinstance(found, dict) else {}
    return {**found, "$defs": {_OUTER: _changed(root, change)}}


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Applies a change to a schema and to all schemas within it."""
    if isinstance(schema, list):
        return [_changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in change(schema).items():
        if key in _OF_VALUES:
            found[key] = value
        elif key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: _changed(one, change) for name, one in value.items()}
        else:
            found[key] = _changed(value, change)
    return found


def _is_readable(pattern: Any) -> bool:
    """Whether a pattern has nothing that no finite automaton matches."""
    parts = _PATTERN_PART.finditer(pattern) if isinstance(pattern, str) else ()
    return not any(part["unreadable"] for part in parts)
