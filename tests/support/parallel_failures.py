"""Ranks that die, stall or differ, for the tests of failures."""

from __future__ import annotations

import itertools
import os
import time

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
    watch,
)
from moe_runtime.routing import Routing

TIMEOUT_S = 1.5
Failure = tuple[str, tuple[int, ...], float]


def dispatch_with(what: str, culprit: int, seconds: float = 0.0) -> Failure:
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
    if rank == culprit:
        if what == "die":
            os._exit(1)
        if what == "stall":
            time.sleep(seconds)
    routing = Routing(torch.arange(4).view(4, 1), torch.ones(4, 1), 4)
    started = time.monotonic()
    try:
        dispatch(torch.ones(4, width), routing, transport, slots=slots)
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "", (), time.monotonic() - started


def train_until_failure(degree: int, panels: int) -> Failure:
    """Steps of a layer until another rank is gone: its error, and seconds since the last step."""
    groups = LayoutGroups(
        ParallelLayout(world_size=dist.get_world_size(), ep=dist.get_world_size()), timeout_s=20
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
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - ended
    raise AssertionError("steps never end by themselves")
