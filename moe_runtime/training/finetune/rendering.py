"""From a record to token ids and targets.

The targets of conversations are the answers of the assistant. The chat template's marks
(`{% generation %}`) show their tokens, or otherwise the difference of rendered prefixes. For that,
a conversation must be rendered with its first messages as a prefix.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeWarning, blamed_on
from moe_runtime.files import make_folders, open_regular
from moe_runtime.inference.routing_replay import decode_routing, require_routing
from moe_runtime.training.data import (
    TokenStreams,
    added_tokens,
    chat_warning,
    find_files,
    keep_ids,
    kept_ids,
    looks_like_chat,
    place_of,
    tokenizer_identity,
    training_files,
)
from moe_runtime.training.examples import Examples
from moe_runtime.training.finetune.records import as_json, read_records
from moe_runtime.training.run_config import DataConfig

Document = tuple[list[int], list[bool]]
"""Token ids, and whether each is a target."""


class Encoded(NamedTuple):
    """A `Document` in 5 bytes a token, and the experts of its first tokens, if given."""

    ids: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.bool_]
    routing: npt.NDArray[np.int16] | None = None


_NO_VARIABLES = frozenset(
    (
        *("conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""Parameters of `apply_chat_template` that are no variables of a template."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_KINDS = (("messages",), ("prompt", "completion"), ("text",), ("input_ids",))


@dataclass
class _Prefixes:
    """The rendered prefixes of one conversation.

    Args:
        render: renders messages as text; `True` adds the beginning of an answer.
    """

    render: Any
    messages: Sequence[Mapping[str, Any]]
    place: str

    def __post_init__(self) -> None:
        self.whole: str = self.render(self.messages, False)

    def answer(self, number: int) -> tuple[int, int]:
        """Begin and end of a message in the text."""
        before = self.messages[:number]
        begin = self.render(before, True)
        end = self._end(number)
        if not (self.whole.startswith(begin) and end is not None and len(begin) <= end):
            raise ValueError(
                f"{self.place}: the chat template writes message {number + 1} otherwise when more "
                "follow, so its tokens cannot be separated; end the conversation with that "
                "answer, or mark answers in the template with {% generation %}"
            )
        return len(begin), end

    def _end(self, number: int) -> int | None:
        upto = self.render(self.messages[: number + 1], False)
        if self.whole.startswith(upto):
            return len(upto)
        # some templates end the last answer differently: render the next message and cut it off
        following = self.messages[number + 1]
        if following.get("role") != "user" or not number:
            return None
        longer = self.render(self.messages[: number + 2], False)
        before = self.render(self.messages[:number], False)
        added = self.render([*self.messages[:number], following], False)
        if not (added.startswith(before) and self.whole.startswith(longer)):
            return None
        last = added[len(before) :]
        return len(longer) - len(last) if last and longer.endswith(last) else None


class Renderer:
    """Makes documents of records with a family's tokenizer and chat template.

    Args:
        stops: tokens that end an answer.
        vocabulary: number of the model's tokens.
        routed_shape: layers with experts, choices of a token and experts of a layer.
    """

    def __init__(
        self,
        tokenizer: Any,
        stops: Iterable[int],
        vocabulary: int,
        routed_shape: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.routed_shape = routed_shape
        self._tokenizer, self._stops = tokenizer, frozenset((*stops, tokenizer.eos_token_id))
        self._vocabulary = vocabulary
        added = added_tokens(tokenizer)
        middle = added.index(None)
        end = [] if added[-1] == tokenizer.eos_token_id else [tokenizer.eos_token_id]
        self._before, self._after = added[:middle], [*added[middle + 1 :], *end]

    def document(self, place: str, record: Mapping[str, Any]) -> Document:
        """The ids of a record with BOS and EOS, and whether each is a target.

        Args:
            place: of the record, for error messages.

        Raises:
            ValueError: the record is not of one known kind, its template fails or has no clear
                answers.
        """
        _check_kind(place, record)
        if "messages" in record:
            return self._conversation(place, record, _messages(place, record["messages"]), 0)
        if "prompt" in record and "completion" in record:
            first, second = record["prompt"], record["completion"]
            if isinstance(first, list) and isinstance(second, list):
                asked = _messages(place, first)
                both = [*asked, *_messages(place, second)]
                return self._conversation(place, record, both, len(asked))
            ids = [*self._before, *self._encode(_text(place, first, "prompt"))]
            answer = [*self._encode(_text(place, second, "completion")), *self._after]
            return [*ids, *answer], [False] * len(ids) + [True] * len(answer)
        if "input_ids" in record:
            return _given(place, record, self._vocabulary)
        text = self._encode(_text(place, record["text"], "text"))
        ids = [*self._before, *text, *self._after]
        return ids, [True] * len(ids)

    def identity(self) -> str:
        """Everything in this object that documents depend on."""
        own = tokenizer_identity(self._tokenizer).decode(errors="replace")
        templates = self._tokenizer.chat_template
        return json.dumps([own, templates, sorted(self._stops, key=str), self._vocabulary])

    def _encode(self, text: str) -> list[int]:
        with blamed_on("the tokenizer cannot encode the text"):
            return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _conversation(
        self, place: str, record: Mapping[str, Any], messages: list[dict[str, Any]], first: int
    ) -> Document:
        """A conversation; `first` is the number of the first message that may be a target."""
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"{place}: has messages, and the model's tokenizer has no chat template; write "
                "them as prompt and completion"
            )
        said = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
        if not said:
            raise ValueError(f"{place}: has no message of the assistant, so nothing to train on")
        weights = [message.pop("weight", 1) for message in messages]
        answers = [number for number in said if weights[number]]
        tools = as_json(record.get("tools"), place, "tools") or None
        if not isinstance(tools, list | None):
            raise ValueError(f"{place}: expected a list as tools, got {clipped(tools)}")
        settings = as_json(record.get("chat_template_kwargs"), place, "chat_template_kwargs") or {}
        if not isinstance(settings, dict):
            raise ValueError(f"{place}: chat_template_kwargs must be an object of variables")
        if own := sorted(_NO_VARIABLES & settings.keys()):
            raise ValueError(f"{place}: chat_template_kwargs cannot set {own[0]}, only variables")
        failing = f"{place}: the chat template cannot be used"
        with blamed_on(failing):
            template = self._tokenizer.get_chat_template(tools=tools)
        if _MARKS.search(template) and not first:
            with blamed_on(failing):
                found = self._tokenizer.apply_chat_template(
                    messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True,
                    tokenizer_kwargs={"verbose": False}, **settings,
                )  # fmt: skip
            marks = found["assistant_masks"]
            return list(found["input_ids"]), _weighted(place, marks, [weights[n] for n in said])

        def render(part: Sequence[Mapping[str, Any]], begins: bool) -> str:
            with blamed_on(failing):
                return self._tokenizer.apply_chat_template(
                    part, tools=tools, tokenize=False, add_generation_prompt=begins, **settings
                )

        if answers[:1] == [0]:
            raise ValueError(
                f"{place}: begins with an answer, which can be told from the rest only in a "
                "template with marks; begin with a message of the user, or give it a weight of 0"
            )
        prefixes = _Prefixes(render, messages, place)
        return self._by_prefixes(prefixes.whole, [prefixes.answer(number) for number in answers])

    def _by_prefixes(self, text: str, answers: Iterable[tuple[int, int]]) -> Document:
        with blamed_on("the tokenizer cannot encode the text"):
            found = self._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
        ids: list[int] = list(found["input_ids"])
        begins = [begin for begin, _ in found["offset_mapping"]]
        trained = [False] * len(ids)
        for begin, end in answers:
            low, high = (bisect.bisect_left(begins, place) for place in (begin, end))
            stops = [number for number in range(low, high) if ids[number] in self._stops]
            if stops:  # the model never writes the template's text after a stop token
                high = stops[-1] + 1
            elif high < len(ids) and ids[high] in self._stops:
                high += 1  # in some families the next message's first token ends an answer
            elif high == len(ids):
                ids.append(self._tokenizer.eos_token_id)
                trained.append(True)
            trained[low:high] = [True] * (high - low)
        return ids, trained


def _weighted(place: str, marks: Sequence[int], weights: Sequence[float]) -> list[bool]:
    """Marked tokens are targets, except those of answers with a weight of 0."""
    begins = np.diff(marks, prepend=0) > 0
    if not all(weights) and begins.sum() != len(weights):
        raise ValueError(
            f"{place}: the chat template marks {begins.sum()} parts of {len(weights)} answers, so "
            "those with a weight of 0 cannot be told from the others"
        )
    answer = np.cumsum(begins) - 1
    return [
        bool(own and (all(weights) or weights[n])) for own, n in zip(marks, answer, strict=True)
    ]


def parts_of(tokenizer: Any, examples: Examples, number: int) -> list[tuple[str, bool]]:
    """The text of a document in parts, and whether each part is a target."""
    place = examples.document(number)
    ids, trained = examples.ids[place].tolist(), examples.trained[place].tolist()
    trained[0] = False
    ends = [n + 1 for n in range(len(ids)) if n + 1 == len(ids) or trained[n] != trained[n + 1]]
    with blamed_on("the tokenizer cannot decode its tokens"):
        return [
            (tokenizer.decode(ids[begin:end], clean_up_tokenization_spaces=False), trained[begin])
            for begin, end in zip([0, *ends], ends, strict=False)
        ]


def _check_kind(place: str, record: Mapping[str, Any]) -> None:
    found = ["/".join(kind) for kind in _KINDS if all(name in record for name in kind)]
    if len(found) > 1:
        raise ValueError(
            f"{place}: has {' and '.join(found)}, and each defines the targets; keep only one"
        )
    if not found:
        pair = {"prompt": "completion", "completion": "prompt"}
        missing = [f"{other} is missing; " for name, other in pair.items() if name in record]
        raise ValueError(
            f"{place}: {''.join(missing)}expected messages, prompt and completion, text, or "
            f"input_ids, got {'the keys ' + ', '.join(record) if record else 'an empty record'}"
        )


def _given(place: str, record: Mapping[str, Any], vocabulary: int) -> Document:
    ids, labels = record["input_ids"], record.get("labels", record["input_ids"])
    for what, value in (("input_ids", ids), ("labels", labels)):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{place}: expected a list of numbers as {what}, got {clipped(value)}")
    if len(ids) != len(labels):
        raise ValueError(
            f"{place}: expected as many labels as input_ids, got {len(labels)} of {len(ids)}"
        )
    for own in ids:
        if type(own) is not int or not 0 <= own < vocabulary:
            raise ValueError(
                f"{place}: input_ids has {clipped(own)}, expected whole numbers below "
                f"{vocabulary}, the tokens of the model's vocabulary"
            )
    trained = [label != -100 for label in labels]
    for own, label, is_target in zip(ids, labels, trained, strict=True):
        if is_target and own != label:
            raise ValueError(f"{place}: expected labels of input_ids or -100, got {label} at {own}")
    return list(ids), trained


def _routing(
    place: str, record: Mapping[str, Any], num_ids: int, expected: tuple[int, int, int]
) -> npt.NDArray[np.int16] | None:
    """Experts of the first tokens for `replay_routing`: `[N, layers * choices]`."""
    if (given := record.get("routed_experts")) is None:
        return None
    if "input_ids" not in record:
        raise ValueError(f"{place}: routed_experts are of input_ids, which the record has not")
    try:
        with blamed_on("routed_experts cannot be read", ValueError):
            found = decode_routing(given)
        num_tokens, *shape = found.shape
        if num_tokens > len(record["input_ids"]) or tuple(shape) != expected[:2]:
            raise ValueError(
                f"expected routed_experts of {len(record['input_ids'])} tokens at most, "
                f"{expected[0]} layers and {expected[1]} choices, got {list(found.shape)}"
            )
        require_routing(torch.from_numpy(found.astype(np.int64)), expected[2])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return found[:num_ids].reshape(min(len(found), num_ids), -1).astype(np.int16)


def _text(place: str, value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected text as {what}, got {type(value).__name__}")
    return value


def _messages(place: str, given: Any) -> list[dict[str, Any]]:
    """Messages for templates: contents as text, arguments of tools as objects."""
    given = as_json(given, place, "messages")
    if not isinstance(given, list) or not given:
        came = "an empty list" if given == [] else type(given).__name__
        raise ValueError(f"{place}: expected a list of messages, got {came}")
    found = []
    for number, message in enumerate(given, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"{place}: message {number} has no role; expected role and content")
        found.append(message := {n: v for n, v in message.items() if v is not None})
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(
                f"{place}: message {number} has a weight of {clipped(message['weight'])}, expected "
                "0 (not trained on) or 1"
            )
        if "content" in message:
            message["content"] = _joined(f"{place}: message {number}", message["content"])
        if calls := as_json(message.get("tool_calls"), place, "tool_calls"):
            if not isinstance(calls, list):
                raise ValueError(f"{place}: expected a list as tool_calls, got {clipped(calls)}")
            message["tool_calls"] = [_call(place, call) for call in calls]
    return found


def _joined(place: str, content: Any) -> str:
    """The text of a message's parts, joined as in the server."""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        is_text = isinstance(part, dict) and part.get("type", "text") == "text"
        text = part.get("text") if is_text else part
        if not isinstance(text, str):
            raise ValueError(f"{place} has content that is not text: {clipped(part)}")
        texts.append(text)
    return "\n".join(texts)


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ValueError(f"{place}: expected tool_calls with a function, got {call!r:.60}")
    arguments = as_json(function.get("arguments"), place, "arguments of a tool")
    return {**call, "function": {**function, "arguments": arguments}}


def encode_records(
    data: DataConfig,
    name: str,
    renderer: Renderer,
    *,
    shares_rows: bool,
    cache: Path | None = None,
    keeps: bool = True,
) -> TokenStreams:
    """The documents of a source's files, for training and held out.

    The cache has files that were rendered before with the same settings, so that a date in a
    template does not change a resumed run.

    The records of `held_out_files`, if given, are held out. Otherwise digests of the documents
    choose a share, so that more records never move an old one to the other side. At least one
    document stays in training.

    Warns of documents that are longer than a row and cut.

    Args:
        cache: folder of rendered documents.
        keeps: write new ones there.
    """
    source = data.sources[name]
    files = [
        training_files(name, source, data, Path()),
        find_files(name, source.held_out_files, Path()),
    ]
    path = None
    if cache is not None:
        asked = [
            _FORMAT,
            renderer.identity(),
            data.context,
            data.held_out_share,
            shares_rows,
            *map(len, files),
        ]
        parts = [_digest(file) for own in files for file in own]
        key = hashlib.sha256(json.dumps([*asked, *parts]).encode()).hexdigest()[:16]
        path = cache / f"{name}-records-{key}.npy"
        if (kept := kept_ids(path)) is not None:
            sides, notes = _unpacked(kept)
            _warn_of(notes)
            return _streams(sides, shares_rows)
    notes = []
    training = _fitting(files[0], renderer, data.context, notes)
    held_out: list[Encoded] = []
    if source.held_out_files:
        held_out = _fitting(files[1], renderer, data.context, notes)
    elif data.held_out_share:
        places = [place_of(own.ids.astype(np.int64).tobytes()) for own in training]
        both = list(zip(places, training, strict=True))
        share = min(data.held_out_share, max(places))
        held_out = [own for place, own in both if place < share]
        training = [own for place, own in both if place >= share]
    _warn_of(notes)
    has_routing = any(own.routing is not None for own in (*training, *held_out))
    if path is not None and keeps and not has_routing:
        make_folders(path.parent)
        keep_ids(path, _packed([training, held_out], notes))
    return _streams([training, held_out], shares_rows)


def _streams(documents: Sequence[Sequence[Encoded]], shares_rows: bool) -> TokenStreams:
    sides = [
        Examples.of(
            [own[:2] for own in side], shares_rows=shares_rows, routings=[own[2] for own in side]
        )
        for side in documents
    ]
    found = hashlib.sha256(b"".join(side.digest() for side in sides)).hexdigest()[:16]
    return TokenStreams(sides[0], sides[1], found)


_FORMAT = 3
"""Of cached rows, and of the way from records to rows: another format renders again."""
_TARGET = 1 << 31
"""Marks an id that is a target."""


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()


def _packed(
    sides: Sequence[Sequence[Encoded]], notes: Sequence[str] = ()
) -> npt.NDArray[np.uint32]:
    """Both sides' numbers of documents, lengths, ids, and warnings as text."""
    every = [own for side in sides for own in side]
    head = [*map(len, sides), *(len(own.ids) for own in every)]
    marked = [np.where(own.trained, own.ids | np.uint32(_TARGET), own.ids) for own in every]
    text = np.frombuffer("\n".join(notes).encode(), np.uint8)
    return np.concatenate([np.array(head, np.uint32), *marked, text.astype(np.uint32)])


def _unpacked(stream: npt.NDArray[Any]) -> tuple[list[list[Encoded]], list[str]]:
    first, second = map(int, stream[:2])
    ends = 2 + first + second + np.cumsum(stream[2 : 2 + first + second], dtype=np.int64)
    _, *found, text = np.split(stream, [2 + first + second, *ends])
    pairs = [Encoded(own & np.uint32(_TARGET - 1), own >= _TARGET) for own in found]
    notes = text.astype(np.uint8).tobytes().decode().splitlines()
    return [pairs[:first], pairs[first:]], notes


def _warn_of(notes: Iterable[str]) -> None:
    for line in notes:
        warnings.warn(line, MoERuntimeWarning, stacklevel=3)


def _fitting(
    paths: Sequence[Path], renderer: Renderer, context: int, notes: list[str]
) -> list[Encoded]:
    """Documents with targets, cut to the length of a row; appends warnings to `notes`."""
    found: list[Encoded] = []
    num_cut = num_empty = 0
    chat = ""
    for place, record in read_records(paths):
        ids, trained = renderer.document(place, record)
        if not chat and "text" in record and looks_like_chat(record["text"]):
            chat = place
        num_cut += len(ids) > context + 1
        ids, trained = ids[: context + 1], trained[: context + 1]
        if any(trained[1:]):
            routing = _routing(place, record, len(ids), renderer.routed_shape)
            found.append(Encoded(np.array(ids, np.uint32), np.array(trained), routing))
        else:
            num_empty += 1
    if chat:
        notes.append(chat_warning(chat))
    files = f"{paths[0]}" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more files"
    if not found and not num_empty:
        raise ValueError(f"{files}: no record there, expected at least one")
    number = f"of {len(found) + num_empty:,} records"
    if not found:
        raise ValueError(f"{files}: none {number} has a target in the first {context + 1:,} tokens")
    cut = f"{num_cut:,} {number} are longer than the context of {context:,} tokens and were cut"
    empty = f"{num_empty:,} {number} have nothing to train on and were left out"
    if lines := [line for line, count in ((cut, num_cut), (empty, num_empty)) if count]:
        notes.append("; ".join(lines))
    return found
