"""Reads files within bounds, and writes files and folders completely or not at all.

A new version is written beside the old one as `NAME.<8 hex digits>.partial`, flushed to the disk,
and renamed. An output that grows over minutes is `NAME.part`, which others can read. Links are
followed and stay links; devices and pipes are refused. A process locks its output (`flock`), so
that the next writer recognises the files of a killed process.

A folder is replaced in one step, in which old and new exchange names (Linux' `renameat2`). If the
filesystem cannot do this, the old folder is first renamed, or copied, to `NAME.<8 hex digits>.old`;
after a kill in between, the next writer restores it.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, MoERuntimeWarning, named_failure, named_file

PARTIAL_SUFFIX = ".partial"
DRAFT_SUFFIX = ".part"
_OURS = re.compile(rf"(.+\.([0-9a-f]{{8}}|\d+|shards)|model){re.escape(PARTIAL_SUFFIX)}")
_MOST_NAME_BYTES, _SUFFIX_BYTES = 255, len(".interrupted-0000")
_MAX_TOML_BYTES = 1 << 20
_PROBE_BYTES = 1 << 12
_LOOKING_S = 1e-3
_NO_LOCKS = {errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP}
"""Errors of filesystems without the call."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file for reading; `OSError` for a folder, pipe, socket or device."""
    # without O_NONBLOCK the call would wait for a pipe's writer
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise _is_folder(path)
        found = "is a pipe, socket or device, expected a regular file"
        raise OSError(errno.EINVAL, found, str(path))
    return os.fdopen(descriptor, "rb")


def read_bounded(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Reads a regular file; `OSError` if it has more than `max_bytes`."""
    with open_regular(path) as file:
        return read_stream(file, str(path), max_bytes=max_bytes)


def read_stream(file: BinaryIO, name: str, *, max_bytes: int) -> bytes:
    """Reads a stream to its end; `OSError` with the name, also for more than `max_bytes`."""
    with named_file(name):
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        found = f"larger than {format_bytes(max_bytes)}, the most that is read"
        raise OSError(errno.EFBIG, found, name)
    return content


def decode_text(raw: bytes, encoding: str = "utf-8") -> str:
    """Decodes text with line feeds as line ends, as `Path.read_text` does."""
    return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    content = read_bounded(path, max_bytes=_MAX_TOML_BYTES)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not a TOML file: nested too deeply") from None


def at_home(name: str) -> str:
    """Replaces `~` or `~user` at the beginning of a name by that home folder.

    Shells do so with words, but not with `--output=~/x` nor in files. `./~` stays.
    """
    path = os.path.expanduser(name)
    if path.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{name}: no home folder {user} is known; ./{name} is a name that has a ~")
    return path


def draft_of(path: str | os.PathLike[str]) -> Path:
    """The place of an output while it grows, beside the final file."""
    return beside(Path(os.path.realpath(path)), DRAFT_SUFFIX)


def partial_name(place: Path, token: str | None = None) -> Path:
    """The name of a new version beside a file or folder; the token is random if omitted."""
    return beside(place, f".{token or secrets.token_hex(4)}{PARTIAL_SUFFIX}")


def place_of(path: str | os.PathLike[str]) -> Path:
    """The regular file that a name leads to, whether it exists or not."""
    place = Path(os.path.realpath(path))
    if _is_folder_name(path) or place.is_dir():
        raise _is_folder(path)
    try:
        found = os.stat(place)
    except (FileNotFoundError, NotADirectoryError):
        return place
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/std", "/proc/"))
    if not stat.S_ISREG(found.st_mode) or is_open:
        reason = "is a device, pipe or open stream, expected the name of a file"
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    return place


def is_at(path: Path, descriptor: int) -> bool:
    """Whether a name still refers to an open file, which may have been removed or replaced."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def beside(place: Path, suffix: str) -> Path:
    """A name with a suffix; if it would be too long, a hash replaces its end."""
    raw = os.fsencode(place.name)
    if len(raw) + _SUFFIX_BYTES <= _MOST_NAME_BYTES:
        return place.with_name(place.name + suffix)
    mark = f"~{hashlib.sha256(raw).hexdigest()[:8]}"
    begin = raw[: _MOST_NAME_BYTES - _SUFFIX_BYTES - len(mark)].decode(errors="ignore")
    return place.with_name(begin + mark + suffix)


def versions_of(place: Path, suffix: str = PARTIAL_SUFFIX) -> list[Path]:
    """The versions beside a file or folder; none if the folder cannot be listed."""
    ours = re.compile(rf"{re.escape(beside(place, '').name)}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    try:
        names = os.listdir(place.parent)
    except PermissionError:
        return []
    return sorted(place.parent / name for name in names if ours.fullmatch(name))


def _is_folder_name(path: str | os.PathLike[str]) -> bool:
    """Whether a name is written as a folder's, ``out/`` or ``out/.``; a `Path` loses this."""
    return os.path.basename(path) in ("", ".")


def _is_folder(path: str | os.PathLike[str]) -> IsADirectoryError:
    return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))


def require_file_name(name: str | os.PathLike[str], what: str) -> None:
    """Refuses an empty text, a folder's name, and `-` as the name of an output file."""
    if not os.fspath(name):
        raise ValueError(f"{what}: is empty, expected the name of a file")
    if os.fspath(name) == "-":
        raise ValueError(
            f"{what} -: expected the name of a file; outputs do not go to standard output "
            "(./- names a file of that name)"
        )
    if _is_folder_name(name):
        raise ValueError(f"{what} {name}: is a folder, expected the name of a file")


def require_not_read(
    output: str | os.PathLike[str] | None,
    what: str,
    inputs: Iterable[str | os.PathLike[str] | None],
) -> None:
    """Refuses an output that would replace an input of the same work.

    None, an absent file or a device passes, and so do absent inputs.
    """
    if output is None or not os.path.isfile(output):
        return
    for read in inputs:
        if read is not None and os.path.isfile(read) and os.path.samefile(output, read):
            raise ValueError(
                f"{output}: the {what} would replace {read}, which is read here; name another file"
            )


def require_apart(
    first: str | os.PathLike[str], second: str | os.PathLike[str], names: tuple[str, str]
) -> None:
    """Refuses two outputs that share a file or a draft (`ValueError`)."""
    places = [{draft_of(path), Path(os.path.realpath(path))} for path in (first, second)]
    if places[0] & places[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must be different files, and neither the other's name with "
            f"{DRAFT_SUFFIX}, where that grows; got {first} and {second}"
        )


def require_replaceable(place: Path) -> None:
    """Refuses a mount point, and files of others in a sticky folder (`OSError`)."""
    if not os.path.lexists(place):
        return
    if place in mount_points():
        reason = "is a mount point, so nothing can take its place; name one in a mounted folder"
        raise OSError(errno.EBUSY, reason, str(place))
    folder, user = os.stat(place.parent), os.geteuid()
    if folder.st_mode & stat.S_ISVTX and user not in (0, folder.st_uid, os.stat(place).st_uid):
        reason = "belongs to another user, and its folder lets owners alone replace what is theirs"
        raise PermissionError(errno.EPERM, reason, str(place))


def mount_points() -> set[Path]:
    """Mounted files and folders; none if the system does not list them."""
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return set()
    names = (line.split()[4].decode("unicode_escape").encode("latin-1") for line in lines)
    return {Path(os.fsdecode(name)) for name in names}


def check_output_path(path: str | os.PathLike[str], what: str) -> None:
    """Refuses a path where no file can be written; does not change an existing file."""
    if _is_folder_name(path) or os.path.isdir(path):
        raise CheckpointError(f"{path}: is a folder, expected the name of a file")
    with named_failure(path, what):
        place = place_of(path)
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
    """Refuses a folder, existing or not, in which nothing can be written; makes nothing."""
    there = Path(os.path.realpath(folder))
    with named_failure(folder, what):
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is not a folder", str(folder))
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(bytes(_PROBE_BYTES))


def check_draft_path(path: str | os.PathLike[str], what: str) -> None:
    """As `check_output_path`; also renames a killed process's draft, with a warning."""
    check_output_path(path, what)
    with named_failure(path, what):
        keep_interrupted(path)


def check_not_in_progress(path: str | os.PathLike[str], what: str) -> None:
    """Refuses an output that a living process is writing (`CheckpointError`)."""
    with (
        named_failure(path, what),
        contextlib.suppress(FileNotFoundError),
        held(draft_of(path), fcntl.LOCK_SH),
    ):
        pass


@contextlib.contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Opens a file that gets its name only when it is completely on the disk.

    When the `with` block fails, the partial file is removed and an older file of the name stays. A
    new file gets the older one's permissions, and its owner where that is allowed. Its folder must
    exist.
    """
    with named_file(path):
        output = OutputFile(path)
        try:
            yield output.file
            output.finish()
        finally:
            output.discard()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes UTF-8 text atomically."""
    with write_atomically(path) as file:
        file.write(text.encode())


class OutputFile:
    """A new version of a file, which replaces the old one when it is complete.

    With `is_draft` it lies at `NAME.part`: it grows while it can be read, and is kept if the
    process is killed.
    """

    file: BinaryIO

    def __init__(self, path: str | os.PathLike[str], *, is_draft: bool = False) -> None:
        self._place = place = place_of(path)
        if os.path.lexists(place):
            if not os.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, "no right to write to it", str(place))
            require_replaceable(place)
        if is_draft:
            keep_interrupted(path)
            self._beside: Path | None = draft_of(path)
        else:
            for left in versions_of(place):
                remove_unless_held(left)
            self._beside = partial_name(place)
        self.file = new_held(self._beside)

    def finish(self) -> None:
        """Flushes the content to the disk and replaces the old file."""
        self.file.flush()
        if self._beside is not None:
            copy_rights(self._place, self.file.fileno())
            os.fsync(self.file.fileno())
            os.replace(self._beside, self._place)
            self._beside = None
            sync_folder(self._place.parent)
        self.file.close()

    def write_at(self, offset: int, data: bytes) -> int:
        """Writes at the end of the good content, over the rest of a failed write; returns the new
        end."""
        descriptor = self.file.fileno()
        if os.fstat(descriptor).st_size != offset:
            os.ftruncate(descriptor, offset)
            os.lseek(descriptor, offset, os.SEEK_SET)
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        return offset + len(data)

    def discard(self) -> None:
        """Removes the file unless it is finished, and closes it; may be repeated."""
        beside, self._beside = self._beside, None
        if beside is not None:
            with contextlib.suppress(OSError):
                os.unlink(beside)
        # The buffered content is not wanted, so an error in writing it does not matter.
        with contextlib.suppress(OSError):
            self.file.close()


def keep_interrupted(path: str | os.PathLike[str]) -> None:
    """Renames the draft of a killed process, with a warning, so that nothing replaces it."""
    draft = draft_of(path)
    with contextlib.suppress(FileNotFoundError), held(draft):
        if draft.stat().st_size == 0:
            draft.unlink()
            return
        kept = first = beside(Path(os.path.realpath(path)), ".interrupted")
        number = 1
        while os.path.lexists(kept):
            number += 1
            kept = first.with_name(f"{first.name}-{number}")
        os.rename(draft, kept)
        warnings.warn(
            f"{kept}: holds what an interrupted run left of {Path(path).name}",
            MoERuntimeWarning,
            stacklevel=2,
        )


def new_held(path: Path, mode: int = 0o666) -> BinaryIO:
    """Creates a file and locks it."""
    while True:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            stack.callback(path.unlink, missing_ok=True)
            stack.callback(os.close, descriptor)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # before the lock, another writer may have removed it as abandoned
            if is_at(path, descriptor):
                file = os.fdopen(descriptor, "wb")
                stack.pop_all()
                return file


def copy_rights(place: Path, descriptor: int) -> None:
    """Copies the permissions, and if allowed the owner, of an older file or folder."""
    with contextlib.suppress(FileNotFoundError):
        old, new = os.stat(place), os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        with contextlib.suppress(PermissionError):  # some filesystems have no permissions
            os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


@contextlib.contextmanager
def held(
    path: Path, kind: int = fcntl.LOCK_EX, advice: str = "remove it", *, without_locks: bool = False
) -> Iterator[None]:
    """Locks an abandoned file or folder for the time of the block.

    Args:
        kind: with `LOCK_SH` several processes may hold it at the same time.
        advice: what to do if no process holds it, for the message.
        without_locks: whether a filesystem without locks passes.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_NOFOLLOW)
    try:
        while not _lock(descriptor, kind, without_locks=without_locks):
            # shared locks are short
            if not _lock(descriptor, fcntl.LOCK_SH):
                reason = f"another process is writing {path} (if none is, {advice})"
                raise BlockingIOError(errno.EAGAIN, reason)  # the reason has the name
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            time.sleep(_LOOKING_S)
        if not is_at(path, descriptor):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock file, which is removed at the end; the lock of a dead process is free."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, fcntl.LOCK_EX, without_locks=True):
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            if is_at(path, descriptor):  # else the previous process has just removed it
                stack.callback(path.unlink, missing_ok=True)
                yield
                return


def remove_abandoned(folder: Path) -> None:
    """Removes partial files and folders that no living process holds.

    Those of earlier versions have a process number before `.partial`, or are `model.partial`.
    """
    for left in folder.glob(f"*{PARTIAL_SUFFIX}"):
        if _OURS.fullmatch(left.name):
            remove_unless_held(left)


def remove_unless_held(path: Path) -> None:
    """Removes a file or folder that no living process holds, if possible."""
    with contextlib.suppress(OSError), held(path):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _lock(descriptor: int, kind: int, *, without_locks: bool = False) -> bool:
    """Takes a lock if it is free; returns `without_locks` if the filesystem has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return without_locks and error.errno in _NO_LOCKS
    return True


def make_folders(folder: Path) -> None:
    """Makes a folder and its parents, follows links, and flushes their names to the disk."""
    if folder.is_dir():
        return
    place = Path(os.path.realpath(folder))
    make_folders(place.parent)
    place.mkdir(exist_ok=True)
    sync_folder(place.parent)


def make_private_folder(folder: Path) -> None:
    """Makes a folder that only its owner can read, for files that reveal requests."""
    make_folders(folder)
    os.chmod(folder, 0o700)


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries to the disk, so that a rename survives a power cut; else warns."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except PermissionError:  # it may be writable, but not readable
        os.sync()
    except OSError as error:
        if error.errno not in _NO_SYNC:
            warnings.warn(
                f"{folder}: what was written there is whole, but a power cut could bring back what "
                f"was there before: the folder cannot be flushed to the disk: {error.strerror}",
                MoERuntimeWarning,
                stacklevel=2,
            )


_OLD_SUFFIX = ".old"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
"""Errors of filesystems without the call."""


@contextlib.contextmanager
def replace_folder(
    folder: str | os.PathLike[str],
    *,
    keeps: Callable[[Path], bool] | None = None,
    token: str | None = None,
) -> Iterator[Path]:
    """Yields a new empty folder, which replaces the old one when it is complete.

    If the `with` block fails, the new folder is removed and the old one stays. Parts of the old
    folder that cannot be removed stay beside the new one, with a warning.

    Args:
        folder: to be made or replaced; links to it stay.
        keeps: says which entries of the old folder are carried over into the new one, where this
            has none of the name; none when omitted.
        token: eight hexadecimal digits in the new folder's name (`partial_name`), where other
            processes write to it too. Random when omitted.
    """
    place = Path(os.path.realpath(folder))
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file; name a folder", str(folder))
    require_replaceable(place)
    make_folders(place.parent)
    recover_folder(place)
    new = partial_name(place, token)
    if token is not None and new.exists():
        with held(new, without_locks=True):
            shutil.rmtree(new)
    with contextlib.ExitStack() as stack:
        stack.enter_context(named_file(place))
        stack.callback(_clean_up, place, new)
        descriptor = stack.enter_context(new_held_folder(new, folder))
        yield new
        if place.exists():
            _carry_over(place, new, keeps)
            copy_rights(place, descriptor)
        _sync_tree(new)
        if place.exists():
            _swap(place, new)
        else:
            new.rename(place)
        sync_folder(place.parent)


def recover_folder(folder: str | os.PathLike[str]) -> None:
    """Completes what a kill cut short: the old folder gets its name, or the new content its place.

    Removes what else killed writers left.
    """
    place = Path(os.path.realpath(folder))
    for old in versions_of(place, _OLD_SUFFIX):
        if not _put_back(place, old):
            remove_unless_held(old)
    for left in versions_of(place):
        remove_unless_held(left)


def remove_or_warn(path: Path, why: str) -> None:
    """Removes a file or folder that may be missing; warns with `why` if it cannot."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    if path.exists():
        warnings.warn(f"{path}: could not be removed; {why}", MoERuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def new_held_folder(new: Path, folder: str | os.PathLike[str]) -> Iterator[int]:
    """Makes a folder beside another and locks it if the filesystem can; yields its descriptor."""
    with contextlib.ExitStack() as stack:
        while True:
            try:
                new.mkdir()
            except OSError as error:
                reason = f"no folder can be made beside it ({error.strerror})"
                raise OSError(error.errno, reason, str(folder)) from None
            # Until it is locked another writer may take it for abandoned and remove it.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if is_at(new, descriptor):
                    break
        yield descriptor


def _carry_over(old: Path, new: Path, keeps: Callable[[Path], bool] | None) -> None:
    if keeps is None:
        return
    for entry in sorted(old.iterdir()):
        target = new / entry.name
        if os.path.lexists(target) or not keeps(entry):
            continue
        if _is_real_folder(entry):
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(entry, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        shutil.copy2(source, target, follow_symlinks=False)


def _swap(place: Path, new: Path) -> None:
    """Replaces an old folder by a new one; the old one stays beside it until it is removed."""
    here, old = Path.cwd(), new.with_suffix(_OLD_SUFFIX)
    try:
        if not _exchange(place, new):
            os.rename(place, old)
            sync_folder(place.parent)
            os.rename(new, place)
    except OSError as error:
        if error.errno != errno.EXDEV:  # overlay filesystems do not move a folder of a lower layer
            raise
        copy = partial_name(place)
        shutil.copytree(place, copy, symlinks=True, copy_function=_link)
        os.rename(copy, old)
        sync_folder(place.parent)
        shutil.rmtree(place)
        os.rename(new, place)
    if here.is_relative_to(place):
        os.chdir(here if here.is_dir() else place)


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False if the system or filesystem cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _put_back(place: Path, old: Path) -> bool:
    """Restores the old folder unless the new one is in its place; whether it did."""
    if not old.exists() or (place.exists() and not old.with_suffix(PARTIAL_SUFFIX).exists()):
        return False
    shutil.rmtree(place, ignore_errors=True)
    os.rename(old, place)
    sync_folder(place.parent)
    return True


def _clean_up(place: Path, new: Path) -> None:
    """Removes the old folder, or a new one that failed."""
    old = new.with_suffix(_OLD_SUFFIX)
    _put_back(place, old)
    for left in (new, old):
        remove_or_warn(left, f"{place} does not need it")


def _sync_tree(folder: Path) -> None:
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(Path(where))
