"""What rank 0 decides: who generates what, and who holds which experts from when on."""

from __future__ import annotations

import queue
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel.communication.membership import Store
from moe_runtime.parallel.remap import keep_in_place, resize
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile
from moe_runtime.research.elastic.change import Change, decide
from moe_runtime.research.elastic.member import POLL_S
from moe_runtime.research.elastic.requests import ElasticRequest
from moe_runtime.research.placement_solvers import place_experts

LOAD_DECAY = 0.5
"""Share that loads counted earlier keep when new counts come."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeReport:
    """What a change of ranks or placement took.

    Attributes:
        num_ranks: ranks now.
        num_transfers: experts that travelled between ranks.
        num_moved_requests: running requests that went on on another rank.
        prepare_s: seconds from the order to all ranks being ready; the service went on meanwhile.
        switch_s: seconds from the last orders in the old epoch to the first ones in the new, the
            step between them included.
    """

    num_ranks: int
    num_transfers: int
    num_moved_requests: int
    prepare_s: float
    switch_s: float


@dataclass(eq=False)
class _Served:
    request: ElasticRequest
    future: Future[Tokens]
    on_token: Callable[[int], None] | None
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _PendingResize:
    """A change that somebody asked for.

    Attributes:
        future: told how it went.
        num_ranks: ranks wanted; None for as many as there are.
        algorithm: of the new placement; None moves as few experts as possible.
        num_replicas: slots of a layer for second copies, at least.
        asked_s: when.
        reports: loads by rank, as far as they came.
    """

    future: Future[ChangeReport]
    num_ranks: int | None = None
    algorithm: str | None = None
    num_replicas: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    reports: dict[int, np.ndarray] | None = None


@dataclass(eq=False)
class _Pending:
    resize_request: _PendingResize
    change: Change
    ready_s: float = 0.0
    num_moved_requests: int = 0


class Coordinator:
    """Writes the orders of every step. Commands may come from any thread."""

    def __init__(
        self, store: Store, members: Tokens, placement: Placement, *, timeout_s: float
    ) -> None:
        """Starts with a running epoch 0.

        Args:
            store: shared by all processes.
            members: numbers of the processes, by rank.
            placement: the experts on them.
            timeout_s: seconds to wait for processes that a change needs.
        """
        self.placement = placement
        self._store = store
        self._members = members
        self._timeout_s = timeout_s
        self._epoch = 0
        self._commands: queue.SimpleQueue[_Served | _PendingResize | None] = queue.SimpleQueue()
        self._served: dict[int, _Served] = {}
        self._ranks_of_requests: dict[int, int] = {}
        self._waiting: deque[int] = deque()
        self._resize_requests: deque[_PendingResize] = deque()
        self._pending: _Pending | None = None
        self._loads_LE = np.zeros((placement.num_layers, placement.num_experts))
        self._num_requests = 0
        self._is_closing = False
        self._gives_up = False

    @property
    def num_ranks(self) -> int:
        """Ranks of the present epoch."""
        return len(self._members)

    def submit(
        self, request: ElasticRequest, on_token: Callable[[int], None] | None
    ) -> Future[Tokens]:
        """Queues a request; ``on_token`` is called from the service's thread."""
        served = _Served(request, _running_future(), on_token)
        self._commands.put(served)
        return served.future

    def change(self, **options: Any) -> Future[ChangeReport]:
        """Queues a change; options as in ``_PendingResize``."""
        resize_request = _PendingResize(_running_future(), **options)
        self._commands.put(resize_request)
        return resize_request.future

    def close(self, *, at_once: bool) -> None:
        """Ends the service, when everything that was asked for is done or with the next step."""
        self._gives_up = at_once
        self._commands.put(None)

    def fail(self, error: BaseException) -> None:
        """Tells everybody who waits that the service is broken."""
        self._take_commands(wait_s=0)
        resize_requests = [
            *self._resize_requests,
            *([self._pending.resize_request] if self._pending else []),
        ]
        for future in [one.future for one in (*self._served.values(), *resize_requests)]:
            future.set_exception(error)
        self._served.clear()
        self._resize_requests.clear()
        self._pending = None

    def write(self) -> Mapping[int, dict[str, Any]]:
        """The orders of this step, by rank."""
        if self._pending is not None and self._pending.ready_s:
            self._finish_change()
        is_idle = not (self._served or self._pending or self._resize_requests or self._is_closing)
        self._take_commands(wait_s=POLL_S if is_idle else 0)
        if self._is_closing and self._gives_up:
            self.fail(RankFailureError("the service was ended before this was done"))
            return {rank: {"close": True} for rank in range(self.num_ranks)}
        orders: dict[int, dict[str, Any]] = defaultdict(dict)
        self._assign(orders)
        if self._pending is not None:
            self._watch_change(orders)
        elif self._resize_requests:
            self._begin_change(orders)
        elif self._is_closing and not self._served:
            for rank in range(self.num_ranks):
                orders[rank]["close"] = True
        return orders

    def read(self, rank: int, report: dict[str, Any]) -> None:
        """Hands on what a rank generated."""
        for number, tokens in report.get("tokens", {}).items():
            served = self._served[int(number)]
            served.tokens += tokens
            if served.on_token is not None:
                for token in tokens:
                    served.on_token(token)
        for number in report.get("finished", ()):
            served = self._served.pop(number)
            del self._ranks_of_requests[number]
            served.future.set_result(tuple(served.tokens))
        if (
            "loads" in report
            and self._resize_requests
            and self._resize_requests[0].reports is not None
        ):
            self._resize_requests[0].reports[rank] = np.array(report["loads"], dtype=np.float64)

    def _take_commands(self, *, wait_s: float) -> None:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                if command is None:
                    self._is_closing = True
                elif isinstance(command, _PendingResize):
                    self._resize_requests.append(command)
                else:
                    self._served[self._num_requests] = command
                    self._waiting.append(self._num_requests)
                    self._num_requests += 1
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _assign(self, orders: dict[int, dict[str, Any]]) -> None:
        """Gives new requests to the ranks with the fewest; none to ranks that are to leave."""
        change = None if self._pending is None else self._pending.change
        num_ranks = self.num_ranks if change is None else min(self.num_ranks, change.num_new)
        busy = Counter(self._ranks_of_requests.values())
        while self._waiting:
            number = self._waiting.popleft()
            rank = min(range(num_ranks), key=lambda rank: (busy[rank], rank))
            busy[rank] += 1
            self._ranks_of_requests[number] = rank
            asked = asdict(self._served[number].request)
            orders[rank].setdefault("requests", []).append((number, asked))

    def _begin_change(self, orders: dict[int, dict[str, Any]]) -> None:
        resize_request = self._resize_requests[0]
        if resize_request.algorithm is not None and not self._has_loads(resize_request, orders):
            return
        members = self._members
        missing = (resize_request.num_ranks or 0) - len(members)
        if missing > 0:
            standing_by = self._standing_by()
            if len(standing_by) < missing:
                if time.monotonic() - resize_request.asked_s > self._timeout_s:
                    self._resize_requests.popleft().future.set_exception(
                        RankFailureError(
                            f"{missing} more processes are needed for "
                            f"{resize_request.num_ranks} ranks, but "
                            f"{len(standing_by)} stand by after {self._timeout_s:g} s"
                        )
                    )
                return
            members += tuple(standing_by[:missing])
        self._resize_requests.popleft()
        try:
            placement = self._place(resize_request)
        except ValueError as error:
            resize_request.future.set_exception(error)
            return
        change = Change.between(self._epoch + 1, members, self.placement, placement)
        self._epoch += 1
        self._pending = _Pending(resize_request, change)
        text = change.to_json()
        for rank in range(self.num_ranks):
            orders[rank]["prepare"] = text
        for number in members[self.num_ranks :]:
            num_calls = self._store.add(f"calls/{number}", 1)
            self._store.set(f"call/{number}/{num_calls - 1}", text)

    def _has_loads(self, resize_request: _PendingResize, orders: dict[int, dict[str, Any]]) -> bool:
        """Asks all ranks for their counts, once, and adds them up when they have come."""
        if resize_request.reports is None:
            resize_request.reports = {}
            for rank in range(self.num_ranks):
                orders[rank]["loads"] = True
            return False
        if len(resize_request.reports) < self.num_ranks:
            return False
        self._loads_LE = LOAD_DECAY * self._loads_LE + sum(resize_request.reports.values())
        return True

    def _standing_by(self) -> list[int]:
        joined = self._store.add("joined", 0)
        return [number for number in range(1, joined + 1) if number not in self._members]

    def _place(self, resize_request: _PendingResize) -> Placement:
        num_ranks = self.num_ranks if resize_request.num_ranks is None else resize_request.num_ranks
        if resize_request.algorithm is None:
            return resize(self.placement, num_ranks, self._loads_LE)
        devices = Devices(num_nodes=1, gpus_per_node=num_ranks)
        slots = self.placement.num_experts + resize_request.num_replicas
        wanted = place_experts(
            resize_request.algorithm,
            RoutingProfile.from_loads(self._loads_LE),
            devices,
            num_replicas=resize_request.num_replicas + -slots % num_ranks,
        )
        return keep_in_place(self.placement, wanted, devices, rename="devices")

    def _watch_change(self, orders: dict[int, dict[str, Any]]) -> None:
        """Switches when all ranks are ready; gives the change up when one is not going to be."""
        pending = self._pending
        assert pending is not None
        change = pending.change
        try:
            may_switch = decide(self._store, change)
        except RankFailureError as error:
            for rank in range(self.num_ranks):
                orders[rank]["abandon"] = True
            self._pending = None
            pending.resize_request.future.set_exception(
                RankFailureError(f"the change was given up, the service goes on as it was: {error}")
            )
            return
        if not may_switch:
            return
        ranks = _rebalance(self._ranks_of_requests, change.num_new)
        pending.num_moved_requests = sum(
            ranks[n] != rank for n, rank in self._ranks_of_requests.items()
        )
        for rank in range(self.num_ranks):
            orders[rank]["switch"] = ranks
        self._ranks_of_requests = ranks
        self._members = change.members[: change.num_new]
        self.placement = change.placement
        pending.ready_s = time.monotonic()

    def _finish_change(self) -> None:
        """The first orders in the new epoch: the switch has taken place."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.resize_request.future.set_result(
            ChangeReport(
                num_ranks=self.num_ranks,
                num_transfers=len(pending.change.transfers),
                num_moved_requests=pending.num_moved_requests,
                prepare_s=pending.ready_s - pending.resize_request.asked_s,
                switch_s=time.monotonic() - pending.ready_s,
            )
        )


def _running_future() -> Future[Any]:
    """A future that cannot be cancelled any more: what it stands for will be done."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _rebalance(ranks: Mapping[int, int], num_ranks: int) -> dict[int, int]:
    """Equal numbers of requests on all ranks, give or take one, with the fewest that move."""
    kept: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    moving = []
    for number, rank in ranks.items():
        if rank < num_ranks:
            kept[rank].append(number)
        else:
            moving.append(number)
    each, rest = divmod(len(ranks), num_ranks)
    fullest = sorted(kept, key=lambda rank: (-len(kept[rank]), rank))
    for place, rank in enumerate(fullest):
        quota = each + (place < rest)
        moving += kept[rank][quota:]
        del kept[rank][quota:]
    for place, rank in enumerate(fullest):
        quota = each + (place < rest)
        while len(kept[rank]) < quota:
            kept[rank].append(moving.pop(0))
    return {number: rank for rank, numbers in kept.items() for number in numbers}
