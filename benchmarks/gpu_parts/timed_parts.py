"""Commands one after another, each until a fixed moment, whose logs and results are collected.

What one leaves of its time is the next one's. Of a command that its time ends, what it has written
so far is kept; one that fails keeps no other from its turn.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

GRACE_S = 15.0
"""After an interrupt, to remove a checkpoint of gigabytes."""
SHOWN_LINES = 12
LATE = "its time ended"


class Part(NamedTuple):
    """One command.

    Attributes:
        name: of its log.
        seconds: that it may take, beside what others before it have left.
        command: is given them, less those of the end.
    """

    name: str
    seconds: float
    command: Callable[[float], Sequence[str]]


class PartOutcome(NamedTuple):
    """What became of a part: how it ended, and the seconds it took."""

    name: str
    end: str
    seconds: float

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself, and not well."""
        return self.end not in ("done", LATE)


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    written: Sequence[Path],
    *,
    root: Path,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartOutcome]:
    """Runs all of them, and says how each ended.

    Args:
        parts: in the order of their worth.
        folder: gets a log of each, and copies of what it wrote, as soon as it has ended.
        written: folders whose files of JSON are results.
        root: where commands run.
        clock: seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, end_s, outcomes = _stamps(written), clock(), []
    for part in parts:
        begun_s, end_s = clock(), end_s + part.seconds
        command = [*part.command(end_s - begun_s - GRACE_S)]
        print(f"== {part.name}: {shlex.join(command)[:300]}", flush=True)
        log = folder / f"{part.name}.log"
        try:
            with log.open("wb") as output:
                end = _run(command, output.fileno(), end_s - begun_s, root)
        finally:
            for path in _newer(written, before):
                shutil.copy2(path, folder)
        outcomes.append(PartOutcome(part.name, end, clock() - begun_s))
        print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]))
        print(f"== {part.name}: {end} after {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


def _run(command: Sequence[str], output: int, seconds: float, root: Path) -> str:
    """How a command ended."""
    program = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, cwd=root, start_new_session=True
    )
    try:
        status = program.wait(max(0.0, seconds))
        return "done" if status == 0 else f"failed with {status}"
    except subprocess.TimeoutExpired:
        return LATE
    finally:
        _end(program)


def _end(program: subprocess.Popen[bytes]) -> None:
    """Interrupts a program, and after a while kills it and all that it has started."""
    try:
        if program.poll() is None:
            program.send_signal(signal.SIGINT)
            program.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print("it does not end by an interrupt, and is killed", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def _stamps(folders: Iterable[Path]) -> dict[Path, int]:
    found = (path for folder in folders for path in folder.glob("*.json"))
    return {path: path.stat().st_mtime_ns for path in found}


def _newer(folders: Iterable[Path], before: dict[Path, int]) -> list[Path]:
    """Results that were written since then."""
    return [path for path, stamp in _stamps(folders).items() if before.get(path) != stamp]
