"""Missing experts of a device that the CPU computes in host memory.

Shape suffixes: T tokens, N rows of some experts, D model.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.expert_mlp.separate_experts import ExpertActivation
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.device.recent_uses import RecentUses
from moe_runtime.memory.prefetcher import Guesses
from moe_runtime.memory.store import ExpertStore
from moe_runtime.types import ExpertKey

Bind = Callable[[ExpertKey, torch.Tensor], ExpertWeights]


class Misses:
    """Missing experts of few rows: copied to the device, or computed by the CPU. Both sum in
    different orders, so the last bits of a result depend on the choice."""

    def __init__(
        self,
        store: DeviceStore[ExpertWeights],
        lower: ExpertStore[torch.Tensor],
        bind: Bind,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.store = store
        self.lower = lower
        self.bind = bind
        self.clock = clock
        self.speeds = MissSpeeds()
        self.uses = RecentUses()
        self._given: tuple[int, float] | None = None

    def keep(self, keys: Sequence[ExpertKey]) -> None:
        """Begins to copy experts that the CPU computes, if they are used more than residents."""
        self.store.bring(keys, self.uses)

    def returned(self, layer: int) -> None:
        """The CPU's rows of a layer are queued for the device."""
        self._given = layer, self.clock()

    def reached(self, layer: int) -> None:
        """The device has its work up to the routing of a layer."""
        if self._given is not None and layer > self._given[0]:
            self.speeds.back.add(self.clock() - self._given[1])
        self._given = None

    def plan(
        self, layer: int, rows: Mapping[int, Sequence[int]], residents: frozenset[int]
    ) -> MissPlan:
        """Plans the experts of a layer that are neither resident nor being copied."""
        wanted = [(ExpertKey(layer, e), 1.0) for e in rows if e not in residents]
        missing = [key for key, _ in Guesses(self.store).absent(wanted)] if wanted else []
        if not missing:
            return MissPlan((), (), 0.0)
        below = Guesses(self.lower)
        late = below.absent([(key, 1.0) for key in missing])
        slot_bytes = self.store.slot_bytes
        return self.speeds.plan(
            {key.expert: len(rows[key.expert]) for key in missing},
            {key.expert for key, _ in late},
            copy_s=self.store.fetcher.speed.seconds_per_byte * slot_bytes,
            read_s=below.link().transfer_s,
            has_residents=bool(residents),
        )


class HostPart:
    """The experts of one layer that the CPU computes, for inputs ``x_TD`` on the host."""

    def __init__(
        self,
        misses: Misses,
        layer: int,
        keys: Sequence[ExpertKey],
        rows: Mapping[int, Sequence[int]],
        x_TD: torch.Tensor,
        num_choices: int,
        activation: ExpertActivation,
    ) -> None:
        self._misses = misses
        self._layer, self._left = layer, [*keys]
        self._rows = rows
        self._x_TD = x_TD
        self._num_choices = num_choices
        self._activation: ExpertActivation = activation
        self._places: list[int] = []
        self._done: list[torch.Tensor] = []

    def compute(self) -> None:
        """Computes the remaining experts; reads those on disk first."""
        if not self._left:
            return
        with self._misses.lower.lease(self._left) as lease:
            for group in lease:
                self._compute(group)
        self._left.clear()

    def _compute(self, group: Sequence[tuple[ExpertKey, torch.Tensor]]) -> None:
        misses, rows = self._misses, [self._rows[key.expert] for key, _ in group]
        places, counts = [place for own in rows for place in own], [*map(len, rows)]
        begun_s = misses.clock()
        y_ND = self._x_TD.new_empty(len(places), self._x_TD.shape[1])
        expert_ffn(
            self._x_TD,
            [misses.bind(key, slot) for key, slot in group],
            counts,
            [place // self._num_choices for place in places],
            [*range(len(places))],
            y_ND,
            activation=self._activation,
        )
        each_s = (misses.clock() - begun_s) / len(group)
        for count in counts:
            misses.speeds.computed(count, each_s)
        self._places += places
        self._done.append(y_ND)

    def finish(self, give: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Computes the remaining experts, and adds all rows to the sums on the device by ``give``
        (`SlottedProducts.give`)."""
        self.compute()
        self._misses.returned(self._layer)
        device = self._misses.store.device
        y_ND = self._done[0] if len(self._done) == 1 else torch.cat(self._done)
        # fp32, so that the device need not convert
        give(device.upload(np.array(self._places, np.int64)), device.send(y_ND.float()))


def open_misses(
    modules: Iterable[Any],
    store: Any,
    lower: ExpertStore[torch.Tensor] | None,
    bind: Bind,
) -> None:
    """Lets the CPU compute a part of the missing experts."""
    assert isinstance(store, DeviceStore), "load has looked for a device"
    assert lower is not None, "a device has a tier below"
    misses = Misses(store, lower, bind)
    store.miss_costs = misses.speeds.costs
    for module in modules:
        module.misses = misses


WINDOW, ENOUGH = 9, 3
"""Measurements in a median, and the least number for a known speed."""
TRIED = 0.01
"""Share of the planned time without copies to spend on measuring one."""
RETRIED_LAYERS = 64
"""Layers with misses until the CPU is measured again; doubles each time the CPU stays idle."""
IDLE_PLANS = RESTED_LAYERS = 16
"""After so many plans in a row without the CPU, as many layers have no plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MissCosts:
    """Measured seconds.

    Attributes:
        cpu_s: of one expert on the CPU, by its number of rows.
        copy_s: to copy one expert from RAM to the device.
        launch_s: of the product of a copied expert.
        read_s: to read one expert from disk into RAM.
        return_s: to send all rows of the CPU to the device.
        residents_s: of the device's products of residents, which come first.
    """

    cpu_s: Callable[[int], float]
    copy_s: float
    launch_s: float
    read_s: float = 0.0
    return_s: float = 0.0
    residents_s: float = 0.0


class MissPlan(NamedTuple):
    """The division of missing experts, in order.

    Attributes:
        copied: experts to copy to the device.
        computed: experts that the CPU computes.
        seconds: predicted time.
        kept: experts of `computed` to copy meanwhile for later steps.
    """

    copied: tuple[int, ...]
    computed: tuple[int, ...]
    seconds: float
    kept: tuple[int, ...] = ()


class _Miss(NamedTuple):
    """A missing expert, its seconds on the CPU, and the time until it is in RAM."""

    expert: int
    cpu_s: float
    there_s: float


def plan_misses(rows: Mapping[int, int], on_disk: Collection[int], costs: MissCosts) -> MissPlan:
    """Plans the missing experts of a layer for the least predicted time. ``rows`` has the number
    of rows of each; experts in ``on_disk`` are read heaviest first. Raises ValueError: an expert
    has no rows."""
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
    # at equal times, more copies: copied experts are resident for the next step
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
    """Adds as many experts in RAM as the link has time to copy; one if the link is idle, even if
    that copy lasts into the next layers."""
    idle_s = seconds - len(copied) * costs.copy_s
    number = int(idle_s / costs.copy_s) if costs.copy_s else 0
    return MissPlan((*copied,), (*computed,), seconds, (*worth[: max(number, not copied)],))


def _seconds_of(copied: list[_Miss], computed: list[_Miss], costs: MissCosts) -> float:
    link_s, device_s = 0.0, costs.residents_s
    for _, _, there_s in copied:
        link_s = max(link_s, there_s) + costs.copy_s
        device_s = max(device_s, link_s) + costs.launch_s
    cpu_s = 0.0
    for _, own_s, there_s in computed:
        cpu_s = max(cpu_s, there_s) + own_s
    return max(device_s, cpu_s + costs.return_s) if computed else device_s


def _first_to_end(misses: list[_Miss], costs: MissCosts) -> tuple[list[_Miss], list[_Miss]]:
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


class RecentSpeed:
    """The median of the last measurements, robust to a cold start and outliers."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)

    def forget(self) -> None:
        self._last.clear()

    @property
    def is_known(self) -> bool:
        return len(self._last) >= ENOUGH

    @property
    def seconds(self) -> float:
        """0 before the first measurement."""
        return median(self._last) if self._last else 0.0


class MissSpeeds:
    """Measured costs of missing experts, and plans from them. It has no clock.

    Attributes:
        launch: of the product of a copied expert.
        queue: host time to queue the copy of an expert.
        back: from the CPU's last product until the device has the rows and its next work.
        copy_s: link time of a copy, at the last plan.
    """

    def __init__(self) -> None:
        self.launch, self.queue, self.back = RecentSpeed(), RecentSpeed(), RecentSpeed()
        self.copy_s = 0.0
        self._cpu: dict[int, RecentSpeed] = {}  # by number of rows
        self._no_copy_s = 0.0  # planned since the last copy
        self._no_cpu = 0  # layers with misses since the CPU last had a part
        self._retry_after = RETRIED_LAYERS
        self._idle_plans = self._rested = 0

    def rests(self) -> bool:
        """Whether the next layer needs no plan, since the last plans did not use the CPU."""
        return self._idle_plans >= IDLE_PLANS and self._rested < RESTED_LAYERS

    def rested(self) -> None:
        """A layer with misses had no plan."""
        self._rested += 1
        self._no_cpu += 1

    def computed(self, num_rows: int, seconds: float) -> None:
        self._cpu.setdefault(num_rows, RecentSpeed()).add(seconds)

    def cpu_s(self, num_rows: int) -> float:
        """Seconds of one expert on the CPU, from the nearest measured number of rows; 0 if too few
        were measured."""
        known = [number for number, speed in self._cpu.items() if speed.is_known]
        if not known:
            return 0.0
        nearest = min(known, key=lambda number: (abs(number - num_rows), number))
        # reading weights dominates, so fewer rows are hardly faster
        return self._cpu[nearest].seconds * max(1.0, num_rows / nearest)

    def costs(self) -> MissCosts:
        """The measured costs."""
        return MissCosts(
            cpu_s=self.cpu_s,
            copy_s=max(self.copy_s, self.queue.seconds),
            launch_s=self.launch.seconds,
            return_s=self.back.seconds,
        )

    def plan(
        self,
        rows: Mapping[int, int],
        on_disk: Collection[int],
        *,
        copy_s: float,
        read_s: float,
        has_residents: bool,
    ) -> MissPlan:
        """Plans the missing experts of a layer; ``seconds`` is 0 while a speed is unknown.

        Args:
            rows: number of rows of each.
            on_disk: experts that are not in RAM.
            copy_s: link time of a copy; 0 if not measured.
            read_s: seconds of a read from disk into RAM.
            has_residents: the device also computes residents of the layer.
        """
        self.copy_s = copy_s
        heaviest_first = sorted(rows, key=lambda expert: (-rows[expert], expert))
        is_known = self.cpu_s(1) > 0.0
        if not is_known or not copy_s:
            # measures one side at a time: first the CPU, with the expert of fewest rows
            split = len(rows) - (not is_known)
            return MissPlan((*heaviest_first[:split],), (*heaviest_first[split:],), 0.0)
        costs = self.costs()
        residents_s = costs.launch_s * has_residents
        plan = plan_misses(rows, on_disk, replace(costs, read_s=read_s, residents_s=residents_s))
        self._rested = 0
        self._no_copy_s = 0.0 if plan.copied or plan.kept else self._no_copy_s + plan.seconds
        if plan.computed:
            self._idle_plans = self._no_cpu = 0
            self._retry_after = RETRIED_LAYERS
        else:
            self._idle_plans += 1
            self._no_cpu += 1
            if self._no_cpu > self._retry_after:
                self._idle_plans = self._no_cpu = 0
                self._retry_after *= 2
                for speed in self._cpu.values():
                    speed.forget()
        if plan.computed and TRIED * self._no_copy_s > costs.copy_s:
            self._no_copy_s = 0.0
            return MissPlan((heaviest_first[0],), (*heaviest_first[1:],), 0.0)
        return plan
