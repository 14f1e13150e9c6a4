"""Micro-batches that go through a model side by side and meet at its experts.

Each has a thread, of which one runs at a time, in turn. At a layer's experts a thread waits until
all have come; then the experts are computed for all of them, and every thread goes on. Since the
turns are fixed, gradients of shared parameters are summed in the order of the micro-batches, as if
one had been computed after the other.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from moe_runtime.layer import MoELayer

T = TypeVar("T")


class _Aborted(BaseException):
    """Unwinds a micro-batch whose neighbour failed; not for users' handlers."""


class _Part(Generic[T]):
    """One micro-batch: its thread and what it waits with."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.turn = threading.Semaphore(0)
        self.place: Any = None
        self.entry: Any = None
        self.together: Callable[[list[Any]], list[Any]] | None = None
        self.answer: Any = None
        self.future: Future[T] = Future()
        self.is_done = False
        self.aux: list[Any] = []

    def raise_error(self) -> None:
        """Raises what the work raised, if it is over."""
        if self.is_done:
            self.future.result()


class MicroBatchBarrier(Generic[T]):
    """Runs micro-batches until all are done.

    Args:
        model: the `aux` of its `MoELayer`s belongs to whoever runs.
        parts: one function for each micro-batch: its forward and backward pass.
        on_turn: called with a part's number whenever it goes on.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Callable[[], T]],
        *,
        on_turn: Callable[[int], None] | None = None,
    ) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, MoELayer)]
        self._parts = [_Part(work) for work in parts]
        self._on_turn = on_turn
        self._running = self._parts[0]
        self._back = threading.Semaphore(0)
        self._is_aborted = False

    def run(self) -> list[T]:
        """The results in the order of the parts.

        Raises:
            RuntimeError: the parts did not visit the same layers in the same order.
            Exception: what the first part that failed raised.
        """
        with ThreadPoolExecutor(len(self._parts), "micro-batch") as threads:
            for part in self._parts:
                context = contextvars.copy_context()
                part.future = threads.submit(context.run, self._work, part)
            try:
                while not all(part.is_done for part in self._parts):
                    for part in self._parts:
                        self._give_turn(part)
                    for part in self._parts:
                        part.raise_error()
                    self._compute_together()
            finally:
                self._is_aborted = True
                for part in self._parts:
                    part.turn.release()
        return [part.future.result() for part in self._parts]

    def meet(self, place: Any, entry: Any, together: Callable[[list[Any]], list[Any]]) -> Any:
        """Called by a part: waits for the others, and returns what `together` made for it.

        Args:
            place: must be equal for all parts.
            entry: what this part brings.
            together: called once with the entries of all.
        """
        part = self._running
        part.place, part.entry, part.together = place, entry, together
        self._yield_turn(part)
        return part.answer

    def _work(self, part: _Part[T]) -> T:
        part.turn.acquire()
        try:
            if self._is_aborted:
                raise _Aborted
            # nodes of a GPU would otherwise wait for one another in the thread of the device
            with torch.autograd.set_multithreading_enabled(False):
                return part.work()
        finally:
            part.is_done = True
            part.place = None
            self._back.release()

    def _give_turn(self, part: _Part[T]) -> None:
        if part.is_done:
            return
        self._running = part
        if self._on_turn is not None:
            self._on_turn(self._parts.index(part))
        if part.aux:
            for layer, aux in zip(self._layers, part.aux, strict=True):
                layer.aux = aux
        part.turn.release()
        self._back.acquire()

    def _yield_turn(self, part: _Part[T]) -> None:
        part.aux = [layer.aux for layer in self._layers]
        self._back.release()
        part.turn.acquire()
        if self._is_aborted:
            raise _Aborted

    def _compute_together(self) -> None:
        places = {part.place for part in self._parts}
        if len(places) > 1:
            raise RuntimeError(
                "the micro-batches of a window must visit the same layers in the same order; "
                f"one is at {self._parts[0].place}, another elsewhere"
            )
        together = self._parts[0].together
        if None in places or together is None:
            return
        answers = together([part.entry for part in self._parts])
        for part, answer in zip(self._parts, answers, strict=True):
            part.entry, part.answer = None, answer


def run_window(
    model: nn.Module,
    work: Sequence[Callable[[], T]],
    set_window: Callable[[MicroBatchBarrier[T] | None], None],
) -> list[T]:
    """Runs micro-batches: one alone as it is, several in a window that their experts know of.

    Args:
        model: the model.
        work: the forward and backward pass of each.
        set_window: tells the model's experts where micro-batches meet, and at the end nowhere.
    """
    try:
        if len(work) == 1:
            return [work[0]()]
        window = MicroBatchBarrier(model, work)
        set_window(window)
        return window.run()
    finally:
        set_window(None)
