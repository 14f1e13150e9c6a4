"""How families of models write calls of tools, from their published chat templates."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from moe_runtime.serving.http.schema import Function

_OBJECT = re.compile(r"\s*(\{\s*([\"}]|\Z)|\Z)")
_BETWEEN = " \t\r\n;"
CHOICES = ("anyOf", "oneOf", "allOf")
"""Keywords of a schema that list alternatives."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call of a tool; arguments are a JSON object, as text."""

    name: str
    arguments: str


class CallReader(NamedTuple):
    """Reads the text of calls.

    Attributes:
        parse: the calls of a text; raises ``ValueError`` if it is none.
        may_begin: whether a text may be the beginning of calls.
        begins: the first character of calls without a mark.
    """

    parse: Callable[[str, Sequence[Function]], Iterable[ParsedCall]]
    may_begin: Callable[[str, Sequence[Function]], bool]
    begins: str = ""


def read_json(text: str) -> Any:
    """A JSON value, without NaN and infinities; raises ``ValueError`` or ``RecursionError``."""
    return json.loads(text, parse_constant=_no_number, parse_float=_finite)


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


_DECODER = json.JSONDecoder(parse_constant=_no_number, parse_float=_finite)


def _json_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    values, rest = _json_values(text)
    for value in values:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("expected an object with a name")
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if not isinstance(arguments, dict):
            raise ValueError("expected the arguments to be an object")
        yield ParsedCall(value["name"], json_text(arguments))
    if rest:
        raise ValueError("expected a JSON value")


def _may_be_json_calls(text: str, functions: Sequence[Function]) -> bool:
    values, rest = _json_values(text)
    is_named = all(isinstance(value, dict) and "name" in value for value in values)
    return is_named and may_be_object(rest.removeprefix("["))


def may_be_object(text: str) -> bool:
    """Whether a text may begin a JSON object; an empty text may."""
    return _OBJECT.match(text) is not None


# Text without a mark may be the answer itself: it is a call only if it names a given tool.


def _bare_json_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    if not all(_is_bare_call(value, functions) for value in _json_values(text)[0]):
        raise ValueError("expected the name of a tool, and arguments")
    return _json_calls(text, functions)


def _may_be_bare_json(text: str, functions: Sequence[Function]) -> bool:
    values, rest = _json_values(text)
    heads = (
        f'{{{kind}"name":"{one.name}","{key}":'
        for one in functions
        for kind in ("", '"type":"function",')
        for key in ("parameters", "arguments")
    )
    is_call = all(_is_bare_call(value, functions) for value in values)
    return is_call and _begins_one(rest.removeprefix("["), heads)


def _is_bare_call(value: Any, functions: Sequence[Function]) -> bool:
    is_named = isinstance(value, dict) and any(value.get("name") == one.name for one in functions)
    return is_named and bool(value.keys() & {"arguments", "parameters"})


def _begins_one(text: str, heads: Iterable[str]) -> bool:
    begun = "".join(text.split())
    return any(begun.startswith(head) or head.startswith(begun) for head in heads)


def _json_values(text: str) -> tuple[list[Any], str]:
    """The complete values, lists flattened, and the text after them.

    The text begins with ``[`` if a list does not end.
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


JSON_CALLS = CallReader(_json_calls, _may_be_json_calls)
"""JSON objects in sequence or in lists, separated by ``;`` or spaces."""
BARE_JSON_CALLS = CallReader(_bare_json_calls, _may_be_bare_json, begins="{")


@dataclass(frozen=True, slots=True)
class _NamedCalls:
    """Reads calls that name the function before its arguments.

    ``begun`` matches an incomplete call. ``argument`` has groups ``key`` and ``value``; None if the
    arguments are one JSON object.
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]
    begun: re.Pattern[str]
    argument: re.Pattern[str] | None = None

    def parse(self, text: str, functions: Sequence[Function]) -> list[ParsedCall]:
        calls, rest = self._read(text, functions)
        if rest or not calls:
            raise ValueError("expected the name of a function, and its arguments")
        return calls

    def may_begin(self, text: str, functions: Sequence[Function]) -> bool:
        _, rest = self._read(text, functions)
        return not rest or self.begun.fullmatch(rest) is not None

    def _read(self, text: str, functions: Sequence[Function]) -> tuple[list[ParsedCall], str]:
        calls: list[ParsedCall] = []
        end, text = 0, text.rstrip()
        while found := self.head.match(text, end):
            if self.argument is None:
                try:
                    arguments, at = _DECODER.raw_decode(text, found.end())
                except (ValueError, RecursionError):
                    break
            else:
                arguments, at = self._tagged(text, found, functions)
            tail = self.tail.match(text, at)
            if tail is None or not isinstance(arguments, dict):
                break
            calls.append(ParsedCall(found["name"], json_text(arguments)))
            end = tail.end()
        return calls, text[end:]

    def _tagged(
        self, text: str, head: re.Match[str], functions: Sequence[Function]
    ) -> tuple[dict[str, Any], int]:
        """Separate arguments, and the position of their end."""
        assert self.argument is not None
        schema = next((one.parameters for one in functions if one.name == head["name"]), None) or {}
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        arguments, at = {}, head.end()
        while found := self.argument.match(text, at):
            key = found["key"].strip()
            arguments[key] = _typed(found["value"], known.get(key), schema)
            at = found.end()
        return arguments, at


def named_calls(head: str, tail: str, begins: str, argument: str | None = None) -> CallReader:
    """A reader of `_NamedCalls`; ``begins`` is a text, or an expression after ``^``."""
    if not begins.startswith("^"):
        cut = "|".join(re.escape(begins[:length]) for length in range(len(begins)))
        begins = rf"\s*(?:{cut}|{re.escape(begins)}.*)"
    expressions = (head, tail, begins, *(() if argument is None else (argument,)))
    reader = _NamedCalls(*(re.compile(one, re.DOTALL) for one in expressions))
    return CallReader(reader.parse, reader.may_begin)


_BEGUN_PYTHON = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", re.DOTALL)
_CONSTANTS = {"true": True, "false": False, "null": None}


def _python_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    if text.lstrip(" \t\r\n[").startswith("{"):
        yield from _json_calls(text, functions)
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes such as "\d"
            body = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError):  # MemoryError: brackets nest too deep
        raise ValueError("expected a list of calls") from None
    calls = body.elts if isinstance(body, ast.List) and body.elts else [body]
    for call in calls:
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("expected calls with named arguments")
        arguments = {one.arg: _literal(one.value) for one in call.keywords}
        if None in arguments:
            raise ValueError("expected the names of arguments")
        yield ParsedCall(ast.unparse(call.func), json_text(arguments))


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        keys = [one.value if isinstance(one, ast.Constant) else None for one in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    value = ast.literal_eval(node)
    if value is not None and not isinstance(value, str | bool | int | float):
        raise ValueError("expected a value that JSON has")
    return value


def _may_be_python_calls(text: str, functions: Sequence[Function]) -> bool:
    return _BEGUN_PYTHON.fullmatch(text) is not None or _may_be_json_calls(text, functions)


def _bare_python_calls(text: str, functions: Sequence[Function]) -> list[ParsedCall]:
    calls = [*_python_calls(text, functions)]
    if not {call.name for call in calls} <= {one.name for one in functions}:
        raise ValueError("expected the name of a tool")
    return calls


def _may_be_bare_python(text: str, functions: Sequence[Function]) -> bool:
    return _begins_one(text, (f"[{one.name}(" for one in functions))


PYTHON_CALLS = CallReader(_python_calls, _may_be_python_calls)
"""A list of Python calls with named literals as arguments; or JSON."""
BARE_PYTHON_CALLS = CallReader(_bare_python_calls, _may_be_bare_python, begins="[")


_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?P<arguments>\{.*\})\s*", re.DOTALL)
_GEMMA_BEGUN = re.compile(r"\s*(c|ca|cal|call|call:[\w.-]*\s*(\{.*)?)?", re.DOTALL)
_GEMMA_PART = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|"(?:[^"\\]|\\.)*"|(?P<key>[^\s{}\[\],:"<]+)(?=\s*:)"""
    r"|(?P<none>\bNone\b)",
    re.DOTALL,
)
"""A text between marks, a JSON string, a key without quotes, or Python's None."""


def _gemma_calls(text: str, functions: Sequence[Function]) -> Iterator[ParsedCall]:
    found = _GEMMA_CALL.fullmatch(text)
    if found is None:
        raise ValueError("expected call:NAME{...}")
    arguments = read_json(_GEMMA_PART.sub(_gemma_part, found["arguments"]))
    yield ParsedCall(found["name"], json_text(arguments))


def _gemma_part(found: re.Match[str]) -> str:
    if found["none"] is not None:
        return "null"
    text = found["key"] if found["text"] is None else found["text"]
    return found[0] if text is None else json.dumps(text)


GEMMA_CALLS = CallReader(_gemma_calls, lambda text, _: _GEMMA_BEGUN.fullmatch(text) is not None)
"""``call:NAME{key:value}``, texts between special marks."""


def _typed(value: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value by its schema: a text if the schema allows it, or if the value is not JSON."""
    texts, has_others, has_null = texts_of(schema, root)
    is_text = texts is None or value in texts or (texts and not has_others)
    if is_text and not (value == "null" and has_null):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and, if it has no type, its alternatives and references."""
    pending, seen = [schema], set()
    while pending:
        one = pending.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if one.get("type") is None:
            for key in CHOICES:
                pending += one[key] if isinstance(one.get(key), list) else []
            pending.append(referred(one.get("$ref"), root))


def texts_of(schema: Any, root: Mapping[str, Any]) -> tuple[list[str] | None, bool, bool]:
    """The texts that a schema allows (None for any); whether it allows other values, and null."""
    texts: dict[str, None] = {}
    is_any = has_others = has_null = False
    for one in alternatives(schema, root):
        types = one["type"] if isinstance(one.get("type"), list) else [one.get("type")]
        values = one["enum"] if isinstance(one.get("enum"), list) else []
        values = [*values, *([one["const"]] if "const" in one else [])]
        if types == [None] or "string" in types:
            texts |= dict.fromkeys(value for value in values if isinstance(value, str))
        is_any |= not values and "string" in types
        has_null |= "null" in types or (types == [None] and None in values)
        has_others |= any(not isinstance(value, str) for value in values)
        has_others |= not values and any(kind not in (None, "string") for kind in types)
    return None if is_any else list(texts), has_others, has_null


def referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """The target of a reference within a schema; None for other references."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks around calls.

    Attributes:
        closes: None if the calls end with the answer.
        are_read: the reader's texts include the marks.
    """

    opens: str
    closes: str | None
    are_read: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentWriting:
    """How separate arguments are written, in llguidance's Lark.

    ``ends_text`` ends a text without escapes, and is not Lark; None for JSON strings.
    """

    before_key: str
    before_value: str
    after_value: str = ""
    opens_text: str = ""
    ends_text: str | None = None
    between: str = ""
    any_key: str = r"/[^<>\s\"][^<>\r\n\"]*/"


@dataclass(frozen=True, slots=True)
class CallWriting:
    """How calls are written after the first opening mark, in llguidance's Lark.

    Attributes:
        call: has ``NAME`` and ``ARGUMENTS``.
        again: before each further call; None if there is only one.
        argument: of separate arguments; None if they are one JSON object.
    """

    call: str
    begins: str = ""
    again: str | None = ""
    ends: str = ""
    argument: ArgumentWriting | None = None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family writes calls.

    Attributes:
        known_by: a regular expression that matches chat templates of the family.
        marks: the marks of templates, then those that models write alone.
        inner_marks: further marks that may be special tokens.
        is_json: marks within JSON strings are text.
        bare: reads calls without marks.
    """

    name: str
    known_by: str
    marks: tuple[Marks, ...]
    reader: CallReader
    writing: CallWriting
    inner_marks: tuple[str, ...] = ()
    is_json: bool = False
    bare: CallReader | None = None

    @property
    def opens(self) -> tuple[str, ...]:
        return tuple(marks.opens for marks in self.marks)

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        closes = (marks.closes for marks in self.marks if marks.closes is not None)
        return (*self.opens, *closes, *self.inner_marks)


_XML = named_calls(
    r"\s*<function=(?P<name>[^>\s]+)>",
    r"\s*</function>\s*",
    "<function=",
    r"\s*<parameter=(?P<key>[^>\s]+)>\n?(?P<value>.*?)\n?</parameter>",
)
_INVOKE = named_calls(
    r'\s*<invoke name="?(?P<name>[^">\s]+)"?>',
    r"\s*</invoke>\s*",
    '<invoke name="',
    r'\s*<parameter name="?(?P<key>[^">]+)"?>\n?(?P<value>.*?)\n?</parameter>',
)
_PAIR = (
    r"\s*<{0}arg_key>(?P<key>[^<]*)</{0}arg_key>\s*"
    r"<{0}arg_value>(?P<value>.*?)</{0}arg_value>"
)
_PAIRS, _CAT_PAIRS = (
    named_calls(
        rf"\s*<{prefix}tool_call>\s*(?P<name>[\w.-]+)(?=\s*<)",
        rf"\s*</{prefix}tool_call>\s*",
        rf"^\s*<{prefix}tool_call>\s*(?:[\w.-]+\s*)?(<.*)?",
        _PAIR.format(prefix),
    )
    for prefix in ("", "longcat_")
)
_SEPARATED_PAIRS = named_calls(
    r"\s*<tool_call>\s*(?P<name>[^\s<]+)\s*<tool_sep>",
    r"\s*</tool_call>\s*",
    "<tool_call>",
    _PAIR.format(""),
)
_BRACKETS = named_calls(
    r"\s*\[TOOL_CALLS\]\s*(?P<name>[^\s\[{]+)\s*(\[CALL_ID\]\s*\w+\s*)?\[ARGS\]\s*",
    "",
    r"^\s*(\[[A-Z_]*|\[TOOL_CALLS\]\s*([\w.-]+\s*(\[CALL_ID\]\s*\w*\s*)?)?"
    r"(\[[A-Z_]*|\[ARGS\]\s*(\{.*)?)?)",
)
_KIMI = named_calls(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*",
    r"\s*<\|tool_call_end\|>\s*",
    "<|tool_call_begin|>",
)
_DEEPSEEK, _FENCED_DEEPSEEK = (
    named_calls(
        rf"\s*<｜tool▁call▁begin｜>\s*{kind}(?P<name>[\w.-]+)\s*{before}",
        rf"\s*{behind}<｜tool▁call▁end｜>\s*",
        "<｜tool▁call▁begin｜>",
    )
    for kind, before, behind in (
        ("", r"<｜tool▁sep｜>\s*", ""),
        (r"function\s*<｜tool▁sep｜>\s*", r"```json\s*", r"```\s*"),
    )
)


def _json_writing(key: str = "arguments", after: str = "", **around: Any) -> CallWriting:
    """A JSON object with name and arguments, between line breaks if a mark follows."""
    before = r"\n" if after else ""
    call = rf'"{before}{{\"name\": \"" NAME "\", \"{key}\": " ARGUMENTS "}}{before}" {after}'
    return CallWriting(call, **around)


def _xml_writing(mark: str, **around: Any) -> CallWriting:
    return CallWriting(
        rf'"\n<function=" NAME ">\n" ARGUMENTS "</function>\n" "</{mark}>"',
        argument=ArgumentWriting(
            '"<parameter="', r'">\n"', r'"\n</parameter>\n"', ends_text="\n</parameter>\n"
        ),
        **around,
    )


def _pair_marks(prefix: str = "") -> tuple[str, ...]:
    words = (f"{prefix}arg_key", f"{prefix}arg_value")
    return tuple(f"<{slash}{word}>" for word in words for slash in ("", "/"))


def _pair_writing(call: str, prefix: str = "", **around: Any) -> CallWriting:
    return CallWriting(
        call,
        argument=ArgumentWriting(
            rf'"\n"? "<{prefix}arg_key>"',
            rf'"</{prefix}arg_key>" "\n"? "<{prefix}arg_value>"',
            f'"</{prefix}arg_value>"',
            ends_text=f"</{prefix}arg_value>",
        ),
        **around,
    )


def _python_writing(ends: str) -> CallWriting:
    argument = ArgumentWriting("", '"="', between='", "', any_key="/[A-Za-z_][A-Za-z0-9_]*/")
    call = 'NAME "(" ARGUMENTS ")"'
    return CallWriting(call, begins='"["', again='", "', ends=ends, argument=argument)


def _deepseek_format(name: str, known_by: str, reader: CallReader, call: str) -> ToolFormat:
    return ToolFormat(
        name,
        known_by,
        (
            Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            Marks("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", are_read=True),
        ),
        reader,
        CallWriting(
            f'"<｜tool▁call▁begin｜>" {call} "<｜tool▁call▁end｜>"', ends='"<｜tool▁calls▁end｜>"'
        ),
        ("<｜tool▁sep｜>",),
        is_json=True,
    )


TOOL_FORMATS = (
    ToolFormat(
        "seed-xml",
        "<seed:tool_call>",
        (Marks("<seed:tool_call>", "</seed:tool_call>"),),
        _XML,
        _xml_writing("seed:tool_call", again='"\\n" "<seed:tool_call>"'),
    ),
    ToolFormat(
        "qwen-xml",
        "<function=",
        (Marks("<tool_call>", "</tool_call>"), Marks("<function=", "</function>", are_read=True)),
        _XML,
        _xml_writing("tool_call", again='"\\n" "<tool_call>"'),
    ),
    ToolFormat(
        "hunyuan-pairs",
        "<tool_sep>",
        (Marks("<tool_calls>", "</tool_calls>"),),
        _SEPARATED_PAIRS,
        _pair_writing(
            r'"\n" "<tool_call>" NAME "<tool_sep>" ARGUMENTS "\n"? "</tool_call>"',
            ends=r'"\n" "</tool_calls>"',
        ),
        ("<tool_call>", "</tool_call>", "<tool_sep>", *_pair_marks()),
    ),
    ToolFormat(
        "longcat",
        "<longcat_arg_key>",
        (Marks("<longcat_tool_call>", "</longcat_tool_call>", are_read=True),),
        _CAT_PAIRS,
        _pair_writing(
            r'NAME ARGUMENTS "\n"? "</longcat_tool_call>"',
            "longcat_",
            again=r'"\n" "<longcat_tool_call>"',
        ),
        _pair_marks("longcat_"),
    ),
    ToolFormat(
        "glm",
        "<arg_key>",
        (Marks("<tool_call>", "</tool_call>", are_read=True),),
        _PAIRS,
        _pair_writing(r'NAME ARGUMENTS "\n"? "</tool_call>"', again=r'"\n"? "<tool_call>"'),
        _pair_marks(),
    ),
    ToolFormat(
        "minimax",
        "<minimax:tool_call>",
        (
            Marks("<minimax:tool_call>", "</minimax:tool_call>"),
            Marks('<invoke name="', "</invoke>", are_read=True),
        ),
        _INVOKE,
        CallWriting(
            r'"<invoke name=\"" NAME "\">\n" ARGUMENTS "</invoke>\n"',
            begins=r'"\n"',
            ends='"</minimax:tool_call>"',
            argument=ArgumentWriting(
                r'"<parameter name=\""', r'"\">"', r'"</parameter>\n"', ends_text="</parameter>\n"
            ),
        ),
    ),
    ToolFormat(
        "kimi-k2",
        r"<\|tool_calls_section_begin\|>",
        (
            Marks("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            Marks("<|tool_call_begin|>", "<|tool_call_end|>", are_read=True),
        ),
        _KIMI,
        CallWriting(
            '"<|tool_call_begin|>" "functions." NAME ":" /[0-9]{1,4}/ '
            '"<|tool_call_argument_begin|>" ARGUMENTS "<|tool_call_end|>"',
            ends='"<|tool_calls_section_end|>"',
        ),
        ("<|tool_call_argument_begin|>",),
        is_json=True,
    ),
    _deepseek_format(
        "deepseek-v3",
        "tool▁calls▁begin[\\s\\S]*```json",
        _FENCED_DEEPSEEK,
        r'"function" "<｜tool▁sep｜>" NAME "\n```json\n" ARGUMENTS "\n```"',
    ),
    _deepseek_format(
        "deepseek-v3.1", "tool▁calls▁begin", _DEEPSEEK, 'NAME "<｜tool▁sep｜>" ARGUMENTS'
    ),
    ToolFormat(
        "gemma-4",
        r"<\|tool_call>",
        (Marks("<|tool_call>", "<tool_call|>"),),
        GEMMA_CALLS,
        CallWriting(
            '"call:" NAME "{" ARGUMENTS "}" "<tool_call|>"',
            again='"<|tool_call>"',
            argument=ArgumentWriting(
                "",
                '":"',
                opens_text='"<|\\"|>"',
                ends_text='<|"|>',
                between='","',
                any_key=r"/[^\s{}\[\],:\"<]+/",
            ),
        ),
        ('<|"|>',),
    ),
    ToolFormat(
        "lfm2",
        r"<\|tool_(call_start|list_start)\|>",
        (Marks("<|tool_call_start|>", "<|tool_call_end|>"),),
        PYTHON_CALLS,
        _python_writing('"]" "<|tool_call_end|>"'),
    ),
    ToolFormat(
        "llama-pythonic",
        r"func_name1\(",
        (Marks("<|python_start|>", "<|python_end|>"),),
        PYTHON_CALLS,
        _python_writing('"]"'),
        bare=BARE_PYTHON_CALLS,
    ),
    ToolFormat(
        "hunyuan",
        "<tool_calls>",
        (Marks("<tool_calls>", "</tool_calls>"),),
        JSON_CALLS,
        _json_writing(begins='"["', again='", "', ends='"]" "</tool_calls>"'),
        is_json=True,
    ),
    ToolFormat(
        "hermes",
        "<tool_call>",
        (Marks("<tool_call>", "</tool_call>"),),
        JSON_CALLS,
        _json_writing(after='"</tool_call>"', again=r'"\n" "<tool_call>"'),
        is_json=True,
    ),
    ToolFormat(
        "mistral-args",
        r"\[ARGS\]",
        (Marks("[TOOL_CALLS]", None, are_read=True),),
        _BRACKETS,
        CallWriting(
            'NAME ("[CALL_ID]" /[a-zA-Z0-9]{9}/)? "[ARGS]" ARGUMENTS', again='"[TOOL_CALLS]"'
        ),
        ("[CALL_ID]", "[ARGS]"),
    ),
    ToolFormat(
        "mistral",
        r"\[TOOL_CALLS\]",
        (Marks("[TOOL_CALLS]", None),),
        JSON_CALLS,
        _json_writing(begins='"["', again='", "', ends='"]"'),
    ),
    ToolFormat(
        "llama-json",
        r'<\|python_tag\|>|"parameters":',
        (Marks("<|python_tag|>", None), Marks("<|python_start|>", "<|python_end|>")),
        JSON_CALLS,
        _json_writing("parameters", again=None),
        bare=BARE_JSON_CALLS,
    ),
)
"""The first format whose ``known_by`` matches a template wins."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The known format of a chat template, or None."""
    if "tools" not in template:
        return None
    found = (one for one in TOOL_FORMATS if re.search(one.known_by, template))
    return next(found, None)
