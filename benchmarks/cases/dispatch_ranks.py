"""The ranks of ``bench dispatch`` here: this process is the first one, its children follow."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from moe_runtime.benchmarks.cases.dispatch import DispatchBenchPlan, measure_dispatch
from moe_runtime.benchmarks.suite.memory_cap import interruptions_held
from moe_runtime.benchmarks.suite.runner import Rules
from moe_runtime.errors import RankFailureError

_JOINING_S, _LEAVING_S, _SEEN_S = 120.0, 10.0, 0.5
# A rank may compute long between two exchanges; one that ended breaks them at once.
_EXCHANGES = timedelta(hours=6)
Follow = Callable[[int, DispatchBenchPlan, int, str], None]


def follow(number: int, plan: DispatchBenchPlan, num_ranks: int, store: str) -> None:
    """What a child does, after the first rank: it joins, and does what that one says."""
    meet(number + 1, num_ranks, store, lambda: None)
    measure_dispatch(plan, Rules(judged=()), {})
    os._exit(0)  # threads of gloo abort an ordinary exit now and then


@contextmanager
def ranks_here(
    plan: DispatchBenchPlan, num_ranks: int, store: str, follow: Follow = follow
) -> Iterator[None]:
    """A default group of this process, the first rank, and others that follow within the block.

    Raises:
        RankFailureError: a rank ended; the message has the last line of what it said.
    """
    with interruptions_held():  # children keep them held: this process ends them
        others = start_processes(follow, (plan, num_ranks, store), num_ranks - 1, join=False)
    assert others is not None
    children: list[Any] = others.processes

    def ended(number: int, why: str) -> RankFailureError:
        said = f"rank {number + 1} of {num_ranks} ended: {why}"
        return RankFailureError(said, ranks=(number + 1,))

    def require_alive(timeout_s: float = 0.0) -> None:
        try:
            others.join(timeout_s)
        except ProcessRaisedException as error:
            raise ended(error.error_index, str(error).strip().splitlines()[-1]) from None
        except ProcessExitedException as error:
            raise ended(error.error_index, f"exit code {error.exit_code}") from None

    try:
        meet(0, num_ranks, store, require_alive)
        try:
            yield
        except RuntimeError:
            # Torch notices a closed connection before the kernel says that the process has ended.
            require_alive(_SEEN_S)
            raise
        for one in children:
            one.join(_LEAVING_S)
    finally:
        with interruptions_held():
            for one in children:
                one.kill()
                one.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def meet(
    rank: int,
    num_ranks: int,
    store: str,
    require_alive: Callable[[], None],
    limit_s: float = _JOINING_S,
) -> None:
    """Waits for all ranks, then makes the default group; this process computes with one thread."""
    torch.set_num_threads(1)
    meeting = FileStore(store, num_ranks)
    meeting.set(f"rank {rank}", "here")
    deadline = time.monotonic() + limit_s
    while missing := [one for one in range(num_ranks) if not meeting.check([f"rank {one}"])]:
        require_alive()
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankFailureError(
                f"of {num_ranks} ranks {names} did not join within {limit_s:g} s",
                ranks=tuple(missing),
            )
        time.sleep(0.01)
    dist.init_process_group(
        "gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=_EXCHANGES
    )
