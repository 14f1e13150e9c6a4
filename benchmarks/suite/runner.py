"""The runner: systems in turn, repetition by repetition, until the numbers are certain enough.

A repetition gives numbers, and lists of numbers whose median stands for it. Systems take turns, so
that a machine that slows down slows all of them, and who begins changes from round to round.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from moe_runtime.benchmarks.suite.intervals import is_narrow
from moe_runtime.errors import MoERuntimeError

Number = float | Sequence[float]
"""What a repetition found of one metric."""


class PeerFailedError(MoERuntimeError):
    """A system under test gave no numbers; the text says why, in one line."""


class StoppedRepetitionError(MoERuntimeError):
    """A repetition was ended because the measurement is stopping; it has no numbers."""


@contextmanager
def peer_failures() -> Iterator[None]:
    """What torch or a system under test raises becomes a failure of the system.

    Raises:
        PeerFailedError: it cannot compute what it was asked for.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise PeerFailedError(lines[0]) from None


class BenchSystem(Protocol):
    """A system under test, as the runner sees it."""

    name: str

    def repeat(self) -> Mapping[str, Number]:
        """Measures once.

        Raises:
            PeerFailedError: there are no numbers, and will be none.
            StoppedRepetitionError: nothing more is to be measured.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When enough has been measured.

    Attributes:
        judged: the metrics that must be certain.
        least: repetitions of each system before certainty counts.
        most: repetitions of each system at most.
        precision: half of the confidence interval of the mean, as a share of it.
        max_s: no repetition begins that would end after so many seconds, going by the longest.
    """

    judged: Sequence[str]
    least: int = 3
    most: int = 20
    precision: float = 0.05
    max_s: float = 300.0


@dataclass(kw_only=True)
class MeasuredSystem:
    """What was found of one system.

    Attributes:
        repetitions: in their order.
        failure: why it has no numbers; None while it has.
    """

    repetitions: list[Mapping[str, Number]] = field(default_factory=list)
    failure: str | None = None

    def values(self, metric: str) -> list[float]:
        """One value for each repetition; the median of those that have several."""
        return [middle(found[metric]) for found in self.repetitions if metric in found]


def middle(value: Number) -> float:
    """The number that stands for a repetition."""
    return float(median(value)) if isinstance(value, Sequence) else float(value)


def run_in_turn(
    systems: Sequence[BenchSystem],
    rules: Rules,
    clock: Callable[[], float],
    *,
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, MeasuredSystem], str]:
    """Measures systems in turn.

    Args:
        systems: under different names.
        rules: when to end.
        clock: seconds, from any beginning.
        on_repetition: called with a system's name and how many repetitions it has.
        is_stopping: asked before each repetition; what was found until then is returned.

    Returns:
        What was found, by name, and why it ended: ``narrow``, ``time``, ``most``, ``interrupted``,
        or ``failed`` where no system has numbers.
    """
    found = {system.name: MeasuredSystem() for system in systems}
    begin, longest_s = clock(), 0.0
    for number in range(rules.most):
        round_begin = clock()
        turn = number % len(systems)
        for system in [*systems[turn:], *systems[:turn]]:
            if is_stopping():
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
            on_repetition(system.name, len(measured.repetitions))
        longest_s = max(longest_s, clock() - round_begin)
        working = [one for one in found.values() if one.failure is None]
        if not working:
            return found, "failed"
        if number + 1 >= rules.least and all(_is_certain(one, rules) for one in working):
            return found, "narrow"
        if clock() - begin + longest_s > rules.max_s:
            return found, "time"
    return found, "most"


def _is_certain(measured: MeasuredSystem, rules: Rules) -> bool:
    # A system may have no numbers of a metric: what it has decides.
    found = [measured.values(metric) for metric in rules.judged]
    return all(is_narrow(values, rules.precision) for values in found if values)
