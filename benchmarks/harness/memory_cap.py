"""Control groups that cap a process's memory, page cache included.

A file that is mapped or read through the page cache counts against the cap, as on a machine that
has only that much memory. Making a group takes rights that ordinary users lack; then the reason is
told and capped runs are skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.interruption import interruptions_held

CGROUP_ROOT = Path("/sys/fs/cgroup")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
REMOVAL_ATTEMPTS = 50
REMOVAL_PAUSE_S = 0.1


class CapUnavailableError(Exception):
    """Memory cannot be capped here; the message says why."""


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """A control group that exists, with its limit set."""

    folder: Path
    limit_bytes: int
    unified: bool

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command that joins the group first and then becomes `command`."""
        join = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self.folder / "cgroup.procs"), *command]

    def peak_bytes(self) -> int | None:
        """The kernel's peak counter of the group; None on kernels that keep none."""
        name = "memory.peak" if self.unified else "memory.max_usage_in_bytes"
        file = self.folder / name
        return int(file.read_text()) if file.is_file() else None

    def num_oom_kills(self) -> int:
        """How many processes of the group the kernel killed for memory."""
        file = self.folder / ("memory.events" if self.unified else "memory.oom_control")
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts.get("oom_kill", 0))


@contextmanager
def memory_cap(limit_bytes: int) -> Iterator[MemoryCap]:
    """Makes a control group with the limit and removes it at the end.

    Raises:
        CapUnavailableError: no memory controller, or no rights to use it.
    """
    unified = (CGROUP_ROOT / "cgroup.controllers").is_file()
    parent = CGROUP_ROOT if unified else CGROUP_ROOT / "memory"
    folder = parent / f"moe-benchmark-{os.getpid()}"
    if not parent.is_dir():
        raise CapUnavailableError(f"no memory controller under {CGROUP_ROOT}")
    try:
        _make(folder)
        _set_limit(folder, limit_bytes, unified)
        yield MemoryCap(folder, limit_bytes, unified)
    finally:
        with interruptions_held():
            _remove(folder)


def why_unavailable() -> str | None:
    """Why memory cannot be capped here, in one line; None where it can."""
    try:
        with memory_cap(1 << 30):
            return None
    except CapUnavailableError as reason:
        return str(reason)


def drop_page_cache() -> bool:
    """Empties the page cache, so that the next run starts cold; False without the rights to."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CapUnavailableError(f"cannot make {folder}: {error.strerror}; run as root") from error


def _set_limit(folder: Path, limit_bytes: int, unified: bool) -> None:
    limit = folder / ("memory.max" if unified else "memory.limit_in_bytes")
    swap = folder / ("memory.swap.max" if unified else "memory.memsw.limit_in_bytes")
    try:
        if not limit.is_file():
            raise CapUnavailableError(f"{folder.parent} does not hand down its memory controller")
        limit.write_text(str(limit_bytes))
    except OSError as error:
        raise CapUnavailableError(f"cannot set {limit}: {error.strerror}") from error
    # Kernels without swap accounting have no such file.
    with suppress(OSError):
        swap.write_text("0" if unified else str(limit_bytes))


def _remove(folder: Path) -> None:
    # A group stays busy for a moment after its last process has ended.
    for _ in range(REMOVAL_ATTEMPTS):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(REMOVAL_PAUSE_S)
