"""Files of records to fine-tune on: JSON, JSON Lines and Parquet, on this disk or on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.strict_json import parse_object, parse_value
from moe_runtime.errors import blamed_on
from moe_runtime.files import open_regular, read_bounded

RECORD_FILES = (".jsonl", ".ndjson", ".json", ".parquet")
_MAX_FILE_BYTES = 4 << 30
_ROWS = 1024


def is_of_records(path: Path) -> bool:
    return path.suffix.lower() in RECORD_FILES


def read_records(paths: Iterable[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and content of every record in files, without fields that are null.

    Raises:
        ValueError: a file is not what its name says; names the file and the line or row.
    """
    for path in paths:
        kind = path.suffix.lower()
        if kind == ".parquet":
            found = _rows(path)
        elif kind == ".json" and _begins_list(path):
            found = _listed(path)
        else:
            found = _lines(path)
        for place, record in found:
            yield f"{path}: {place}", {n: v for n, v in record.items() if v is not None}


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                try:
                    record = parse_object(line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"{path}: line {number} {_fault(error, 'not a JSON object')}; expected one "
                        "record a line, or in a .json file a list of records"
                    ) from None
                yield f"line {number}", record


def _fault(error: Exception, what: str) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start + 1})"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"is {what} ({error.msg}: {line}column {error.colno})"
    return f"is {what} ({error})"


def _begins_list(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _listed(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    raw = read_bounded(path, max_bytes=_MAX_FILE_BYTES)
    try:
        records = parse_value(raw.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {_fault(error, 'not JSON')}") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"{path}: record {number} is not a JSON object")
        yield f"record {number}", record


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path}: Parquet files need the package pyarrow: pip install 'moe-runtime[finetune]'"
        ) from None
    number = 0
    with open_regular(path) as file:
        with blamed_on(f"{path}: cannot be read as Parquet"):
            batches = parquet.ParquetFile(file).iter_batches(_ROWS)
        while True:
            with blamed_on(f"{path}: cannot be read as Parquet"):
                batch = next(batches, None)
                rows = [] if batch is None else batch.to_pylist()
            if batch is None:
                return
            for row in rows:
                number += 1
                yield f"row {number}", _without_nulls(row)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every message the fields of all messages."""
    if isinstance(value, dict):
        return {name: _without_nulls(own) for name, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def as_json(value: Any, place: str, what: str) -> Any:
    """A field's value; text is parsed as JSON, as data sets store tools."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: {what} {_fault(error, 'text that is not JSON')}") from None
