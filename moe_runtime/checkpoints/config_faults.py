"""What transformers finds wrong with a value of ``config.json``, in our words."""

from __future__ import annotations

import re
from pathlib import Path

from moe_runtime.config import type_in_words
from moe_runtime.errors import CheckpointError

_NO_DTYPE = re.compile(r"module 'torch' has no attribute ('.*')")
_FIELD = re.compile(r"Validation error for field '(\w+)'")
_ONE_TYPE = re.compile(r"expected (\w+), got \w+ \(value: (.*)\)")
_SOME_TYPES = re.compile(r"with value (.*) doesn't match any type in \((.*?)\)\.(?: |$)")
_LIST = re.compile(r"(list|tuple)\[(\w+)((?:, \w+)*)\]")
_TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


def in_our_words(error: CheckpointError, file: Path) -> CheckpointError:
    """The same error in plain words, where a value is of a type that the model's cannot be.

    Args:
        error: raised over what transformers says of the file.
        file: the configuration.

    Returns:
        One that names the key, what was expected and what was found; or the error as it was.
    """
    reason = " ".join(str(error.__cause__).split())
    if unknown := _NO_DTYPE.fullmatch(reason):
        expected = "a floating-point type of torch, such as 'bfloat16'"
        return CheckpointError(f"{file}: expected dtype to be {expected}, found {unknown[1]:.80}")
    field = _FIELD.match(reason)
    if some := _SOME_TYPES.search(reason):  # says what is wrong with each of them, too
        names, found = re.split(r", (?![^\[]*\])", some[2]), some[1]
    elif one := _ONE_TYPE.search(reason):
        names, found = [one[1]], one[2]
    else:
        return error
    names = [re.sub(r"<class '(.*)'>", r"\1", name) for name in names]
    words = [_in_words(name) for name in names if not (name == "int" and "float" in names)]
    expected = " or ".join(dict.fromkeys(filter(None, words)))
    if field is None or not expected:
        return error
    found = _JSON_WORDS.get(found, f"{found:.80}")
    return CheckpointError(f"{file}: expected {field[1]} to be {expected}, found {found}")


def _in_words(name: str) -> str:
    """A type as transformers names it; empty for one that JSON has no words for."""
    if found := _LIST.fullmatch(name):
        count = f"{found[3].count(',') + 1} " if found[3] or found[1] == "tuple" else ""
        kind = type_in_words(_TYPES[found[2]]).removeprefix("a ") if found[2] in _TYPES else "value"
        return f"a list of {count}{kind}s"
    if name == "dict" or name.startswith("transformers."):
        return "an object"
    if name == "NoneType":
        return "null"
    return type_in_words(_TYPES[name]) if name in _TYPES else ""
