"""Runs systems in turn, repetition by repetition, until the numbers are certain enough.

A machine that slows down slows all systems, and the first one changes from round to round.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from moe_runtime.errors import MoERuntimeError
from moe_runtime.lab.this_machine import versions

Number = float | Sequence[float]
"""What a repetition found of one metric."""


class PeerFailedError(MoERuntimeError):
    """A system under test gave no numbers; the text says why, in one line."""


class StoppedRepetitionError(MoERuntimeError):
    """A repetition was ended because the measurement is stopping; it has no numbers."""


@contextmanager
def peer_failures(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of torch or of a system under test, and further kinds, become `PeerFailedError`."""
    try:
        yield
    except (RuntimeError, ValueError, *kinds) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise PeerFailedError(lines[0]) from None


class BenchSystem(ABC):
    """A system under test; ``compared`` and ``equal`` count answers."""

    def __init__(self, name: str, own_versions: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.versions = versions() if own_versions is None else own_versions
        self.gpu: str | None = None
        self.compared = self.equal = 0

    @abstractmethod
    def repeat(self) -> Mapping[str, Number]:
        """Runs the system once; before the first time, compares its answers.

        Raises:
            PeerFailedError: it has no numbers.
        """

    def require_all_equal(self, difference: str = "tokens differ by more than roundings allow"):
        """Raises `PeerFailedError` for a system whose answers differ."""
        if self.equal < self.compared:
            raise PeerFailedError(
                f"{self.compared - self.equal} of {self.compared} {difference}; "
                "its times would be those of other work"
            )


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a measurement ends, and its callbacks.

    Attributes:
        judged: the metrics that must be certain.
        least, most: repetitions of each system.
        precision: half of the confidence interval of the mean, as a share of it.
        max_s: no round begins that would end later, going by the longest.
        on_repetition: gets a system's name and the number of its repetitions.
        is_stopping: asked before each repetition; what was found until then counts.
    """

    judged: Sequence[str]
    least: int = 3
    most: int = 20
    precision: float = 0.05
    max_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    on_repetition: Callable[[str, int], None] = lambda name, number: None
    is_stopping: Callable[[], bool] = lambda: False


@dataclass(kw_only=True)
class MeasuredSystem:
    """What was found of one system: its repetitions, or why it has none."""

    repetitions: list[Mapping[str, Number]] = field(default_factory=list)
    failure: str | None = None

    def values(self, metric: str) -> list[float]:
        return [middle(found[metric]) for found in self.repetitions if metric in found]


def middle(value: Number) -> float:
    """The number that stands for a repetition."""
    return float(median(value)) if isinstance(value, Sequence) else float(value)


def run_in_turn(
    systems: Sequence[BenchSystem], rules: Rules
) -> tuple[dict[str, MeasuredSystem], str]:
    """Measures systems in turn.

    Returns:
        What was found, by name, and why it ended: ``narrow``, ``time``, ``most``, ``interrupted``,
        or ``failed`` where no system has numbers.
    """
    found = {system.name: MeasuredSystem() for system in systems}
    begin, longest_s = rules.clock(), 0.0
    for number in range(rules.most):
        round_begin = rules.clock()
        turn = number % len(systems)
        for system in [*systems[turn:], *systems[:turn]]:
            if rules.is_stopping():
                return found, "interrupted"
            measured = found[system.name]
            if measured.failure is not None:
                continue
            try:
                measured.repetitions.append(system.repeat())
            except PeerFailedError as error:
                measured.failure, measured.repetitions = str(error), []
                continue
            except StoppedRepetitionError:
                return found, "interrupted"
            rules.on_repetition(system.name, len(measured.repetitions))
        longest_s = max(longest_s, rules.clock() - round_begin)
        working = [one for one in found.values() if one.failure is None]
        if not working:
            return found, "failed"
        if number + 1 >= rules.least and all(_is_certain(one, rules) for one in working):
            return found, "narrow"
        if rules.clock() - begin + longest_s > rules.max_s:
            return found, "time"
    return found, "most"


def _is_certain(measured: MeasuredSystem, rules: Rules) -> bool:
    """Whether the mean of each judged metric that the system has is known to the precision."""
    for values in map(measured.values, rules.judged):
        ends = mean_interval(values)
        if values and (
            ends is None or ends[1] - ends[0] > 2 * rules.precision * abs(fmean(values))
        ):
            return False
    return True


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean, by Student's t; None of fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half
