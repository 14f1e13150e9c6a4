"""Ranks that die, stall or differ, for the tests of failures."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel import FlatTransport, dispatch
from moe_runtime.routing import Routing

TIMEOUT_S = 2.0


def dispatch_with(
    what: str, culprit: int, seconds: float = 0.0
) -> tuple[str, tuple[int, ...], float]:
    """One dispatch in which a rank misbehaves; the error of this rank, its ranks, and seconds."""
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    transport = FlatTransport(group, timeout_s=TIMEOUT_S)
    dist.barrier()
    width = 4
    if rank == culprit:
        if what == "die":
            os._exit(1)
        if what == "stall":
            time.sleep(seconds)
        if what == "width":
            width = 8
    routing = Routing(torch.arange(4).view(4, 1), torch.ones(4, 1), 4)
    started = time.monotonic()
    try:
        dispatch(torch.ones(4, width), routing, transport)
    except RankFailureError as error:
        return str(error), error.ranks, time.monotonic() - started
    return "", (), time.monotonic() - started
