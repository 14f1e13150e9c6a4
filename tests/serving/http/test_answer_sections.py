"""Reasoning, content and calls of tools, however the text of an answer is cut or ends."""

import copy
from typing import Any

import pytest
from call_texts import CALL_TEXTS
from http_server import ScriptedEngine

from moe_runtime.serving.http.answer_text import REASONING_MARKS, AnswerSections
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.http.tool_formats import TOOL_FORMATS, ParsedCall, tool_format_of
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
            "few": {"anyOf": [{"type": "integer"}, {"const": "many"}]},
        },
        "$defs": {"code": {"oneOf": [{"type": "integer"}, {"type": "string"}]}},
    },
)
TYPED_VALUES = [
    *(("zip", "12345"), ("either", "12345"), ("one", "1"), ("far", "7"), ("gone", "null")),
    *(("word", "null"), ("number", "5"), ("odd", "NaN"), ("few", "3")),
]
NO_CALLS: dict[str, list[str]] = {
    "hermes": [
        "  plain\n",
        "see <tool_call>{no json}</tool_call> here",
        "<tool_call>" + "[" * 5000,
        '<tool_call>{"name": 7}',
        *(
            f'<tool_call>{{"name": "weather", "arguments": {{"x": {value}}}}}</tool_call>'
            for value in ("NaN", "-Infinity", "1e999", '{"a": [-1e999]}')
        ),
    ],
    "mistral-args": [
        *("[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS][7]", "[TOOL_CALLS]weather[ARGS]{} and"),
        '[TOOL_CALLS]weather[ARGS]{"days": NaN}',
    ],
    "llama-json": [
        *('{"name": "Ann", "age": 3}', '{"name": "Ann", "parameters": {}}', '{"days": 1}'),
        *('{"name": "weather", "age": 3}', '{"name": ["weather"], "parameters": {}}'),
        *('<|python_tag|>{"name": 3}', 'Not {"name": "x"}'),
    ],
    "glm": [
        "<tool_call>hello world</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key>Rome</tool_call>",
    ],
    "qwen-xml": ["<tool_call><function=weather><parameter=city>Rome</function></tool_call>"],
    "minimax": ['<minimax:tool_call><invoke name="weather">Rome</invoke></minimax:tool_call>'],
    "kimi-k2": ["<|tool_calls_section_begin|>weather<|tool_calls_section_end|>"],
    "gemma-4": ["<|tool_call>call:weather{city:<tool_call|>"],
    "lfm2": [
        "<|tool_call_start|>[weather(Rome)]<|tool_call_end|>",
        "<|tool_call_start|>[weather(city=open('x'))]<|tool_call_end|>",
        "<|tool_call_start|>[weather(days=1e999)]<|tool_call_end|>",
        "<|tool_call_start|>" + "(" * 5000 + "<|tool_call_end|>",
    ],
    "llama-pythonic": ["[rain(city='Rome')]", "[1, 2]"],
}
"""By format, what is content as a whole."""
NONE = ParsedCall("weather", "{}")
ROME = ParsedCall("weather", '{"city": "Rome"}')
CASES: list[tuple[str | None, str, list[Any]]] = [
    *((name, text, [("content", text)]) for name, texts in NO_CALLS.items() for text in texts),
    (None, "plain \n\n", [("content", "plain \n\n")]),
    (
        None,
        "<think>\nwell\n\nyes\n</think>\n\nHello <think>\n",
        [("reasoning", "well\n\nyes"), ("content", "Hello <think>\n")],
    ),
    (
        "hermes",
        '<think>w</think>\nLook:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>{"name": "weather"}</tool_call>\n',
        [("reasoning", "w"), ("content", "Look:"), ROME, NONE],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\\\"}}</tool_call> b'
        '<tool_call>{"name": "weather", "arguments": {"city": "\\"</tool_call>"}}',
        [
            ParsedCall("weather", '{"city": "a</tool_call>\\\\"}'),
            ("content", "b"),
            ParsedCall("weather", '{"city": "\\"</tool_call>"}'),
        ],
    ),
    # a string without an end
    (
        "hermes",
        '<tool_call>{"name": "weath</tool_call>c<tool_call>{"name": "weather"}</tool_call>'
        '<tool_call>{"name</tool_call>d',
        [
            ("content", '<tool_call>{"name": "weath</tool_call>c'),
            NONE,
            ("content", '<tool_call>{"name</tool_call>d'),
        ],
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n12\n"
        "</parameter>\n</function>\n</tool_call>",
        [ParsedCall("weather", '{"city": "12", "days": 12}')],
    ),
    (
        "qwen-xml",
        "<tool_call><function=typed>"
        + "".join(f"<parameter={key}>{value}</parameter>" for key, value in TYPED_VALUES)
        + "</function></tool_call>",
        [
            ParsedCall(
                "typed",
                '{"zip": "12345", "either": "12345", "one": "1", "far": "7", "gone": null, '
                '"word": "null", "number": 5, "odd": "NaN", "few": 3}',
            )
        ],
    ),
    (
        "mistral",
        'ok [TOOL_CALLS] [{"name": "weather", "arguments": {"days": 2}}]',
        [("content", "ok"), ParsedCall("weather", '{"days": 2}')],
    ),
    (
        "mistral-args",
        'ok [TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]x[ARGS]"}[TOOL_CALLS]weather[CALL_ID]'
        "123456789[ARGS]{}\n",
        [("content", "ok"), ParsedCall("weather", '{"city": "[TOOL_CALLS]x[ARGS]"}'), NONE],
    ),
    (
        "llama-json",
        '{"name": "weather", "parameters": {"days": 1}}; {"name": "weather", "parameters": {}}',
        [ParsedCall("weather", '{"days": 1}'), NONE],
    ),
    *(
        ("llama-json", text, [NONE])
        for text in (
            '<|python_tag|>{"name": "weather", "parameters": {}}',
            '<|python_start|>{"name": "weather", "parameters": {}}<|python_end|>',
        )
    ),
    # the mark that opens calls is forgotten
    (
        "qwen-xml",
        "Well.\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        [("content", "Well."), ROME],
    ),
    ("minimax", '<invoke name="weather">\n</invoke>\n</minimax:tool_call>', [NONE]),
    (
        "kimi-k2",
        "<|tool_call_begin|>functions.weather:12<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [NONE],
    ),
    (
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>ok",
        [NONE, ("content", "ok")],
    ),
    # without line breaks, as GLM-4.7 has it; without arguments
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>12</arg_value></tool_call>"
        "<tool_call>weather</tool_call>",
        [ParsedCall("weather", '{"city": "12"}'), NONE],
    ),
    (
        "gemma-4",
        'Look: <|tool_call>call:typed{zip:<|"|>1 {"a": b}<|"|>,list:[1,{a:<|"|>x:y<|"|>,'
        '"b c":None}],'
        "number:-1.5e3,word:null}<tool_call|>",
        [
            ("content", "Look:"),
            ParsedCall(
                "typed",
                '{"zip": "1 {\\"a\\": b}", "list": [1, {"a": "x:y", "b c": null}], '
                '"number": -1500.0, "word": null}',
            ),
        ],
    ),
    (
        "lfm2",
        "<|tool_call_start|>[typed(zip='a\\'b', number=-2, far=[True, false, {'k': None}]), "
        "weather()]<|tool_call_end|>Done.",
        [
            ParsedCall("typed", '{"zip": "a\'b", "number": -2, "far": [true, false, {"k": null}]}'),
            *(NONE, ("content", "Done.")),
        ],
    ),
    # a mark that is talked about while thinking
    (
        "hermes",
        "<think>I may use <tool_call> here, or <tool_call>{} </think>Hello",
        [("reasoning", "I may use <tool_call> here, or <tool_call>{}"), ("content", "Hello")],
    ),
]
THINKING: list[tuple[str | None, str, list[Any]]] = [
    (None, "well </think> Hello", [("reasoning", "well"), ("content", "Hello")]),
    (None, "never ends", [("reasoning", "never ends")]),
    (
        "hermes",
        'Try <tool_call>{"name": "weather"}</tool_call> so</think> Hello </think>',
        [("reasoning", "Try"), NONE, ("content", "so Hello </think>")],
    ),
    (
        "qwen-xml",
        "<tool_call>\n<function=weather> or so.\n</think>\nHello",
        [("reasoning", "<tool_call>\n<function=weather> or so."), ("content", "Hello")],
    ),
]
"""Of answers that begin within reasoning."""


def in_pieces(sections: AnswerSections, text: str, step: int) -> list[Any]:
    """The parts of a text that comes in pieces, neighbours of one kind joined."""
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
    return found


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("begins", "tools", "text", "expected"),
    [*(("content", *case) for case in CASES), *(("reasoning", *case) for case in THINKING)],
)
def test_sections(begins, tools, text, expected, step):
    sections = AnswerSections(THINK, tools and FORMATS[tools], [WEATHER, TYPED], begins)
    assert in_pieces(sections, text, step) == expected


BOTH = [("Rome, \u6f22", "2"), ("<b>1</b>", "[3]")]
CALLED = [ParsedCall("weather", f'{{"city": "{city}", "days": {days}}}') for city, days in BOTH]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("name", CALL_TEXTS)
def test_calls_are_read_as_templates_write_them(name, step):
    assert CALL_TEXTS.keys() == FORMATS.keys()
    how, text = FORMATS[name], CALL_TEXTS[name].of(BOTH)
    if name == "llama-json":
        text = CALL_TEXTS[name].of(BOTH[:1])
    called = CALLED[: 1 if name == "llama-json" else 2]
    assert in_pieces(AnswerSections(THINK, how, [WEATHER]), text, step) == called
    thought = f"<think>Well.{text}"
    expected = [("reasoning", "Well."), *called]
    if how.bare is None:
        assert in_pieces(AnswerSections(THINK, how, [WEATHER]), thought, step) == expected
        before = f"Look:\n{text}\nDone"
        expected = [("content", "Look:"), *called, ("content", "Done")]
        if how.marks[0].closes is not None:
            assert in_pieces(AnswerSections(THINK, how, [WEATHER]), before, step) == expected


@pytest.mark.parametrize("name", ["glm", "hunyuan-pairs", "longcat"])
def test_a_call_that_is_all_spaces_is_read_in_one_pass(name):
    opens, prefix = FORMATS[name].opens[0], "longcat_" if name == "longcat" else ""
    call = f"{prefix}tool_call>weather" + "<tool_sep>" * (name == "hunyuan-pairs")
    text = f"{opens * (name == 'hunyuan-pairs')}<{call}<{prefix}arg_key>{' ' * 20_000}x"
    sections = AnswerSections(THINK, FORMATS[name], [WEATHER])
    assert [*sections.add(text), *sections.end()] == [("content", text)]  # else it takes hours


def test_a_mark_within_reasoning_is_one_however_the_text_is_cut():
    mark, text = "<minimax:tool_call>", CALL_TEXTS["minimax"].of(BOTH)
    for step in (1, 10_000):
        sections = AnswerSections(THINK, FORMATS["minimax"], [WEATHER], "reasoning")
        assert in_pieces(sections, mark + text, step) == [("reasoning", mark), *CALLED]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=example>{% endif %}", "qwen-xml"),
        ("{% for tool in tools %}[TOOL_CALLS]", "mistral"),
        ("{% if tools %}[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments }}", "mistral-args"),
        ('{% if tools %}{"name": name, "parameters": {}}', "llama-json"),
        *(("{% if tools %}" + one.template, name) for name, one in CALL_TEXTS.items()),
        ("<tool_call> is only mentioned", None),
        ("{% if tools %}do as you like", None),
    ],
)
def test_a_template_tells_how_its_model_calls_tools(source, name):
    found = tool_format_of(source)
    assert (found and found.name) == name


@pytest.mark.parametrize("kind", ["json_schema", "grammar", None])
def test_json_that_was_asked_for_is_no_call(staged, tokenizer, kind):
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
    site = staged(engine, own=tokenizer)
    answer = site.answer("/v1/chat/completions", {**asked, "response_format": formats[kind]})
    (choice,) = answer["choices"]
    if kind == "json_schema":
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
    else:
        assert ("tool_calls" in choice["message"]) == (kind is None)


def test_what_a_model_writes_makes_python_warn_of_nothing(recwarn):
    text = r'<|tool_call_start|>[weather(city="\d")]<|tool_call_end|>'
    sections = AnswerSections(None, FORMATS["lfm2"], [WEATHER])
    assert [*sections.add(text), *sections.end()] == [ParsedCall("weather", r'{"city": "\\d"}')]
    assert not recwarn.list


CUT: list[tuple[str, str, list[Any]]] = [
    (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "weather"}',
        "llama-json",
        [ROME, NONE],
    ),
    (
        '{"name": "weather", "parameters": {"city": "Rome"}}; '
        '{"name": "weather", "parameters": {}}',
        "llama-json",
        [ROME, NONE],
    ),
    (
        'See [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {}}]',
        "mistral",
        [("content", "See"), ROME, NONE],
    ),
    (
        'See <tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {}}]</tool_call>',
        "hermes",
        [("content", "See"), ROME, NONE],
    ),
    *(
        (
            f"See {text.of([('Rome', '1'), ('Rome', '1')])}",
            name,
            [("content", "See"), *[ParsedCall("weather", '{"city": "Rome", "days": 1}')] * 2],
        )
        for name, text in CALL_TEXTS.items()
        if FORMATS[name].bare is None
    ),
]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(("text", "tools", "expected"), CUT)
def test_a_call_that_has_only_begun_is_no_content(text, tools, expected, step):
    whole = [part for part in expected if isinstance(part, ParsedCall)]
    before = "".join(part[1] for part in expected if isinstance(part, tuple))
    shared = {id(one): one for one in (THINK, FORMATS[tools], WEATHER)}
    sections = AnswerSections(THINK, FORMATS[tools], [WEATHER], "content")
    calls, taken = list[ParsedCall](), list[Any]()
    for at in range(0, len(text), step):
        for end in range(max(at, len(before)), min(at + step, len(text)) + 1):
            ended = copy.deepcopy(sections, dict(shared))
            parts = [*taken, *ended.add(text[at:end]), *ended.end(cut_by="")]
            content = "".join(part[1] for part in parts if isinstance(part, tuple))
            assert content.startswith(before)
            # The first signs of a mark may be text.
            assert content.removeprefix(before).strip() in ("", "<", "<|", "<｜", "["), text[:end]
            calls = [part for part in parts if isinstance(part, ParsedCall)]
            assert calls == whole[: len(calls)]
        taken += sections.add(text[at : at + step])
    assert calls == whole


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "Wrap it in <tool_call> tags; a long explanation"),
        ("hermes", "if a <"),
        ("hermes", '<tool_call>{"a": 1}</tool_c'),
        ("hermes", "<tool_call>[1, 2"),
        ("hermes", '<tool_call>{"name": "weather"} and text'),
        ("qwen-xml", "Wrap it in <tool_call> tags; a long explanation"),
        ("qwen-xml", "<tool_call><func>"),
        ("mistral", "see [TOOL_CALLS] in the docs"),
        ("mistral", "[TOOL_CALLS][see below"),
        ("mistral-args", "see [TOOL_CALLS] in the docs"),
        ("mistral-args", '[TOOL_CALLS]weather[ARGS]{"a": 1} and text'),
        ("llama-json", "use <|python_tag|> for that"),
        ("llama-json", '{"available": [{"name": "weather", "note'),
        ("llama-json", '{"name": "weather", "note": "r'),
        ("llama-json", '{"name": "weather", "parameters": {}} and text'),
        # JSON that begins no call
        *(
            ("llama-json", text)
            for text in ('{"names": ["a"', '{"name": "Ann", "ag', "{ 7", "a < b", "no call [TOOL")
        ),
    ],
)
def test_text_that_is_cut_stays_whole_behind_a_mention_of_a_mark(tools, text, step):
    sections = AnswerSections(None, FORMATS[tools], [WEATHER])
    parts: list[Any] = []
    for at in range(0, len(text), step):
        parts += sections.add(text[at : at + step])
    parts += sections.end(cut_by="")
    assert "".join(part[1] for part in parts) == text


def content_of(sections: AnswerSections, text: str, cut_by: str) -> str:
    parts: list[Any] = [part for char in text for part in sections.add(char)]
    parts += sections.end(cut_by=cut_by)
    return "".join(part[1] for part in parts if part[0] == "content")


@pytest.mark.parametrize(
    ("tools", "text", "stop", "content"),
    [
        ("hermes", 'See <tool_call>{"name": "weather", "argum', "ents", "See"),
        ("hermes", 'See <tool_call>{"name": "weather", "arguments": {}', "}", "See"),
        ("hermes", "See <tool_call>", "\n", "See"),
        ("hermes", "Wrap it in <tool_call>{", "tags", "Wrap it in <tool_call>{"),
        ("qwen-xml", "See <tool_call><function=weather><parameter=", "city", "See"),
        ("qwen-xml", "See <tool_call><func", ">", "See <tool_call><func"),
        ("mistral", 'See [TOOL_CALLS][{"name"', ":", "See"),
        ("mistral-args", "See [TOOL_CALLS]wea", "ther", "See"),
        ("mistral-args", "see [TOOL_CALLS]", " in the docs", "see [TOOL_CALLS]"),
        ("llama-json", '{"name": "weather", "par', "ameters", ""),
        ("llama-json", '{"name": "weather", ', '"note', '{"name": "weather", '),
        # a mark that the stop string goes on with, and text
        ("hermes", "See <tool", "_call", "See "),
        ("hermes", "See <tool", "_call>{", "See "),
        ("hermes", "See <tool", "s>", "See <tool"),
    ],
)
def test_a_call_that_a_stop_string_cuts_is_no_content(tools, text, stop, content):
    assert content_of(AnswerSections(THINK, FORMATS[tools], [WEATHER]), text, stop) == content


@pytest.mark.parametrize(
    ("text", "begins", "expected"),
    [
        ("<thi", "content", []),
        ("<", "content", [("content", "<")]),
        ("Hi <thi", "content", [("content", "Hi"), ("content", " <thi")]),  # no reasoning any more
        ("well</thi", "reasoning", [("reasoning", "well")]),
        ("well <", "reasoning", [("reasoning", "well"), ("reasoning", " <")]),
        ("well <too", "reasoning", [("reasoning", "well")]),
        ("<think>well</think>Hi <to", "content", [("reasoning", "well"), ("content", "Hi")]),
    ],
)
def test_a_mark_that_has_only_begun_is_no_text(text, begins, expected):
    sections = AnswerSections(THINK, FORMATS["hermes"], [WEATHER], begins)
    found = [*sections.add(text), *sections.end(cut_by="")]
    assert [part for part in found if part != ("content", " ")] == expected
    sections = AnswerSections(THINK, FORMATS["hermes"], [WEATHER], begins)
    ended: list[Any] = [*sections.add(text), *sections.end()]
    assert text.endswith(ended[-1][1])  # where the model ends by itself all of it is text


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ('See <tool_call>{"name": "weather", "argum', None, "See"),
        ("See <tool_ca", None, "See "),
        ('See <tool_call>{"name": "weather", "arguments"', "argum", "See"),
        ("See <tool_calls>", "s>", "See <tool_call"),
    ],
)
def test_an_answer_that_is_cut_within_a_call(staged, tokenizer, text, stop, content, is_streamed):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}Who?"
    tokens = [NewToken(token) for token in tokenizer(text)["input_ids"]]
    engine = ScriptedEngine(lambda _: [PromptRead(0), *tokens, Finished("length")])
    tools = [{"type": "function", "function": WEATHER.model_dump(exclude_none=True)}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "tools": tools}
    body |= {"stream": is_streamed, **({} if stop is None else {"stop": stop})}
    site = staged(engine, own=tokenizer)
    if is_streamed:
        chunks = site.stream("/v1/chat/completions", body)
        choices = [one["choices"][0] for one in chunks if isinstance(one, dict)]
        messages = [choice["delta"] for choice in choices]
    else:
        choices = site.ask("/v1/chat/completions", body)[1]["choices"]
        messages = [choices[0]["message"]]
    assert "".join(message.get("content") or "" for message in messages) == content
    assert not any("tool_calls" in message for message in messages)
    assert choices[-1]["finish_reason"] == ("length" if stop is None else "stop")
