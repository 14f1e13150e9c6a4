"""A pipeline's timeline, and the activations that a stage holds at once, some of them offloaded.

Source: Wan et al., "PipeOffload: Improving Scalability of Pipeline Parallelism with Memory
Optimization" (2025). A micro-batch's activations leave for host memory between its forward and its
backward pass if the link is free, and if both transfers end before the backward pass. So the stages
that would hold them longest offload most, and no computation waits.
"""

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward"]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Begin and end of each micro-batch's forward and backward pass in a stage."""

    forward: tuple[Interval, ...]
    backward: tuple[Interval, ...]


def passes_of(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Pass, int]]:
    """The order of a stage's passes: one forward and one backward in turn (1F1B).

    It begins with as many forward passes as stages follow, itself included.
    """
    ahead = min(stages - stage, micro_batches)
    for number in range(ahead):
        yield "forward", number
    for number in range(micro_batches):
        yield "backward", number
        if number + ahead < micro_batches:
            yield "forward", number + ahead


def timeline(
    stages: int,
    micro_batches: int,
    *,
    forward_s: float,
    backward_s: float,
    is_even: bool = False,
) -> list[StageTimes]:
    """The stages of a pipeline; a pass begins when its input is there and the one before ended.

    Args:
        is_even: the first forward passes are as far apart as the later ones. The whole takes as
            long, and activations come at the rate at which a link takes them away.
    """
    left = [deque(passes_of(stage, stages, micro_batches)) for stage in range(stages)]
    free, seconds = [0.0] * stages, {"forward": forward_s, "backward": backward_s}
    found: dict[tuple[Pass, int, int] | None, Interval] = {None: (0.0, 0.0)}
    while any(left):
        for stage, passes in enumerate(left):
            if not passes:
                continue
            kind, number = passes[0]
            source = None
            if kind == "forward" and stage > 0:
                source = ("forward", stage - 1, number)
            elif kind == "backward":
                is_last = stage + 1 == stages
                source = ("forward", stage, number) if is_last else (kind, stage + 1, number)
            if source in found:
                passes.popleft()
                begin = max(free[stage], found[source][1])
                if is_even and source is None:
                    begin = max(begin, number * (forward_s + backward_s))
                free[stage] = begin + seconds[kind]
                found[kind, stage, number] = (begin, free[stage])
    numbers = range(micro_batches)
    return [
        StageTimes(
            forward=tuple(found["forward", stage, number] for number in numbers),
            backward=tuple(found["backward", stage, number] for number in numbers),
        )
        for stage in range(stages)
    ]


def held(stage: StageTimes, transfer_s: float = math.inf) -> list[list[Interval]]:
    """The times at which each micro-batch's activations are in the memory of the rank.

    Args:
        transfer_s: of one micro-batch's activations to host memory, or back; infinite offloads
            none. The directions do not slow each other down.
    """
    lives = [(f[0], b[1]) for f, b in zip(stage.forward, stage.backward, strict=True)]
    gone: dict[int, float] = {}  # micro-batches that leave, and when they have left
    link = 0.0
    for number, (begun, back) in enumerate(zip(stage.forward, stage.backward, strict=True)):
        if link <= begun[1] and back[0] - begun[1] >= 2 * transfer_s:
            gone[number] = link = begun[1] + transfer_s
    link = math.inf
    found = [[life] for life in lives]
    for number in sorted(gone, key=lambda n: -stage.backward[n][0]):
        begin = min(link, stage.backward[number][0]) - transfer_s
        if begin >= gone[number]:
            link = begin
            first, last = lives[number]
            found[number] = [(first, gone[number]), (begin, last)]
    return found


def most_at_once(intervals: Iterable[Interval]) -> int:
    """The most intervals that overlap; one may begin where another ends."""
    events = [event for begin, end in intervals for event in ((begin, 1), (end, -1))]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


@functools.cache
def most_held(
    stages: int, micro_batches: int, *, forward_s: float, backward_s: float, transfer_s: float
) -> int:
    """The most micro-batches whose activations a stage of a pipeline holds at once."""
    times = timeline(
        stages,
        min(micro_batches, 4 * stages),
        forward_s=forward_s,
        backward_s=backward_s,
        is_even=math.isfinite(transfer_s),
    )
    return max(most_at_once(x for each in held(one, transfer_s) for x in each) for one in times)
