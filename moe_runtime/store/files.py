"""Files that are either whole or absent, whatever happens while they are written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its name only once all of it is on the disk.

    Written beside its place, flushed to the device, then renamed. When the `with` block fails, the
    partial file is removed and an older file of the name stays as it was.

    Args:
        path: the file; missing folders are made.

    Raises:
        OSError: writing fails, a full disk included.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Brings the folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
