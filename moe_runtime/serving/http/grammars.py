"""Grammars that answers keep to: JSON, a JSON schema, a grammar in Lark, calls of tools."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import llguidance
import llguidance.hf
import numpy as np

from moe_runtime.errors import blamed_on
from moe_runtime.serving.http.answers.answer_sections import ReasoningMarks
from moe_runtime.serving.http.answers.tool_formats import ToolFormat
from moe_runtime.serving.http.api_errors import ApiError, FieldError
from moe_runtime.serving.http.grammar_trial import compile_grammar, stack_bytes
from moe_runtime.serving.http.limited_process import LimitedProcess, LimitError
from moe_runtime.serving.http.models.vocabulary import Vocabulary
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.requests import ConstraintError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_CHARACTERS = 1 << 17
_COMPILE_S, _COMPILE_BYTES = 2.0, 128 << 20
"""What a grammar may take of a processor, and of memory beside the stack that it is compiled on."""
_VOCABULARY_S, _VOCABULARY_BYTES = 60.0, 2 << 30
_QUICK_MASK_S, _SLOW_MASKS_S = 0.05, 2.0
"""Masks are computed in the thread of all requests: those of one answer may take so long beyond."""
_MOST_KEPT = 16
_ANY_OBJECT = {"type": "object"}
_LINES = {"whitespace_pattern": r"[ \t\r\n]{0,40}"}
"""Room for indented JSON; without an end a model that found no next word would write spaces."""
_BARE_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
"""A slash that no backslash stands before, or a character that one does."""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As chat templates show calls."""


class GrammarConstraint:
    """What a grammar allows after the tokens of one answer; a `TokenConstraint`.

    Args:
        matcher: of the grammar, for this answer alone.
        vocabulary: of the model.
        clock: seconds of a processor that this thread took.
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: Vocabulary,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._slow_s = 0.0
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._num_taken = 0
        self.is_exhausted = False

    def allowed(self, generated_ids: Sequence[int]) -> Tensor | None:
        """The tokens that may come next: bool ``[V]``."""
        import torch

        if len(generated_ids) < self._num_taken:
            self._matcher.reset()
            self._num_taken = 0
        self._matcher.consume_tokens(list(generated_ids[self._num_taken :]))
        self._num_taken = len(generated_ids)
        started_s = self._clock()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._slow_s += max(0.0, self._clock() - started_s - _QUICK_MASK_S)
        if self._slow_s > _SLOW_MASKS_S:
            raise ConstraintError("its tokens take too long to find; give a simpler grammar")
        if (problem := _dead_end(self._matcher)) is not None:
            raise ConstraintError(problem)
        self.is_exhausted = self._matcher.is_stopped()
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].astype(bool)
        return torch.from_numpy(allowed)


class Grammars:
    """Compiles grammars for one vocabulary.

    Args:
        vocabulary: of the model; what of it is needed is made at the first grammar.
        process: where grammars are tried within limits; None where they are one's own.
    """

    def __init__(self, vocabulary: Vocabulary, process: LimitedProcess | None = None) -> None:
        self._process, self._name = process, uuid.uuid4().hex
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self._vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._making = threading.Lock()

    def compile(self, lark: str, param: str, owner: str = "") -> llguidance.LLMatcher:
        """Makes a grammar ready, or finds one of the last that the same owner asked for.

        Args:
            lark: the grammar, in the dialect of llguidance.
            param: the field that it came from.
            owner: whose requests alone are answered sooner for it.

        Raises:
            FieldError: it is no grammar, too large, takes too much, or is one that no text is of.
        """
        if len(lark) > _MOST_CHARACTERS:
            problem = f"a grammar of {len(lark)} characters, at most {_MOST_CHARACTERS} may be"
            raise FieldError(param, f"cannot be used: {problem}", code="invalid_grammar")
        found = self._kept.pop((owner, lark), None)
        if found is None:
            self._try(lark, param)
            found = self._compile(lark, param)
        self._kept[owner, lark] = found
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def _try(self, lark: str, param: str) -> None:
        """Compiles it where that may be ended."""
        tokenizer = getattr(self._vocabulary.tokenizer, "backend_tokenizer", None)
        if self._process is None or tokenizer is None:
            return
        name = self._name
        work: dict[str, Any] = {"vocabulary": name, "lark": lark}
        most_bytes = _COMPILE_BYTES + stack_bytes(lark)
        try:
            ask = partial(self._process.ask, work, cpu_s=_COMPILE_S, memory_bytes=most_bytes)
            if not ask()["is_known"]:
                given: dict[str, Any] = {"vocabulary": name, "tokenizer": tokenizer.to_str()}
                given |= {"size": self._vocabulary.size, "ends": sorted(self._vocabulary.end_ids)}
                self._process.ask(given, cpu_s=_VOCABULARY_S, memory_bytes=_VOCABULARY_BYTES)
                ask()
        except LimitError as error:
            problem = f"cannot be used: compiling it {error}"
            raise FieldError(param, problem, code="invalid_grammar") from None

    def _compile(self, lark: str, param: str) -> llguidance.LLMatcher:
        with self._making:
            if self._tokenizer is None:
                with blamed_on("this model's tokenizer cannot be used with grammars", ApiError):
                    self._tokenizer = llguidance.hf.from_tokenizer(
                        self._vocabulary.tokenizer,
                        n_vocab=self._vocabulary.size,
                        eos_token=sorted(self._vocabulary.end_ids),
                    )
        try:
            matcher, trial = compile_grammar(self._tokenizer, lark)
        except MemoryError as error:
            raise ApiError(str(error), status=503) from None
        if (problem := _dead_end(trial)) is not None:
            raise FieldError(param, f"cannot be used: {problem}", code="invalid_grammar")
        return matcher

    def constraint(self, matcher: llguidance.LLMatcher) -> GrammarConstraint:
        """What a compiled grammar asks of one answer."""
        return GrammarConstraint(matcher.deep_copy(), self._vocabulary)


def of_response_format(asked: dict[str, Any]) -> str | None:
    """The grammar that ``response_format`` asks for; None where any text will do.

    Raises:
        FieldError: it is none that exists, or lacks something.
    """
    kind = asked.get("type")
    known: dict[Any, tuple[str, ...]] = {
        "text": (),
        "json_object": (),
        "json_schema": ("json_schema",),
        "grammar": ("grammar",),
        "regex": ("regex",),
    }
    if not isinstance(kind, str) or kind not in known:
        expected = ", ".join(known)
        raise FieldError("response_format.type", f"expected one of {expected}, got {kind!r}")
    for field in asked.keys() - {"type", *known[kind]}:
        raise FieldError(f"response_format.{field}", "is no field of this response format")
    if kind == "text":
        return None
    if kind == "json_object":
        return f"start: {_json(_ANY_OBJECT)}"
    value = asked.get(kind)
    if kind == "json_schema":
        schema = value.get("schema") if isinstance(value, dict) else None
        if not isinstance(schema, dict):
            raise FieldError("response_format.json_schema.schema", "expected a JSON schema")
        return f"start: {_json(schema)}"
    if not isinstance(value, str) or not value:
        raise FieldError(f"response_format.{kind}", f"expected a text, got {value!r}")
    if kind == "regex":
        return f"start: TEXT\nTEXT: /{_BARE_SLASH.sub(_with_backslash, value)}/"
    return value


def _with_backslash(found: re.Match[str]) -> str:
    return found[1] or r"\/"


def of_tools(
    functions: Sequence[Function],
    how: ToolFormat,
    special: Mapping[str, int],
    *,
    is_needed: bool,
    may_repeat: bool,
) -> str | None:
    """A grammar of answers that call tools as their schemas say.

    Args:
        functions: the tools.
        how: the family's way of writing calls.
        special: the vocabulary's special tokens; no regular expression has them in its texts.
        is_needed: the answer is nothing but calls; text may stand around them otherwise.
        may_repeat: several calls may come.

    Returns:
        None where the format is not JSON.
    """
    if how.before_arguments is not None:
        call = _named_call(functions, how, how.before_arguments, special)
        between = "" if may_repeat else None
        return _calls(call, between, how, special, is_needed=is_needed)
    if how.arguments_key is None:
        return None
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                how.arguments_key: function.parameters or _ANY_OBJECT,
            },
            "required": ["name", how.arguments_key],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema: dict[str, Any] = {"anyOf": calls}
    if how.bare:
        return f"start: {_json(schema, **_ONE_LINE)}" if is_needed else None
    if how.closes is None:
        schema = {"type": "array", "items": schema, "minItems": 1}
        if not may_repeat:
            schema["maxItems"] = 1
    gap, closing = (' "\\n"', f' "\\n" {_mark(how.closes, special)}') if how.closes else ("", "")
    call = f"{gap} {_json(schema, **_ONE_LINE)}{closing}"
    more = '"\\n"' if may_repeat and how.closes else None
    return _calls(call, more, how, special, is_needed=is_needed)


def _calls(
    call: str, between: str | None, how: ToolFormat, special: Mapping[str, int], *, is_needed: bool
) -> str:
    """A grammar of calls.

    Args:
        call: what stands behind the mark that opens one.
        between: what stands between two of them; None where there is one at most.
        how: the family's way of writing calls.
        special: as for `of_tools`.
        is_needed: the answer is nothing but calls.
    """
    opens = _mark(how.opens, special)
    more = "" if between is None else f" ({between} {opens} call)*"
    if is_needed:
        return f"start: {opens} call{more}\ncall: {call}"
    opening, free = _up_to("opening", how.opens, special), f"FREE: {_without(how.opens)}\n"
    return f"start: FREE | opening call{more}\n{opening}{free}call: {call}"


def _named_call(
    functions: Sequence[Function],
    how: ToolFormat,
    before_arguments: str,
    special: Mapping[str, int],
) -> str:
    """A rule's body: name and arguments of one of the functions, with a mark between them."""
    before = _mark(before_arguments, special)
    if how.before_id is not None and how.before_id in special:
        before = f"({_mark(how.before_id, special)} /[a-zA-Z0-9]{{9}}/)? {before}"
    calls = [
        f"{_text(function.name)} {before} {_json(function.parameters or _ANY_OBJECT, **_ONE_LINE)}"
        for function in functions
    ]
    return " | ".join(f"({call})" for call in calls)


def after_reasoning(
    grammar: str, marks: ReasoningMarks, special: Mapping[str, int], *, is_open: bool
) -> str:
    """A grammar whose text may follow reasoning; must, where the prompt has opened it.

    Args:
        grammar: of the answer.
        marks: of reasoning.
        special: as for `of_tools`.
        is_open: the prompt has opened it.
    """
    body = grammar.replace("start:", "answer:", 1)
    first = "thought GAP" if is_open else f"({_mark(marks.opens, special)} thought GAP)?"
    thought = _up_to("thought", marks.closes, special)
    return f"start: {first} answer\n{thought}GAP: /\\s*/\n{body}"


def of_harmony_call(functions: Sequence[Function]) -> str:
    """A grammar of one call as gpt-oss writes it, arguments as their schema says."""
    calls = [
        f'<|channel|> {_text(f"commentary to=functions.{function.name} ")} <|constrain|> "json" '
        f"<|message|> {_json(function.parameters or _ANY_OBJECT, **_ONE_LINE)}"
        for function in functions
    ]
    return "start: " + " | ".join(f"({call})" for call in calls)


def after_analysis(grammar: str, *, is_call: bool) -> str:
    """A grammar whose text gpt-oss may write behind its analysis: a call, or its final message."""
    body = grammar.replace("start:", "answer:", 1)
    header = "" if is_call else '<|channel|> "final" <|message|> '
    analysis = '<|channel|> "analysis" <|message|> THOUGHT <|end|> <|start|> "assistant"'
    return f"start: ({analysis})? {header}answer\nTHOUGHT: /(.|\\n)*/\n{body}"


def _dead_end(matcher: llguidance.LLMatcher) -> str | None:
    """Why no text can follow, where none can and what there is is not whole."""
    if not matcher.is_error():
        return None
    # State and statistics of the parser follow behind the first line of its error.
    problem = " ".join(matcher.get_error().partition("<state>")[0].split())[:500]
    if matcher.stop_reason() == "NoExtensionBias" or problem.startswith("NoExtension"):
        return "no text of this grammar goes on from here"
    return problem


def _json(schema: dict[str, Any], **spacing: Any) -> str:
    return f"%json {json.dumps({'x-guidance': spacing or _LINES} | schema)}"


def _text(text: str) -> str:
    return json.dumps(text)


def _mark(text: str, special: Mapping[str, int]) -> str:
    """A mark: the special token of this name, or its text."""
    return f"<[{special[text]}]>" if text in special else _text(text)


def _up_to(rule: str, mark: str, special: Mapping[str, int]) -> str:
    """A rule of any text that ends with the first mark."""
    if mark in special:
        before = f"BEFORE_{rule.upper()}"  # a grammar may have several such rules
        return f"{rule}: {before} {_mark(mark, special)}\n{before}: {_without(mark)}\n"
    return f"{rule}[lazy]: /(.|\\n)*{_escaped(mark)}/\n"


def _without(mark: str) -> str:
    """A terminal of any text that does not have the mark."""
    return rf"/(.|\n)*/ & ~/(.|\n)*{_escaped(mark)}(.|\n)*/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")
