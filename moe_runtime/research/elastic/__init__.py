"""A generation service whose ranks come and go while it generates (ElasticMoE).

Rank 0 lives in the process that makes the service: it takes requests, gives them to ranks, and
decides on placements. The other ranks are processes that run `run_worker` with its address.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime import __version__
from moe_runtime.errors import CheckpointError, MoERuntimeError, RankFailureError
from moe_runtime.inference.generation import check_length
from moe_runtime.kernels.native import native_library
from moe_runtime.parallel.communication.transport import Store, open_store
from moe_runtime.parallel.communication.watch import DEFAULT_TIMEOUT_S
from moe_runtime.parallel.placement_map import PlacementMap, keep_in_place, resize
from moe_runtime.policies.placement import Devices, Placement, RoutingProfile
from moe_runtime.research.elastic.member import (
    POLL_S,
    Change,
    ElasticRequest,
    Member,
    Orders,
    RankReport,
    decide,
)
from moe_runtime.research.elastic.paged_experts import SpreadModel, load_spread_model
from moe_runtime.research.placement_solvers import check_algorithm, place_experts

__all__ = ["ChangeReport", "ElasticRequest", "ElasticService", "run_worker", "start_local_workers"]

LOAD_DECAY = 0.5
"""Share that loads counted earlier keep when new counts come."""

Tokens = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeReport:
    """Costs of a change of ranks or placement.

    Attributes:
        num_transfers: experts that travelled between ranks.
        num_moved_requests: running requests that went on on another rank.
        prepare_s: seconds from the order to all ranks being ready; the service went on meanwhile.
        switch_s: seconds from the last orders in the old epoch to the first ones in the new.
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
class _Resize:
    """A requested change.

    `num_ranks` None keeps their number; `algorithm` None moves as few experts as possible;
    `num_replicas` are slots of a layer for second copies, at least; `loads` are those of ranks.
    """

    future: Future[ChangeReport]
    num_ranks: int | None = None
    algorithm: str | None = None
    num_replicas: int = 0
    asked_s: float = field(default_factory=time.monotonic)
    asks_loads: bool = False
    loads: dict[int, np.ndarray] = field(default_factory=dict)
    change: Change = field(init=False)
    ready_s: float = 0.0
    num_moved_requests: int = 0


class RequestFront:
    """Takes requests and changes from any thread, and writes the orders of every step."""

    def __init__(
        self, store: Store, members: Tokens, placement: Placement, *, timeout_s: float
    ) -> None:
        self.placement = placement
        self.members = members
        self._store = store
        self._timeout_s = timeout_s
        self._epoch = 0
        self._commands: queue.SimpleQueue[_Served | _Resize | None] = queue.SimpleQueue()
        self._served: dict[int, _Served] = {}
        self._ranks: dict[int, int] = {}
        self._resizes: deque[_Resize] = deque()
        self._pending: _Resize | None = None
        self._loads_LE = np.zeros((placement.num_layers, placement.num_experts))
        self._num_requests = 0
        self._is_closing = False
        self._gives_up = False

    @property
    def num_ranks(self) -> int:
        return len(self.members)

    def submit(
        self, request: ElasticRequest, on_token: Callable[[int], None] | None
    ) -> Future[Tokens]:
        """Queues a request; `on_token` is called from the service's thread."""
        served = _Served(request, _running_future(), on_token)
        self._commands.put(served)
        return served.future

    def change(self, **options: Any) -> Future[ChangeReport]:
        """Queues a change; options as in `_Resize`."""
        asked = _Resize(_running_future(), **options)
        self._commands.put(asked)
        return asked.future

    def close(self, *, at_once: bool) -> None:
        """Ends the service, after all requests and changes or with the next step."""
        self._gives_up = at_once
        self._commands.put(None)

    def fail(self, error: BaseException) -> None:
        """Fails everything that waits: the service is broken."""
        self._take_commands(wait_s=0)
        resizes = [*self._resizes, *([self._pending] if self._pending else [])]
        for future in [one.future for one in (*self._served.values(), *resizes)]:
            future.set_exception(error)
        self._served.clear()
        self._resizes.clear()
        self._pending = None

    def write(self) -> Orders:
        """The orders of this step."""
        if self._pending is not None and self._pending.ready_s:
            self._finish_change()
        is_idle = not (self._served or self._pending or self._resizes or self._is_closing)
        self._take_commands(wait_s=POLL_S if is_idle else 0)
        if self._is_closing and self._gives_up:
            self.fail(RankFailureError("the service was ended before this was done"))
            return Orders(ends=True)
        orders = Orders(requests=self._assign())
        if self._pending is not None:
            return self._watch_change(self._pending, orders)
        if self._resizes:
            return self._begin_change(self._resizes[0], orders)
        return replace(orders, ends=self._is_closing and not self._served)

    def read(self, rank: int, report: RankReport) -> None:
        """Takes the tokens that a rank generated."""
        for number, tokens in report.tokens.items():
            served = self._served[number]
            served.tokens += tokens
            if served.on_token is not None:
                for token in tokens:
                    served.on_token(token)
        for number in report.finished:
            served = self._served.pop(number)
            del self._ranks[number]
            served.future.set_result(tuple(served.tokens))
        if report.loads_LE is not None and self._resizes:
            self._resizes[0].loads[rank] = np.array(report.loads_LE)

    def _take_commands(self, *, wait_s: float) -> None:
        try:
            command = self._commands.get(timeout=wait_s) if wait_s else self._commands.get_nowait()
            while True:
                if command is None:
                    self._is_closing = True
                elif isinstance(command, _Resize):
                    self._resizes.append(command)
                else:
                    self._served[self._num_requests] = command
                    self._num_requests += 1
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _assign(self) -> tuple[tuple[int, int, ElasticRequest], ...]:
        """Gives new requests to the ranks with the fewest; none to ranks that are to leave."""
        change = None if self._pending is None else self._pending.change
        num_ranks = self.num_ranks if change is None else min(self.num_ranks, change.num_new)
        busy = Counter(self._ranks.values())
        new = [number for number in self._served if number not in self._ranks]
        for number in new:
            rank = min(range(num_ranks), key=lambda rank: (busy[rank], rank))
            busy[rank] += 1
            self._ranks[number] = rank
        return tuple((n, self._ranks[n], self._served[n].request) for n in new)

    def _begin_change(self, asked: _Resize, orders: Orders) -> Orders:
        if asked.algorithm is not None and len(asked.loads) < self.num_ranks:
            first, asked.asks_loads = not asked.asks_loads, True
            return replace(orders, counts_loads=first)
        missing = (asked.num_ranks or 0) - self.num_ranks
        joined = range(1, self._store.add("joined", 0) + 1)
        standing_by = [number for number in joined if number not in self.members]
        if len(standing_by) < missing and time.monotonic() - asked.asked_s <= self._timeout_s:
            return orders
        self._resizes.popleft()
        if len(standing_by) < missing:
            asked.future.set_exception(
                RankFailureError(
                    f"{missing} more processes are needed for {asked.num_ranks} ranks, but "
                    f"{len(standing_by)} stand by after {self._timeout_s:g} s"
                )
            )
            return orders
        members = (*self.members, *standing_by[: max(missing, 0)])
        try:
            placement = self._place(asked)
        except ValueError as error:
            asked.future.set_exception(error)
            return orders
        self._epoch += 1
        asked.change = Change.between(self._epoch, members, self.placement, placement)
        self._pending = asked
        call(self._store, asked.change, members[self.num_ranks :])
        return replace(orders, prepare=asked.change)

    def _place(self, asked: _Resize) -> Placement:
        num_ranks = self.num_ranks if asked.num_ranks is None else asked.num_ranks
        if asked.algorithm is None:
            return resize(self.placement, num_ranks, self._loads_LE)
        self._loads_LE = LOAD_DECAY * self._loads_LE + sum(asked.loads.values())
        devices = Devices(num_nodes=1, gpus_per_node=num_ranks)
        slots = self.placement.num_experts + asked.num_replicas
        wanted = place_experts(
            asked.algorithm,
            RoutingProfile.from_loads(self._loads_LE),
            devices,
            num_replicas=asked.num_replicas + -slots % num_ranks,
        )
        return keep_in_place(self.placement, wanted, devices, rename="devices")

    def _watch_change(self, pending: _Resize, orders: Orders) -> Orders:
        """Switches when all ranks are ready; gives the change up when one is not going to be."""
        try:
            if not decide(self._store, pending.change):
                return orders
        except RankFailureError as error:
            self._pending = None
            pending.future.set_exception(
                RankFailureError(f"the change was given up, the service goes on as it was: {error}")
            )
            return replace(orders, abandon=True)
        before, change = self._ranks, pending.change
        self._ranks = _rebalance(before, change.num_new)
        pending.num_moved_requests = sum(self._ranks[n] != before[n] for n in before)
        self.members = change.members[: change.num_new]
        self.placement = change.placement
        pending.ready_s = time.monotonic()
        return replace(orders, switch=self._ranks)

    def _finish_change(self) -> None:
        """The first orders in the new epoch: the switch has taken place."""
        pending, self._pending = self._pending, None
        assert pending is not None
        pending.future.set_result(
            ChangeReport(
                num_ranks=self.num_ranks,
                num_transfers=len(pending.change.transfers),
                num_moved_requests=pending.num_moved_requests,
                prepare_s=pending.ready_s - pending.asked_s,
                switch_s=time.monotonic() - pending.ready_s,
            )
        )


def call(store: Store, change: Change, numbers: Tokens) -> None:
    """Tells processes that stand by to join."""
    for number in numbers:
        num_calls = store.add(f"calls/{number}", 1)
        cast(Any, store).set(f"call/{number}/{num_calls - 1}", json.dumps(asdict(change)))


def _running_future() -> Future[Any]:
    """A future that cannot be cancelled."""
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


_GOODBYE_S = 5.0


class ElasticService:
    """Generates with a Mixture-of-Experts model whose experts are spread over a changing group.

    Every answer has the bits that `moe_runtime.load` gives it in one process, whatever the number
    of ranks, the placement, the other requests, and the changes on the way.

        service = ElasticService(path)
        start_local_workers(3, path, service.address)
        with service.start(num_ranks=2):
            answer = service.submit(ElasticRequest(prompt=ids, max_new_tokens=64))
            service.resize(4).result()
            tokens = answer.result()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        dtype: str = "auto",
        host: str = "127.0.0.1",
        port: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        threads: int = 1,
    ) -> None:
        """Loads the dense part of the model and opens the store that workers connect to.

        Args:
            path: the folder of a checkpoint, or the name of a repository on the hub.
            dtype: the type to compute in, or "auto" for the checkpoint's own.
            host: address of this machine that the workers reach.
            port: 0 takes a free one.
            timeout_s: seconds after which waiting for another process is an error.

        Raises:
            CheckpointError: the checkpoint is missing, damaged or incomplete.
            UnsupportedModelError: its model is not one that can be spread.
        """
        self._model = ready_model(path, dtype=dtype, threads=threads)
        self._store = open_store(host, port, is_keeper=True, timeout_s=timeout_s)
        self.address: Address = (host, cast(Any, self._store).port)
        self._store.set("model", describe(self._model))
        self._timeout_s = timeout_s
        self._member = Member(self._model, self._store, timeout_s=timeout_s)
        self._front: RequestFront | None = None
        self._thread = threading.Thread(target=self._run, name="moe-serve", daemon=True)
        self._error: BaseException | None = None

    def start(self, num_ranks: int = 1, *, placement: PlacementMap | None = None) -> ElasticService:
        """Waits for the workers of the first ranks, lets them load their experts, and serves.

        Args:
            num_ranks: ranks to begin with, this process included.
            placement: a map for so many ranks; equal numbers of experts by default.

        Raises:
            CheckpointError: the map is of another model or number of ranks.
            RankFailureError: the workers did not come, or could not load.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        signature = self._model.signature
        if placement is not None:
            placement.require(signature, num_ranks=num_ranks)
            first = placement.placement
        else:
            everything = np.tile(np.arange(signature.num_experts), (signature.num_layers, 1))
            alone = Placement(
                expert_of_slot=everything, num_experts=signature.num_experts, num_gpus=1
            )
            first = resize(alone, num_ranks)
        self._await_workers(num_ranks - 1)
        change = Change.between(0, tuple(range(num_ranks)), None, first)
        call(self._store, change, change.members[1:])
        self._member.join(change, 0, decides=True)
        self._front = RequestFront(self._store, change.members, first, timeout_s=self._timeout_s)
        self._thread.start()
        return self

    @property
    def num_ranks(self) -> int:
        return self._orders.num_ranks

    @property
    def placement(self) -> Placement:
        return self._orders.placement

    def submit(
        self, request: ElasticRequest, on_token: Callable[[int], None] | None = None
    ) -> Future[Tokens]:
        """Queues a request; the result is its new tokens.

        `on_token` is called with every new token, from the service's thread.

        Raises:
            ValueError: prompt and new tokens exceed the positions that the model knows.
        """
        config = self._model.model.config
        check_length(config, len(request.prompt), request.max_new_tokens)
        largest = max(request.prompt)
        if not (min(request.prompt) >= 0 and largest < self._model.signature.vocab_size):
            raise ValueError(
                f"token ids must be in [0, {self._model.signature.vocab_size}), got {largest}"
            )
        return self._orders.submit(request, on_token)

    def resize(self, num_ranks: int) -> Future[ChangeReport]:
        """Changes to more or fewer ranks, with the fewest transfers of experts.

        Waits for standby processes where it takes more of them; generation goes on meanwhile. The
        ranks with the highest numbers leave; their requests go on on others. A process that left
        stands by.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        return self._orders.change(num_ranks=num_ranks)

    def rebalance(self, algorithm: str = "eplb", *, num_replicas: int = 0) -> Future[ChangeReport]:
        """Places the experts again, by their loads since the last placement.

        Args:
            algorithm: a name of `moe_runtime.research.placement_solvers.ALGORITHMS`.
            num_replicas: slots of a layer for second copies, rounded up until slots divide.
        """
        check_algorithm(algorithm)
        return self._orders.change(algorithm=algorithm, num_replicas=num_replicas)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the service and its workers, by default when everything asked for is done.

        Args:
            at_once: gives up unfinished requests: their results raise a `RankFailureError`.

        Raises:
            RankFailureError: a rank died or stalled.
        """
        if self._thread.is_alive():
            self._orders.close(at_once=at_once)
            self._thread.join()
        self._store.set("closed", "")
        deadline = time.monotonic() + _GOODBYE_S
        joined = self._store.add("joined", 0)
        while self._store.add("left", 0) < joined and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> ElasticService:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(at_once=kind is not None)

    @property
    def _orders(self) -> RequestFront:
        if self._front is None:
            raise ValueError("the service has not been started; call start() first")
        if self._error is not None:
            raise RankFailureError(f"the service has ended: {self._error}") from self._error
        return self._front

    def _run(self) -> None:
        assert self._front is not None
        # Any error that ends the thread must reach the callers that wait for tokens; one that
        # is not of the runtime is printed as well.
        with contextlib.suppress(MoERuntimeError):
            try:
                self._member.serve(self._front)
            finally:
                self._error = sys.exception()
                if self._error is not None:
                    self._front.fail(self._error)

    def _await_workers(self, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (joined := self._store.add("joined", 0)) < count:
            if time.monotonic() > deadline:
                raise RankFailureError(
                    f"{count} workers are needed, {joined} came within {self._timeout_s:g} s; "
                    f"start them with the address {self.address[0]}:{self.address[1]}"
                )
            time.sleep(POLL_S)


Address = tuple[str, int]


def ready_model(path: str | Path, *, dtype: str = "auto", threads: int = 1) -> SpreadModel:
    """Loads the dense part of a model, to be computed on so many threads by this process."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    library = native_library()
    if library is not None:
        library.set_num_threads(threads)
    # Torch's sums may depend on the number of threads, so it is one on every rank.
    torch.set_num_threads(1)
    return load_spread_model(path, dtype=dtype)


def describe(model: SpreadModel) -> str:
    """Facts that must be equal in all processes of a service, as text."""
    facts = {
        "moe_runtime": __version__,
        "torch": torch.__version__,
        "dtype": str(model.model.dtype),
        "experts": model.expert_form,
    }
    return json.dumps(facts | asdict(model.signature))


def run_worker(
    path: str | Path,
    address: Address,
    *,
    dtype: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    threads: int = 1,
) -> None:
    """Stands by, computes as a rank on demand, and ends when the service ends.

    Raises:
        CheckpointError: the checkpoint is not the service's.
        RankFailureError: the service, or another rank, is gone.
    """
    model = ready_model(path, dtype=dtype, threads=threads)
    host, port = address
    try:
        store = open_store(host, port, is_keeper=False, timeout_s=timeout_s)
        _check_agreement(store.get("model").decode(), describe(model))
        _stand_by(store, Member(model, store, timeout_s=timeout_s))
    except dist.DistError as error:
        raise RankFailureError(
            f"the service at {host}:{port} is not there: {str(error).splitlines()[0]}", ranks=(0,)
        ) from error


def start_local_workers(
    count: int,
    path: str | Path,
    address: Address,
    *,
    dtype: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[BaseProcess]:
    """Starts workers on this machine; they end when the service does, or with this process."""
    # Forked from a clean process: this one has threads and must not be forked.
    context = multiprocessing.get_context("forkserver")
    # Imported once, where the server has not been started for something else.
    context.set_forkserver_preload([__name__])
    options = {"dtype": dtype, "timeout_s": timeout_s}
    workers = [
        context.Process(target=run_worker, args=(str(path), address), kwargs=options, daemon=True)
        for _ in range(count)
    ]
    for worker in workers:
        worker.start()
    return list(workers)


def _stand_by(store: Store, member: Member) -> None:
    number = store.add("joined", 1)
    num_calls = 0
    while not store.check(["closed"]):
        call = f"call/{number}/{num_calls}"
        if not store.check([call]):
            time.sleep(POLL_S)
            continue
        num_calls += 1
        change = Change(**json.loads(store.get(call)))
        if member.join(change, change.members.index(number)):
            member.serve()
    store.add("left", 1)


def _check_agreement(expected: str, found: str) -> None:
    if expected == found:
        return
    theirs, ours = json.loads(expected), json.loads(found)
    name = next(name for name in theirs if theirs[name] != ours.get(name))
    raise CheckpointError(
        f"this worker does not fit the service: the service has {name} = {theirs[name]}, "
        f"this process {ours.get(name)}; start it with the same checkpoint, dtype and versions"
    )
