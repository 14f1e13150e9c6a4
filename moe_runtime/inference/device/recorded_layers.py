"""The experts of one layer in a recorded step in parts.

The host queues missing experts between two graphs. A layer whose experts lie on another GPU has
graphs there, between two graphs of the model's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from moe_runtime.inference.device.device_experts import DeviceExperts, Found, Routed
from moe_runtime.memory.device.cuda_device import CudaRecorder
from moe_runtime.memory.device.device_store import DeviceStore, Residents
from moe_runtime.types import ExpertKey


class RecordedLayer:
    """The experts of one layer in a recorded step in parts.

    Attributes:
        arrived_E: slots of arrived experts.
        following: the next layer, which is prepared while the device computes this one.
    """

    following: RecordedLayer | None = None

    def __init__(
        self,
        experts: DeviceExperts,
        routed: Routed,
        recorder: CudaRecorder,
        tables_2E: torch.Tensor,
    ) -> None:
        """Records residents and arrivals; a replay first fills their slots in ``tables_2E``."""
        assert isinstance(experts.store, DeviceStore)
        assert experts.store.stacks is not None, "the layer has a stack"
        self._experts, self._routed, self._store = experts, routed, experts.store
        self._residents_E, self.arrived_E = tables_2E
        self._listed: Residents | None = None
        self._products = experts.products(routed)
        self.sums, self.takes_rows = self._products.sums, self._products.takes_rows
        self.give = self._products.give
        stack_over = partial(experts.store.stacks.stack_over, experts.layer)
        may_plan = experts.misses is not None and self.takes_rows
        self._host_copy = recorder.tell(routed.ids_TK, *[routed.hidden_TD][:may_plan])
        self._is_counted = True
        self._products.add(stack_over(self._residents_E))
        self._at_once = recorder.cut()
        self._products.add(stack_over(self.arrived_E))
        self._arrivals = recorder.cut()

    def add(self, experts: Any) -> None:
        self._arrivals.replay()

    def replay(self) -> bool:
        """Replays routing and residents, and queues missing experts. Returns whether all were
        resident."""
        self._experts.complete(self, self._routed, self._launch)
        return self._listed is not None and self._listed.are_all

    def prepare(self) -> None:
        """Drops the choices of the last step; call it before each replay."""
        self._host_copy.settle()
        if not self._is_counted:
            self._store.count_behind(self._host_copy)
        self._host_copy.forget()
        self._is_counted = False

    def _launch(self) -> tuple[Residents, Found]:
        residents = self._store.with_residents(self._experts.layer, self._list_and_replay)
        if self.following is not None:
            self.following.prepare()
        return residents, self._experts.found(self, self._routed, self._host_copy, self._used)

    def _used(self) -> list[ExpertKey]:
        self._is_counted = True
        return self._experts.keys_of_rows(self._host_copy.numbers)

    def _list_and_replay(self, residents: Residents) -> None:
        if residents is not self._listed:
            self._store.device.upload(residents.slots, self._residents_E)
            self._listed = residents
        self._at_once.replay()


class CrossedLayer(RecordedLayer):
    """A layer with experts on another GPU: rows are copied there, and their sums back."""

    def __init__(
        self,
        experts: DeviceExperts,
        routed: Routed,
        recorder: CudaRecorder,
        tables_2E: torch.Tensor,
    ) -> None:
        assert isinstance(experts.store, DeviceStore)
        device = experts.store.device
        self._before, self._sources = recorder.end(), routed
        place = device.place
        there = Routed(*(torch.zeros(t.shape, dtype=t.dtype, device=place) for t in routed))
        with device.record() as other:
            super().__init__(experts, there, other, tables_2E)
            self._sums_there = self.sums()
            self._after = other.end()
        like, place = self._sums_there, routed.hidden_TD.device
        self._sums_here = sums_TD = torch.zeros(like.shape, dtype=like.dtype, device=place)
        self.sums = lambda: sums_TD
        recorder.begin()

    def replay(self) -> bool:
        # copies between GPUs are in the order of both GPUs' streams
        self._before.replay()
        for source, target in zip(self._sources, self._routed, strict=True):
            target.copy_(source, non_blocking=True)
        are_all = super().replay()
        self._after.replay()
        self._sums_here.copy_(self._sums_there, non_blocking=True)
        return are_all
