"""What holds around every forward pass of a loaded model, whatever happens within it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.errors import MoERuntimeError
from moe_runtime.memory.changes import FORKED
from moe_runtime.memory.residency import ExpertStore

if TYPE_CHECKING:
    from moe_runtime.inference.routing_record import Step


class Steps:
    """One forward pass after another, none of which leaves anything behind.

    Who records, guesses or notes times has a state for the running pass, so that calls of several
    threads take turns; a pass may call the model again. However a pass ends, Ctrl-C included, other
    threads may go on, torch has its threads, and the stores are mended. Everything is given back
    twice, since an exception may strike while it is given back.
    """

    def __init__(self, stores: Sequence[ExpertStore[Any]]) -> None:
        self._stores = list(stores)
        self._turn: Any = threading.RLock()
        self._forgetful: list[Callable[[], None]] = []
        self._known = threading.local()  # threads whose number of torch's threads is their own
        self._known.is_known = True

    def on_failure(self, forget: Callable[[], None]) -> None:
        """Has somebody told when a pass did not come to its end."""
        self._forgetful.append(forget)

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the model when it is this thread's turn.

        Raises:
            MoERuntimeError: the process is a fork of the one that loaded the model.
        """
        if self._stores[0].is_forked:
            raise MoERuntimeError(FORKED)
        before = _Before(self._turn._is_owned())
        is_done = False
        try:
            result = self._run(call, args, kwargs, before)
            is_done = True
            return result
        finally:
            self._give_back(before, is_done)

    def _run(
        self,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        before: _Before,
    ) -> Any:
        is_done = False
        try:
            with self._turn:
                before.num_threads = self._num_threads()
                result = call(*args, **kwargs)
                is_done = True
                return result
        finally:
            self._give_back(before, is_done)

    def _give_back(self, before: _Before, is_done: bool) -> None:
        if before.num_threads and torch.get_num_threads() != before.num_threads:
            torch.set_num_threads(before.num_threads)
        if not is_done:
            for store in self._stores:
                store.let_go()
            for forget in self._forgetful:
                forget()
        while not before.is_inner and self._turn._is_owned():
            self._turn.release()

    def _num_threads(self) -> int:
        """How many threads torch is to have in this one, whose turn it is.

        A thread keeps what torch had for the process when it first used torch. If that was within
        another thread's pass, it has only one: then it gets what a thread that begins now has.
        """
        found = torch.get_num_threads()
        if not hasattr(self._known, "is_known"):
            if found == 1:
                with ThreadPoolExecutor(1) as fresh:
                    found = fresh.submit(torch.get_num_threads).result()
                torch.set_num_threads(found)
            self._known.is_known = True
        return found


@dataclass
class _Before:
    """What a thread had before a pass: whether it was its turn, and torch's threads, 0 unknown."""

    is_inner: bool
    num_threads: int = 0


class RequestNumbers:
    """Numbers requests in the order in which they begin. Every thread has its own running ones."""

    def __init__(self) -> None:
        self._next = 0
        self._running: dict[int, range] = {}

    def begin(self, step: Step) -> tuple[int, range]:
        """A step begins.

        Returns:
            The number of its first request, and the requests that have ended with it.
        """
        me = threading.get_ident()
        running = self._running.get(me, range(0))
        if not step.is_new:
            return running.start, range(0)
        new = self._running[me] = range(self._next, self._next + step.num_sequences)
        self._next = new.stop
        return new.start, running
