"""CRC-32 digests of stored state: a file that differs from what was written is refused by name.

They find faults and mistakes and do not protect from forgery. Zip archives (`.pt`, `.npz`) have one
of each member; a folder has `digests.json`, one file for each process that wrote.
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
"""Exceptions of zipfile, zlib and numpy for damaged content.

RuntimeError is raised for encrypted members and unknown compression.
"""
_FOLDER_FILES = "digests*.json"
_MAX_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def digest(content: bytes | memoryview, before: str = "") -> str:
    """Eight hexadecimal digits; `before` is the digest of the preceding bytes."""
    return f"{zlib.crc32(content, int(before or '0', 16)):08x}"


def check_zip(file: BinaryIO) -> None:
    """Compares every member of a zip archive with its digest, and rewinds the file."""
    with zipfile.ZipFile(file) as archive:
        # torch skips the bytes of a member that is marked as a folder
        folders = (member.filename for member in archive.infolist() if member.external_attr & 0x10)
        damaged = next(folders, None) or archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"{damaged} is not what was written")
    file.seek(0)


def write_digests(folder: Path, names: Iterable[str], *, writer: int = 0) -> str:
    """Writes a file with the digests of a folder's files; `writer` is the number of the process.

    Returns:
        The name of the file of digests.
    """
    found = {name: digest_of_file(folder / name) for name in sorted(names)}
    name = f"digests-{writer}.json" if writer else "digests.json"
    write_text(folder / name, json.dumps(found, indent=1) + "\n")
    return name


def check_digests(folder: Path, *, part: int = 0, num_parts: int = 1) -> None:
    """Compares a folder's files with the digests in it, if any; several processes check a part
    each.
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
            is_same = digest_of_file(path) == text
        except OSError as error:
            reason = f"cannot be read ({error.strerror}), {source} beside it names it"
            raise CheckpointError(f"{path}: {reason}") from error
        if not is_same:
            raise CheckpointError(
                f"{path}: is damaged or was changed: {source} beside it has another digest of it; "
                f"restore it, or remove {source} if the change is meant"
            )


def digest_of_file(path: Path) -> str:
    """The `digest` of a file's content."""
    found = ""
    with open_regular(path) as file:
        while block := file.read(_READ_BYTES):
            found = digest(block, found)
    return found
