"""Replays a workload with a modelled link and modelled compute, with or without prefetching.

The policy, the predictor and the admission of guesses are the objects that run live.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields
from typing import cast

from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.eviction import EvictionPolicy, LayerShares
from moe_runtime.policies.prediction.base import Predictor
from moe_runtime.policies.prefetch import Admission, Controller, PrefetchRules, StepCost, num_needed
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Costs of moving and of computing experts."""

    bytes_per_s: float
    latency_s: float
    expert_bytes: int
    layer_s: float
    expert_s: float
    known_ahead_s: float = 0.0
    predict_s: float = 0.0  # of guessing after a layer

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.expert_bytes <= 0:
            raise ValueError(
                f"bandwidth and expert size must be positive, got {self.bytes_per_s} bytes/s and "
                f"{self.expert_bytes} bytes"
            )
        if min(self.latency_s, self.layer_s, self.expert_s) < 0:
            raise ValueError("latency and compute times must not be negative")
        if not 0 <= self.known_ahead_s <= self.layer_s:
            raise ValueError(
                f"known_ahead_s must be a part of layer_s={self.layer_s}, got {self.known_ahead_s}"
            )

    @property
    def transfer_s(self) -> float:
        """Seconds that one expert takes on an idle link."""
        return self.latency_s + self.expert_bytes / self.bytes_per_s


class LinkModel:
    """One transfer at a time. Demands go first and interrupt a prefetch, which goes on later."""

    def __init__(self, machine: Machine) -> None:
        self._transfer_s = machine.transfer_s
        self._free_at = 0.0
        self._queue: dict[ExpertKey, float] = {}  # seconds left, in the order of service
        self._arrived: set[ExpertKey] = set()

    def advance(self, now_s: float) -> None:
        """Serves prefetches until a moment."""
        while self._queue and self._free_at < now_s:
            key, left_s = next(iter(self._queue.items()))
            served_s = min(left_s, now_s - self._free_at)
            self._free_at += served_s
            if served_s < left_s:
                self._queue[key] = left_s - served_s
            else:
                del self._queue[key]
                self._arrived.add(key)
        self._free_at = max(self._free_at, now_s)

    def prefetch(self, key: ExpertKey) -> None:
        self._queue[key] = self._transfer_s

    def has_begun(self, key: ExpertKey) -> bool:
        """Whether some of a queued expert was transferred."""
        return self._queue.get(key, self._transfer_s) < self._transfer_s

    def cancel(self, key: ExpertKey) -> None:
        self._queue.pop(key, None)
        self._arrived.discard(key)

    def has_arrived(self, key: ExpertKey) -> bool:
        return key in self._arrived

    def demand(self, keys: list[ExpertKey], now_s: float) -> float:
        """Transfers experts that a layer waits for; queued ones need only their rest."""
        self.advance(now_s)
        left = [self._queue.pop(key, self._transfer_s) for key in keys]
        self._free_at += sum(left)
        return self._free_at if keys else now_s


@dataclass(eq=False)
class LayerCounts:
    """Counts of one layer, or of all of them."""

    events: int = 0
    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    all_resident: int = 0
    prefetches: int = 0
    useful: int = 0
    stall_s: float = 0.0

    @classmethod
    def total(cls, layers: Iterable["LayerCounts"]) -> "LayerCounts":
        rows = list(layers)
        return cls(**{f.name: sum(getattr(row, f.name) for row in rows) for f in fields(cls)})

    def summary(self, expert_bytes: int) -> dict[str, float]:
        """Rates and bytes, as reports show them."""
        asked = max(1, self.hits + self.late_hits + self.misses)
        events = max(1, self.events)
        return {
            "hit_rate": self.hits / asked,
            "late_hit_rate": self.late_hits / asked,
            "all_resident_rate": self.all_resident / events,
            "loads_per_layer_token": (self.misses + self.prefetches) / events,
            "demand_bytes": self.misses * expert_bytes,
            "prefetch_bytes": self.prefetches * expert_bytes,
            "useful_bytes": self.useful * expert_bytes,
            "wasted_bytes": (self.prefetches - self.useful) * expert_bytes,
            "stall_s": self.stall_s,
        }


@dataclass(kw_only=True, eq=False)
class TimedReplay:
    """A replay's counts; ``stalls`` are the step, the layer, and the begin and end of each wait."""

    layers: list[LayerCounts]
    total: LayerCounts
    seconds: float
    num_tokens: int
    stalls: list[tuple[int, int, float, float]]

    @property
    def tokens_per_s(self) -> float:
        """Predicted speed; 0 where nothing took any time."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def replay_timed(
    workload: Workload,
    policy: EvictionPolicy[ExpertKey],
    num_slots: int,
    machine: Machine,
    *,
    predictor: Predictor | None = None,
    rules: PrefetchRules | None = None,
    controller: Controller | None = None,
) -> TimedReplay:
    """Replays a workload in modelled time.

    A controller decides step by step whether guesses are made, as in the mode ``auto``; without one
    they always are.
    """
    admission = Admission(rules or PrefetchRules(), workload.trace.signature.num_layers)
    return _Replay(workload, policy, num_slots, machine, predictor, admission, controller).run()


@dataclass(eq=False)
class _Replay:
    _workload: Workload
    _policy: EvictionPolicy[ExpertKey]
    _num_slots: int
    _machine: Machine
    _predictor: Predictor | None
    _admission: Admission
    _controller: Controller | None
    _now_s: float = 0.0
    _predict_s: float = 0.0
    _step_start: StepCost | None = None  # clocks and counters at its beginning
    _guesses: dict[ExpertKey, bool] = field(default_factory=dict)
    """Prefetched experts; whether their layer is still to come."""

    def __post_init__(self) -> None:
        signature = self._workload.trace.signature
        self._link, self._top_k = LinkModel(self._machine), signature.top_k
        self._counts = [LayerCounts() for _ in range(signature.num_layers)]

    def run(self) -> TimedReplay:
        workload = self._workload
        stalls: list[tuple[int, int, float, float]] = []
        routing = workload.routing(0, workload.num_events)
        watchers = [w for w in (self._policy.watcher, self._predictor) if w]
        for number, (begins, routed) in enumerate(routing):
            if begins is not None:
                workload.begin(number, begins, watchers)
                self._control()
                self._guess(-1)
            for watcher in watchers:
                watcher.observe(routed)
            keys = workload.keys[number]
            stalled_s = self._serve(routed.layer, keys)
            if stalled_s:
                step = int(workload.step[number])
                stalls.append((step, routed.layer, self._now_s, self._now_s + stalled_s))
            self._guess(routed.layer)
            compute_s = self._machine.layer_s + len(keys) * self._machine.expert_s
            self._now_s += stalled_s + compute_s
            self._admission.idle(compute_s, self._machine.transfer_s)
        return TimedReplay(
            layers=self._counts,
            total=LayerCounts.total(self._counts),
            seconds=self._now_s,
            num_tokens=workload.trace.num_tokens,
            stalls=stalls,
        )

    def _control(self) -> None:
        """Gives the controller the costs of the step that ended."""
        if self._controller is None:
            return
        total, transfer_s = LayerCounts.total(self._counts), self._machine.transfer_s
        now = StepCost(
            seconds=self._now_s,
            stall_s=total.stall_s,
            predict_s=self._predict_s,
            saved_s=total.useful * transfer_s,
            needed_s=num_needed(total.misses, total.useful, total.prefetches) * transfer_s,
        )
        before, self._step_start = self._step_start, now
        if before is not None:
            spent = {f.name: getattr(now, f.name) - getattr(before, f.name) for f in fields(now)}
            self._controller.step(StepCost(**spent))

    def _serve(self, layer: int, keys: list[ExpertKey]) -> float:
        """Looks up an event's experts and loads the missing; returns the seconds waited."""
        self._link.advance(self._now_s)
        counts, policy = self._counts[layer], self._policy
        late, missing = [], []
        for key in keys:
            if key in policy:
                counts.hits += 1
            elif key in self._guesses and self._link.has_arrived(key):
                counts.hits += 1
                counts.useful += 1
            elif key in self._guesses and self._link.has_begun(key):
                late.append(key)
                counts.late_hits += 1
                counts.useful += 1
            else:
                missing.append(key)
                counts.misses += 1
                counts.prefetches -= key in self._guesses  # never begun: it is a demand
        counts.events += 1
        counts.all_resident += not late and not missing
        done_s = self._link.demand(late + missing, self._now_s)
        resident_s = (len(keys) - len(late) - len(missing)) * self._machine.expert_s
        hidden_s = self._machine.known_ahead_s + resident_s
        stalled_s = max(0.0, done_s - self._now_s - hidden_s)
        counts.stall_s += stalled_s
        self._keep(keys)
        for key in self._guesses:
            if key.layer == layer:
                self._guesses[key] = False
        self._admission.used(layer, keys)
        self._admission.waited([layer], len(late) + len(missing), stalled_s)
        return stalled_s

    def _keep(self, keys: list[ExpertKey]) -> None:
        """Decides after the use which of the event's experts stay."""
        policy = self._policy
        for key in keys:
            self._guesses.pop(key, None)
            self._link.cancel(key)
        missing = [key for key in keys if key not in policy]
        if policy.may_decline:
            for key in keys:
                if key in policy:
                    policy.touch(key)
            for key in missing:
                if self._make_room(key, lambda _: True):
                    policy.insert(key)
                else:
                    policy.decline(key)
            return
        in_use = frozenset(keys)
        kept: set[ExpertKey] = set()
        num_streamed = max(0, len(keys) - policy.most_held(keys, self._num_slots))
        for key in reversed(missing[num_streamed:]):  # those wanted most first
            if self._make_room(key, lambda held: held not in in_use, reserved=len(kept)):
                kept.add(key)
        for key in keys:
            if key in kept:
                policy.insert(key)
            elif key in policy:
                policy.touch(key)

    def _make_room(
        self,
        incoming: ExpertKey,
        may_go: Callable[[ExpertKey], bool],
        *,
        reserved: int = 0,
        is_guess: bool = False,
    ) -> bool:
        """Finds a slot for an expert, evicting another if needed; whether there is one."""
        if self._room() > reserved or self._drop_stale_guess():
            return True
        victim = self._victim(lambda held: may_go(cast(ExpertKey, held)), incoming, reserved)
        if victim is None or (not is_guess and self._policy.declines(incoming, victim)):
            return False
        self._policy.remove(victim)
        return True

    def _victim(
        self, may_go: Callable[[Hashable], bool], incoming: ExpertKey, reserved: int
    ) -> ExpertKey | None:
        """The policy's victim; slots reserved for experts of the event are of its layer's share."""
        policy, victim = self._policy, None
        if isinstance(policy, LayerShares) and policy.room(incoming.layer) <= reserved:
            victim = policy.victim_within(incoming.layer, may_go, incoming)
        return policy.checked_victim(may_go, incoming) if victim is None else victim

    def _room(self) -> int:
        return self._num_slots - len(self._policy) - len(self._guesses)

    def _drop_stale_guess(self) -> bool:
        stale = next((key for key, is_expected in self._guesses.items() if not is_expected), None)
        if stale is not None:
            self._drop_guess(stale)
        return stale is not None

    def _drop_guess(self, key: ExpertKey) -> None:
        if not self._link.has_arrived(key) and not self._link.has_begun(key):
            self._counts[key.layer].prefetches -= 1
            self._admission.take_back(key)
        self._link.cancel(key)
        del self._guesses[key]

    def _guess(self, now: int) -> None:
        """Prefetches likely and absent experts within the budget, the most useful first."""
        admission = self._admission
        if self._predictor is None or not (self._controller is None or self._controller.is_active):
            return
        if not admission.room:
            return
        self._predict_s += self._machine.predict_s
        self._now_s += self._machine.predict_s
        made = self._predictor.predict(now, admission.horizon(self._top_k))
        likely = admission.likely(made)
        wanted = {key for key, _ in likely}
        for key in [k for k, expected in self._guesses.items() if expected and k not in wanted]:
            if not self._link.has_arrived(key) and not self._link.has_begun(key):
                self._drop_guess(key)
        chance = dict(made)
        for key, probability in admission.most_useful(likely, now):
            if not admission.room or sum(self._guesses.values()) >= admission.rules.window:
                return
            if key in self._policy or key in self._guesses:
                continue
            gives_way = admission.gives_way(key, probability, chance)
            if self._make_room(key, gives_way, is_guess=True):
                self._guesses[key] = True
                self._link.prefetch(key)
                self._counts[key.layer].prefetches += 1
                admission.spend((key, probability))
