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
from moe_runtime.config import STAND_IN, parse_budget
from moe_runtime.errors import CheckpointError, text_of
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
    """One request of a file.

    Attributes:
        place: file and line, for messages.
        prompt: a text or token ids; None where there are ``messages``.
        custom_id: of a line in OpenAI's batch format.
        sampling: fields of `SamplingOptions` that the line gives.
    """

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
    found: list[PromptLine] = []
    first_with: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{file}, line {number}"
        try:
            found.append(_read_line(line, place, max_new_tokens))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        custom_id = found[-1].custom_id
        if custom_id is not None and (first := first_with.setdefault(custom_id, number)) != number:
            raise ValueError(f"{place}: custom_id {custom_id!r} is that of line {first} too")
    if not found:
        raise ValueError(f"{file}: holds no prompts, expected one a line")
    return found


def _read_line(line: str, place: str, max_new_tokens: int) -> PromptLine:
    try:
        value = parse_value(line.encode())
    except json.JSONDecodeError as error:
        reason = f"{error.msg[:1].lower()}{error.msg[1:].removesuffix(' at')}"
        reason += f" at character {error.pos + 1}"
        raise ValueError(f"expected JSON, found {reason}") from None
    except UnicodeEncodeError:
        raise ValueError("expected JSON, found half a surrogate pair, which is not text") from None
    except ValueError as error:
        raise ValueError(f"expected JSON, found {error}") from None
    body = {"prompt": value} if isinstance(value, str) else value
    _require(isinstance(body, dict), "expected a JSON string or an object", body)
    custom_id, key = None, "prompt" if "prompt" in body else "messages"
    if "custom_id" in body or "body" in body:
        custom_id, key, body = _unwrap(body)
    given: dict[str, Any] = {name: item for name, item in body.items() if item is not None}
    _check_fields(given, key)
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
        place=place,
        prompt=_prompt_of(given["prompt"]) if key == "prompt" else None,
        messages=_messages_of(given["messages"]) if key == "messages" else None,
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
        raise ValueError(f"{name} is not a field of OpenAI's batch format")
    custom_id, url, body = value["custom_id"], value["url"], value["body"]
    _require(isinstance(custom_id, str) and custom_id, "custom_id: expected text", custom_id)
    _require(value["method"] == "POST", "method: expected POST", value["method"])
    _require(url in (CHAT_URL, TEXT_URL), f"url: expected {CHAT_URL} or {TEXT_URL}", url)
    _require(isinstance(body, dict), "body: expected an object", body)
    return custom_id, "messages" if url == CHAT_URL else "prompt", body


def _check_fields(given: Mapping[str, Any], key: str) -> None:
    if key not in given:
        raise ValueError(f"{key} is missing")
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
        elif name != key:
            known = ", ".join(sorted({*_FIELDS, key}))
            raise ValueError(f"{name} is not supported; known are {known}")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise ValueError("max_tokens is the old name of max_completion_tokens; give one")
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
    SamplingOptions(**values)  # checks the ranges
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
_EXACT: Mapping[str, Any] = {
    **{"activations": "exact", "kv_cache": "exact", "misses": "device"},
    **{"routing": "exact", "skip_below": 0.0},
}
"""Options of `moe_runtime.load` that lose precision, and their values that lose none."""
ROOM_SHARE = 4
"""If experts lack room, tokens get a fourth of the budget without the dense weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """Options of `run_batch`.

    Attributes:
        temperature, top_p, seed: for lines that give none; None for the checkpoint's.
        loading: options of ``moe_runtime.load``.
        max_tokens: that the model is loaded for; None for what `room_of` finds.
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

    def check_sampling(self, temperature: float, top_p: float) -> None:
        check_options(self.max_new_tokens, temperature, top_p, self.seed)


@dataclass(frozen=True, slots=True)
class Job:
    """A request and the ``id`` of its answer: a digest of the model's name and of everything that
    the answer depends on."""

    line: PromptLine
    request: GenerationRequest
    id: str
    stops: tuple[str, ...]


class Batch:
    """The requests of lines, their texts and answers.

    Attributes:
        sampling: how tokens are chosen where a line says nothing.
        end_ids: tokens that end an answer; known when the model is loaded.

    Raises:
        ValueError: a line asks for another model, or more than the model can do; with its number.
        CheckpointError: the tokenizer or its chat template fails.
    """

    def __init__(
        self,
        lines: Sequence[PromptLine],
        settings: BatchSettings,
        progress: Progress | None = None,
    ) -> None:
        folder = find_checkpoint(settings.model, weights=False, progress=progress)
        config = read_generation_config(folder)
        warn_of_unused(config, is_engine=True)
        self.sampling = sampling_for(config, temperature=settings.temperature, top_p=settings.top_p)
        settings.check_sampling(self.sampling["temperature"], self.sampling["top_p"])
        self.tokenizer, self._config = load_tokenizer(folder), read_config(folder)
        self.end_ids: frozenset[int] = frozenset()
        self._reader = None
        if settings.loading.get("group") is None:  # several processes take no pictures
            beside = Path(settings.file).parent
            self._reader = PictureReader.of(folder, self._config, self.tokenizer, beside=beside)
        path = Path(settings.model)
        self._name = path.resolve().name if path.exists() else settings.model
        self._names = {settings.model, self._name}
        self._chat = settings.chat
        penalty = getattr(config, "repetition_penalty", None) or 1.0
        self._defaults = SamplingOptions(
            **self.sampling, seed=settings.seed, repetition_penalty=penalty
        )
        self._stops = tuple(stop_strings_of(config))
        self._texts: dict[str, tuple[AnswerText, list[Piece]]] = {}
        self._requests: list[tuple[PromptLine, GenerationRequest]] = []
        for line in lines:
            try:
                self._requests.append((line, self._read(line)))
            except (ValueError, OSError) as error:
                raise ValueError(f"{line.place}: {text_of(error)}") from None
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

    def request_of(self, job: Job, *, with_tensors: bool = False) -> GenerationRequest:
        """The engine's request of a job, if asked with the tensors of its pictures.

        Raises:
            ValueError: a picture has changed since the line was read.
        """
        request = dataclasses.replace(job.request, stop_ids=self._stop_ids(job))
        pictures = self._pictures(job.line.messages or ()) if with_tensors else None
        if pictures is None:
            return request
        digests = [one.picture.digest for one in request.pictures]
        if digests != [picture.digest for picture in pictures.pictures]:
            raise ValueError(f"{job.line.place}: a picture has changed since: start again")
        placed = place(request.prompt_ids, pictures.pictures)
        return dataclasses.replace(request, pictures=placed)

    def add_token(self, job: Job, token: NewToken) -> bool:
        """Takes a token of an answer; gives whether a stop string ends the answer here."""
        text, pieces = self._growing(job)
        pieces.append(text.add(token))
        return pieces[-1].finish is not None

    def record(self, job: Job, answer: Answer) -> dict[str, Any]:
        """The line of an answer in the output, as an object of JSON."""
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
        ids, pictures = self._encode(line)
        sampling = dataclasses.replace(self._defaults, **line.sampling)
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


@dataclass(kw_only=True, slots=True)
class BatchOutcome:
    """Counts of a file's requests.

    Attributes:
        kept: requests that had an answer before.
        engine, stats: None where there was nothing to do.
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


Answered = tuple[int, dict[str, Any], Answer]
"""The number of a job, its record for the output, and its answer."""


@dataclass(kw_only=True, eq=False)
class BatchWork:
    """Requests that have no answer yet, by number, and where their answers go.

    Call ``on_loaded`` before the first answer. Give answers within `answering`, which an interrupt
    ends.
    """

    settings: BatchSettings
    jobs: Mapping[int, Job]
    outcome: BatchOutcome
    answers: AnswerFile
    progress: Progress | None
    on_loaded: Callable[[int], None]
    on_done: Callable[[BatchOutcome], None]

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self.on_loaded(len(self.jobs))
        started_s = time.perf_counter()
        self.outcome.is_interrupted = True
        with contextlib.suppress(KeyboardInterrupt):
            yield
            self.outcome.is_interrupted = False
        self.outcome.seconds = time.perf_counter() - started_s

    def take(self, answered: Answered) -> None:
        """Writes an answer and counts it."""
        number, record, answer = answered
        self.answers.add(record)
        outcome = self.outcome
        if answer.reason == "error":
            outcome.failed += 1
        else:
            outcome.answered += 1
            outcome.prompt_tokens += len(self.jobs[number].request.prompt_ids)
            outcome.cached_tokens += answer.cached_tokens
            outcome.new_tokens += len(answer.token_ids)
        self.on_done(outcome)


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
    """Answers the requests of a file that have no answer yet.

    Args:
        on_loaded: called with the number of requests to answer.
        on_done: called after each answer.
        answer: answers the requests elsewhere; by default an engine of this process does.
        on_room: called with the tokens that the model is loaded for; 0 if nothing is to answer.

    Raises:
        ValueError: a line cannot be answered, with its number, or an option is out of range.
        MoERuntimeError: the model cannot be loaded, the output holds something else, or the engine
            failed.
    """
    if settings.engine.exact:
        LossyRules.refuse_exact(settings.loading)
    # lines are checked before the model is fetched, and all but its dtype before weights are
    settings.check_sampling(
        settings.temperature or 0.0, 1.0 if settings.top_p is None else settings.top_p
    )
    lines = read_lines(text, settings.file, max_new_tokens=settings.max_new_tokens)
    batch = Batch(lines, settings, progress)
    checkpoint = open_checkpoint(settings.model, settings.loading["dtype"], progress=progress)
    jobs = batch.jobs(_arithmetic_of(str(checkpoint.dtype), settings.loading))
    with AnswerFile(settings.output, {job.id: n for n, job in enumerate(jobs)}) as answers:
        left = {n: job for n, job in enumerate(jobs) if n not in answers.answered}
        outcome = BatchOutcome(
            requests=len(jobs), sampling=batch.sampling, kept=len(jobs) - len(left)
        )
        is_here = bool(left) and answer is None
        room = room_of(needs_of(left.values()), settings) if is_here else 0
        on_room(room)
        if left:
            work = BatchWork(
                settings=settings,
                jobs=left,
                outcome=outcome,
                answers=answers,
                progress=progress,
                on_loaded=on_loaded,
                on_done=on_done,
            )
            (answer or functools.partial(_answer_here, batch, room))(work)
        if not outcome.is_interrupted:
            answers.finish()
    return outcome


def _arithmetic_of(dtype: str, loading: Mapping[str, Any]) -> str:
    """What the answers of a model depend on besides its weights: type, adapter, lossy options."""
    found = dtype
    if loading.get("adapter") is not None:
        found += AdapterFolder(loading["adapter"]).digest()
    lossy = {name: loading.get(name, exact) for name, exact in _EXACT.items()}
    lossy["misses"] = STAND_IN if loading.get("misses") == STAND_IN else "device"
    changed = {name: value for name, value in lossy.items() if value != _EXACT[name]}
    return found + (json.dumps(changed) if changed else "")


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

    With ``news``, as of `answer_all`, only the requests in it are answered; ``jobs`` must have
    their jobs by then.
    """
    batch.end_ids = frozenset(end_token_ids(loaded, batch.tokenizer))
    return answer_all(
        loaded,
        {} if news else {number: batch.request_of(job) for number, job in jobs.items()},
        options,
        on_token=lambda number, token: batch.add_token(jobs[number], token),
        on_answer=lambda number, answer: take((number, batch.record(jobs[number], answer), answer)),
        whole=lambda number: batch.request_of(jobs[number], with_tensors=True),
        news=news,
    )


def needs_of(jobs: Iterable[Job]) -> dict[str, int]:
    """Tokens that each request may have, by its place."""
    return {job.line.place: rounded_up(tokens_of(job.request)) for job in jobs}


def room_of(needs: Mapping[str, int], settings: BatchSettings) -> int:
    """Tokens to load the model for.

    The longest requests that may run together get room if all experts fit in addition, or if it
    takes at most one part in `ROOM_SHARE` of the budget. The longest request always gets room.

    Raises:
        ValueError: ``max_tokens`` is too few for a request.
    """
    longest_first = sorted(needs.values(), reverse=True)
    wanted, longest = sum(longest_first[: settings.engine.most_running]), longest_first[0]
    if (room := settings.max_tokens) is not None:
        if room < longest:
            named = max(needs, key=needs.__getitem__)
            raise ValueError(
                f"--max-tokens {room} is too small: {named}, with its answer, may need {longest}"
            )
        return room
    if wanted == longest:
        return wanted
    loading = settings.loading
    names = ("dtype", "cache_code", "kv_cache", "misses", "draft")
    same = {name: loading[name] for name in names}
    summary = inspect_checkpoint(settings.model, max_tokens=wanted, **same)
    device = loading["device"]
    if device != "cpu" and (device != "auto" or torch.cuda.is_available()):
        place = torch.device("cuda" if device == "auto" else device)
        budget, free = loading["device_memory"], available_device_bytes(place)
    else:
        budget, free = loading["host_memory"], available_host_bytes()
    budget_bytes = resolve_budget(parse_budget(budget, name="memory"), free, "this machine")
    for_experts = budget_bytes - summary.dense_bytes
    if for_experts - summary.reserve_bytes >= summary.total_experts * summary.slot_bytes:
        return wanted
    return max(longest, min(wanted, for_experts // (ROOM_SHARE * summary.token_bytes)))
