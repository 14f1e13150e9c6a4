"""Every call into the operating system that an output makes, to fail or to kill at the n-th."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

CHANGING = (*("open", "fsync", "fchmod", "replace", "rename", "mkdir", "unlink", "rmdir", "link"),)
"""Calls that change what lies on the disk; between two of them a kill changes nothing."""
LOOKING = ("fdopen", "close", "listdir", "scandir", "stat", "lstat", "fstat")


@contextlib.contextmanager
def at_call(number: int, act: Callable[[str], None], names: tuple[str, ...]) -> Iterator[list[str]]:
    """Calls `act` with the function's name instead of the n-th call; gives the names called."""
    made: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            made.append(name)
            if len(made) == number:
                act(name)
            return real(*args, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(os, name, watched(name)))
        yield made


def fail(name: str) -> None:
    """A full disk, at whatever call."""
    raise OSError(28, "No space left on device", name)


def outcomes_of_kills(program: str, folder: Path) -> list[str]:
    """Runs a program once for every call of `CHANGING`, killed just before that call.

    Args:
        program: defines `prepare()`, `write()` and `state() -> str`.
        folder: the program's working directory.

    Returns:
        What `state` said after each kill, and last after a run to the end.
    """
    frame = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from injected_faults import run_and_kill\n"
        f"{program}\n"
        "run_and_kill(prepare, write, state)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", frame], check=True, cwd=folder, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def run_and_kill(
    prepare: Callable[[], None], write: Callable[[], None], state: Callable[[], str]
) -> None:
    """In a process without threads: forks for every call, prints the state after each."""
    number, killed = 0, True
    while killed:
        number += 1
        prepare()
        child = os.fork()
        if not child:
            with at_call(number, lambda name: os.kill(os.getpid(), signal.SIGKILL), CHANGING):
                write()
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{state()}\n")
        sys.stdout.flush()
