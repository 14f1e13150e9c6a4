"""Sequences with running states decode together: theirs stay those of each alone."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moe_families
import pytest
import torch
from engine_events import Answer, ask, drained, greedy, hold, request_of
from tiny_checkpoints import save, tiny_model

import moe_runtime
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.budget import kv_bytes_per_token
from moe_runtime.inference.sequence_cache import BatchStates
from moe_runtime.serving.engine import Engine, EngineHandle
from moe_runtime.serving.passes import ModelPasses
from moe_runtime.serving.requests import Event
from moe_runtime.serving.scheduling import Sequence

NEW = 8
LENGTHS = (5, 13, 3, 7)


def load(name: str, folder: Path) -> Any:
    (family,) = (family for family in moe_families.FAMILIES if str(family) == name)
    save(tiny_model(family), folder, sharded=False)
    return moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="64MiB", max_tokens=256
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = load("Qwen3NextForCausalLM", tmp_path_factory.mktemp("qwen3-next"))
    with found.moe:
        yield found


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(3, 96, (n,), generator=generator).tolist()) for n in LENGTHS]


@pytest.fixture(scope="module")
def texts(model: Any, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return [greedy(model, prompt, NEW) for prompt in prompts]


def read(passes: ModelPasses, tokens: tuple[int, ...], num_read: int) -> Sequence:
    """A sequence of which so many tokens are read; those behind are its answer."""
    sequence = Sequence(request_of(tokens[:num_read], NEW), Answer(), num_read)
    sequence.tokens = list(tokens)
    sequence.start(passes.new_cache(), 0, num_read)
    passes.read([(sequence, num_read)])
    sequence.num_computed = num_read
    return sequence


def decode(passes: ModelPasses, sequences: list[Sequence]) -> torch.Tensor:
    logits = passes.decode(sequences)
    for sequence in sequences:
        sequence.num_computed += 1
    return logits


def states_of(cache: Any) -> list[torch.Tensor]:
    found = []
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            found += [state for state in states.values() if state is not None]
    return found


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", ["GraniteMoeHybridForCausalLM", "JambaForCausalLM", "ZayaForCausalLM", ""]
)
def test_states_are_those_of_each_sequence_alone(name, model, tmp_path):
    loaded = load(name, tmp_path) if name else model
    passes = ModelPasses(loaded, Adapters(loaded, {}))
    generator = torch.Generator().manual_seed(1)
    rows = [tuple(torch.randint(3, 96, (n + NEW,), generator=generator).tolist()) for n in LENGTHS]
    together, alone = (
        [read(passes, row, length) for row, length in zip(rows, LENGTHS, strict=True)]
        for _ in range(2)
    )
    # they come, go, come back, and change their places
    for places in ((0, 1), (0, 1), (0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (1,), (1, 0, 3), (0, 2)):
        logits = decode(passes, [together[place] for place in places])
        given = torch.cat([decode(passes, [alone[place]]) for place in places])
        torch.testing.assert_close(logits, given, rtol=1e-4, atol=1e-5)
    # torch adds up in another order for another number of rows: 8 steps through 3 layers with a
    # dozen roundings each
    tolerance = 8 * 3 * 12 * torch.finfo(torch.float32).eps
    for sequence, other in zip(together, alone, strict=True):
        pairs = zip(states_of(sequence.cache), states_of(other.cache), strict=True)
        for state, expected in pairs:
            assert torch.dist(state, expected) <= tolerance * expected.norm()
    if not name:
        loaded.moe.check()
    else:
        loaded.moe.close()


class Cancels(Answer):
    def __init__(self, other: EngineHandle) -> None:
        super().__init__()
        self._other = other

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        if len(self.ids) == 3:
            self._other.cancel()


def test_answers_come_and_go_beside_others(model, prompts, texts):
    with Engine(model) as engine:
        gone, handle = hold(engine, request_of(prompts[0], NEW))
        cancels = Cancels(handle)
        engine.submit(request_of(prompts[1], NEW), cancels)
        short, _ = ask(engine, request_of(prompts[2], NEW // 2))
        first, _ = ask(engine, request_of(prompts[3], NEW, priority=1))
        gone.release()
        found = [answer.wait().ids for answer in (cancels, short, first)]
        drained(engine)
    assert found == [texts[1], texts[2][: NEW // 2], texts[3]]
    assert gone.finished.reason == "cancelled"
    assert 1 < len(gone.ids) < NEW
    assert gone.ids == texts[0][: len(gone.ids)]


def test_sequences_that_lost_their_room_get_the_same_text(model, prompts):
    new, asked = 3 * NEW, prompts[1::2]
    texts = [greedy(model, prompt, new) for prompt in asked]
    with Engine(model, max_tokens=64) as engine:
        first, _ = hold(engine, request_of(asked[0], new))
        second, _ = ask(engine, request_of(asked[1], new))
        first.release()
        assert [answer.wait().ids for answer in (first, second)] == texts
        drained(engine)
        assert engine.statistics().preemptions > 0


def test_a_pass_that_fails_in_the_middle_leaves_nobody_with_half_of_it(model, prompts, texts):
    failed = []

    def fail(layer: Any, inputs: tuple[Any, ...]) -> None:
        if len(inputs[0]) == 3 and not failed:
            failed.append(len(inputs[0]))
            raise OSError("an expert cannot be read")

    with Engine(model) as engine:
        hook = model.model.layers[2].register_forward_pre_hook(fail)  # behind both with states
        first, _ = hold(engine, request_of(prompts[0], NEW))
        others = [ask(engine, request_of(prompt, NEW))[0] for prompt in prompts[1:3]]
        first.release()
        found = [answer.wait().ids for answer in (first, *others)]
        hook.remove()
        drained(engine)
    assert failed == [3]
    assert found == texts[:3]


def test_what_ended_keeps_no_states(model, prompts, monkeypatch):
    made: list[weakref.ref[torch.Tensor]] = []
    real = BatchStates.__init__

    def joined(self: BatchStates, layers: Any) -> None:
        real(self, layers)
        made.extend(map(weakref.ref, states_of(SimpleNamespace(layers=[self, *layers]))))

    with Engine(model) as engine:
        monkeypatch.setattr(BatchStates, "__init__", joined)
        gc.collect()
        gc.disable()
        try:
            first, _ = hold(engine, request_of(prompts[0], NEW))
            others = [ask(engine, request_of(prompt, NEW))[0] for prompt in prompts[1:]]
            first.release()
            assert all(answer.wait().ids for answer in (first, *others))
            assert engine.drain(10.0)
            assert len(made) > 16
            assert not any(state() is not None for state in made)
        finally:
            gc.enable()


def test_states_have_room_beside_keys_and_values(prompts, tmp_path):
    """Memory is set aside for tokens: those that a sequence has room for hold its states too."""
    model = load("JambaForCausalLM", tmp_path)
    with model.moe:
        passes = ModelPasses(model, Adapters(model, {}))
        cache = passes.new_cache()
        model(input_ids=torch.tensor([[5] * 9]), past_key_values=cache)
        states = sum(state.nbytes for state in states_of(cache))
        keys = 2 * 2 * 8 * 4  # of one layer of four
        num_tokens, reserved = passes.state_tokens, kv_bytes_per_token(model.config, torch.float32)
        assert states + num_tokens * keys <= num_tokens * reserved
        assert states + (num_tokens - 1) * keys > (num_tokens - 1) * reserved
        # 48 tokens are room for the states of one, though for the tokens of three
        text = greedy(model, prompts[2], NEW)
        with Engine(model, max_tokens=48) as engine:
            answers = [ask(engine, request_of(prompts[2], NEW))[0] for _ in range(2)]
            assert [answer.wait().ids for answer in answers] == [text] * 2
            drained(engine)
            assert engine.statistics().steps == 2 * NEW


@pytest.mark.parametrize("trouble", ["forgets", "raises", "nothing"])
def test_trial_finds_out_who_must_go_alone(model, trouble, monkeypatch):
    def update(self: BatchStates, recurrent_states: torch.Tensor, *_: Any) -> torch.Tensor:
        if trouble == "raises":
            raise AttributeError("no such state")
        return recurrent_states.zero_()

    if trouble != "nothing":
        monkeypatch.setattr(BatchStates, "update_recurrent_state", update)
    passes = ModelPasses(model, Adapters(model, {}))
    joins = trouble == "nothing"
    assert passes.can_join == joins
    assert not passes.reads_together
    assert passes.reads_in_pieces
    assert (passes.most_together(exact=False) > 1) == joins
    assert passes.most_together(exact=True) == 1
