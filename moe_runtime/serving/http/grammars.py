"""Grammars that constrain answers: JSON, JSON schemas, grammars in Lark, calls of tools."""

from __future__ import annotations

import ast
import json
import re
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import llguidance
import llguidance.hf
import numpy as np

from moe_runtime.errors import blamed_on
from moe_runtime.serving.http.answer_text import ReasoningMarks, Vocabulary
from moe_runtime.serving.http.api_errors import ApiError, FieldError, unsupported
from moe_runtime.serving.http.limits import LimitedProcess, LimitError, compile_grammar, stack_bytes
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.http.tool_formats import (
    CHOICES,
    ArgumentWriting,
    ToolFormat,
    alternatives,
    referred,
    texts_of,
)
from moe_runtime.serving.requests import ConstraintError

if TYPE_CHECKING:
    from torch import Tensor

_OF_NAMES = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
"""Keywords whose value has one schema per name."""
_OF_VALUES = frozenset({"enum", "const", "default", "example", "examples"})
"""Keywords whose value is not a schema."""
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of texts that llguidance enforces; others are only descriptions."""
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spacing of chat templates. Flexible spaces let weak models write spaces without end."""
_LENIENT = {"lenient": True, "coerce_one_of": True}
_OUTER = "root"
_PATTERN_PART = re.compile(r"(?P<unreadable>\\[1-9]|\\k[<{']|\(\?(?:<?[=!]|[>(]))|\\.", re.DOTALL)
"""Back references, look-around, atomic and conditional groups; and any other escape."""


def grammar_schema(schema: dict[str, Any], *, is_strict: bool) -> dict[str, Any]:
    """Adds llguidance's settings to a schema, and removes unknown formats of texts.

    Unless strict, also removes patterns that llguidance cannot read.
    """

    def change(one: dict[str, Any]) -> dict[str, Any]:
        kept = dict(one)
        if isinstance(kept.get("format"), str) and kept["format"] not in FORMATS:
            del kept["format"]
        if not is_strict:
            if not _is_readable(kept.get("pattern", "")):
                del kept["pattern"]
            if isinstance(named := kept.get("patternProperties"), dict):
                kept["patternProperties"] = {
                    pattern: value for pattern, value in named.items() if _is_readable(pattern)
                }
        return kept

    spacing = _ONE_LINE if is_strict else _ONE_LINE | _LENIENT
    return {"x-guidance": spacing} | _changed(schema, change)


def schema_within(part: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema as a schema whose references still resolve."""

    def change(one: dict[str, Any]) -> dict[str, Any]:
        to = one.get("$ref")
        if not isinstance(to, str) or to[:2] not in ("#", "#/"):
            return one
        return {**one, "$ref": f"#/$defs/{_OUTER}{to[1:]}"}

    found = _changed(part, change)
    if not isinstance(found, dict) or found == part:
        return found if isinstance(found, dict) else {}
    return {**found, "$defs": {_OUTER: _changed(root, change)}}


def _changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Applies a change to a schema and all schemas within it."""
    if isinstance(schema, list):
        return [_changed(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in change(schema).items():
        if key in _OF_VALUES:
            found[key] = value
        elif key in _OF_NAMES and isinstance(value, dict):
            found[key] = {name: _changed(one, change) for name, one in value.items()}
        else:
            found[key] = _changed(value, change)
    return found


def _is_readable(pattern: Any) -> bool:
    """Whether a finite automaton can match a pattern."""
    parts = _PATTERN_PART.finditer(pattern) if isinstance(pattern, str) else ()
    return not any(part["unreadable"] for part in parts)


_MOST_CHARACTERS = 1 << 17
_COMPILE_S, _COMPILE_BYTES = 2.0, 128 << 20
"""Limits of compiling a grammar: CPU time, and memory beyond the stack."""
_VOCABULARY_S, _VOCABULARY_BYTES = 60.0, 2 << 30
_QUICK_MASK_S, _SLOW_MASKS_S = 0.05, 2.0
"""Masks hold up all requests. An answer has a total of 2 s for masks slower than 50 ms."""
_MOST_KEPT = 16
_ANY_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_MORE_PROPERTIES = frozenset(
    {"additionalProperties", "patternProperties", "minProperties", "$ref", *CHOICES}
)
"""Keywords of schemas that ask for, or describe, properties outside ``properties``."""
_ANY_VALUE = {"type": ["string", "number", "boolean", "object", "array", "null"]}
_BARE_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
"""An escaped character, or a slash that is not escaped."""
_WHOLE = re.compile(r"\^(\(\?:.*\))\$", re.DOTALL)
"""A pattern of a whole text."""
_LARK_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\b(?:NAME|ARGUMENTS)\b')
"""A text of a grammar, or a placeholder of a call."""
_ERROR_PLACE = re.compile(r"\n\s+\d+ \| |<state>|\. Enable ")
"""The rest of llguidance's error: lines of the grammar, the parser's state, or its options."""
_SCHEMA_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")


class GrammarConstraint:
    """The tokens that a grammar allows next in one answer; a `TokenConstraint`."""

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
    """Compiles grammars for one vocabulary, after a trial in ``process`` if there is one."""

    def __init__(self, vocabulary: Vocabulary, process: LimitedProcess | None = None) -> None:
        self._process, self._name = process, uuid.uuid4().hex
        self._kept: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self.vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._making = threading.Lock()

    def compile(self, lark: str, param: str, owner: str = "") -> llguidance.LLMatcher:
        """Compiles a grammar in llguidance's Lark, or finds a recent one of the same owner.

        Raises:
            FieldError: it is invalid, too large or too slow, or no text matches it.
        """
        if len(lark) > _MOST_CHARACTERS:
            problem = f"a grammar of {len(lark)} characters, expected at most {_MOST_CHARACTERS}"
            raise _unusable(param, problem)
        found = self._kept.pop((owner, lark), None)
        if found is None:
            self._try(lark, param)
            found = self._compile(lark, param)
        self._kept[owner, lark] = found
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def _try(self, lark: str, param: str) -> None:
        """Compiles a grammar in the other process first, which has limits."""
        tokenizer = getattr(self.vocabulary.tokenizer, "backend_tokenizer", None)
        if self._process is None or tokenizer is None:
            return
        name = self._name
        work: dict[str, Any] = {"vocabulary": name, "lark": lark}
        most_bytes = _COMPILE_BYTES + stack_bytes(lark)
        try:
            ask = partial(self._process.ask, work, cpu_s=_COMPILE_S, memory_bytes=most_bytes)
            if not ask()["is_known"]:
                given: dict[str, Any] = {"vocabulary": name, "tokenizer": tokenizer.to_str()}
                given |= {"size": self.vocabulary.size, "ends": sorted(self.vocabulary.end_ids)}
                self._process.ask(given, cpu_s=_VOCABULARY_S, memory_bytes=_VOCABULARY_BYTES)
                ask()
        except LimitError as error:
            raise _unusable(param, f"compiling it {error}") from None

    def _compile(self, lark: str, param: str) -> llguidance.LLMatcher:
        with self._making:
            if self._tokenizer is None:
                with blamed_on("this model's tokenizer cannot be used with grammars", ApiError):
                    self._tokenizer = _tokenizer_of(self.vocabulary)
        try:
            matcher, trial = compile_grammar(self._tokenizer, lark)
        except MemoryError as error:
            raise ApiError(str(error), status=503) from None
        if (problem := _dead_end(trial)) is not None:
            raise _unusable(param, problem)
        return matcher

    def constraint(self, matcher: llguidance.LLMatcher) -> GrammarConstraint:
        return GrammarConstraint(matcher.deep_copy(), self.vocabulary)


def _unusable(param: str, problem: str) -> FieldError:
    return FieldError(param, f"cannot be used: {problem}", code="invalid_grammar")


def _tokenizer_of(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """llguidance's tokenizer, with the added tokens' own flags.

    By default it treats all tokens like ``<...>`` as special, which no text can have.
    """
    size, ends = vocabulary.size, sorted(vocabulary.end_ids)
    found = llguidance.hf.from_tokenizer(vocabulary.tokenizer, n_vocab=size, eos_token=ends)
    plain = {at: text for at, text in vocabulary.plain_tokens.items() if found.is_special_token(at)}
    if not plain:
        return found
    wrapper = llguidance.TokenizerWrapper(_FlaggedTokenizer(found, size, plain))
    return llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=ends)


class _FlaggedTokenizer:
    """The interface that `llguidance.TokenizerWrapper` expects; ``plain`` are not special."""

    bos_token_id = None

    def __init__(self, found: llguidance.LLTokenizer, size: int, plain: Mapping[int, str]) -> None:
        self._found = found
        self.eos_token_id = found.eos_token
        self.tokens = [
            plain[at].encode() if at in plain else found.decode_bytes([at]) for at in range(size)
        ]
        self.special_token_ids = [
            at for at in range(size) if at not in plain and found.is_special_token(at)
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._found.tokenize_bytes(text)


def of_response_format(asked: dict[str, Any]) -> str | None:
    """The grammar of a ``response_format``; None for any text."""
    kind, known = asked.get("type"), ("text", "json_object", "json_schema", "grammar", "regex")
    if kind not in known:
        expected = ", ".join(known)
        raise FieldError("response_format.type", f"expected one of {expected}, got {kind!r}")
    own = {"type"} if kind in ("text", "json_object") else {"type", kind}
    for field in asked.keys() - own:
        raise FieldError(f"response_format.{field}", "is not a field of this response format")
    if kind == "text":
        return None
    if kind == "json_object":
        return f"start: {_json(_ANY_OBJECT)}"
    value = asked.get(kind)
    if kind == "json_schema":
        given = value if isinstance(value, dict) else {}
        known = ("name", "description", "schema", "strict")
        for field in given.keys() - {*known}:
            problem = f"is not a field of it; known are {', '.join(known)}"
            raise FieldError(f"response_format.json_schema.{field[:64]}", problem)
        if not isinstance(given.get("schema"), dict):
            raise FieldError("response_format.json_schema.schema", "expected a JSON schema")
        return f"start: {_json(given['schema'])}"
    if not isinstance(value, str) or not value:
        raise FieldError(f"response_format.{kind}", f"expected a text, got {value!r}")
    if kind == "regex":
        return f"start: TEXT\nTEXT: /{_slashed(value)}/"
    return value


def of_tools(
    functions: Sequence[Function],
    how: ToolFormat,
    tokens: Mapping[str, int],
    *,
    is_needed: bool,
    may_repeat: bool,
) -> str:
    """A grammar of answers with calls of tools, whose arguments follow the schemas.

    If calls have no mark, an answer that begins like a call is a call.

    Args:
        tokens: ids of marks that are tokens of the vocabulary.
        is_needed: the answer has only calls; otherwise it may have text, too.
        may_repeat: allows several calls.
    """
    writing, opens = how.writing, _mark(how.opens[0], tokens)
    rules: list[str] = []
    calls = []
    for number, function in enumerate(functions):
        schema, is_strict = _schema_of(function), function.is_strict
        if (one_by_one := writing.argument) is None:
            arguments = _json(schema, is_strict=is_strict)
        else:
            written = _Arguments(schema, one_by_one, tokens, f"f{number}", is_strict)
            arguments = written.grammar(rules)
        words = {"NAME": _text(function.name), "ARGUMENTS": arguments}
        calls.append(f"({_lark(writing.call, tokens, words)})")
    again = None if writing.again is None else _lark(writing.again, tokens)
    more = "" if again is None or not may_repeat else f"({again} call)*"
    body = f"{_lark(writing.begins, tokens)} call {more} {_lark(writing.ends, tokens)}"
    rules.append("call: " + " | ".join(calls))
    if not is_needed:
        begins = how.bare.begins if how.bare else ""
        rules.append(_up_to("opening", how.opens[0], tokens, how.opens[1:], begins))
        rules.append(f"FREE: {_without(how.opens, begins)}")
        if begins:
            rules.append(r"BLANK: /\s*/")
            body = f"{body} | BLANK {body}"
        return "\n".join([f"start: FREE | opening {body}", *rules])
    return "\n".join([f"start: {body if how.bare else f'{opens} {body}'}", *rules])


def _schema_of(function: Function) -> dict[str, Any]:
    """The schema of the arguments: those that it declares, unless it says that others may come.

    As in OpenAI's API, without a schema there are none.
    """
    if function.enforced is None:
        return _NO_ARGUMENTS
    schema = _ANY_OBJECT | function.enforced
    declared, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(declared, dict) or schema.keys() & _MORE_PROPERTIES:
        return schema
    is_whole = isinstance(required, list) and all(name in declared for name in required)
    return schema | {"additionalProperties": False} if is_whole else schema


@dataclass(frozen=True, slots=True)
class _Arguments:
    """Separate arguments of one function; names of its rules begin with ``rule``.

    Constraints that cannot be enforced are refused if strict, and ignored otherwise.
    """

    schema: dict[str, Any]
    writing: ArgumentWriting
    tokens: Mapping[str, int]
    rule: str
    is_strict: bool

    def grammar(self, rules: list[str]) -> str:
        """The arguments in the order of the schema; those that are not required may be absent.

        A schema without properties allows any, unless ``additionalProperties`` is false.
        """
        found, seen = self.schema, set[int]()
        while isinstance(found, dict) and "$ref" in found and id(found) not in seen:
            seen.add(id(found))
            found = referred(found["$ref"], self.schema)
        if not isinstance(found, dict) or found.keys() & {*CHOICES, "$ref"}:
            raise self._refused("a choice of objects, or a reference to itself,")
        properties, required = found.get("properties"), found.get("required")
        known = list(properties.items()) if isinstance(properties, dict) else []
        between = _lark(self.writing.between, self.tokens)
        behind = alone = '""'
        other = found.get("additionalProperties", True)
        if "properties" not in found and other is not False:
            if self.is_strict and found.keys() & {"patternProperties", "propertyNames"}:
                raise self._refused("patterns of names")
            schema = other if isinstance(other, dict) and other else _ANY_VALUE
            one = self._argument(None, schema, f"{self.rule}_any", rules)
            rules.append(f"{self.rule}_any: {one}")
            return f"({self.rule}_any ({between} {self.rule}_any)*)?"
        for at, (key, schema) in reversed(list(enumerate(known))):
            one = self._argument(key, schema, f"{self.rule}_{at}", rules)
            is_needed = isinstance(required, list) and key in required
            first = f"{one} {behind}"
            alone = first if is_needed else f"({first} | {alone})"
            more = f"({between} {one})" if is_needed else f"({between} {one})?"
            rules.append(f"{self.rule}_{at}: {more} {behind}")
            behind = f"{self.rule}_{at}"
        return alone

    def _argument(self, key: str | None, schema: Any, rule: str, rules: list[str]) -> str:
        writing = self.writing
        name = writing.any_key if key is None else _text(key)
        before = [_lark(writing.before_key, self.tokens), name]
        before.append(_lark(writing.before_value, self.tokens))
        ends = writing.ends_text
        texts, has_others, _ = texts_of(schema, self.schema)
        if ends is None or texts == []:
            return " ".join([*before, self._json_value(schema)])
        whole = _WHOLE.fullmatch(schema.get("pattern", "")) if isinstance(schema, dict) else None
        bounded = [*map(_has_bounds, alternatives(schema, self.schema))]
        if self.is_strict and any(bounded) and (whole is None or has_others):
            raise self._refused("bounds or a pattern of a text")
        opens = _lark(writing.opens_text, self.tokens)
        if texts is None or (self.is_strict and whole is not None):
            text = f"{rule}_text"
            regex = _slashed(whole[1]) if self.is_strict and whole is not None else None
            rules.append(_up_to(text, ends, self.tokens, regex=regex))
        else:
            text = f"({' | '.join(map(_text, texts))}) {_mark(ends, self.tokens)}"
        values = [f"{opens} {text}"]
        if has_others and (texts is not None or opens):
            values.append(self._json_value(schema))
        return " ".join([*before, f"({' | '.join(values)})"])

    def _json_value(self, schema: Any) -> str:
        value = _json(schema_within(schema, self.schema), is_strict=self.is_strict)
        return f"{value} {_lark(self.writing.after_value, self.tokens)}"

    def _refused(self, what: str) -> ApiError:
        return unsupported("tools", f"{what} cannot be enforced in calls as this model writes them")


def _has_bounds(schema: dict[str, Any]) -> bool:
    """Whether a schema bounds a text in ways that cannot be enforced without quotes."""
    return bool(schema.keys() & {"pattern", "minLength", "maxLength"}) or (
        schema.get("format") in FORMATS
    )


def after_reasoning(
    grammar: str,
    marks: ReasoningMarks,
    tokens: Mapping[str, int],
    *,
    is_open: bool,
    opens_calls: Sequence[str] = (),
) -> str:
    """Allows reasoning before a grammar; requires it if the prompt has opened it."""
    body = grammar.replace("start:", "answer:", 1)
    first = "thought GAP" if is_open else f"({_mark(marks.opens, tokens)} thought GAP)?"
    thought = _up_to("thought", marks.closes, tokens, opens_calls)
    return f"start: {first} answer\n{thought}\nGAP: /\\s*/\n{body}"


def of_function(function: Function) -> str:
    """The grammar of one function's arguments in JSON."""
    return f"start: {_json_arguments(function)}"


def _json_arguments(function: Function) -> str:
    return _json(_schema_of(function), is_strict=function.is_strict)


def of_harmony_call(functions: Sequence[Function], *, is_needed: bool = True) -> str:
    """A grammar of one call in gpt-oss's form, or of its final message unless ``is_needed``."""
    calls = [
        f'<|channel|> {_text(f"commentary to=functions.{function.name} ")} <|constrain|> "json" '
        f"<|message|> {_json_arguments(function)}"
        for function in functions
    ]
    call = " | ".join(f"({call})" for call in calls)
    if is_needed:
        return f"start: {call}"
    before = '<|channel|> "commentary" <|message|> FREE <|end|> <|start|> "assistant"'
    final = '<|channel|> "final" <|message|> FREE'
    return f"start: ({before})? ({final} | {call})\nFREE: /(.|\\n)*/"


def after_analysis(grammar: str, *, is_call: bool) -> str:
    """Allows gpt-oss's analysis before a grammar of a call or of its final message."""
    body = grammar.replace("start:", "answer:", 1)
    header = "" if is_call else '<|channel|> "final" <|message|> '
    analysis = '<|channel|> "analysis" <|message|> THOUGHT <|end|> <|start|> "assistant"'
    return f"start: ({analysis})? {header}answer\nTHOUGHT: /(.|\\n)*/\n{body}"


def _dead_end(matcher: llguidance.LLMatcher) -> str | None:
    """Why no text can follow an incomplete answer; None if one can."""
    if not matcher.is_error():
        return None
    problem = " ".join(_ERROR_PLACE.split(matcher.get_error())[0].split())[:500]
    problem = _SCHEMA_PLACE.sub("", problem)
    if matcher.stop_reason() == "NoExtensionBias" or problem.startswith("NoExtension"):
        return "no text of this grammar goes on from here"
    return problem


def _json(schema: dict[str, Any], *, is_strict: bool = True) -> str:
    return f"%json {json.dumps(grammar_schema(schema, is_strict=is_strict))}"


def _text(text: str) -> str:
    return json.dumps(text)


def _lark(text: str, tokens: Mapping[str, int], words: Mapping[str, str] | None = None) -> str:
    def part(found: re.Match[str]) -> str:
        one = found[0]
        return _mark(json.loads(one), tokens) if one.startswith('"') else (words or {})[one]

    return _LARK_WORD.sub(part, text)


def _mark(text: str, tokens: Mapping[str, int]) -> str:
    names = sorted((name for name in tokens if name in text), key=len, reverse=True)
    if not names:
        return _text(text)
    parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return " ".join(
        f"<[{tokens[part]}]>" if part in tokens else _text(part) for part in parts if part
    )


def _up_to(
    rule: str,
    mark: str,
    tokens: Mapping[str, int],
    others: Sequence[str] = (),
    begins: str = "",
    regex: str | None = None,
) -> str:
    """A rule of a text and the first mark after it: any text as in `_without`, or a ``regex``."""
    if mark in tokens:
        before = f"BEFORE_{rule.upper()}"  # a grammar may have several such rules
        text = f"/{regex}/" if regex else _without((mark, *others), begins)
        return f"{rule}: {before} <[{tokens[mark]}]>\n{before}: {text}"
    without = f" & {_lacks(others, begins)}" if others or begins else ""
    text = regex or r"(.|\n)*"
    return f"{rule}[lazy]: /{text}{_escaped(mark)}/{without}"


def _slashed(regex: str) -> str:
    """Escapes slashes, which end an expression in Lark."""
    return _BARE_SLASH.sub(lambda found: found[1] or r"\/", regex)


def _without(marks: Sequence[str], begins: str = "") -> str:
    """A terminal of any text that has none of the marks, and does not start with ``begins``."""
    return rf"/(.|\n)*/ & {_lacks(marks, begins)}"


def _lacks(marks: Sequence[str], begins: str = "") -> str:
    within = [rf"~/(.|\n)*({'|'.join(map(_escaped, marks))})(.|\n)*/"] if marks else []
    return " & ".join([*within, *([rf"~/\s*{_escaped(begins)}(.|\n)*/"] if begins else [])])


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


_TOKEN = re.compile(
    r"""
      (?P<define>^[ \t]*[?!]*(?P<defined>[A-Za-z_][\w-]*)[ \t]*:)
    | (?P<order>^[ \t]*%[^\n]*)
    | (?P<skip>\s*\n|[ \t\r]+|//[^\n]*|\#[^\n]*|->[ \t]*[\w-]+)
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<times>[?*+]|\{\d*,?\d*\}|~[ \t]*\d+(?:\.\.\d+)?)
    | (?P<sign>\.\.|[|()\[\]])
    """,
    re.VERBOSE | re.MULTILINE,
)
_IMPORT = re.compile(r"[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*")
_COMMON = {
    **{"LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS_INLINE": r"[ \t]+"},
    **{"WS": r"[ \t\f\r\n]+", "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+"},
    **{"SIGNED_INT": "[+-]?[0-9]+", "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"},
    **{"LETTER": "[a-zA-Z]", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]"},
    **{"WORD": "[a-zA-Z]+", "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*"},
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Terminals of Lark's library."""
_CLOSING = {"(": ")", "[": "]"}
_EXPRESSION_PART = re.compile(r"\\.|\[\^?\]?|\(\?[a-zA-Z-]*x|[\])(]", re.DOTALL)
_MOST_REGEX = 1 << 16


class _Token(NamedTuple):
    kind: str
    text: str


def regex_of(grammar: str) -> str:
    """The regular expression of a Lark grammar: JSON strings can only be held to such.

    Raises:
        ValueError: it is not a grammar, or not a regular one.
    """
    try:
        return _Rules(grammar).of("start", ())
    except (SyntaxError, RecursionError) as error:  # bad escapes; too deep nesting
        raise ValueError(f"cannot be read: {error.args[0]}") from None


def balanced(regex: str) -> str:
    """An expression, if its brackets match. Raises ValueError otherwise, and for comments."""
    depth = num_sets = 0
    for found in _EXPRESSION_PART.finditer(regex):
        part = found[0]
        if part[0] == "[":
            num_sets += 1
        elif num_sets:
            num_sets -= part == "]"
        elif part[0] == "(":
            if part != "(":
                raise ValueError("comments in expressions (flag x) cannot be enforced")
            depth += 1
        elif part == ")":
            depth -= 1
            if depth < 0:
                break
    if depth or num_sets:
        raise ValueError(f"its brackets do not match: {regex[:60]!r}")
    return regex


class _Rules:
    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._found: dict[str, str] = {}
        own: list[_Token] | None = None
        for found in _tokens(grammar):
            if found["skip"] is not None:
                continue
            if (name := found["defined"]) is not None:
                if name in self._rules:
                    raise ValueError(f"{name} is defined twice")
                own = self._rules[name] = []
            elif (order := found["order"]) is not None:
                imported = _IMPORT.fullmatch(order)
                if imported is None or imported[1] not in _COMMON:
                    raise ValueError(f"{order.strip()} cannot be enforced")
                self._found[imported[2] or imported[1]] = _COMMON[imported[1]]
            elif own is None:
                raise ValueError("expected NAME: at its beginning")
            else:
                own.append(_Token(str(found.lastgroup), found[0]))
        if both := self._rules.keys() & self._found.keys():
            raise ValueError(f"{min(both)} is defined and imported")

    def of(self, name: str, within: tuple[str, ...]) -> str:
        if name in within:
            raise ValueError(f"{name} is part of itself, which no expression of a text can be")
        if name not in self._found:
            if name not in self._rules:
                raise ValueError(f"has no {name}")
            pending = self._rules[name][::-1]
            self._found[name] = self._choice(pending, (*within, name))
            if pending:
                raise ValueError(f"{name} has a {pending[-1].text} too many")
        return self._found[name]

    def _choice(self, pending: list[_Token], within: tuple[str, ...]) -> str:
        """Alternatives, up to a bracket that closes or the end."""
        found, size = [""], 0
        while pending and pending[-1].text not in (")", "]"):
            if pending[-1].text == "|":
                pending.pop()
                found.append("")
                continue
            item = self._item(pending, within)
            found[-1] += item
            size += len(item)
            if size > _MOST_REGEX:
                raise ValueError("is too large to be enforced")
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _item(self, pending: list[_Token], within: tuple[str, ...]) -> str:
        kind, text = pending.pop()
        if kind == "name":
            found = self.of(text, within)
        elif kind == "string":
            found = _literal(text)
            if pending and pending[-1].text == "..":
                pending.pop()
                last = pending.pop() if pending else _Token("", "")
                if last.kind != "string":
                    raise ValueError(f"expected a text after {text}..")
                for end in (text, last.text):
                    if end.endswith("i") or len(ast.literal_eval(end)) != 1:
                        raise ValueError(f"expected one character at each end, got {end}")
                found = f"[{found}-{_literal(last.text)}]"
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            if "x" in flags:
                raise ValueError("comments in expressions (flag x) cannot be enforced")
            found = f"(?{flags}:{balanced(body)})"
        elif text in _CLOSING:
            found = self._choice(pending, within)
            if not pending or pending.pop().text != _CLOSING[text]:
                raise ValueError(f"has a {text} that nothing closes")
            if text == "[":
                found = f"(?:{found})?"
        else:
            raise ValueError(f"{text} cannot be enforced")
        while pending and pending[-1].kind == "times":
            found = f"(?:{found}){_times(pending.pop().text)}"
        return found


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise ValueError(f"{grammar[at : at + 20]!r} cannot be enforced")
        yield found
        at = found.end()


def _literal(text: str) -> str:
    found = re.escape(ast.literal_eval(text.removesuffix("i"))).replace("\\\n", r"\n")
    return f"(?i:{found})" if text.endswith("i") else found


def _times(text: str) -> str:
    if text[0] not in "{~":
        return text
    least, _, most = text.strip("{~} \t").replace("..", ",").partition(",")
    return f"{{{least or 0},{most}}}" if "," in text or ".." in text else f"{{{least}}}"
