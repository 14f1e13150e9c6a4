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
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from moe_runtime.errors import CheckpointError, MoERuntimeWarning, named_failure, named_file

PARTIAL_SUFFIX = ".partial"
DRAFT_SUFFIX = ".part"
INTERRUPTED_SUFFIX = ".interrupted"
_DESCRIPTORS = re.compile(r"/proc/(\d+)(/task/\d+)?/fd")
_OURS = re.compile(rf".+\.([0-9a-f]{{8}}|\d+|shards){re.escape(PARTIAL_SUFFIX)}")
_MOST_LINKS = 40
_MOST_NAME_BYTES = 255 - len(".00000000.partial")
_PROBE_BYTES = 1 << 12


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
        CheckpointError: it is a folder, or its folder is missing, full or not writable.
    """
    if os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder, expected the name of a {what} file")
    with named_failure(path, what):
        place = _place_of(path)
        if place is None or place.exists():
            _check_right(Path(path) if place is None else place)
        if place is None:
            return
        if not place.parent.is_dir():
            reason = f"there is no folder {place.parent}"
            raise CheckpointError(f"{path}: the {what} cannot be written: {reason}")
        probe = OutputFile(path)
        try:
            probe.file.write(bytes(_PROBE_BYTES))
            probe.file.flush()
        finally:
            probe.discard()


def writes_directly(path: str | os.PathLike[str]) -> bool:
    """Whether a name stands for a device, a pipe or an open descriptor: nothing can replace it.

    Raises:
        IsADirectoryError: it stands for a folder.
        OSError: its links lead in a circle.
    """
    return _place_of(path) is None


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
        self._place = place = _place_of(path)
        self._beside: Path | None = None
        if place is None:
            self.file = _open_directly(path)
            return
        if place.exists():
            _check_right(place)
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

        Raises:
            OSError: that fails; the older file is as it was.
        """
        self.file.flush()
        if self._place is not None and self._beside is not None:
            copy_rights(self._place, self.file.fileno())
            os.fsync(self.file.fileno())
            os.replace(self._beside, self._place)
            self._beside = None
            sync_folder(self._place.parent)
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


def draft_of(path: str | os.PathLike[str]) -> Path:
    """Where an output lies while it grows: beside the file that its name leads to."""
    end = _end_of_links(path)
    return end.with_name(end.name + DRAFT_SUFFIX)


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
    with _held(draft):
        if draft.stat().st_size == 0:
            draft.unlink()
            return
        kept = _free_name(draft.with_suffix(INTERRUPTED_SUFFIX))
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
        with named_failure(path, what), _held(draft, fcntl.LOCK_SH):
            pass


def remove_abandoned(folder: Path) -> None:
    """Removes partial files and folders of this package that no living process holds.

    Those of earlier versions, which had a process's number or nothing before ``.partial``, too.

    Args:
        folder: where they lie; may be missing.
    """
    for left in folder.glob(f"*{PARTIAL_SUFFIX}"):
        if _OURS.fullmatch(left.name):
            remove_unless_held(left)


def partials_of(place: Path, suffix: str = PARTIAL_SUFFIX) -> list[Path]:
    """What lies beside a file or folder as partial versions of it."""
    ours = re.compile(re.escape(_short(place.name)) + r"\.[0-9a-f]{8}" + re.escape(suffix))
    names = os.listdir(place.parent)
    return [place.parent / name for name in names if ours.fullmatch(name)]


def partial_name(place: Path, token: str | None = None) -> Path:
    """A name beside a file or folder for a new version of it; the token is random when omitted."""
    return place.with_name(f"{_short(place.name)}.{token or secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def remove_unless_held(path: Path) -> None:
    """Removes a file or folder that no living process holds; leaves what it cannot remove."""
    with contextlib.suppress(OSError), _held(path):
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
    """Makes a folder and those above it that are missing, and brings their names to the disk."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Brings the folder's entries to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _place_of(path: str | os.PathLike[str]) -> Path | None:
    """The regular file that a name leads to, there or not; None for what is no regular file."""
    end = _end_of_links(path)
    if _DESCRIPTORS.fullmatch(str(end.parent)):
        return None
    if not os.path.lexists(end):
        return end
    mode = end.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return end if stat.S_ISREG(mode) else None


def _end_of_links(path: str | os.PathLike[str]) -> Path:
    """What a name leads to, there or not; open descriptors are not looked through."""
    end = Path(path)
    for _ in range(_MOST_LINKS):
        end = Path(os.path.realpath(end.parent), end.name)
        if _DESCRIPTORS.fullmatch(str(end.parent)) or not end.is_symlink():
            break
        end = end.parent / os.readlink(end)
    return end


def _open_directly(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens what is no regular file; nothing is made, and descriptors go on where they stand."""
    end = _end_of_links(path)
    found = _DESCRIPTORS.fullmatch(str(end.parent))
    if found is not None and int(found[1]) == os.getpid() and end.name.isdigit():
        return os.fdopen(os.dup(int(end.name)), "wb")
    return os.fdopen(os.open(end, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), "wb")


def _check_right(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "no right to write to it", str(path))


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
def _held(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Holds what a process left; within the block no other one takes or removes it.

    With ``LOCK_SH`` other processes may hold it in the same way: several look at the same time.

    Raises:
        BlockingIOError: a living process holds it, or its filesystem cannot tell.
        OSError: it is not there, or not ours to open.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            reason = f"another process is writing {path} (if none is, remove it)"
            raise BlockingIOError(errno.EAGAIN, reason, str(path)) from error
        if not is_at(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether a name still stands for an open file: it may have been removed or taken since."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _free_name(path: Path) -> Path:
    """The path, or the first of its kind with a number that nothing has yet."""
    free, number = path, 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _short(name: str) -> str:
    """A name that leaves room for what is put behind it."""
    return os.fsdecode(os.fsencode(name)[:_MOST_NAME_BYTES])
