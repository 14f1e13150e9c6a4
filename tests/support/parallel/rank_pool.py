"""Processes that form a gloo group and run functions of the test helpers, all at once."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from warm_python import warm_python

# Imports of the first processes alone take a minute on a busy machine.
DEADLINE_S = 250.0


def start_server() -> multiprocessing.context.ForkServerContext:
    """The clean process that others are forked from, itself forked where all imports are done."""
    context = multiprocessing.get_context("forkserver")
    context.set_executable(warm_python())
    forkserver.ensure_running()
    return context


class RankFailed(AssertionError):
    """A function raised on some rank; the message has its traceback."""


class RankPool:
    """`size` processes in one gloo group."""

    def __init__(self, size: int, *, timeout_s: float = 200.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory()
        context = start_server()
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, rank, size, str(Path(self._folder.name, "store")), timeout_s),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(*args)` on every rank; results by rank."""
        results = self.try_run(function, *args)
        failures = [text for ok, text in results if not ok]
        if failures:
            self.close()
            raise RankFailed("\n".join(dict.fromkeys(failures)))
        return [value for _, value in results]

    def try_run(self, function: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """As `run`, but gives `(False, traceback)` for ranks on which the function raised."""
        self.start(function, *args)
        return self.collect()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Has all ranks begin with `function(*args)`."""
        for pipe in self._pipes:
            pipe.send((function, args))

    def collect(self) -> list[tuple[bool, Any]]:
        """Waits for what was started; results as of `try_run`."""
        deadline = time.monotonic() + DEADLINE_S
        return [self._result(rank, deadline) for rank in range(self.size)]

    def collect_of(self, rank: int) -> tuple[bool, Any]:
        """Waits for what was started on one rank, whatever the others do."""
        return self._result(rank, time.monotonic() + DEADLINE_S)

    def _result(self, rank: int, deadline: float) -> tuple[bool, Any]:
        pipe = self._pipes[rank]
        try:
            if pipe.poll(max(0.0, deadline - time.monotonic())):
                return pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, f"rank {rank} ended"
        return False, f"rank {rank} gave no answer within {DEADLINE_S} s"

    @property
    def is_usable(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, rank: int, size: int, store_path: str, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(rank)
        try:
            answer = (True, function(*args))
        # Whatever went wrong belongs into the report of the test.
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)
