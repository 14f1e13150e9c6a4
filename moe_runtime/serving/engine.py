"""The engine: one thread that owns a model and answers many requests with it at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.errors import MoERuntimeError, RankFailureError
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.budget import activation_bytes_per_token, known_positions
from moe_runtime.inference.drafts import Offer
from moe_runtime.inference.pictures import Positions
from moe_runtime.inference.routing_replay import RoutingOfPass
from moe_runtime.inference.sequence_cache import bring_back, own_states, set_room, take_out
from moe_runtime.parallel.communication.elastic import ElasticError, ElasticGroup
from moe_runtime.serving.decode_rows import InRow, RowDecoding
from moe_runtime.serving.kv_account import PIECE
from moe_runtime.serving.passes import ModelPasses, add_logprobs
from moe_runtime.serving.plans import BEAT_S, Plans, checksum, partition_of
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
    decoding_with_prompts,
    groups_of,
)


class Turns:
    """Lets one engine compute at a time, first come first served: models share cores fairly."""

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


class Engine(contextlib.AbstractContextManager["Engine"]):
    """Answers requests with a model; a context manager that closes itself.

    A step computes one more token for each sequence whose prompt was read, and some tokens of
    prompts, in one forward pass where the model allows it. The model stays the caller's. If
    processes divide its experts, this engine is for the first one; see `serving.following`.

    Attributes:
        most_request_tokens: tokens that a request may have, prompt and answer together.
        failure: the error that ended the steps of several processes.
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
            max_tokens: room for all sequences and kept prefixes; if omitted, the tokens that
                ``load`` reserved memory for.
            turns: shared by the engines of several models, which then compute one at a time.
            adapters: LoRA adapters that requests may name.
            prefix_disk: also keeps prefixes of requests without an adapter on disk.

        Raises:
            UnsupportedModelError: the model does not generate text from tokens alone, or keeps no
                prefixes for ``prefix_disk``.
            ValueError: ``max_tokens`` exceeds the reserved memory or is too small; ``prefix_disk``
                has no room, or its folder cannot be made; processes divide the model, and this is
                not the first one or they do not support an argument.
            RankFailureError: the processes would not take the same steps.
        """
        self._plans = Plans.of(model)
        if self._plans is not None:
            if prefix_disk is not None or turns is not None:
                raise ValueError("a prefix disk and further models are for one process")
            if self._is_leading != (self._plans.rank == 0):
                raise ValueError("requests go to the first process; the others follow it")
        self._options = _within_pass(options or EngineOptions(), getattr(model, "_pieces", None))
        self._turns = turns or Turns()
        self._capacity, self._prefix_disk = capacity_of(model, max_tokens), prefix_disk
        self._model = model
        self._adapters = adapters or Adapters(model, {})
        self._threads = ThreadPoolExecutor(1, "moe-runtime prefixes")
        self._drafts: Any = getattr(model, "_drafts", None)  # of a model from ``load``
        self._partition = partition_of(model)
        self._group = None if self._partition is None else self._partition.group
        if self._is_leading and self._group is not None:
            self._meet(self._group)
        else:
            self._open()
        self._changed = threading.Condition()
        self._arrived: deque[Sequence] = deque()
        self._awaited: list[Arrival] = []
        self._num_requests = self._beside_tokens = 0
        self._is_open, self._is_closed = self._is_leading, False
        self.failure: Exception | None = None
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()
        self._thread = threading.Thread(target=self._run, name="moe-runtime engine", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        """Makes what the processes of a group have alike; a collective call."""
        model, capacity = self._model, self._capacity
        pieces = getattr(model, "_pieces", None)  # of a model from ``load``
        exact = self._options.most_running if self._options.exact else 1
        self._passes = ModelPasses(model, self._adapters, exact=exact)
        with contextlib.ExitStack() as undo:
            undo.callback(self._passes.close)
            block = 0
            if self._options.reuses_prefixes and self._passes.keeps_prefixes:
                block = self._options.prompt_tokens if self._options.exact else PIECE
            self._account = account_for(self._passes, capacity, block_tokens=block)
            self._prefixes = Prefixes(
                self._account, self._passes, exact=self._options.exact, disk=self._prefix_disk
            )
            passed = capacity if pieces is None else min(capacity, pieces.most_tokens)
            # rows of fp32 logits that fit, with their activations, into those of a pass
            top_k, config = model.moe.facts.signature.top_k, model.config
            activations = activation_bytes_per_token(config, model.dtype, top_k)
            logits = 4 * config.get_text_config().vocab_size
            self._most_logprobs = max(4, passed * activations // (activations + logits))
            self._sizes = StepSizes(self._options.prompt_tokens, self._options.max_slowdown)
            self._scheduler = Scheduler(
                self._account,
                most_running=self._options.most_running,
                adapters=self._adapters,
                swap_out=self._prefixes.swap_out,
            )
            self._rows = RowDecoding(self._passes, self._scheduler, self._options)
            known = known_positions(model.config)
            own = self._rows.most_request_tokens
            self.most_request_tokens = own if known is None else min(own, known)
            if self._plans is not None:
                room = self._account.capacity, self._account.block_tokens, self._most_logprobs
                facts = room, self._passes.abilities
                self._plans.require_same({"the engine's steps": f"{self._options} {facts}"})
            undo.pop_all()
        self._known = self._state()

    def _meet(self, group: ElasticGroup) -> Plans:
        """Forms the next group, again if a process is lost meanwhile."""
        while True:
            try:
                assert self._partition is not None
                self._partition.form()
                self._plans = plans = Plans(group, partition=self._partition)
                self._open()
                return plans
            except RankFailureError as error:
                group.say(str(error))

    def _meet_again(self, group: ElasticGroup) -> None:
        """Goes on in the next group, which computes all requests again from their tokens."""
        before, self._awaited = self._scheduler, []
        for sequence in [*before.running]:
            self._prefixes.forget_cuts(sequence)
            before.preempt(sequence)
        self._rows.close()
        self._passes.close()
        try:
            plans = self._meet(group)
        except BaseException:
            self._scheduler = before  # whose requests end with this error
            raise
        self._scheduler.num_preemptions = before.num_preemptions
        for sequence in before.waiting:
            sequence.is_alone = sequence.is_apart
            self._scheduler.add(sequence)
            plans.take(sequence.number, sequence.answer, sequence.request)

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> EngineHandle:
        """Takes a request; from any thread.

        Args:
            on_event: called from the engine's thread with each event; `Finished` always comes
                last. It must return soon and not raise: it holds up all requests.

        Raises:
            QueueFullError: the queue is full.
            RequestTooLongError: it needs more tokens than ``most_request_tokens``.
            EngineClosedError: the engine drains or is closed.
            ValueError: a token is not in the model's vocabulary.
        """
        self._check(request)
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

    def _check(self, request: GenerationRequest) -> None:
        num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
        most, vocab_size = self.most_request_tokens, self._passes.vocab_size
        # the engine computes one token more after a prompt, which is not shown
        if num_prompt + num_new > most or num_prompt >= self._rows.most_request_tokens:
            raise RequestTooLongError(
                f"the prompt has {num_prompt} tokens and needs room for {max(num_new, 1)} more, "
                f"but the maximum context length is {most} tokens",
                num_tokens=num_prompt + num_new,
                most_tokens=most,
            )
        for token in (*request.prompt_ids, *request.sampling.logit_bias, *request.stop_ids):
            if not 0 <= token < vocab_size:
                raise ValueError(f"token {token} is none of the model's vocabulary of {vocab_size}")

    def _sequence_of(
        self, request: GenerationRequest, on_event: OnEvent, number: int, answer: Items[int] = ()
    ) -> Sequence:
        root = f"{self._adapters.number(request.adapter)} {request.prefix_owner}"
        # several rows of an adapter's products have other bits than one
        is_apart = self._adapters.goes_alone(request.adapter) or (
            self._options.exact and request.adapter is not None
        )
        is_apart |= any(one.picture.kinds_by_id for one in request.pictures)
        return Sequence(request, on_event, number, root, is_apart=is_apart, answer=answer)

    def add_adapter(self, name: str, folder: AdapterFolder) -> None:
        """Adds an adapter that requests may name; from any thread.

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
        """Counts so far. Counts of experts are sums over all processes, times the longest."""
        account, counts, plans = self._account, self._counts, self._plans
        if plans is not None:
            with self._changed:  # the others report when the last step is over
                self._changed.wait_for(
                    lambda: (
                        plans.is_resting
                        or self._has_work()
                        or self._is_closed
                        or self.failure is not None
                    ),
                    2 * BEAT_S,
                )
        experts = self._model.moe.stats()
        if plans is not None:
            experts = plans.of_all(experts)
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
        """Refuses new requests and waits for the others; returns whether all ended in time."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._has_work(), timeout_s)

    def close(self) -> None:
        """Cancels unfinished requests and ends the thread; the model stays open."""
        with self._changed:
            self._is_open, self._is_closed = False, True
            self._changed.notify_all()
        if self._group is not None:
            self._group.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._threads.shutdown()
        self._passes.close()

    def check(self) -> None:
        """Asserts that lists and room agree; only while nothing runs."""
        self._rows.check()
        self._scheduler.check(self._rows.room)
        self._adapters.check()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _num_waiting(self) -> int:
        return len(self._arrived) + len(self._scheduler.waiting)

    def _has_work(self) -> bool:
        return bool(self._arrived or self._scheduler.waiting or self._scheduler.running)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._work()
        except MoERuntimeError as error:
            if self._plans is None:
                raise
            if not (self._is_closed and isinstance(error, ElasticError)):
                self.failure = error.with_traceback(None)
        except Exception as error:
            self.failure = None if self._plans is None else error
            raise
        finally:
            self._end_all()

    def _work(self) -> None:
        while True:
            try:
                while self._wait():
                    with self._turns.turn():
                        self._step()
                if self._plans is not None:
                    self._plans.send("end", self._known)
                return
            except RankFailureError as error:
                if self._group is None:
                    raise
                self._group.say(str(error))
            if self._is_closed:
                return
            self._meet_again(self._group)

    def _wait(self) -> bool:
        while not self._is_called():
            assert self._plans is not None
            self._plans.send("rest", self._known)
        with self._changed:
            awaited, self._awaited = self._awaited, []
            self._changed.wait_for(lambda: self._is_closed or self._has_news(awaited))
            while self._arrived:
                sequence = self._arrived.popleft()
                self._scheduler.add(sequence)
                if self._plans is not None:
                    self._plans.take(sequence.number, (), sequence.request)
            return not self._is_closed

    def _is_called(self) -> bool:
        """Waits for work or the end, at most until other processes must hear from this one."""
        limit_s = None
        if self._plans is not None:
            limit_s = BEAT_S if self._plans.is_resting else 0
        with self._changed:
            if not self._has_work():
                self._changed.notify_all()
            return self._changed.wait_for(lambda: self._is_closed or self._has_work(), limit_s)

    def _has_news(self, awaited: list[Arrival]) -> bool:
        """Whether a step has something to do; the last one only waited for reads."""
        known = (*self._scheduler.running, *self._scheduler.waiting)
        is_cancelled = any(sequence.is_cancelled for sequence in known)
        return (
            not awaited
            or bool(self._arrived)
            or is_cancelled
            or any(a.future.done() for a in awaited)
        )

    def _notify(self, _: object = None) -> None:
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
            self._finish(sequence, Finished(reason, message), keeps=False)
        self._rows.close()
        self._notify()

    def _state(self) -> int:
        """A checksum that is equal in all processes."""
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
        """Finishes cancelled sequences and takes a step."""
        for sequence in cancelled:
            self._finish(sequence, Finished("cancelled"))
        look_up, is_held = self._prefixes.look_up, self._prefixes.should_wait
        while (sequence := self._scheduler.next_to_start(look_up, is_held)) is not None:
            with self._catching() as failure:
                self._start(sequence)
            if failure.has_failed:
                self._finish(sequence, failure.finished)
        for sequence in [*self._scheduler.running]:
            if sequence.arrival is None or not sequence.arrival.future.done():
                continue
            with self._catching() as failure:
                self._begin(sequence, sequence.arrival.future.result())
            if failure.has_failed:
                self._finish(sequence, failure.finished)
        in_rows, decoding = self._rows.divide()
        num_decoding = len(decoding) + sum(map(len, in_rows))
        divides = self._options.exact or not self._passes.reads_together
        chosen = self._scheduler.prompts(*self._prompt_sizes(bool(num_decoding)), exact=divides)
        with self._catching():  # later requests compute it again
            chosen = self._prefixes.cut(chosen)
        num_prompt = sum(num_new for _, num_new in chosen)
        arriving = (sequence.arrival for sequence in self._scheduler.running)
        if not num_decoding and not num_prompt and (awaited := [*filter(None, arriving)]):
            self._awaited = awaited
            return
        with self._sizes.timed(num_prompt=num_prompt, num_decoding=num_decoding):
            beside = [] if divides else decoding_with_prompts(decoding, chosen)
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
        """Computes one more token of each, and the drafted tokens that are right."""
        drafts = self._drafts
        if drafts is None or drafts.has_ended or any(one.drafter is None for one in group):
            self._pass(_one_each(group), lambda: self._passes.decode(group))
            return
        with drafts.turn:  # other threads may call the model too
            self._decode_drafted(group)

    def _decode_drafted(self, group: list[Sequence]) -> None:
        drafts = self._drafts
        offers: list[Offer] = []
        for sequence in group:
            left = sequence.request.max_new_tokens - len(sequence.answer)
            assert sequence.drafter is not None
            offers.append(sequence.drafter.offer(max(min(drafts.control.most_rows, left) - 1, 0)))

        def has_room(index: int, count: int) -> bool:
            return self._account.reserve(group[index], group[index].num_computed + 1 + count)

        drafters = [sequence.drafter for sequence in group]
        drafted, drafting_s = drafts.propose(drafters, offers, has_room)
        num_base, num_rows = len(group), len(group) + sum(map(len, drafted))
        if num_rows == num_base:
            with drafts.timed(num_base, num_rows):
                self._pass(_one_each(group), lambda: self._passes.decode(group))
            return
        chosen = [(one, 1 + len(own)) for one, own in zip(group, drafted, strict=True)]
        with drafts.timed(num_base, num_rows, drafting_s):
            logits_RV = self._logits(chosen, lambda: self._passes.verify(group, drafted))
        if logits_RV is None:
            return
        parts = logits_RV.split([1 + len(draft) for draft in drafted])
        for sequence, draft, offer, own_RV in zip(group, drafted, offers, parts, strict=True):
            num_right = self._advance_over(sequence, draft, own_RV)
            has_failed = not sequence.is_finished and num_right < len(draft)
            drafts.control.judged(offer.grade, num_right, has_failed=has_failed, num_base=num_base)

    def _shown(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Logits of a pass; drafters see it before another thread's pass."""
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
        """Logits of a pass; sequences that ask for it get the experts of their tokens."""
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

    def _advance_over(self, sequence: Sequence, draft: list[int], logits_RV: torch.Tensor) -> int:
        """Advances by one token, and by drafted ones while the sampler chooses them too."""
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
        """Most prompt tokens in a pass, and most of them with log-probabilities."""
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
            request = sequence.request
            sequence.positions = Positions.of(self._model, request.prompt_ids, request.pictures)
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
        sequence.arrival.future.add_done_callback(self._notify)

    def _begin(self, sequence: Sequence, filled: Filled) -> None:
        """Starts a sequence after the tokens in its cache."""
        self._prefixes.begin(sequence, filled)
        num_prompt, num_found = len(sequence.request.prompt_ids), filled.num_cached
        read_end = num_prompt if self._options.exact else len(sequence.tokens)
        if num_prompt <= num_found == len(sequence.tokens) - 1:
            read_end = num_found  # it decodes, as before it was preempted
        sequence.start(filled.cache, num_found, read_end)
        sequence.room = filled.room if num_found else 0
        self._counts["prefix_hit_tokens"] += min(num_found, num_prompt)

    def _pass(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> None:
        logits_BV = self._logits(chosen, compute)
        if logits_BV is not None:
            self._end_pass(chosen, logits_BV)

    def _logits(
        self, chosen: list[tuple[Sequence, int]], compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """Logits of a pass; None if it failed: then its sequences end, or try again alone."""
        logits = None
        with self._catching() as failure:
            for sequence, _ in chosen:
                self._fit(sequence)
            logits = self._shown(chosen, compute)
        self._counts["steps"] += 1
        if logits is None:
            self._fail([sequence for sequence, _ in chosen], failure.finished)
        return logits

    def _end_pass(self, chosen: list[tuple[Sequence, int]], logits_BV: torch.Tensor | None) -> None:
        first, num_new = chosen[0]
        if first.is_reading and first.wants_prompt_logprobs:  # it is alone
            failed = self._add_logprobs(first, num_new, logits_BV)
            if failed is not None:
                self._fail([first], failed)
                return
            logits_BV = None if logits_BV is None else logits_BV[-1:]
        for row, (sequence, num_new) in enumerate(chosen):
            self._advance(sequence, num_new, None if logits_BV is None else logits_BV[row])

    def _add_logprobs(
        self, sequence: Sequence, num_new: int, logits_RV: torch.Tensor | None
    ) -> Finished | None:
        """Adds log-probabilities of prompt tokens; returns the answer's end if they fail."""
        assert logits_RV is not None
        with Failure() as failure:
            add_logprobs(sequence, num_new, logits_RV)
        failed = failure.finished if failure.has_failed else None
        if self._plans is not None:
            self._plans.chose(0, None if failed is None else "error")
        return failed

    def _catching(self) -> Failure:
        """Catches errors in one process. In several it cannot: the others had no error."""
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
        with self._catching():  # later requests compute it again
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
        """Chooses the next token; returns the answer's end if it ends with it."""
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

    def _fail(self, sequences: list[Sequence], finished: Finished) -> None:
        """After a failed pass: a single sequence ends, several try again alone."""
        self._sizes.ignore_step()
        for sequence in sequences:
            self._prefixes.forget_cuts(sequence)
            if len(sequences) == 1:
                self._finish(sequence, finished)
            else:
                sequence.is_alone = True
                if not isinstance(sequence.cache, InRow):  # which is as it was
                    self._scheduler.preempt(sequence)

    def _finish(self, sequence: Sequence, finished: Finished, *, keeps: bool = True) -> None:
        if finished.reason != "error" and keeps:
            with self._catching():
                self._rows.take_out(sequence, is_view=True)
                self._prefixes.take_over(sequence, lambda: self._account.release(sequence))
        self._scheduler.remove(sequence)
        self._prefixes.forget(sequence)
        self._passes.end_request(sequence.number)
        self._finished[finished.reason] += 1
        sequence.finish(finished)


def _one_each(sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
    return [(sequence, 1) for sequence in sequences]


def _within_pass(options: EngineOptions, pieces: Any) -> EngineOptions:
    """The options with steps that fit into the memory for activations."""
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


class EngineHandle:
    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._sequence = sequence

    def cancel(self) -> None:
        """Ends the request between two steps, if it has not ended; from any thread."""
        with self._engine._changed:
            self._sequence.is_cancelled = True
            self._engine._changed.notify_all()
