"""A generation service whose ranks come and go while it generates.

Rank 0 lives in the process that makes the service: it takes the requests, gives them to ranks, and
decides on placements. The other ranks are processes that run ``run_worker`` with its address, on
this machine or on others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np

from moe_runtime.errors import MoERuntimeError, RankFailureError
from moe_runtime.inference.generation import check_length
from moe_runtime.parallel.communication.membership import open_store
from moe_runtime.parallel.communication.watch import DEFAULT_TIMEOUT_S
from moe_runtime.parallel.placement_map import PlacementMap
from moe_runtime.parallel.remap import resize
from moe_runtime.policies.placement import Placement
from moe_runtime.research.elastic.change import Change
from moe_runtime.research.elastic.coordinator import ChangeReport, Coordinator, Tokens
from moe_runtime.research.elastic.member import POLL_S, Member
from moe_runtime.research.elastic.requests import ElasticRequest
from moe_runtime.research.elastic.worker import Address, describe, ready_model
from moe_runtime.research.placement_solvers import check_algorithm

_GOODBYE_S = 5.0


class ElasticService:
    """Generates with a Mixture-of-Experts model whose experts are spread over a changing group.

    Every answer has the bits that ``moe_runtime.load`` gives it in one process, whatever the number
    of ranks, the placement, the other requests, and the changes on the way.

        service = ElasticService(path)
        start_local_workers(3, path, service.address)
        with service.start(num_ranks=2):
            answer = service.submit(ElasticRequest(prompt=ids, max_new_tokens=64))
            service.resize(4).result()
            tokens = answer.result()

    Attributes:
        address: host and port that workers are started with.
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
            dtype: the type to compute in, or ``"auto"`` for the checkpoint's own.
            host: address of this machine that the workers reach.
            port: 0 takes a free one.
            timeout_s: seconds after which waiting for another process is an error.
            threads: of this process's kernels.

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
        self._coordinator: Coordinator | None = None
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
        for number in change.members[1:]:
            self._store.add(f"calls/{number}", 1)
            self._store.set(f"call/{number}/0", change.to_json())
        self._member.join(change, 0, decides=True)
        self._coordinator = Coordinator(
            self._store, change.members, first, timeout_s=self._timeout_s
        )
        self._thread.start()
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks that generate now."""
        return self._orders.num_ranks

    @property
    def placement(self) -> Placement:
        """Where the experts lie now."""
        return self._orders.placement

    def submit(
        self, request: ElasticRequest, on_token: Callable[[int], None] | None = None
    ) -> Future[Tokens]:
        """Queues a request.

        Args:
            request: what to generate.
            on_token: called with every new token, from the service's thread.

        Returns:
            The new tokens, once all of them are there.

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
        """Goes over to more or fewer ranks, with the fewest transfers of experts.

        Waits for processes that stand by where it takes more of them; generation goes on meanwhile.
        The ranks with the highest numbers leave; their requests go on on others. A process that
        left stands by again.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        return self._orders.change(num_ranks=num_ranks)

    def rebalance(self, algorithm: str = "eplb", *, num_replicas: int = 0) -> Future[ChangeReport]:
        """Places the experts anew by what was counted since the last time.

        Args:
            algorithm: a name of ``moe_runtime.research.placement_solvers.ALGORITHMS``.
            num_replicas: slots of a layer for second copies, rounded up to what divides.
        """
        check_algorithm(algorithm)
        return self._orders.change(algorithm=algorithm, num_replicas=num_replicas)

    def close(self, *, at_once: bool = False) -> None:
        """Ends the service and its workers, by default when everything asked for is done.

        Args:
            at_once: gives up what is not done; who waits for it gets a ``RankFailureError``.

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
    def _orders(self) -> Coordinator:
        if self._coordinator is None:
            raise ValueError("the service has not been started; call start() first")
        if self._error is not None:
            raise RankFailureError(f"the service has ended: {self._error}") from self._error
        return self._coordinator

    def _run(self) -> None:
        assert self._coordinator is not None
        # Whatever ends the thread must reach those who wait for their tokens; a mistake of ours
        # goes on to be printed as well.
        with contextlib.suppress(MoERuntimeError):
            try:
                self._member.serve(self._coordinator)
            finally:
                self._error = sys.exception()
                if self._error is not None:
                    self._coordinator.fail(self._error)

    def _await_workers(self, count: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while (joined := self._store.add("joined", 0)) < count:
            if time.monotonic() > deadline:
                raise RankFailureError(
                    f"{count} workers are needed, {joined} came within {self._timeout_s:g} s; "
                    f"start them with the address {self.address[0]}:{self.address[1]}"
                )
            time.sleep(POLL_S)
