"""Which guesses are read, in which order, and whose slots they may take.

The live store and the replay move experts in different ways; what they decide is decided here. Time
comes in as numbers: nothing in this module has a clock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_runtime.policies.prediction.base import Guess
from moe_runtime.types import ExpertKey

_REMEMBERED = 0.9
"""Weight of the past in the running mean of what a missing expert costs a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchRules:
    """When a guess is read.

    Attributes:
        horizon: most layers to look ahead.
        min_probability: a guess must be at least this likely: more often right than wrong.
        min_gain: a guess must be this much likelier than the expert that it evicts.
        window: most guesses that wait for their layer at once.
        credit: most unused link time that is saved up, in experts.
    """

    horizon: int = 2
    min_probability: float = 0.5
    min_gain: float = 0.1
    window: int = 8
    credit: float = 4.0


class Admission:
    """Turns idle time of the link into experts that may be prefetched, the most useful first.

    While no layer waits for an expert the link is idle: that time, divided by the time of a
    transfer, is credit. A guess costs one. Some credit can be saved up, so that an expert which
    takes longer than a layer can be begun early.

    Guesses are ordered by impact (HybriMoE, arXiv 2504.05897, orders by the makespan that a
    prefetch saves): what a missing expert of the layer has lately cost, times the probability, over
    the number of layers until the expert is used.

    Args:
        rules: the limits.
        num_layers: layers of the model.
    """

    def __init__(self, rules: PrefetchRules, num_layers: int) -> None:
        self.rules = rules
        self._num_layers = num_layers
        self._credit = 0.0
        self._last_used: list[frozenset[ExpertKey]] = [frozenset()] * num_layers
        self._miss_s = [0.0] * num_layers
        self._layer_s = 0.0
        self._transfer_s = 0.0

    @property
    def room(self) -> int:
        """How many experts may be prefetched now."""
        return int(self._credit)

    def horizon(self, top_k: int) -> int:
        """How many layers ahead to look now.

        A layer's experts that can all be moved while one layer computes need not be begun earlier;
        looking further would cost time and rest on less.

        Args:
            top_k: experts that a token visits in a layer.
        """
        fits = 0.0 < top_k * self._transfer_s <= self._layer_s
        return 1 if fits else self.rules.horizon

    def idle(self, idle_s: float, transfer_s: float) -> None:
        """The link was idle for some time, in which it could have moved experts.

        Args:
            idle_s: seconds in which no demand was under way.
            transfer_s: seconds that one expert takes on an idle link.
        """
        self._layer_s += (1 - _REMEMBERED) * (idle_s - self._layer_s)
        self._transfer_s = transfer_s
        if transfer_s > 0:
            self._credit = min(self.rules.credit, self._credit + idle_s / transfer_s)

    def used(self, layer: int, keys: Iterable[ExpertKey]) -> None:
        """A layer visits these experts; until its next turn no guess takes their slots."""
        self._last_used[layer] = frozenset(keys)

    def waited(self, layer: int, num_missing: int, stall_s: float) -> None:
        """A layer had to wait so long for so many experts."""
        if num_missing:
            new_s = stall_s / num_missing
            self._miss_s[layer] += (1 - _REMEMBERED) * (new_s - self._miss_s[layer])

    def likely(self, guesses: Iterable[Guess]) -> list[Guess]:
        """Those that are worth a slot at all; reads of others that have not begun are stale."""
        return [guess for guess in guesses if guess[1] >= self.rules.min_probability]

    def most_useful(self, guesses: Sequence[Guess], now: int) -> list[Guess]:
        """Orders likely guesses by impact.

        Args:
            guesses: what may be read.
            now: the last layer that was routed, -1 before the first.
        """
        least_s = 1e-3 * max(self._miss_s) or 1.0  # a layer that never waited yet comes last

        def impact(guess: Guess) -> float:
            key, probability = guess
            ahead = (key.layer - now - 1) % self._num_layers + 1
            return max(self._miss_s[key.layer], least_s) * probability / ahead

        return sorted(guesses, key=impact, reverse=True)

    def gives_way(
        self, incoming: ExpertKey, probability: float, chance: Mapping[ExpertKey, float]
    ) -> Callable[[ExpertKey], bool]:
        """Says of a held expert whether a guess may have its slot.

        It must be of the guess's own layer, unused in that layer's last turn, and clearly less
        likely.

        Args:
            incoming: the guess.
            probability: how likely it is.
            chance: probabilities of this and other experts; what is not here has none.
        """
        just_used = self._last_used[incoming.layer]
        bound = probability - self.rules.min_gain

        def worth_less(held: ExpertKey) -> bool:
            return (
                held.layer == incoming.layer
                and held not in just_used
                and chance.get(held, 0.0) < bound
            )

        return worth_less

    def spend(self, num_experts: int) -> None:
        """Takes the price of prefetched experts from the credit."""
        self._credit -= num_experts
