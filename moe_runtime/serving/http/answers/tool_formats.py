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
_NAMED_BEGUN = re.compile(
    r"\s*(\[TOOL_CALLS\]\s*)?([\w.-]+\s*(\[CALL_ID\]\s*\w*\s*)?)?"
    r"(\[[A-Z_]*|\[ARGS\]\s*(\{.*)?)?",
    re.DOTALL,
)
_OBJECT = re.compile(r"\s*(\{\s*([\"}]|\Z)|\Z)")
_BETWEEN = " \t\r\n;"
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
        may_begin: whether text behind ``opens`` may begin calls, whole ones before it.
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
    may_begin: Callable[[str], bool]
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
    values, rest = _json_values(text)
    yield from map(_json_call, values)
    if rest:
        raise ValueError("expected a JSON value")


def _may_be_json_calls(text: str) -> bool:
    values, rest = _json_values(text)
    is_named = all(isinstance(value, dict) and "name" in value for value in values)
    return is_named and may_be_object(rest.removeprefix("["))


def may_be_object(text: str) -> bool:
    """Whether text may begin a JSON object; none of it may, too."""
    return _OBJECT.match(text) is not None


def bare_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    """JSON objects without a mark before them, which may as well be the answer itself.

    Raises:
        ValueError: one of them does not name a tool that was given, and arguments for it.
    """
    values, rest = _json_values(text)
    for value in values:
        if not _is_bare_call(value, functions):
            raise ValueError("expected the name of a tool, and arguments")
        yield _json_call(value)
    if rest:
        raise ValueError("expected a JSON value")


def may_be_bare_call(text: str, functions: Sequence[Function]) -> bool:
    """Whether text without a mark begins as calls of tools that were given do."""
    values, rest = _json_values(text)
    begun = "".join(rest.removeprefix("[").split())
    heads = (
        f'{{{kind}"name":"{one.name}","{key}":'
        for one in functions
        for kind in ("", '"type":"function",')
        for key in ("parameters", "arguments")
    )
    return all(_is_bare_call(value, functions) for value in values) and any(
        begun.startswith(head) or head.startswith(begun) for head in heads
    )


def _is_bare_call(value: Any, functions: Sequence[Function]) -> bool:
    is_named = isinstance(value, dict) and any(value.get("name") == one.name for one in functions)
    return is_named and bool(value.keys() & {"arguments", "parameters"})


def _json_values(text: str) -> tuple[list[Any], str]:
    """Values, those of lists one by one; and the text behind the last that is whole.

    That text begins with ``[`` where a list has begun and does not end.
    """
    values, rest, is_list = [], text.strip(_BETWEEN), False
    while rest or is_list:
        if is_list and rest.startswith("]"):
            is_list, rest = False, rest[1:].lstrip(_BETWEEN)
            continue
        if not is_list and rest.startswith("["):
            is_list, rest = True, rest[1:].lstrip()
            continue
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            break
        values.append(value)
        rest = rest[end:].lstrip(" \t\r\n" if is_list else _BETWEEN)
        if is_list and rest[:1] == ",":
            rest = rest[1:].lstrip()
        elif is_list and rest[:1] != "]":
            break
    return values, "[" * is_list + rest


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
    calls, rest = _read_named(text)
    yield from calls
    if rest or not calls:
        raise ValueError("expected the name of a function, and an object")


def _may_be_named_calls(text: str) -> bool:
    calls, rest = _read_named(text)
    is_next = not calls or not rest or rest.lstrip().startswith("[")
    return is_next and _NAMED_BEGUN.fullmatch(rest) is not None


def _read_named(text: str) -> tuple[list[ParsedCall], str]:
    """Whole calls, and the text behind them."""
    calls: list[ParsedCall] = []
    end, rest = 0, text.rstrip()
    while (found := _NAMED.match(rest, end)) and (found["opens"] is None) == (not end):
        try:
            value, behind = _DECODER.raw_decode(rest, found.end())
        except (ValueError, RecursionError):
            break
        if not isinstance(value, dict):
            break
        calls.append(ParsedCall(found["name"], json_text(value)))
        end = behind
    return calls, rest[end:]


def _may_be_xml_call(text: str) -> bool:
    begun, opens = text.lstrip(), "<function="
    return begun.startswith(opens) or opens.startswith(begun)


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
        "qwen-xml",
        ("<function=",),
        "<tool_call>",
        "</tool_call>",
        _xml_calls,
        _may_be_xml_call,
        arguments_key=None,
    ),
    ToolFormat(
        "hermes",
        ("<tool_call>",),
        "<tool_call>",
        "</tool_call>",
        _json_calls,
        _may_be_json_calls,
    ),
    ToolFormat(
        "mistral-args",
        ("[ARGS]",),
        "[TOOL_CALLS]",
        None,
        _named_calls,
        _may_be_named_calls,
        arguments_key=None,
        before_arguments="[ARGS]",
        before_id="[CALL_ID]",
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", None, _json_calls, _may_be_json_calls),
    ToolFormat(
        "llama-json",
        ("<|python_tag|>", '"parameters":'),
        "<|python_tag|>",
        None,
        _json_calls,
        _may_be_json_calls,
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
