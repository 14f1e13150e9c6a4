"""Folders that are replaced as a whole: a kill at any point leaves the old one or the new one.

The new folder lies beside the old one until it is whole. Then both change places in one step
(Linux' `renameat2`). Where the filesystem cannot exchange, the old folder is first renamed, or
copied, to `NAME.<8 hex digits>.old`; after a kill in between the next writer puts it back.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from moe_runtime.errors import MoERuntimeWarning, named_file
from moe_runtime.files import (
    PARTIAL_SUFFIX,
    copy_rights,
    held,
    is_at,
    make_folders,
    partial_name,
    remove_unless_held,
    require_replaceable,
    sync_folder,
    versions_of,
)

_OLD_SUFFIX = ".old"
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
"""What filesystems say that lack the call."""


@contextlib.contextmanager
def replace_folder(
    folder: str | os.PathLike[str],
    *,
    keeps: Callable[[Path], bool] | None = None,
    token: str | None = None,
) -> Iterator[Path]:
    """Gives an empty folder, which replaces another one once it is whole.

    When the `with` block fails, the new folder is removed and the old one stays. What cannot be
    removed of the old one stays beside it, with a warning.

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
    """Makes and locks a folder beside another, where its filesystem has locks; its descriptor."""
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
    """Links the entries to keep of the old folder into the new one."""
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
    """Puts a new folder in the place of an old one; the old one, if it is left, stays beside it."""
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
    """Exchanges two names in one step; False where system or filesystem cannot."""
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
    """Gives the old folder its place again unless the new one is there; whether it did."""
    if not old.exists() or (place.exists() and not old.with_suffix(PARTIAL_SUFFIX).exists()):
        return False
    shutil.rmtree(place, ignore_errors=True)
    os.rename(old, place)
    sync_folder(place.parent)
    return True


def _clean_up(place: Path, new: Path) -> None:
    """Removes what is not wanted beside a folder: the old one, or a new one that failed."""
    old = new.with_suffix(_OLD_SUFFIX)
    _put_back(place, old)
    for left in (new, old):
        remove_or_warn(left, f"{place} does not need it")


def _sync_tree(folder: Path) -> None:
    """Flushes every file of a folder, and the folders themselves, to the disk."""
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
