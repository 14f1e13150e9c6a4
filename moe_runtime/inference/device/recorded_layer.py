"""One layer of a step that is recorded in parts, and what is queued between two of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from moe_runtime.inference.device.device_experts import DeviceExperts, Found, Routed
from moe_runtime.memory.device.device import GraphRecorder
from moe_runtime.memory.device.device_store import DeviceStore, Residents
from moe_runtime.types import ExpertKey


class RecordedLayer:
    """The experts of one layer in a recorded step, to which missing ones are added.

    Attributes:
        sums: queues the sums of all experts.
        takes_rows: as of `SlottedProducts`.
        arrived_E: where the slots are of those that arrived.
        following: the next layer, which is prepared while the device computes this one.
    """

    following: RecordedLayer | None = None

    def __init__(
        self,
        experts: DeviceExperts,
        routed: Routed,
        recorder: GraphRecorder,
        tables_2E: torch.Tensor,
    ) -> None:
        """Records the residents and those that arrive, whoever they will be.

        Args:
            experts: of the layer.
            routed: what the layer is called with.
            recorder: of the step; the part before the sums is ended.
            tables_2E: slots of residents and of those that arrived, filled before a replay.
        """
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
        self._told = recorder.tell(routed.ids_TK, *[routed.hidden_TD][:may_plan])
        self._is_counted = True
        self._products.add(stack_over(self._residents_E))
        self._at_once = recorder.cut()
        self._products.add(stack_over(self.arrived_E))
        self._arrivals = recorder.cut()

    def add(self, experts: Any) -> None:
        """As `SlottedProducts.add`, for experts that have arrived, whose slots are in a table."""
        self._arrivals.replay()

    def replay(self) -> bool:
        """Replays the part with this layer's choices and residents, and queues what it lacks.

        Returns:
            Whether the whole layer was resident.
        """
        self._experts.complete(self, self._routed, self._launch)
        return self._listed is not None and self._listed.are_all

    def prepare(self) -> None:
        """To be called before each replay: forgets the choices of the step before."""
        self._told.settle()
        if not self._is_counted:
            self._store.count_behind(self._told)
        self._told.forget()
        self._is_counted = False

    def _launch(self) -> tuple[Residents, Found]:
        residents = self._store.with_residents(self._experts.layer, self._list_and_replay)
        if self.following is not None:
            self.following.prepare()
        return residents, self._experts.found(self, self._routed, self._told, self._used)

    def _used(self) -> list[ExpertKey]:
        self._is_counted = True
        return self._experts.keys_of_rows(self._told.numbers)

    def _list_and_replay(self, residents: Residents) -> None:
        if residents is not self._listed:
            self._store.device.upload(residents.slots, self._residents_E)
            self._listed = residents
        self._at_once.replay()
