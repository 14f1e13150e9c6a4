"""A file of prompts, from its text to the file of answers: checks, memory, loading, the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import moe_runtime
from moe_runtime.checkpoints.opening import (
    find_checkpoint,
    load_tokenizer,
    open_checkpoint,
    read_config,
    read_generation_config,
)
from moe_runtime.config import parse_budget
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.budget import (
    available_device_bytes,
    available_host_bytes,
    resolve_budget,
)
from moe_runtime.inference.generation import (
    check_length,
    check_options,
    check_vocabulary,
    encode_messages,
    encode_prompt,
    end_token_ids,
    sampling_for,
    stop_strings_of,
    warn_of_unused,
)
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.batches.answer_file import AnswerFile
from moe_runtime.serving.batches.batch_lines import PromptLine, read_lines
from moe_runtime.serving.batches.offline import Answer, answer_all, tokens_of
from moe_runtime.serving.engine_options import EngineOptions
from moe_runtime.serving.http.answer_text import AnswerText, Piece
from moe_runtime.serving.kv_account import rounded_up
from moe_runtime.serving.requests import (
    EngineStatistics,
    FinishReason,
    GenerationRequest,
    NewToken,
    SamplingOptions,
)
from moe_runtime.types import RuntimeStats

_HASH_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a file.

    Attributes:
        request: for the engine, without the model's own tokens that end an answer.
        id: of its record: a digest of the model's name and everything that its answer depends on.
        stops: strings that end the answer, the model's own among them.
    """

    line: PromptLine
    request: GenerationRequest
    id: str
    stops: tuple[str, ...]


@dataclass(slots=True)
class _GrowingText:
    text: AnswerText
    parts: list[str] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self.parts.append(piece.text)
        self.finish = piece.finish


class Batch:
    """The requests of a file; ``chat`` puts prompts that are texts into the chat template.

    Raises:
        ValueError: a line asks for another model, or more than the model can do; with its number.
        CheckpointError: the tokenizer or its chat template fails.
    """

    def __init__(
        self,
        lines: Sequence[PromptLine],
        tokenizer: Any,
        config: Any,
        model: str,
        *,
        chat: bool,
        sampling: SamplingOptions,
        stops: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._name = name_of(model)
        self._names = {model, self._name}
        self._config = config
        self._chat = chat
        self._sampling = sampling
        self._stops = tuple(stops)
        self._texts: dict[str, _GrowingText] = {}
        self.end_ids: frozenset[int] = frozenset()
        self._requests: list[tuple[PromptLine, GenerationRequest]] = []
        for line in lines:
            try:
                self._requests.append((line, self._read(line)))
            except ValueError as error:
                raise ValueError(f"{line.place}: {error}") from None
            except CheckpointError as error:
                raise CheckpointError(f"{line.place}: {error}") from None

    def jobs(self, arithmetic: str) -> list[Job]:
        """One for each line; answers computed in another arithmetic have other ids."""
        found: list[Job] = []
        times: Counter[str] = Counter()
        for line, request in self._requests:
            stops = (*line.stops, *(() if line.ignore_eos else self._stops))
            options = [request.max_new_tokens, request.min_new_tokens, sorted(request.stop_ids)]
            sampling = dataclasses.asdict(request.sampling)
            asked = [self._name, line.custom_id, request.prompt_ids, options, sampling]
            asked += [stops, line.ignore_eos]
            times[key := json.dumps(asked)] += 1
            text = json.dumps([*asked, times[key] - 1, arithmetic])
            digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
            found.append(Job(line, request, f"batch_req_{digest}", stops))
        return found

    def request_of(self, job: Job) -> GenerationRequest:
        return dataclasses.replace(job.request, stop_ids=self._stop_ids(job))

    def is_over(self, job: Job, token: NewToken) -> bool:
        """Takes a token; gives whether a stop string ends the answer here."""
        grown = self._growing(job)
        grown.add(grown.text.add(token))
        return grown.finish is not None

    def record(self, job: Job, answer: Answer) -> dict[str, Any]:
        line, record = job.line, {"id": job.id}
        grown = self._growing(job)
        del self._texts[job.id]
        error = None
        if answer.reason == "error":
            error = {"code": "generation_failed", "message": answer.message or "the model failed"}
        elif grown.finish is None:
            grown.add(grown.text.end(answer.reason or "stop"))
        text, reason = "".join(grown.parts), grown.finish or "stop"
        if line.custom_id is not None:
            body = None if error else self._body(job, answer, text, reason)
            answered = {"status_code": 200, "request_id": job.id, "body": body} if body else None
            return {**record, "custom_id": line.custom_id, "response": answered, "error": error}
        asked = {"prompt": line.prompt} if line.messages is None else {"messages": line.messages}
        if error:
            return {**record, **asked, "error": error}
        return {
            **record,
            **asked,
            "text": text,
            "finish_reason": reason,
            "prompt_tokens": len(job.request.prompt_ids),
            "new_tokens": len(answer.token_ids),
        }

    def _read(self, line: PromptLine) -> GenerationRequest:
        if line.model is not None and line.model not in self._names:
            raise ValueError(f"asks for model {line.model!r}, but this one is {self._name!r}")
        ids, sampling = self._encode(line), dataclasses.replace(self._sampling, **line.sampling)
        check_length(self._config, len(ids), line.max_new_tokens)
        size = self._config.get_text_config().vocab_size
        wrong = [token for token in (*ids, *line.stop_ids, *sampling.logit_bias) if token >= size]
        if wrong:
            raise ValueError(f"token {wrong[0]} is none of the model's vocabulary of {size}")
        return GenerationRequest(
            prompt_ids=tuple(ids),
            max_new_tokens=line.max_new_tokens,
            min_new_tokens=line.min_new_tokens,
            stop_ids=line.stop_ids,
            sampling=sampling,
        )

    def _stop_ids(self, job: Job) -> frozenset[int]:
        own = frozenset() if job.line.ignore_eos else self.end_ids
        return job.request.stop_ids | own

    def _encode(self, line: PromptLine) -> list[int]:
        if isinstance(line.prompt, list):
            return line.prompt
        if line.messages is not None:
            encoded = encode_messages(self.tokenizer, line.messages)
        else:
            encoded = encode_prompt(self.tokenizer, line.prompt or "", chat=self._chat)
        check_vocabulary(self._config, encoded["input_ids"])
        return encoded["input_ids"][0].tolist()

    def _growing(self, job: Job) -> _GrowingText:
        if job.id not in self._texts:
            decoded = IncrementalText.of(self.tokenizer)
            least = job.request.min_new_tokens
            text = AnswerText(decoded, job.stops, self._stop_ids(job), least)
            given = job.line.prompt
            if isinstance(given, list) or (given is not None and not self._chat):
                text.follow(job.request.prompt_ids, is_whole=isinstance(given, str))
            self._texts[job.id] = _GrowingText(text)
        return self._texts[job.id]

    def _body(self, job: Job, answer: Answer, text: str, reason: str) -> dict[str, Any]:
        is_chat = job.line.messages is not None
        answer_fields = (
            {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        num_prompt, num_new = len(job.request.prompt_ids), len(answer.token_ids)
        return {
            "id": job.id.replace("batch_req_", "chatcmpl-" if is_chat else "cmpl-"),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [{"index": 0, **answer_fields, "logprobs": None, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": num_prompt,
                "completion_tokens": num_new,
                "total_tokens": num_prompt + num_new,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            },
        }


def name_of(model: str) -> str:
    """What answers call a model: the name of its folder, or its name on the hub."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


ROOM_SHARE = 4
"""Of what a budget leaves beside the dense weights, tokens get a fourth where experts lack room."""


@dataclass(kw_only=True, slots=True)
class BatchOutcome:
    """What became of the requests of a file.

    Attributes:
        sampling: how tokens are chosen where a line does not say.
        kept: requests that had an answer before.
        prompt_tokens: of those answered.
        cached_tokens: those of them that another request had computed.
        engine: None where it was interrupted, or had nothing to do.
        stats: of the model; None where it was not loaded.
    """

    requests: int
    sampling: Mapping[str, Any]
    kept: int = 0
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    is_interrupted: bool = False
    engine: EngineStatistics | None = None
    stats: RuntimeStats | None = None

    def count(self, num_prompt_tokens: int, answer: Answer) -> None:
        if answer.reason == "error":
            self.failed += 1
            return
        self.answered += 1
        self.prompt_tokens += num_prompt_tokens
        self.cached_tokens += answer.cached_tokens
        self.new_tokens += len(answer.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Options of `run_batch`.

    Attributes:
        file: name of the file of prompts, for messages.
        temperature: of lines that say none; the checkpoint's where None. Likewise ``top_p``.
        loading: options of ``moe_runtime.load``.
        max_tokens: tokens to load the model for; what `room_for` finds where None.
    """

    model: str
    file: str
    output: Path
    chat: bool
    temperature: float | None
    top_p: float | None
    seed: int | None
    max_new_tokens: int
    loading: Mapping[str, Any]
    max_tokens: int | None
    engine: EngineOptions


def run_batch(
    text: str,
    settings: BatchSettings,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    on_loaded: Callable[[int], None],
    on_done: Callable[[BatchOutcome], None],
) -> BatchOutcome:
    """Answers what has no answer yet.

    Args:
        on_loaded: called with the number of requests to answer when the model is loaded.
        on_done: called after each request.

    Raises:
        ValueError: a line cannot be answered, with its number, or an option is out of range.
        MoERuntimeError: the model cannot be loaded, the output holds something else, or the engine
            failed.
        OSError: an answer cannot be written.
    """
    batch, jobs, sampling = _read(text, settings, progress)
    asked = {job.id: number for number, job in enumerate(jobs)}
    with AnswerFile(settings.output, asked) as answers:
        left = [number for number in range(len(jobs)) if number not in answers.answered]
        kept = len(jobs) - len(left)
        outcome = BatchOutcome(requests=len(jobs), sampling=sampling, kept=kept)
        if left:
            room = _tokens_for([jobs[number] for number in left], settings)
            loaded: Any = moe_runtime.load(
                settings.model, max_tokens=room, progress=progress, **settings.loading
            )
            on_loaded(len(left))
            with contextlib.closing(loaded.moe):
                wanted = {number: jobs[number] for number in left}
                _answer(loaded, batch, wanted, answers, settings.engine, outcome, on_done)
                outcome.stats = loaded.moe.stats()
        if not outcome.is_interrupted:
            answers.finish()
    return outcome


def _read(
    text: str, settings: BatchSettings, progress: Callable[[str, int, int], None] | None
) -> tuple[Batch, list[Job], dict[str, Any]]:
    """Checks lines before anything is fetched, and all but their dtype before weights are."""
    top_p = 1.0 if settings.top_p is None else settings.top_p
    check_options(settings.max_new_tokens, settings.temperature or 0.0, top_p, settings.seed)
    lines = read_lines(text, settings.file, max_new_tokens=settings.max_new_tokens)
    folder = find_checkpoint(settings.model, weights=False, progress=progress)
    config = read_generation_config(folder)
    warn_of_unused(config, is_engine=True)
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    own = sampling_for(config, temperature=settings.temperature, top_p=settings.top_p)
    check_options(settings.max_new_tokens, own["temperature"], own["top_p"], settings.seed)
    batch = Batch(
        lines,
        load_tokenizer(folder),
        read_config(folder),
        settings.model,
        chat=settings.chat,
        sampling=SamplingOptions(**own, seed=settings.seed, repetition_penalty=penalty),
        stops=stop_strings_of(config),
    )
    checkpoint = open_checkpoint(settings.model, settings.loading["dtype"], progress=progress)
    return batch, batch.jobs(str(checkpoint.dtype)), own


def _tokens_for(jobs: Sequence[Job], settings: BatchSettings) -> int:
    needs = [rounded_up(tokens_of(job.request)) for job in jobs]
    if settings.max_tokens is None:
        return room_for(settings.model, needs, settings.engine.most_running, settings.loading)
    longest = max(needs)
    if settings.max_tokens < longest:
        line = jobs[needs.index(longest)].line
        raise ValueError(
            f"--max-tokens {settings.max_tokens} is too small: {line.place}, with its answer, may "
            f"need {longest}"
        )
    return settings.max_tokens


def _answer(
    loaded: Any,
    batch: Batch,
    jobs: Mapping[int, Job],
    answers: AnswerFile,
    options: EngineOptions,
    outcome: BatchOutcome,
    on_done: Callable[[BatchOutcome], None],
) -> None:
    batch.end_ids = frozenset(end_token_ids(loaded, batch.tokenizer))

    def take(number: int, answer: Answer) -> None:
        answers.add(batch.record(jobs[number], answer))
        outcome.count(len(jobs[number].request.prompt_ids), answer)
        on_done(outcome)

    started_s = time.perf_counter()
    outcome.is_interrupted = True
    with contextlib.suppress(KeyboardInterrupt):
        outcome.engine = answer_all(
            loaded,
            {number: batch.request_of(job) for number, job in jobs.items()},
            options,
            on_token=lambda number, token: batch.is_over(jobs[number], token),
            on_answer=take,
        )
        outcome.is_interrupted = False
    outcome.seconds = time.perf_counter() - started_s


def room_for(
    model: str, needs: Sequence[int], most_running: int, loading: Mapping[str, Any]
) -> int:
    """Tokens to load a model for, so that many requests run at a time and experts keep their
    room.

    Room for the longest requests that may run together, where the experts fit in addition or it
    takes at most one part in `ROOM_SHARE` of the budget; at least room for the longest one.
    """
    longest_first = sorted(needs, reverse=True)
    wanted, longest = sum(longest_first[:most_running]), longest_first[0]
    if wanted == longest:
        return wanted
    summary = inspect_checkpoint(
        model, dtype=loading["dtype"], max_tokens=wanted, cache_code=loading["cache_code"]
    )
    device = loading["device"]
    if device != "cpu" and (device != "auto" or torch.cuda.is_available()):
        place = torch.device("cuda" if device == "auto" else device)
        budget, free = loading["device_memory"], available_device_bytes(place)
    else:
        budget, free = loading["host_memory"], available_host_bytes()
    budget_bytes = resolve_budget(parse_budget(budget, name="memory"), free, "this machine")
    spare_bytes = budget_bytes - summary.dense_bytes - summary.reserve_bytes
    if spare_bytes >= summary.total_experts * summary.slot_bytes:
        return wanted
    share = (budget_bytes - summary.dense_bytes) // (ROOM_SHARE * summary.token_bytes)
    return max(longest, min(wanted, share))
