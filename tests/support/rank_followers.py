"""Ranks of `bench dispatch` that end too soon, in processes of their own."""

import os
import time

from moe_runtime.benchmarks.cases.dispatch import DispatchBenchPlan, meet


def never_join(*_: object) -> None:
    raise MemoryError("no room")


def join_and_end(number: int, plan: DispatchBenchPlan, num_ranks: int, store: str) -> None:
    """The second child ends when the group is made; the first one waits to be ended."""
    meet(number + 1, num_ranks, store, lambda: None)
    if number:
        os._exit(3)
    time.sleep(1000)
