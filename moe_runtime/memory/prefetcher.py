"""Live prefetching: reads experts that a predictor guesses, while the link is idle and it pays.

Prefetching changes when an expert is read. It never changes the output.
"""

import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from moe_runtime.config import PrefetchMode
from moe_runtime.memory.reads import Priority
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction.base import Guess, LayerRouted, Predictor, StepBegins
from moe_runtime.policies.prefetch import Admission, Controller, PrefetchRules, StepCost, num_needed
from moe_runtime.types import ExpertKey

W = TypeVar("W")


class LinkState(NamedTuple):
    """The state of the link between a tier and the tier below; counters start at their reset.

    Attributes:
        transfer_s: mean seconds for one expert on an idle link; 0 before the first.
        stall_s: seconds that computation waited.
        demand_s: seconds with a demand under way, since the store was opened.
        num_missing: misses and late hits.
        came_true: guesses that were needed.
        num_needed: estimated misses without guesses.
    """

    transfer_s: float
    stall_s: float
    demand_s: float
    num_missing: int
    came_true: int
    num_needed: float


class Guesses(Generic[W]):
    """The prefetches of one store. A guess never takes the slot of an expert that is pinned,
    arriving, used by the running step, or about as probable."""

    def __init__(self, store: ExpertStore[W]) -> None:
        self._store = store

    def start(
        self, guesses: Sequence[Guess], chance: Mapping[ExpertKey, float], admission: Admission
    ) -> int:
        """Reads guessed experts after all demands; returns the number of started reads.

        A guess takes a free slot, that of a failed guess, or that of the expert of its layer that
        the policy evicts first.

        Args:
            guesses: the most urgent first.
            chance: probabilities of these and of others; `LEAST_CHANCE` for absent ones.
            admission: the rules, and the credit that pays for the reads.
        """
        store, started = self._store, 0
        with store._monitor:
            held = sum(store._entries[key].expected for key in store._unadmitted)
            for key, probability in guesses:
                if held + started >= admission.rules.window or admission.room < 1:
                    break
                if key in store._entries:
                    continue
                gives_way = admission.gives_way(key, probability, chance)
                slot = store._take_slot_for_guess(key, gives_way)
                if slot is not None:
                    entry = store._start(key, slot, keep=False, priority=Priority.READAHEAD)
                    entry.expected = entry.guessed = True
                    admission.spend((key, probability))
                    started += 1
            store._counters.guesses += started
        return started

    @property
    def may_be_stale(self) -> bool:
        """Whether a read of a guess may be waiting; without the lock."""
        return bool(self._store._unadmitted) and self._store._link.under_way > 0

    def cancel_except(self, keys: Container[ExpertKey]) -> list[ExpertKey]:
        """Cancels reads of other guesses that have not begun, and returns these."""
        store, cancelled = self._store, []
        with store._monitor:
            for key in [key for key in store._unadmitted if key not in keys]:
                entry = store._entries[key]
                waits = entry.guessed and not entry.arrived and entry.pins == 0
                if waits and store._fetcher.cancel(entry.read):
                    entry.guessed = False
                    store._link.end(0, is_demand=False, now_s=time.perf_counter())
                    store._drop(key)
                    cancelled.append(key)
            store._counters.cancelled_guesses += len(cancelled)
            store._counters.guesses -= len(cancelled)
        return cancelled

    def absent(self, guesses: Sequence[Guess], least_probability: float = 0.0) -> list[Guess]:
        """Guesses of at least this probability that are neither resident nor being read."""
        entries = self._store._entries  # without the lock: ``start`` looks again
        return [g for g in guesses if g[1] >= least_probability and g[0] not in entries]

    def link(self) -> LinkState:
        link, counters = self._store._link, self._store._counters
        came_true = counters.useful_guesses + counters.late_guesses
        return LinkState(
            link.seconds_for(self._store._slab.slot_bytes),
            counters.stall_s,
            link.demand_s,
            counters.misses + counters.late_hits,
            came_true,
            num_needed(counters.misses, came_true, counters.guesses),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchStats:
    """Counters of prefetching.

    Attributes:
        is_active: guesses are being read now; in ``auto`` the controller decides.
        verdict: the controller's last comparison, in words.
        recall: share of the next layer's experts that were guessed; nan before the first.
        precision: share of these guesses that were visited.
        predict_s: seconds spent on observing, predicting and choosing.
        active_steps: decode steps with guesses.
    """

    mode: str
    is_active: bool
    verdict: str
    recall: float
    precision: float
    predict_s: float
    decode_s: float
    active_steps: int
    decode_steps: int


@dataclass(slots=True)
class _StepStart:
    """Clocks and counters at the beginning of a decode step."""

    now_s: float
    predict_s: float
    link: LinkState | None  # only for the controller


@dataclass(slots=True)
class _Look:
    """The link at the last account; layers of earlier steps are negative."""

    layer: int
    now_s: float
    link: LinkState


class Prefetcher:
    """Watches a model's steps and reads experts before their layer demands them.

    The computing thread calls ``step`` before a forward pass, and ``routed`` in each layer once its
    demands are queued.

    Attributes:
        mode: ``off`` predicts nothing, ``observe`` reads nothing, ``enforce`` reads, ``auto`` reads
            while it pays.
    """

    def __init__(
        self,
        guesses: Guesses[Any],
        predictor: Predictor,
        mode: PrefetchMode,
        *,
        num_layers: int,
        top_k: int = 1,
        rules: PrefetchRules | None = None,
        token_look_ahead: Any = None,
    ) -> None:
        """``token_look_ahead`` is a quicker predictor for steps of a few tokens."""
        self._guesses = guesses
        self._token_look_ahead = token_look_ahead
        self._predictor = predictor
        self.mode = mode
        self.controller = Controller()
        self._admission = Admission(rules or PrefetchRules(), num_layers)
        self._num_layers = num_layers
        self._top_k = top_k
        self._expected: dict[int, list[Guess]] = {}  # by the layer that comes next
        self._reads = self._predicts = False
        self._horizon = 1
        self._step_start: _StepStart | None = None
        self._last_look: _Look | None = None
        self.reset_stats()

    @property
    def is_active(self) -> bool:
        return self.mode is PrefetchMode.ENFORCE or (
            self.mode is PrefetchMode.AUTO and self.controller.is_active
        )

    @property
    def predicts(self) -> bool:
        """Whether layers of the running step are guessed."""
        return self._predicts

    @property
    def wants_layers(self) -> bool:
        """Whether ``routed`` has anything to do in the running step."""
        return self._predicts or self._predictor.needs_history

    def reset_stats(self) -> None:
        """Sets the counters to zero; what was learned stays."""
        self._predict_s = 0.0
        self._decode_s = 0.0
        self._active_steps, self._decode_steps = 0, 0
        self._visited, self._guessed, self._found = 0, 0, 0
        if self._token_look_ahead is not None:
            self._token_look_ahead.take_counts()
        self._step_start = self._last_look = None

    def stats(self) -> PrefetchStats:
        if self._token_look_ahead is not None:
            visited, guessed, found = self._token_look_ahead.take_counts()
            self._visited += visited
            self._guessed += guessed
            self._found += found
        is_auto = self.mode is PrefetchMode.AUTO
        return PrefetchStats(
            mode=self.mode.value,
            is_active=self.is_active,
            verdict=self.controller.verdict if is_auto else f"always {self.mode.value}",
            recall=self._found / self._visited if self._visited else float("nan"),
            precision=self._found / self._guessed if self._guessed else float("nan"),
            predict_s=self._predict_s,
            decode_s=self._decode_s,
            active_steps=self._active_steps,
            decode_steps=self._decode_steps,
        )

    def describe(self) -> str:
        """The mode, and in ``auto`` the controller's verdict."""
        if self.mode is PrefetchMode.AUTO:
            share = f"{self._active_steps} of {self._decode_steps} steps"
            return f"auto, {self.controller.verdict}; in use for {share}"
        return self.mode.value

    def step(
        self,
        sequences: np.ndarray,
        token_ids: Callable[[], np.ndarray],
        *,
        has_drafts: bool = False,
    ) -> None:
        """A forward pass begins: judges the last one and guesses the first layers.

        Args:
            sequences: of each token.
            token_ids: a function, since it may wait for a device.
            has_drafts: further tokens of a sequence are drafts, and this is no prompt.
        """
        start_s = time.perf_counter()
        has_several = len(sequences) > 1 and len(set(sequences.tolist())) < len(sequences)
        is_prompt = has_several and not has_drafts
        if is_prompt:
            # the time before a prompt may be idle, so it does not count for the last step
            self._step_start = None
        else:
            link = self._guesses.link() if self.mode is PrefetchMode.AUTO else None
            self._end_step(start_s, link)
            # the controller compares steps without drafts
            link = None if has_several else link
            self._step_start = _StepStart(start_s, self._predict_s, link)
            self._decode_steps += 1
        self._reads = not is_prompt and self.is_active
        self._predicts = self._reads or (not is_prompt and self.mode is PrefetchMode.OBSERVE)
        self._active_steps += self._predicts
        self._begin_account(start_s)
        self._horizon = self._admission.horizon(self._top_k)
        if self._token_look_ahead is not None and self._predicts:
            self._token_look_ahead.begin_step()
        if self.wants_layers:
            self._predictor.observe(StepBegins(sequences=sequences, token_ids=token_ids()))
            self._guess(-1, start_s)

    def routed(self, event: LayerRouted, keys: Collection[ExpertKey]) -> None:
        """A layer was routed and has queued its demands; call it only if ``wants_layers``."""
        start_s = time.perf_counter()
        expected = self._expected.pop(event.layer, None)
        if expected is not None:
            self._visited += len(keys)
            self._guessed += len(expected)
            self._found += sum(key in keys for key, _ in expected)
        self._predictor.observe(event)
        if self._predicts:
            self._admission.used(event.layer, keys)
        self._guess(event.layer, start_s)

    def tokens_routed(
        self, layer: int, keys: Collection[ExpertKey], ids_TK: Any, hidden_TD: Any
    ) -> None:
        """``routed`` for a step of a few tokens, by the quicker predictor."""
        start_s = time.perf_counter()
        look_ahead = self._token_look_ahead
        assert look_ahead is not None
        made = look_ahead.look(layer, ids_TK, hidden_TD, self._horizon)
        if self._reads:
            self._admission.used(layer, keys)
        self._act_on(made, layer, start_s)

    def finish(self, sequence: int) -> None:
        """A request ended."""
        self._step_start = self._last_look = None
        self._predictor.finish(sequence)

    def forget(self) -> None:
        """The running step failed: forgets it."""
        self._step_start = self._last_look = None
        self._reads = self._predicts = False
        self._expected.clear()

    def _end_step(self, now_s: float, link: LinkState | None) -> None:
        start = self._step_start
        if start is None:
            return
        seconds = now_s - start.now_s
        self._decode_s += seconds
        if link is not None and start.link is not None:
            self.controller.step(
                StepCost(
                    seconds=seconds,
                    stall_s=link.stall_s - start.link.stall_s,
                    predict_s=self._predict_s - start.predict_s,
                    saved_s=(link.came_true - start.link.came_true) * link.transfer_s,
                    needed_s=(link.num_needed - start.link.num_needed) * link.transfer_s,
                )
            )

    def _guess(self, now: int, now_s: float) -> None:
        """Predicts the layers after ``now`` and reads guesses, if the link has time for any."""
        if self._reads and self._admission.room < 1:
            self._account(now, now_s)
        if not self._predicts or (self._reads and self._admission.room < 1):
            self._predict_s += time.perf_counter() - now_s
            return
        made = self._predictor.predict(now, self._horizon)
        if made:
            next_layer = made[0][0].layer
            is_near = made[-1][0].layer == next_layer
            self._expected[next_layer] = (
                made if is_near else [guess for guess in made if guess[0].layer == next_layer]
            )
        self._act_on(made, now, now_s)

    def _act_on(self, made: list[Guess], now: int, now_s: float) -> None:
        urgent = self._choose(made, now, now_s) if self._reads else []
        self._predict_s += time.perf_counter() - now_s
        if urgent:  # not a cost of predicting: a demand would start the same read
            self._guesses.start(urgent, dict(made), self._admission)

    def _choose(self, made: list[Guess], now: int, now_s: float) -> list[Guess]:
        """Cancels stale guesses; returns guesses worth reading now, the most useful first."""
        admission, guesses = self._admission, self._guesses
        if guesses.may_be_stale:
            for stale in guesses.cancel_except([key for key, _ in admission.likely(made)]):
                admission.take_back(stale)
        absent = guesses.absent(made, admission.least_probability)
        if not absent:
            return []
        if admission.room < len(absent):
            self._account(now, now_s)
        return admission.most_useful(absent, now) if admission.room else []

    def _begin_account(self, now_s: float) -> None:
        """A step begins: the layers of the last step get negative numbers."""
        if not self._reads:
            self._last_look = None
            return
        if self._last_look is not None:
            self._last_look.layer -= self._num_layers
        self._account(0, now_s)

    def _account(self, now: int, now_s: float) -> None:
        """Credits the idle time of the link since the last account: once a step, and when credit is
        short, since this is expensive."""
        last, now = self._last_look, max(now, 0)
        if last is not None and last.now_s == now_s:
            return
        link = self._guesses.link()
        if last is not None:
            idle_s = (now_s - last.now_s) - (link.demand_s - last.link.demand_s)
            layers = max(now - last.layer, 1)
            self._admission.idle(max(idle_s, 0.0), link.transfer_s, layers=layers)
            missing = link.num_missing - last.link.num_missing
            stall_s = link.stall_s - last.link.stall_s
            self._admission.waited(range(last.layer, now), missing, stall_s)
        self._last_look = _Look(now, now_s, link)
