"""The ranks of ``bench dispatch`` on this machine: this process is the first, its children follow.

They meet in a file before torch makes their group, so that a rank that ended is named at once.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import (  # pyright: ignore[reportPrivateImportUsage]
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
)

from moe_runtime.benchmarks.cases.dispatch import DispatchBenchPlan, ExchangeShape, measure_dispatch
from moe_runtime.benchmarks.suite.memory_cap import INTERRUPTIONS, interruptions_held
from moe_runtime.benchmarks.suite.runner import Rules
from moe_runtime.errors import RankFailureError

_JOINING_S, _LEAVING_S = 120.0, 10.0
_POLL_S, _SEEN_S = 0.01, 0.5
# A rank may compute long between two exchanges; one that ended breaks them at once.
_EXCHANGES = timedelta(hours=6)


@contextmanager
def ranks_here(
    plan: DispatchBenchPlan, num_ranks: int, store: str, *, limit_s: float = _JOINING_S
) -> Iterator[None]:
    """A default group of this process, the first rank, and others that follow within the block."""
    others: list[subprocess.Popen[bytes]] = []

    def find_ended() -> list[int]:
        return [rank for rank, one in enumerate(others, 1) if one.poll() is not None]

    try:
        for rank in range(1, num_ranks):
            # What is started is in the list, whenever Ctrl-C comes.
            with interruptions_held():
                others.append(_start(plan, rank, num_ranks, store))
        try:
            join(0, num_ranks, store, limit_s, find_ended)
            yield
        except (RuntimeError, RankFailureError) as error:
            if reason := why_ended(num_ranks, store, find_ended):
                raise reason from error
            raise
        dist.destroy_process_group()
        for one in others:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(_LEAVING_S)
    finally:
        with interruptions_held():
            for one in others:
                one.kill()
                one.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def join(
    rank: int, num_ranks: int, store: str, limit_s: float, find_ended: Callable[[], Sequence[int]]
) -> None:
    """Waits for all ranks, then makes the default group; this process computes with one thread."""
    torch.set_num_threads(1)
    meeting = FileStore(store, num_ranks)
    meeting.set(f"rank {rank}", "here")
    deadline = time.monotonic() + limit_s
    while missing := [one for one in range(num_ranks) if not meeting.check([f"rank {one}"])]:
        ended = [one for one in find_ended() if one in missing]
        if ended or time.monotonic() > deadline:
            late = f"did not join within {limit_s:g} s"
            raise RankFailureError(
                f"{_names(ended or missing)} of {num_ranks} "
                + ("ended before the group was made" if ended else late),
                ranks=tuple(ended or missing),
            )
        time.sleep(_POLL_S)
    group_store = PrefixStore("group", meeting)
    dist.init_process_group(
        "gloo", store=group_store, rank=rank, world_size=num_ranks, timeout=_EXCHANGES
    )


def why_ended(
    num_ranks: int, store: str, find_ended: Callable[[], Sequence[int]]
) -> RankFailureError | None:
    """Names the ranks that ended, with the last line of the first one; None where none has."""
    deadline = time.monotonic() + _SEEN_S
    # Torch notices a closed connection before the kernel says that the process has ended.
    while not (ended := find_ended()):
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    said = _log(store, ended[0]).read_text(encoding="utf-8", errors="replace").splitlines()
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    return RankFailureError(f"{_names(ended)} of {num_ranks} ended: {last}", ranks=tuple(ended))


def follow(rank: int, num_ranks: int, store: str) -> None:
    """What a child does: it reads its plan, joins, and does what the first rank says."""
    # The first rank held them back when it started this process.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTIONS)
    said = json.load(sys.stdin)
    shapes = [ExchangeShape(**shape) for shape in said["shapes"]]
    first = said["first"]
    join(rank, num_ranks, store, _JOINING_S, lambda: [0] if os.getppid() != first else [])
    plan = DispatchBenchPlan(shapes=shapes, rounds=said["rounds"])
    measure_dispatch(plan, Rules(judged=()), {})
    dist.destroy_process_group()


def _start(
    plan: DispatchBenchPlan, rank: int, num_ranks: int, store: str
) -> subprocess.Popen[bytes]:
    words = [
        "-P",
        "-m",
        "moe_runtime.benchmarks.cases.dispatch_ranks",
        str(rank),
        str(num_ranks),
        store,
    ]
    with _log(store, rank).open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    shapes = [asdict(shape) for shape in plan.shapes]
    asked = {"shapes": shapes, "rounds": plan.rounds, "first": os.getpid()}
    assert child.stdin is not None
    # One that has ended already is found when it does not join.
    with contextlib.suppress(BrokenPipeError), child.stdin as stdin:
        stdin.write(json.dumps(asked).encode())
    return child


def _log(store: str, rank: int) -> Path:
    return Path(f"{store}-rank-{rank}.log")


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


if __name__ == "__main__":
    follow(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
