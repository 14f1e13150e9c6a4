"""Writes a timeline of a model: steps, layers, waits, and reads of every tier."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from moe_runtime.inference.steps import Listener, Step
from moe_runtime.lab.traces.timeline import Timeline, expert_name
from moe_runtime.memory.reads import Priority, Transfer
from moe_runtime.types import ExpertKey

_KINDS = {Priority.DEMAND: "demand", Priority.READAHEAD: "prefetch"}
_TIERS = ("reads", "reads below")


class StepTimes(Listener):
    """Records every step; time between two layers with experts is dense computation."""

    follows_requests = False

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._begun: list[tuple[float, str, int]] = []
        self._dense_since_s: float | None = None

    def of_tier(self, tier: int) -> StoreTimes:
        """The listener of a store: 0 for the tier that layers compute from, 1 for the one below."""
        return StoreTimes(self, tier)

    def begin(self, step: Step) -> None:
        # not at the end of the step, when the cache has more tokens
        num_tokens = step.num_sequences * step.num_new
        self._begun[:] = [(time.perf_counter(), step.phase, num_tokens)]
        self.begin_dense()

    def end(self) -> None:
        now_s = time.perf_counter()
        self.end_dense(now_s)
        for begin_s, phase, num_tokens in self._begun:
            self.timeline.slice(phase, begin_s, now_s, tokens=num_tokens)
        self._begun.clear()
        self.timeline.flush()

    def begin_dense(self) -> None:
        self._dense_since_s = time.perf_counter()

    def end_dense(self, now_s: float) -> None:
        if self._dense_since_s is not None:
            self.timeline.slice("dense", self._dense_since_s, now_s)
        self._dense_since_s = None


class StoreTimes:
    """Records every read of a store, and the layers that compute from it."""

    def __init__(self, steps: StepTimes, tier: int) -> None:
        self._steps = steps
        self._timeline = steps.timeline
        self._tier = tier
        # reads in flight: begin, row on the timeline, and first priority
        self._begun: dict[ExpertKey, tuple[float, int, str]] = {}

    def read_began(self, key: ExpertKey, priority: Priority) -> None:
        """Puts the read into a free row of the timeline."""
        taken = {lane for _, lane, _ in self._begun.values()}
        lane = next(number for number in range(len(taken) + 1) if number not in taken)
        self._begun[key] = (time.perf_counter(), lane, _KINDS[priority])

    def read_ended(self, key: ExpertKey, read: Transfer) -> None:
        outcome = "failed" if read.error else _KINDS[read.priority]
        self._write(key, outcome, read.num_bytes, read.ended_s)

    def dropped(self, key: ExpertKey) -> None:
        self._write(key, "taken back", 0, time.perf_counter())

    def was_reset(self, arriving: Collection[ExpertKey]) -> None:
        self._begun = {key: self._begun[key] for key in self._begun.keys() & set(arriving)}

    def lease(self) -> LayerTimes | None:
        return None if self._tier else LayerTimes(self._steps)

    def _write(self, key: ExpertKey, outcome: str, num_bytes: int, end_s: float) -> None:
        begun = self._begun.pop(key, None)
        if begun is None:
            return
        begin_s, lane, kind = begun
        self._timeline.slice(
            f"{kind} {expert_name(key)}",
            begin_s,
            end_s,
            track=self._timeline.read_track(_TIERS[self._tier], self._tier, lane),
            began_as=kind,
            ended_as=outcome,
            bytes=num_bytes,
        )


class LayerTimes:
    """Records a layer: computation of arrived experts, and waits for the others."""

    def __init__(self, steps: StepTimes) -> None:
        self._steps = steps
        self._timeline = steps.timeline
        self._begin_s = self._asked_s = time.perf_counter()
        self._computing_since_s: float | None = None
        self._layers: set[int] = set()
        self._outcome: dict[str, list[str]] = {"hits": [], "late": [], "misses": []}
        steps.end_dense(self._begin_s)

    def entered(
        self, hits: Sequence[ExpertKey], late: Sequence[ExpertKey], misses: Sequence[ExpertKey]
    ) -> None:
        named = {"hits": hits, "late": late, "misses": misses}
        self._layers = {key.layer for keys in named.values() for key in keys}
        self._outcome = {name: [*map(expert_name, keys)] for name, keys in named.items()}

    def asked(self, done: Sequence[ExpertKey]) -> None:
        self._asked_s = time.perf_counter()
        if self._computing_since_s is not None:
            experts = [*map(expert_name, done)]
            self._timeline.slice("experts", self._computing_since_s, self._asked_s, experts=experts)

    def given(self, group: Sequence[ExpertKey], *, waited: bool) -> None:
        now_s = time.perf_counter()
        if waited:
            self._timeline.slice("wait", self._asked_s, now_s, then=[*map(expert_name, group)])
        self._computing_since_s = now_s if group else None

    def left(self) -> None:
        name = f"layer {next(iter(self._layers))}" if len(self._layers) == 1 else "layer"
        outcome = self._outcome
        self._timeline.slice(
            name,
            self._begin_s,
            time.perf_counter(),
            hits=outcome["hits"],
            late=outcome["late"],
            misses=outcome["misses"],
        )
        self._steps.begin_dense()
