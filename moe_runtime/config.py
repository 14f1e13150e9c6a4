"""Sizes and modes in configuration, and suggestions for unknown names."""

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import Any

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}b"] = 1000**_power
    _UNITS[_prefix] = _UNITS[f"{_prefix}ib"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

_TOO_MANY_BYTES = 2**63

MemorySize = int | float | str
"""Bytes (``8_000_000_000``), a size (``"7GiB"``), a share of what is free, or ``"auto"``."""


def parse_bytes(text: str, *, needs_unit: bool = False) -> int:
    """Reads a size such as "7GiB", "800MB" or "123456" as a number of bytes.

    `k`, `m`, `g` and `t` alone are binary. `needs_unit` refuses a number below 2**20 without a
    unit: 2 would mean 2GiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"expected a size such as 7GiB, 800MB or a number of bytes, got {text!r}")
    unit = _UNITS[match[2].lower()]
    num_bytes = float(match[1]) * unit
    if num_bytes >= _TOO_MANY_BYTES:
        raise ValueError(f"expected a size below 8 EiB, got {text:.40}")
    if unit == 1 and (num_bytes % 1 or (needs_unit and not match[2] and 0 < num_bytes < 2**20)):
        raise ValueError(f"expected a size with its unit, such as 7GiB or 800MB, got {text!r}")
    return int(num_bytes)


CHOSE = "chose"
"""A progress stage with this prefix is a message to show, without bytes."""


def format_bytes(num_bytes: float, *, up: bool = False) -> str:
    """A number of bytes in binary units with four significant digits.

    Rounded up, it is a budget to type: `parse_bytes` reads no less from it.
    """
    power = min(4, max(0, int(abs(num_bytes)).bit_length() - 1) // 10)
    if not power:
        return f"{num_bytes:.0f} B"
    value = num_bytes / 1024**power
    if up:
        tens = 10 ** max(0, 4 - len(str(int(value))))
        value = -(-int(num_bytes) * tens // 1024**power) / tens
    return f"{value:.4g} {' KMGT'[power]}iB"


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory of a tier: bytes, a share of the free memory in (0, 1], or neither for `auto`.
    Bytes with a share are limited to that share of the free memory."""

    num_bytes: int | None = None
    share: float | None = None

    def resolve(self, available_bytes: int, *, auto_share: float) -> int:
        """The budget in bytes, given what the machine or control group has left."""
        if self.num_bytes is not None and self.share is None:
            return self.num_bytes
        most = int(available_bytes * (auto_share if self.share is None else self.share))
        return most if self.num_bytes is None else min(self.num_bytes, most)

    def part(self, num_bytes: int, *, auto_share: float) -> "Budget":
        """A part of the budget, which shrinks as the whole would if less memory is free."""
        if self.num_bytes is not None and self.share is None:
            return Budget(num_bytes)
        return Budget(num_bytes, auto_share if self.share is None else self.share)


def parse_budget(value: MemorySize | Budget, *, name: str) -> Budget:
    """Reads a memory budget: bytes, "7GiB", a share such as `0.25`, or "auto"."""
    if isinstance(value, Budget):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name} must be bytes, a size, a share or 'auto', got {value!r}")
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return Budget()
        value = _number(value, name)
    if isinstance(value, float) and 0 < value <= 1:
        return Budget(share=value)
    is_bare = isinstance(value, float) and value < 2**20
    if is_bare or not 0 < value < _TOO_MANY_BYTES or value != int(value):
        raise ValueError(
            f"{name} must be a positive number of bytes, a size such as 7GiB, "
            f"a share in (0, 1] or 'auto', got {value!r}"
        )
    return Budget(num_bytes=int(value))


def _number(text: str, name: str) -> int | float:
    """A share (a decimal point and no unit), or a number of bytes."""
    with contextlib.suppress(ValueError):
        if "." in text and not 1 < (value := float(text)) < 2**20:
            return value
    try:
        return parse_bytes(text, needs_unit=True)
    except ValueError as error:
        raise ValueError(
            f"{name} must be a size, a share such as 0.25, or 'auto': {error}"
        ) from None


_MOST_SHOWN = 80
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Callable: "a function",
    type(None): "None",
}


def type_in_words(kind: type) -> str:
    """A type's name in messages."""
    package = kind.__module__.partition(".")[0]
    return _WORDS.get(kind, f"{package}.{kind.__name__}")


def is_number(value: Any, kind: type = Real) -> bool:
    """Whether a value is a finite `numbers.Real` (or `Integral`), and no bool."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return isinstance(value, Integral) or math.isfinite(value)


def require_types(kinds: Mapping[str, tuple[type, ...]], given: Mapping[str, object]) -> None:
    """Refuses options with wrong types; bools are not numbers."""
    for name, expected in kinds.items():
        value = given[name]
        if isinstance(value, expected) and (bool in expected or not isinstance(value, bool)):
            continue
        named = [kind for kind in expected if not (kind is int and float in expected)]
        words = " or ".join(type_in_words(kind) for kind in named)
        found = " ".join(repr(value).split())
        raise TypeError(f"{name} must be {words}, got {found:.{_MOST_SHOWN}}")


SHARES = ("auto", "even", "adaptive")
ACTIVATIONS = ("exact", "int8")
"""Activations for products with quantised weights: exact, or rounded to int8."""
CACHE_CODES = ("none", "planes")
KV_CACHES = ("exact", "int8")
"""Keys and values: as computed, or rounded to int8 with a scale for 32 values."""
STAND_IN = "stand-in"
MISSES = ("device", "auto", STAND_IN)
DRAFTS = ("none", "lookup", "mtp")
"""Drafts other than models; a model is named by its folder, file, or name on the hub."""


def check_draft(name: str | os.PathLike[str]) -> None:
    """Refuses a name that is neither a draft nor a model, such as a mistyped word."""
    text = os.fspath(name)
    if os.sep not in text and text not in DRAFTS and not os.path.exists(name):
        raise ValueError(
            f"unknown draft {text!r}: {nearest(text, DRAFTS)}; or a model: its folder, its file or "
            "its name on the hub (OWNER/NAME)"
        )


_CACHE_AWARE = "cache-aware:"


def parse_routing(text: str) -> float:
    """The margin of `cache-aware:MARGIN`, in (0, 1]; 0 for `exact`."""
    if text == "exact":
        return 0.0
    with contextlib.suppress(ValueError):
        if text.startswith(_CACHE_AWARE) and 0 < (share := float(text[len(_CACHE_AWARE) :])) <= 1:
            return share
    raise ValueError(
        "routing must be exact, or cache-aware:LAMBDA with a LAMBDA in (0, 1] such as "
        f"cache-aware:0.1, got {text!r}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion for a mistyped name, and all known names."""
    names = sorted(known)
    close = [one for one in names if name and one.startswith(name.lower())]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names)}"


def require_known(what: str, name: str, known: Iterable[str]) -> None:
    """Refuses an unknown name, with a suggestion."""
    if name not in (names := tuple(known)):
        raise ValueError(f"unknown {what} {name!r}: {nearest(name, names)}")


class PrefetchMode(StrEnum):
    """The mode of prefetching."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "enforce"
    AUTO = "auto"


def parse_mode(name: str) -> PrefetchMode:
    require_known("prefetch mode", name, (mode.value for mode in PrefetchMode))
    return PrefetchMode(name)
