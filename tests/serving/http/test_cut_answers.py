"""Answers that `max_tokens` or a stop string cuts: no part of a call or a mark is content."""

import copy
from typing import Any

import pytest
from call_texts import CALL_TEXTS
from http_server import ScriptedEngine

from moe_runtime.serving.http.answer_text import REASONING_MARKS, AnswerSections, Kind
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.http.tool_formats import TOOL_FORMATS, ParsedCall
from moe_runtime.serving.requests import Finished, NewToken, PromptRead

FORMATS = {one.name: one for one in TOOL_FORMATS}
THINK = REASONING_MARKS[0]
WEATHER = Function(
    name="weather",
    parameters={"type": "object", "properties": {"city": {"type": "string"}, "days": {}}},
)
ROME = ParsedCall("weather", '{"city": "Rome"}')
CUT: list[tuple[str, str, list[Any]]] = [
    (
        'See <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
        "hermes",
        [("content", "See"), ROME, ROME],
    ),
    (
        "See <tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
        "</tool_call>",
        "qwen-xml",
        [("content", "See"), ROME],
    ),
    (
        'See [TOOL_CALLS]weather[CALL_ID]12[ARGS]{"city": "Rome"}[TOOL_CALLS]weather[ARGS]{}',
        "mistral-args",
        [("content", "See"), ROME, ParsedCall("weather", "{}")],
    ),
    (
        'See [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
        "mistral",
        [("content", "See"), ROME],
    ),
    (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "weather"}',
        "llama-json",
        [ROME, ParsedCall("weather", "{}")],
    ),
    (
        '{"name": "weather", "parameters": {"city": "Rome"}}; '
        '{"name": "weather", "parameters": {}}',
        "llama-json",
        [ROME, ParsedCall("weather", "{}")],
    ),
    (
        'See [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {}}]',
        "mistral",
        [("content", "See"), ROME, ParsedCall("weather", "{}")],
    ),
    (
        'See <tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}, '
        '{"name": "weather", "arguments": {}}]</tool_call>',
        "hermes",
        [("content", "See"), ROME, ParsedCall("weather", "{}")],
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
def test_a_call_that_has_only_begun_is_no_content(
    text: str, tools: str, expected: Any, step: int
) -> None:
    """Wherever `max_tokens` cuts a call, no part of it is text; a call is whole or missing."""
    whole = [part for part in expected if isinstance(part, ParsedCall)]
    before = "".join(part[1] for part in expected if isinstance(part, tuple))
    for end in range(len(before), len(text) + 1):
        sections = AnswerSections(THINK, FORMATS[tools], [WEATHER], "content")
        parts: list[Any] = []
        for at in range(0, end, step):
            parts += sections.add(text[at : min(at + step, end)])
        parts += sections.end(cut_by="")
        content = "".join(part[1] for part in parts if isinstance(part, tuple))
        assert content.startswith(before)
        # The first signs of a mark may be text.
        assert content.removeprefix(before).strip() in ("", "<", "<|", "<｜", "["), text[:end]
        calls = [part for part in parts if isinstance(part, ParsedCall)]
        assert calls == whole[: len(calls)]
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
    ],
)
def test_text_that_is_cut_stays_whole_behind_a_mention_of_a_mark(
    tools: str, text: str, step: int
) -> None:
    sections = AnswerSections(None, FORMATS[tools], [WEATHER])
    parts: list[Any] = []
    for at in range(0, len(text), step):
        parts += sections.add(text[at : at + step])
    parts += sections.end(cut_by="")
    assert "".join(part[1] for part in parts) == text


def content_of(sections: AnswerSections, text: str, cut_by: str) -> str:
    """The content where every character comes alone."""
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
def test_a_call_that_a_stop_string_cuts_is_no_content(
    tools: str, text: str, stop: str, content: str
) -> None:
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
def test_a_mark_that_has_only_begun_is_no_text(text: str, begins: Kind, expected: Any) -> None:
    sections = AnswerSections(THINK, FORMATS["hermes"], [WEATHER], begins)
    found = [*sections.add(text), *sections.end(cut_by="")]
    assert [part for part in found if part != ("content", " ")] == expected
    sections = AnswerSections(THINK, FORMATS["hermes"], [WEATHER], begins)
    ended: list[Any] = [*sections.add(text), *sections.end()]
    assert text.endswith(ended[-1][1])  # where the model ends by itself all of it is text


@pytest.mark.parametrize(
    "text", ['{"names": ["a"', '{"name": "Ann", "ag', "{ 7", "a < b", "no call [TOOL"]
)
def test_json_that_is_cut_stays_text_where_it_begins_no_call(text: str) -> None:
    sections = AnswerSections(None, FORMATS["llama-json"], [WEATHER])
    parts = [*sections.add(text), *sections.end(cut_by="")]
    assert "".join(part[1] for part in parts if isinstance(part, tuple)) == text


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
def test_an_answer_that_is_cut_within_a_call(
    staged: Any, tokenizer: Any, text: str, stop: str | None, content: str, is_streamed: bool
) -> None:
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
