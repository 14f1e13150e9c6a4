"""How families of models write calls of tools, as data, after their published chat templates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moe_runtime.serving.http.call_readers import (
    BARE_JSON_CALLS,
    BARE_PYTHON_CALLS,
    GEMMA_CALLS,
    JSON_CALLS,
    PYTHON_CALLS,
    CallReader,
    named_calls,
)


@dataclass(frozen=True, slots=True)
class Marks:
    """What a call, or several, stands between; ``closes`` is None up to the end of the answer."""

    opens: str
    closes: str | None
    are_read: bool = False


@dataclass(frozen=True, slots=True)
class ArgumentWriting:
    """How arguments are written one by one, in llguidance's Lark but for ``ends_text``.

    Attributes:
        ends_text: a text has no escapes and goes up to this; None where it is a JSON string.
        any_key: what the name may be where the schema names none.
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
    """How calls are written behind the mark that opens the first, in llguidance's Lark.

    Attributes:
        call: a call; ``NAME`` and ``ARGUMENTS`` stand for those of a function.
        again: stands before each further one; None where there is one at most.
        argument: how arguments are written; None where they are one JSON object.
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
        known_by: a regular expression that the chat template of such a model has.
        marks: around calls: those that templates write, then those that models write alone.
        inner_marks: further ones, which may be special tokens too.
        is_json: marks within JSON's strings are text.
        bare: of calls without marks.
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
    """A JSON object with name and arguments, behind white space where a mark comes after it."""
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
"""In the order in which a chat template is searched for them."""


def tool_format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it teaches none that is known."""
    if "tools" not in template:
        return None
    found = (one for one in TOOL_FORMATS if re.search(one.known_by, template))
    return next(found, None)
