"""Answers many requests that are not urgent with the most tokens per second.

An `AnswerFile` has a line of JSON for each answer. A later run continues it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import queue
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from moe_runtime.errors import CheckpointError, named_file
from moe_runtime.files import is_at, place_of, write_atomically
from moe_runtime.inference.routing_replay import encode_routing
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

BEGINNING = '{"id": "batch_req_'


class AnswerFile(contextlib.AbstractContextManager["AnswerFile"]):
    """A file with a line of JSON for each answer, by request id, in the order in which they come
    until `finish` sorts them.

    A context manager that leaves whole lines, however it ends.

    Raises:
        CheckpointError: the file holds something else, or answers to other requests.
        BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path, asked: Mapping[str, int]) -> None:
        self._path = path
        self._asked = asked
        self._end = 0
        self._places: dict[int, tuple[int, int]] = {}  # of each answer: first byte and end
        self._failed: set[int] = set()
        self._place = place_of(path)
        self._is_new = not self._place.exists()
        with named_file(path), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(_open(self._place))
            self._read()
            self._cut()  # a line that a kill cut short
            stack.pop_all()

    @property
    def answered(self) -> frozenset[int]:
        return frozenset(self._places.keys() - self._failed)

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes a line, whole or not at all. A later run asks again if it has an ``error``."""
        line = f"{json.dumps(record, ensure_ascii=False, allow_nan=False)}\n".encode()
        assert line.startswith(BEGINNING.encode())
        with named_file(self._path):
            done = 0
            try:
                while done < len(line):
                    done += os.pwrite(self._file.fileno(), line[done:], self._end + done)
            except OSError:
                self._cut()  # or a shorter line would leave an end of this one behind itself
                raise
        self._note(record, len(line))

    def finish(self) -> None:
        """Sorts the answers by request, one for each, and replaces the file atomically."""
        places = [self._places[number] for number in sorted(self._places)]
        in_order = [start for start, _ in places] == [0, *(end for _, end in places)][:-1]
        if in_order and self._end == (places[-1][1] if places else 0):
            return
        with write_atomically(self._path) as file:
            for start, end in places:
                file.write(os.pread(self._file.fileno(), end - start, start))

    def __exit__(self, *_: object) -> None:
        try:
            self._cut()
            if self._is_new and not self._end:
                self._place.unlink(missing_ok=True)
        finally:
            self._file.close()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._end)

    def _note(self, record: Mapping[str, Any], num_bytes: int) -> None:
        number = self._asked[record["id"]]
        self._places[number] = (self._end, self._end + num_bytes)
        self._end += num_bytes
        self._failed.discard(number)
        if record.get("error") is not None:
            self._failed.add(number)

    def _read(self) -> None:
        for number, line in enumerate(self._file, start=1):
            is_whole = line.endswith(b"\n")
            if not is_whole and line[: len(BEGINNING)] == BEGINNING.encode()[: len(line)]:
                break  # the process that wrote it was killed
            record = None
            if is_ours := line.startswith(BEGINNING.encode()):
                with contextlib.suppress(ValueError, RecursionError):
                    record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("id"), str):
                problem = (
                    "answers something else than these prompts with this model and these options; "
                    "give another --output"
                )
                if record["id"] in self._asked:
                    self._note(record, len(line))
                    continue
            elif is_ours:
                problem = (
                    "is an answer that was cut short; remove this line, and the same command "
                    "answers its request again"
                )
            else:
                problem = (
                    "is not an answer of this command, so no file changes; give another --output"
                )
            raise CheckpointError(f"{self._path}, line {number}: {problem}")


def _open(place: Path) -> IO[bytes]:
    """The file, locked against other processes."""
    with contextlib.ExitStack() as stack:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = stack.enter_context(os.fdopen(os.open(place, flags, 0o666), "r+b"))
        is_held = False
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # other errors: filesystems without locks
            is_held = isinstance(error, BlockingIOError)
        if is_held or not is_at(place, file.fileno()):
            raise BlockingIOError(errno.EAGAIN, "another process is writing it", str(place))
        stack.pop_all()
    return file


News = queue.SimpleQueue[int | Mapping[int, GenerationRequest] | None]
"""Input of a batch: numbers of requests with new events, more requests, and None as their end."""


@dataclass(slots=True)
class Answer:
    """An answer to a request; ``token_ids`` include the one that ended it."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    message: str | None = None
    cached_tokens: int = 0
    routing: list[np.ndarray] = field(default_factory=list)

    def routed(self) -> dict[str, str]:
        """The experts of all tokens but the last, where they were asked for."""
        if not self.routing:
            return {}
        return {"routed_experts": encode_routing(np.concatenate(self.routing))}


def answer_all(
    model: Any,
    requests: Mapping[int, GenerationRequest],
    options: EngineOptions,
    *,
    on_token: Callable[[int, NewToken], bool],
    on_answer: Callable[[int, Answer], None],
    whole: Callable[[int], GenerationRequest] | None = None,
    news: News | None = None,
) -> EngineStatistics:
    """Answers requests in the order that is quickest for all together.

    An error or Ctrl-C cancels unfinished requests; answers that had ended are reported.

    Args:
        requests: by number; each fits into the memory that the model was loaded for.
        on_token: called with each new token, in the caller's thread; returns whether it ends the
            answer.
        on_answer: called once for each request, in the caller's thread.
        whole: makes the request that the engine gets, such as one with its pictures' tensors.
        news: other threads put further requests there while this runs, and None at the end.

    Raises:
        RankFailureError: another process of a divided model died or stalled; unfinished requests
            are not reported.
    """
    options = batch_options(options)
    with contextlib.ExitStack() as after, Engine(model, options) as engine:
        flow = _Flow(engine, requests, options, on_token, on_answer, whole, news)
        after.callback(flow.take_the_rest)  # when the engine has sent its last events
        flow.run()
        return engine.statistics()


def batch_options(options: EngineOptions) -> EngineOptions:
    """Options of an engine whose queue takes all requests that are open at a time."""
    most_open = max(options.most_waiting, options.most_running)
    return dataclasses.replace(options, most_waiting=most_open)


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
    """A request of the engine; its thread adds the events."""

    answer: Answer = field(default_factory=Answer)
    events: deque[Event] = field(default_factory=deque)
    handle: EngineHandle | None = None


class _Flow:
    """Submits requests as they have room, and takes their events."""

    def __init__(
        self,
        engine: Engine,
        requests: Mapping[int, GenerationRequest],
        options: EngineOptions,
        on_token: Callable[[int, NewToken], bool],
        on_answer: Callable[[int, Answer], None],
        whole: Callable[[int], GenerationRequest] | None,
        news: News | None,
    ) -> None:
        self._engine, self._most_open = engine, options.most_waiting
        self._requests = dict(requests)
        self._whole = whole or self._requests.__getitem__
        self._on_token, self._on_answer = on_token, on_answer
        self._ready = deque(order_of_work(requests))
        self._news: News = queue.SimpleQueue() if news is None else news
        self._is_fed = news is not None
        self._open: dict[int, _Open] = {}
        self._taken: int | None = None
        self._open_tokens = 0

    def run(self) -> None:
        capacity = self._engine.statistics().kv_capacity
        while self._ready or self._open or self._is_fed:
            while self._ready and self._fits(self._ready[0], capacity):
                self._submit(self._ready.popleft())
            news = self._news.get()
            if isinstance(news, int):
                self._take(news)
            else:
                self._is_fed = news is not None
                self._requests.update(news or {})
                self._ready.extend(order_of_work(news or {}))

    def _fits(self, number: int, capacity: int) -> bool:
        """Whether a request can run to its end without taking room from others."""
        needed = rounded_up(tokens_of(self._requests[number]))
        is_room = len(self._open) < self._most_open and self._open_tokens + needed <= capacity
        return is_room or not self._open

    def take_the_rest(self) -> None:
        """Reports answers that ended before an error or Ctrl-C, except one that it left by half."""
        for number, request in [*self._open.items()]:
            last = request.events[-1] if request.events else None
            if isinstance(last, Finished) and not self._is_cut_off(last) and number != self._taken:
                self._take(number)

    def _is_cut_off(self, last: Finished) -> bool:
        """Whether the end of the engine ended the answer."""
        has_failed = self._engine.failure is not None
        return last.reason == "cancelled" or (has_failed and last.reason == "error")

    def _submit(self, number: int) -> None:
        request = self._whole(number)
        self._open[number] = opened = _Open()
        self._open_tokens += rounded_up(tokens_of(request))

        def add(event: Event) -> None:
            opened.events.append(event)
            self._news.put(number)

        opened.handle = self._engine.submit(request, add)

    def _take(self, number: int) -> None:
        # an event leaves the queue when it is taken: an interrupt between them loses none
        while (request := self._open.get(number)) and request.events:
            self._taken = number
            self._take_event(number, request, request.events[0])
            request.events.popleft()
            self._taken = None

    def _take_event(self, number: int, request: _Open, event: Event) -> None:
        answer = request.answer
        if isinstance(event, PromptRead | NewToken) and event.routing is not None:
            answer.routing.append(event.routing)
        if isinstance(event, PromptRead):
            answer.cached_tokens = event.cached_tokens
        elif isinstance(event, NewToken):
            answer.token_ids.append(event.token_id)
            if self._on_token(number, event):
                assert request.handle is not None
                request.handle.cancel()
                answer.reason = "stop"
        elif isinstance(event, Finished):
            if self._is_cut_off(event):
                closed = EngineClosedError(event.message or "the engine was closed")
                raise self._engine.failure or closed
            answer.reason = event.reason
            answer.message = event.problem if event.reason == "error" else None
        if answer.reason is not None:
            del self._open[number]
            self._open_tokens -= rounded_up(tokens_of(self._requests[number]))
            self._on_answer(number, answer)
