"""Lines of a file of prompts, plain or in OpenAI's batch format: what each asks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.checkpoints.strict_json import parse_value
from moe_runtime.serving.requests import SamplingOptions

CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
_SAMPLING: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "seed": (int,),
}
_OTHERS: dict[str, tuple[type, ...]] = {
    "max_tokens": (int,),
    "max_completion_tokens": (int,),
    "min_tokens": (int,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "ignore_eos": (bool,),
    "logit_bias": (dict,),
    "model": (str,),
    "user": (str,),
    "metadata": (dict,),
}
_WITHOUT_EFFECT: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "stream": False, "logprobs": False, "echo": False, "store": False},
    "tools": [],
}
"""Fields that may be given with these values only."""
_WORDS = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "an object"}
_LONGEST_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """What one line asks.

    Attributes:
        place: file and line, for messages.
        prompt: a text, or token ids; None where there are messages.
        custom_id: of a line in OpenAI's batch format; None for a plain one.
        sampling: fields of `SamplingOptions` that the line gives.
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


def read_lines(text: str, file: str, *, max_new_tokens: int) -> list[PromptLine]:
    """All requests of a file; blank lines are none.

    Raises:
        ValueError: a line is no request, with its number; or there is none at all.
    """
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
    limits = [given.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most_new = _at_least_1(next((n for n in limits if n is not None), max_new_tokens))
    if (least := given.get("min_tokens", 0)) > most_new:
        raise ValueError(f"min_tokens: expected at most the {most_new} of the answer, got {least}")
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
        stops=_stops_of(given.get("stop", [])),
        stop_ids=frozenset(_ids_of(given.get("stop_token_ids", []), "stop_token_ids")),
        ignore_eos=given.get("ignore_eos", False),
    )


def _unwrap(value: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    known = {"custom_id", "method", "url", "body"}
    for name in known - value.keys():
        raise ValueError(f"{name} is missing, which OpenAI's batch format has")
    for name in value.keys() - known:
        raise ValueError(f"{name} is no field of OpenAI's batch format")
    custom_id, body = value["custom_id"], value["body"]
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"custom_id: expected text, got {_shown(custom_id)}")
    if value["method"] != "POST":
        raise ValueError(f"method: expected POST, got {_shown(value['method'])}")
    if value["url"] not in (CHAT_URL, TEXT_URL):
        raise ValueError(f"url: expected {CHAT_URL} or {TEXT_URL}, got {_shown(value['url'])}")
    if not isinstance(body, dict):
        raise ValueError(f"body: expected an object, got {_shown(body)}")
    return custom_id, "messages" if value["url"] == CHAT_URL else "prompt", body


def _check_fields(given: Mapping[str, Any], asked: str) -> None:
    known = {**_SAMPLING, **_OTHERS, asked: (object,)}
    if asked not in given:
        raise ValueError(f"{asked} is missing")
    if {"prompt", "messages"} <= given.keys():
        raise ValueError("has a prompt and messages, expected one of the two")
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            # 0 is no false, and true is no 1: log-probabilities may be asked for by a 0.
            if type(value) is type(_WITHOUT_EFFECT[name]) and value == _WITHOUT_EFFECT[name]:
                continue
            only = json.dumps(_WITHOUT_EFFECT[name])
            raise ValueError(f"{name} may only be {only} here, got {_shown(value)}")
        if name not in known:
            raise ValueError(f"{name} is not supported; known are {', '.join(sorted(known))}")
        if asked != name and type(value) not in known[name]:
            expected = " or ".join(_WORDS.get(kind, "true or false") for kind in known[name])
            raise ValueError(f"{name}: expected {expected}, got {_shown(value)}")
    if given.get("min_tokens", 0) < 0:
        raise ValueError(f"min_tokens must be at least 0, got {given['min_tokens']}")


def _sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: given[name] for name in _SAMPLING if name in given}
    if values.get("top_k") == -1:
        values["top_k"] = 0
    bias = {}
    for token, number in given.get("logit_bias", {}).items():
        if not (token.isascii() and token.isdigit()) or type(number) not in (int, float):
            raise ValueError(f"logit_bias: expected token ids and numbers, got {_shown(token)}")
        bias[int(token)] = float(number)
    if bias:
        values["logit_bias"] = bias
    SamplingOptions(**values)  # refuses what is out of range
    return values


def _at_least_1(max_tokens: int) -> int:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return max_tokens


def _stops_of(stop: str | list[Any]) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    if not all(isinstance(one, str) and one for one in stops):
        raise ValueError(f"stop: expected a text or a list of texts, got {_shown(stop)}")
    return tuple(stops)


def _ids_of(ids: Sequence[Any], name: str) -> list[int]:
    if not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f"{name}: expected token ids, got {_shown(ids)}")
    return list(ids)


def _prompt_of(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt:
        return _ids_of(prompt, "prompt")
    raise ValueError(f"prompt: expected a text or token ids, got {_shown(prompt)}")


def _messages_of(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: expected a list of messages, got {_shown(messages)}")
    return [_message_of(one) for one in messages]


def _message_of(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: expected objects with role and content, got {_shown(message)}")
    for name in message.keys() - {"role", "content", "name"}:
        raise ValueError(f"messages: {name} is not supported; known are role, content, name")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_texts_of(content))
    if not isinstance(content, str):
        raise ValueError(f"messages: content must be text, got {_shown(content)}")
    return {**message, "content": content}


def _texts_of(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise ValueError(f"messages: parts of content must be text, got {_shown(part)}")
        yield text


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
