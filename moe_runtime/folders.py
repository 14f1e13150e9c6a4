"""Folders that are replaced as a whole: a kill at any point leaves the old one or the new one.

The new folder is made beside the old one, brought to the disk, and changes places with it in one
step (Linux' ``renameat2``). Only then the old content is removed. Where the filesystem cannot
exchange, the old folder first steps aside as ``NAME.<8 hex digits>.old``; after a kill between the
two steps the next writer puts it back.

Some folders must stay where they are: the working directory, which this process would lose, and on
an overlay filesystem those of a lower layer. Their content is replaced file by file, while the new
folder lies whole beside them as ``NAME.<8 hex digits>.ready``; after a kill in between the next
writer goes on from there, and readers refuse the folder (`require_whole`).
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
from moe_runtime.file_names import PARTIAL_SUFFIX, READY_SUFFIX, partial_name, partials_of
from moe_runtime.files import (
    NO_LOCKS,
    copy_rights,
    held,
    make_folders,
    remove_unless_held,
    sync_folder,
    sync_name,
)
from moe_runtime.places import is_at, require_replaceable

_ASIDE_SUFFIX = ".old"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


@contextlib.contextmanager
def replace_folder(
    folder: str | os.PathLike[str],
    *,
    keeps: Callable[[Path], bool] | None = None,
    token: str | None = None,
) -> Iterator[Path]:
    """Gives an empty folder, which takes the place of another one once it is whole.

    When the ``with`` block fails, the new folder is removed and the old one stays as it was. What
    of the old one cannot be removed afterwards is left beside it with a ``MoERuntimeWarning``.

    Args:
        folder: to be made or replaced; links to it stay.
        keeps: says which entries of the old folder go over into the new one, where this has none of
            the name; none when omitted.
        token: eight hexadecimal digits in the new folder's name (`partial_name`), where other
            processes write to it too; what a killed caller left under the name is removed, also
            where the filesystem has no locks. Random when omitted.

    Yields:
        The folder to write to.

    Raises:
        NotADirectoryError: something else has the name.
        BlockingIOError: another process replaces the content of the folder.
        OSError: it cannot be written, or nothing can take its place.
    """
    place = Path(os.path.realpath(folder))
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is a file; name a folder", str(folder))
    require_replaceable(place)
    make_folders(place.parent)
    recover_folder(place)
    new = partial_name(place, token)
    if token is not None and new.exists():
        _remove_left(new)
    with contextlib.ExitStack() as stack:
        stack.enter_context(named_file(place))
        stack.callback(_clean_up, place, new)
        descriptor = stack.enter_context(new_held_folder(new, folder))
        yield new
        if place.exists():
            _carry_over(place, new, keeps)
            copy_rights(place, descriptor)
        sync_tree(new)
        if place.exists():
            _swap(place, new)
        else:
            new.rename(place)
        sync_name(place)


def recover_folder(folder: str | os.PathLike[str]) -> None:
    """Ends what a kill cut off: the old folder is put back, or all of the new content in place.

    What else killed writers left is removed.

    Raises:
        BlockingIOError: another process replaces the content of the folder.
        OSError: it cannot be put back.
    """
    place = Path(os.path.realpath(folder))
    for ready in sorted(partials_of(place, READY_SUFFIX)):
        with held(ready, advice=f"move its files into {place}, which needs them"):
            place.mkdir(exist_ok=True)
            _fill_from(place, ready)
    for aside in sorted(partials_of(place, _ASIDE_SUFFIX)):
        if place.exists():
            remove_unless_held(aside)
        else:
            os.rename(aside, place)
            sync_folder(place.parent)
    for left in partials_of(place):
        remove_unless_held(left)


def remove_or_warn(path: Path, why: str) -> None:
    """Removes a file or folder; warns (``MoERuntimeWarning``) of what cannot be removed.

    Args:
        path: what to remove; may be missing.
        why: why nobody misses it, for the warning.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
    if path.exists():
        warnings.warn(f"{path}: could not be removed; {why}", MoERuntimeWarning, stacklevel=2)


def sync_tree(folder: Path) -> None:
    """Brings every file of a folder, and the folders themselves, to the disk."""
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


def _is_worked_in(place: Path) -> bool:
    """Whether this process works in a folder, which it would lose if that were replaced."""
    try:
        return place.exists() and Path.cwd().is_relative_to(place)
    except FileNotFoundError:  # it was removed already
        return False


def _remove_left(folder: Path) -> None:
    """Removes a folder of a name that is ours, unless a living process is seen to hold it.

    Raises:
        BlockingIOError: one does.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process is writing it", str(folder)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    shutil.rmtree(folder)


@contextlib.contextmanager
def new_held_folder(new: Path, folder: str | os.PathLike[str]) -> Iterator[int]:
    """Makes a folder beside another that this process holds, where its filesystem has locks.

    Args:
        new: its name.
        folder: the other one, for the message.

    Yields:
        A descriptor of it.

    Raises:
        OSError: it cannot be made.
    """
    with contextlib.ExitStack() as stack:
        while True:
            try:
                new.mkdir()
            except OSError as error:
                reason = f"no folder can be made beside it ({error.strerror})"
                raise OSError(error.errno, reason, str(folder)) from None
            # Another process may take it for left behind, and remove it, until it is held.
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, descriptor)
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if is_at(new, descriptor):
                    break
        yield descriptor


def _carry_over(old: Path, new: Path, keeps: Callable[[Path], bool] | None) -> None:
    """Links what stays of the old folder into the new one; it is in both then."""
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
    if not _is_worked_in(place):
        try:
            if not _exchange(place, new):
                os.rename(place, _aside(new))
                sync_folder(place.parent)
                os.rename(new, place)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:  # as overlay filesystems say of a lower layer's folder
                raise
    ready = new.with_suffix(READY_SUFFIX)
    os.rename(new, ready)
    sync_folder(place.parent)
    _fill_from(place, ready)


def _fill_from(place: Path, ready: Path) -> None:
    """Gives a folder the content of another one, which is whole until all of it is there.

    Meanwhile it has no ``config.json``, so that nothing else takes it for a checkpoint either.
    """
    for name in sorted(os.listdir(place), key=_turn, reverse=True):
        if name.endswith(".json") and not _is_real_folder(place / name):
            (place / name).unlink()
    _fill(place, ready)
    sync_tree(place)
    os.rename(ready, ready.with_suffix(PARTIAL_SUFFIX))


def _turn(name: str) -> tuple[bool, bool, str]:
    """Orders files: what describes the others comes after them, and ``config.json`` last."""
    return name.endswith(".json"), name == "config.json", name


def _fill(place: Path, ready: Path) -> None:
    """Removes what one folder has and another one has not, and links all of that into it."""
    names = sorted(os.listdir(ready), key=_turn)
    for entry in sorted(place.iterdir()):
        if entry.name in names:
            continue
        if _is_real_folder(entry):
            shutil.rmtree(entry)
        else:
            entry.unlink()
    for name in names:
        entry, target = ready / name, place / name
        if _is_real_folder(entry):
            if not _is_real_folder(target):
                target.unlink(missing_ok=True)
                target.mkdir()
                shutil.copystat(entry, target)
            _fill(target, entry)
        elif not (os.path.lexists(target) and os.path.samestat(entry.lstat(), target.lstat())):
            if _is_real_folder(target):
                shutil.rmtree(target)
            beside = partial_name(target)
            _link(entry, beside)
            os.rename(beside, target)


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _aside(new: Path) -> Path:
    """Where the old folder steps to make room for a new one."""
    return new.with_suffix(_ASIDE_SUFFIX)


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


def _clean_up(place: Path, new: Path) -> None:
    """Removes what is not wanted beside a folder: the old one, or a new one that failed."""
    aside = _aside(new)
    if aside.exists() and not place.exists():
        os.rename(aside, place)
    for left in (new, aside):
        remove_or_warn(left, f"{place} does not need it")
