"""Requests of a file of prompts, ready for an engine, and the records that answer them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError
from moe_runtime.inference.generation import (
    check_length,
    check_vocabulary,
    encode_messages,
    encode_prompt,
)
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.batches.batch_lines import PromptLine
from moe_runtime.serving.batches.offline import Answer
from moe_runtime.serving.http.answers.answer_text import AnswerText, Piece
from moe_runtime.serving.requests import (
    FinishReason,
    GenerationRequest,
    NewToken,
    SamplingOptions,
)

_HASH_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a file.

    Attributes:
        line: that asks it.
        request: for the engine, without the model's own tokens that end an answer.
        id: of its record: made of the model's name and everything that its answer depends on.
        stops: texts that end the answer and are no part of it, the model's own among them.
    """

    line: PromptLine
    request: GenerationRequest
    id: str
    stops: tuple[str, ...]


@dataclass(slots=True)
class _GrowingText:
    """The text of one answer so far, its parts in order, and why it ends, if it does."""

    text: AnswerText
    parts: list[str] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Appends what the text grew by."""
        self.parts.append(piece.text)
        self.finish = piece.finish


class Batch:
    """The requests of a file.

    Args:
        lines: of the file.
        tokenizer: of the model.
        config: of the model.
        model: as it was given.
        chat: puts prompts that are texts into the model's chat template.
        sampling: how tokens are chosen, as far as a line does not say.
        stops: texts with which the model ends its answers.

    Attributes:
        tokenizer: of the model.
        end_ids: tokens with which the model ends its texts; known when it is loaded.

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
        """What the engine is asked."""
        return dataclasses.replace(job.request, stop_ids=self._stop_ids(job))

    def is_over(self, job: Job, token: NewToken) -> bool:
        """Takes a token of an answer; gives whether a stop string ends it here."""
        grown = self._growing(job)
        grown.add(grown.text.add(token))
        return grown.finish is not None

    def record(self, job: Job, answer: Answer) -> dict[str, Any]:
        """The line of an answer, or of what went wrong."""
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
        """The text of an answer so far."""
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
        """As OpenAI's API answers."""
        is_chat = job.line.messages is not None
        told = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        num_prompt, num_new = len(job.request.prompt_ids), len(answer.token_ids)
        return {
            "id": job.id.replace("batch_req_", "chatcmpl-" if is_chat else "cmpl-"),
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [{"index": 0, **told, "logprobs": None, "finish_reason": reason}],
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
