"""The schema of results files, ``schema.json``, and a check of values against it.

The keywords of JSON Schema that the file uses are all that is known here; an unknown one is an
error, so that nothing in the schema goes unchecked.
"""

import json
from pathlib import Path
from typing import Any

_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_LARGEST = 1e100  # room to multiply and divide
_KNOWN = {
    *("$schema", "$id", "title", "type", "const", "enum", "minimum", "required"),
    *("properties", "additionalProperties", "items"),
}


def read_schema() -> dict[str, Any]:
    """The JSON Schema of results files."""
    return json.loads(Path(__file__).with_name("schema.json").read_text("utf-8"))


def require_valid(value: Any, schema: dict[str, Any], place: str = "results") -> None:
    """Checks a value read from JSON.

    Args:
        value: any value of JSON.
        schema: what it must be.
        place: where it lies, for the message.

    Raises:
        ValueError: it is something else; the message says where and what was expected.
        NotImplementedError: the schema has a keyword that is not known here.
    """
    if unknown := schema.keys() - _KNOWN:
        raise NotImplementedError(f"{place}: keywords of JSON Schema not known: {sorted(unknown)}")
    _require_kind(value, schema, place)
    if isinstance(value, dict):
        _require_properties(value, schema, place)
    elif isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            require_valid(item, schema["items"], f"{place}[{number}]")


def _require_kind(value: Any, schema: dict[str, Any], place: str) -> None:
    kinds = schema.get("type", list(_TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    # For Python true is a number, for JSON it is not.
    fits = (
        isinstance(value, _TYPES[kind]) and isinstance(value, bool) <= (kind == "boolean")
        for kind in kinds
    )
    if not any(fits):
        raise ValueError(f"{place}: expected {' or '.join(kinds)}, got {_shown(value)}")
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and value not in allowed:
        raise ValueError(
            f"{place}: expected {' or '.join(map(repr, allowed))}, got {_shown(value)}"
        )
    if isinstance(value, int | float) and not abs(value) <= _LARGEST:
        raise ValueError(f"{place}: expected a number up to {_LARGEST:g}, got {_shown(value)}")
    if "minimum" in schema and value < schema["minimum"]:
        raise ValueError(f"{place}: expected at least {schema['minimum']}, got {_shown(value)}")


def _require_properties(value: dict[str, Any], schema: dict[str, Any], place: str) -> None:
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        raise ValueError(f"{place}: lacks {', '.join(missing)}")
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in known:
            require_valid(item, known[name], f"{place}.{name}")
        elif rest is False:
            raise ValueError(
                f"{place}: has {_shown(name)}, which is unknown; known are {', '.join(known)}"
            )
        elif isinstance(rest, dict):
            require_valid(item, rest, f"{place}.{name}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
