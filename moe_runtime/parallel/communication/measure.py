"""Measured cost of an exchange."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_runtime.parallel.cluster import Link, fit_link
from moe_runtime.parallel.communication.transport import Transport

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)


def time_exchanges(
    transport: Transport,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Times exchanges in which every rank sends the same number of bytes; a collective call.

    Args:
        transport: The group, of at least two ranks.
        sizes: Bytes that a rank sends to the others together.
        repeats: Exchanges of each size; the first does not count.

    Returns:
        `(bytes sent by a rank, median seconds of this rank)` for each size, as `fit_link` takes
            them.

    Raises:
        ValueError: The group has one rank only.
    """
    if transport.size < 2:
        raise ValueError("exchanges are measured between at least two ranks")
    others = transport.size - 1
    nothing_P1 = torch.zeros((transport.size, 1), dtype=torch.int64)
    measured = []
    for size in sizes:
        rows = max(1, size // others)
        counts = torch.full((1, transport.size), rows)
        counts[0, transport.rank] = 0
        (route,) = transport.routes(counts, counts)
        payload = torch.zeros((rows * others, 1), dtype=torch.uint8, device=device)
        times = []
        for _ in range(repeats + 1):
            # Ranks start together: counts are exchanged, which ends when all have come.
            transport.exchange_numbers(nothing_P1)
            started = clock()
            arrived = transport.exchange(payload, route).wait()
            if arrived.is_cuda:
                torch.cuda.synchronize()
            times.append(clock() - started)
        measured.append((rows * others, statistics.median(times[1:])))
    return measured


def measure_link(transport: Transport, **options: Any) -> Link:
    """Latency and bandwidth of an exchange between all ranks, the same on all of them.

    A collective call; arguments as of `time_exchanges`. The slowest rank's time of a size counts.
    """
    measured = time_exchanges(transport, **options)
    own_N = torch.tensor([round(1e9 * seconds) for _, seconds in measured])
    theirs_PN = transport.exchange_numbers(own_N.expand(transport.size, -1).contiguous())
    slowest_N = theirs_PN.amax(dim=0).tolist()
    return fit_link([size for size, _ in measured], [1e-9 * time for time in slowest_N])
