"""Live prefetch: what a predictor says, as far as the link has time for it and as long as it pays.

Nothing here changes what is computed: a guess only changes when an expert is read.
"""

import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import numpy as np

from moe_runtime.config import nearest
from moe_runtime.policies.prediction.base import Guess, LayerRouted, Predictor, StepBegins
from moe_runtime.store.guesses import Guesses
from moe_runtime.store.link import LinkState
from moe_runtime.types import ExpertKey

HORIZON = 2
"""Layers to look ahead."""
MIN_PROBABILITY = 0.5
"""A guess must be more likely right than wrong."""
MIN_GAIN = 0.1
"""A guess must be this much likelier than the expert that it evicts."""
WINDOW_SLOTS = 8
"""Most guesses that wait for their layer at once."""
CREDIT_SLOTS = 4
"""Most unused link time that is saved up, in experts."""
FORGET = 0.9
"""Weight of the past in the running mean of a layer's compute time."""


class PrefetchMode(StrEnum):
    """How far guesses go."""

    OFF = "off"
    OBSERVE = "observe"
    ENFORCE = "enforce"
    AUTO = "auto"


def parse_mode(name: str) -> PrefetchMode:
    """The mode of this name.

    Raises:
        ValueError: there is none; the message suggests the nearest one.
    """
    known = [mode.value for mode in PrefetchMode]
    if name not in known:
        raise ValueError(f"unknown prefetch mode {name!r}: {nearest(name, known)}")
    return PrefetchMode(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchStats:
    """What prefetching did since it was attached or its counters were reset.

    Attributes:
        mode: off, observe, enforce or auto.
        is_active: whether guesses are being read now; in ``auto`` the controller decides.
        verdict: the controller's last comparison, in words.
        recall: share of the experts visited one layer later that were among the guesses made for
            that layer; nan before the first.
        precision: share of those guesses that were visited.
        predict_s: seconds spent observing and predicting.
        decode_s: seconds of the decode steps in which this was done.
    """

    mode: str
    is_active: bool
    verdict: str
    recall: float
    precision: float
    predict_s: float
    decode_s: float


class Admission:
    """Turns idle time of the link into experts that may be prefetched.

    While computation does not wait, demands leave the link idle: that time, times the measured
    bandwidth, is credit in bytes. A guess costs one expert. Some credit can be saved up, so that an
    expert which takes longer than a layer can be begun early.
    """

    def __init__(self) -> None:
        self._credit_bytes = 0.0
        self._compute_s = 0.0
        self._last_s: float | None = None
        self._last_stall_s = 0.0

    @property
    def compute_s(self) -> float:
        """Running mean of the seconds between two layers in which computation did not wait."""
        return self._compute_s

    def pause(self) -> None:
        """What happens until the next layer is not a layer's computation."""
        self._last_s = None

    def layer(self, link: LinkState, now_s: float) -> int:
        """Notes that a layer was reached.

        Returns:
            How many experts may be prefetched now.
        """
        if self._last_s is not None and link.stall_s >= self._last_stall_s:
            waited_s = link.stall_s - self._last_stall_s
            compute_s = max(now_s - self._last_s - waited_s, 0.0)
            self._compute_s = FORGET * self._compute_s + (1 - FORGET) * compute_s
            most = CREDIT_SLOTS * link.slot_bytes
            self._credit_bytes = min(self._credit_bytes + compute_s * link.bytes_per_s, most)
        self._last_s, self._last_stall_s = now_s, link.stall_s
        return int(self._credit_bytes / link.slot_bytes)

    def spend(self, num_experts: int, slot_bytes: int) -> None:
        """Takes the price of prefetched experts from the credit."""
        self._credit_bytes -= num_experts * slot_bytes


class Controller:
    """Decides by trial whether prefetching pays on this machine, with this model and text.

    Blocks of decode steps run without and with prefetch in turn (off, on, on, off). Prefetch stays
    on if its steps are faster by ``GAIN``; otherwise it goes off, and is tried again later. Steps
    are compared by wall time, which includes stalls and everything that predicting costs.
    """

    BLOCK_STEPS = 6
    TRIAL = (False, True, True, False)
    GAIN = 0.02
    STEPS_ON = 256
    STEPS_OFF = 512

    def __init__(self) -> None:
        self._plan: deque[bool] = deque()
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._stalls: dict[bool, list[float]] = {False: [], True: []}
        self._settled = 0
        self.is_active = False
        self.verdict = "not compared yet"
        self._begin_trial()

    def step(self, seconds: float, stall_s: float) -> None:
        """Takes note of a finished decode step and decides about the next one."""
        if self._settled:
            self._settled -= 1
            if not self._settled:
                self._begin_trial()
            return
        self._times[self.is_active].append(seconds)
        self._stalls[self.is_active].append(stall_s)
        if self._plan:
            self.is_active = self._plan.popleft()
        else:
            self._decide()

    def _begin_trial(self) -> None:
        self._plan.extend(on for on in self.TRIAL for _ in range(self.BLOCK_STEPS))
        self._times = {False: [], True: []}
        self._stalls = {False: [], True: []}
        self.is_active = self._plan.popleft()

    def _decide(self) -> None:
        off_s, on_s = median(self._times[False]), median(self._times[True])
        stall_off, stall_on = (1e3 * median(self._stalls[on]) for on in (False, True))
        self.is_active = on_s < off_s * (1.0 - self.GAIN)
        self._settled = self.STEPS_ON if self.is_active else self.STEPS_OFF
        self.verdict = (
            f"{'on' if self.is_active else 'off'}: a step took {1e3 * on_s:.2f} ms with prefetch "
            f"and {1e3 * off_s:.2f} ms without, of which {stall_on:.2f} and {stall_off:.2f} ms "
            "waiting for experts"
        )


class Prefetcher:
    """Watches a model's steps and reads experts before their layer asks for them.

    Used from the thread that computes. ``step`` is called before a forward pass, ``routed`` in each
    layer after the demands were queued.
    """

    def __init__(self, guesses: Guesses, predictor: Predictor, mode: PrefetchMode) -> None:
        """Joins a store's prefetches with a predictor.

        Args:
            guesses: the prefetches of the store that experts are computed from.
            predictor: what to ask.
            mode: off asks nothing, observe asks and reads nothing, enforce reads, auto reads as
                long as it pays.
        """
        self._guesses = guesses
        self._predictor = predictor
        self.mode = mode
        self._controller = Controller()
        self._admission = Admission()
        self._last_used: dict[int, frozenset[ExpertKey]] = {}
        self._expected: dict[int, frozenset[ExpertKey]] = {}
        self._is_prompt = True
        self._step_start: tuple[float, float] | None = None
        self.reset_stats()

    @property
    def is_active(self) -> bool:
        """Whether guesses are read at the moment."""
        return self.mode is PrefetchMode.ENFORCE or (
            self.mode is PrefetchMode.AUTO and self._controller.is_active
        )

    def reset_stats(self) -> None:
        """Sets the counters to zero, as after a warm-up; what was learned stays."""
        self._predict_s = 0.0
        self._decode_s = 0.0
        self._visited, self._guessed, self._found = 0, 0, 0

    def stats(self) -> PrefetchStats:
        """The counters so far."""
        is_auto = self.mode is PrefetchMode.AUTO
        return PrefetchStats(
            mode=self.mode.value,
            is_active=self.is_active,
            verdict=self._controller.verdict if is_auto else f"always {self.mode.value}",
            recall=self._found / self._visited if self._visited else float("nan"),
            precision=self._found / self._guessed if self._guessed else float("nan"),
            predict_s=self._predict_s,
            decode_s=self._decode_s,
        )

    def describe(self) -> str:
        """The mode, and in ``auto`` what the controller made of it."""
        if self.mode is PrefetchMode.AUTO:
            return f"auto, {self._controller.verdict}"
        return self.mode.value

    def step(self, event: StepBegins) -> None:
        """A forward pass begins: the last one is judged, and its first layers are guessed."""
        start_s = time.perf_counter()
        self._end_step(start_s)
        self._is_prompt = len(np.unique(event.sequences)) < len(event.sequences)
        if not self._is_prompt:
            self._step_start = (start_s, self._guesses.link().stall_s)
        self._admission.pause()
        self._predictor.observe(event)
        self._guess(-1)
        self._predict_s += time.perf_counter() - start_s

    def routed(self, event: LayerRouted, keys: frozenset[ExpertKey]) -> None:
        """A layer was routed and has queued its demands.

        Args:
            event: the routing.
            keys: the experts that the layer uses.
        """
        start_s = time.perf_counter()
        if not self._is_prompt and event.layer in self._expected:
            expected = self._expected.pop(event.layer)
            self._visited += len(keys)
            self._guessed += len(expected)
            self._found += len(keys & expected)
        self._last_used[event.layer] = keys
        self._predictor.observe(event)
        self._guess(event.layer)
        self._predict_s += time.perf_counter() - start_s

    def finish(self, sequence: int) -> None:
        """A request ended."""
        self._end_step(time.perf_counter())
        self._predictor.finish(sequence)

    def _end_step(self, now_s: float) -> None:
        if self._step_start is not None:
            start_s, stall_s = self._step_start
            self._decode_s += now_s - start_s
            self._controller.step(now_s - start_s, self._guesses.link().stall_s - stall_s)
        self._step_start = None

    def _guess(self, now: int) -> None:
        """Asks for the coming layers, and reads what is likely, urgent, absent and affordable."""
        if self._is_prompt or (self.mode is PrefetchMode.AUTO and not self.is_active):
            return
        made = self._predictor.predict(now, HORIZON)
        nearest_layer = made[0][0].layer if made else -1
        self._expected[nearest_layer] = frozenset(k for k, _ in made if k.layer == nearest_layer)
        if not self.is_active:
            return
        link = self._guesses.link()
        room = self._admission.layer(link, time.perf_counter())
        likely = [guess for guess in made if guess[1] >= MIN_PROBABILITY]
        if not room or not likely:
            return
        self._guesses.cancel_except({key for key, _ in likely})
        num_layers = max(self._last_used, default=0) + 1
        urgent = sorted(self._guesses.absent(likely), key=lambda g: -_urgency(g, now, num_layers))
        just_used = frozenset().union(*(self._last_used.get(k.layer, ()) for k, _ in urgent))
        started = self._guesses.start(
            urgent[:room],
            dict(made),
            just_used=just_used,
            window=WINDOW_SLOTS,
            min_gain=MIN_GAIN,
        )
        self._admission.spend(started, link.slot_bytes)


def _urgency(guess: Guess, now: int, num_layers: int) -> float:
    """Probability over the number of layers until the expert would be used."""
    key, probability = guess
    distance = key.layer - now if key.layer > now else key.layer + num_layers - now
    return probability / distance
