"""Conversations of models with windows and running states: later turns go on from copies of these,
and say what a fresh run says."""

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_families
import pytest
import torch
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.inference.cache_copies import StateCopies
from moe_runtime.serving import prefixes
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.prefixes import PrefixDisk
from moe_runtime.serving.requests import EngineOptions

NEW = 6
LONGEST = 120
"""Tokens of a conversation: the tiny models know 128 positions."""
FAMILIES = (
    *("GptOssForCausalLM", "Gemma4ForCausalLM", "Cohere2MoeForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM"),
    *("Lfm2MoeForCausalLM", "ZayaForCausalLM", "LaraMiniForCausalLM"),
)
"""With windows; linear attention; state spaces; convolutions, the last but one beside keys and
values, and one with windows and linear attention."""
OPTIONS = {
    "default": EngineOptions(),
    "small steps": EngineOptions(prompt_tokens=8, idle_prompt_tokens=24),
    "exact": EngineOptions(exact=True, prompt_tokens=16),
}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are copied as often as in texts that are many times as long."""
    monkeypatch.setattr(prefixes, "STATE_TOKENS", 32)
    monkeypatch.setattr(prefixes, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(prefixes, "LEAST_SHARED", 16)


@contextlib.contextmanager
def loaded(name: str, folder: Path, max_tokens: int = 1024) -> Iterator[Any]:
    (family,) = (family for family in moe_families.FAMILIES if str(family) == name)
    save(tiny_model(family), folder, sharded=False)
    model = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="64MiB", max_tokens=max_tokens
    )
    with model.moe:
        yield model


class Talk:
    """Texts that go on from each other, at random: turns, forks, and the same again."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self._size = vocab_size
        self._texts: list[tuple[int, ...]] = [()]
        self.num_turns = 0

    def next_prompt(self) -> tuple[int, ...]:
        begun = self._chance.choice(self._texts[-8:])
        if self._chance.random() < 0.2:  # it goes on in another way
            begun = begun[: self._chance.randrange(len(begun) + 1)]
        said = tuple(self._chance.randrange(3, self._size) for _ in range(self._chance.randint(1, 40)))
        if len(begun) + len(said) + NEW > LONGEST:
            begun = ()
        self.num_turns += 1
        return begun + said

    def answered(self, prompt: tuple[int, ...], answer: Answer) -> None:
        self._texts.append(prompt + tuple(answer.ids))


def converse(model: Any, options: EngineOptions, num_turns: int, seed: int, disk: Path) -> float:
    """Random conversations in an engine that forgets, and is closed and opened again; gives the
    share of prompts that was found."""
    chance = random.Random(seed)
    talk = Talk(model.config.get_text_config().vocab_size, seed)
    fresh_options = EngineOptions(exact=options.exact, reuses_prefixes=False, prompt_tokens=16)
    places = [None, PrefixDisk(disk, 1 << 22, b"tiny"), PrefixDisk(disk, 1 << 17, b"tiny")]
    found = asked = 0
    with Engine(model, fresh_options) as fresh:
        while talk.num_turns < num_turns:
            capacity = chance.choice([256, 448, 1024])
            with Engine(
                model, options, max_tokens=capacity, prefix_disk=chance.choice(places)
            ) as engine:
                for _ in range(chance.randint(4, 12)):
                    some = [talk.next_prompt() for _ in range(chance.choice([1, 1, 3]))]
                    requests = [request_of(one, NEW, num_logprobs=0) for one in some]
                    answers = ask_all(engine, requests)
                    expected = ask_all(fresh, requests)
                    for prompt, answer, other in zip(some, answers, expected, strict=True):
                        assert answer.finished.reason == "length"
                        assert answer.ids == other.ids
                        told, known = (
                            torch.tensor([token.logprob for token in each.tokens])
                            for each in (answer, other)
                        )
                        # the order of sums differs, of some dozen roundings a layer
                        eps = 0.0 if options.exact else 256 * torch.finfo(torch.float32).eps
                        torch.testing.assert_close(told, known, rtol=eps, atol=eps)
                        found += answer.read.cached_tokens
                        asked += len(prompt)
                        talk.answered(prompt, answer)
                    engine.check()
                drained(engine)
    return found / asked


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", OPTIONS)
def test_turns_say_what_a_fresh_run_says(name: str, mode: str, tmp_path: Path) -> None:
    with loaded(name, tmp_path / "model") as model:
        found = converse(model, OPTIONS[mode], 40, 0, tmp_path / "disk")
        model.moe.check()
    assert found > 0.2
