"""Decides by trial whether prefetching pays on this machine, with this model and text."""

from collections import deque
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a decode step took."""

    seconds: float  # from its begin to the next one's, waiting and predicting included
    stall_s: float  # seconds of these that computation waited for experts
    predict_s: float  # seconds of these that were spent on predicting
    saved_s: float  # the most that guesses which came true can have saved: their transfers


class Controller:
    """Turns prefetching on while decode steps are faster with it.

    While it is off a step costs nothing but a look at how long it waited, and waiting bounds what
    prefetching can gain: as long as little is waited nothing is tried. Otherwise blocks of steps
    run off, on, on, off, and the medians of their times decide. A trial ends early when its steps
    are clearly slower. While prefetching is on it goes off as soon as the guesses of the last steps
    cannot have saved what predicting took, and is compared anew now and then.
    """

    WINDOW = 6  # Steps that are looked at together
    BLOCK_STEPS = 4
    TRIAL = (False, True, True, False)
    GAIN = 0.02  # Share of a step that prefetching must save
    LEAST_STALL = 0.1
    """Share of a step that must be waiting for a trial: not all of it can be saved, and predicting
    and reading early take some hundredths of a step."""
    HOPELESS = 1.1  # So many times slower is no accident, even of a few steps
    STEPS_ON = 256
    STEPS_OFF = 64
    """Steps until the next trial after a failed one; twice as many after each further one."""
    MOST_STEPS_OFF = 1024

    def __init__(self) -> None:
        self.is_active = False
        self.verdict = "not tried yet"
        self.num_trials = 0
        self._plan: deque[bool] = deque()
        self._costs: dict[bool, list[StepCost]] = {False: [], True: []}
        self._recent: deque[StepCost] = deque(maxlen=self.WINDOW)
        self._wait = 0
        self._pause = self.STEPS_OFF

    def step(self, cost: StepCost) -> None:
        """Takes note of a finished decode step and decides about the next one."""
        self._recent.append(cost)
        self._wait -= 1
        if self._plan or self._costs[True]:
            self._try(cost)
        elif self.is_active:
            self._watch_on()
        else:
            self._watch_off()

    def _try(self, cost: StepCost) -> None:
        self._costs[self.is_active].append(cost)
        is_judged = len(self._costs[True]) >= self.BLOCK_STEPS
        if not self._plan or (is_judged and self._is_hopeless()):
            self._decide()
        else:
            self._set(self._plan.popleft())

    def _watch_off(self) -> None:
        if self._wait > 0 or len(self._recent) < self.WINDOW:
            return
        stall_s = sum(cost.stall_s for cost in self._recent)
        share = stall_s / sum(cost.seconds for cost in self._recent)
        if share >= self.LEAST_STALL:
            self._begin_trial()
        elif not self.num_trials:
            self.verdict = f"off: steps wait {share:.1%} of their time, too little to save"

    def _watch_on(self) -> None:
        saved_s = sum(cost.saved_s for cost in self._recent)
        predict_s = sum(cost.predict_s for cost in self._recent)
        if len(self._recent) == self.WINDOW and saved_s < predict_s:
            self._set(False)
            self._wait = self.WINDOW
            self.verdict = (
                f"off: in {self.WINDOW} steps guesses saved at most {1e3 * saved_s:.2f} ms and "
                f"took {1e3 * predict_s:.2f} ms"
            )
        elif self._wait <= 0:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self.num_trials += 1
        self._plan.extend(on for on in self.TRIAL for _ in range(self.BLOCK_STEPS))
        self._costs = {False: [], True: []}
        self._set(self._plan.popleft())

    def _is_hopeless(self) -> bool:
        return self._typical(True) > self.HOPELESS * self._typical(False)

    def _decide(self) -> None:
        off_s, on_s = self._typical(False), self._typical(True)
        stall_off, stall_on = (
            1e3 * median(cost.stall_s for cost in self._costs[on]) for on in (False, True)
        )
        pays = on_s < off_s * (1.0 - self.GAIN)
        if pays:
            self._wait, self._pause = self.STEPS_ON, self.STEPS_OFF
        else:
            self._wait = self._pause
            self._pause = min(2 * self._pause, self.MOST_STEPS_OFF)
        self._plan.clear()
        self._costs = {False: [], True: []}
        self._set(pays)
        self.verdict = (
            f"{'on' if pays else 'off'}: a step took {1e3 * on_s:.2f} ms with prefetch and "
            f"{1e3 * off_s:.2f} ms without, of which {stall_on:.2f} and {stall_off:.2f} ms waiting "
            "for experts"
        )

    def _typical(self, on: bool) -> float:
        return median(cost.seconds for cost in self._costs[on])

    def _set(self, on: bool) -> None:
        if on is not self.is_active:
            self._recent.clear()
        self.is_active = on
