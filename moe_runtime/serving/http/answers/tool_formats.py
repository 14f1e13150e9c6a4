"""How families of models write calls of tools, as data; and reading such text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.serving.http.schema import Function

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool.

    Attributes:
        name: of the function.
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


Parser = Callable[[str, Sequence[Function]], list[ParsedCall]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        name: of the format.
        known_by: strings of which one stands in the chat template of such a model.
        opens: begins the text of a call.
        closes: ends it; None where it goes on to the end of the answer.
        parse: reads the text between; raises ``ValueError`` or ``KeyError`` where it is no call.
        arguments_key: of the JSON object that a call is, where it is one.
        bare: an answer that begins with ``{`` is a call without ``opens``.
    """

    name: str
    known_by: tuple[str, ...]
    opens: str
    closes: str | None
    parse: Parser
    arguments_key: str | None = "arguments"
    bare: bool = False

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""
        return (self.opens,) if self.closes is None else (self.opens, self.closes)


def _json_calls(text: str, functions: Sequence[Function]) -> list[ParsedCall]:
    """JSON objects, one after another or in lists, with ``;`` or spaces between them."""
    return [_json_call(value) for value in _json_values(text)]


def _json_values(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    rest = text.strip(" \t\r\n;")
    while rest:
        value, end = decoder.raw_decode(rest)
        yield from value if isinstance(value, list) else [value]
        rest = rest[end:].strip(" \t\r\n;")


def _json_call(value: Any) -> ParsedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("expected an object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("expected the arguments to be an object")
    return ParsedCall(value["name"], json.dumps(arguments, ensure_ascii=False))


def _xml_calls(text: str, functions: Sequence[Function]) -> list[ParsedCall]:
    """``<function=name><parameter=key>value</parameter></function>``."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("expected <function=...>")
    types = _parameter_types(found[1], functions)
    arguments = {key: _typed(value, types.get(key)) for key, value in _PARAMETER.findall(found[2])}
    return [ParsedCall(found[1], json.dumps(arguments, ensure_ascii=False))]


def _parameter_types(name: str, functions: Sequence[Function]) -> Mapping[str, Any]:
    for function in functions:
        if function.name == name and function.parameters is not None:
            properties = function.parameters.get("properties")
            if isinstance(properties, dict):
                return {key: of.get("type") for key, of in properties.items() if type(of) is dict}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """A value as its schema has it; text where it is no JSON."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


TOOL_FORMATS = (
    ToolFormat(
        "qwen-xml", ("<function=",), "<tool_call>", "</tool_call>", _xml_calls, arguments_key=None
    ),
    ToolFormat("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", _json_calls),
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
