"""What a checkpoint must hold: its keys, the types of its values, and their ranges."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from moe_runtime.errors import CheckpointError

_LONGEST_VALUE = 60


class Kind(NamedTuple):
    """What a value must be.

    Attributes:
        text: for messages.
        fits: whether a value is of this kind.
    """

    text: str
    fits: Callable[[Any], bool]

    def or_none(self) -> "Kind":
        """This kind, or None."""
        return Kind(f"{self.text}, or None", lambda value: value is None or self.fits(value))

    def listed(self) -> "Kind":
        """A list or tuple of this kind."""
        return Kind(
            f"a list, each {self.text}",
            lambda value: type(value) in (list, tuple) and all(map(self.fits, value)),
        )

    def named(self) -> "Kind":
        """A mapping from names to this kind."""
        return Kind(
            f"a mapping of names, each to {self.text}",
            lambda value: (
                isinstance(value, Mapping)
                and all(isinstance(name, str) for name in value)
                and all(map(self.fits, value.values()))
            ),
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(part) for name, part in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


COUNT = Kind("an integer of at least 0", lambda value: type(value) is int and 0 <= value < 1 << 63)
NUMBER = Kind("a finite number", lambda value: type(value) in (int, float) and math.isfinite(value))
AMOUNT = Kind("a finite number of at least 0", lambda v: NUMBER.fits(v) and v >= 0)
TEXT = Kind("text", lambda value: isinstance(value, str))
TENSOR = Kind("a tensor", lambda value: isinstance(value, Tensor))
MAPPING = Kind("a mapping", lambda value: isinstance(value, Mapping))
PLAIN = Kind("plain values", _is_plain)


def require_kinds(
    values: Any, kinds: Mapping[str, Kind], what: str, *, optional: Mapping[str, Kind] | None = None
) -> None:
    """Refuses stored values that are not as they were written.

    Args:
        values: a mapping from names.
        kinds: what the value of each name must be.
        what: the beginning of messages.
        optional: likewise, of names that may be missing.

    Raises:
        CheckpointError: a name is missing or unknown, or a value is of another kind.
    """
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{what} must be a mapping, found {shown(values)}")
    known = {**kinds, **(optional or {})}
    if missing := kinds.keys() - values.keys():
        raise CheckpointError(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown := values.keys() - known.keys():
        raise CheckpointError(f"{what} has unknown keys: {', '.join(sorted(map(shown, unknown)))}")
    for name, value in values.items():
        require_kind(value, known[name], f"{what}: {name}")


def require_kind(value: Any, kind: Kind, what: str) -> None:
    """Refuses one stored value of another kind.

    Raises:
        CheckpointError: it is.
    """
    if not kind.fits(value):
        raise CheckpointError(f"{what} is {shown(value)}, expected {kind.text}")


def require_like(tensors: Mapping[str, Any], own: Mapping[str, Tensor], what: str) -> None:
    """Refuses stored tensors of other names, shapes or types than those they are to replace.

    Raises:
        CheckpointError: one differs; names it.
    """
    require_kinds(tensors, dict.fromkeys(own, TENSOR), what)
    for name, tensor in own.items():
        found, expected = ((*t.shape, t.dtype) for t in (tensors[name], tensor))
        if found != expected:
            raise CheckpointError(f"{what}: {name} is {found}, expected {expected}")


def shown(value: Any) -> str:
    """A value for messages, cut where it is long."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
