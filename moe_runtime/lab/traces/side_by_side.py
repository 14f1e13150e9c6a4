"""A trace as if its requests had been decoded several at a time, as a server does."""

from collections import deque
from dataclasses import replace

import numpy as np

from moe_runtime.lab.traces.format import PHASES, Trace


def side_by_side(trace: Trace, *, count: int) -> Trace:
    """The requests of a trace, one token of each of ``count`` in a step.

    The first ones begin together; one that ends makes room for the next, and the whole ends when
    fewer than so many are left. Tokens of prompts are steps like others.

    Args:
        trace: of any steps; requests are told apart by their numbers.
        count: requests at a time, at least 1.

    Raises:
        ValueError: the trace has not so many requests.
    """
    order = np.lexsort((trace.token_position, trace.token_request))
    bounds = np.flatnonzero(np.diff(trace.token_request[order]))
    waiting = deque(map(deque, np.split(order, bounds + 1)))
    if len(waiting) < count:
        raise ValueError(
            f"expected a trace of at least {count} requests to serve so many side by side, got a "
            f"trace of {len(waiting)} requests; record more prompts, as `run --prompts FILE "
            "--trace` does"
        )
    running = [waiting.popleft() for _ in range(count)]
    rows: list[int] = []
    while len(running) == count:
        rows += [one.popleft() for one in running]
        running = [one for one in running if one]
        while waiting and len(running) < count:
            running.append(waiting.popleft())
    steps = len(rows) // count
    columns = ("token_request", "token_id", "token_position", "expert_ids", "gate_weights")
    return replace(
        trace,
        step_phase=np.full(steps, PHASES.index("decode"), np.uint8),
        step_start=np.arange(0, len(rows) + 1, count, dtype=np.int64),
        step_update=None,
        **{name: getattr(trace, name)[rows] for name in columns},
    )
