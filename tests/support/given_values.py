"""Finds a value anywhere within what a function was given."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def parts(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Everything within a value, with the name of the field that holds it."""
    yield name, value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name), field.name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from parts(item, str(key))
    elif isinstance(value, list | tuple):
        if all(is_named(item) for item in value):
            yield "names", [item.name for item in value]
        for item in value:
            yield from parts(item, name)
    elif is_named(value):
        yield "name", value.name


def is_named(value: Any) -> bool:
    return isinstance(getattr(value, "name", None), str) and not isinstance(value, Path)


def is_given(expected: Any, given: list[tuple[str, Any]]) -> bool:
    """A value of that type and, if it is a pair, under that name."""
    name, value = expected if isinstance(expected, tuple) else (None, expected)
    return any(
        type(item) is type(value) and item == value and name in (None, held) for held, item in given
    )
