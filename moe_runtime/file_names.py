"""Names of files and folders: those at home, and those beside a place for new versions of it.

A new version of a file or folder lies beside it until it is whole (``moe_runtime.files``,
``moe_runtime.folders``). Where a name leaves no room for what is put behind it, its end gives way
to a hash of the whole, so that two outputs never share what lies beside them.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

from moe_runtime.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"
READY_SUFFIX = ".ready"
DRAFT_SUFFIX = ".part"
INTERRUPTED_SUFFIX = ".interrupted"
DESCRIPTORS = re.compile(r"/proc/(\d+)(/task/\d+)?/fd")
_MOST_LINKS = 40
_MOST_NAME_BYTES = 255
_PARTIAL_BYTES = len(f".00000000{PARTIAL_SUFFIX}")
_INTERRUPTED_BYTES = len(f"{INTERRUPTED_SUFFIX}-0000")


def at_home(name: str) -> str:
    """A name as it was given, ``~`` or ``~user`` at its beginning replaced by that home folder.

    Shells do so with words, and neither with ``--output=~/x`` nor in files: every name that is
    given as text comes through here once. ``./~`` stays what it is.

    Raises:
        ValueError: there is no such user, or no home folder.
    """
    path = os.path.expanduser(name)
    if path.startswith("~"):
        user = path.partition("/")[0]
        raise ValueError(f"{name}: no home folder {user} is known; ./{name} is a name that has a ~")
    return path


def draft_of(path: str | os.PathLike[str]) -> Path:
    """Where an output lies while it grows: beside the file that its name leads to."""
    return _beside(end_of_links(path), DRAFT_SUFFIX, len(DRAFT_SUFFIX))


def interrupted_of(path: str | os.PathLike[str]) -> Path:
    """A name beside an output, which nothing has, for what a killed process left of it."""
    first = free = _beside(end_of_links(path), INTERRUPTED_SUFFIX, _INTERRUPTED_BYTES)
    number = 1
    while os.path.lexists(free):
        number += 1
        free = first.with_name(f"{first.name}-{number}")
    return free


def partial_name(place: Path, token: str | None = None) -> Path:
    """A name beside a file or folder for a new version of it; the token is random when omitted."""
    return _beside(place, f".{token or secrets.token_hex(4)}{PARTIAL_SUFFIX}", _PARTIAL_BYTES)


def partials_of(place: Path, suffix: str = PARTIAL_SUFFIX) -> list[Path]:
    """What lies beside a file or folder as versions of it; none where that cannot be listed."""
    stem = re.escape(_short(place.name, _PARTIAL_BYTES))
    ours = re.compile(rf"{stem}\.[0-9a-f]{{8}}{re.escape(suffix)}")
    try:
        names = os.listdir(place.parent)
    except PermissionError:
        return []
    return [place.parent / name for name in names if ours.fullmatch(name)]


def end_of_links(path: str | os.PathLike[str]) -> Path:
    """What a name leads to, there or not; open descriptors are not looked through."""
    end = Path(path)
    for _ in range(_MOST_LINKS):
        end = Path(os.path.realpath(end.parent), end.name)
        if DESCRIPTORS.fullmatch(str(end.parent)) or not os.path.islink(end):
            break
        end = end.parent / os.readlink(end)
    return end


def _beside(place: Path, suffix: str, room: int) -> Path:
    return place.with_name(_short(place.name, room) + suffix)


def _short(name: str, room: int) -> str:
    """A name that leaves room for so many bytes behind it."""
    raw = os.fsencode(name)
    if len(raw) + room <= _MOST_NAME_BYTES:
        return name
    mark = f"~{hashlib.sha256(raw).hexdigest()[:8]}"
    return raw[: _MOST_NAME_BYTES - room - len(mark)].decode(errors="ignore") + mark


def require_whole(folder: str | os.PathLike[str]) -> None:
    """Refuses to read a folder whose content is being replaced file by file, or was until a kill.

    Raises:
        CheckpointError: it is; says where the new content lies.
    """
    ready = partials_of(Path(os.path.realpath(folder)), READY_SUFFIX)
    if ready:
        raise CheckpointError(
            f"{folder}: is half replaced, with old files beside new ones; wait for the process "
            f"that writes it, or, where none does, write it again or use {ready[0]}, which is whole"
        )
