"""Clients' schemas and published tokenizers: calls that are forced, and thoughts that end."""

import enum
import functools
import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from call_texts import CALL_TEXTS
from http_server import HERMES
from tokenizers import AddedToken

USER: Any = [{"role": "user", "content": "Hi"}]


class Kind(enum.Enum):
    town = "town"
    village = "village"


class Place(pydantic.BaseModel):
    """A name, and where it lies."""

    name: str
    kind: Kind
    within: "Place | None" = None


class Trip(pydantic.BaseModel):
    """Where to, and for how long."""

    places: list[Place]
    days: int | Literal["many"]
    note: str | None = None
    folder: Path = Path()


TRIP: dict[str, Any] = {
    "places": [{"name": "Rome", "kind": "town", "within": {"name": "It", "kind": "village"}}],
    "days": 2,
}
FULL = Trip.model_validate(TRIP)
PLAIN_TOOL: Any = {
    "type": "function",
    "function": {"name": "Trip", "parameters": Trip.model_json_schema()},
}


def spaced(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Published:
    """What added tokens a published tokenizer has: those flagged special, and the others."""

    special: tuple[str, ...]
    plain: tuple[str, ...]
    call: str
    reasoning: tuple[str, str] = ("<think>", "</think>")


_TOOL, _THINK = ("<tool_call>", "</tool_call>"), ("<think>", "</think>")
_PAIRS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = tuple(
    f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
_KIMI = tuple(
    f"<|tool_{word}|>"
    for word in (
        *("calls_section_begin", "calls_section_end", "call_begin", "call_end"),
        "call_argument_begin",
    )
)
PUBLISHED = {
    "Qwen3": Published(("<|im_start|>", "<|im_end|>"), (*_TOOL, *_THINK, "<|fim_pad|>"), "hermes"),
    "Qwen3.5": Published(("<|im_start|>", "<|im_end|>"), (*_TOOL, *_THINK), "qwen-xml"),
    "GLM-4.5": Published(("<|user|>", "[gMASK]"), (*_TOOL, *_THINK, *_PAIRS), "glm"),
    "DeepSeek-V3.1": Published(("<｜User｜>",), (*_DEEPSEEK, *_THINK), "deepseek-v3.1"),
    "Kimi-K2": Published(("<|im_end|>",), (*_KIMI, *_THINK), "kimi-k2"),
    "MiniMax-M2": Published(
        ("]~b]", "[e~["), ("<minimax:tool_call>", "</minimax:tool_call>", *_THINK), "minimax"
    ),
    "LFM2": Published(("<|tool_call_start|>", "<|tool_call_end|>"), _THINK, "lfm2"),
    "Gemma 4": Published(
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        ("<table>", "\n\n"),
        "gemma-4",
        ("<|channel>thought\n", "<channel|>"),
    ),
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
        },
    },
}


@pytest.mark.parametrize(
    ("name", "is_forced"),
    [*((name, True) for name in PUBLISHED), ("Qwen3", False), ("Gemma 4", False)],
)
def test_calls_and_thoughts_with_the_added_tokens_of_published_tokenizers(
    speaking, name, is_forced
):
    made = PUBLISHED[name]
    added = [AddedToken(mark, special=True, normalized=False) for mark in made.special]
    added += [AddedToken(mark, special=False, normalized=False) for mark in made.plain]
    opens, closes = made.reasoning
    how = CALL_TEXTS[made.call]
    source = "{% if tools %}{# " + how.template + opens + closes + " #}{% endif %}Who?"
    asked: dict[str, Any] = {"messages": USER, "tools": [WEATHER]}
    thought = f"{opens}I will ask.{closes}\n"
    call = how.of([("Rome", "2")])
    if not is_forced:
        thought = f"{opens}I will ask."  # and the call ends it
    site = speaking(thought + call, source, added)
    forced = {"tool_choice": "required"} if is_forced else {}
    answer = site.answer("/v1/chat/completions", asked | forced)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"].endswith("I will ask.")
    (found,) = choice["message"]["tool_calls"]
    assert found["function"]["name"] == "weather"
    assert json.loads(found["function"]["arguments"]) == {"city": "Rome", "days": 2}
    if not is_forced:
        return
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    site = speaking(f'{opens}Well?{closes}\n"yes"', source, added)
    answer = site.answer("/v1/chat/completions", {"messages": USER, "response_format": schema})
    assert answer["choices"][0]["message"]["content"] == '"yes"'


def hermes_call(name: str, given: dict[str, Any] = TRIP) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {spaced(given)}}}\n</tool_call>'


def written(value: Any) -> str:
    return value if isinstance(value, str) else spaced(value)


def xml_call(name: str, given: dict[str, Any]) -> str:
    pairs = (f"<parameter={k}>\n{written(v)}\n</parameter>\n" for k, v in given.items())
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


def pair_call(name: str, given: dict[str, Any]) -> str:
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    pairs = (pair.format(key, written(value)) for key, value in given.items())
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (HERMES, hermes_call),
        ("{% if tools %}<tool_call><function=x>{% endif %}Who?", xml_call),
        ("{% if tools %}<tool_call>x<arg_key>{% endif %}Who?", pair_call),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_nested_models_are_enforced_in_openais_tools(speaking, template, call, is_strict):
    import openai

    tool, given = PLAIN_TOOL, TRIP
    if is_strict:  # all of it is required then
        tool = openai.pydantic_function_tool(Trip)
        (place,) = TRIP["places"]
        whole = {**place, "within": {**place["within"], "within": None}}
        given = {**TRIP, "places": [whole], "note": None, "folder": "x"}
    site = speaking(call("Trip", given), template)
    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", {"type": "function", "function": {"name": "Trip"}}):
            asked: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            answer = client.chat.completions.create(model="pocket", messages=USER, **asked)
            (found,) = answer.choices[0].message.tool_calls or []
            trip = Trip.model_validate_json(found.function.arguments)  # pyright: ignore
            assert trip == FULL.model_copy(update={"folder": trip.folder})


def test_openais_client_parses_a_nested_model(speaking):
    import openai

    text = spaced(FULL.model_dump(mode="json") | {"folder": "x"})
    site = speaking(text)
    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model="pocket", messages=USER, response_format=Trip)
        assert answer.choices[0].message.parsed == FULL.model_copy(update={"folder": Path("x")})


def test_instructor_gets_a_nested_model(speaking):
    instructor = pytest.importorskip("instructor")
    import openai

    site = speaking(hermes_call("Trip"))
    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as client:
        asking = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        found = asking.chat.completions.create(model="pocket", messages=USER, response_model=Trip)
    assert found.model_dump() == FULL.model_dump()


def test_pydantic_ai_gets_a_nested_model(speaking):
    pytest.importorskip("pydantic_ai")
    import openai
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    site = speaking(hermes_call("final_result"))
    closing = {"connection": "close"}
    client = openai.AsyncOpenAI(
        base_url=f"{site.address}/v1", api_key="none", default_headers=closing
    )
    provider = OpenAIProvider(openai_client=client)
    agent = Agent(OpenAIChatModel("pocket", provider=provider), output_type=Trip)
    assert agent.run_sync("Hi").output == FULL


@pytest.mark.slow
def test_litellm_gets_a_nested_model(speaking, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network
    litellm = pytest.importorskip("litellm")
    address = f"{speaking(hermes_call('Trip')).address}/v1"
    asked = {"messages": USER, "tools": [PLAIN_TOOL], "tool_choice": "required"}
    where = {"model": "openai/pocket", "api_base": address, "api_key": "none", "num_retries": 0}
    answer = litellm.completion(**where, **asked)
    (found,) = answer.choices[0].message.tool_calls
    assert Trip.model_validate_json(found.function.arguments) == FULL


@pytest.mark.slow
def test_llama_index_gets_a_nested_model(speaking):
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    site = speaking(hermes_call("Trip"))
    kind = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    llm = OpenAILike(model="pocket", api_base=f"{site.address}/v1", api_key="none", **kind)
    assert llm.structured_predict(Trip, PromptTemplate("Hi")) == FULL


@pytest.mark.slow
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_langchain_gets_a_nested_model_and_calls(speaking, dialect):
    openai = pytest.importorskip("langchain_openai")
    anthropic = pytest.importorskip("langchain_anthropic")

    def speaker(text: str) -> Any:
        site = speaking(text)
        given = {"model": "pocket", "api_key": "none", "max_retries": 0}
        if dialect == "messages":
            return anthropic.ChatAnthropic(base_url=site.address, **given)
        more = {"use_responses_api": dialect == "responses"}
        return openai.ChatOpenAI(base_url=f"{site.address}/v1", **given, **more)

    how = "function_calling"
    found = speaker(hermes_call("Trip")).with_structured_output(Trip, method=how).invoke("Hi")
    assert found == FULL
    written = spaced(FULL.model_dump(mode="json") | {"folder": "x"})
    found = speaker(written).with_structured_output(Trip, method="json_schema").invoke("Hi")
    assert found == FULL.model_copy(update={"folder": Path("x")})
    called = speaker(f"I go.{hermes_call('Trip')}").bind_tools([Trip])
    whole = functools.reduce(operator.add, called.stream("Hi"))
    assert whole.text == "I go."
    assert [Trip.model_validate(call["args"]) for call in whole.tool_calls] == [FULL]
