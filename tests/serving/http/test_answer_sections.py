"""Reasoning, content and calls of tools, however the text of an answer is cut."""

from typing import Any

import pytest

from moe_runtime.serving.http.answers.answer_sections import REASONING_MARKS, AnswerSections, Kind
from moe_runtime.serving.http.answers.tool_formats import TOOL_FORMATS, ParsedCall, tool_format_of
from moe_runtime.serving.http.schema import Function

FORMATS = {one.name: one for one in TOOL_FORMATS}
THINK = REASONING_MARKS[0]
WEATHER = Function(
    name="weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {}}},
)
TEXT_OR_NONE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TYPED = Function(
    name="typed",
    parameters={
        "type": "object",
        "properties": {
            "zip": {"type": ["string", "null"]},
            "either": TEXT_OR_NONE,
            "one": {"enum": ["1", "2"]},
            "far": {"$ref": "#/$defs/code"},
            "gone": TEXT_OR_NONE,
            "word": {"type": "string"},
            "number": {"type": ["integer", "null"]},
        },
        "$defs": {"code": {"oneOf": [{"type": "integer"}, {"type": "string"}]}},
    },
)
TYPED_VALUES = [
    *(("zip", "12345"), ("either", "12345"), ("one", "1"), ("far", "7"), ("gone", "null")),
    *(("word", "null"), ("number", "5"), ("odd", "NaN")),
]
CASES: list[tuple[str, str | None, Kind, list[Any]]] = [
    ("plain \n\n", None, "content", [("content", "plain \n\n")]),
    ("  plain\n", "hermes", "content", [("content", "  plain\n")]),
    (
        "<think>\nwell\n\nyes\n</think>\n\nHello <think>\n",
        None,
        "content",
        [("reasoning", "well\n\nyes"), ("content", "Hello <think>\n")],
    ),
    ("well </think> Hello", None, "reasoning", [("reasoning", "well"), ("content", "Hello")]),
    ("never ends", None, "reasoning", [("reasoning", "never ends")]),
    (
        '<think>w</think>\nLook:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>{"name": "weather"}</tool_call>\n',
        "hermes",
        "content",
        [
            ("reasoning", "w"),
            ("content", "Look:"),
            ParsedCall("weather", '{"city": "Rome"}'),
            ParsedCall("weather", "{}"),
        ],
    ),
    (
        "see <tool_call>{no json}</tool_call> here",
        "hermes",
        "content",
        [("content", "see <tool_call>{no json}</tool_call> here")],
    ),
    ("<tool_call>" + "[" * 5000, "hermes", "content", [("content", "<tool_call>" + "[" * 5000)]),
    ('<tool_call>{"name": 7}', "hermes", "content", [("content", '<tool_call>{"name": 7}')]),
    (
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n"
        "</parameter>\n</function>\n</tool_call>",
        "qwen-xml",
        "content",
        [ParsedCall("weather", '{"city": "12", "days": 12}')],
    ),
    (
        "<tool_call><function=typed>"
        + "".join(f"<parameter={key}>{value}</parameter>" for key, value in TYPED_VALUES)
        + "</function></tool_call>",
        "qwen-xml",
        "content",
        [
            ParsedCall(
                "typed",
                '{"zip": "12345", "either": "12345", "one": "1", "far": "7", "gone": null, '
                '"word": "null", "number": 5, "odd": "NaN"}',
            )
        ],
    ),
    *(
        (text, "hermes", "content", [("content", text)])
        for value in ("NaN", "-Infinity", "1e999", '{"a": [-1e999]}')
        for text in [f'<tool_call>{{"name": "weather", "arguments": {{"x": {value}}}}}</tool_call>']
    ),
    (
        'ok [TOOL_CALLS] [{"name": "weather", "arguments": {"days": 2}}]',
        "mistral",
        "content",
        [("content", "ok"), ParsedCall("weather", '{"days": 2}')],
    ),
    (
        '{"name": "weather", "parameters": {"days": 1}}; {"name": "weather", "parameters": {}}',
        "llama-json",
        "content",
        [ParsedCall("weather", '{"days": 1}'), ParsedCall("weather", "{}")],
    ),
    ('{"days": 1}', "llama-json", "content", [("content", '{"days": 1}')]),
    ('Not {"name": "x"}', "llama-json", "content", [("content", 'Not {"name": "x"}')]),
    (
        '<|python_tag|>{"name": "weather", "parameters": {}}',
        "llama-json",
        "content",
        [ParsedCall("weather", "{}")],
    ),
]


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
@pytest.mark.parametrize(("text", "tools", "begins", "expected"), CASES)
def test_sections(text: str, tools: str | None, begins: Kind, expected: Any, step: int) -> None:
    sections = AnswerSections(THINK, tools and FORMATS[tools], [WEATHER, TYPED], begins)
    parts: list[Any] = []
    for at in range(0, len(text), step):
        parts += sections.add(text[at : at + step])
    found: list[Any] = []
    for part in [*parts, *sections.end()]:
        if isinstance(part, tuple) and found and found[-1][:1] == part[:1]:
            found[-1] = (part[0], found[-1][1] + part[1])
        else:
            found.append(part)
    assert found == expected


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=example>{% endif %}", "qwen-xml"),
        ("{% for tool in tools %}[TOOL_CALLS]", "mistral"),
        ('{% if tools %}{"name": name, "parameters": {}}', "llama-json"),
        ("<tool_call> is only mentioned", None),
        ("{% if tools %}do as you like", None),
    ],
)
def test_a_template_tells_how_its_model_calls_tools(source: str, name: str | None) -> None:
    found = tool_format_of(source)
    assert (found and found.name) == name
