"""Runs command lines on bad input and judges how they end.

A parent that has imported everything forks a child for each case, because starting Python with
torch and transformers takes seconds. The few cases about the start itself are real processes.
"""

import contextlib
import errno
import hashlib
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

LIMIT_S = 20.0
"""Longest that a case may take on a machine that has a processor for it."""

INTERRUPTED = {signal.SIGINT: {130}, signal.SIGTERM: {143}}
"""Exit codes after a signal, as a shell sees them."""

_LONGEST_LINE = 2000
_LEFTOVER = re.compile(r"\.(part|partial|tmp)$")
_POLL_S = 0.002


@dataclass
class Case:
    """A command line, and what may come of it.

    Attributes:
        words: arguments of ``moe-runtime``; it runs in the scratch folder.
        outputs: names in the scratch folder that may appear when it succeeds.
        keeps: those that may stay when it fails too: folders of runs, whose prepared text serves
            the next attempt.
        stdin: bytes on standard input.
        shell: for a real process: a shell command in which ``"$@"`` is the program.
        send: a signal and the seconds after which it is sent.
        room_bytes: address space beyond what the process has when it begins.
        codes: exit codes that are right.
        lines: lines on stderr that are right where it fails; no lines where nobody reads them.
    """

    words: Sequence[str]
    outputs: Sequence[str] = ()
    keeps: Sequence[str] = ()
    stdin: bytes = b""
    shell: str | None = None
    send: tuple[signal.Signals, float] | None = None
    room_bytes: int | None = None
    codes: frozenset[int] = frozenset({0, 2})
    lines: tuple[int, ...] = (1,)


Maker = Callable[[Random, Path, Path], Case]
"""Makes a case from random numbers, in a scratch folder, out of sound material."""


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        code: exit code as a shell has it; None where the time ran out.
        seconds: how long it took.
        faults: what was wrong; empty where all was right.
    """

    code: int | None
    seconds: float
    out: str
    err: str
    faults: list[str] = field(default_factory=list)


def run_case(case: Case, place: Path, main: Callable[[Sequence[str]], int]) -> Outcome:
    """Runs a case in its scratch folder and judges the end.

    Args:
        case: what to run.
        place: the scratch folder, already filled.
        main: the program; called in a child of this process.
    """
    before = snapshot(place)
    report = place.parent / f"{place.name}.out"
    report.mkdir()
    with (report / "in").open("wb") as file:
        file.write(case.stdin)
    begun = time.monotonic()
    if case.shell is None:
        process = _fork(case, place, report, main)
    else:
        process = _start(case, place, report)
    code = _wait(process, case.send, begun)
    out, err = (
        (report / name).read_bytes()[: 1 << 20].decode(errors="backslashreplace")
        for name in ("out", "err")
    )
    outcome = Outcome(code, time.monotonic() - begun, out, err)
    outcome.faults = list(_faults(case, outcome, before, snapshot(place)))
    shutil.rmtree(report)
    return outcome


def snapshot(folder: Path) -> dict[str, str]:
    """Every path below a folder with what it holds: a digest, a link's target, or its kind."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            status = path.lstat()
            key = str(path.relative_to(folder))
            if stat.S_ISLNK(status.st_mode):
                found[key] = f"link to {os.readlink(path)}"
            elif stat.S_ISREG(status.st_mode):
                small = status.st_size < 1 << 26
                digest = hashlib.sha256(path.read_bytes()).hexdigest() if small else ""
                found[key] = f"{status.st_size} bytes {digest}"
            else:
                found[key] = f"kind {stat.S_IFMT(status.st_mode):o}"
    return found


def _fork(case: Case, place: Path, report: Path, main: Callable[[Sequence[str]], int]) -> int:
    # A signal waits until the child is the program; here it would hit the parent's code.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTED)
    process = os.fork()
    if process:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process
    # From here on this is the child, which never returns.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in enumerate(("in", "out", "err")):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        os.dup2(os.open(report / name, flags), number)
    os.chdir(place)
    if case.room_bytes is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + case.room_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except KeyboardInterrupt:
        os._exit(130)
    code = 70
    try:
        code = main(case.words)
        sys.stdout.flush()
        sys.stderr.flush()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    finally:
        if code == 70:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)


def _start(case: Case, place: Path, report: Path) -> int:
    program = str(Path(sys.executable).with_name("moe-runtime"))
    with (
        (report / "in").open("rb") as stdin,
        (report / "out").open("wb") as stdout,
        (report / "err").open("wb") as stderr,
    ):
        started = subprocess.Popen(
            ["sh", "-c", case.shell or "", "sh", program, *case.words],
            cwd=place,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    started.returncode = 0  # it is waited for by its number, as the forked ones
    return started.pid


def _wait(process: int, send: tuple[signal.Signals, float] | None, begun: float) -> int | None:
    """The exit code of a child; None where it had to be killed."""
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            return code if code >= 0 else 128 - code
        passed = time.monotonic() - begun
        if send is not None and passed >= send[1]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, send[0])
            send = None
        if passed > LIMIT_S * _crowding():
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(_POLL_S)


def _crowding() -> float:
    """How many processes want each processor: all take that much longer."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _faults(
    case: Case, outcome: Outcome, before: dict[str, str], after: dict[str, str]
) -> Iterator[str]:
    codes = set(case.codes)
    if case.send is not None:
        codes |= INTERRUPTED[case.send[0]]
    if outcome.code is None:
        yield f"did not end within {LIMIT_S:g} s"
    elif outcome.code not in codes:
        yield f"exit code {outcome.code}, expected one of {sorted(codes)}"
    for word in ("Traceback", "Exception ignored", "Warning:"):
        if word in outcome.err:
            yield f"{word!r} on stderr"
    if outcome.code == 2:
        yield from _faults_of_message(case, outcome)
    for path, content in before.items():
        if after.get(path) != content and not (outcome.code in (0, 130) and path in case.outputs):
            yield f"{path} was {'replaced' if path in after else 'removed'}"
    for path in after.keys() - before.keys():
        ended_well = outcome.code in (0, 130, 143)
        allowed = (*case.keeps, *(case.outputs if ended_well else ()))
        is_declared = any(
            path == name
            or path.startswith(f"{name}/")
            or (name in after and name.startswith(f"{path}/"))  # a folder above it
            for name in allowed
        )
        if _LEFTOVER.search(path) or not is_declared:
            yield f"{path} was left behind"


def _faults_of_message(case: Case, outcome: Outcome) -> Iterator[str]:
    lines = outcome.err.splitlines()
    said = [line for line in lines if line.startswith("moe-runtime: error: ")]
    if len(lines) not in case.lines or len(said) != len(lines):
        yield f"{len(lines)} lines on stderr, expected one that begins with 'moe-runtime: error: '"
    for line in lines:
        if len(line) > _LONGEST_LINE:
            yield f"a line of {len(line)} characters"
        if not line.isprintable():
            yield "a line that is not printable"


def remove(place: Path) -> None:
    """Deletes a scratch folder."""
    try:
        shutil.rmtree(place)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
