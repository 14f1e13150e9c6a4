"""The journal of a recording: blocks of finished steps, so that a crash costs only the last one.

A block is the length of what follows (8 bytes), its CRC-32 (4 bytes), both little-endian, and a
whole trace file with the steps since the block before. docs/trace-format.md says the same.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from moe_runtime.errors import named_failure
from moe_runtime.files import OutputFile, open_regular

_MAGIC = b"MOETRACE"
_FRAME = struct.Struct("<QI")
_MAX_BLOCK_BYTES = 1 << 30


class JournalWriter:
    """Appends blocks to a new file beside a trace, which no other process can write meanwhile.

    Args:
        path: the trace. What a killed process left of its journal gets another name.

    Raises:
        CheckpointError: another process records the trace, or the journal cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with named_failure(path, "trace"):
            self._output = OutputFile(path, is_draft=True)

    def append(self, data: bytes, at: int) -> int:
        """Writes a block; when this returns the operating system has it.

        Args:
            data: the block.
            at: what the call for the block before returned, 0 for the first. What a call that
                failed, or whose answer was lost, has written behind it goes.

        Returns:
            Where the journal ends now.

        Raises:
            CheckpointError: it cannot be written.
        """
        frame = _FRAME.pack(len(data), zlib.crc32(data)) + data
        with named_failure(self._path, "trace"):
            return self._output.write_at(at, frame if at else _MAGIC + frame)

    def remove(self) -> None:
        """Closes and deletes the file: what it holds was written elsewhere."""
        self._output.discard()


def is_journal(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a journal does; False also for what cannot be read."""
    try:
        with open_regular(path) as file:
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
