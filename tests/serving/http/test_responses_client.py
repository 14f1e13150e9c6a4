"""What OpenAI's own client gets from ``/v1/responses``: items, events, tools and kept responses."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pydantic
import pytest
from http_server import ScriptedEngine, Served, served_engine

from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.serving.digest_files import DigestFiles
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.schema import Message
from moe_runtime.serving.http.server import Access, KeptResponses
from moe_runtime.serving.requests import Finished, GenerationRequest, NewToken, PromptRead

if TYPE_CHECKING:
    import openai

PATH, CHAT = "/v1/responses", "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
THINKS = "{% if tools %}<tool_call>{% endif %}{% if enable_thinking %}<think></think>{% endif %}"


def client_of(site: Served, **options: Any) -> openai.OpenAI:
    import openai

    options = {"api_key": "none", "max_retries": 0, **options}
    return openai.OpenAI(base_url=f"{site.address}/v1", **options)


def test_a_response_is_the_text_of_a_chat(site):
    chat = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]}
    _, plain = site.ask(CHAT, {**chat, "max_completion_tokens": 12, "temperature": 0})
    given: Any = {"model": "pocket", "instructions": "S", "input": "Hi", "temperature": 0}
    with client_of(site) as client:
        found = client.responses.create(**given, max_output_tokens=12)
        events = [*client.responses.create(**given, max_output_tokens=12, stream=True)]
    text = plain["choices"][0]["message"]["content"]
    assert (found.output_text, found.status) == (text, "incomplete")
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.id.startswith("resp_")
    assert found.output[0].id.startswith("msg_")
    assert found.usage is not None
    assert found.usage.input_tokens == plain["usage"]["prompt_tokens"]
    assert found.usage.output_tokens == 12
    assert [event.sequence_number for event in events] == [*range(len(events))]
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text


def test_items_are_those_of_the_schema(speaking):
    """Every event holds against the types of OpenAI's client, which it does not check itself."""
    from openai.types.responses import Response, ResponseStreamEvent

    text = f"<think>The user\nasks</think>Let me see.{CALL}{CALL}"
    site = speaking(text, THINKS)
    body = {"input": "Hi", "tools": [TOOL], "store": False}
    whole = site.answer(PATH, body)
    Response.model_validate(whole)
    stream = site.answer(PATH, {**body, "stream": True})
    adapter = pydantic.TypeAdapter(ResponseStreamEvent)
    events = []
    for event in filter(None, stream.split("\n\n")):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        adapter.validate_python(events[-1])
    last = events[-1]["response"]
    for found in (whole, last):
        thought, said, *calls = found["output"]
        assert thought["content"][0] == {"type": "reasoning_text", "text": "The user\nasks"}
        assert said["content"][0]["text"] == "Let me see."
        assert [(one["name"], one["arguments"]) for one in calls] == [
            ("weather", '{"city": "Rome"}')
        ] * 2
        assert {one["status"] for one in found["output"]} == {"completed"}
        assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == last["output"]
    added = [one["item"]["id"] for one in events if one["type"] == "response.output_item.added"]
    assert added == [one["id"] for one in done]


TURNS = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "1", "output": "Sun"},
]


def test_a_conversation_is_that_of_a_chat(asked):
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    chat = [
        {"role": "system", "content": "Help.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "\nAsk.",
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "Sun", "tool_call_id": "1"},
    ]
    tools = [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": PARAMETERS, "strict": False},
        }
    ]
    one = asked(PATH, {"instructions": "Help.", "input": TURNS, "tools": [TOOL]})
    assert one == asked(CHAT, {"messages": chat, "tools": tools})


def test_fields_that_change_no_answer_are_taken(asked):
    more = {
        **{"metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "prompt_cache_key": "k"},
        **{"reasoning": {"effort": "high", "summary": "auto"}, "truncation": "disabled"},
        **{"include": ["reasoning.encrypted_content"], "max_tool_calls": 3, "background": False},
        **{"text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "auto"},
    }
    assert asked(PATH, {"input": "Hi", **more}) == asked(PATH, {"input": "Hi"})


def test_a_conversation_is_continued_by_its_id(staged, tokenizer):
    prompts: list[str] = []

    def script(request: GenerationRequest) -> list[Any]:
        prompts.append(tokenizer.decode(request.prompt_ids))
        said = tokenizer(f"Answer {len(prompts)}", add_special_tokens=False)["input_ids"]
        return [PromptRead(0), *map(NewToken, said), Finished("stop")]

    site = staged(ScriptedEngine(script))
    with client_of(site) as client:
        first = client.responses.create(model="pocket", input="One", instructions="Only now.")
        second = client.responses.create(model="pocket", input="Two", previous_response_id=first.id)
        kept = client.responses.retrieve(second.id)
        assert (kept.id, kept.output_text) == (second.id, "Answer 2")
        assert kept.previous_response_id == first.id
        client.responses.delete(second.id)
        for name in (second.id, "resp_x"):
            status, answer = site.ask(PATH, {"input": "Three", "previous_response_id": name})
            assert (status, answer["error"]["code"]) == (400, "previous_response_not_found")
            assert "send the whole conversation" in answer["error"]["message"]
            status, answer = site.ask(f"{PATH}/{name}")
            assert (status, answer["error"]["code"]) == (404, "response_not_found")
            assert answer["error"]["message"].startswith(f"Response with id '{name}' not found.")
        status, answer = site.ask(f"{PATH}/{first.id}/cancel", {})
        assert status == 400
        assert "Cannot cancel a synchronous response" in answer["error"]["message"]
        unkept = client.responses.create(model="pocket", input="Four", store=False)
        assert site.ask(f"{PATH}/{unkept.id}")[0] == 404
    assert prompts[1].split() == [
        *("user:", "One", "assistant:", "Answer", "1", "user:", "Two", "assistant:")
    ]


def test_responses_of_one_key_are_not_those_of_another(tokenizer):
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("stop")])
    with served_engine(engine, tokenizer, access=Access(keys=("a", "b"))) as site:
        mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        name = site.ask(PATH, {"input": "Hi"}, headers=mine)[1]["id"]
        assert site.ask(f"{PATH}/{name}", headers=mine)[0] == 200
        assert site.ask(f"{PATH}/{name}", headers=other)[0] == 404
        more = {"input": "Hi", "previous_response_id": name}
        assert site.ask(PATH, more, headers=other)[0] == 400


def test_the_oldest_responses_go_first():
    kept = KeptResponses(most_bytes=300)
    for number in range(6):
        kept.put("", {"id": str(number), "text": "x" * 60}, [Message(role="user", content="y")])
    found = []
    for number in range(6):
        with contextlib.suppress(ApiError):
            found.append(kept.response("", str(number))["id"])
    assert found == ["4", "5"]


def test_responses_on_the_disk_are_found_by_every_server(tmp_path, monkeypatch):
    folder = tmp_path / "prefixes"
    messages = [Message(role="user", content="naïve" * 1000)]

    def server(most_bytes: int = 40960) -> KeptResponses:
        return KeptResponses(DigestFiles(folder, most_bytes, "responses"))

    def files() -> list[Path]:
        return [file for file in folder.iterdir() if len(file.name) == 64]

    both = server(), server()
    for number in range(9):
        both[number % 2].put("a key", {"id": str(number)}, messages)
        for age, file in enumerate(sorted(files(), key=os.path.getmtime)):
            os.utime(file, (age, age))  # no clock tells two from one another
        assert sum(-(-file.stat().st_size // 4096) * 4096 for file in files()) <= 40960
    assert both[0].conversation("a key", "8")[1] == messages
    assert both[1].response("a key", "7")["id"] == "7"
    for owner, name in (("", "8"), ("a key", "0")):
        with pytest.raises(ApiError, match="others take their place"):
            both[0].response(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=PermissionError(13, "not allowed")))
        with pytest.raises(ApiError, match="not allowed"):
            both[0].delete("a key", "8")
    for one in (server(), *both):
        assert one.response("a key", "8")["id"] == "8"
    both[0].delete("a key", "8")
    for one in (server(), *both):
        with pytest.raises(ApiError):
            one.response("a key", "8")
    for file in files():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ApiError):
        both[0].conversation("a key", "7")
    # what is larger than all may be, and what the disk refuses, stays in memory
    large = [Message(role="user", content="x" * 50000)]
    with pytest.warns(MoERuntimeWarning, match="responses are not kept on the disk"):
        both[0].put("", {"id": "large"}, large)
    assert both[0].conversation("", "large")[1] == large
    both[0].delete("", "large")
    with pytest.raises(ApiError):
        both[0].conversation("", "large")


def test_log_probabilities_are_those_of_a_chat(site):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5}
    both = {"temperature": 0, "top_logprobs": 2}
    _, plain = site.ask(CHAT, {**chat, **both, "logprobs": True})
    body = {"input": "Hi", "max_output_tokens": 5, **both}
    _, found = site.ask(PATH, {**body, "include": ["message.output_text.logprobs"]})
    expected = plain["choices"][0]["logprobs"]["content"]
    given = found["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in given] == [one["token"] for one in expected]
    for one, other in zip(given, expected, strict=True):
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert len(one["top_logprobs"]) == 2


def test_an_answer_keeps_to_a_model_of_pydantic(speaking):
    class City(pydantic.BaseModel):
        name: str

    with client_of(speaking('{"name": "Rome"}')) as client:
        found = client.responses.parse(model="pocket", input="Hi", text_format=City)
    assert found.output_parsed == City(name="Rome")


def test_functions_of_namespaces_are_called_by_both_names(asked, speaking):
    """Two namespaces have one of the same name; a chat has functions with one name each."""
    about = {"description": "Tells it.", "parameters": PARAMETERS}
    one = {"type": "function", "name": "weather", **about}
    spaces = [
        {"type": "namespace", "name": name, "description": f"In {name}.", "tools": [one]}
        for name in ("rome", "oslo")
    ]
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    turns = [*TURNS[:2], {**call, "namespace": "oslo"}, TURNS[-1]]
    made = {"id": "1", "function": {"name": "oslo__weather", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "content": "Sun", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", **about}}]
    for name in ("rome", "oslo"):
        text = f"In {name}.\n\nTells it."
        function = {"name": f"{name}__weather", "description": text, "parameters": PARAMETERS}
        tools.append({"type": "function", "function": function})
    given: Any = [one, *spaces]
    assert asked(PATH, {"input": turns, "tools": given}) == asked(
        CHAT, {"messages": chat, "tools": tools}
    )
    site = speaking(CALL + CALL.replace("weather", "oslo__weather"))
    with client_of(site) as client:
        found = client.responses.create(model="pocket", input="Hi", tools=given)
        called: list[Any] = [*found.output]
        assert [call.namespace for call in called] == [None, "oslo"]
        assert [call.name for call in called] == ["weather", "weather"]
        assert [tool.model_dump(exclude_none=True) for tool in found.tools] == given
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sun"}
            for call in called
        ]
        again = client.responses.create(
            model="pocket", input=results, tools=given, previous_response_id=found.id
        )
    assert again.status == "completed"


GRAMMAR = 'start: WORD LF "\\"b"\n%import common.LF\n%import common.WORD'


def test_a_tool_that_takes_a_text_is_called_with_one(asked, speaking):
    import openai

    form: Any = {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}
    patch: Any = {"type": "custom", "name": "patch", "description": "Changes files."}
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    about = f"Changes files.\n\nThe input keeps to this lark:\n{GRAMMAR}"
    function = {"name": "patch", "description": about, "parameters": schema}
    arguments = '{"input": "a\\n\\"b"}'
    made = {"id": "1", "function": {"name": "patch", "arguments": arguments}}
    chat = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "content": "Done", "tool_call_id": "1"},
    ]
    items = [
        {"role": "user", "content": "Do it."},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'a\n"b'},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "Done"},
    ]
    found = asked(PATH, {"input": items, "tools": [{**patch, "format": form}]})
    tools = [{"type": "function", "function": function}]
    assert found.prompt_ids == asked(CHAT, {"messages": chat, "tools": tools}).prompt_ids
    assert found.constraint is not None
    patch["format"] = form
    site = speaking(f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>')
    with client_of(site) as client:
        choice: Any = {"type": "custom", "name": "patch"}
        with client.responses.stream(
            model="pocket", input="Hi", tools=[patch], tool_choice=choice
        ) as stream:
            events: list[Any] = [event for event in stream if "custom" in event.type]
            (call,) = stream.get_final_response().output
        given: Any = {"model": "pocket", "previous_response_id": stream.get_final_response().id}
        result: Any = {"call_id": call.call_id, "output": "Done"}
        wrong: Any = [{**result, "type": "function_call_output"}]
        which = f"No tool call found for function call output with call_id {call.call_id}."
        for items, said in (
            ("Hi", f"No tool output found for custom tool call {call.call_id}."),
            (wrong, which),
        ):
            with pytest.raises(openai.BadRequestError, match=re.escape(said)):
                client.responses.create(input=items, **given)
        right: Any = [{**result, "type": "custom_tool_call_output"}]
        again = client.responses.create(input=right, **given)
    assert [event.type.rpartition(".")[2] for event in events] == ["delta", "done"]
    assert call.type == "custom_tool_call"
    assert call.input == events[-1].input == 'a\n"b'
    assert again.status == "completed"


@pytest.mark.parametrize(
    ("definition", "text", "is_right"),
    [("^ab$", "ab", True), (r"[)(\]]\$", ")$", True), ("(a)|b", "b", True), ("^a|b$", "ax", False)],
)
def test_an_expression_is_of_a_whole_text(asked, tokenizer, definition, text, is_right):
    form = {"type": "grammar", "syntax": "regex", "definition": definition}
    tool = {"type": "custom", "name": "tool", "format": form}
    found = asked(PATH, {"input": "Hi", "tools": [tool], "tool_choice": "required"})
    arguments = json.dumps({"input": text})
    call = f'<tool_call>\n{{"name": "tool", "arguments": {arguments}}}\n</tool_call>'
    ids = tokenizer(call, add_special_tokens=False)["input_ids"]
    masks = (found.constraint.allowed(ids[:end])[id] for end, id in enumerate(ids))
    assert all(masks) == is_right


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_alone_are_called_of_those_that_are_shown(asked, tokenizer, mode):
    both = [TOOL, {**TOOL, "name": "time"}]
    chosen = [{"type": "function", "function": {"name": "time"}}]
    functions = [{"name": one["name"], "parameters": PARAMETERS, "strict": False} for one in both]
    tools = [{"type": "function", "function": function} for function in functions]
    within: Any = {"mode": mode, "tools": chosen}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    choice = {"type": "allowed_tools", "allowed_tools": within}
    one = asked(CHAT, {**chat, "tool_choice": choice})
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "time"}]}
    other = asked(PATH, {"input": "Hi", "tools": both, "tool_choice": flat})
    assert one.prompt_ids == other.prompt_ids == asked(CHAT, chat).prompt_ids
    time_call = CALL.replace("weather", "time")
    for found in (one, other):
        for text, is_right in (("Hi", mode == "auto"), (time_call, True), (CALL, False)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            masks = (found.constraint.allowed(ids[:end])[id] for end, id in enumerate(ids))
            assert all(masks) == is_right


CHOICE = {"type": "custom", "name": "weather"}


def tool_of(**form: str) -> dict[str, Any]:
    return {"type": "custom", "name": "weather", "format": form}


CALLED = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}
UNREADABLE = tool_of(type="grammar", syntax="regex", definition="a{9")
LOOSE = tool_of(type="grammar", syntax="regex", definition="a)|(b")
RECURSIVE = tool_of(type="grammar", syntax="lark", definition='start: "a" start?')
IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": IMAGE}, "input.0"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": "Hi", "tools": [TOOL, TOOL]}, "tools"),
        ({"input": "Hi", "tools": [TOOL, {"type": "custom", "name": "weather"}]}, "tools"),
        ({"input": "Hi", "tools": [TOOL], "tool_choice": CHOICE}, "tool_choice.name"),
        ({"input": "Hi", "tool_choice": CHOICE}, "tool_choice.name"),
        ({"input": "Hi", "tools": [tool_of(type="grammar")]}, "tools.format.syntax"),
        ({"input": "Hi", "tools": [tool_of(type="grammar", syntax="lark")]}, "tools.format.def"),
        ({"input": "Hi", "tools": [tool_of(type="text", definition="x")]}, "tools.format.def"),
        ({"input": "Hi", "tools": [TOOL, RECURSIVE]}, "tools.1.format.definition"),
        ({"input": "Hi", "tools": [LOOSE]}, "tools.0.format.definition"),
        ({"input": "Hi", "tools": [UNREADABLE]}, "tools.0.format.definition"),
        (
            {"input": "Hi", "tools": [UNREADABLE], "tool_choice": "required"},
            "tools.0.format.definition",
        ),
        ({"input": "Hi", "tools": [TOOL], "tool_choice": ALLOWED}, "tool_choice.tools"),
        (
            {"input": "Hi", "tools": [TOOL], "tool_choice": ALLOWED | {"tools": []}},
            "tool_choice.tools",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": ""}]}, "input"),
        ({"input": [CALLED]}, "input"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "include": ["file_search_call.results"]}, "include"),
        ({"input": "Hi", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"input": "Hi", "max_output_tokens": -1}, "max_output_tokens"),
    ],
)
def test_what_is_refused(stage, body, param):
    error = stage.refused(PATH, body)
    assert error["param"].startswith(param)
    assert error["message"].startswith(param) or error["message"].startswith("No tool ")


def test_an_error_after_the_stream_has_begun_is_an_event(staged):
    script = [PromptRead(0), NewToken(50), Finished("error", message="it broke")]
    _, text = staged(ScriptedEngine(lambda _: script)).ask(PATH, {"input": "Hi", "stream": True})
    name, data = text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error"
    assert "it broke" in json.loads(data.removeprefix("data: "))["message"]
