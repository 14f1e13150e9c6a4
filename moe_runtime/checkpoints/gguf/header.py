"""The header of a GGUF file: metadata, and the places of tensors.

No part of it is trusted: lengths must fit in the rest of the file, and tensors must not overlap.
"""

from __future__ import annotations

import math
import struct
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.errors import CheckpointError, MoERuntimeError, UnsupportedModelError

VERSIONS = (2, 3)
MOST_HEADER_BYTES = 1 << 28  # vocabularies and merges are a few megabytes

_MAGIC = b"GGUF"
_MOST_DIMS = 4
_SIMPLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_SIMPLE |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_LEAST_TENSOR_BYTES = 24
_LEAST_PAIR_BYTES = 13
_MOST_ALIGNMENT = 1 << 16


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor."""

    name: str
    file: Path
    type_id: int  # ggml's type number
    shape: tuple[int, ...]  # row-major sizes: the reverse of the file's order
    offset: int  # first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a file before its tensors."""

    file: Path  # the file, or the first of several
    metadata: dict[str, Any]  # arrays of texts are replaced by their length unless requested
    tensors: list[GgufTensor]
    understood: set[str] = field(default_factory=set, compare=False)  # keys that were used

    @property
    def name(self) -> Any:
        return self.metadata.get("general.architecture")

    @property
    def parts(self) -> dict[str, GgufTensor]:
        """Tensors of the first layer that has them, by name without the layer, such as
        ``attn_q.weight``."""
        found = (t for t in reversed(self.tensors) if t.name.startswith("blk."))
        return {name[2]: t for t in found if len(name := t.name.split(".", 2)) > 2}

    def value(self, key: str, otherwise: Any = None) -> Any:
        """The value of one of the architecture's keys; marks the key as used."""
        self.understood.add(key)
        return self.metadata.get(f"{self.name}.{key}", otherwise)

    def refuse(self, expected: str, found: str) -> NoReturn:
        """Raises: the file lacks something."""
        refuse(self.file, expected, found)

    def unsupported(self, expected: str, found: str) -> NoReturn:
        """Raises: no supported model computes this."""
        refuse(self.file, expected, found, UnsupportedModelError)


def refuse(
    file: Path, expected: str, found: str, kind: type[MoERuntimeError] = CheckpointError
) -> NoReturn:
    raise kind(f"{one_line(str(file))}: expected {expected}, found {found}")


BLOCK_SIZES = {
    **{0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)},
    **{10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)},
    **{16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18)},
    **{21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4)},
    **{27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2), 34: (256, 54), 35: (256, 66)},
    **{39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18)},
}
"""Elements and bytes of a block of every type, by ggml's number."""


def read_header(
    file: Path, beginning: IO[bytes] | None = None, *, with_texts: bool = False
) -> GgufHeader:
    try:
        with nullcontext(beginning) if beginning else file.open("rb") as stream:
            return _Reader(file, stream, file.stat().st_size, with_texts).header()
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error


class _Reader:
    """Reads forwards, and never beyond the end of the file."""

    def __init__(self, file: Path, stream: IO[bytes], file_bytes: int, with_texts: bool) -> None:
        self._with_texts = with_texts
        self._file = file
        self._stream = stream
        self._file_bytes = file_bytes
        self._place = 0

    def header(self) -> GgufHeader:
        magic = self._take(min(4, self._file_bytes), "the first bytes")
        if magic != _MAGIC:
            self._refuse("a GGUF file, which begins with GGUF", clipped(magic.decode("latin-1")))
        version = self._number("<I", "the version")
        if version not in VERSIONS:
            self._refuse(f"GGUF version {' or '.join(map(str, VERSIONS))}", str(version))
        num_tensors = self._count(_LEAST_TENSOR_BYTES, "tensors")
        num_pairs = self._count(_LEAST_PAIR_BYTES, "metadata values")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._text("a key")
            if key in metadata:
                self._refuse(f"{clipped(key)} once", "it twice")
            metadata[key] = self._value(self._number("<I", "a type"), key)
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        is_size = type(alignment) is int and 0 < alignment <= _MOST_ALIGNMENT
        if not is_size or alignment & (alignment - 1):
            expected = f"general.alignment to be a power of two up to {_MOST_ALIGNMENT}"
            self._refuse(expected, clipped(alignment))
        data = -(-self._place // alignment) * alignment
        return GgufHeader(self._file, metadata, self._placed(described, data, alignment))

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, sizes, type and offset after the header."""
        name = self._text("the name of a tensor")
        num_dims = self._number("<I", "a number of dimensions")
        if not 1 <= num_dims <= _MOST_DIMS:
            self._refuse(f"{clipped(name)} to have 1 to {_MOST_DIMS} dimensions", str(num_dims))
        sizes = [self._number("<Q", "a size") for _ in range(num_dims)]
        return name, tuple(sizes[::-1]), self._number("<I", "a type"), self._number("<Q", "a place")

    def _placed(
        self, described: list[tuple[str, tuple[int, ...], int, int]], data: int, alignment: int
    ) -> list[GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, place in described:
            shown = f"tensor {clipped(name)}"
            if name in tensors:
                self._refuse(f"{shown} once", "it twice")
            if type_id not in BLOCK_SIZES:
                self._refuse(f"{shown} to have one of ggml's types", f"number {type_id}")
            codes, size = BLOCK_SIZES[type_id]
            if min(shape) < 1 or shape[-1] % codes:
                self._refuse(f"{shown} to have rows of whole blocks of {codes}", clipped([*shape]))
            num_bytes = math.prod(shape) // codes * size
            if place % alignment or data + place + num_bytes > self._file_bytes:
                found = f"a place {place} after byte {data} of {self._file_bytes}"
                fault = "the file is truncated or damaged, fetch it again"
                self._refuse(f"the {num_bytes} bytes of {shown} in the file", f"{found}; {fault}")
            tensors[name] = GgufTensor(name, self._file, type_id, shape, data + place, num_bytes)
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._refuse(f"tensor {clipped(tensor.name)} apart from others", "them overlapping")
            end = tensor.offset + tensor.num_bytes
        return [*tensors.values()]

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SIMPLE:
            return self._number(_SIMPLE[kind], key)
        if kind == _STRING:
            return self._text(key)
        if kind != _ARRAY:
            self._refuse(f"{clipped(key)} to have a type that GGUF has", f"number {kind}")
        kind = self._number("<I", key)
        if kind in _SIMPLE:
            form = _SIMPLE[kind]
            size = struct.calcsize(form)
            count = self._count(size, f"values of {clipped(key)}")
            return [*struct.unpack(f"<{count}{form[1]}", self._take(count * size, key))]
        if kind != _STRING:
            self._refuse(f"{clipped(key)} to be numbers or texts", f"an array of type {kind}")
        count = self._count(8, f"texts of {clipped(key)}")
        if self._with_texts:
            return [self._text(f"a text of {clipped(key)}") for _ in range(count)]
        for _ in range(count):
            self._take(self._count(1, f"bytes of {clipped(key)}"), key)
        return count

    def _text(self, what: str) -> str:
        length = self._count(1, f"bytes of {what}")
        raw = self._take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{one_line(what)} in UTF-8", clipped(raw[:32].decode("latin-1")))

    def _count(self, least_bytes: int, what: str) -> int:
        """The number of following items, for which the file must have room."""
        count = self._number("<Q", f"a number of {what}")
        if count * least_bytes > min(self._file_bytes, MOST_HEADER_BYTES) - self._place:
            self._refuse(f"as many {one_line(what)} as the file has room for", str(count))
        return count

    def _number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form), what))[0]

    def _take(self, size: int, what: str) -> bytes:
        raw = self._stream.read(size)
        if len(raw) != size:
            self._refuse(f"{one_line(what)}", f"the end of the file at byte {self._file_bytes}")
        self._place += size
        return raw

    def _refuse(self, expected: str, found: str) -> NoReturn:
        refuse(self._file, expected, found)
