"""Cap a process's memory, page cache included, with Linux control groups.

Uses a group of our own if permitted (as root, or in a delegated subtree), or else a systemd scope
of the user.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.errors import MoERuntimeError

CGROUP_ROOT = Path("/sys/fs/cgroup")
INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM)
_MEMBERSHIPS = Path("/proc/self/cgroup")
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_REMOVAL_ATTEMPTS, _REMOVAL_PAUSE_S = 50, 0.1
_TRIAL_BYTES, _TRIAL_S = 1 << 30, 20.0
# The limit that the scope's memory controller reports: systemd drops limits it cannot set.
_SAY_LIMIT = 'cat "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)/memory.max"'


class CapUnavailableError(MoERuntimeError):
    """Memory cannot be capped on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class ScopeCap:
    """A systemd scope per command. It cannot report what the kernel killed."""

    program: str
    limit_bytes: int

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Wrap ``command`` so that it runs under the limit."""
        limits = ["-p", f"MemoryMax={self.limit_bytes}", "-p", "MemorySwapMax=0"]
        return [self.program, "--user", "--scope", "--quiet", "--collect", *limits, "--", *command]

    def num_oom_kills(self) -> int:
        """The number of processes that the kernel killed for memory, if known."""
        return 0


@dataclass(frozen=True, slots=True)
class GroupCap:
    """Like `ScopeCap`, with an existing control group whose limit is set."""

    folder: Path
    limit_bytes: int
    unified: bool

    def wrap(self, command: Sequence[str]) -> list[str]:
        join = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self.folder / "cgroup.procs"), *command]

    def num_oom_kills(self) -> int:
        file = self.folder / ("memory.events" if self.unified else "memory.oom_control")
        counts = dict(line.split() for line in file.read_text().splitlines())
        return int(counts.get("oom_kill", 0))


MemoryCap = GroupCap | ScopeCap


@contextmanager
def memory_cap(limit_bytes: int) -> Iterator[MemoryCap]:
    """Set a limit with our own control group or else with systemd, and remove it at the end."""
    folder: Path | None = None
    try:
        try:
            with interruptions_held():
                parents, unified = _own_parents()
                folder = make_group(parents)
            set_limit(folder, limit_bytes, unified=unified)
            cap: MemoryCap = GroupCap(folder, limit_bytes, unified)
        except CapUnavailableError as reason:
            cap = ScopeCap(require_scopes(reason), limit_bytes)
        yield cap
    finally:
        if folder is not None:
            with interruptions_held():
                _remove(folder)


def why_unavailable() -> str | None:
    """Why memory cannot be capped here, in one line; None if a trial succeeds."""
    try:
        with memory_cap(_TRIAL_BYTES) as cap:
            done = subprocess.run(cap.wrap(["true"]), capture_output=True, text=True, check=False)
    except CapUnavailableError as reason:
        return str(reason)
    return None if done.returncode == 0 else f"no process can join a group: {done.stderr.strip()}"


def forget(files: Iterable[Path]) -> None:
    """Drop files from the page cache, except mapped pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def drop_page_cache() -> bool:
    """Empty the page cache for a cold start; return False without permission."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3")
    except OSError:
        return False
    return True


@contextmanager
def interruptions_held() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def usable_parents(root: Path, memberships: str, *, unified: bool) -> list[Path]:
    """Groups that may hold a new group with a memory limit, the nearest first."""
    rows = [line.split(":", 2) for line in memberships.splitlines()]
    wanted = "" if unified else "memory"
    own = next((path for _, names, path in rows if wanted in names.split(",")), "/")
    group = root / own.lstrip("/")
    levels = [level for level in (group, *group.parents) if level.is_relative_to(root)]
    return [level for level in levels if level.is_dir() and (not unified or _hands_down(level))]


def make_group(parents: Sequence[Path]) -> Path:
    """Create a group in the first parent that permits it."""
    problem = f"no group of {CGROUP_ROOT} hands down its memory controller"
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=f"moe-benchmark-{os.getpid()}-", dir=parent))
        except OSError as error:
            problem = f"cannot make a control group in {parent}: {error.strerror}"
    raise CapUnavailableError(problem)


def set_limit(folder: Path, limit_bytes: int, *, unified: bool) -> None:
    """Limit a group's memory, and its swap to zero."""
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


def require_scopes(
    reason: CapUnavailableError, find: Callable[[str], str | None] = shutil.which
) -> str:
    """The path of ``systemd-run``, if this user gets scopes whose limit is enforced."""
    program = find("systemd-run")
    if program is None:
        raise CapUnavailableError(f"{reason}; there is no systemd-run either; run as root")
    command = ScopeCap(program, _TRIAL_BYTES).wrap(["/bin/sh", "-c", _SAY_LIMIT])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TRIAL_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CapUnavailableError(f"{reason}; systemd-run --user: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise CapUnavailableError(f"{reason}; systemd-run --user: {said}")
    if done.stdout.strip() != str(_TRIAL_BYTES):
        raise CapUnavailableError(f"{reason}; systemd's scopes of this user have no memory limit")
    return program


def _own_parents() -> tuple[list[Path], bool]:
    unified = (CGROUP_ROOT / "cgroup.controllers").is_file()
    root = CGROUP_ROOT if unified else CGROUP_ROOT / "memory"
    if not root.is_dir() or not _MEMBERSHIPS.is_file():
        raise CapUnavailableError(f"no memory controller under {CGROUP_ROOT}")
    return usable_parents(root, _MEMBERSHIPS.read_text(), unified=unified), unified


def _hands_down(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _remove(folder: Path) -> None:
    # A group stays busy briefly after its last process has ended.
    for _ in range(_REMOVAL_ATTEMPTS):
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(_REMOVAL_PAUSE_S)
