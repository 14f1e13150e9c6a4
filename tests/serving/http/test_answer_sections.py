"""Reasoning, content and calls of tools, however the text of an answer is cut."""

import copy
from typing import Any

import pytest
from http_server import ScriptedEngine, model_of, served

from moe_runtime.serving.http.answers.answer_sections import REASONING_MARKS, AnswerSections, Kind
from moe_runtime.serving.http.answers.call_readers import ParsedCall
from moe_runtime.serving.http.answers.tool_formats import TOOL_FORMATS, tool_format_of
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.requests import Finished, NewToken, PromptRead

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
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\\\"}}</tool_call> b'
        '<tool_call>{"name": "weather", "arguments": {"city": "\\"</tool_call>"}}',
        "hermes",
        "content",
        [
            ParsedCall("weather", '{"city": "a</tool_call>\\\\"}'),
            ("content", "b"),
            ParsedCall("weather", '{"city": "\\"</tool_call>"}'),
        ],
    ),
    # a string without an end
    (
        '<tool_call>{"name": "weath</tool_call>c<tool_call>{"name": "weather"}</tool_call>'
        '<tool_call>{"name</tool_call>d',
        "hermes",
        "content",
        [
            ("content", '<tool_call>{"name": "weath</tool_call>c'),
            ParsedCall("weather", "{}"),
            ("content", '<tool_call>{"name</tool_call>d'),
        ],
    ),
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
        'ok [TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]x[ARGS]"}[TOOL_CALLS]weather[CALL_ID]'
        "123456789[ARGS]{}\n",
        "mistral-args",
        "content",
        [
            ("content", "ok"),
            ParsedCall("weather", '{"city": "[TOOL_CALLS]x[ARGS]"}'),
            ParsedCall("weather", "{}"),
        ],
    ),
    *(
        (text, "mistral-args", "content", [("content", text)])
        for text in (
            "[TOOL_CALLS]",
            "[TOOL_CALLS]weather[ARGS][7]",
            "[TOOL_CALLS]weather[ARGS]{} and",
            '[TOOL_CALLS]weather[ARGS]{"days": NaN}',
        )
    ),
    (
        '{"name": "weather", "parameters": {"days": 1}}; {"name": "weather", "parameters": {}}',
        "llama-json",
        "content",
        [ParsedCall("weather", '{"days": 1}'), ParsedCall("weather", "{}")],
    ),
    *(
        (text, "llama-json", "content", [("content", text)])
        for text in (
            '{"name": "Ann", "age": 3}',
            '{"name": "Ann", "parameters": {}}',
            '{"name": "weather", "age": 3}',
            '{"name": ["weather"], "parameters": {}}',
        )
    ),
    (
        '<|python_tag|>{"name": 3}',
        "llama-json",
        "content",
        [("content", '<|python_tag|>{"name": 3}')],
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
        last = found[-1] if found and isinstance(found[-1], tuple) else None
        if last and isinstance(part, tuple) and last[0] == part[0]:
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
        ("{% if tools %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}", "mistral-args"),
        ('{% if tools %}{"name": name, "parameters": {}}', "llama-json"),
        ("<tool_call> is only mentioned", None),
        ("{% if tools %}do as you like", None),
    ],
)
def test_a_template_tells_how_its_model_calls_tools(source: str, name: str | None) -> None:
    found = tool_format_of(source)
    assert (found and found.name) == name


@pytest.mark.parametrize("kind", ["json_schema", "grammar", None])
def test_json_that_was_asked_for_is_no_call(tokenizer: Any, kind: str | None) -> None:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = '{% if tools %}{"name": 1, "parameters": 2}{% endif %}Who?'
    text = '{"name": "weather", "parameters": {"city": "<|python_tag|>"}}'
    tokens = [NewToken(token) for token in tokenizer(text)["input_ids"]]
    engine = ScriptedEngine(lambda _: [PromptRead(0), *tokens, Finished("stop")])
    formats = {
        "json_schema": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        "grammar": {"type": "grammar", "grammar": "start: /.*/"},
        None: None,
    }
    tools = [{"type": "function", "function": WEATHER.model_dump(exclude_none=True)}]
    asked = {"messages": [{"role": "user", "content": ""}], "tools": tools}
    with served([model_of("m", engine, tokenizer, 4096)]) as site:
        status, answer = site.ask(
            "/v1/chat/completions", {**asked, "response_format": formats[kind]}
        )
    assert status == 200, answer
    (choice,) = answer["choices"]
    if kind == "json_schema":
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
    else:
        assert ("tool_calls" in choice["message"]) == (kind is None)
