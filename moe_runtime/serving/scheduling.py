"""Chooses the sequences that run and the tokens of each step. No model; clocks are passed in."""

from __future__ import annotations

import dataclasses
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Executor
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.inference.pictures import PlacedPicture, Positions, keys_of
from moe_runtime.serving.kv_account import PIECE, KVAccount, rounded_up
from moe_runtime.serving.requests import (
    ConstraintError,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    OnEvent,
    PromptRead,
    Started,
    TokenLogprob,
)

if TYPE_CHECKING:
    import torch
    from transformers.cache_utils import DynamicCache

    from moe_runtime.inference.adapters import Adapters
    from moe_runtime.inference.drafts import Drafter
    from moe_runtime.serving.sampling import Sampler


class Failure:
    """Catches exceptions of a block, so that only its requests fail; none with ``is_fatal``.

    The exception is dropped: its traceback would keep the caches of all sequences in a cycle.
    """

    def __init__(self, *, is_fatal: bool = False) -> None:
        self.has_failed = False
        self.finished = Finished("error")
        self._is_fatal = is_fatal

    def __enter__(self) -> Failure:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if self._is_fatal or not isinstance(error, Exception):
            return False
        self.has_failed = True
        cause = None if error.__cause__ is None else _line_of(error.__cause__)
        is_constrained = isinstance(error, ConstraintError)
        self.finished = Finished("error", _line_of(error), cause, is_constrained)
        return True


def _line_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Sequence:
    """One request while it is answered.

    Attributes:
        number: counts requests as they arrive.
        turn: counts the requests of its client; see `Scheduler`.
        num_computed: tokens whose keys and values are cached.
        num_found: tokens that its cache had from the start.
        read_end: tokens that are read as prompts are; later tokens are decoded one by one.
        room: tokens that the cache was given room for; 0 for the tokens in it.
        found: known blocks of its beginning, between getting room and getting a cache.
        found_state: the model's state after these blocks, if it has states.
        cut_ends: tokens after which to copy the state while they are read.
        cuts: copies that the running pass makes, by these tokens.
        state_end: tokens after which the last copy of the state was made.
        left: tokens on disk since it was preempted.
        arrival: reads its beginning from disk; None before and after.
        keys: identify its tokens among all sequences; a picture's tokens by its content.
        positions: of a model that counts pictures in another way; None for other models.
        root: its adapter and owner: only prefixes of the same root are found.
        is_apart: it always goes through the model alone.
        is_alone: it goes alone now; also after a shared pass failed.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: OnEvent,
        number: int,
        root: str = "",
        *,
        is_apart: bool = False,
        answer: Items[int] = (),
    ) -> None:
        """``answer``: its tokens that an earlier group of processes chose."""
        self.request = request
        self.root = root
        self.number = number
        self.turn = 0
        self.tokens = [*request.prompt_ids, *answer]
        placed = request.pictures
        self.keys = keys_of(self.tokens, placed) if placed else self.tokens
        self.positions: Positions | None = None
        self.answer = [*answer]
        self.num_computed = self.num_found = 0
        self.read_end = len(self.tokens)
        self.cache: DynamicCache | None = None
        self.room = 0
        self.found: list[torch.Tensor] = []
        self.found_state: torch.Tensor | None = None
        self.cut_ends: set[int] = set()
        self.cuts: dict[int, torch.Tensor] = {}
        self.state_end = self.left = 0
        self.arrival: Arrival | None = None
        self.sampler: Sampler | None = None
        self.drafter: Drafter | None = None
        self.is_alone = self.is_apart = is_apart
        self.is_cancelled = False
        self.is_finished = False
        self._on_event = on_event
        self._is_started = self._is_read = bool(answer)
        self._cached_tokens = 0
        self._logprobs: list[TokenLogprob | None] = [None]
        self._routing: np.ndarray | None = None
        self._num_routed = 0  # tokens whose experts were sent

    @property
    def order(self) -> tuple[int, int, int]:
        return -self.request.priority, self.turn, self.number

    @property
    def is_reading(self) -> bool:
        return self.num_computed < self.read_end

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities of the prompt that are not sent yet."""
        return self.request.num_prompt_logprobs is not None and not self._is_read

    @property
    def computes_all(self) -> bool:
        """Whether it may use no keys and values of other requests."""
        return self.wants_prompt_logprobs or self.request.returns_routing

    @property
    def pictures_left(self) -> list[PlacedPicture]:
        """Pictures that are not computed yet; their pass has this sequence only."""
        return [one for one in self.request.pictures if one.end > self.num_computed]

    def picture_around(self, end: int) -> PlacedPicture | None:
        """The picture with tokens on both sides of ``end``."""
        return next((one for one in self.request.pictures if one.first < end < one.end), None)

    def without_cut(self, num_new: int) -> int:
        """``num_new``, or fewer so that no picture is cut; more if a picture is longer."""
        picture = self.picture_around(self.num_computed + num_new)
        if picture is None:
            return num_new
        end = picture.first if picture.first > self.num_computed else picture.end
        return end - self.num_computed

    def start(self, cache: DynamicCache, num_found: int, read_end: int) -> None:
        self.arrival = None
        self.cache = cache
        self.num_computed = self.num_found = num_found
        self.read_end = read_end
        self._logprobs = [None]
        if not self._is_read:
            self._cached_tokens = num_found
        if not self._is_started:
            self._is_started = True
            self._tell(Started())

    def stop(self) -> None:
        if self.arrival is not None:
            self.arrival.drop()
        self.arrival = self.cache = self.drafter = None
        self.num_computed = self.room = self.state_end = 0
        self.cut_ends.clear()

    def add_logprobs(self, logprobs: Items[TokenLogprob]) -> None:
        self._logprobs.extend(logprobs)

    def add_routing(self, ids_TLK: np.ndarray) -> None:
        """Adds the experts of the tokens that a pass computed; some may be there already."""
        first = self.num_computed - self._num_routed
        if self._routing is not None and first > 0:
            ids_TLK = np.concatenate([self._routing[:first], ids_TLK])
        self._routing = ids_TLK[max(-first, 0) :]

    def _take_routing(self) -> np.ndarray | None:
        """The experts of computed tokens that were not sent yet."""
        if self._routing is None:
            return None
        num_new = max(self.num_computed - self._num_routed, 0)
        taken, self._routing = self._routing[:num_new], self._routing[num_new:]
        self._num_routed += num_new
        return taken

    def tell_read(self) -> None:
        if not self._is_read:
            wanted = self.request.num_prompt_logprobs is not None
            logprobs = tuple(self._logprobs) if wanted else None
            self._is_read = True
            self._logprobs = []
            self._tell(PromptRead(self._cached_tokens, logprobs, self._take_routing()))

    def add(self, token: NewToken) -> FinishReason | None:
        """Adds a token to the answer; returns the reason if the answer ends with it."""
        self.tokens.append(token.token_id)
        if self.keys is not self.tokens:
            self.keys.append(token.token_id)
        self.answer.append(token.token_id)
        if self._routing is not None:
            token = dataclasses.replace(token, routing=self._take_routing())
        self._tell(token)
        request = self.request
        if token.token_id in request.stop_ids:
            return "stop"
        if request.constraint is not None and request.constraint.is_exhausted:
            return "stop"
        return "length" if len(self.answer) >= request.max_new_tokens else None

    def finish(self, finished: Finished) -> None:
        if not self.is_finished:
            self.is_finished = True
            self.stop()
            self._tell(finished)
            self._on_event = ignore_event  # breaks the cycle between listener and sequence

    def _tell(self, event: Event) -> None:
        with Failure() as failure:  # a listener that fails has disconnected
            self._on_event(event)
        if failure.has_failed:
            self.is_cancelled = True


def ignore_event(event: Event) -> None: ...


class Arrival:
    """A read in a thread that fills a sequence's cache; ``read`` gets a function that says whether
    the result was dropped."""

    def __init__(self, threads: Executor, read: Callable[[Callable[[], bool]], Any]) -> None:
        self._is_dropped = False
        self.future = threads.submit(read, lambda: self._is_dropped)

    def drop(self) -> None:
        """Returns when the thread no longer uses the cache."""
        self._is_dropped = True
        if not self.future.cancel():
            self.future.exception()


_ORDER = attrgetter("order")


def groups_of(sequences: Iterable[Sequence], most_together: int) -> list[list[Sequence]]:
    """Sequences by the pass that they decode in; sequences of one adapter are neighbours."""
    ordered = sorted(sequences, key=attrgetter("root"))
    together = [sequence for sequence in ordered if not sequence.is_alone]
    firsts = range(0, len(together), most_together)
    groups = [together[first : first + most_together] for first in firsts]
    return [*groups, *([sequence] for sequence in ordered if sequence.is_alone)]


def decoding_with_prompts(
    decoding: Iterable[Sequence], chosen: Items[tuple[Sequence, int]]
) -> list[Sequence]:
    """Sequences that decode one token in the pass of the chosen prompts: experts are read once."""
    first = chosen[0][0] if chosen else None
    if first is None or first.is_alone or first.wants_prompt_logprobs or first.pictures_left:
        return []
    return [sequence for sequence in decoding if not sequence.is_alone]


class Scheduler:
    """Waiting and running sequences, each list in the order of priority, turn and arrival.

    Clients take turns within a priority: start-time fair queueing (Goyal, Vin and Cheng 1996) at a
    cost of one a request.

    A sequence starts when its whole prompt and its adapter have room. If running sequences need
    more room than there is, the last one is preempted. It comes back from disk, or is computed
    again. ``swap_out`` may keep what a preempted sequence has computed.
    """

    def __init__(
        self,
        account: KVAccount[Any],
        *,
        most_running: int,
        adapters: Adapters | None = None,
        swap_out: Callable[[Sequence], None] = lambda sequence: None,
    ) -> None:
        self.account = account
        self.swap_out = swap_out
        self._adapters = adapters
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._most_running = most_running

    def add(self, sequence: Sequence) -> None:
        sequence.turn = self._turn_of(sequence.request)
        self._wait(sequence)

    def next_to_start(
        self,
        look_up: Callable[[Sequence], None],
        is_held: Callable[[Sequence, Items[Sequence]], bool] = lambda waiting, running: False,
    ) -> Sequence | None:
        """Reserves room for the first waiting sequence, if it may run now.

        No sequence overtakes it. If ``is_held`` holds it back, later ones may start, but its place
        and room stay free. ``look_up`` is called before room is taken from prefixes.
        """
        num_held = held_tokens = 0
        for index, first in enumerate(self.waiting):
            if len(self.running) + num_held >= self._most_running:
                return None
            needed = len(first.tokens) + 1
            # running sequences grow too, and would take the room back at once
            spare = PIECE * len(self.running) + held_tokens
            if needed + spare > self.account.available:
                return None
            if is_held(first, self.running):
                num_held += 1
                held_tokens += rounded_up(needed)
                continue
            adapter = first.request.adapter
            if self._adapters is not None and not self._adapters.reserve(first, adapter):
                return None
            look_up(first)
            if not self.account.reserve(first, needed):
                first.found, first.found_state = [], None
                self._release(first)
                return None
            self.running.append(self.waiting.pop(index))
            self.running.sort(key=_ORDER)
            return first
        return None

    def make_room(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Reserves room for one more token each; returns the sequences that have it.

        Others are preempted, maybe also running sequences that are not named.
        """
        ready = []
        for sequence in sequences:
            while sequence.cache is not None:
                if self.account.reserve(sequence, sequence.num_computed + 1):
                    ready.append(sequence)
                    break
                # a sequence in a row of `RowDecoding` has no room to give
                has_room = (s for s in self.running if s is sequence or self.account.room_of(s))
                self.make_way([*has_room][-1])
        return [sequence for sequence in ready if sequence.cache is not None]

    def make_way(self, sequence: Sequence) -> None:
        """Preempts a sequence so that others get its room."""
        with Failure():  # it is computed again
            self.swap_out(sequence)
        self.preempt(sequence)
        self.num_preemptions += 1

    def preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        sequence.stop()
        self._wait(sequence)

    def _turn_of(self, request: GenerationRequest) -> int:
        running, waiting = (
            [other for other in some if other.request.priority == request.priority]
            for some in (self.running, self.waiting)
        )
        now = max((other.turn for other in running), default=None)
        if now is None:
            now = min((other.turn for other in waiting), default=0)
        own = (o.turn + 1 for o in (*running, *waiting) if o.request.client == request.client)
        return max(now, max(own, default=0))

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_ORDER)

    def remove(self, sequence: Sequence) -> None:
        for some in (self.running, self.waiting):
            if sequence in some:
                some.remove(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.account.release(sequence)
        if self._adapters is not None:
            self._adapters.release(sequence)

    def prompts(
        self, most_tokens: int, most_logprobs: int, *, exact: bool
    ) -> list[tuple[Sequence, int]]:
        """The prompts to read in one pass, and how many tokens of each.

        With ``exact`` one prompt alone, cut at places that do not depend on other sequences.
        """
        chosen: list[tuple[Sequence, int]] = []
        left = most_tokens
        for sequence in self.running:
            if not left or not sequence.is_reading or sequence.arrival is not None:
                continue
            num_new = sequence.read_end - sequence.num_computed
            is_apart = sequence.is_alone or sequence.wants_prompt_logprobs
            if exact or is_apart or sequence.pictures_left:
                if chosen:
                    continue
                piece = most_tokens
                if sequence.wants_prompt_logprobs:
                    piece = min(most_tokens, most_logprobs)
                num_new = min(num_new, piece - sequence.num_computed % piece)
                return [(sequence, sequence.without_cut(num_new))]
            chosen.append((sequence, min(num_new, left)))
            left -= chosen[-1][1]
        return chosen

    def decoding(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not sequence.is_reading]

    def check(self, room_of_rows: int = 0) -> None:
        """Asserts that lists and room agree."""
        self.account.check()
        for some in (self.waiting, self.running):
            assert some == sorted(some, key=_ORDER)
        for sequence in self.waiting:
            assert sequence.cache is None
            assert not self.account.room_of(sequence)
        held = room_of_rows
        for sequence in self.running:
            room = self.account.room_of(sequence)
            assert sequence.num_computed <= room or (room_of_rows and not room)
            assert sequence not in self.waiting
            held += room
        assert held == self.account.sequence_tokens


MIN_TOKENS = 16
"""Tokens of prompts that a step may always have."""
MAX_COST_RATIO = 3.0
"""A token may take this many times its time in the most efficient step."""
FREE_GROWTH = 1.25
"""If all steps take too long, a larger one may take this many times as long."""
_NEW_SHARE = 0.3
_STEPS_KEPT = 500
"""Steps after which larger sizes are measured again: a single slow time must not exclude them."""


class StepSizes:
    """Chooses the prompt tokens of a step so that decoding sequences do not wait long.

    Sizes are doubled from `MIN_TOKENS`. A step with prompts takes at most ``max_slowdown`` times as
    long as one without, as far as `MAX_COST_RATIO` allows: with experts on a disk, a step of few
    tokens reads nearly as much as one of many. A larger size is tried if it should be short enough:
    it takes at most twice as long, and each additional token costs no more than before. If every
    efficient step is too long, the step takes the tokens that cost little more time.
    """

    def __init__(
        self, most_tokens: int, max_slowdown: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        sizes = [MIN_TOKENS]
        while sizes[-1] < most_tokens:
            sizes.append(2 * sizes[-1])
        self._sizes = [min(size, most_tokens) for size in sizes]
        self._max_slowdown = max_slowdown
        self._clock = clock
        self._seconds: dict[int, float] = {}
        self._num_timed = 0
        self._decode_s: float | None = None
        self._least_token_s = math.inf
        self._is_ignored = False

    @contextmanager
    def timed(self, *, num_prompt: int, num_decoding: int) -> Iterator[None]:
        self._is_ignored = False
        begin = self._clock()
        yield
        seconds = self._clock() - begin
        if self._is_ignored:
            return
        if not num_prompt:
            if num_decoding:
                self._decode_s = _mean(self._decode_s, seconds)
            return
        token_s = seconds / num_prompt
        self._least_token_s = min(token_s, self._least_token_s)
        size = max((size for size in self._sizes if size <= num_prompt), default=None)
        if num_decoding and size is not None:
            self._seconds[size] = _mean(self._seconds.get(size), token_s * size)
            self._num_timed += 1
            if self._num_timed % _STEPS_KEPT == 0:
                most = self.most_tokens()
                self._seconds = {one: s for one, s in self._seconds.items() if one <= most}

    def ignore_step(self) -> None:
        self._is_ignored = True

    def most_tokens(self) -> int:
        """Prompt tokens of the next step in which sequences also decode."""
        size = self._sizes[0]
        for index, larger in enumerate(self._sizes[1:]):
            if size not in self._seconds:
                break
            seconds = self._seconds[size]
            expected = self._seconds.get(larger, self._expected(index))
            most_s = seconds * larger / size
            if expected is not None:
                most_s = min(expected, most_s)
            is_efficient = seconds / size <= MAX_COST_RATIO * self._least_token_s
            if not self._is_short(most_s) and is_efficient:
                break
            size = larger
        if size in self._seconds and not self._is_short(self._seconds[size]):
            return self._at_nearly_the_same_time(size)
        return size

    def _at_nearly_the_same_time(self, size: int) -> int:
        """The largest size whose steps take little longer, by measured or expected times."""
        most_s = FREE_GROWTH * self._seconds[size]
        index = self._sizes.index(size)
        while index + 1 < len(self._sizes):
            larger = self._seconds.get(self._sizes[index + 1], self._expected(index))
            if larger is None or larger > most_s:
                break
            index += 1
        return self._sizes[index]

    def _expected(self, index: int) -> float | None:
        """Seconds of a step of the next size, if each token costs as much as the last ones."""
        smaller, size, larger = self._sizes[max(index - 1, 0)], *self._sizes[index : index + 2]
        if smaller == size or not {smaller, size} <= self._seconds.keys():
            return None
        seconds = self._seconds[size]
        token_s = max(seconds - self._seconds[smaller], 0.0) / (size - smaller)
        return seconds + token_s * (larger - size)

    def _is_short(self, seconds: float) -> bool:
        if self._decode_s is None:
            return math.isinf(self._max_slowdown)
        return seconds <= self._max_slowdown * self._decode_s


def _mean(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _NEW_SHARE * (seconds - before)
