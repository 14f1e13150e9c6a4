"""Templates and grammars that would take for ever, or all memory: they end, and nothing else."""

import asyncio
import copy
import itertools
import os
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from http_server import TEMPLATE, ScriptedEngine, Served, limited_processes
from transformers import GenerationConfig

from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.serving.http import grammars as grammar_module
from moe_runtime.serving.http import served_model
from moe_runtime.serving.http.answer_text import Vocabulary
from moe_runtime.serving.http.grammars import GrammarConstraint, Grammars
from moe_runtime.serving.http.schema import Function, Message, Tool
from moe_runtime.serving.http.served_model import ChatTemplate, serve_model
from moe_runtime.serving.http.server import ClientTurns
from moe_runtime.serving.requests import ConstraintError, Finished, PromptRead

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hi"}
LONG_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set all = namespace(x='12345678') %}"
    "{% for i in range(40) %}{% set all.x = all.x ~ all.x %}{% endfor %}"
)
INTERSECTION = "start: T\nT: " + " & ".join(f"/.*{'a' * count}.*/" for count in range(1, 40))


NUMBERS = itertools.count(1)


def chats(site: Served) -> None:
    """With a grammar that is not known yet."""
    form = {"type": "regex", "regex": f"a{{{next(NUMBERS)}}}"}
    body = {"messages": [USER], "response_format": form}
    site.answer(CHAT, body)


@pytest.mark.parametrize("program", [LONG_LOOP, DOUBLING, "{{ messages[0].content * 999999999 }}"])
def test_a_template_without_an_end_is_ended(staged, tokenizer, monkeypatch, program):
    monkeypatch.setattr(served_model, "_RENDER_S", 0.2)
    monkeypatch.setattr(served_model, "_RENDER_BYTES", 32 << 20)
    endless = copy.deepcopy(tokenizer)
    endless.chat_template = "{% if messages[0].content != 'Hi' %}" + program + "{% endif %}ok"
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    site = staged(engine, own=endless)
    status, found = site.ask(CHAT, {"messages": [{"role": "user", "content": "more"}]})
    assert (status, found["error"]["code"]) == (400, "template_limit"), found
    assert "this model's chat template takes more than" in found["error"]["message"]
    chats(site)


def test_end_tokens_are_looked_for_within_the_limits_of_templates(tokenizer, monkeypatch):
    """At start too: the template shows which token stands behind an answer."""
    monkeypatch.setattr(served_model, "_RENDER_S", 0.2)
    settings = GenerationConfig(num_beams=4, no_repeat_ngram_size=3, do_sample=False)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=4096))
    model, engine = SimpleNamespace(generation_config=settings, config=config), cast(Any, None)
    for template, ends in ((LONG_LOOP, {0}), (f"{TEMPLATE}<think>", {0})):
        endless = copy.deepcopy(tokenizer)
        endless.chat_template = template
        with pytest.warns(MoERuntimeWarning, match="num_beams 4, no_repeat_ngram_size 3, which"):
            found = serve_model("pocket", engine, endless, model, *limited_processes())
        assert found.vocabulary.end_ids == ends


def test_a_grammar_that_takes_long_is_ended(staged, monkeypatch):
    monkeypatch.setattr(grammar_module, "_COMPILE_S", 0.3)
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    site = staged(engine)
    asked = {"type": "grammar", "grammar": INTERSECTION}
    status, found = site.ask("/v1/completions", {"prompt": "a", "response_format": asked})
    assert (status, found["error"]["code"]) == (400, "invalid_grammar")
    assert "compiling it takes more than 0.3 seconds" in found["error"]["message"]
    chats(site)


def test_masks_that_take_long_end_their_answer_alone(tokenizer):
    now_s, step_s = 0.0, 0.04

    def clock() -> float:
        nonlocal now_s
        now_s += step_s
        return now_s

    vocabulary = Vocabulary(tokenizer, 4096, [0])
    matcher = Grammars(vocabulary).compile("start: /a*/", "it")
    constraint = GrammarConstraint(matcher.deep_copy(), vocabulary, clock)
    token = tokenizer("a")["input_ids"][0]
    for count in range(100):
        constraint.allowed([token] * count)
    step_s = 1.0
    constraint.allowed([token] * 100)
    constraint.allowed([token] * 101)
    with pytest.raises(ConstraintError, match="too long"):
        constraint.allowed([token] * 102)


@pytest.mark.parametrize("continues", [False, True])
def test_a_conversation_is_rendered_as_the_tokenizer_does_it(tokenizer, continues):
    messages = [
        Message(role="user", content="Wie spät? \u4e16\U0001f600 </s>\n"),
        Message(role="assistant", content="Well", reasoning_content="so"),
    ]
    given: Any = {
        "tools": [Tool(type="function", function=Function(name="now", parameters={"é": [1.5]}))],
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "variables": {"enable_thinking": True},
    }
    for template in (TEMPLATE, {"default": "plain", "tool_use": TEMPLATE}):
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        here, there = ChatTemplate(own), ChatTemplate(own, limited_processes()[0])
        assert there.render(messages, **given) == here.render(messages, **given)


def test_a_program_that_others_ended_is_started_again(staged):
    engine = ScriptedEngine(lambda _: [PromptRead(0), Finished("length")])
    site = staged(engine)
    chats(site)
    for process in limited_processes():
        assert process._process is not None
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
    chats(site)


def test_clients_take_turns_whoever_asks_much():
    """Each client's work is done in its order; what is cancelled uses up a turn."""
    done: list[str] = []

    async def work(turns: ClientTurns, client: str, name: str) -> None:
        async with turns.turn(client):
            await asyncio.sleep(0)
            done.append(name)

    async def ask() -> None:
        turns = ClientTurns()
        asked = [("a", "a0"), ("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b0"), ("c", "c0")]
        asked += [("b", "b1")]
        tasks = [asyncio.create_task(work(turns, *one)) for one in asked]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await work(turns, "d", "d0")

    asyncio.run(ask())
    assert done == ["a0", "a1", "b0", "c0", "b1", "a3", "d0"]
