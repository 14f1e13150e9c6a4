"""Many requests answered together, none of which is urgent: the most tokens a second."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_runtime.serving.engine import Engine, EngineHandle
from moe_runtime.serving.kv_account import rounded_up
from moe_runtime.serving.prefixes import LEAST_SHARED
from moe_runtime.serving.requests import (
    EngineClosedError,
    EngineOptions,
    EngineStatistics,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    PromptRead,
)


@dataclass(slots=True)
class Answer:
    """What became of a request; ``token_ids`` include the one that ended the answer."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    message: str | None = None
    cached_tokens: int = 0


def answer_all(
    model: Any,
    requests: Mapping[int, GenerationRequest],
    options: EngineOptions,
    *,
    on_token: Callable[[int, NewToken], bool],
    on_answer: Callable[[int, Answer], None],
    whole: Callable[[int], GenerationRequest] | None = None,
) -> EngineStatistics:
    """Answers requests in the order that is quickest for all together.

    An early end, Ctrl-C too, cancels unfinished requests; finished ones are reported first.

    Args:
        requests: by number; each fits into the memory that the model was loaded for.
        on_token: called with each new token, in the caller's thread; gives whether it ends its
            answer.
        on_answer: called once for each request, in the caller's thread.
        whole: gives a request as the engine gets it, with what only those under way have in memory.
    """
    # all that may be open are the engine's at once
    most_open = max(options.most_waiting, options.most_running)
    options = dataclasses.replace(options, most_waiting=most_open)
    with contextlib.ExitStack() as stack:
        flow = _Flow(requests, options, on_token, on_answer, whole or requests.__getitem__)
        # after the engine's end: its last events
        stack.callback(flow.take_the_rest)
        engine = stack.enter_context(Engine(model, options))
        flow.run(engine)
        return engine.statistics()


def order_of_work(requests: Mapping[int, GenerationRequest]) -> list[int]:
    """Longest requests first, so that none runs alone in the end; prompts that begin alike
    together, so that a prefix is used again before it is evicted."""
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, request in requests.items():
        beginning = request.prompt_ids[:LEAST_SHARED]
        # a shorter one is worth no waiting
        groups[beginning if len(beginning) == LEAST_SHARED else (-1, number)].append(number)
    for group in groups.values():
        group.sort(key=lambda number: (requests[number].prompt_ids, number))
    order = sorted(groups.values(), key=lambda group: -max(tokens_of(requests[n]) for n in group))
    return list(itertools.chain.from_iterable(order))


def tokens_of(request: GenerationRequest) -> int:
    return len(request.prompt_ids) + request.max_new_tokens


@dataclass(slots=True)
class _Open:
    """A request that has not ended.

    The engine's thread appends events. The caller's takes them one by one; Ctrl-C may come between
    any two instructions, so ``is_taking`` marks one that may be in the answer by half.
    """

    answer: Answer = field(default_factory=Answer)
    events: list[Event] = field(default_factory=list)
    num_taken: int = 0
    is_taking: bool = False
    handle: EngineHandle | None = None


class _Flow:
    def __init__(
        self,
        requests: Mapping[int, GenerationRequest],
        options: EngineOptions,
        on_token: Callable[[int, NewToken], bool],
        on_answer: Callable[[int, Answer], None],
        whole: Callable[[int], GenerationRequest],
    ) -> None:
        self._requests, self._whole = requests, whole
        self._most_open = options.most_waiting
        self._on_token, self._on_answer = on_token, on_answer
        self._ready = deque(order_of_work(requests))
        self._news: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._open: dict[int, _Open] = {}
        self._open_tokens = 0

    def run(self, engine: Engine) -> None:
        capacity = engine.statistics().kv_capacity
        while self._ready or self._open:
            while self._ready and self._fits(self._ready[0], capacity):
                self._submit(engine, self._ready.popleft())
            self._take(self._news.get())

    def take_the_rest(self) -> None:
        """Reports answers that ended before the engine did, but for one that an interrupt left by
        half."""
        for number, request in list(self._open.items()):
            if request.is_taking or not request.events:
                continue
            last = request.events[-1]
            if isinstance(last, Finished) and last.reason != "cancelled":
                self._take(number)

    def _fits(self, number: int, capacity: int) -> bool:
        """Whether it can go on to its end without taking room from others."""
        needed = rounded_up(tokens_of(self._requests[number]))
        is_room = len(self._open) < self._most_open and self._open_tokens + needed <= capacity
        return is_room or not self._open

    def _submit(self, engine: Engine, number: int) -> None:
        request = self._whole(number)
        self._open[number] = opened = _Open()
        self._open_tokens += rounded_up(tokens_of(request))

        def hear(event: Event) -> None:
            opened.events.append(event)
            self._news.put(number)

        opened.handle = engine.submit(request, hear)

    def _take(self, number: int) -> None:
        """Takes all events of a request; none if its answer was over before the engine knew."""
        while (request := self._open.get(number)) and request.num_taken < len(request.events):
            request.is_taking = True
            self._take_event(number, request, request.events[request.num_taken])
            request.num_taken += 1
            request.is_taking = False

    def _take_event(self, number: int, request: _Open, event: Event) -> None:
        answer = request.answer
        if isinstance(event, PromptRead):
            answer.cached_tokens = event.cached_tokens
        elif isinstance(event, NewToken):
            answer.token_ids.append(event.token_id)
            if self._on_token(number, event):
                assert request.handle is not None
                request.handle.cancel()
                answer.reason = "stop"
        elif isinstance(event, Finished):
            if event.reason == "cancelled":
                raise EngineClosedError(event.message or "the engine was closed")
            answer.reason = event.reason
            answer.message = event.problem if event.reason == "error" else None
        if answer.reason is not None:
            del self._open[number]
            request.handle = None  # which leads here again
            self._open_tokens -= rounded_up(tokens_of(self._requests[number]))
            self._on_answer(number, answer)
