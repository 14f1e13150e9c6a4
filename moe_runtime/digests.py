"""Digests of stored state: what is read is what was written, or its file is named and refused.

A digest is a CRC-32. It finds every change within 32 neighbouring bits, and misses one in 2**32 of
all others. Zip archives (``.pt``, ``.npz``) hold one of each member, so it costs nothing to write
them, and reading one takes a quarter of `torch.load` longer; blake2b would take more than the
reading itself. It is for faults and mistakes: it does not protect from forgery.

A folder of several files has them in ``digests.json``, one file for each process that wrote.
"""

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from moe_runtime.errors import CheckpointError
from moe_runtime.files import open_regular, read_bounded, write_text

ZIP_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    OverflowError,
    RuntimeError,
    SyntaxError,
    ValueError,
)
"""What zipfile, zlib and numpy raise for bytes that are not what they claim to be.

RuntimeError stands for members that are encrypted or packed in a way that zipfile does not know.
"""
_FOLDER_FILES = "digests*.json"
_MAX_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def digest(content: bytes | memoryview, before: str = "") -> str:
    """The digest of some bytes: eight hexadecimal digits.

    Args:
        content: the bytes.
        before: digest of what comes before them, if anything does.
    """
    return f"{zlib.crc32(content, int(before or '0', 16)):08x}"


def check_zip(file: BinaryIO) -> None:
    """Compares every member of a zip archive with its digest, and rewinds the file.

    Raises:
        Exception: one of `ZIP_DAMAGE`, when a member is not what was written.
    """
    with zipfile.ZipFile(file) as archive:
        # torch passes over the bytes of a member that is marked as a folder
        folders = (member.filename for member in archive.infolist() if member.external_attr & 0x10)
        damaged = next(folders, None) or archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} is not what was written")
    file.seek(0)


def write_digests(folder: Path, names: Iterable[str], *, writer: int = 0) -> None:
    """Writes the digests of files of a folder into it.

    Args:
        folder: with the files.
        names: of the files.
        writer: number of this process, where several write to the folder.

    Raises:
        OSError: a file cannot be read or written.
    """
    found = {name: _digest_of_file(folder / name) for name in sorted(names)}
    name = f"digests-{writer}.json" if writer else "digests.json"
    write_text(folder / name, json.dumps(found, indent=1) + "\n")


def check_digests(folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Compares the files of a folder with the digests in it; none are checked where it has none.

    Args:
        folder: as it was written.
        part: of the files, which this process checks.
        num_parts: number of processes that check a part each.

    Raises:
        CheckpointError: a file is not what was written, or missing; names it.
    """
    expected: dict[str, tuple[str, str]] = {}
    for path in sorted(folder.glob(_FOLDER_FILES)):
        try:
            found = json.loads(read_bounded(path, max_bytes=_MAX_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: the digests cannot be read: {error}") from None
        names = found.items() if isinstance(found, dict) else [("", None)]
        if not all(name == os.path.basename(name) and isinstance(d, str) for name, d in names):
            raise CheckpointError(f"{path}: is damaged, expected digests by the names of files")
        expected |= {name: (text, path.name) for name, text in found.items()}
    for name in sorted(expected)[part::num_parts]:
        path, (text, source) = folder / name, expected[name]
        try:
            is_same = _digest_of_file(path) == text
        except OSError as error:
            reason = f"cannot be read ({error.strerror}), {source} beside it names it"
            raise CheckpointError(f"{path}: {reason}") from error
        if not is_same:
            raise CheckpointError(
                f"{path}: is damaged or was changed: {source} beside it has another digest of it; "
                f"restore it, or remove {source} if the change is meant"
            )


def _digest_of_file(path: Path) -> str:
    found = ""
    with open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            found = digest(block, found)
    return found
