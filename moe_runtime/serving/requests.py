"""The engine's requests and events: token ids in, events out."""

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
        most_running: requests that run at a time.
        prompt_tokens: most prompt tokens of a step in which sequences also decode.
        max_slowdown: how many times as long a step may take with prompts as without; see
            `StepSizes`. With infinity all steps may have ``prompt_tokens``.
        idle_prompt_tokens: most prompt tokens of a step in which no sequence decodes.
        reuses_prefixes: keeps keys and values of prompts and answers in free memory.
        exact: a request gets the same bits as alone: prompts are read one at a time, in pieces of
            ``prompt_tokens``, and only whole pieces are reused.
        decode_rows: most sequences, up to 16, that decode in recorded steps on a GPU, in half of
            the memory for tokens. With ``exact`` there are rows for all running sequences, or none.

    Raises:
        ValueError: a value is out of range; the message begins with its name.
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
    """The queue is full; a later attempt may succeed."""


class EngineClosedError(MoERuntimeError):
    """The engine drains or is closed, and takes no more requests."""


class RequestTooLongError(ValueError):
    """A prompt and its answer exceed the model's positions or the reserved memory."""

    def __init__(self, message: str, *, num_tokens: int, most_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens, self.most_tokens = num_tokens, most_tokens


class ConstraintError(MoERuntimeError):
    """No token may follow an incomplete answer, according to its constraint."""


class TokenConstraint(Protocol):
    """The tokens that a grammar allows; called from the engine's thread before each token.

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
            ConstraintError: no token may follow, and the answer is incomplete.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions:
    """How a token is chosen; defaults have no effect.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: samples among the most likely tokens of this total probability.
        top_k: samples among this many of the most likely tokens; 0 for all.
        min_p: samples among tokens at least this many times as likely as the most likely one.
        repetition_penalty: divides positive logits of tokens of prompt and answer, and multiplies
            negative ones.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted from them for each time that they occur in the answer.
        seed: makes the answer repeatable.
        logit_bias: added to logits, by token id.

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
        min_new_tokens: ``stop_ids`` are not chosen before the answer has this many tokens, unless
            the constraint allows nothing else.
        stop_ids: tokens that end the answer; the answer includes them.
        num_logprobs: most likely tokens to report with each new one; None for no log-probabilities.
        num_prompt_logprobs: the same for the prompt's tokens; the prefix cache is not used then.
        constraint: the tokens that may follow; the answer ends if none may.
        priority: higher ones go first; within a priority, clients take turns.
        client: takes turns with other clients.
        prefix_owner: only requests of the same owner share the prefix cache.
        adapter: name of a LoRA adapter; None for the model alone.
        pictures: of the prompt, in order.
        returns_routing: events have the experts of tokens; the prefix cache is not used then.

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
        for name in ("max_new_tokens", "min_new_tokens", "num_logprobs", "num_prompt_logprobs"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's log-probability of a token, before temperature, penalties and constraints.

    Attributes:
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the most likely tokens, the most likely one first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The request has a KV cache. Sent once, before all other events."""


@dataclass(frozen=True, slots=True)
class PromptRead:
    """The prompt was read; sent once, before the first token.

    Attributes:
        cached_tokens: tokens at its beginning that the prefix cache had.
        logprobs: if asked for, of each prompt token given those before it; None for the first.
        routing: if asked for, experts of the prompt's tokens: tokens, layers and choices.
    """

    cached_tokens: int
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    routing: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class NewToken:
    """The answer is one token longer; the other fields only if asked for.

    ``routing`` is of the tokens computed since the last event, without this one.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    routing: np.ndarray | None = None


FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every request.

    Attributes:
        reason: ``"stop"`` at one of ``stop_ids``, ``"length"`` at ``max_new_tokens``,
            ``"cancelled"`` by its handle or the end of the engine, ``"error"`` if a step failed.
        message: of an error, one line.
        cause: of the error, one line, for the operator: it may name files.
        is_constrained: whether the request's own constraint caused the error.
    """

    reason: FinishReason
    message: str | None = None
    cause: str | None = None
    is_constrained: bool = False

    @property
    def problem(self) -> str:
        """An error with its cause in one line, for the operator and not for clients."""
        message = self.message or "the model failed"
        return message if self.cause is None else f"{message} ({self.cause})"


Event = Started | PromptRead | NewToken | Finished
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatistics:
    """Counts of an engine since it was made.

    Attributes:
        kv_tokens: tokens in the KV caches of running requests and in the prefix cache.
        kv_capacity: tokens that memory is reserved for.
        prefix_tokens: the part of ``kv_tokens`` that only the prefix cache keeps.
        steps: forward passes.
        preemptions: running requests that lost their KV cache to others.
        adapter_reads: reads of LoRA adapters from files.
        adapter_bytes: memory limit of adapters.
        prompt_tokens: of all requests, cached ones included.
        prefix_hit_tokens: prompt tokens found in the prefix cache.
        prefix_disk_hit_tokens: the part of them found on disk.
        prefix_disk_failures: failed writes of prefixes to disk.
        finished: requests by the reason of their end.
        experts: statistics of experts since the model was loaded.
        draft_steps: steps of sequences with drafted tokens, of a model loaded with a ``draft``.
        drafted_tokens: tokens that these steps verified.
        accepted_drafts: the part of them that was chosen.
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
        """The share of the capacity that running requests hold; the rest is available."""
        return (self.kv_tokens - self.prefix_tokens) / self.kv_capacity
