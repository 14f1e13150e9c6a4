"""Files that are either whole or as they were, whatever happens while they are written.

An output is written beside its place, as ``NAME.<8 hex digits>.partial``, or ``NAME.part`` while it
grows over minutes; it is flushed to the disk and renamed. Links are followed and stay links. What
is no regular file (a device, a pipe, an open descriptor) is written straight into.

A process holds what it writes beside its place by a lock (``flock``) that ends with the process, so
that what a killed one left can be told from what a living one is writing; process numbers, which
are used again, cannot tell that.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moe_runtime.errors import CheckpointError, MoERuntimeWarning, named_failure, named_file
from moe_runtime.file_names import (
    PARTIAL_SUFFIX,
    draft_of,
    interrupted_of,
    partial_name,
    partials_of,
)
from moe_runtime.places import (
    is_at,
    is_folder_name,
    open_directly,
    place_of,
    require_replaceable,
    require_right,
    writes_directly,
)

_OURS = re.compile(rf"(.+\.([0-9a-f]{{8}}|\d+|shards)|model){re.escape(PARTIAL_SUFFIX)}")
NO_LOCKS = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
"""What filesystems without locks say."""
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}
_PROBE_BYTES = 1 << 12
_LOOKING_S = 1e-3


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file for writing that takes its name only once all of it is on the disk.

    When the ``with`` block fails, the partial file is removed and an older file of the name stays
    as it was. A new file gets the older one's permissions, and its owner where that is allowed.

    Args:
        path: the file; its folder must exist (`make_folders`).

    Raises:
        OSError: writing fails, a full disk included.
    """
    with named_file(path):
        output = OutputFile(path)
        try:
            yield output.file
            output.finish()
        finally:
            output.discard()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text as UTF-8, atomically.

    Raises:
        OSError: as `write_atomically`.
    """
    with write_atomically(path) as file:
        file.write(text.encode())


def check_output_path(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a place where no file could be written; for callers who work for minutes first.

    What is there stays as it is: a file is made beside it and removed.

    Raises:
        CheckpointError: it is a folder, or it or its folder is missing, full or not writable.
    """
    if is_folder_name(path) or os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder, expected the name of a {what} file")
    with named_failure(path, what):
        place = place_of(path)
        if place is None:
            require_right(path)
            if stat.S_ISCHR(os.stat(path).st_mode):  # a full device says so to no bytes, too
                with os.fdopen(open_directly(path), "wb", buffering=0) as device:
                    device.write(b"")
            return
        if not place.parent.is_dir():
            reason = f"there is no folder {place.parent}"
            raise CheckpointError(f"{path}: the {what} cannot be written: {reason}")
        probe = OutputFile(place)
        try:
            probe.file.write(bytes(_PROBE_BYTES))
            probe.file.flush()
        finally:
            probe.discard()


def check_output_folder(folder: str | os.PathLike[str], what: str) -> None:
    """Refuses a folder, there or not, in which nothing could be written; nothing is made.

    Raises:
        CheckpointError: something else has its name or that of a folder above it, or the last one
            that is there is full or not writable.
    """
    there = Path(os.path.realpath(folder))
    with named_failure(folder, what):
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder", str(folder))
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(_PROBE_BYTES))


def check_draft_path(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a place where no output could grow, and keeps what a killed process left of one.

    Warns with that one's new name (``MoERuntimeWarning``).

    Raises:
        CheckpointError: as `check_output_path`, or another process is writing it.
    """
    check_output_path(path, what)
    with named_failure(path, what):
        keep_interrupted(path)


class OutputFile:
    """A file beside the place of an output, which it takes when it is whole.

    Args:
        path: the output; its folder must exist. A device or a pipe is written straight into.
        is_draft: gives the file the one name ``NAME.part``, for an output that grows while it can
            already be read, and that is kept if the process is killed.

    Attributes:
        file: to write to.

    Raises:
        BlockingIOError: another process writes this draft.
        OSError: it cannot be made.
    """

    file: BinaryIO

    def __init__(self, path: str | os.PathLike[str], *, is_draft: bool = False) -> None:
        self._place = place = place_of(path)
        self._beside: Path | None = None
        if place is None:
            self.file = os.fdopen(open_directly(path), "wb")
            return
        if os.path.lexists(place):
            require_right(place)
            require_replaceable(place)
        if is_draft:
            keep_interrupted(path)
            self._beside = draft_of(path)
        else:
            for left in partials_of(place):
                remove_unless_held(left)
            self._beside = partial_name(place)
        self.file = _new_held(self._beside)

    def finish(self) -> None:
        """Brings the content to the disk and puts the file in its place.

        Warns (``MoERuntimeWarning``) where the file is in its place, but a power cut could still
        bring the older one back.

        Raises:
            OSError: that fails; the older file is as it was.
        """
        self.file.flush()
        if self._place is not None and self._beside is not None:
            copy_rights(self._place, self.file.fileno())
            os.fsync(self.file.fileno())
            os.replace(self._beside, self._place)
            self._beside = None
            sync_name(self._place)
        self.file.close()

    def write_at(self, offset: int, data: bytes) -> int:
        """Writes data where the good content ends; what a failed call left behind it goes.

        Returns:
            Where the content ends now. The operating system has it.
        """
        descriptor = self.file.fileno()
        if self._beside is not None and os.fstat(descriptor).st_size != offset:
            os.ftruncate(descriptor, offset)
            os.lseek(descriptor, offset, os.SEEK_SET)
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        return offset + len(data)

    def discard(self) -> None:
        """Removes the file, unless it is finished, and closes it. May be called again."""
        beside, self._beside = self._beside, None
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        # What is left in the buffer is not wanted, so that it cannot be written is no failure.
        with contextlib.suppress(OSError):
            self.file.close()


def keep_interrupted(path: str | os.PathLike[str]) -> None:
    """Gives what a killed process left of an output a name under which nothing replaces it.

    Warns with that name (``MoERuntimeWarning``). Nothing happens where nothing was left.

    Args:
        path: the output.

    Raises:
        BlockingIOError: a living process writes it.
        OSError: it cannot be renamed.
    """
    draft = draft_of(path)
    if writes_directly(path) or not draft.exists():
        return
    # Another process may have kept it meanwhile.
    with contextlib.suppress(FileNotFoundError), held(draft):
        if draft.stat().st_size == 0:
            draft.unlink()
            return
        kept = interrupted_of(path)
        os.rename(draft, kept)
        warnings.warn(
            f"{kept}: holds what an interrupted run left of {Path(path).name}",
            MoERuntimeWarning,
            stacklevel=2,
        )


def check_not_in_progress(path: str | os.PathLike[str], what: str) -> None:
    """Refuses an output that a living process is writing.

    Raises:
        CheckpointError: one does.
    """
    draft = draft_of(path)
    if not writes_directly(path) and draft.exists():
        with named_failure(path, what), held(draft, fcntl.LOCK_SH):
            pass


def remove_abandoned(folder: Path) -> None:
    """Removes partial files and folders of this package that no living process holds.

    Those of earlier versions too: they had a process's number before ``.partial``, and that of the
    exported model nothing.

    Args:
        folder: where they lie; may be missing.
    """
    for left in folder.glob(f"*{PARTIAL_SUFFIX}"):
        if _OURS.fullmatch(left.name):
            remove_unless_held(left)


def remove_unless_held(path: Path) -> None:
    """Removes a file or folder that no living process holds; leaves what it cannot remove."""
    with contextlib.suppress(OSError), held(path):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def copy_rights(place: Path, descriptor: int) -> None:
    """Gives an open file or folder the permissions, and if allowed the owner, of an older one."""
    with contextlib.suppress(FileNotFoundError):
        old, new = os.stat(place), os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        # Some filesystems have no permissions.
        with contextlib.suppress(PermissionError):
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def make_folders(folder: Path) -> None:
    """Makes a folder and those above it that are missing, and brings their names to the disk.

    A link stays, and what it leads to is made.
    """
    if folder.is_dir():
        return
    place = Path(os.path.realpath(folder))
    make_folders(place.parent)
    place.mkdir(exist_ok=True)
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Brings the folder's entries to the disk, so that a rename survives a power cut.

    Filesystems that have no such call need none.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # one may write to it, not list it
        os.sync()
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def sync_name(place: Path) -> None:
    """Brings the name of what has just taken its place to the disk; warns if that fails.

    It is no failure of the output, which is whole and has its name.
    """
    try:
        sync_folder(place.parent)
    except OSError as error:
        warnings.warn(
            f"{place}: is written, but a power cut could bring back what was there before: its "
            f"folder cannot be brought to the disk: {error.strerror}",
            MoERuntimeWarning,
            stacklevel=2,
        )


def _new_held(path: Path) -> BinaryIO:
    """Makes a file that this process holds.

    Raises:
        FileExistsError: there is one of this name.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, flags, 0o666)
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(os.close, descriptor)
            # Others hold a new file only while they find out whether it was left behind.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            file = os.fdopen(descriptor, "wb") if is_at(path, descriptor) else None
            stack.pop_all()
        if file is not None:
            return file
        os.close(descriptor)


@contextlib.contextmanager
def held(path: Path, kind: int = fcntl.LOCK_EX, advice: str = "remove it") -> Iterator[None]:
    """Holds what a process left; within the block no other one takes or removes it.

    With ``LOCK_SH`` other processes may hold it in the same way: several look at the same time.
    The advice is for somebody who knows that no process holds it.

    Raises:
        BlockingIOError: a living process holds it, or its filesystem cannot tell.
        OSError: it is not there, or not ours to open.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_NOFOLLOW)
    try:
        while not _lock(descriptor, kind):
            # Those who only look hold it for a moment.
            if not _lock(descriptor, fcntl.LOCK_SH):
                reason = f"another process is writing {path} (if none is, {advice})"
                raise BlockingIOError(errno.EAGAIN, reason)  # which has the name
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(_LOOKING_S)
        if not is_at(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which is removed at the end; a process that dies lets go of it.

    Filesystems without locks hold nothing.

    Raises:
        BlockingIOError: a living process holds it.
        OSError: it cannot be made.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            if is_at(path, descriptor):  # else the one before has just removed it
                stack.callback(path.unlink, missing_ok=True)
                yield
                return


def _lock(descriptor: int, kind: int) -> bool:
    """Takes a lock unless another one holds it, or the filesystem has none; whether it did."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
