"""Requests of the engine and its answers: token ids in, events out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from moe_runtime.errors import MoERuntimeError
from moe_runtime.inference.generation import COLDEST
from moe_runtime.inference.pictures import PlacedPicture
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.types import RuntimeStats

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

LEAST_PENALTY = 1e-20
"""Keeps logits up to 1e18 finite in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine divides its work.

    Attributes:
        most_waiting: requests that may wait; more are refused.
        most_running: requests that are answered at a time.
        prompt_tokens: most tokens of prompts in a step in which others decode.
        max_slowdown: times as long that a step may take with prompts as without, as far as
            `StepSizes` can hold it; with infinity steps grow to ``prompt_tokens``.
        idle_prompt_tokens: most tokens of prompts in a step in which no sequence decodes.
        reuses_prefixes: keeps keys and values of prompts and answers in free memory.
        exact: gives a request the bits that it would get alone: prompts are read one at a time, in
            pieces of ``prompt_tokens``, and only whole pieces are reused.
        decode_rows: sequences that decode in recorded steps on a GPU, at most, up to 16, in half of
            the memory for tokens. With ``exact`` there are rows for all running sequences, or none.

    Raises:
        ValueError: one is too small; the message begins with its name.
    """

    most_waiting: int = 256
    most_running: int = 32
    prompt_tokens: int = 256
    max_slowdown: float = 3.0
    idle_prompt_tokens: int = 2048
    reuses_prefixes: bool = True
    exact: bool = False
    decode_rows: int = 4

    def __post_init__(self) -> None:
        for name in ("most_waiting", "most_running", "prompt_tokens", "idle_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.decode_rows <= MAX_TOKENS:
            raise ValueError(f"decode_rows must be 0 to {MAX_TOKENS}, got {self.decode_rows}")
        if not self.max_slowdown > 1:
            raise ValueError(f"max_slowdown must be above 1, got {self.max_slowdown}")


class QueueFullError(MoERuntimeError):
    """As many requests wait as may; a later attempt may succeed."""


class EngineClosedError(MoERuntimeError):
    """The engine drains or is closed, and takes no more requests."""


class RequestTooLongError(ValueError):
    """A prompt and its answer need more tokens than the model knows or memory is reserved for."""

    def __init__(self, message: str, *, num_tokens: int, most_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens, self.most_tokens = num_tokens, most_tokens


class ConstraintError(MoERuntimeError):
    """No token may follow an answer that is not yet what its constraint asks for."""


class TokenConstraint(Protocol):
    """What a grammar allows, asked from the engine's thread before each token.

    Attributes:
        is_exhausted: the tokens allowed last can only end the answer.
    """

    is_exhausted: bool

    def allowed(self, generated_ids: Sequence[int]) -> Tensor | None:
        """The tokens that may come after the answer so far.

        Returns:
            Bool ``[V]``, at least one of them true; tokens beyond its end are not allowed. None
                allows all.

        Raises:
            ConstraintError: no token may follow, and the answer is not whole.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How a token is chosen; what is left at its default is not applied at all.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: samples among the most likely tokens that together have this probability.
        top_k: samples among so many of the most likely tokens; 0 for all.
        min_p: samples among tokens at least this many times as likely as the most likely one.
        repetition_penalty: divides positive logits of tokens of prompt and answer, multiplies
            negative.
        presence_penalty: subtracted from the logits of tokens that the answer has.
        frequency_penalty: subtracted from them as often as the answer has them.
        seed: makes the answer repeatable.
        logit_bias: by token id, added to its logit.

    Raises:
        ValueError: an option is out of range; the message begins with its name.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.temperature and not COLDEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or at least {COLDEST:g}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0 (all tokens), got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], got {self.min_p}")
        if not LEAST_PENALTY <= self.repetition_penalty <= 1 / LEAST_PENALTY:
            raise ValueError(
                f"repetition_penalty must lie in [{LEAST_PENALTY:g}, {1 / LEAST_PENALTY:g}], "
                f"got {self.repetition_penalty}"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [-2**63, 2**63), got {self.seed}")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias):
                raise ValueError(
                    f"logit_bias must give numbers to token ids, got {bias} for {token}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and how to continue it.

    Attributes:
        prompt_ids: at least one token.
        max_new_tokens: most tokens to generate; 0 reads the prompt only.
        min_new_tokens: ``stop_ids`` are not chosen before the answer has so many tokens, unless its
            constraint lets nothing else follow.
        stop_ids: tokens that end the answer; they are its last token.
        num_logprobs: how many of the most likely tokens to report with each new one; None for no
            log-probabilities.
        num_prompt_logprobs: the same for the prompt's tokens. The whole prompt is computed then.
        constraint: what the answer may be made of; where nothing more may follow, it ends.
        priority: higher ones go first; within a priority, clients take turns.
        client: whose turn it takes.
        prefix_owner: requests find what others of the same owner left of their beginning.
        adapter: that the model has for this request; None for the model as it is.
        pictures: in the prompt, in their order.
        returns_routing: events say which experts the tokens went to. All of them are computed then.

    Raises:
        ValueError: a number is out of range, or the prompt is empty.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    sampling: SamplingOptions = SamplingOptions()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    constraint: TokenConstraint | None = None
    priority: int = 0
    client: str = ""
    prefix_owner: str = ""
    adapter: str | None = None
    pictures: tuple[PlacedPicture, ...] = ()
    returns_routing: bool = False

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("the prompt is empty, expected at least one token")
        for name, least in (
            ("max_new_tokens", 0),
            ("min_new_tokens", 0),
            ("num_logprobs", 0),
            ("num_prompt_logprobs", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """How likely the model itself found a token: before temperature, penalties and constraints.

    Attributes:
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the most likely tokens, the most likely one first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request waits no longer: it has a KV cache. Sent once, before all others."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt was read; sent once, before the first token.

    Attributes:
        cached_tokens: tokens at its beginning whose keys and values an earlier request left.
        logprobs: of each prompt token given those before it, where asked for; the first has None.
        routing: experts of the prompt's tokens, where asked for: tokens, layers and choices.
    """

    cached_tokens: int
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    routing: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """The answer is one token longer; the other fields where asked for.

    ``routing`` is of the tokens that were computed since the last event, this one not included.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    routing: np.ndarray | None = None


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request that was taken.

    Attributes:
        reason: ``"stop"`` at one of ``stop_ids``, ``"length"`` at ``max_new_tokens``,
            ``"cancelled"`` by its handle or the end of the engine, ``"error"`` where a step failed.
        message: of an error, one line.
        cause: of the error, one line, for the operator: it may name files.
        is_constrained: whether the request's own constraint is at fault for the error.
    """

    reason: FinishReason
    message: str | None = None
    cause: str | None = None
    is_constrained: bool = False

    @property
    def problem(self) -> str:
        """Of an error, all that is known, one line, for the operator and not for clients."""
        message = self.message or "the model failed"
        return message if self.cause is None else f"{message} ({self.cause})"


Event = Started | PromptRead | NewToken | Finished
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatistics:
    """What the engine does now, and what it did since it was made.

    Attributes:
        kv_tokens: tokens in the KV caches of running requests and in the prefix cache.
        kv_capacity: tokens that memory is reserved for.
        prefix_tokens: those of ``kv_tokens`` that only the prefix cache keeps.
        steps: forward passes.
        preemptions: times that a running request lost its KV cache to another.
        adapter_reads: times that a LoRA adapter was read from its files.
        adapter_bytes: of memory that adapters have at most.
        prompt_tokens: of all requests, cached ones included.
        prefix_hit_tokens: prompt tokens that were found in the prefix cache.
        prefix_disk_hit_tokens: those of them that were found on the disk.
        prefix_disk_failures: times that prefixes could not be written to the disk.
        finished: requests by the reason with which they ended.
        experts: what they cost since the model was loaded.
        draft_steps: of sequences, of a model that was loaded with a ``draft``.
        drafted_tokens: tokens that were verified in them too.
        accepted_drafts: those of them that were chosen too.
        draft_failures: errors of drafts; after one there are no more drafts.
        drafts_given_up: as of `RuntimeStats`.
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    prefix_tokens: int
    steps: int
    preemptions: int
    adapter_reads: int
    adapter_bytes: int
    prompt_tokens: int
    prefix_hit_tokens: int
    prefix_disk_hit_tokens: int
    prefix_disk_failures: int
    generated_tokens: int
    finished: Mapping[FinishReason, int]
    experts: RuntimeStats
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    draft_failures: int = 0
    drafts_given_up: int = 0

    @property
    def kv_usage(self) -> float:
        """The share of the capacity that running requests hold; the rest can be had at once."""
        return (self.kv_tokens - self.prefix_tokens) / self.kv_capacity
