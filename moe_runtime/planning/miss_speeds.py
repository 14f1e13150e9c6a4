"""Speeds of link, CPU and disk, measured while a model runs, and the plans that they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from moe_runtime.planning.hybrid import MissCosts, MissPlan, plan_misses

WEIGHT = 0.1
"""Of the latest measurement in a running mean: the last ten or so count."""
TRIED = 0.01
"""Of the planned time that a side had nothing to do: so much may go into finding out its speed."""
IDLE_PLANS = RESTED_LAYERS = 16
"""Plans in a row without the CPU, after which so many layers do without a plan until the next."""


class RunningMean:
    """An exponential average.

    Attributes:
        seconds: 0 before the first measurement.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Takes a measurement."""
        before = self.seconds or seconds
        self.seconds = before + (seconds - before) * WEIGHT


class MissSpeeds:
    """What missing experts cost here, and what is done with them because of that.

    It takes seconds and has no clock, so the same measurements give the same plans.

    Attributes:
        launch: of the product of an expert that was brought to the device.
        queue: of the host, for asking for the copy of an expert.
        back: from the CPU's last product until the device has its rows, and what comes after them.
    """

    def __init__(self) -> None:
        self.launch = RunningMean()
        self.queue = RunningMean()
        self.back = RunningMean()
        self._cpu: dict[int, RunningMean] = {}  # by number of rows
        self._no_cpu_s = self._no_copy_s = 0.0  # planned since the last one of each
        self._idle_plans = self._rested = 0

    def rests(self) -> bool:
        """Whether the next layer does without a plan, since the last ones had nothing for the CPU.

        What a plan needs to know takes the host time while the device waits.
        """
        return self._idle_plans >= IDLE_PLANS and self._rested < RESTED_LAYERS

    def rested(self) -> None:
        """A layer that lacked experts had no plan."""
        self._rested += 1

    def computed(self, num_rows: int, seconds: float) -> None:
        """The CPU computed an expert for so many rows."""
        self._cpu.setdefault(num_rows, RunningMean()).add(seconds)

    def cpu_s(self, num_rows: int) -> float:
        """Seconds of one expert on the CPU; of numbers that were not measured, from the nearest."""
        known = self._cpu.get(num_rows)
        if known is not None:
            return known.seconds
        nearest = min(self._cpu, key=lambda number: (abs(number - num_rows), number))
        # reading the weights takes most of the time, so fewer rows are hardly quicker
        return self._cpu[nearest].seconds * max(1.0, num_rows / nearest)

    def plan(
        self,
        rows: Mapping[int, int],
        on_disk: Collection[int],
        *,
        copy_s: float,
        read_s: float,
        has_residents: bool,
    ) -> MissPlan:
        """Who computes the missing experts of a layer.

        Args:
            rows: number of rows of each.
            on_disk: those of them that are not in RAM.
            copy_s: seconds that a copy has the link for; 0 if none was measured so far. It takes as
                long as the host takes to ask for it, if that is more.
            read_s: seconds of a read from disk into RAM.
            has_residents: whether the device has others of the layer to compute.

        Returns:
            A plan; its seconds are 0 where a speed was not known.
        """
        heaviest_first = sorted(rows, key=lambda expert: (-rows[expert], expert))
        if not self._cpu or not copy_s:
            # one side is measured at a time: the CPU first, by the expert of fewest rows
            number = 0 if self._cpu else 1
            split = len(rows) - number
            return MissPlan((*heaviest_first[:split],), (*heaviest_first[split:],), 0.0)
        copy_s = max(copy_s, self.queue.seconds)
        costs = MissCosts(
            cpu_s=self.cpu_s,
            copy_s=copy_s,
            launch_s=self.launch.seconds,
            read_s=read_s,
            return_s=self.back.seconds,
            residents_s=self.launch.seconds * has_residents,
        )
        plan = plan_misses(rows, on_disk, costs)
        self._idle_plans, self._rested = 0 if plan.computed else self._idle_plans + 1, 0
        self._no_cpu_s = 0.0 if plan.computed else self._no_cpu_s + plan.seconds
        self._no_copy_s = 0.0 if plan.copied or plan.kept else self._no_copy_s + plan.seconds
        if plan.copied and TRIED * self._no_cpu_s > self.cpu_s(rows[heaviest_first[-1]]):
            self._no_cpu_s = 0.0
            return MissPlan((*heaviest_first[:-1],), (heaviest_first[-1],), 0.0)
        if plan.computed and TRIED * self._no_copy_s > copy_s:
            self._no_copy_s = 0.0
            return MissPlan((heaviest_first[0],), (*heaviest_first[1:],), 0.0)
        return plan
