"""The errors of the runtime, one class for each kind of failure outside the caller's control.

Mistakes of the caller are `ValueError` or `TypeError`. Failures of files, memory, models and
other processes raise one of these.
"""

import contextlib
import os
from collections.abc import Iterator

_LONGEST_REASON = 500

CLOSED = "the model's experts were closed; load it again"
FORKED = (
    "this model was loaded before the process forked; start children with 'spawn' and load it there"
)


class MoERuntimeError(Exception):
    """Base class of the runtime's errors."""


class CheckpointError(MoERuntimeError):
    """A checkpoint is missing, damaged, inconsistent, or could not be read."""


class UnsupportedModelError(MoERuntimeError):
    """The checkpoint is sound, but its model is not one that the runtime can serve."""


class UnsupportedUseError(MoERuntimeError):
    """A loaded model cannot do what it was asked to; the message says what to do instead."""


class CapacityError(MoERuntimeError):
    """Memory does not suffice; `smallest_bytes` is the smallest budget that works, if known."""

    def __init__(self, message: str, *, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class RankFailureError(MoERuntimeError):
    """Another process of the group (`ranks`, if known) died, stalled, or runs another program."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class MoERuntimeWarning(UserWarning):
    """A caller should know this, although nothing failed."""


def text_of(error: BaseException) -> str:
    """What an error says; an `OSError` without its number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)


@contextlib.contextmanager
def blamed_on(what: str, kind: type[Exception] = CheckpointError) -> Iterator[None]:
    """Turns a library's exceptions about a file's content into an error that names the file.

    Libraries raise anything over a damaged file, a plain `Exception` included. The block must hold
    calls of the library alone.

    Args:
        what: the beginning of the message: the file, and what cannot be done with it.
        kind: class of the error that is raised instead.
    """
    try:
        yield
    except (MoERuntimeError, MemoryError, kind):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:_LONGEST_REASON]
        says_enough = text and isinstance(error, ValueError | OSError)
        name = type(error).__name__
        reason = text if says_enough else f"{name}: {text}" if text else name
        raise kind(f"{what}: {reason}") from error


@contextlib.contextmanager
def named_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the file's name to an `OSError` of the block, such as for a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def named_failure(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turns an `OSError` of the block into a `CheckpointError` with the file and the kind of
    output."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path}: the {what} cannot be written: {reason}") from error
