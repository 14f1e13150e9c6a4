"""Where outputs lie: what a name leads to, and what can be replaced there."""

import errno
import os
import stat
from pathlib import Path

from moe_runtime.file_names import DESCRIPTORS, DRAFT_SUFFIX, draft_of, end_of_links


def is_folder_name(path: str | os.PathLike[str]) -> bool:
    """Whether a name says that it is a folder's, as ``out/`` and ``out/.`` do, there or not.

    A `Path` cannot say so any more.
    """
    return os.path.basename(path) in ("", ".")


def require_file_name(name: str | os.PathLike[str], what: str) -> None:
    """Refuses a text that names no file to write; a `Path` has lost what it says of that.

    Args:
        name: as it was given.
        what: the option or key, for the message.

    Raises:
        ValueError: it is empty, ends as the name of a folder, or is ``-``: no output goes to
            standard output, where results go.
    """
    if not os.fspath(name):
        raise ValueError(f"{what}: is empty, expected the name of a file")
    if os.fspath(name) == "-":
        raise ValueError(
            f"{what} -: expected the name of a file; outputs do not go to standard output "
            "(./- names a file of that name)"
        )
    if is_folder_name(name):
        raise ValueError(f"{what} {name}: is a folder, expected the name of a file")


def place_of(path: str | os.PathLike[str]) -> Path | None:
    """The regular file that a name leads to, there or not; None for what is no regular file.

    Raises:
        IsADirectoryError: it stands for a folder.
        OSError: its links lead in a circle, or it is longer than names may be.
    """
    if is_folder_name(path):
        raise _is_folder(path)
    end = end_of_links(path)
    if DESCRIPTORS.fullmatch(str(end.parent)):
        return None
    try:
        mode = os.stat(end).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return end
    if stat.S_ISDIR(mode):
        raise _is_folder(path)
    return end if stat.S_ISREG(mode) else None


def writes_directly(path: str | os.PathLike[str]) -> bool:
    """Whether a name stands for a device, a pipe or an open descriptor: nothing can replace it.

    Raises:
        OSError: as `place_of`.
    """
    return place_of(path) is None


def open_directly(path: str | os.PathLike[str]) -> int:
    """Opens what is no regular file; nothing is made, and descriptors go on where they stand.

    Returns:
        A descriptor to write to.
    """
    end = end_of_links(path)
    found = DESCRIPTORS.fullmatch(str(end.parent))
    if found is not None and int(found[1]) == os.getpid() and end.name.isdigit():
        return os.dup(int(end.name))
    return os.open(end, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)


def require_apart(
    first: str | os.PathLike[str], second: str | os.PathLike[str], names: tuple[str, str]
) -> None:
    """Refuses two outputs of the same work of which one would replace the other, or its draft.

    Args:
        first: one output; what is no regular file may be written twice.
        second: the other one.
        names: what they are called.

    Raises:
        ValueError: they lead to the same file, or one to where the other grows.
    """
    if writes_directly(first):
        return
    places = [{draft_of(path), Path(os.path.realpath(path))} for path in (first, second)]
    if places[0] & places[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must be different files, and neither the other's name with "
            f"{DRAFT_SUFFIX}, where that grows; got {first} and {second}"
        )


def require_replaceable(place: Path) -> None:
    """Refuses a file or folder, links followed, that a new one could not take the place of.

    Raises:
        OSError: something is mounted there, or only its owner may replace it.
    """
    if not os.path.lexists(place):
        return
    if is_mount_point(place):
        reason = "is a mount point, so nothing can take its place; name one in a mounted folder"
        raise OSError(errno.EBUSY, reason, str(place))
    folder, user = os.stat(place.parent), os.geteuid()
    if folder.st_mode & stat.S_ISVTX and user not in (0, folder.st_uid, os.stat(place).st_uid):
        reason = "belongs to another user, and its folder lets owners alone replace what is theirs"
        raise PermissionError(errno.EPERM, reason, str(place))


def require_right(path: str | os.PathLike[str]) -> None:
    """Refuses what this process may not write to.

    Raises:
        PermissionError: it may not.
    """
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "no right to write to it", os.fspath(path))


def is_mount_point(path: Path) -> bool:
    """Whether something is mounted at a name, a part of the same filesystem included.

    The numbers of the mounts decide; device numbers, which `os.path.ismount` compares, only of
    folders and where the system tells no others: on an overlay of several filesystems every file
    has another device number than its folder.
    """
    mounts = _mount_of(path), _mount_of(path.parent)
    if path == path.parent or None in mounts:
        return path.is_dir() and os.path.ismount(path)
    return mounts[0] != mounts[1]


def is_at(path: Path, descriptor: int) -> bool:
    """Whether a name still stands for an open file: it may have been removed or taken since."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_folder(path: str | os.PathLike[str]) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))


def _mount_of(path: Path) -> str | None:
    """The number of the mount that a name leads into; None where the system does not tell."""
    try:
        descriptor = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
            return next((line for line in lines if line.startswith("mnt_id:")), None)
    except OSError:
        return None
    finally:
        os.close(descriptor)
