"""A file of prompts, from its text to the file of answers: checks, memory, loading, the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import moe_runtime
from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.checkpoints.opening import (
    find_checkpoint,
    load_tokenizer,
    open_checkpoint,
    read_config,
    read_generation_config,
)
from moe_runtime.checkpoints.strict_json import parse_value
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
from moe_runtime.inference.lossy import LossyRules
from moe_runtime.inference.pictures import Picture, PictureReader, Pictures, place
from moe_runtime.serving.batches.offline import Answer, AnswerFile, News, answer_all, tokens_of
from moe_runtime.serving.http.answer_text import AnswerText, Piece
from moe_runtime.serving.kv_account import rounded_up
from moe_runtime.serving.requests import (
    EngineOptions,
    EngineStatistics,
    GenerationRequest,
    NewToken,
    SamplingOptions,
)
from moe_runtime.types import RuntimeStats

Progress = Callable[[str, int, int], None]
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_NUMBER, _WHOLE = ("a number", (int, float)), ("a whole number", (int,))
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
_SAMPLING: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys((*_NUMBERS, "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "seed"), _WHOLE),
}
_FIELDS = {
    **_SAMPLING,
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "min_tokens"), _WHOLE),
    **dict.fromkeys(("model", "user"), ("text", (str,))),
    **dict.fromkeys(("logit_bias", "metadata"), ("an object", (dict,))),
    "stop": ("text or a list", (str, list)),
    "stop_token_ids": ("a list", (list,)),
    **dict.fromkeys(("ignore_eos", "return_routed_experts"), ("true or false", (bool,))),
}
_WITHOUT_EFFECT: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "stream": False, "logprobs": False, "echo": False, "store": False},
    "tools": [],
}
"""Fields that may be given with these values only."""
_LONGEST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """What one line asks; ``place`` is file and line, for messages.

    ``prompt`` is None where there are messages, ``custom_id`` for a plain line.
    """

    number: int
    place: str
    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    custom_id: str | None
    model: str | None
    sampling: dict[str, Any]
    max_new_tokens: int
    min_new_tokens: int
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    ignore_eos: bool
    returns_routing: bool


def read_lines(text: str, file: str, *, max_new_tokens: int) -> list[PromptLine]:
    """All requests of a file; a ValueError has the number of a wrong line."""
    found = []
    ids: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            one = _read_line(line, number, place, max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if one.custom_id is not None and ids.setdefault(one.custom_id, number) != number:
            raise ValueError(
                f"{place}: custom_id {one.custom_id!r} is that of line {ids[one.custom_id]} too"
            )
        found.append(one)
    if not found:
        raise ValueError(f"{file}: holds no prompts, expected one a line")
    return found


def _read_line(line: str, number: int, place: str, max_new_tokens: int) -> PromptLine:
    try:
        value = parse_value(line.encode())
    except json.JSONDecodeError as error:
        said = f"{error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')}"
        said += f" at character {error.pos + 1}"
        raise ValueError(f"expected JSON, found {said}") from None
    except UnicodeEncodeError:
        raise ValueError("expected JSON, found half a surrogate pair, which is no text") from None
    except ValueError as error:
        raise ValueError(f"expected JSON, found {error}") from None
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON string or an object, got {_shown(value)}")
    custom_id = None
    body, asked = value, "prompt" if "prompt" in value else "messages"
    if "custom_id" in value or "body" in value:
        custom_id, asked, body = _unwrap(value)
    given: dict[str, Any] = {name: item for name, item in body.items() if item is not None}
    _check_fields(given, asked)
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise ValueError("max_tokens is the old name of max_completion_tokens; give one")
    most_new = given.get("max_completion_tokens", given.get("max_tokens", max_new_tokens))
    least = given.get("min_tokens", 0)
    if most_new < 1:
        raise ValueError(f"max_tokens must be at least 1, got {most_new}")
    if least > most_new:
        raise ValueError(f"min_tokens: expected at most the {most_new} of the answer, got {least}")
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    is_sound = all(isinstance(one, str) and one for one in stops)
    _require(is_sound, "stop: expected a text or a list of texts", stop)
    return PromptLine(
        number=number,
        place=place,
        prompt=_prompt_of(given["prompt"]) if asked == "prompt" else None,
        messages=_messages_of(given["messages"]) if asked == "messages" else None,
        custom_id=custom_id,
        model=given.get("model"),
        sampling=_sampling_of(given),
        max_new_tokens=most_new,
        min_new_tokens=least,
        stops=tuple(stops),
        stop_ids=frozenset(_ids_of(given.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=given.get("ignore_eos", False),
        returns_routing=given.get("return_routed_experts", False),
    )


def _unwrap(value: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    known = {"custom_id", "method", "url", "body"}
    for name in known - value.keys():
        raise ValueError(f"{name} is missing, which OpenAI's batch format has")
    for name in value.keys() - known:
        raise ValueError(f"{name} is no field of OpenAI's batch format")
    custom_id, method, url, body = (value[name] for name in ("custom_id", "method", "url", "body"))
    _require(isinstance(custom_id, str) and custom_id, "custom_id: expected text", custom_id)
    _require(method == "POST", "method: expected POST", method)
    _require(url in (CHAT_URL, TEXT_URL), f"url: expected {CHAT_URL} or {TEXT_URL}", url)
    _require(isinstance(body, dict), "body: expected an object", body)
    return custom_id, "messages" if url == CHAT_URL else "prompt", body


def _check_fields(given: Mapping[str, Any], asked: str) -> None:
    if asked not in given:
        raise ValueError(f"{asked} is missing")
    if {"prompt", "messages"} <= given.keys():
        raise ValueError("has a prompt and messages, expected one of the two")
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            # 0 is no false, and true is no 1: log-probabilities may be asked for by a 0.
            only = _WITHOUT_EFFECT[name]
            is_only = type(value) is type(only) and value == only
            _require(is_only, f"{name} may only be {json.dumps(only)} here", value)
        elif name in _FIELDS:
            expected, types = _FIELDS[name]
            _require(type(value) in types, f"{name}: expected {expected}", value)
        elif name != asked:
            known = ", ".join(sorted({*_FIELDS, asked}))
            raise ValueError(f"{name} is not supported; known are {known}")
    if given.get("min_tokens", 0) < 0:
        raise ValueError(f"min_tokens must be at least 0, got {given['min_tokens']}")


def _sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: given[name] for name in _SAMPLING if name in given}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    bias = {}
    for token, number in given.get("logit_bias", {}).items():
        is_sound = token.isascii() and token.isdigit() and type(number) in (int, float)
        _require(is_sound, "logit_bias: expected token ids and numbers", token)
        bias[int(token)] = float(number)
    if bias:
        values["logit_bias"] = bias
    SamplingOptions(**values)  # refuses what is out of range
    return values


def _ids_of(ids: Sequence[Any], name: str) -> list[int]:
    is_sound = all(type(one) is int and one >= 0 for one in ids)
    _require(is_sound, f"{name}: expected token ids", ids)
    return list(ids)


def _prompt_of(prompt: Any) -> str | list[int]:
    if isinstance(prompt, list) and prompt:
        return _ids_of(prompt, "prompt")
    _require(isinstance(prompt, str), "prompt: expected a text or token ids", prompt)
    return prompt


def _messages_of(messages: Any) -> list[dict[str, Any]]:
    is_list = isinstance(messages, list) and messages
    _require(is_list, "messages: expected a list of messages", messages)
    return [_message_of(one) for one in messages]


def _message_of(message: Any) -> dict[str, Any]:
    is_sound = isinstance(message, dict) and isinstance(message.get("role"), str)
    _require(is_sound, "messages: expected objects with role and content", message)
    for name in message.keys() - {"role", "content", "name"}:
        raise ValueError(f"messages: {name} is not supported; known are role, content, name")
    content = message.get("content")
    if isinstance(content, list):
        content = [_part_of(part) for part in content]
        if all(part["type"] == "text" for part in content):
            content = "\n".join(part["text"] for part in content)
        else:
            is_user = message["role"] == "user"
            _require(is_user, "messages: pictures may be in those of the user", message["role"])
            return {**message, "content": content}
    _require(isinstance(content, str), "messages: content must be text", content)
    return {**message, "content": content}


def _part_of(part: Any) -> dict[str, str]:
    """A text, or a picture as a file or a data URL."""
    kind = part.get("type") if isinstance(part, dict) else None
    value: Any = part.get(kind) if kind in ("text", "image_url", "image") else None
    if kind == "image_url" and isinstance(value, dict):
        value = value.get("url")
    is_sound = isinstance(value, str)
    _require(is_sound, "messages: parts of content must be text, image_url or image", part)
    return {"type": "text", "text": value} if kind == "text" else {"type": "image", "image": value}


def _require(is_sound: Any, expected: str, value: Any) -> None:
    if not is_sound:
        raise ValueError(f"{expected}, got {_shown(value)}")


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


_HASH_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a file.

    ``id`` is of its record: a digest of the model's name and everything that its answer depends on.
    """

    line: PromptLine
    request: GenerationRequest
    id: str
    stops: tuple[str, ...]


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
        reader: PictureReader | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._name = name_of(model)
        self._names = {model, self._name}
        self._config = config
        self._chat = chat
        self._sampling = sampling
        self._stops = tuple(stops)
        self._texts: dict[str, tuple[AnswerText, list[Piece]]] = {}
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
            asked += [stops, line.ignore_eos, *(["routing"] if line.returns_routing else [])]
            asked += [one.picture.digest.hex() for one in request.pictures]
            times[key := json.dumps(asked)] += 1
            text = json.dumps([*asked, times[key] - 1, arithmetic])
            digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]
            found.append(Job(line, request, f"batch_req_{digest}", stops))
        return found

    def request_of(self, job: Job) -> GenerationRequest:
        return dataclasses.replace(job.request, stop_ids=self._stop_ids(job))

    def whole_request_of(self, job: Job) -> GenerationRequest:
        """With the tensors of its pictures. Raises ValueError: one has changed since."""
        request = self.request_of(job)
        pictures = self._pictures(job.line.messages or ())
        if pictures is None:
            return request
        digests = [one.picture.digest for one in request.pictures]
        if digests != [picture.digest for picture in pictures.pictures]:
            raise ValueError(f"{job.line.place}: a picture has changed since: start again")
        placed = place(request.prompt_ids, pictures.pictures)
        return dataclasses.replace(request, pictures=placed)

    def is_over(self, job: Job, token: NewToken) -> bool:
        """Takes a token; gives whether a stop string ends the answer here."""
        text, pieces = self._growing(job)
        pieces.append(text.add(token))
        return pieces[-1].finish is not None

    def record(self, job: Job, answer: Answer) -> dict[str, Any]:
        line, record = job.line, {"id": job.id}
        growing, pieces = self._growing(job)
        del self._texts[job.id]
        error = None
        if answer.reason == "error":
            error = {"code": "generation_failed", "message": answer.message or "the model failed"}
        elif not pieces or pieces[-1].finish is None:
            pieces.append(growing.end(answer.reason or "stop"))
        text = "".join(piece.text for piece in pieces)
        reason = (pieces[-1].finish if pieces else None) or "stop"
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
            **answer.routed(),
        }

    def _read(self, line: PromptLine) -> GenerationRequest:
        if line.model is not None and line.model not in self._names:
            raise ValueError(f"asks for model {line.model!r}, but this one is {self._name!r}")
        (ids, pictures), sampling = self._encode(line), self._sampling
        sampling = dataclasses.replace(sampling, **line.sampling)
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
            # tensors of all lines would need memory that no budget has
            pictures=place(ids, [dataclasses.replace(one, tensors={}) for one in pictures]),
            returns_routing=line.returns_routing,
        )

    def _stop_ids(self, job: Job) -> frozenset[int]:
        own = frozenset() if job.line.ignore_eos else self.end_ids
        return job.request.stop_ids | own

    def _encode(self, line: PromptLine) -> tuple[list[int], Sequence[Picture]]:
        if isinstance(line.prompt, list):
            return line.prompt, ()
        pictures = None
        if line.messages is not None:
            pictures = self._pictures(line.messages)
            encoded = encode_messages(self.tokenizer, line.messages, pictures)
        else:
            encoded = encode_prompt(self.tokenizer, line.prompt or "", chat=self._chat)
        check_vocabulary(self._config, encoded["input_ids"])
        return encoded["input_ids"][0].tolist(), pictures.pictures if pictures else ()

    def _pictures(self, messages: Sequence[Mapping[str, Any]]) -> Pictures | None:
        contents = (one["content"] for one in messages if isinstance(one["content"], list))
        parts = [part for content in contents for part in content if part["type"] == "image"]
        if not parts:
            return None
        if self._reader is None:
            raise ValueError(f"messages: {self._name} takes no pictures")
        return Pictures(self._reader, self._reader.open_all([part["image"] for part in parts]))

    def _growing(self, job: Job) -> tuple[AnswerText, list[Piece]]:
        if job.id not in self._texts:
            decoded = IncrementalText.of(self.tokenizer)
            least = job.request.min_new_tokens
            text = AnswerText(decoded, job.stops, self._stop_ids(job), least)
            given = job.line.prompt
            if isinstance(given, list) or (given is not None and not self._chat):
                text.follow(job.request.prompt_ids, is_whole=isinstance(given, str))
            self._texts[job.id] = text, []
        return self._texts[job.id]

    def _body(self, job: Job, answer: Answer, text: str, reason: str) -> dict[str, Any]:
        is_chat = job.line.messages is not None
        answer_fields = (
            {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        num_prompt, num_new = len(job.request.prompt_ids), len(answer.token_ids)
        choice = {"index": 0, **answer_fields, "logprobs": None, "finish_reason": reason}
        return {
            "id": job.id.replace("batch_req_", "chatcmpl-" if is_chat else "cmpl-"),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [{**choice, **answer.routed()}],
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

    ``kept`` had an answer before. ``engine`` and ``stats`` are None where there was nothing to do.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Options of `run_batch`; sampling is for lines that say none, None the checkpoint's.

    ``max_tokens`` is what the model is loaded for, None for what `room_for` finds.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """An answer as the file gets it, and what `BatchOutcome` counts."""

    number: int
    record: dict[str, Any]
    is_failed: bool
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int


class BatchWork:
    """Requests that have no answer yet, by number, for what answers them.

    `take` writes answers; ``on_loaded`` is to be called before the first. Answers are given within
    `answering`, which an interrupt ends.
    """

    def __init__(
        self,
        settings: BatchSettings,
        jobs: Mapping[int, Job],
        answers: AnswerFile,
        outcome: BatchOutcome,
        *,
        progress: Progress | None,
        on_loaded: Callable[[int], None],
        on_done: Callable[[BatchOutcome], None],
    ) -> None:
        self.settings = settings
        self.jobs = jobs
        self.progress = progress
        self.outcome = outcome
        self._answers, self._on_loaded, self._on_done = answers, on_loaded, on_done

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self._on_loaded(len(self.jobs))
        started_s = time.perf_counter()
        self.outcome.is_interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            yield
            self.outcome.is_interrupted = False
        self.outcome.seconds = time.perf_counter() - started_s

    def take(self, one: Answered) -> None:
        self._answers.add(one.record)
        outcome = self.outcome
        if one.is_failed:
            outcome.failed += 1
        else:
            outcome.answered += 1
            outcome.prompt_tokens += one.prompt_tokens
            outcome.cached_tokens += one.cached_tokens
            outcome.new_tokens += one.new_tokens
        self._on_done(outcome)


def run_batch(
    text: str,
    settings: BatchSettings,
    *,
    progress: Progress | None = None,
    on_loaded: Callable[[int], None],
    on_done: Callable[[BatchOutcome], None],
    answer: Callable[[BatchWork], None] | None = None,
    on_room: Callable[[int], object] = lambda room: None,
) -> BatchOutcome:
    """Answers what has no answer yet.

    ``on_room`` gets the tokens that the model is loaded for, 0 where there is nothing to answer;
    ``on_loaded`` the number of requests to answer; ``on_done`` is called after each. ``answer``
    answers them elsewhere; by default an engine of this process does.

    Raises:
        ValueError: a line cannot be answered, with its number, or an option is out of range.
        MoERuntimeError: the model cannot be loaded, the output holds something else, or the engine
            failed.
    """
    if settings.engine.exact:
        LossyRules.refuse_exact(settings.loading)
    batch, jobs, sampling = _read(text, settings, progress)
    asked = {job.id: number for number, job in enumerate(jobs)}
    with AnswerFile(settings.output, asked) as answers:
        left = {n: job for n, job in enumerate(jobs) if n not in answers.answered}
        kept = len(jobs) - len(left)
        outcome = BatchOutcome(requests=len(jobs), sampling=sampling, kept=kept)
        room = 0
        if left and answer is None:
            room = room_of(needs_of(left.values()), settings)
        on_room(room)
        if left:
            work = BatchWork(
                settings,
                left,
                answers,
                outcome,
                progress=progress,
                on_loaded=on_loaded,
                on_done=on_done,
            )
            (answer or functools.partial(_answer_here, batch, room))(work)
        if not outcome.is_interrupted:
            answers.finish()
    return outcome


def _read(
    text: str, settings: BatchSettings, progress: Progress | None
) -> tuple[Batch, list[Job], dict[str, Any]]:
    """Checks lines before anything is fetched, and all but their dtype before weights are."""
    top_p = 1.0 if settings.top_p is None else settings.top_p
    check_options(settings.max_new_tokens, settings.temperature or 0.0, top_p, settings.seed)
    lines = read_lines(text, settings.file, max_new_tokens=settings.max_new_tokens)
    batch, own = make_batch(lines, settings, progress)
    checkpoint = open_checkpoint(settings.model, settings.loading["dtype"], progress=progress)
    arithmetic = str(checkpoint.dtype)
    if settings.loading.get("adapter") is not None:
        arithmetic += AdapterFolder(settings.loading["adapter"]).digest()
    return batch, batch.jobs(arithmetic), own


def make_batch(
    lines: Sequence[PromptLine], settings: BatchSettings, progress: Progress | None = None
) -> tuple[Batch, dict[str, Any]]:
    """The requests of lines, and how tokens are chosen by default."""
    folder = find_checkpoint(settings.model, weights=False, progress=progress)
    config = read_generation_config(folder)
    warn_of_unused(config, is_engine=True)
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    own = sampling_for(config, temperature=settings.temperature, top_p=settings.top_p)
    check_options(settings.max_new_tokens, own["temperature"], own["top_p"], settings.seed)
    tokenizer, model_config = load_tokenizer(folder), read_config(folder)
    beside = Path(settings.file).parent
    reader = None
    if settings.loading.get("group") is None:  # several processes take no pictures
        reader = PictureReader.of(folder, model_config, tokenizer, beside=beside)
    batch = Batch(
        lines,
        tokenizer,
        model_config,
        settings.model,
        chat=settings.chat,
        sampling=SamplingOptions(**own, seed=settings.seed, repetition_penalty=penalty),
        stops=stop_strings_of(config),
        reader=reader,
    )
    return batch, own


def needs_of(jobs: Iterable[Job]) -> dict[str, int]:
    """Tokens that each request may have, by its place."""
    return {job.line.place: rounded_up(tokens_of(job.request)) for job in jobs}


def room_of(needs: Mapping[str, int], settings: BatchSettings) -> int:
    """Tokens to load the model for. Raises ValueError: ``max_tokens`` is too few for a request."""
    room = settings.max_tokens
    if room is None:
        sizes, most = list(needs.values()), settings.engine.most_running
        room = room_for(settings.model, sizes, most, settings.loading)
    longest = max(needs, key=needs.__getitem__)
    if room < needs[longest]:
        raise ValueError(
            f"--max-tokens {room} is too small: {longest}, with its answer, may need "
            f"{needs[longest]}"
        )
    return room


def _answer_here(batch: Batch, room: int, work: BatchWork) -> None:
    settings, outcome = work.settings, work.outcome
    loaded: Any = moe_runtime.load(
        settings.model, max_tokens=room, progress=work.progress, **settings.loading
    )
    with contextlib.closing(loaded.moe):
        with work.answering():
            outcome.engine = answer_jobs(loaded, batch, work.jobs, settings.engine, work.take)
        engine = outcome.engine
        outcome.stats = loaded.moe.stats() if engine is None else engine.experts


def answer_jobs(
    loaded: Any,
    batch: Batch,
    jobs: Mapping[int, Job],
    options: EngineOptions,
    take: Callable[[Answered], None],
    news: News | None = None,
) -> EngineStatistics:
    """Answers jobs with a loaded model; ``take`` is called for each, in the caller's thread.

    With ``news``, as of `answer_all`, these are what is answered; ``jobs`` has their jobs by then.
    """
    batch.end_ids = frozenset(end_token_ids(loaded, batch.tokenizer))

    def done(number: int, answer: Answer) -> None:
        take(
            Answered(
                number=number,
                record=batch.record(jobs[number], answer),
                is_failed=answer.reason == "error",
                prompt_tokens=len(jobs[number].request.prompt_ids),
                cached_tokens=answer.cached_tokens,
                new_tokens=len(answer.token_ids),
            )
        )

    return answer_all(
        loaded,
        # with news, jobs that are there already come with them too
        {} if news else {number: batch.request_of(job) for number, job in jobs.items()},
        options,
        on_token=lambda number, token: batch.is_over(jobs[number], token),
        on_answer=done,
        whole=lambda number: batch.whole_request_of(jobs[number]),
        news=news,
    )


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
    names = ("dtype", "cache_code", "kv_cache", "misses", "draft")
    same = {name: loading[name] for name in names}
    summary = inspect_checkpoint(model, max_tokens=wanted, **same)
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
