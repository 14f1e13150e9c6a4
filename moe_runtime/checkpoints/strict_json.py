"""JSON from an untrusted file: strict, bounded in time and memory."""

import json
import re
import reprlib
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_UINT64 = 2**64 - 1

_MAX_NUMBER_CHARS = 1000
_MAX_PATH_CHARS = 4096
# The densest sound input, tensors with the shortest names, has three brackets in 49 bytes. Input of
# nothing but `[],[],` would take more than twenty times its size as Python lists.
_BYTES_PER_BRACKET = 12
_FREE_BRACKETS = 1000
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_CLIPPED = reprlib.Repr()
_CLIPPED.maxstring = 200


def parse_object(raw: bytes, *, has_infinity: bool = False) -> dict[str, Any]:
    """Parses a JSON object; raises `ValueError` for all else, and what `parse_value` refuses."""
    value = parse_value(raw, has_infinity=has_infinity)
    if not isinstance(value, dict):
        raise ValueError(clipped(value))
    return value


def parse_value(raw: bytes, *, has_infinity: bool = False) -> Any:
    """Parses JSON as strictly as the safetensors package parses a header, and more so."""
    if raw.count(b"[") + raw.count(b"{") > len(raw) // _BYTES_PER_BRACKET + _FREE_BRACKETS:
        raise ValueError(f"{len(raw)} bytes of mostly brackets")
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_int=_parse_integer,
            parse_float=_parse_real,
            parse_constant=_parse_infinity if has_infinity else _parse_constant,
        )
        if _SURROGATE_ESCAPE.search(text):
            # Half a surrogate pair is no text: encoding it fails, while a whole pair passes.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("brackets nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair, which is no text") from error
    return value


def nests_deeper(values: Iterable[object], depth: int) -> bool:
    """Says whether lists and objects among the values hold others to more than ``depth`` levels."""
    level = list(values)
    for _ in range(depth):
        children: list[object] = []
        for value in level:
            if isinstance(value, dict):
                children.extend(value.values())
            elif isinstance(value, list):
                children.extend(value)
        if not children:
            return False
        level = children
    return True


def clipped(value: object) -> str:
    """Writes a value as Python would, on one line and cut where it is long, for a message."""
    return _CLIPPED.repr(value)


def one_line(text: str) -> str:
    """Escapes text that would break a message's line or a terminal, and cuts what is no path."""
    return text if text.isprintable() and len(text) <= _MAX_PATH_CHARS else clipped(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; for `json.loads`, which takes the last of two values otherwise."""
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {clipped(key)} twice in one object")
        seen.add(key)
    return unique


def _parse_integer(text: str) -> int | float:
    # Beyond 64 bits, and for -0, JSON readers in other languages see a real number: never a size.
    if len(text) <= len(str(MAX_UINT64)) and text != "-0":
        value = int(text)
        if value <= MAX_UINT64:
            return value
    return _parse_real(text)


def _parse_real(text: str) -> float:
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text)} characters")
    value = float(text)
    if abs(value) > 1e308:
        raise ValueError(f"the number {clipped(text)}, beyond double precision")
    return value


def _parse_infinity(text: str) -> float:
    return _parse_constant(text) if text == "NaN" else float(text)


def _parse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which JSON does not have")
