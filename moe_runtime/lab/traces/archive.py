"""Reads arrays from an ``.npz`` that may be damaged or hostile.

``numpy.load`` allocates whatever a member's header announces before it looks at the data. Here the
announced type must be the expected one, and the announced shape must account for every byte of the
member, before anything is allocated; nothing is ever unpickled.
"""

import contextlib
import json
import math
import os
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from moe_runtime.config import format_bytes
from moe_runtime.digests import ZIP_DAMAGE
from moe_runtime.errors import CheckpointError
from moe_runtime.files import open_regular

_MAX_NPY_HEADER_BYTES = 4096


class Archive:
    """One open ``.npz`` file.

    Args:
        content: where the file's bytes are read from if not from ``path``, which then only names
            them.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int, content: BinaryIO | None = None
    ) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as opened:
            try:
                if content is None:
                    content = opened.enter_context(open_regular(self.path))
                self._zip = opened.enter_context(zipfile.ZipFile(content))
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            except ZIP_DAMAGE as error:
                raise CheckpointError(f"{self.path}: not an .npz file: {error}") from error
            total_bytes = sum(member.file_size for member in self._zip.infolist())
            if total_bytes > max_bytes:
                raise CheckpointError(
                    f"{self.path}: holds {format_bytes(total_bytes)} when unpacked, expected at "
                    f"most {format_bytes(max_bytes)}"
                )
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.close()

    def __contains__(self, name: str) -> bool:
        return f"{name}.npy" in self._zip.namelist()

    def read(self, name: str, *dtypes: np.dtype[Any], max_bytes: int | None = None) -> np.ndarray:
        """Reads one array, which must be C-contiguous and exactly of a given type."""
        try:
            member = self._zip.getinfo(f"{name}.npy")
        except KeyError:
            raise CheckpointError(f"{self.path}: has no array named {name!r}") from None
        if max_bytes is not None and member.file_size > max_bytes:
            raise CheckpointError(
                f"{self.path}: array {name!r} has {member.file_size} bytes, "
                f"expected at most {max_bytes}"
            )
        try:
            return self._read_member(member, dtypes)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error}") from error
        except ZIP_DAMAGE as error:
            raise CheckpointError(f"{self.path}: array {name!r} is damaged: {error}") from error

    def read_json(self, name: str, *, max_bytes: int, what: str) -> Any:
        """Reads an array of bytes that are JSON."""
        raw = self.read(name, np.dtype("|u1"), max_bytes=max_bytes)
        try:
            return json.loads(raw.tobytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {what} is not JSON: {error}") from None

    def _read_member(
        self, member: zipfile.ZipInfo, dtypes: tuple[np.dtype[Any], ...]
    ) -> np.ndarray:
        with self._zip.open(member) as file:
            version = np.lib.format.read_magic(file)
            if version != (1, 0):
                raise ValueError(f"npy version {version}, expected (1, 0)")
            shape, fortran_order, found = np.lib.format.read_array_header_1_0(
                file, max_header_size=_MAX_NPY_HEADER_BYTES
            )
            if found not in dtypes or (fortran_order and len(shape) > 1):
                expected = ", ".join(map(str, dtypes))
                raise ValueError(f"expected {expected} in C order, got {found}")
            if any(size < 0 for size in shape):
                raise ValueError(f"negative size in shape {shape}")
            num_bytes = math.prod(shape) * found.itemsize
            if num_bytes != member.file_size - file.tell():
                raise ValueError(
                    f"shape {shape} needs {num_bytes} bytes, "
                    f"the file has {member.file_size - file.tell()}"
                )
            # One byte more than announced makes zipfile verify the member's checksum.
            data = file.read(num_bytes + 1)
        if len(data) != num_bytes:
            raise ValueError(f"expected {num_bytes} bytes of data, got {len(data)}")
        return np.frombuffer(data, dtype=found).reshape(shape)
