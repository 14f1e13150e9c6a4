"""A group of ranks that are threads of one process: an exchange is a list that all can read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime.parallel.communication.transport import Arriving, Pending


class ThreadGroup:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=600)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(transport, *args)` on every rank, each in a thread; results by rank."""
        results: list[Any] = [None] * self.size

        def call(rank: int) -> None:
            try:
                results[rank] = function(ThreadTransport(self, rank), *args)
            except BaseException as error:
                results[rank] = error
                self.barrier.abort()

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class ThreadTransport:
    """One rank of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank, self.size = rank, group.size

    def _post(self, value: Any) -> list[Any]:
        self._group.posted[self.rank] = value
        self._group.barrier.wait()
        posted = list(self._group.posted)
        self._group.barrier.wait()
        return posted

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        return torch.stack([numbers[self.rank] for numbers in self._post(numbers_PN)])

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> Sequence[object]:
        return list(zip(sent_CP.tolist(), received_CP.tolist(), strict=True))

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        assert isinstance(route, tuple)
        splits = route[1] if reverse else route[0]
        posted = self._post(rows_RD.split(splits))
        return Arriving(lambda: torch.cat([parts[self.rank] for parts in posted]))
