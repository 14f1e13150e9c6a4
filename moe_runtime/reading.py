"""Files that people name, read whole: regular ones of a bounded size.

What is named may be a folder, a device that never ends, a pipe that nobody writes to, or a file of
terabytes that takes no room on the disk. All of these are refused before a byte is read.
"""

import errno
import os
import stat
import tomllib
from collections.abc import Iterable
from typing import Any, BinaryIO

from moe_runtime.config import format_bytes
from moe_runtime.errors import named_file

_MAX_TOML_BYTES = 1 << 20


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; a link is followed.

    Raises:
        OSError: it cannot be opened, or is something else than a regular file.
    """
    # Without O_NONBLOCK a pipe would be waited for here.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        found = "is a pipe, socket or device, expected a regular file"
        raise OSError(errno.EINVAL, found, str(path))
    return os.fdopen(descriptor, "rb")


def require_not_read(
    output: str | os.PathLike[str] | None,
    what: str,
    inputs: Iterable[str | os.PathLike[str] | None],
) -> None:
    """Refuses an output that would replace a file which the same work reads.

    Args:
        output: the file to write; None, what is not there yet and what is no regular file pass.
        what: the output's name in messages.
        inputs: files that are read, links followed; None and what is not there are passed over.

    Raises:
        ValueError: the output is one of them.
    """
    if output is None or not os.path.isfile(output):
        return
    for read in inputs:
        if read is not None and os.path.isfile(read) and os.path.samefile(output, read):
            raise ValueError(
                f"{output}: the {what} would replace {read}, which is read here; name another file"
            )


def read_bounded(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Reads a regular file.

    Args:
        path: the file.
        max_bytes: largest size that is accepted.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise _too_large(str(path), max_bytes)
        return read_stream(file, str(path), max_bytes=max_bytes)


def read_stream(file: BinaryIO, name: str, *, max_bytes: int) -> bytes:
    """Reads a stream to its end, which may never come.

    Raises:
        OSError: it cannot be read, or there is more than ``max_bytes``; the error has the name.
    """
    with named_file(name):
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(name, max_bytes)
    return content


def decode_text(raw: bytes, encoding: str = "utf-8") -> str:
    """The text of a file's bytes, every line ended by a line feed, as `Path.read_text` gives it.

    Raises:
        UnicodeDecodeError: the bytes are no text of this encoding.
    """
    return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger than a mebibyte.
        ValueError: it is not TOML.
    """
    content = read_bounded(path, max_bytes=_MAX_TOML_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not a TOML file: nested too deeply") from None


def _too_large(name: str, max_bytes: int) -> OSError:
    found = f"larger than {format_bytes(max_bytes)}, the most that is read"
    return OSError(errno.EFBIG, found, name)
