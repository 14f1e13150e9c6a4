"""Processes as `torchrun` starts them, without paying for its imports and theirs every time."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from rank_pool import start_server

# What a token takes at least, so that the test has time to do something to a process.
_TOKEN_S = 0.02


class Launch(contextlib.AbstractContextManager["Launch"]):
    """The command line `moe-runtime` in several processes of one group."""

    def __init__(
        self,
        words: list[str],
        size: int,
        folder: Path,
        *,
        store_port: int | None = None,
        attempt: int = 0,
        typed: str = "",
        dies_after: tuple[int, Path] | None = None,
    ) -> None:
        """``typed`` is the standard input of them all. The second dies in its pass of that number,
        once the file has a line."""
        (folder / "in").write_text(typed)
        self.folder = folder
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1] if store_port is None else store_port
        context = start_server()
        self.processes: list[BaseProcess] = []
        for rank in range(size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_USE_AGENT_STORE": str(store_port is not None),
            }
            process = context.Process(
                target=run_words,
                args=(words, environment, folder, rank, dies_after if rank == 1 else None),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    def stdout(self, rank: int = 0) -> str:
        """What a process has printed so far."""
        path = self.folder / f"out-{rank}"
        return path.read_text(errors="replace") if path.exists() else ""

    def ended(self) -> list[int | None]:
        """The exit codes of all processes, once they have ended."""
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def errors(self) -> list[str]:
        """The error lines of all processes."""
        texts = [(self.folder / f"err-{r}").read_text() for r in range(len(self.processes))]
        lines = "\n".join(texts).splitlines()
        return [line for line in lines if line.startswith("moe-runtime: error:")]

    def wait_for_text(self, num_characters: int) -> None:
        """Returns once the first process has printed so much, or has ended."""
        while len(self.stdout()) < num_characters and self.processes[0].is_alive():
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def run_words(
    words: list[str],
    environment: dict[str, str],
    folder: Path,
    rank: int,
    dies_after: tuple[int, Path] | None = None,
) -> None:
    """Runs the command line in this process, with its streams in files."""
    for number, name in ((0, "in"), (1, f"out-{rank}"), (2, f"err-{rank}")):
        with open(folder / name, "w" if number else "r") as file:
            os.dup2(file.fileno(), number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ |= environment
    import torch

    import moe_runtime
    from moe_runtime.cli.main import main

    torch.set_num_threads(1)
    load = moe_runtime.load

    def load_slow(*args, **options):
        model = load(*args, **options)
        model.register_forward_hook(lambda *_: time.sleep(_TOKEN_S))
        if dies_after is not None:
            model.register_forward_hook(_death_of(*dies_after))
        return model

    moe_runtime.load = load_slow
    sys.exit(main(words))


def _death_of(num_passes: int, file: Path) -> Callable[..., None]:
    left = iter(range(num_passes - 1))

    def die(*_: object) -> None:
        if next(left, None) is None:
            while not (file.exists() and "\n" in file.read_text()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    return die
