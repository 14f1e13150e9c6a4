"""The quantisation part of `config.json`, which is checked as it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch

from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, TensorEntry
from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import CheckpointError, UnsupportedModelError

CONFIG = "quantization_config of config.json"
"""Where a checkpoint says how its weights are quantised, unless another file does."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A part of the configuration; values of another kind are refused, missing ones are None."""

    values: Mapping[str, Any]
    place: str = CONFIG

    def get(self, name: str) -> Any:
        """A value of any kind."""
        return self.values.get(name)

    def text(self, name: str) -> str | None:
        """A text."""
        return self._checked(name, lambda value: isinstance(value, str), "a name")

    def size(self, name: str) -> int | None:
        """A positive whole number."""
        return self._checked(name, _is_size, "a positive whole number")

    def choice(self, name: str, known: Iterable[object]) -> Any:
        """A value that must be among what can be read; 4.0 is not 4, and 1 is not true."""
        value, known = self.get(name), tuple(known)
        if not any(type(value) is type(item) and value == item for item in known):
            self.unsupported(f"{name} {clipped(value)}", " or ".join(map(repr, known)))
        return value

    def group(self, name: str) -> int:
        """Columns of a group; 0 where it is written as -1, all columns of a row."""
        if self.get(name) == -1:
            return 0
        return self.size(name) or self.refuse(name, "-1 or a positive whole number")

    def block(self, name: str) -> tuple[int, int] | None:
        """Rows and columns of a block."""
        expected = "two positive whole numbers, rows and columns of a block"
        value = self._checked(name, _is_pair, expected)
        return value and (value[0], value[1])

    def names(self, name: str) -> list[str]:
        """Texts; an empty list where there are none."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "a list of names")
        return value

    def part(self, name: str) -> Settings:
        """An object, which must be there."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return Settings(value, f"{name} in the {self.place}")

    def _checked(self, name: str, is_sound: Callable[[Any], bool], expected: str) -> Any:
        value = self.get(name)
        if value is not None and not is_sound(value):
            self.refuse(name, expected)
        return value

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raises: a value is not what it must be."""
        found = clipped(self.get(name))
        raise CheckpointError(f"{self.place}: expected {name} to be {expected}, found {found}")

    def unsupported(self, found: str, expected: str) -> NoReturn:
        """Raises: what it says is sound, but nothing that can be read yet."""
        raise UnsupportedModelError(
            f"{self.place}: {found} cannot be read yet; expected {expected}"
        )


def matches(module: str, targets: Iterable[str]) -> bool:
    """Whether a module's name is among names and patterns, which begin with `re:`."""
    for target in targets:
        if target == module:
            return True
        if target.startswith("re:"):
            try:
                found = re.match(target[3:], module)
            except (re.error, OverflowError, RecursionError) as error:
                raise CheckpointError(
                    f"{CONFIG}: expected {clipped(target)} to be a regular "
                    f"expression, found one with a fault: {error}"
                ) from None
            if found:
                return True
    return False


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 2**31


class Contents(ExitStack):
    """Reads the few tensors whose content decides how a weight is read; files stay open."""

    def __init__(self) -> None:
        """Opens nothing yet."""
        super().__init__()
        self._files: dict[Path, BinaryIO] = {}

    def numbers(self, entry: TensorEntry, count: int) -> torch.Tensor:
        """The numbers of a tensor of one dimension."""
        if entry.dtype not in ("I32", "I64") or entry.shape != (count,):
            raise CheckpointError(
                f"{entry.name}: expected I32 or I64 [{count}], found {entry.dtype} "
                f"{list(entry.shape)}"
            )
        try:
            if entry.file not in self._files:
                self._files[entry.file] = self.enter_context(entry.file.open("rb"))
            file = self._files[entry.file]
            file.seek(entry.offset)
            content = bytearray(file.read(entry.num_bytes))
            if len(content) < entry.num_bytes:
                raise EOFError(f"the file ends at byte {entry.offset + len(content)}")
        except (OSError, EOFError) as error:
            raise CheckpointError(f"cannot read {entry.name} from {entry.file}: {error}") from None
        return torch.frombuffer(content, dtype=TORCH_DTYPES[entry.dtype])
