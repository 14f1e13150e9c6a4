"""The journal of a recording: blocks of finished steps, so that a crash costs only the last one.

A block is the length of what follows (8 bytes), its CRC-32 (4 bytes), both little-endian, and a
whole trace file with the steps since the block before. docs/trace-format.md says the same.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moe_runtime.errors import CheckpointError

JOURNAL_SUFFIX = ".part"
_MAGIC = b"MOETRACE"
_FRAME = struct.Struct("<QI")
_MAX_BLOCK_BYTES = 1 << 30


class JournalWriter:
    """Appends blocks to a new file.

    Args:
        path: the file; it must not exist: it may hold what is left of another recording.

    Raises:
        CheckpointError: it exists, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO
        try:
            self._file = path.open("xb")
            self._file.write(_MAGIC)
        except OSError as error:
            raise CheckpointError(
                f"{path}: the trace cannot be written: {error.strerror}"
            ) from error

    def append(self, data: bytes) -> None:
        """Writes a block; when this returns the operating system has it.

        Raises:
            CheckpointError: it cannot be written.
        """
        try:
            self._file.write(_FRAME.pack(len(data), zlib.crc32(data)) + data)
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the trace cannot be written: {error.strerror}"
            ) from error

    def remove(self) -> None:
        """Closes and deletes the file: what it holds was written elsewhere."""
        self._file.close()
        self.path.unlink(missing_ok=True)


def journal_of(path: Path) -> Path:
    """Where the journal of a recording lies."""
    return path.with_name(path.name + JOURNAL_SUFFIX)


def check_no_journal(path: Path) -> None:
    """Refuses to record where an interrupted recording would be overwritten.

    Raises:
        CheckpointError: its journal lies there.
    """
    left = journal_of(path)
    if left.exists():
        raise CheckpointError(
            f"{left}: holds what an interrupted recording left; read it as a trace, then remove it "
            "to record under this name again"
        )


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a journal does; False also for what cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def whole_blocks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The blocks of a journal up to the first that is not whole.

    Raises:
        OSError: the file cannot be read.
    """
    with Path(path).open("rb") as file:
        file.seek(len(_MAGIC))
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            length, checksum = _FRAME.unpack(frame)
            if length > _MAX_BLOCK_BYTES:
                return
            data = file.read(length)
            if len(data) < length or zlib.crc32(data) != checksum:
                return
            yield data
