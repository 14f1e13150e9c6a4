"""A meter of energy that counts what a test says was used, in place of the machine's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CountedEnergy:
    """Stands in for `EnergyMeter`.

    Attributes:
        used: joules so far; the test adds to it where work is done.
    """

    def __init__(self, used: Callable[[], float]) -> None:
        self.used = used

    @contextmanager
    def measured(self) -> Iterator[dict[str, float]]:
        """What was added within the block, as of processors."""
        found, before = dict[str, float](), self.used()
        yield found
        found["cpu_joules"] = self.used() - before
