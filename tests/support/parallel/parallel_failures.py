"""Ranks that die, stall or differ, for the tests of failures."""

from __future__ import annotations

import itertools
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel import (
    ExpertSlots,
    FlatTransport,
    LayoutGroups,
    Overlap,
    ParallelExperts,
    ParallelLayout,
    dispatch,
)
from moe_runtime.parallel.communication import watch
from moe_runtime.routing import Routing

# Ranks that do come may be late by most of it.
TIMEOUT_S = 4.0
# Of tests in which nobody is to wait that long.
PATIENCE_S = 600.0
Failure = tuple[str, tuple[int, ...], float]


def dispatch_with(what: str, culprit: int) -> Failure:
    """One dispatch in which a rank misbehaves; the error of this rank, its ranks, and seconds."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    width, slots = 4, ExpertSlots.contiguous(4, dist.get_world_size())
    if rank == culprit:
        if what == "version":
            watch.PROTOCOL += 1
        if what == "width":
            width = 8
        if what == "placement":
            slots = ExpertSlots.from_ranks([[0, 1, 2, 3], [], []], 4)
    transport = FlatTransport(group, timeout_s=TIMEOUT_S)
    dist.barrier()
    if rank == culprit and what == "stall":
        # Until all others have given up, however long that takes them here.
        others = set(range(dist.get_world_size())) - {rank}
        group.get_group_store().wait([f"gave up/{other}" for other in others])
        return "", (), 0.0
    routing = Routing(torch.arange(4).view(4, 1), torch.ones(4, 1), 4)
    started = time.monotonic()
    try:
        dispatch(torch.ones(4, width), routing, transport, slots=slots)
    except RankFailureError as error:
        group.get_group_store().set(f"gave up/{rank}", "")
        return str(error), error.ranks, time.monotonic() - started
    return "", (), time.monotonic() - started


class NeverDone(dist.Work):
    """A collective that neither ends nor fails, as one whose rows another waiting rank keeps."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def wait_beside_the_dead(culprit: int, timeout_s: float) -> Failure:
    """Waits for a collective that does not fail although a rank is gone."""
    group = dist.group.WORLD
    assert group is not None
    waiting = watch.CollectiveMonitor(group, timeout_s)
    dist.barrier()
    if dist.get_rank() == culprit:
        os._exit(1)
    started = time.monotonic()
    try:
        waiting.wait(NeverDone(), 1, True, "rows")
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    raise AssertionError("the collective never ends")


def wait_for_the_stalled() -> Failure:
    """Rank 3 of four stalls, 1 and 2 wait for it at different steps, and 0 waits for 1 alone."""
    rank = dist.get_rank()
    pair, others = dist.new_group([0, 1]), dist.new_group([1, 2, 3])
    group = pair if rank == 0 else others
    assert isinstance(group, dist.ProcessGroup)
    waiting = watch.CollectiveMonitor(group, TIMEOUT_S)
    if rank == 1:
        # It has come to the pair as well, and is at work in the other group.
        assert isinstance(pair, dist.ProcessGroup)
        watch.CollectiveMonitor(pair, TIMEOUT_S)
    dist.barrier()
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    if rank == 3:
        store.wait([f"gave up/{other}" for other in range(3)])
        return "", (), 0.0
    try:
        waiting.wait(NeverDone(), 1 if rank < 2 else 2, True, "rows")
    except RankFailureError as error:
        store.set(f"gave up/{rank}", "")
        return str(error), error.ranks, 0.0
    raise AssertionError("the collective never ends")


def train_until_failure(
    degree: int, panels: int, folder: str, timeout_s: float = PATIENCE_S
) -> Failure:
    """Steps of a layer until another rank is gone: its error, and seconds since the last step."""
    groups = LayoutGroups(
        ParallelLayout(world_size=dist.get_world_size(), ep=dist.get_world_size()),
        timeout_s=timeout_s,
    )
    overlap = Overlap(degree=degree, panels=panels)
    experts = ParallelExperts(6, 8, 16, groups, overlap=overlap)
    ended = time.monotonic()
    try:
        for step in itertools.count():
            random = torch.Generator().manual_seed(step + dist.get_rank())
            ids = torch.randint(6, (7, 2), generator=random)
            x_TD = torch.randn(7, 8, generator=random, requires_grad=True)
            experts(x_TD, ids, torch.ones(7, 2)).square().sum().backward()
            groups.reduce_expert_gradients(experts.parameters())
            groups.gradient_norm([], experts.parameters())
            ended = time.monotonic()
            if step == 0:
                Path(folder, str(dist.get_rank())).touch()
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - ended
    raise AssertionError("steps never end by themselves")
