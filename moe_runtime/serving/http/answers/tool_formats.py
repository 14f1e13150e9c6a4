"""How families of models write calls of tools, as data; and reading such text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.serving.http.schema import Function

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

_NAMED = re.compile(
    r"\s*(?P<opens>\[TOOL_CALLS\]\s*)?(?P<name>[^\s\[{]+)\s*(\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*"
)
_CHOICES = ("anyOf", "oneOf", "allOf")
"""Keys of a schema that have others from which a value may have its types."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


Parser = Callable[[str, Sequence[Function]], Iterable[ParsedCall]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        name: of the format.
        known_by: strings of which one stands in the chat template of such a model.
        opens: begins the text of a call.
        closes: ends it; None where it goes on to the end of the answer.
        parse: gives the calls of the text between; raises ``ValueError`` where one is none.
        arguments_key: of the JSON object that a call is, where it is one.
        before_arguments: stands between a function's name and the JSON object of its arguments,
            where a call is not one object with both.
        before_id: stands before an id, which may come between the two.
        bare: an answer that begins with ``{`` may be a call without ``opens``.
    """

    name: str
    known_by: tuple[str, ...]
    opens: str
    closes: str | None
    parse: Parser
    arguments_key: str | None = "arguments"
    before_arguments: str | None = None
    before_id: str | None = None
    bare: bool = False

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""
        marks = (self.opens, self.closes, self.before_arguments, self.before_id)
        return tuple(mark for mark in marks if mark is not None)


def read_json(text: str) -> Any:
    """A JSON value, without the numbers that Python reads and JSON does not have.

    Raises:
        ValueError: the text is none.
        RecursionError: values lie too deep in one another.
    """
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def json_text(value: Any) -> str:
    """A value as the text of a call's arguments."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _json_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    """JSON objects, one after another or in lists, with ``;`` or spaces between them."""
    return map(_json_call, _json_values(text))


def bare_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    """JSON objects without a mark before them, which may as well be the answer itself.

    Raises:
        ValueError: one of them does not name a tool that was given, and arguments for it.
    """
    names = [function.name for function in functions]
    for value in _json_values(text):
        if not isinstance(value, dict) or value.get("name") not in names:
            raise ValueError("expected the name of a tool")
        if not value.keys() & {"arguments", "parameters"}:
            raise ValueError("expected arguments")
        yield _json_call(value)


def may_be_bare_call(text: str, functions: Sequence[Function]) -> bool:
    """Whether text without a mark begins as a call of a tool that was given does."""
    begun = "".join(text.split())
    names = (json.dumps({"name": one.name}, separators=(",", ":"))[1:-1] for one in functions)
    return any(name in begun or f"{{{name}".startswith(begun) for name in names)


def _json_values(text: str) -> Iterator[Any]:
    rest = text.strip(" \t\r\n;")
    while rest:
        value, end = _DECODER.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].strip(" \t\r\n;")


def _json_call(value: Any) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("expected an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("expected the arguments to be an object")
    return ParsedCall(value["name"], json_text(arguments))


def _named_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    """``NAME[ARGS]{...}``, and more of them behind ``[TOOL_CALLS]``."""
    end = 0
    rest = text.rstrip()
    while not end or end < len(rest):
        found = _NAMED.match(rest, end)
        if found is None or (found["opens"] is None) != (not end):
            raise ValueError("expected the name of a function")
        value, end = _DECODER.raw_decode(rest, found.end())
        if not isinstance(value, dict):
            raise ValueError("expected the arguments to be an object")
        yield ParsedCall(found["name"], json_text(value))


def _xml_calls(text: str, functions: Sequence[Function]) -> list[ParsedCall]:
    """``<function=name><parameter=key>value</parameter></function>``."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("expected <function=...>")
    schema = next((one.parameters for one in functions if one.name == found[1]), None) or {}
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    arguments = {
        key: _typed(value, known.get(key), schema) for key, value in _PARAMETER.findall(found[2])
    }
    return [ParsedCall(found[1], json_text(arguments))]


def _typed(value: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value as its schema has it: text where it may be one, and where it is no JSON.

    ``null`` is none where the schema allows that too.
    """
    if _allows(schema, "string", root) and not (value == "null" and _allows(schema, "null", root)):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def _allows(schema: Any, kind: str, root: Mapping[str, Any]) -> bool:
    """Whether a schema names a type as one of those that a value may have."""
    pending, seen = [schema], set()
    while pending:
        one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        types = one.get("type")
        if types is not None:
            if types == kind or (isinstance(types, list) and kind in types):
                return True
            continue
        values = one["enum"] if isinstance(one.get("enum"), list) else []
        values = [*values, *([one["const"]] if "const" in one else [])]
        if any(isinstance(value, str) if kind == "string" else value is None for value in values):
            return True
        for key in _CHOICES:
            pending += one[key] if isinstance(one.get(key), list) else []
        pending.append(_referred(one.get("$ref"), root))
    return False


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema leads to; None where it leads elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


TOOL_FORMATS = (
    ToolFormat(
        "qwen-xml", ("<function=",), "<tool_call>", "</tool_call>", _xml_calls, arguments_key=None
    ),
    ToolFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", _json_calls),
    ToolFormat(
        "mistral-args",
        ("[ARGS]",),
        "[TOOL_CALLS]",
        None,
        _named_calls,
        arguments_key=None,
        before_arguments="[ARGS]",
        before_id="[CALL_ID]",
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", None, _json_calls),
    ToolFormat(
        "llama-json",
        ("<|python_tag|>", '"parameters":'),
        "<|python_tag|>",
        None,
        _json_calls,
        arguments_key="parameters",
        bare=True,
    ),
)
"""In the order in which a chat template is searched for them."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it teaches none that is known."""
    if "tools" not in template:
        return None
    found = (one for one in TOOL_FORMATS if any(mark in template for mark in one.known_by))
    return next(found, None)
