"""Plans the experts that a device lacks: computed by the CPU, or by the device once copied.

HybriMoE's schedule of one layer (arXiv 2504.05897), for an engine that launches residents before
the host knows the choices. The link brings the heaviest experts, the CPU takes the others; each
number of copies is simulated and the best one wins. Experts from disk come later, so one more plan
takes all in the order of their arrival. The idle link also brings experts that the CPU computes,
for later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

WEIGHT = 0.1
"""Of the latest measurement in a running mean: about the last ten count."""
TRIED = 0.01
"""Share of the planned time of an idle side that may go into measuring its speed."""
IDLE_PLANS = RESTED_LAYERS = 16
"""Plans in a row without the CPU, after which so many layers do without a plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissCosts:
    """Measured seconds.

    Attributes:
        cpu_s: of one expert on the CPU, by its number of rows.
        copy_s: to bring one expert from RAM to the device.
        launch_s: of the product of an expert that was brought.
        read_s: to read one expert from disk into RAM.
        return_s: to bring what the CPU computed to the device, once for all of it.
        residents_s: of the products that the device computes before those of arrivals.
    """

    cpu_s: Callable[[int], float]
    copy_s: float
    launch_s: float
    read_s: float = 0.0
    return_s: float = 0.0
    residents_s: float = 0.0


class MissPlan(NamedTuple):
    """Who computes what, in order.

    Attributes:
        copied: experts that are brought to the device.
        computed: experts that the CPU computes.
        seconds: predicted.
        kept: those of `computed` that the link brings meanwhile, for the next time.
    """

    copied: tuple[int, ...]
    computed: tuple[int, ...]
    seconds: float
    kept: tuple[int, ...] = ()


class _Miss(NamedTuple):
    """A missing expert, the seconds it takes the CPU, and when it is in RAM."""

    expert: int
    cpu_s: float
    there_s: float


def plan_misses(rows: Mapping[int, int], on_disk: Collection[int], costs: MissCosts) -> MissPlan:
    """Plans the missing experts of a layer for the least predicted time.

    ``rows`` are the rows of each; those in ``on_disk`` are read heaviest first.

    Raises:
        ValueError: an expert without rows.
    """
    if any(count < 1 for count in rows.values()):
        raise ValueError("rows must list experts that are asked for, each with at least one row")
    order = sorted(rows, key=lambda expert: (-rows[expert], expert))
    if not on_disk:
        return _plan_in_ram(order, [costs.cpu_s(rows[expert]) for expert in order], costs)
    misses, there_s = [], 0.0
    for expert in order:
        is_late = expert in on_disk
        there_s += is_late * costs.read_s
        misses.append(_Miss(expert, costs.cpu_s(rows[expert]), there_s if is_late else 0.0))
    choices = [(misses[:number], misses[number:]) for number in range(len(misses) + 1)]
    for both in choices:
        for side in both:
            side.sort(key=lambda miss: miss.there_s)
    misses.sort(key=lambda miss: miss.there_s)
    choices.append(_first_to_end(misses, costs))
    # of equal times that of the plan which brings more: what is brought is there the next time
    ends = [(_seconds_of(*both, costs), -len(both[0])) for both in choices]
    best = min(range(len(ends)), key=ends.__getitem__)
    copied, computed = ([miss.expert for miss in side] for side in choices[best])
    in_ram = [expert for expert in computed if expert not in on_disk]
    return _with_kept(copied, computed, ends[best][0], in_ram, costs)


def _plan_in_ram(order: list[int], cpu_s: list[float], costs: MissCosts) -> MissPlan:
    link_s, device_s, left_s = 0.0, costs.residents_s, sum(cpu_s) + costs.return_s
    best_s, number = max(device_s, left_s if order else 0.0), 0
    for brought, own_s in enumerate(cpu_s, 1):
        link_s += costs.copy_s
        device_s = max(device_s, link_s) + costs.launch_s
        left_s -= own_s
        end_s = device_s if brought == len(order) or device_s > left_s else left_s
        if end_s <= best_s:
            best_s, number = end_s, brought
        elif device_s >= best_s:
            break
    return _with_kept(order[:number], order[number:], best_s, order[number:], costs)


def _with_kept(
    copied: list[int], computed: list[int], seconds: float, worth: list[int], costs: MissCosts
) -> MissPlan:
    """Adds as many of the worthwhile experts as the link has time for."""
    idle_s = seconds - len(copied) * costs.copy_s
    number = min(len(worth), int(idle_s / costs.copy_s)) if worth and costs.copy_s else 0
    return MissPlan((*copied,), (*computed,), seconds, (*worth[:number],))


def _seconds_of(copied: list[_Miss], computed: list[_Miss], costs: MissCosts) -> float:
    """Predicted seconds until the device and the CPU have computed these, in this order."""
    link_s, device_s = 0.0, costs.residents_s
    for _, _, there_s in copied:
        link_s = max(link_s, there_s) + costs.copy_s
        device_s = max(device_s, link_s) + costs.launch_s
    cpu_s = 0.0
    for _, own_s, there_s in computed:
        cpu_s = max(cpu_s, there_s) + own_s
    return max(device_s, cpu_s + costs.return_s) if computed else device_s


def _first_to_end(misses: list[_Miss], costs: MissCosts) -> tuple[list[_Miss], list[_Miss]]:
    """Each expert to the side that has it done first."""
    copied: list[_Miss] = []
    computed: list[_Miss] = []
    link_s, cpu_s = 0.0, costs.return_s
    for miss in misses:
        brought_s = max(link_s, miss.there_s) + costs.copy_s
        done_s = max(cpu_s, miss.there_s + costs.return_s) + miss.cpu_s
        if done_s < brought_s + costs.launch_s:
            cpu_s = done_s
            computed.append(miss)
        else:
            link_s = brought_s
            copied.append(miss)
    return copied, computed


class RunningMean:
    """An exponential average in seconds; 0 before the first measurement."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        before = self.seconds or seconds
        self.seconds = before + (seconds - before) * WEIGHT


class MissSpeeds:
    """What missing experts cost here, and the plans made of it. It has no clock of its own.

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
        """Whether the next layer does without a plan, since the last plans did not use the CPU."""
        return self._idle_plans >= IDLE_PLANS and self._rested < RESTED_LAYERS

    def rested(self) -> None:
        """A layer with misses had no plan."""
        self._rested += 1

    def computed(self, num_rows: int, seconds: float) -> None:
        self._cpu.setdefault(num_rows, RunningMean()).add(seconds)

    def cpu_s(self, num_rows: int) -> float:
        """Seconds of one expert on the CPU; for unmeasured numbers of rows, by the nearest."""
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
        """Plans the missing experts of a layer; its seconds are 0 where a speed was not known.

        Args:
            rows: number of rows of each.
            on_disk: those of them that are not in RAM.
            copy_s: seconds that a copy has the link for; 0 if none was measured.
            read_s: seconds of a read from disk into RAM.
            has_residents: whether the device has others of the layer to compute.
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
