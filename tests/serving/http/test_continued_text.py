"""Where a text is continued, prompt and answer together are what all tokens together decode to."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from http_server import ScriptedEngine
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece_tokenizer import WORDS, sentencepiece_tokenizer
from transformers import GenerationConfig

from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.serving.batches import batch_run
from moe_runtime.serving.batches.batch_run import Batch, BatchSettings, read_lines
from moe_runtime.serving.batches.offline import Answer
from moe_runtime.serving.requests import (
    EngineOptions,
    Event,
    Finished,
    GenerationRequest,
    NewToken,
    PromptRead,
    TokenLogprob,
)

LLAMA = sentencepiece_tokenizer()
SIZE = len(LLAMA)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if not loop.last %} {% endif %}{% endfor %}"
ANSWER = LLAMA.convert_tokens_to_ids(["\u2581time", "\u2581there", "\u2581was"])
PIECES = [
    "Once upon",
    "naïve 日本語",
    "🦊🦊 fox",
    "a\n\n  b",
    " a ",
    "é",
    "\ufffd",
    "日本語日本語日本語",
]


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def continued(tokenizer: Any, prompt: list[int], answer: list[int], *, is_whole: bool) -> list[str]:
    special = frozenset(tokenizer.all_special_ids)
    text = IncrementalText(
        lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False), special
    )
    held = text.follow(prompt, is_whole=is_whole)
    return [whole(tokenizer, prompt[: len(prompt) - held]), *map(text.add, answer), text.end()]


@given(prompt=st.lists(st.sampled_from(PIECES), min_size=1).map("".join), data=st.data())
@pytest.mark.parametrize("is_llama", [True, False])
def test_a_text_and_its_continuation_are_one_text(tokenizer, is_llama, prompt, data):
    used = LLAMA if is_llama else tokenizer
    words = data.draw(
        st.lists(st.sampled_from(["a", " time", " é", "日", " 🦊", "\n"]), min_size=1)
    )
    before = used(prompt)["input_ids"]
    ids = used(prompt + "".join(words))["input_ids"]
    if ids[: len(before)] != before:
        return  # the words join
    answer = ids[len(before) :]
    pieces = continued(used, before, answer, is_whole=True)
    assert "".join(pieces) == whole(used, ids) == prompt + "".join(words)
    after_special = [*before, used.eos_token_id]
    assert continued(used, after_special, answer, is_whole=False)[1:] == pieces[1:]


@given(cut=st.integers(0, 40))
@pytest.mark.parametrize("is_llama", [True, False])
def test_a_character_that_the_prompt_begins_comes_with_the_answer(tokenizer, is_llama, cut):
    used = LLAMA if is_llama else tokenizer
    ids = used("a 🦊 é time 日本 fox 🦊")["input_ids"]
    cut = min(cut, len(ids))
    pieces = continued(used, ids[:cut], ids[cut:], is_whole=False)
    assert "".join(pieces) == whole(used, ids)
    assert not any("\ufffd" in piece for piece in pieces)


def scripted(request: GenerationRequest) -> list[Event]:
    wanted = request.num_prompt_logprobs is not None
    logprobs = (None, *[TokenLogprob(-1.0)] * (len(request.prompt_ids) - 1)) if wanted else None
    tokens = [NewToken(token, -0.5) for token in [*ANSWER, LLAMA.eos_token_id]]
    return [PromptRead(0, logprobs), *tokens, Finished("stop")]


@pytest.mark.parametrize("prompt", ["Once upon a", "Once  é a", " Once", "<s>Once a"])
def test_completions_go_on_with_their_prompts(staged, prompt):
    ids = LLAMA(prompt)["input_ids"]
    text = prompt + whole(LLAMA, [*ids, *ANSWER])[len(whole(LLAMA, ids)) :]
    assert text == prompt + " time there was"
    tokens = LLAMA.convert_ids_to_tokens([*ids, *ANSWER])
    asked = {"prompt": prompt, "echo": True, "logprobs": 0}
    site = staged(ScriptedEngine(scripted), own=LLAMA, size=SIZE)
    plain = site.ask("/v1/completions", {"prompt": prompt})[1]["choices"][0]
    echoed = site.ask("/v1/completions", asked)[1]["choices"][0]
    by_ids = site.ask("/v1/completions", {**asked, "prompt": ids})[1]["choices"][0]
    streamed = site.stream("/v1/completions", {**asked, "prompt": [ids, ids], "n": 2})
    assert plain["text"] == " time there was"
    assert echoed["text"] == text
    with_special = LLAMA.decode([*ids, *ANSWER])
    assert by_ids["text"] == with_special
    for index in range(4):
        parts = [one["choices"][0] for one in streamed if one["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == with_special
        offsets = [at for part in parts for at in part["logprobs"]["text_offset"]]
        assert offsets == by_ids["logprobs"]["text_offset"]
    for answer in (echoed, by_ids):
        offsets = [*answer["logprobs"]["text_offset"][:-1], len(answer["text"])]
        assert offsets == sorted(offsets)
        for (before, token), (start, end) in zip(
            itertools.pairwise(tokens), list(itertools.pairwise(offsets))[1:], strict=True
        ):
            if (word := token.strip("\u2581")) in WORDS:
                assert answer["text"][start:end] in (word, " " + word)
                assert before == "\u2581" or not answer["text"][:start].endswith(" ")


def test_a_chat_goes_on_only_with_a_message_that_it_continues(staged):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once a"}]
    asked = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    site = staged(ScriptedEngine(scripted), own=tokenizer, size=SIZE)
    alone = site.ask("/v1/chat/completions", {"messages": messages[:1]})[1]
    further = site.ask("/v1/chat/completions", asked)[1]
    assert alone["choices"][0]["message"]["content"] == whole(LLAMA, ANSWER) == "time there was"
    assert further["choices"][0]["message"]["content"] == " time there was"


@pytest.mark.parametrize("chat", [False, True])
def test_lines_of_a_file_go_on_with_their_prompts(monkeypatch, chat):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = SimpleNamespace(vocab_size=SIZE, max_position_embeddings=100)
    config = SimpleNamespace(get_text_config=lambda: text)
    made = {"find_checkpoint": Path("m"), "read_generation_config": GenerationConfig()}
    for name, value in {**made, "load_tokenizer": tokenizer, "read_config": config}.items():
        monkeypatch.setattr(batch_run, name, lambda *_, value=value, **__: value)
    asked = [{"prompt": "Once a"}, {"prompt": [1, 68]}]
    asked.append({"messages": [{"role": "user", "content": "a"}]})
    lines = "\n".join(map(json.dumps, asked))
    settings: Any = BatchSettings(
        **{"model": "m", "file": "file", "output": Path("out"), "chat": chat, "seed": None},
        **{"temperature": None, "top_p": None, "max_new_tokens": 3, "max_tokens": None},
        **{"loading": {"group": "none takes pictures"}, "engine": EngineOptions()},
    )
    batch, texts = Batch(read_lines(lines, "file", max_new_tokens=3), settings), []
    for job in batch.jobs("float32"):
        assert [batch.add_token(job, NewToken(token)) for token in ANSWER] == [False] * len(ANSWER)
        texts.append(batch.record(job, Answer(ANSWER, "length"))["text"])
    alone, further = "time there was", " time there was"
    assert texts == [alone if chat else further, further, alone]
