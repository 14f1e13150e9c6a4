"""Frozen dataclasses from TOML tables; every error names its key in full.

Pydantic would save little: it is strict only for JSON, which has neither dates nor file names that
are not UTF-8.
"""

import dataclasses
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from moe_runtime.config import nearest, type_in_words
from moe_runtime.files import at_home, read_toml, require_file_name

_Config = TypeVar("_Config")

FILE_NAME = "file name"
"""Marks the type of a key that names a file to write: ``Annotated[Path, FILE_NAME]``."""


def read_tree(cls: type[_Config], path: Path, *, settings: tuple[str, ...] = ()) -> _Config:
    """Reads a TOML file as a tree of dataclasses.

    Args:
        cls: a dataclass of numbers, texts, booleans, paths, tuples of these, mappings, or
            dataclasses.
        settings: `key.inner=value` each, value in TOML's notation; they override the file.

    Raises:
        ValueError: the file is not TOML; a key is unknown (the nearest one is named), missing, or
            has a value of the wrong type or out of range.
        OSError: the file cannot be read.
    """
    tree = read_toml(path)
    for setting in settings:
        key, text = split_setting(setting)
        set_key(tree, key, toml_value(text))
    try:
        return build_tree(cls, tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def build_tree(cls: type[_Config], values: Mapping[str, Any], *, where: str = "") -> _Config:
    """Builds a dataclass from a mapping; the counterpart of `dataclasses.asdict`.

    Args:
        where: the dotted name of this table, for messages.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in values:
        if key not in fields:
            raise ValueError(f"unknown key {_dotted(where, key)!r}; {nearest(key, fields)}")
    for name, field in fields.items():
        required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if required and name not in values:
            missing = _first_required(hints[name], _dotted(where, name))
            raise ValueError(f"{f'[{where}]' if where else 'the file'} lacks the key {missing!r}")
    converted = {
        key: _convert(hints[key], value, _dotted(where, key)) for key, value in values.items()
    }
    try:
        return cls(**converted)
    except (ValueError, TypeError) as error:
        # the dataclass's checks name their field without its table
        raise ValueError(f"[{where}]: {error}" if where else str(error)) from None


def _first_required(hint: Any, name: str) -> str:
    """The first key without a default in a missing table."""
    if not dataclasses.is_dataclass(hint):
        return name
    hints = typing.get_type_hints(hint, include_extras=True)
    for field in dataclasses.fields(hint):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            return _first_required(hints[field.name], _dotted(name, field.name))
    return name


def split_setting(setting: str) -> tuple[str, str]:
    """Key and value of `key.inner=value`, the value as it was written."""
    key, equals, text = setting.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ValueError(f"expected KEY=VALUE such as run.steps=100, got {setting!r}")
    return key, text


def toml_value(text: str) -> Any:
    """A value in TOML's notation, or a text without quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key of nested tables, in place; tables that are missing are made."""
    *tables, last = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{key}: {table!r} is not a table")
    tree[last] = value


def lay_over(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(tree)
    for key, value in changes.items():
        below = tree.get(key, {})
        is_table = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = lay_over(below, value) if is_table else value
    return merged


def _convert(hint: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(arguments, value, name)
    if origin is typing.Annotated:
        if FILE_NAME in arguments and isinstance(value, str):
            require_file_name(value, name)
        return _convert(arguments[0], value, name)
    if origin is typing.Literal:
        return _choose(arguments, value, name)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list, got {value!r}")
        inner = arguments[0]
        return tuple(_convert(inner, item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a table, got {value!r}")
        return build_tree(typing.cast(type[Any], hint), value, where=name)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a table, got {value!r}")
        return {key: _convert(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    return _convert_scalar(hint, value, name)


def _convert_union(arguments: tuple[Any, ...], value: Any, name: str) -> Any:
    """`X | None`, and other alternatives."""
    if value is None and type(None) in arguments:
        return None
    options = [argument for argument in arguments if argument is not type(None)]
    if len(options) == 1:
        return _convert(options[0], value, name)
    for option in options:
        try:
            return _convert(option, value, name)
        except ValueError:
            continue
    expected = " or ".join(map(_option_in_words, options))
    raise ValueError(f"{name} must be {expected}, got {value!r}")


def _option_in_words(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    if option in (int, float):
        return type_in_words(option)
    return getattr(option, "__name__", str(option))


def _choose(choices: tuple[Any, ...], value: Any, name: str) -> Any:
    if value in choices:
        return value
    hint = nearest(value, map(str, choices)) if isinstance(value, str) else f"known: {choices}"
    raise ValueError(f"{name} is {value!r}; {hint}")


def _convert_scalar(hint: Any, value: Any, name: str) -> Any:
    if hint is Any:
        return value
    if hint is Path and isinstance(value, str) and value:
        return _path(value, name)
    if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    # a bool is an int in Python, but not in a configuration
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} must be {type_in_words(hint)}, got {value!r}")


def _path(value: str, name: str) -> Path:
    try:
        return Path(at_home(value))
    except ValueError as error:
        raise ValueError(f"{name} is {error}") from None


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Leaves by dotted name, without paths and lists of files."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        elif isinstance(value, tuple):
            if key not in ("files", "held_out_files"):
                yield name, list(value)
        elif not isinstance(value, Path):
            yield name, value
