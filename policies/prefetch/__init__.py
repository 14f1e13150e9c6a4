"""Rules of prefetching, without a clock: for the live store and for replay."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import MappingProxyType

import numpy as np

from moe_runtime.policies.prediction.base import LEAST_CHANCE, Guess
from moe_runtime.types import ExpertKey

_REMEMBERED = 0.9  # weight of the past in the running mean of what a missing expert costs a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRules:
    """Limits of prefetching."""

    horizon: int = 2  # most layers to look ahead
    min_probability: float = 0.2  # a guess must be at least this likely, whatever the waste
    waste: float = 0.15  # share of the experts loaded that may be loaded and never used
    allowance: float = 16.0  # most unused waste that is saved up, in experts
    min_gain: float = 0.4  # a guess must be this much likelier than the expert that it evicts
    window: int = 8  # most guesses that wait for their layer at once
    credit: float = 4.0  # most unused link time that is saved up, in experts


class Admission:
    """Turns idle time of the link into experts that may be prefetched, the most useful first.

    Two budgets limit what is moved. Idle time of the link, divided by the time of a transfer, is
    credit: a guess costs one, and some can be saved up. Every expert that a layer waited for, and
    every guess that came true, earns a share of an expert that may be wrong; a guess costs its
    probability to be wrong, corrected when its layer has come. The less is left, the surer a guess
    must be.

    The order is by impact (HybriMoE, arXiv 2504.05897, orders by the makespan that a prefetch
    saves): what a missing expert of the layer has lately cost, times the probability, over the
    layers ahead.
    """

    def __init__(self, rules: PrefetchRules, num_layers: int) -> None:
        self.rules = rules
        self._num_layers = num_layers
        self._credit = 0.0
        self._allowance = rules.allowance
        self._open: list[dict[ExpertKey, float]] = [{} for _ in range(num_layers)]
        self._last_used: list[Collection[ExpertKey]] = [()] * num_layers
        self._miss_s = [0.0] * num_layers
        self._layer_s = 0.0
        self._transfer_s = 0.0

    @property
    def room(self) -> int:
        return int(self._credit) if self._allowance > 0 else 0

    @property
    def least_probability(self) -> float:
        """Least probability of a guess now: the less allowance is left, the higher."""
        unused = self._allowance / self.rules.allowance
        return 1.0 - unused * (1.0 - self.rules.min_probability)

    def horizon(self, top_k: int) -> int:
        fits = 0.0 < top_k * self._transfer_s <= self._layer_s
        return 1 if fits else self.rules.horizon

    def idle(self, idle_s: float, transfer_s: float, *, layers: int = 1) -> None:
        """Credits idle time of the link."""
        self._layer_s += (1 - _REMEMBERED) * (idle_s / layers - self._layer_s)
        self._transfer_s = transfer_s
        if transfer_s > 0:
            self._credit = min(self.rules.credit, self._credit + idle_s / transfer_s)

    def used(self, layer: int, keys: Collection[ExpertKey]) -> None:
        """A layer visits these experts: judges its guesses, and protects the slots from others."""
        self._last_used[layer] = keys
        judged = self._open[layer]
        if not judged:
            return
        for key, probability in judged.items():
            self._earn((1.0 - probability) + self.rules.waste if key in keys else -probability)
        judged.clear()

    def waited(self, layers: Iterable[int], num_missing: int, stall_s: float) -> None:
        """Layers waited so long, together, for so many experts; -1 is the last layer."""
        self._earn(self.rules.waste * num_missing)
        if num_missing:
            new_s = stall_s / num_missing
            for layer in layers:
                self._miss_s[layer] += (1 - _REMEMBERED) * (new_s - self._miss_s[layer])

    def likely(self, guesses: Iterable[Guess]) -> list[Guess]:
        """Guesses above the least probability; waiting reads of others are stale."""
        return [guess for guess in guesses if guess[1] >= self.rules.min_probability]

    def most_useful(self, guesses: Sequence[Guess], now: int) -> list[Guess]:
        """Guesses that are likely enough now, by impact."""
        least = self.least_probability
        sure = [guess for guess in guesses if guess[1] >= least]
        if len(sure) < 2:
            return sure
        least_s = 1e-3 * max(self._miss_s) or 1.0  # a layer that never waited comes last

        def impact(guess: Guess) -> float:
            key, probability = guess
            ahead = (key.layer - now - 1) % self._num_layers + 1
            return max(self._miss_s[key.layer], least_s) * probability / ahead

        sure.sort(key=impact, reverse=True)
        return sure

    def gives_way(
        self, incoming: ExpertKey, probability: float, chance: Mapping[ExpertKey, float]
    ) -> Callable[[ExpertKey], bool]:
        """Returns a test whether a held expert gives its slot to a guess."""
        just_used = self._last_used[incoming.layer]
        bound = probability - self.rules.min_gain

        def worth_less(held: ExpertKey) -> bool:
            return (
                held.layer == incoming.layer
                and held not in just_used
                and chance.get(held, LEAST_CHANCE) < bound
            )

        return worth_less

    def spend(self, guess: Guess) -> None:
        """Pays for a prefetch from the credit and from the allowance for waste."""
        key, probability = guess
        self._credit -= 1.0
        self._allowance -= 1.0 - probability
        self._open[key.layer][key] = probability

    def take_back(self, key: ExpertKey) -> None:
        """A prefetch was cancelled before it began: returns its price, unless its layer has run."""
        probability = self._open[key.layer].pop(key, None)
        if probability is not None:
            self._credit = min(self.rules.credit, self._credit + 1.0)
            self._earn(1.0 - probability)

    def _earn(self, experts: float) -> None:
        self._allowance = min(self.rules.allowance, self._allowance + experts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The cost of a decode step."""

    seconds: float  # from its begin to the begin of the next, with waiting and predicting
    stall_s: float  # of these, waiting for experts
    predict_s: float  # of these, predicting
    saved_s: float  # upper bound of the saving: the transfers of right guesses
    # transfers of all experts that would have been missed without guesses, on an idle link
    needed_s: float = 0.0


READ_AGAIN = 1 / 3
"""Share of wrong guesses that evicted an expert which is read again: 0.1 to 0.6 in a trace of
gpt-oss-20b."""


def num_needed(misses: int, came_true: int, guesses: int) -> float:
    """Experts that would have been missed without guesses."""
    return misses + came_true - READ_AGAIN * (guesses - came_true)


class Controller:
    """Turns prefetching on while decode steps are faster with it.

    While little is waited, nothing is tried. In a trial, steps with prefetching are compared with
    steps without. The steps before a trial count as its first block, blocks of the other kind
    follow. A clear difference ends it. Prefetching goes off again as soon as the guesses of the
    last steps cannot have saved what predicting took, and is compared anew now and then. A later
    process starts with the result of the last trial.

    Tokens that need many new experts take longer, whatever is guessed. So times are compared at
    equal needs, by analysis of covariance.
    """

    name = "prefetch"
    WINDOW = 6  # Steps that are looked at together
    BLOCK_STEPS = 4
    TRIAL = (False, False, True)
    """Whether the blocks of a trial run as the steps before it."""
    CLEAR = 3.0
    """A difference of so many standard errors ends a trial; by chance, 1 trial in 50."""
    LEAST_STALL = 0.1
    """Least share of waiting in a step for a trial: only a part of it can be saved."""
    LEAST_STALL_S = 2e-3
    """Least seconds of waiting in a step: predicting costs as much as shorter waits."""
    STEPS = 128
    """Steps until the next trial; doubled after a clear one, or one with the result before."""
    MOST_STEPS = MappingProxyType({True: 256, False: 1024})

    def __init__(self) -> None:
        self.is_active = False
        self.verdict = "not tried yet"
        self.num_trials = 0
        self._has_won: bool | None = None  # prefetching in the last trial
        self._plan: deque[bool] = deque()
        self._costs: dict[bool, list[StepCost]] = {}
        self._recent: deque[StepCost] = deque(maxlen=self.WINDOW)
        self._wait = 0
        self._pause = self.STEPS

    def finish(self, sequence: int) -> None:
        """Learns nothing from a request."""

    def learned(self) -> dict[str, np.ndarray]:
        """The result of the last trial."""
        return {} if self._has_won is None else {"has_won": np.array([self._has_won], np.uint8)}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Starts with the result of an earlier trial. Raises ValueError: it is damaged."""
        found = {name: array.tolist() for name, array in state.items()}
        if found not in ({"has_won": [0]}, {"has_won": [1]}):
            raise ValueError(f"expected has_won, 0 or 1, got {found}")
        self._has_won = self.is_active = bool(found["has_won"][0])
        self._wait = self.WINDOW if self.is_active else self.STEPS
        self.verdict = f"{'on' if self.is_active else 'off'}, as in an earlier run"

    def step(self, cost: StepCost) -> None:
        """Notes a finished decode step and decides about the next one."""
        self._recent.append(cost)
        self._wait -= 1
        if self._costs:
            self._try(cost)
        elif self.is_active:
            self._watch_on()
        else:
            self._watch_off()

    def _try(self, cost: StepCost) -> None:
        self._costs[self.is_active].append(cost)
        ends_block = len(self._plan) % self.BLOCK_STEPS == 0
        if not self._plan or (ends_block and self._is_clear()):
            self._decide()
        else:
            self._set(self._plan.popleft())

    def _watch_off(self) -> None:
        if self._wait > 0 or len(self._recent) < self.WINDOW:
            return
        stall_s = sum(cost.stall_s for cost in self._recent)
        share = stall_s / sum(cost.seconds for cost in self._recent)
        if share >= self.LEAST_STALL and stall_s >= self.WINDOW * self.LEAST_STALL_S:
            self._begin_trial()
        elif not self.num_trials:
            self.verdict = f"off: steps wait {share:.1%} of their time, too little to save"

    def _watch_on(self) -> None:
        if len(self._recent) < self.WINDOW:
            return
        saved_s = sum(cost.saved_s for cost in self._recent)
        predict_s = sum(cost.predict_s for cost in self._recent)
        if saved_s < predict_s:
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
        self._plan.extend(
            self.is_active is as_before for as_before in self.TRIAL for _ in range(self.BLOCK_STEPS)
        )
        self._costs = {self.is_active: [*self._recent], not self.is_active: []}
        self._set(self._plan.popleft())

    def _is_clear(self) -> bool:
        """Whether the difference is many standard errors."""
        slope, spread = self._slope()
        groups = {
            on: [cost.seconds - slope * cost.needed_s for cost in costs]
            for on, costs in self._costs.items()
        }
        means = {on: fmean(values) for on, values in groups.items()}
        left = sum((one - means[on]) ** 2 for on, values in groups.items() for one in values)
        variance = left / (sum(map(len, groups.values())) - 3)
        error = sum(1 / len(values) for values in groups.values())
        if spread:
            needs = [fmean(cost.needed_s for cost in costs) for costs in self._costs.values()]
            error += (needs[0] - needs[1]) ** 2 / spread
        return abs(means[True] - means[False]) > self.CLEAR * (variance * error) ** 0.5

    def _slope(self) -> tuple[float, float]:
        """Seconds of a step for each second that its needs take on an idle link, by least squares
        within both kinds of steps; and the sum of squares of these needs."""
        spread = product = 0.0
        for costs in self._costs.values():
            mean_s = fmean(cost.needed_s for cost in costs)
            spread += sum((cost.needed_s - mean_s) ** 2 for cost in costs)
            product += sum((cost.needed_s - mean_s) * cost.seconds for cost in costs)
        return (min(max(product / spread, 0.0), 1.0) if spread else 1.0), spread

    def _decide(self) -> None:
        slope, _ = self._slope()
        usual_s = _middle([cost.needed_s for costs in self._costs.values() for cost in costs])
        off_s, on_s = (
            _middle([cost.seconds - slope * cost.needed_s for cost in self._costs[on]])
            + slope * usual_s
            for on in (False, True)
        )
        stall_off, stall_on = (
            1e3 * median(cost.stall_s for cost in self._costs[on]) for on in (False, True)
        )
        pays = on_s < off_s
        is_sure = pays is self._has_won or self._is_clear()
        self._pause = min(2 * self._pause, self.MOST_STEPS[pays]) if is_sure else self.STEPS
        self._has_won, self._wait = pays, self._pause
        self._plan.clear()
        self._costs = {}
        self._set(pays)
        self.verdict = (
            f"{'on' if pays else 'off'}: a step took {1e3 * on_s:.2f} ms with prefetch and "
            f"{1e3 * off_s:.2f} ms without, of which {stall_on:.2f} and {stall_off:.2f} ms waiting "
            "for experts"
        )

    def _set(self, on: bool) -> None:
        if on is not self.is_active:
            self._recent.clear()
        self.is_active = on


def _middle(values: Sequence[float]) -> float:
    """The mean of the middle half."""
    cut = len(values) // 4
    return fmean(sorted(values)[cut : len(values) - cut])
