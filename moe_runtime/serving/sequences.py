"""A request on its way through the engine: its tokens, its cache, and whom it tells."""

from __future__ import annotations

from collections.abc import Sequence as Items
from types import TracebackType
from typing import TYPE_CHECKING

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

    from moe_runtime.serving.sampling import Sampler


class Failure:
    """Takes what a block raises, so that only those whom it concerns fail with it.

    The error itself is let go of: its traceback has the frames of the pass and so this object too,
    and the caches of all sequences would stay until Python looks for such cycles.

    Attributes:
        has_failed: whether the block raised.
        finished: what a request that fails with it is told.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.finished = Finished("error")

    def __enter__(self) -> Failure:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.has_failed = True
        cause = error.__cause__
        self.finished = Finished(
            "error",
            _line_of(error),
            cause=None if cause is None else _line_of(cause),
            is_constrained=isinstance(error, ConstraintError),
        )
        return True


def _line_of(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Sequence:
    """One request while it is answered.

    Attributes:
        request: what is asked.
        number: counts requests as they arrive.
        turn: counts those of its client; see `Scheduler`.
        tokens: of the prompt and of the answer.
        answer: the tokens of the answer.
        num_computed: tokens whose keys and values are cached.
        num_found: those of them that were known when it got its cache.
        read_end: tokens that are read as prompts are; those behind go one by one.
        cache: while it runs.
        room: tokens that the cache was given room for; 0 for as many as it has.
        found: blocks of its beginning that are known, from when it gets room until it has a cache.
        sampler: while it runs for the first time, and from then on.
        root: of the prefixes that it may find: its adapter and owner.
        is_apart: it always goes through the model alone.
        is_alone: it does now, also since a pass together with others failed.
        is_cancelled: it is to end with the next step.
        is_finished: it has sent its last event.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: OnEvent,
        number: int,
        root: str = "",
        *,
        is_apart: bool = False,
    ) -> None:
        self.request = request
        self.root = root
        self.number = number
        self.turn = 0
        self.tokens = list(request.prompt_ids)
        self.answer: list[int] = []
        self.num_computed = self.num_found = 0
        self.read_end = len(self.tokens)
        self.cache: DynamicCache | None = None
        self.room = 0
        self.found: list[torch.Tensor] = []
        self.sampler: Sampler | None = None
        self.is_alone = self.is_apart = is_apart
        self.is_cancelled = False
        self.is_finished = False
        self._on_event = on_event
        self._is_started = self._is_read = False
        self._cached_tokens = 0
        self._logprobs: list[TokenLogprob | None] = [None]

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts sequences: the one to go first has the least."""
        return -self.request.priority, self.turn, self.number

    @property
    def is_reading(self) -> bool:
        """Whether tokens are left that are read as prompts are."""
        return self.num_computed < self.read_end

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are asked for and not yet told."""
        return self.request.num_prompt_logprobs is not None and not self._is_read

    def start(self, cache: DynamicCache, num_found: int, read_end: int) -> None:
        """It gets a cache, which has some of its tokens already."""
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
        """It loses its cache."""
        self.cache = None
        self.num_computed = self.room = 0

    def add_logprobs(self, logprobs: Items[TokenLogprob]) -> None:
        """The next tokens of the prompt have these log-probabilities."""
        self._logprobs.extend(logprobs)

    def tell_read(self) -> None:
        """The prompt was read; told once."""
        if not self._is_read:
            wanted = self.request.num_prompt_logprobs is not None
            logprobs = tuple(self._logprobs) if wanted else None
            self._is_read = True
            self._logprobs = []
            self._tell(PromptRead(self._cached_tokens, logprobs))

    def add(self, token: NewToken) -> FinishReason | None:
        """The answer is one token longer; gives the reason if it ends with it."""
        self.tokens.append(token.token_id)
        self.answer.append(token.token_id)
        self._tell(token)
        request = self.request
        if token.token_id in request.stop_ids and not request.ignore_eos:
            return "stop"
        if request.constraint is not None and request.constraint.is_exhausted:
            return "stop"
        return "length" if len(self.answer) >= request.max_new_tokens else None

    def finish(self, finished: Finished) -> None:
        """Tells that it has ended; told once."""
        if not self.is_finished:
            self.is_finished = True
            self.stop()
            self._tell(finished)
            self._on_event = _hear_nothing  # who listens holds this sequence: neither would go

    def _tell(self, event: Event) -> None:
        # whoever cannot hear any more has gone away
        with Failure() as failure:
            self._on_event(event)
        if failure.has_failed:
            self.is_cancelled = True


def _hear_nothing(event: Event) -> None:
    """Whom a finished sequence tells."""
