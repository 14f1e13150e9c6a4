"""The engine of a process that takes the steps which the first process of a group plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from moe_runtime.errors import RankFailureError
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.plans import Plan, partition_of
from moe_runtime.serving.requests import Finished, FinishReason, NewToken
from moe_runtime.serving.scheduling import Sequence, ignore_event


def follow(model: Any, **options: Any) -> None:
    """Takes part in the steps of the first process's engine until that is closed. In an elastic
    group, also those after processes came or were lost.

    Args:
        model: from ``load``, with the group of all processes.
        options: as the first process gives them to `Engine`.

    Raises:
        RankFailureError: another process died, stalled, or does something else.
        ElasticError: the first process of an elastic group is gone.
    """
    partition = partition_of(model)
    while True:
        try:
            if partition is not None and partition.group is not None:
                partition.form()
            _follow(model, **options)
            return
        except RankFailureError:
            if partition is None or partition.group is None:
                raise


def _follow(model: Any, **options: Any) -> None:
    with (engine := Follower(model, **options)):
        engine.join()


class Follower(Engine):
    """Has the state of the first process's engine, a step later: the next plan has its tokens."""

    _is_leading = False

    def __init__(self, model: Any, **options: Any) -> None:
        self._computed: list[list[tuple[Sequence, int]]] = []
        self._chosen: deque[tuple[int, FinishReason | None]] = deque()
        super().__init__(model, **options)

    def join(self) -> None:
        """Waits until the first process's engine is closed; raises this process's failure."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Frees threads and the model; the first process ends the steps."""
        self._threads.shutdown()
        self._passes.close()

    def _work(self) -> None:
        assert self._plans is not None
        while (plan := self._plans.receive(self._model.moe.stats)).kind != "end":
            self._end_step(plan)
            if plan.kind == "step":
                self._begin_step(plan)
        self._is_closed = True

    def _end_step(self, plan: Plan) -> None:
        """Ends the last step with the tokens that the first process chose."""
        self._chosen.extend(plan.chosen)
        computed, self._computed = self._computed, []
        for chosen in computed:
            self._end_pass(chosen, None)
        if self._chosen or plan.state != self._state():
            raise self._disagreement()

    def _disagreement(self) -> RankFailureError:
        return RankFailureError(
            f"this process and the first one disagree after step {self._counts['steps']} "
            "(a bug of moe-runtime); start all of them again"
        )

    def _begin_step(self, plan: Plan) -> None:
        for number, answer, request in plan.came:
            self._scheduler.add(self._sequence_of(request, ignore_event, number, answer))
        ended = {*plan.cancelled}
        self._beside_tokens = plan.beside_tokens
        known = (*self._scheduler.running, *self._scheduler.waiting)
        self._compute([sequence for sequence in known if sequence.number in ended])

    def _pass(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> None:
        for sequence, _ in chosen:
            self._fit(sequence)
        self._shown(chosen, compute)
        self._counts["steps"] += 1
        self._computed.append(chosen)

    def _add_token(self, sequence: Sequence, logits_V: torch.Tensor | None) -> Finished | None:
        token, ending = self._next_chosen()
        if ending != "error":
            self._counts["generated_tokens"] += 1
            sequence.add(NewToken(token))
        return None if ending is None else Finished(ending)

    def _add_logprobs(
        self, sequence: Sequence, num_new: int, logits_RV: torch.Tensor | None
    ) -> Finished | None:
        _, ending = self._next_chosen()
        return None if ending is None else Finished(ending)

    def _next_chosen(self) -> tuple[int, FinishReason | None]:
        if not self._chosen:
            raise self._disagreement()
        return self._chosen.popleft()
