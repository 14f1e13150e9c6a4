"""Experts that a device lacks, computed by the CPU where they lie in the host's memory.

Shape suffixes: T tokens, N rows of some experts, D model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from moe_runtime.config import MISSES, require_known
from moe_runtime.inference.device.miss_plans import MissPlan, MissSpeeds
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.expert_mlp.separate_experts import ExpertActivation
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.memory.prefetcher import Guesses
from moe_runtime.memory.store import ExpertStore
from moe_runtime.types import ExpertKey

Bind = Callable[[ExpertKey, torch.Tensor], ExpertWeights]


class Misses:
    """Missing experts of few rows: computed by the device once copied, or by the CPU.

    The two sum in different orders, so the last bits of a result depend on who computed it.
    """

    def __init__(
        self,
        store: DeviceStore[ExpertWeights],
        lower: ExpertStore[torch.Tensor],
        bind: Bind,
        *,
        is_planned: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``is_planned`` lets speeds decide; otherwise the CPU computes every missing expert."""
        self.store = store
        self.lower = lower
        self.bind = bind
        self.clock = clock
        self.speeds = MissSpeeds()
        self._is_planned = is_planned
        self._given: tuple[int, float] | None = None

    def rest(self) -> bool:
        """Whether the device computes whatever the next layer lacks."""
        return self._is_planned and self.speeds.rests()

    def gives(self, layer: int) -> None:
        """The CPU has computed its part of a layer, which goes to the device now."""
        self._given = layer, self.clock()

    def goes_on(self, layer: int) -> None:
        """The device has its work up to the choices of a layer."""
        if self._given is not None and layer > self._given[0]:
            self.speeds.back.add(self.clock() - self._given[1])
        self._given = None

    def plan(
        self, layer: int, rows: Mapping[int, Sequence[int]], residents: frozenset[int]
    ) -> MissPlan:
        """Plans the experts of a layer that are neither resident nor on their way."""
        wanted = [(ExpertKey(layer, e), 1.0) for e in rows if e not in residents]
        missing = [key for key, _ in Guesses(self.store).absent(wanted)] if wanted else []
        if not missing:
            return MissPlan((), (), 0.0)
        if not self._is_planned:
            return MissPlan((), tuple(key.expert for key in missing), 0.0)
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
    """The experts of one layer that the CPU computes, from ``x_TD`` on the host."""

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
        """Computes what is left; what is on disk is read first."""
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
        """Computes what is left, and gives all rows to the sums on the device
        (`SlottedProducts.give`)."""
        self.compute()
        self._misses.gives(self._layer)
        device = self._misses.store.device
        y_ND = self._done[0] if len(self._done) == 1 else torch.cat(self._done)
        # as the sums take them: the device has nothing to convert
        give(device.upload(np.array(self._places, np.int64)), device.send(y_ND.float()))


def open_misses(
    mode: str,
    modules: Iterable[Any],
    store: Any,
    lower: ExpertStore[torch.Tensor] | None,
    bind: Bind,
) -> None:
    """Has the CPU compute missing experts: all of them (``"cpu"``), or as planned (``"auto"``)."""
    assert isinstance(store, DeviceStore), "load has looked for a device"
    assert lower is not None, "a device has a tier below"
    misses = Misses(store, lower, bind, is_planned=mode == "auto")
    for module in modules:
        module.misses = misses


def check_misses(misses: str, place: torch.device, *, is_alone: bool) -> None:
    """Refuses a name that nothing has, a model on the CPU, and experts divided among processes.

    Raises:
        ValueError: one of these.
    """
    require_known("misses", misses, MISSES)
    if place.type == "cpu" and misses != "device":
        raise ValueError(
            f"misses is for models on a GPU; this one is on the CPU, got {misses!r}: leave it out"
        )
    if not is_alone and misses != "device":
        raise ValueError(
            f"misses is for one process; leave it out, or group and placement, got {misses!r}"
        )
