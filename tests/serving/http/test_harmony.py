"""Answers of gpt-oss: channels, calls and grammars, however the text is cut."""

import copy
import json
from typing import Any

import pytest
from http_server import ScriptedEngine, model_of, served

from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.answer_text import (
    HARMONY_MARKS,
    HarmonySections,
    Vocabulary,
    is_harmony,
)
from moe_runtime.serving.http.grammars import Grammars, after_analysis, of_harmony_call
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.http.tool_formats import ParsedCall
from moe_runtime.serving.requests import Finished, GenerationRequest, NewToken, PromptRead

# What the published template does with a conversation, without its system message.
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.thinking %}<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|><|start|>{{ m.role }}{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if tools %}{{ tools }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
WEATHER = Function(
    name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}
)
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ROLE = "<|start|>assistant"
CASES: list[tuple[str, list[Any]]] = [
    (
        f"{ANALYSIS}well \n<|end|>{ROLE}{FINAL} Hello\n",
        [("reasoning", "well \n"), ("content", " Hello\n")],
    ),
    (f"{FINAL}Hello<|return|>", [("content", "Hello")]),
    (f"{ANALYSIS}never ends", [("reasoning", "never ends")]),
    (f"{ANALYSIS}one<|end|>{ROLE}{ANALYSIS}two<|end|>{ROLE}{FINAL}", [("reasoning", "one\ntwo")]),
    (
        "<|channel|>commentary<|message|>I look.<|end|>"
        f'{ROLE}{CALL}{{"city": "Rom\\u00e9"}}<|call|>',
        [("content", "I look."), ParsedCall("weather", '{"city": "Romé"}')],
    ),
    # the recipient in the role, and calls after each other
    (
        " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
        f"{ROLE} to=functions.weather<|channel|>commentary<|message|><|call|>",
        [ParsedCall("weather", "{}"), ParsedCall("weather", "{}")],
    ),
    (f'{CALL}{{"city": "Ro', [("content", '{"city": "Ro')]),
    (f"{CALL}[7]<|call|>", [("content", "[7]")]),
    (f'{CALL}{{"city": NaN}}<|call|>', [("content", '{"city": NaN}')]),
    (f'{CALL}{{"city": 1e999}}<|call|>', [("content", '{"city": 1e999}')]),
    (f"{CALL}{'[' * 5000}", [("content", "[" * 5000)]),
    ("<|channel|>analysis to=python code<|message|>1+1<|call|>", [("reasoning", "1+1")]),
    # an end that is missing
    (f"{ANALYSIS}well{ROLE}{FINAL}Hello", [("reasoning", "well"), ("content", "Hello")]),
    (f"{ANALYSIS}well{FINAL}Hello", [("reasoning", "well"), ("content", "Hello")]),
    (f"{FINAL}a < b <| c", [("content", "a < b <| c")]),
    ("Hello without marks <", [("content", "Hello without marks <")]),
    (f"{FINAL}Hello<|end|>there", [("content", "Hello\nthere")]),
    ("<|channel|>final", []),
    ("", []),
]


def parts_of(sections: HarmonySections, text: str, step: int) -> list[Any]:
    found: list[Any] = []
    parts = [
        part for at in range(0, len(text), step) for part in sections.add(text[at : at + step])
    ]
    for part in [*parts, *sections.end()]:
        if isinstance(part, tuple) and found and found[-1][:1] == part[:1]:
            found[-1] = (part[0], found[-1][1] + part[1])
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize(("text", "expected"), CASES)
def test_sections(text, expected, step):
    prompt = f"<|start|>user<|message|>Hi<|end|>{ROLE}"
    assert parts_of(HarmonySections([WEATHER], prompt), text, step) == expected
    assert parts_of(HarmonySections([WEATHER]), ROLE * bool(text.startswith("<")) + text, step) == (
        expected
    )


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        (f'{CALL}{{"city"', ": ", []),
        (CALL, "{", []),
        (CALL, "a long text", [("content", "")]),
        (f"{CALL}a long text <|en", "", [("content", "a long text <|en")]),
        (f'{CALL}{{"city": "Rome"}}', "\n", [ParsedCall("weather", '{"city": "Rome"}')]),
    ],
)
def test_a_stop_string_within_a_call(text, stop, expected):
    sections = HarmonySections([WEATHER], ROLE)
    assert [*sections.add(text), *sections.end(cut_by=stop)] == expected


def test_a_call_that_is_cut_is_no_content():
    text = f'{CALL}{{"city": "Rome"}}'
    call = ParsedCall("weather", '{"city": "Rome"}')
    for end in range(len("<|channel|>"), len(text) + 1):  # a mark is one token
        sections = HarmonySections([WEATHER], ROLE)
        found = [*sections.add(text[:end]), *sections.end(cut_by="")]
        assert found == ([call] if end == len(text) else [])


def test_calls_without_tools_are_content():
    assert parts_of(HarmonySections(), f"{CALL}{{}}<|call|>", 1) == [("content", "{}")]


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        (f"{ROLE}{FINAL}Hel<", "lo", [("content", "lo")]),
        (f"{ROLE}{ANALYSIS}", f"w<|end|>{ROLE}{FINAL}H", [("reasoning", "w"), ("content", "H")]),
        (f"{ROLE}<|channel|>final", "<|message|>H", [("content", "H")]),
        (f"{ROLE}{FINAL}Hello<|end|>", f"{ROLE}{FINAL}H", [("content", "H")]),
    ],
)
def test_a_prompt_may_end_anywhere(begun, text, expected):
    assert parts_of(HarmonySections([WEATHER], f"<|start|>user{begun}"), text, 2) == expected


def test_templates_in_channels_are_known():
    assert is_harmony(TEMPLATE)
    assert not is_harmony("{% for m in messages %}<|im_start|>{{ m.role }}")


@pytest.fixture(scope="module")
def harmony_tokenizer() -> Any:
    found = load_tokenizer(pocket_path())
    found.add_special_tokens({"additional_special_tokens": list(HARMONY_MARKS)})
    found.chat_template = TEMPLATE
    return found


def is_let_through(grammars: Grammars, grammar: str, text: str) -> bool:
    tokenizer = grammars.vocabulary.tokenizer
    constraint, ids = grammars.constraint(grammars.compile(grammar, "it")), []
    for token_id in [*tokenizer(text, add_special_tokens=False)["input_ids"], 0]:
        mask = constraint.allowed(ids)
        assert mask is not None
        if not mask[token_id]:
            return False
        ids.append(token_id)
    return True


def test_grammars_stand_in_the_channels(harmony_tokenizer):
    grammars = Grammars(Vocabulary(harmony_tokenizer, 4110, [0]))
    final, call = 'start: "yes" | "no"', of_harmony_call([WEATHER])
    for grammar, is_call, text, is_right in [
        (final, False, f"{FINAL}yes", True),
        (final, False, f"{ANALYSIS}well, no<|end|>{ROLE}{FINAL}no", True),
        (final, False, f"{FINAL}perhaps", False),
        (final, False, "yes", False),
        (final, False, f"{ANALYSIS}yes", False),
        (call, True, f'{CALL}{{"city": "Rome"}}', True),
        (call, True, f'{ANALYSIS}w<|end|>{ROLE}{CALL}{{"city": "Rome"}}', True),
        (call, True, f'{CALL}{{"city": 7}}', False),
        (call, True, f"{FINAL}Hello", False),
    ]:
        wrapped = after_analysis(grammar, is_call=is_call)
        assert is_let_through(grammars, wrapped, text) == is_right, text
    either = after_analysis(of_harmony_call([WEATHER], is_needed=False), is_call=True)
    said = f"{ANALYSIS}w<|end|>{ROLE}{FINAL.replace('final', 'commentary')}I look.<|end|>{ROLE}"
    for text, is_right in [
        (f"{FINAL}Hello", True),
        (f"{said}{FINAL}Hello", True),
        (f'{said}{CALL}{{"city": "Rome"}}', True),
        (f'{CALL}{{"city": 7}}', False),
    ]:
        assert is_let_through(grammars, either, text) == is_right, text


def test_over_http(harmony_tokenizer):
    texts = [
        f"{ANALYSIS}Well.<|end|>{ROLE}{FINAL}Hello",
        f'{ANALYSIS}Well.<|end|>{ROLE}{CALL}{{"city": "Rome"}}',
    ]
    prompts: list[str] = []

    def script(request: GenerationRequest) -> list[Any]:
        prompts.append(harmony_tokenizer.decode(request.prompt_ids))
        text = texts[1 if "weather" in prompts[-1] else 0]
        ids = harmony_tokenizer(text, add_special_tokens=False)["input_ids"]
        return [PromptRead(0), *(NewToken(one, None, ()) for one in ids), Finished("stop")]

    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho", "reasoning_content": "Hm"},
        {"role": "user", "content": "Hi"},
    ]
    tools = [{"type": "function", "function": WEATHER.model_dump(exclude_none=True)}]
    model = model_of("oss", ScriptedEngine(script), harmony_tokenizer, 4110)
    with served([model]) as site:
        found = site.answer("/v1/chat/completions", {"messages": messages})
        assert found["choices"][0]["message"] == {
            "role": "assistant",
            "content": "Hello",
            "reasoning_content": "Well.",
        }
        assert f"{ANALYSIS}Hm<|end|>{ROLE}<|message|>Ho<|end|>" in prompts[0]
        assert prompts[0].endswith(ROLE)
        strict = [{**tools[0], "function": {**tools[0]["function"], "strict": True}}]
        for more in (
            {},
            {"tool_choice": "required"},
            {"parallel_tool_calls": False},
            {"tools": strict},
        ):
            asked = {"messages": messages, "tools": tools, **more}
            found = site.answer("/v1/chat/completions", asked)
            assert found["choices"][0]["finish_reason"] == "tool_calls"
            assert found["choices"][0]["message"]["reasoning_content"] == "Well."
            (call,) = found["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
        chunks = site.stream("/v1/chat/completions", {"messages": messages, "stream": True})
        deltas = [one["choices"][0]["delta"] for one in chunks if isinstance(one, dict)]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Well."
        asked = {
            "messages": messages,
            "response_format": {"type": "grammar", "grammar": 'start: "x"'},
        }
        assert site.refused("/v1/chat/completions", asked)["param"] == "response_format"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_calls_are_not_left_free_after_the_beginning_of_a_message(
    staged, harmony_tokenizer, choice
):
    own = copy.deepcopy(harmony_tokenizer)
    own.chat_template = TEMPLATE + FINAL
    function = {"name": "weather", "strict": True, "parameters": {"type": "object"}}
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    status, found = staged(engine, own, 4110).ask("/v1/chat/completions", body)
    assert status == (400 if choice == "auto" else 200)
    assert choice == "required" or found["error"]["param"] == "tools"
