"""Conversations of models with windows and running states: later turns go on from copies of these,
and say what a fresh run says."""

import contextlib
import dataclasses
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moe_families
import pytest
import torch
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of
from tiny_checkpoints import save, tiny_model
from transformers import DynamicCache

import moe_runtime
from moe_runtime.inference.budget import kv_bytes_per_token
from moe_runtime.serving import passes, prefixes
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.prefixes import PrefixDisk, Prefixes
from moe_runtime.serving.requests import EngineOptions

NEW = 6
LONGEST = 120
"""Tokens of a conversation: the tiny models know 128 positions."""
FAMILIES = (
    *("Qwen3NextForCausalLM", "NemotronHForCausalLM", "GptOssForCausalLM", "Lfm2MoeForCausalLM"),
    *("Gemma4ForCausalLM", "Qwen3_5MoeForCausalLM", "KimiLinearForCausalLM"),
    *("GraniteMoeHybridForCausalLM", "ZayaForCausalLM", "BeamForCausalLM"),
)
"""With linear attention, state spaces, windows and convolutions, and again in other forms."""
SHORT = {"default": (*FAMILIES[:2], "Lfm2MoeForCausalLM"), "exact": ("GptOssForCausalLM",)}
OPTIONS = {
    "default": EngineOptions(),
    "small steps": EngineOptions(prompt_tokens=8, idle_prompt_tokens=24),
    "exact": EngineOptions(exact=True, prompt_tokens=16, most_running=4),
}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are copied as often as in texts that are many times as long."""
    monkeypatch.setattr(prefixes, "STATE_TOKENS", 32)
    monkeypatch.setattr(prefixes, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(prefixes, "LEAST_SHARED", 16)


@contextlib.contextmanager
def loaded(name: str, folder: Path, kv_cache: str = "exact") -> Iterator[Any]:
    (family,) = (family for family in moe_families.FAMILIES if str(family) == name)
    if kv_cache == "int8":
        family = dataclasses.replace(family, config={**family.config, "head_dim": 32})
    if name == "NemotronHForCausalLM":
        # transformers bounds steps from below by this in prompts, and not in answers
        family = dataclasses.replace(family, config={**family.config, "time_step_min": 1e-30})
    save(tiny_model(family), folder, sharded=False)
    model = moe_runtime.load(
        folder,
        device="cpu",
        dtype="float32",
        host_memory="64MiB",
        max_tokens=1024,
        kv_cache=kv_cache,
    )
    with model.moe:
        yield model
        model.moe.check()


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
        said = tuple(
            self._chance.randrange(3, self._size) for _ in range(self._chance.randint(1, 40))
        )
        if len(begun) + len(said) + NEW > LONGEST:
            begun = ()
        self.num_turns += 1
        return begun + said

    def answered(self, prompt: tuple[int, ...], answer: Answer) -> None:
        self._texts.append(prompt + tuple(answer.ids))


def converse(
    model: Any,
    options: EngineOptions,
    num_turns: int,
    seed: int,
    disk: Path,
    num_new: int = NEW,
    fresh_tokens: int = 16,
) -> float:
    """Random conversations in an engine that forgets, and is closed and opened again; gives the
    share of prompts that was found."""
    chance = random.Random(seed)
    talk = Talk(model.config.get_text_config().vocab_size, seed)
    fresh_options = EngineOptions(
        exact=options.exact, reuses_prefixes=False, prompt_tokens=fresh_tokens
    )
    places = [None, PrefixDisk(disk, 1 << 22, b"tiny"), PrefixDisk(disk, 1 << 17, b"tiny")]
    found = asked = 0
    with Engine(model, fresh_options) as fresh:
        while talk.num_turns < num_turns:
            capacity = chance.choice([256, 448, 1024])
            with Engine(
                model, options, max_tokens=capacity, prefix_disk=chance.choice(places)
            ) as engine:
                for _ in range(chance.randint(4, 12)):
                    if talk.num_turns >= num_turns:
                        break
                    some = [talk.next_prompt() for _ in range(chance.choice([1, 1, 3]))]
                    requests = [request_of(one, num_new, num_logprobs=0) for one in some]
                    answers = ask_all(engine, requests)
                    expected = ask_all(fresh, requests)
                    for prompt, answer, other in zip(some, answers, expected, strict=True):
                        assert answer.finished.reason == "length"
                        assert answer.ids == other.ids
                        told, known = (
                            torch.tensor([token.logprob for token in each.tokens])
                            for each in (answer, other)
                        )
                        # sums of another order: chunks of linear attention magnify roundings
                        eps = 0.0 if options.exact else 2.0**-9
                        torch.testing.assert_close(told, known, rtol=eps, atol=eps)
                        found += answer.read.cached_tokens
                        asked += len(prompt)
                        talk.answered(prompt, answer)
                    engine.check()
                drained(engine)
    return found / asked


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.long] * (name not in SHORT[mode]))
        for mode, names in (("default", FAMILIES), ("exact", FAMILIES[:4]))
        for name in names
    ],
)
def test_turns_say_what_a_fresh_run_says(name, mode, tmp_path):
    num_turns = 10 if mode == "default" else 8
    with loaded(name, tmp_path / "model") as model:
        assert converse(model, OPTIONS[mode], num_turns, 0, tmp_path / "disk") > 0.15


LONG_TOO = ["GptOssForCausalLM", pytest.param("Qwen3NextForCausalLM", marks=pytest.mark.long)]


@pytest.mark.parametrize("name", LONG_TOO)
def test_rounded_caches_are_copied_as_they_are(name, tmp_path):
    with loaded(name, tmp_path / "model", "int8") as model:
        assert converse(model, OPTIONS["default"], 10, 0, tmp_path / "disk") > 0.15


@pytest.mark.parametrize("name", LONG_TOO)
def test_caches_that_do_not_grow_in_place_are_copied_too(name, tmp_path, monkeypatch):
    """As on a GPU: windows forget what is before them, and passes end where they are copied."""
    monkeypatch.setattr(passes, "new_cache", lambda model, grows: DynamicCache(config=model.config))
    with loaded(name, tmp_path / "model") as model:
        assert converse(model, OPTIONS["default"], 10, 0, tmp_path / "disk") > 0.15


@pytest.mark.long
@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_thousand_turns_say_what_a_fresh_run_says(name, mode, tmp_path):
    """Answers are short, and a fresh run reads a prompt at once: so all end within the hour."""
    with loaded(name, tmp_path / "model") as model:
        at_once = 16 if mode == "exact" else LONGEST  # bits are those of steps as long
        told = converse(model, OPTIONS[mode], 1000, 1, tmp_path / "disk", 3, at_once)
        assert told > 0.15


@pytest.fixture(scope="module", params=["Qwen3NextForCausalLM", "GptOssForCausalLM"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    with loaded(request.param, tmp_path_factory.mktemp("model")) as found:
        yield found


TEXT = tuple(3 + 7 * place % 89 for place in range(110))


def test_a_turn_reads_what_is_new_in_one_step(model):
    """The prompt's end is read again, and the answer's beyond its last block."""
    with Engine(model) as engine:
        first = ask(engine, request_of(TEXT[:60], NEW))[0].wait()
        assert engine.statistics().steps == NEW
        turn = (*TEXT[:60], *first.ids, *TEXT[60:80])
        second = ask(engine, request_of(turn, NEW))[0].wait()
        # an answer's opening, as a template without its reasoning has it
        other = ask(engine, request_of((*TEXT[:60], *TEXT[70:90]), NEW))[0].wait()
        drained(engine)
        assert engine.statistics().steps == 3 * NEW
    assert first.read.cached_tokens == 0
    assert second.read.cached_tokens == 64
    assert other.read.cached_tokens == 32
    assert second.ids == greedy(model, turn, NEW)


def test_texts_that_part_share_what_they_have_in_common(model):
    """The second computes the state where they part, which the third finds."""
    found = []
    with Engine(model) as engine:
        for last in range(3):
            prompt = (*TEXT[:58], *TEXT[80 + last :])
            answer = ask(engine, request_of(prompt, NEW))[0].wait()
            found.append(answer.read.cached_tokens)
            assert answer.ids == greedy(model, prompt, NEW)
        drained(engine)
    assert found == [0, 32, 48]


def test_prompts_that_arrive_together_read_what_they_share_once(model):
    prompts = [(*TEXT[:58], *TEXT[80 + last :]) for last in range(3)]
    with Engine(model) as engine:
        busy, _ = hold(engine, request_of(TEXT[-5:], 2))
        asked = [ask(engine, request_of(prompt, NEW))[0] for prompt in prompts]
        busy.release()
        answers = [answer.wait() for answer in asked]
        drained(engine)
    assert [answer.read.cached_tokens for answer in answers] == [0, 48, 48]
    assert [answer.ids for answer in answers] == [greedy(model, each, NEW) for each in prompts]


def test_long_answers_keep_one_state(model):
    with Engine(model) as engine:
        held, _ = hold(engine, request_of(TEXT[:20], 60))
        held.release()
        held.wait()
        kept = engine.statistics().prefix_tokens
        turn = (*TEXT[:20], *held.ids, *TEXT[:10])
        again = ask(engine, request_of(turn, 1))[0].wait()
        assert again.read.cached_tokens == 64
        assert again.ids == greedy(model, turn, 1)
        # no more than what the same text would leave that ends with it
        account = engine._account
        assert kept == 64 // 16 * account.block_room + account.state_room
        drained(engine)


def test_kept_states_and_blocks_lie_in_the_room_that_they_count_for(model):
    with Engine(model, max_tokens=512) as engine:
        for first in range(0, 50, 10):
            ask(engine, request_of(TEXT[first : first + 50], NEW))[0].wait()
        drained(engine)
        account = engine._account
        kept = sum(part.nbytes for part in account._prefixes.values())
        reserved = kv_bytes_per_token(model.config, model.dtype)
        assert 0 < kept <= account.prefix_tokens * reserved
        assert account.prefix_tokens <= 512


def test_a_pass_that_fails_leaves_no_state(model):
    failed = []

    def fail(layer: Any, inputs: tuple[Any, ...]) -> None:
        if len(inputs[0][0]) > 20 and not failed:
            failed.append(layer)
            raise OSError("an expert cannot be read")

    with Engine(model) as engine:
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        broken = ask(engine, request_of(TEXT[:60], NEW))[0].wait()
        hook.remove()
        assert broken.finished.reason == "error"
        assert engine.statistics().prefix_tokens == 0
        answer = ask(engine, request_of(TEXT[:60], NEW))[0].wait()
        drained(engine)
    assert failed
    assert answer.read.cached_tokens == 0
    assert answer.ids == greedy(model, TEXT[:60], NEW)


@pytest.mark.parametrize("is_state", [False, True])
def test_what_is_damaged_on_the_disk_is_computed_again(model, tmp_path, is_state):
    disk = PrefixDisk(tmp_path, 1 << 22, b"tiny")
    found = []
    for turn in range(4):
        with Engine(model, prefix_disk=disk) as engine:
            answer = ask(engine, request_of(TEXT[:70], 1))[0].wait()
            assert answer.ids == greedy(model, TEXT[:70], 1)
            drained(engine)
            state_bytes = engine._passes.states.num_bytes + 16  # and their sum
        found.append(answer.read.cached_tokens)
        files = [(file, file.stat().st_size) for file in tmp_path.glob("?" * 64)]
        some = [pair for pair in files if (pair[1] == state_bytes) == is_state]
        for file, size in (some if is_state else some[:1]) if turn == 1 else ():
            file.write_bytes(bytes(size))
    assert found[1] >= 48
    assert found == [0, found[1], 0, found[1]]


class Passes:
    """Counts the tokens that an engine computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_tokens = 0
        read, decode = ModelPasses.read, ModelPasses.decode

        def reading(own: ModelPasses, chosen: Any) -> Any:
            self.num_tokens += sum(num_new for _, num_new in chosen)
            return read(own, chosen)

        def decoding(own: ModelPasses, sequences: Any) -> Any:
            self.num_tokens += len(sequences)
            return decode(own, sequences)

        monkeypatch.setattr(ModelPasses, "read", reading)
        monkeypatch.setattr(ModelPasses, "decode", decoding)


CROWD = [tuple(3 + (11 * row + 7 * place) % 83 for place in range(21 + row)) for row in range(4)]
"""Prompts of which no two begin alike."""


@pytest.mark.parametrize(
    ("model", "mode", "damage"),
    [
        ("Qwen3NextForCausalLM", "default", None),
        ("GptOssForCausalLM", "exact", "absent"),
        pytest.param("Qwen3NextForCausalLM", "exact", None, marks=pytest.mark.long),
        pytest.param("GptOssForCausalLM", "default", "truncated", marks=pytest.mark.long),
    ],
    indirect=["model"],
)
def test_what_loses_its_room_comes_back_as_it_was(model, mode, damage, tmp_path, monkeypatch):
    """Nothing is computed twice, unless a file was damaged; then no other text comes of it."""
    requests = [request_of(prompt, 16) for prompt in CROWD]
    with Engine(model, dataclasses.replace(OPTIONS[mode], reuses_prefixes=False)) as engine:
        expected = [answer.ids for answer in (ask(engine, r)[0].wait() for r in requests)]
    counted = Passes(monkeypatch)
    swap_out = Prefixes.swap_out

    def left(prefixes: Prefixes, sequence: Any) -> None:
        swap_out(prefixes, sequence)
        newest = max(tmp_path.glob("?" * 64), key=lambda file: file.stat().st_mtime_ns)
        if damage == "truncated":
            newest.write_bytes(newest.read_bytes()[:-5])
        elif damage == "absent":
            newest.unlink()

    monkeypatch.setattr(Prefixes, "swap_out", left)
    disk = PrefixDisk(tmp_path, 1 << 24, b"tiny")
    with Engine(model, OPTIONS[mode], max_tokens=128, prefix_disk=disk) as engine:
        answers = ask_all(engine, requests)
        drained(engine)
        found = engine.statistics()
        model.moe.check()
    assert [answer.ids for answer in answers] == expected
    assert found.preemptions
    once = sum(len(prompt) + 16 - 1 for prompt in CROWD)
    assert (counted.num_tokens == once) == (damage is None)
    if damage is None:
        assert found.prefix_disk_hit_tokens >= 21


def test_others_go_on_while_a_beginning_is_read(model, tmp_path, monkeypatch):
    disk = PrefixDisk(tmp_path, 1 << 24, b"tiny")
    with Engine(model, prefix_disk=disk) as engine:
        expected = ask(engine, request_of(TEXT[:60], NEW))[0].wait().ids
    may_read, read = threading.Event(), Prefixes.read

    def held(*arguments: Any) -> Any:
        assert may_read.wait(600)
        return read(*arguments)

    monkeypatch.setattr(Prefixes, "read", held)
    with Engine(model, prefix_disk=disk) as engine:
        late, _ = ask(engine, request_of(TEXT[:60], NEW))
        dropped, handle = ask(engine, request_of(TEXT[:60], NEW))
        other = ask(engine, request_of(CROWD[1], NEW))[0].wait()
        assert other.ids == greedy(model, CROWD[1], NEW)
        assert not late.ids
        handle.cancel()
        may_read.set()
        assert late.wait().ids == expected
        assert late.read.cached_tokens >= 32
        assert dropped.wait().finished.reason == "cancelled"
        drained(engine)
