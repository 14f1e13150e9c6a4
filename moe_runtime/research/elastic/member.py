"""One process of an elastic generation service: computes in lock step with the others.

All ranks hold the dense weights and generate for requests of their own; the routed experts are
spread over them. A step is an exchange of messages, then one forward pass for each request of the
rank that has most of them; a rank with fewer takes part without tokens. Rank 0 gives the orders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, Protocol

from moe_runtime.parallel.communication.membership import Store, exchange_bytes
from moe_runtime.research.elastic.change import Change, ChangePreparation, decide
from moe_runtime.research.elastic.requests import ElasticRequest, RunningRequest
from moe_runtime.research.elastic.spread_model import SpreadModel

POLL_S = 0.02
_SIZE_BYTES = 8


class Orders(Protocol):
    """Rank 0's side of the messages."""

    def write(self) -> Mapping[int, dict[str, Any]]:
        """What is to be told to which rank in this step."""
        ...

    def read(self, rank: int, report: dict[str, Any]) -> None:
        """Takes note of what a rank reports."""
        ...


class Member:
    """A process with a loaded model, inside or outside of the service."""

    def __init__(self, model: SpreadModel, store: Store, *, timeout_s: float) -> None:
        """Does not join yet.

        Args:
            model: the model, without experts.
            store: shared by all processes.
            timeout_s: seconds after which waiting for another process is an error.
        """
        self.model = model
        self._spread = model.spread
        self._store = store
        self._timeout_s = timeout_s
        self._requests: dict[int, RunningRequest] = {}
        self._preparation: ChangePreparation | None = None
        self._reports_loads = False

    def join(self, change: Change, rank: int, *, decides: bool = False) -> bool:
        """Prepares to be a rank of the next epoch, and enters it when all are ready.

        Args:
            change: what leads to the epoch.
            rank: what this process will be.
            decides: whether this process says when; rank 0 does at the start.

        Returns:
            Whether the change took place.

        Raises:
            RankFailureError: this process decides, and some rank cannot be made ready.
        """
        preparation = ChangePreparation(
            change, rank, self._spread.pages, self._store, timeout_s=self._timeout_s
        )
        go, abandoned = f"epoch/{change.epoch}/go", f"epoch/{change.epoch}/abandoned"
        while not self._store.check([go]):
            if self._store.check([abandoned]):
                return False
            if decides:
                decide(self._store, change)
            time.sleep(POLL_S)
        epoch = preparation.epoch()
        if change.num_old:
            self._take_over(*exchange_bytes(epoch.transport, {}))
        self._spread.enter(epoch, preparation.arrivals)
        return True

    def serve(self, orders: Orders | None = None) -> None:
        """Generates until this rank has left the group or the service ends.

        Args:
            orders: who gives the orders, on rank 0; None on the others.

        Raises:
            RankFailureError: another rank died or stalled.
        """
        while self._step(orders):
            pass

    def _step(self, orders: Orders | None) -> bool:
        transport = self._spread.epoch.transport
        running = [one for one in self._requests.values() if not one.is_finished]
        arrived, passes = exchange_bytes(transport, self._messages(orders), note=len(running))
        messages = {rank: json.loads(data) for rank, data in arrived.items()}
        if orders is not None:
            for rank, message in messages.items():
                if "report" in message:
                    orders.read(rank, message["report"])
        for index in range(max(passes)):
            if index < len(running):
                running[index].advance(self.model.model)
            else:
                self.model.serve_others()
        return self._obey(messages.get(0, {}).get("orders", {}))

    def _messages(self, orders: Orders | None) -> dict[int, bytes]:
        messages: dict[int, dict[str, Any]] = {}
        report = self._report()
        if report:
            messages[0] = {"report": report}
        if orders is not None:
            for rank, order in orders.write().items():
                messages.setdefault(rank, {})["orders"] = order
        return {rank: json.dumps(message).encode() for rank, message in messages.items()}

    def _report(self) -> dict[str, Any]:
        report: dict[str, Any] = {}
        tokens = {n: one.take_report() for n, one in self._requests.items() if one.unreported}
        if tokens:
            report["tokens"] = tokens
        finished = [number for number, one in self._requests.items() if one.is_finished]
        if finished:
            report["finished"] = finished
        for number in finished:
            del self._requests[number]
        if self._reports_loads:
            report["loads"] = self._spread.loads_LE.tolist()
            self._spread.loads_LE[:] = 0
            self._reports_loads = False
        return report

    def _obey(self, order: dict[str, Any]) -> bool:
        """Carries out the orders after a step; False where this rank has left."""
        for number, asked in order.get("requests", ()):
            request = ElasticRequest(**asked | {"prompt": tuple(asked["prompt"])})
            self._requests[number] = RunningRequest(number, request, self.model.ends)
        self._reports_loads = order.get("loads", False)
        if "prepare" in order:
            change = Change.from_json(order["prepare"])
            self._preparation = ChangePreparation(
                change,
                self._spread.epoch.transport.rank,
                self._spread.pages,
                self._store,
                timeout_s=self._timeout_s,
            )
        if order.get("abandon"):
            self._preparation = None
        if "switch" in order:
            return self._switch_epoch(
                {int(number): rank for number, rank in order["switch"].items()}
            )
        return not order.get("close", False)

    def _switch_epoch(self, ranks: dict[int, int]) -> bool:
        """Enters the prepared epoch; requests move to their new ranks. False where this one left.

        Args:
            ranks: the rank of the next epoch of each request.
        """
        preparation, self._preparation = self._preparation, None
        assert preparation is not None, "a switch of epochs without a preparation"
        present, change = self._spread.epoch, preparation.change
        has_left = preparation.rank >= change.num_new
        messages: dict[int, bytes] = {}
        for number, rank in ranks.items():
            if number in self._requests and rank != preparation.rank:
                packed = self._requests.pop(number).pack()
                message = len(packed).to_bytes(_SIZE_BYTES, "little") + packed
                messages[rank] = messages.get(rank, b"") + message
        # Of the two groups, the larger one has all ranks.
        is_shrinking = change.num_new < change.num_old
        carrier = present.transport if is_shrinking else preparation.epoch().transport
        self._take_over(*exchange_bytes(carrier, messages))
        if has_left:
            self._spread.leave()
        else:
            self._spread.enter(preparation.epoch(), preparation.arrivals)
        return not has_left

    def _take_over(self, arrived: dict[int, bytes], _: list[int]) -> None:
        """Goes on with requests of other ranks."""
        for data in arrived.values():
            while data:
                end = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "little")
                one = RunningRequest.unpack(
                    data[_SIZE_BYTES:end], self.model.ends, self.model.model.config
                )
                self._requests[one.number] = one
                data = data[end:]
