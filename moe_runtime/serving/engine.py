"""The engine: one thread that owns a model and answers many requests with it at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import torch

from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.budget import activation_bytes_per_token, known_positions
from moe_runtime.inference.drafts import Offer
from moe_runtime.inference.routing_replay import RoutingOfPass
from moe_runtime.inference.sequence_cache import bring_back, own_states, set_room, take_out
from moe_runtime.serving.decode_rows import InRow, RowDecoding
from moe_runtime.serving.kv_account import PIECE
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.plans import BEAT_S, Plans, checksum
from moe_runtime.serving.prefixes import Filled, PrefixDisk, Prefixes, account_for
from moe_runtime.serving.requests import (
    EngineClosedError,
    EngineOptions,
    EngineStatistics,
    Finished,
    FinishReason,
    GenerationRequest,
    NewToken,
    OnEvent,
    QueueFullError,
    RequestTooLongError,
)
from moe_runtime.serving.sampling import Sampler
from moe_runtime.serving.scheduling import (
    Arrival,
    Failure,
    Scheduler,
    Sequence,
    StepSizes,
    beside_prompts,
    groups_of,
)


class Turns:
    """Lets one engine at a time compute, first come first served, so that models share cores
    fairly."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = self._num_ended = 0

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._changed:
            number = self._num_asked
            self._num_asked += 1
            self._changed.wait_for(lambda: self._num_ended == number)
        try:
            yield
        finally:
            with self._changed:
                self._num_ended += 1
                self._changed.notify_all()

    @property
    def is_wanted(self) -> bool:
        """Whether an engine waits while another has its turn."""
        return self._num_asked - self._num_ended > 1


class Engine:
    """Answers requests with a model; a context manager that closes itself.

    A step computes one more token for each sequence whose prompt was read, and some tokens of
    prompts, in one forward pass where the model allows it. The model stays the caller's. Where its
    experts are divided among processes, this is the first one's; see `serving.following`.

    Attributes:
        most_request_tokens: tokens that a request may have, prompt and answer together.
        failure: what ended the steps of several processes.
    """

    _is_leading = True

    def __init__(
        self,
        model: Any,
        options: EngineOptions | None = None,
        *,
        max_tokens: int | None = None,
        turns: Turns | None = None,
        adapters: Adapters | None = None,
        prefix_disk: PrefixDisk | None = None,
    ) -> None:
        """Starts the engine's thread.

        Args:
            model: a causal language model, from ``load`` or of transformers.
            options: how work is divided.
            max_tokens: tokens of all sequences and kept prefixes together; when omitted, as many as
                ``load`` reserved memory for.
            turns: shared by the engines of several models, which then compute one at a time.
            adapters: that requests may name.
            prefix_disk: where prefixes of requests without an adapter are kept too.

        Raises:
            UnsupportedModelError: the model is none that generates text from tokens alone, or keeps
                no prefixes for ``prefix_disk``.
            ValueError: ``max_tokens`` is more than memory is reserved for, or too few;
                ``prefix_disk`` has no room, or its folder cannot be made; the model is divided
                among processes and this is not the first one, or one is given what they lack.
            RankFailureError: the processes would not take the same steps.
        """
        self._plans = Plans.of(model)
        if self._plans is not None:
            if prefix_disk is not None or turns is not None:
                raise ValueError("a prefix disk and further models are for one process")
            if self._is_leading != (self._plans.rank == 0):
                raise ValueError("requests go to the first process; the others follow it")
        pieces = getattr(model, "_pieces", None)  # of a model from ``load``
        self._options = _within_pass(options or EngineOptions(), pieces)
        self._turns = turns or Turns()
        capacity = capacity_of(model, max_tokens)
        self._model = model
        self._adapters = adapters or Adapters(model, {})
        exact = self._options.most_running if self._options.exact else 1
        self._passes = ModelPasses(model, self._adapters, exact=exact)
        with contextlib.ExitStack() as undo:
            undo.callback(self._passes.close)
            block = 0
            if self._options.reuses_prefixes and self._passes.keeps_prefixes:
                block = self._options.prompt_tokens if self._options.exact else PIECE
            self._account = account_for(self._passes, capacity, block_tokens=block)
            self._prefixes = Prefixes(
                self._account, self._passes, exact=self._options.exact, disk=prefix_disk
            )
            passed = capacity if pieces is None else min(capacity, pieces.most_tokens)
            self._most_logprobs = rows_of_logits(
                model.config, model.dtype, passed, model.moe.facts.signature.top_k
            )
            self._sizes = StepSizes(self._options.prompt_tokens, self._options.max_slowdown)
            self._scheduler = Scheduler(
                self._account,
                most_running=self._options.most_running,
                adapters=self._adapters,
                leave=self._prefixes.leave,
            )
            self._threads = ThreadPoolExecutor(1, "moe-runtime prefixes")
            undo.callback(self._threads.shutdown)
            self._rows = RowDecoding(self._passes, self._scheduler, self._options)
            self._drafts: Any = getattr(model, "_drafts", None)  # of a model from ``load``
            known = known_positions(model.config)
            own = self._rows.most_request_tokens
            self.most_request_tokens = own if known is None else min(own, known)
            if self._plans is not None:
                room = self._account.capacity, self._account.block_tokens, self._most_logprobs
                facts = room, self._passes.abilities
                self._plans.require_same({"the engine's steps": f"{self._options} {facts}"})
            undo.pop_all()
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._awaited: list[Arrival[Filled]] = []
        self._num_requests = self._beside_tokens = 0
        self._known = self._state()
        self._is_open, self._is_closed = self._is_leading, False
        self.failure: Exception | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._thread = threading.Thread(target=self._run, name="moe-runtime engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> EngineHandle:
        """Takes a request; from any thread.

        Args:
            on_event: called from the engine's thread with each event, `Finished` last, whatever
                happens. It must return soon and not raise: it holds up all requests.

        Raises:
            QueueFullError: as many requests wait as may.
            RequestTooLongError: it needs more tokens than ``most_request_tokens``.
            EngineClosedError: the engine drains or is closed.
            ValueError: a token is none of the model's vocabulary.
        """
        check_request(
            request,
            most_tokens=self.most_request_tokens,
            most_room=self._rows.most_request_tokens,
            vocab_size=self._passes.vocab_size,
        )
        if self._plans is not None:
            self._plans.check(request)
        with self._changed:
            if not self._is_open:
                raise EngineClosedError("the server is shutting down and takes no more requests")
            places = self._options.most_running - len(self._scheduler.running)
            if self._num_waiting() >= self._options.most_waiting + max(places, 0):
                raise QueueFullError(
                    f"{self._options.most_waiting} requests wait already, as many as may; try "
                    "again later"
                )
            self._num_requests += 1
            sequence = self._sequence_of(request, on_event, self._num_requests)
            self._arrived.append(sequence)
            self._changed.notify_all()
        return EngineHandle(self, sequence)

    def _sequence_of(self, request: GenerationRequest, on_event: OnEvent, number: int) -> Sequence:
        root = f"{self._adapters.number(request.adapter)} {request.prefix_owner}"
        # several rows of an adapter's products have other bits than one
        is_apart = self._adapters.goes_alone(request.adapter) or (
            self._options.exact and request.adapter is not None
        )
        is_apart |= any(one.picture.kinds_by_id for one in request.pictures)
        return Sequence(request, on_event, number, root, is_apart=is_apart)

    def add_adapter(self, name: str, folder: AdapterFolder) -> None:
        """Takes an adapter that requests may name from now on; from any thread.

        Raises:
            UnsupportedModelError, CheckpointError: it is not for this model.
            ValueError: it needs more memory than adapters have.
        """
        self._adapters.add(name, folder)

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return self._is_open

    def statistics(self) -> EngineStatistics:
        """Of experts, what all processes did: sums, and the longest of the times."""
        account, counts = self._account, self._counts
        if self._plans is not None:
            with self._changed:  # the others report when the last step is over
                self._changed.wait_for(self._is_settled, 2 * BEAT_S)
        experts = self._model.moe.stats()
        if self._plans is not None:
            experts = self._plans.of_all(experts)
        return EngineStatistics(
            running=len(self._scheduler.running),
            waiting=self._num_waiting(),
            kv_tokens=account.sequence_tokens + account.prefix_tokens - self._rows.idle_tokens,
            kv_capacity=account.capacity,
            prefix_tokens=account.prefix_tokens,
            steps=counts["steps"],
            preemptions=self._scheduler.num_preemptions,
            adapter_reads=self._adapters.num_reads,
            adapter_bytes=self._adapters.max_bytes,
            prompt_tokens=counts["prompt_tokens"],
            prefix_hit_tokens=counts["prefix_hit_tokens"],
            prefix_disk_hit_tokens=self._prefixes.num_disk_tokens,
            prefix_disk_failures=self._prefixes.num_disk_failures,
            generated_tokens=counts["generated_tokens"],
            finished=dict(self._finished),
            **({} if self._drafts is None else self._drafts.control.counts()),
            experts=experts,
        )

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and waits for those that were taken; gives whether all ended within
        the time."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._has_work(), timeout_s)

    def close(self) -> None:
        """Cancels what has not ended, and ends the thread; the model stays open."""
        with self._changed:
            self._is_open, self._is_closed = False, True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._threads.shutdown()
        self._passes.close()

    def check(self) -> None:
        """Asserts that lists and room agree; only while nothing runs."""
        self._rows.check()
        self._scheduler.check(self._rows.room)
        self._adapters.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _num_waiting(self) -> int:
        return len(self._arrived) + len(self._scheduler.waiting)

    def _has_work(self) -> bool:
        return bool(self._arrived or self._scheduler.waiting or self._scheduler.running)

    def _is_settled(self) -> bool:
        is_resting = self._plans is None or self._plans.is_resting
        return is_resting or self._has_work() or self._is_closed or self.failure is not None

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._work()
        except MoERuntimeError as error:
            if self._plans is None:
                raise
            self.failure = error.with_traceback(None)
        except Exception as error:
            self.failure = None if self._plans is None else error
            raise
        finally:
            self._end_all()

    def _work(self) -> None:
        while self._wait():
            with self._turns.turn():
                self._step()
        if self._plans is not None:
            self._plans.send("end", self._known)

    def _wait(self) -> bool:
        while not self._is_called():
            assert self._plans is not None
            self._plans.send("rest", self._known)
        with self._changed:
            awaited, self._awaited = self._awaited, []
            self._changed.wait_for(lambda: self._is_closed or self._has_news(awaited))
            while self._arrived:
                self._add(self._arrived.popleft())
            return not self._is_closed

    def _is_called(self) -> bool:
        """Waits for work, or the end; with other processes only until they must hear of this."""
        limit_s = None
        if self._plans is not None:
            limit_s = BEAT_S if self._plans.is_resting else 0
        with self._changed:
            if not self._has_work():
                self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_closed or self._has_work(), limit_s)

    def _has_news(self, awaited: list[Arrival[Filled]]) -> bool:
        """Whether a step can do more than the last one, which only waited."""
        known = (*self._scheduler.running, *self._scheduler.waiting)
        is_cancelled = any(sequence.is_cancelled for sequence in known)
        return not awaited or bool(self._arrived) or is_cancelled or any(a.is_done for a in awaited)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _end_all(self) -> None:
        with self._changed:
            reason: FinishReason = "cancelled" if self._is_closed else "error"
            self._is_open, self._is_closed = False, True
            while self._arrived:
                self._scheduler.add(self._arrived.popleft())
        message = "the engine was closed"
        if self.failure is not None:
            message = f"the model's processes stopped: {self.failure}"
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            self._finish(sequence, Finished(reason, message))
        self._rows.close()
        with self._changed:
            self._changed.notify_all()

    def _add(self, sequence: Sequence) -> None:
        self._scheduler.add(sequence)
        if self._plans is not None:
            self._plans.take(sequence.number, sequence.request)

    def _state(self) -> int:
        """A checksum by which processes see that they know the same."""
        account, scheduler = self._account, self._scheduler
        known = [(one.number, one.num_computed, len(one.tokens)) for one in scheduler.running]
        waiting = (one.number for one in scheduler.waiting)
        room = account.sequence_tokens, account.prefix_tokens
        return checksum(*itertools.chain(*known), *waiting, *room)

    def _step(self) -> None:
        known = (*self._scheduler.running, *self._scheduler.waiting)
        cancelled = [sequence for sequence in known if sequence.is_cancelled]
        self._beside_tokens = self._sizes.most_tokens()
        if self._plans is not None:
            numbers = [sequence.number for sequence in cancelled]
            self._plans.send("step", self._known, numbers, self._beside_tokens)
        self._compute(cancelled)
        if self._plans is not None:
            self._known = self._state()

    def _compute(self, cancelled: Iterable[Sequence]) -> None:
        """A step, after the end of sequences that were cancelled."""
        for sequence in cancelled:
            self._finish(sequence, Finished("cancelled"))
        look_up, is_held = self._prefixes.look_up, self._prefixes.are_coming
        while (sequence := self._scheduler.next_to_start(look_up, is_held)) is not None:
            with self._catching() as failure:
                self._start(sequence)
            if failure.has_failed:
                self._finish(sequence, failure.finished)
        for sequence in [*self._scheduler.running]:
            if sequence.arrival is None or not sequence.arrival.is_done:
                continue
            with self._catching() as failure:
                self._begin(sequence, sequence.arrival.result())
            if failure.has_failed:
                self._finish(sequence, failure.finished)
        in_rows, decoding = self._rows.divide()
        num_decoding = len(decoding) + sum(map(len, in_rows))
        divides = self._options.exact or not self._passes.reads_together
        chosen = self._scheduler.prompts(*self._prompt_sizes(bool(num_decoding)), exact=divides)
        with Failure():  # later requests compute it again
            chosen = self._prefixes.cut(chosen)
        num_prompt = sum(num_new for _, num_new in chosen)
        arriving = (sequence.arrival for sequence in self._scheduler.running)
        if not num_decoding and not num_prompt and (awaited := [*filter(None, arriving)]):
            self._awaited = awaited
            return
        with self._sizes.timed(num_prompt=num_prompt, num_decoding=num_decoding):
            beside = [] if divides else beside_prompts(decoding, chosen)
            rest = [sequence for sequence in decoding if sequence not in beside]
            most = self._passes.most_together(exact=self._options.exact)
            for group in in_rows:
                self._pass(_one_each(group), lambda group=group: self._rows.decode(group))
            for group in groups_of(rest, most):
                self._decode(group)
            if chosen:
                together = [*chosen, *_one_each(beside)]
                self._pass(together, lambda: self._passes.read(together))

    def _decode(self, group: list[Sequence]) -> None:
        """One token more of each, and those drafted tokens that are right."""
        drafts = self._drafts
        if drafts is None or drafts.has_ended or any(one.drafter is None for one in group):
            self._pass(_one_each(group), lambda: self._passes.decode(group))
            return
        with drafts.turn:  # other threads may call the model too
            self._decode_drafted(group)

    def _decode_drafted(self, group: list[Sequence]) -> None:
        drafts = self._drafts
        offers = [self._offer(sequence) for sequence in group]

        def has_room(index: int, count: int) -> bool:
            return self._account.reserve(group[index], group[index].num_computed + 1 + count)

        drafters = [sequence.drafter for sequence in group]
        drafted, drafting_s = drafts.propose(drafters, offers, has_room)
        num_base, num_rows = len(group), len(group) + sum(map(len, drafted))
        if num_rows == num_base:
            with drafts.timed(num_base, num_rows):
                self._pass(_one_each(group), lambda: self._passes.decode(group))
            return
        logits_RV = None
        with Failure() as failure:
            for sequence in group:
                self._fit(sequence)
            with drafts.timed(num_base, num_rows, drafting_s):
                logits_RV = self._shown(
                    [(one, 1 + len(own)) for one, own in zip(group, drafted, strict=True)],
                    lambda: self._passes.verify(group, drafted),
                )
        self._counts["steps"] += 1
        if logits_RV is None:
            self._fail(group, failure)
            return
        parts = logits_RV.split([1 + len(draft) for draft in drafted])
        for sequence, draft, offer, own_RV in zip(group, drafted, offers, parts, strict=True):
            num_right = self._advance_over(sequence, draft, own_RV)
            has_failed = not sequence.is_finished and num_right < len(draft)
            drafts.control.judged(offer.grade, num_right, has_failed=has_failed, num_base=num_base)

    def _shown(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Logits of a pass that drafters see, before that of another thread."""
        if self._drafts is None:
            return self._routed(chosen, compute)
        with self._drafts.turn:
            logits = self._routed(chosen, compute)
            drafters = [sequence.drafter for sequence, _ in chosen]
            firsts = [sequence.num_computed for sequence, _ in chosen]
            self._drafts.source.passed(drafters, firsts, [size for _, size in chosen])
            return logits

    def _routed(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Logits of a pass, the experts of whose tokens are told to those who asked for them."""
        if not any(sequence.request.returns_routing for sequence, _ in chosen):
            return compute()
        steps = self._model._steps
        seen = RoutingOfPass(self._model.moe.facts.signature.num_experts)
        with steps.turn, steps.listeners.also(seen):
            logits = compute()
        ids_TLK, first = seen.ids(), 0
        for sequence, num_new in chosen:
            if sequence.request.returns_routing:
                sequence.add_routing(ids_TLK[first : first + num_new])
            first += num_new
        return logits

    def _offer(self, sequence: Sequence) -> Offer:
        """What may be verified with a sequence's next token."""
        most = min(
            self._drafts.control.most_rows, sequence.request.max_new_tokens - len(sequence.answer)
        )
        assert sequence.drafter is not None
        return sequence.drafter.offer(max(most - 1, 0))

    def _advance_over(self, sequence: Sequence, draft: list[int], logits_RV: torch.Tensor) -> int:
        """Goes on by one token, and by drafted ones while the sampler chooses them too."""
        cache, num_right = sequence.cache, 0
        assert cache is not None
        take_out(cache, len(draft))
        self._advance(sequence, 1, logits_RV[0])
        for token in draft:
            if sequence.is_finished or sequence.tokens[-1] != token:
                break
            num_right += 1
            bring_back(cache)
            self._advance(sequence, 1, logits_RV[num_right])
        own_states(cache)
        return num_right

    def _prompt_sizes(self, is_beside: bool) -> tuple[int, int]:
        """Most tokens of prompts in a pass, and most whose log-probabilities are asked for."""
        if not self._passes.reads_in_pieces:
            return self._account.capacity, self._account.capacity
        options = self._options
        # an exact text must not depend on other sequences
        if options.exact or (self._turns.is_wanted and not is_beside):
            most = options.prompt_tokens
        else:
            most = self._beside_tokens if is_beside else options.idle_prompt_tokens
        return most, self._most_logprobs

    def _start(self, sequence: Sequence) -> None:
        if sequence.sampler is None:
            sequence.sampler = Sampler(sequence.request)
            self._counts["prompt_tokens"] += len(sequence.tokens)
            sequence.positions = self._passes.positions_of(sequence.request)
        is_plain = sequence.request.adapter is None and not sequence.request.pictures
        if self._drafts is not None and is_plain and sequence.drafter is None:
            drafter = sequence.drafter = self._drafts.source.new()
            drafter.extend(sequence.tokens)
        self._adapters.read(sequence.request.adapter)
        room = self._account.room_of(sequence)
        filled = self._prefixes.fill(sequence, self._passes.new_cache(), room)
        if not self._prefixes.may_be_on_disk(sequence, filled):
            self._begin(sequence, filled)
            return

        def read(is_dropped: Callable[[], bool]) -> Filled:
            with torch.inference_mode():
                return self._prefixes.read(sequence, filled, is_dropped)

        sequence.arrival = Arrival(self._threads, read)
        sequence.arrival.call_when_done(self._notify)

    def _begin(self, sequence: Sequence, filled: Filled) -> None:
        """A sequence goes on after what its cache was filled with."""
        self._prefixes.begin(sequence, filled)
        num_prompt, num_found = len(sequence.request.prompt_ids), filled.num_cached
        read_end = num_prompt if self._options.exact else len(sequence.tokens)
        if num_prompt <= num_found == len(sequence.tokens) - 1:
            read_end = num_found  # it decodes, as when it left
        sequence.start(filled.cache, num_found, read_end)
        sequence.room = filled.room if num_found else 0
        self._counts["prefix_hit_tokens"] += min(num_found, num_prompt)

    def _pass(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> None:
        logits_BV = None
        with self._catching() as failure:
            for sequence, _ in chosen:
                self._fit(sequence)
            logits_BV = self._shown(chosen, compute)
        self._counts["steps"] += 1
        if logits_BV is None:
            self._fail([sequence for sequence, _ in chosen], failure)
            return
        for row, (sequence, num_new) in enumerate(chosen):
            self._advance(sequence, num_new, logits_BV[row])

    def _catching(self) -> Failure:
        """What one process catches, several cannot: the others have computed something else."""
        return Failure(is_fatal=self._plans is not None)

    def _advance(self, sequence: Sequence, num_new: int, logits_V: torch.Tensor | None) -> None:
        was_reading = sequence.is_reading
        sequence.num_computed += num_new
        if was_reading and not sequence.is_reading:
            sequence.tell_read()
        if sequence.num_computed == len(sequence.tokens):
            self._go_on(sequence, logits_V)
        if sequence.is_finished:
            return
        with Failure():  # later requests compute it again
            if not was_reading:
                self._prefixes.keep_answer(sequence)
            elif sequence.cuts or not sequence.is_reading:
                self._prefixes.keep(sequence)

    def _fit(self, sequence: Sequence) -> None:
        room = self._account.room_of(sequence)
        if sequence.cache is not None and sequence.num_computed and room != sequence.room:
            set_room(sequence.cache, room)
            sequence.room = room

    def _go_on(self, sequence: Sequence, logits_V: torch.Tensor | None) -> None:
        sequence.is_alone = sequence.is_apart
        finished: Finished | None = Finished("length")
        if sequence.request.max_new_tokens:
            finished = self._add_token(sequence, logits_V)
        if finished is not None:
            self._finish(sequence, finished)

    def _add_token(self, sequence: Sequence, logits_V: torch.Tensor | None) -> Finished | None:
        """An answer is one token longer; gives how it ends, if it does."""
        assert sequence.sampler is not None
        assert logits_V is not None
        token: NewToken | None = None
        with Failure() as failure:
            token = sequence.sampler.choose(logits_V, sequence.answer)
        finished: Finished | None = failure.finished
        if token is not None:
            self._counts["generated_tokens"] += 1
            if sequence.drafter is not None:
                sequence.drafter.extend([token.token_id])
            reason = sequence.add(token)
            finished = None if reason is None else Finished(reason)
        if self._plans is not None:
            ending = None if finished is None else finished.reason
            self._plans.chose(0 if token is None else token.token_id, ending)
        return finished

    def _fail(self, sequences: list[Sequence], failure: Failure) -> None:
        """A pass failed: it was one sequence's, or each tries again alone."""
        self._sizes.ignore_step()
        for sequence in sequences:
            self._prefixes.forget_cuts(sequence)
            if len(sequences) == 1:
                self._finish(sequence, failure.finished)
            else:
                sequence.is_alone = True
                if not isinstance(sequence.cache, InRow):  # which is as it was
                    self._scheduler.preempt(sequence)

    def _finish(self, sequence: Sequence, finished: Finished) -> None:
        if finished.reason != "error" and not self._is_closed:
            with Failure():
                self._rows.take_out(sequence, is_view=True)
                self._prefixes.take_over(sequence, lambda: self._account.release(sequence))
        self._scheduler.remove(sequence)
        self._prefixes.forget(sequence)
        self._passes.requests.end(sequence.number)
        self._finished[finished.reason] += 1
        sequence.finish(finished)


def _one_each(sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
    return [(sequence, 1) for sequence in sequences]


def _within_pass(options: EngineOptions, pieces: Any) -> EngineOptions:
    """Options whose steps have as many tokens as memory for activations is set aside for."""
    if pieces is None:
        return options
    names = ("prompt_tokens", "idle_prompt_tokens")
    most = {name: min(getattr(options, name), pieces.most_tokens) for name in names}
    return dataclasses.replace(options, **most)


def capacity_of(model: Any, max_tokens: int | None) -> int:
    reserved = getattr(model, "_max_tokens", None)
    found = reserved if max_tokens is None else max_tokens
    if found is None:
        raise ValueError("max_tokens must say how many tokens there is memory for")
    if reserved is not None and found > reserved:
        raise ValueError(
            f"max_tokens is {found}, but the model was loaded with memory set aside for {reserved}"
        )
    if found < PIECE:
        raise ValueError(f"max_tokens must be at least {PIECE}, got {found}")
    return int(found)


def check_request(
    request: GenerationRequest, *, most_tokens: int, most_room: int, vocab_size: int
) -> None:
    num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
    # the engine also computes what follows a prompt: one token more, which is not shown
    if num_prompt + num_new > most_tokens or num_prompt >= most_room:
        raise RequestTooLongError(
            f"the prompt has {num_prompt} tokens and needs room for {max(num_new, 1)} more, "
            f"but the maximum context length is {most_tokens} tokens",
            num_tokens=num_prompt + num_new,
            most_tokens=most_tokens,
        )
    for token in (*request.prompt_ids, *request.sampling.logit_bias, *request.stop_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is none of the model's vocabulary of {vocab_size}")


def rows_of_logits(config: Any, dtype: torch.dtype, num_tokens: int, top_k: int) -> int:
    """Rows of fp32 logits that fit, with activations, into those of so many tokens; at least
    four."""
    activations = activation_bytes_per_token(config, dtype, top_k)
    logits = 4 * config.get_text_config().vocab_size
    return max(4, num_tokens * activations // (activations + logits))


class EngineHandle:
    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    def cancel(self) -> None:
        """Ends it between two steps; nothing happens if it has ended. From any thread."""
        with self._engine._changed:
            self._sequence.is_cancelled = True
            self._engine._changed.notify_all()
