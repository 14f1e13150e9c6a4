"""What Anthropic's own client gets from ``/v1/messages``: blocks, events, tools and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from http_server import ScriptedEngine, Served, served_engine

from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.server import Access
from moe_runtime.serving.requests import Finished, NewToken, PromptRead

if TYPE_CHECKING:
    import anthropic

PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OFF: Any = {"type": "disabled"}
THINKS = "{% if tools %}<tool_call>{% endif %}{% if enable_thinking %}<think></think>{% endif %}"


def client_of(site: Served, **options: Any) -> anthropic.Anthropic:
    import anthropic

    options = {"api_key": "none", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=site.address, **options)


def test_a_message_is_the_text_of_a_chat(site):
    chat: Any = {"messages": [{"role": "system", "content": "S"}, *USER], "temperature": 0}
    chat["chat_template_kwargs"] = {"enable_thinking": False}
    _, plain = site.ask("/v1/chat/completions", {**chat, "max_tokens": 12})
    asked: Any = {"model": "pocket", "system": "S", "messages": USER, "thinking": OFF}
    more: Any = {"max_tokens": 12, "extra_body": {"temperature": 0}}
    with client_of(site) as client:
        found = client.messages.create(**asked, **more)
        with client.messages.stream(**asked, **more) as stream:
            events = [event.type for event in stream]
            streamed = stream.get_final_message()
        counted = client.messages.count_tokens(**asked)
    assert found.content[0].type == "text"
    assert found.content[0].text == plain["choices"][0]["message"]["content"]
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert found.usage.output_tokens == 12
    cached = found.usage.cache_read_input_tokens or 0
    assert found.usage.input_tokens + cached == plain["usage"]["prompt_tokens"]
    assert counted.input_tokens == plain["usage"]["prompt_tokens"]
    assert streamed.content[0].text == found.content[0].text
    assert streamed.usage.output_tokens == 12
    assert (events[0], events[-1]) == ("message_start", "message_stop")


@pytest.mark.parametrize("num_words", [1200, 8000])
def test_a_text_beyond_the_context_is_counted(staged, tokenizer, num_words):
    """The longer one is counted in slices, whose cuts are between words."""
    text = "The store reads an expert. " * (num_words // 5)
    site = staged()
    assert site.server.models["pocket"].engine.most_request_tokens < num_words
    with client_of(site) as client:
        asked: list[Any] = [[{"role": "user", "content": one}] for one in ("", text)]
        empty, found = (
            client.messages.count_tokens(model="pocket", messages=one).input_tokens for one in asked
        )
    expected = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert abs(found - empty - expected) <= 2


def test_calls_and_thoughts_are_blocks(speaking):
    text = f"<think>The user\nasks</think>Let me see.{CALL}{CALL}"
    with client_of(speaking(text, THINKS)) as client:
        asked: Any = {"model": "pocket", "max_tokens": 200, "messages": USER, "tools": [TOOL]}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        hidden = client.messages.create(
            **asked, thinking={"type": "adaptive", "display": "omitted"}
        )
    for found in (whole, streamed):
        thought, said, *calls = found.content
        assert (thought.type, said.type) == ("thinking", "text")
        assert (thought.thinking, said.text) == ("The user\nasks", "Let me see.")
        assert [(call.type, call.name, call.input) for call in calls] == [
            ("tool_use", "weather", {"city": "Rome"})
        ] * 2
        assert calls[0].id != calls[1].id
        assert found.stop_reason == "tool_use"
    assert kinds.index("signature") < kinds.index("content_block_stop")  # of the thought
    assert (hidden.content[0].thinking, hidden.content[1].text) == ("", "Let me see.")


def test_a_stop_sequence_is_named(speaking):
    with client_of(speaking("one two three")) as client:
        found = client.messages.create(
            model="pocket", max_tokens=50, messages=USER, stop_sequences=["x", " three"]
        )
    assert found.content[0].text == "one two"
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", " three")


def test_an_answer_without_text_has_an_empty_block(staged):
    site = staged(ScriptedEngine(lambda _: [PromptRead(3), Finished("stop")]))
    with client_of(site) as client:
        found = client.messages.create(model="pocket", max_tokens=5, messages=USER)
    assert (found.content[0].text, found.stop_reason) == ("", "end_turn")
    assert found.usage.cache_read_input_tokens == 3


TURNS = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Ask.", "signature": "s"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": "Sun"},
            {"type": "tool_result", "tool_use_id": "2", "is_error": True, "content": "None"},
            {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


def test_a_conversation_is_that_of_a_chat(asked):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Ask.",
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Sun", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: None", "tool_call_id": "2"},
        {"role": "user", "content": "And now?"},
    ]
    function = {
        "name": TOOL["name"],
        "description": TOOL["description"],
        "parameters": TOOL["input_schema"],
    }
    tools = [{"type": "function", "function": function}]
    one = asked(PATH, {"messages": TURNS, "max_tokens": 9, "tools": [TOOL], "top_k": 3})
    other = asked(
        "/v1/chat/completions", {"messages": chat, "max_tokens": 9, "tools": tools, "top_k": 3}
    )
    assert one == other


def test_a_line_for_accounts_is_no_part_of_the_prompt(asked):
    """It differs from task to task, and the instructions behind it are a prefix to share."""
    line = "x-anthropic-billing-header: cc_version=2.1.332.3b1; cch=eb6c6;"
    blocks = [{"type": "text", "text": text} for text in (line, "Be brief.")]
    given = {"messages": USER, "max_tokens": 9}
    one, other = (asked(PATH, {**given, "system": found}) for found in (blocks, blocks[1:]))
    assert one == other
    assert asked(PATH, {**given, "system": blocks[:1]}) == asked(PATH, given)


@pytest.mark.parametrize(
    ("messages", "more", "plain"),
    [
        (USER, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (USER, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        (USER, {"output_config": {"effort": "high"}}, None),  # a hint; this template has none
        (USER, {"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": None}, None),
    ],
)
def test_settings(asked, messages, more, plain):
    body = {"messages": messages, "max_tokens": 3}
    other = {"chat_template_kwargs": plain} if plain else {}
    assert asked(PATH, {**body, **more}) == asked("/v1/chat/completions", {**body, **other})


def test_an_answer_goes_on_where_the_last_message_ends(asked):
    messages = [*USER, {"role": "assistant", "content": "The best is"}]
    chat = {"messages": messages, "max_tokens": 3}
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert asked(PATH, chat) == asked("/v1/chat/completions", {**chat, **continued})


def test_more_tokens_than_there_is_room_for(staged, pocket):
    """Clients ask for as many as a large model may give."""
    body = {"messages": USER, "max_tokens": 64_000, "stop_sequences": ["\0"], "temperature": 0}
    with Engine(pocket, max_tokens=64) as engine:
        _, found = staged(engine).ask(PATH, body)
        room = engine.most_request_tokens
    assert found["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    used = found["usage"]["input_tokens"] + found["usage"]["cache_read_input_tokens"]
    assert used + found["usage"]["output_tokens"] <= room


@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ({"type": "any"}, CALL, 1),
        ({"type": "tool", "name": "weather"}, CALL, 1),
        ({"type": "none"}, "No.", 0),
        ({"type": "auto", "disable_parallel_tool_use": True}, CALL, 1),
    ],
)
def test_which_tool(speaking, choice, text, calls):
    with client_of(speaking(text)) as client:
        found = client.messages.create(
            model="pocket", max_tokens=90, messages=USER, tools=[TOOL], tool_choice=choice
        )
    assert sum(block.type == "tool_use" for block in found.content) == calls


def test_an_answer_keeps_to_a_schema(site):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    with client_of(site) as client:
        found = client.messages.create(
            model="pocket",
            max_tokens=40,
            messages=USER,
            thinking=OFF,
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    assert found.content[0].type == "text"
    assert json.loads(found.content[0].text)["city"] in ("Rome", "Oslo")


BLOCKS = [{"type": "image", "source": {"type": "url", "url": "x"}}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is missing"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: is empty"),
        ({"messages": [{"role": "user", "content": BLOCKS}]}, "this model takes no pictures"),
        ({"messages": [{"role": "user", "content": [TURNS[1]["content"][2]]}]}, "tool_use is no"),
        ({"messages": [{"role": "assistant", "content": TURNS[2]["content"][:1]}]}, "tool_result"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "tools: two functions"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name: is missing"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name: is none of the tools",
        ),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0.name: string should match"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools.input_schema: expected"),
        ({"container": "x"}, "container: is not a field"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences.0: is empty"),
    ],
)
def test_errors_are_those_of_anthropic(stage, staged, change, message):
    import anthropic

    staged()
    body = {"max_tokens": 5, "messages": USER, **change}
    with client_of(stage) as client, pytest.raises(anthropic.BadRequestError) as caught:
        client.post(PATH, body=body, cast_to=object)
    found: Any = caught.value.body
    assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error")
    assert message in found["error"]["message"]


def test_an_error_after_the_stream_has_begun_is_an_event(staged):
    import anthropic

    script = [PromptRead(0), NewToken(50), Finished("error", message="it broke")]
    with client_of(staged(ScriptedEngine(lambda _: script))) as client:
        stream = client.messages.create(model="pocket", max_tokens=5, messages=USER, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            list(stream)


@pytest.fixture(scope="module")
def locked(tokenizer: Any) -> Iterator[Served]:
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("stop")])
    with served_engine(engine, tokenizer, access=Access(keys=("right",))) as found:
        yield found


def test_keys_are_sent_as_anthropic_does(locked):
    import anthropic

    with client_of(locked, api_key="right") as client:
        assert client.messages.create(model="pocket", max_tokens=5, messages=USER).content
    with (
        client_of(locked, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError) as caught,
    ):
        client.messages.create(model="pocket", max_tokens=5, messages=USER)
    found: Any = caught.value.body
    assert found["error"]["type"] == "authentication_error"
