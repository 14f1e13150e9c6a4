"""Sequences on a GPU decode in rows of a static cache, whose steps are recorded and replayed."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_layers import use_device_layers
from emulated_models import emulated, experts_modules_of, load_on_emulated_device
from engine_events import Answer, ask, ask_all, drained, greedy, hold, request_of
from moe_families import Family
from tiny_checkpoints import save, tiny_model
from transformers import AutoModelForCausalLM
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.checkpoints.transformers_private import attention_name
from moe_runtime.errors import CapacityError
from moe_runtime.inference.device import decode_graphs
from moe_runtime.inference.device.decoding_model import fuse_steps
from moe_runtime.serving import passes
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import (
    EngineOptions,
    NewToken,
    RequestTooLongError,
    SamplingOptions,
)

pytest.importorskip("triton")
NUM_EXPERTS, CAPACITY = 6, 512
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2})
PROMPTS = [(5, 7, 3), (11, 2), (9, 4, 8, 6), (1, 12, 13, 2, 7), (3,)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models keep the attention of transformers, and kernels are interpreted."""
    if not torch.cuda.is_available():
        repair_interpreter()
        monkeypatch.setattr(passes, "_keeps_attention", lambda model: True)
        use_device_layers(monkeypatch)


@contextmanager
def loaded(
    checkpoint: Path,
    slots: int = NUM_EXPERTS,
    *,
    is_fused: bool = True,
    tokens: int = CAPACITY,
    cards: tuple[int, ...] = (),
) -> Iterator[Any]:
    model = load_on_emulated_device(
        checkpoint, slots_a_layer=slots, host_slots=12, max_tokens=tokens, card_slots=cards
    )
    if is_fused:
        fuse_steps(model)
    with model.moe:
        yield model


class Recordings:
    """Steps that were recorded, by their sequences, and those that were replayed."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def watch(self) -> Any:
        made, count = self, decode_graphs.RecordedStep

        class Watched(count):
            def __init__(self, model: Any, forward: Any, call: Any, *rest: Any, **more: Any):
                made.recorded.append(len(call.tensors["input_ids"]))
                super().__init__(model, forward, call, *rest, **more)

            def replay(self, call: Any) -> Any:
                made.replayed.append(len(call.tensors["input_ids"]))
                return super().replay(call)

        return patch.object(decode_graphs, "RecordedStep", Watched)


@functools.lru_cache(maxsize=1)
def stock(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def texts_of(checkpoint: Path, asked: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    model, found = stock(checkpoint), []
    for prompt, num_new in asked:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@emulated
@pytest.mark.parametrize("slots", [pytest.param(2, marks=pytest.mark.long), NUM_EXPERTS])
def test_one_sequence_after_another_replays_the_steps_of_a_row(checkpoint, slots):
    prompts = PROMPTS[:3]
    expected = texts_of(checkpoint, [(prompt, 4) for prompt in prompts])
    recordings = Recordings()
    with loaded(checkpoint, slots) as model, Engine(model) as engine, recordings.watch():
        found = [ask(engine, request_of(prompt, 4))[0].wait().ids for prompt in prompts]
        drained(engine)
        model.moe.check()
    assert found == expected
    assert set(recordings.replayed) == {1}
    # one in parts, and one of the whole when every expert has come to the device or the host
    assert len(recordings.recorded) <= 2
    assert len(recordings.replayed) == 3 * len(prompts) - 1


class Timed(Answer):
    def __init__(self, engine: Engine, others: dict[int, Any]) -> None:
        super().__init__()
        self._engine, self._others = engine, others
        self.asked: list[Answer] = []

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if isinstance(event, NewToken) and len(self.ids) in self._others:
            for request in self._others[len(self.ids)]:
                answer = Answer()
                self._engine.submit(request, answer)
                self.asked.append(answer)


SAMPLED = SamplingOptions(temperature=0.9, top_k=20, seed=7)
NEW = (14, 3, 7, 5, 7)


def come_and_go(model: Any, options: EngineOptions, **more: Any) -> list[list[int]]:
    """Five sequences that begin and end at different steps; the last one is sampled."""
    asked = [request_of(p, n) for p, n in zip(PROMPTS[:4], NEW[:4], strict=True)]
    asked.append(request_of(PROMPTS[4], NEW[4], sampling=SAMPLED))
    with Engine(model, options, **more) as engine:
        first = Timed(engine, {2: asked[1:3], 4: asked[3:4], 6: asked[4:]})
        engine.submit(asked[0], first)
        first.wait()
        texts = [first.ids, *(answer.wait().ids for answer in first.asked)]
        assert engine.drain(10.0)
        account = engine._account
        assert account.sequence_tokens == engine._rows.room
        assert engine.statistics().kv_tokens == account.prefix_tokens
        engine.check()
    return texts


@emulated
@pytest.mark.parametrize(
    ("slots", "is_fused", "rows", "exact", "cards"),
    [
        (NUM_EXPERTS, True, 4, False, ()),
        pytest.param(2, False, 2, False, (), marks=pytest.mark.long),
        (2, False, 4, True, ()),
        pytest.param(NUM_EXPERTS, True, 4, False, (4, 6), marks=pytest.mark.long),
    ],
)
def test_sequences_come_and_go(checkpoint, slots, is_fused, rows, exact, cards):
    recordings = Recordings()
    running = 4 if exact else 5  # exact bits want a row for each
    options = EngineOptions(decode_rows=rows, most_running=running, exact=exact)
    with loaded(checkpoint, slots, is_fused=is_fused, cards=cards) as model:
        with recordings.watch():
            found = come_and_go(model, options)
        model.moe.check()
    if not exact:
        with loaded(checkpoint, slots, is_fused=is_fused) as model:
            assert found == come_and_go(model, EngineOptions(decode_rows=0))
    assert found[:4] == texts_of(checkpoint, [*zip(PROMPTS[:4], NEW[:4], strict=True)])
    sizes = {1} if exact else {*range(1, min(rows, 4) + 1)}
    assert {*recordings.replayed} == sizes
    if not exact:  # one for each number, and one more where parts became whole
        times = {size: recordings.recorded.count(size) for size in sizes}
        assert max(times.values()) <= (1 if slots == 2 else 2), times
    assert len(recordings.replayed) > len(recordings.recorded)


def prompt_of(length: int) -> tuple[int, ...]:
    """Without the token that `generate` takes for padding."""
    return tuple(1 + (7 * place + 3) % 89 for place in range(length))


@emulated
def test_one_that_outgrows_its_row_goes_on_and_its_tokens_are_found_again(checkpoint):
    long, short = (prompt_of(47), 20), (PROMPTS[1], 20)
    with loaded(checkpoint, is_fused=False) as model, Engine(model) as engine:
        assert engine._rows.room == 4 * 64
        answers = ask_all(engine, [request_of(*long), request_of(*short)])
        turn = (*long[0], *answers[0].ids, 5)
        again = ask(engine, request_of(turn, 3))[0].wait()
        other = (*short[0], *answers[1].ids, 5)
        in_row = ask(engine, request_of(other, 3))[0].wait()
        drained(engine)
    assert again.read.cached_tokens == (47 + 19) // 16 * 16
    assert in_row.read.cached_tokens == (2 + 19) // 16 * 16
    found = [answers[0].ids, answers[1].ids, again.ids, in_row.ids]
    assert found == texts_of(checkpoint, [long, short, (turn, 3), (other, 3)])


@emulated
def test_rows_make_way_for_one_that_needs_their_memory(checkpoint):
    asked = [(PROMPTS[0], 8), (prompt_of(90), 3), (PROMPTS[1], 4)]
    with loaded(checkpoint, is_fused=False, tokens=160) as model, Engine(model) as engine:
        assert engine._rows.room == 80
        assert engine.most_request_tokens == 128, "as many as the model has positions"
        first = Timed(engine, {3: [request_of(*asked[1])]})
        engine.submit(request_of(*asked[0]), first)
        first.wait()
        second = first.asked[0].wait()
        assert engine.statistics().preemptions == 1
        third = ask(engine, request_of(*asked[2]))[0].wait()
        drained(engine)
        assert engine._rows.room == 80
    assert [first.ids, second.ids, third.ids] == texts_of(checkpoint, asked)


@emulated
def test_the_longest_prompt_of_which_nothing_but_numbers_is_asked_has_room(checkpoint):
    options = EngineOptions(decode_rows=1, most_running=1, exact=True)
    with loaded(checkpoint, is_fused=False, tokens=192) as model, Engine(model, options) as engine:
        most = engine.most_request_tokens
        assert most == 192 - engine._rows.room
        with pytest.raises(RequestTooLongError, match=f"maximum context length is {most}"):
            ask(engine, request_of(prompt_of(most), 0))
        assert ask(engine, request_of(prompt_of(most - 1), 0))[0].wait().ids == []


@emulated
def test_a_step_that_fails_and_one_that_is_cancelled_leave_the_others_right(checkpoint):
    asked = [(PROMPTS[0], 9), (PROMPTS[2], 12), (PROMPTS[3], 9)]

    class Failing(Timed):
        def __call__(self, event: Any) -> None:
            super().__call__(event)
            if isinstance(event, NewToken) and len(self.ids) == 4:
                store: Any = experts_modules_of(model)[0].store
                store.device.faults.append(OSError("unplugged"))
            if isinstance(event, NewToken) and len(self.ids) == 7:
                cancelled.cancel()

    with loaded(checkpoint, 2, is_fused=False) as model, Engine(model) as engine:
        with patch.object(engine._scheduler, "preempt", wraps=engine._scheduler.preempt) as lost:
            requests = [request_of(*each) for each in asked]
            first = Failing(engine, {1: [requests[2]]})
            gone, cancelled = hold(engine, requests[1])
            engine.submit(requests[0], first)
            gone.release()
            first.wait()
            third = first.asked[0].wait()
            gone.wait()
            drained(engine)
        assert not lost.called, "rows were as they were"
        model.moe.check()
    assert gone.finished.reason == "cancelled"
    texts = texts_of(checkpoint, asked)
    assert [first.ids, third.ids] == [texts[0], texts[2]]
    assert gone.ids == texts[1][: len(gone.ids)]


WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


@emulated
@pytest.mark.parametrize(
    "family",
    [
        Family("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 2, **WINDOWS}),
        Family("mixtral", "MixtralForCausalLM", {"num_hidden_layers": 1, "sliding_window": 5}),
        Family("olmoe", "OlmoeForCausalLM", {"num_hidden_layers": 1}),
        Family("glm4_moe", "Glm4MoeForCausalLM", {"num_hidden_layers": 2, "use_qk_norm": True}),
    ],
    ids=lambda family: family.folder,
)
def test_families_decode_in_rows(tmp_path, family):
    folder, recordings = save(tiny_model(family), tmp_path, sharded=True), Recordings()
    asked = [(prompt_of(9), 5), (PROMPTS[0], 7)]
    with loaded(folder, is_fused=False) as model:
        before = attention_name(model)
        with Engine(model) as engine, recordings.watch():
            answers = ask_all(engine, [request_of(*each) for each in asked])
            drained(engine)
        assert attention_name(model) == before
        own = [greedy(model, *each) for each in asked]
        model.moe.check()
    assert recordings.replayed
    assert [answer.ids for answer in answers] == texts_of(folder, asked) == own


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["1GiB", "least"])
def test_a_gpu_records_a_step_for_each_number_of_sequences(checkpoint, experts):
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(checkpoint, device="cuda", max_tokens=CAPACITY, device_memory=1)
    memory: Any = refused.value.smallest_bytes if experts == "least" else experts
    found, recordings = [], Recordings()
    for rows in (4, 0):
        model: Any = moe_runtime.load(
            checkpoint, device="cuda", dtype="float32", max_tokens=CAPACITY, device_memory=memory
        )
        with model.moe, recordings.watch():
            found.append(come_and_go(model, EngineOptions(decode_rows=rows, most_running=5)))
            model.moe.check()
    assert found[0] == found[1]
    assert {*recordings.replayed} == {1, 2, 3, 4}
    assert all(recordings.recorded.count(size) <= 2 for size in range(1, 5))
    assert len(recordings.replayed) > len(recordings.recorded)


@emulated
def test_windows_of_an_answer_in_a_row_are_found_again(tmp_path):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
    family = Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", kinds)
    checkpoint = save(tiny_model(family), tmp_path, sharded=True)
    text = tuple(3 + 7 * place % 89 for place in range(50))
    with loaded(checkpoint, is_fused=False) as model:
        with Engine(model) as engine:
            first = ask(engine, request_of(text[:40], 10))[0].wait()
            turn = (*text[:40], *first.ids, *text[40:])
            second = ask(engine, request_of(turn, 6))[0].wait()
            assert engine._rows.room
            drained(engine)
        with Engine(model, EngineOptions(reuses_prefixes=False)) as engine:
            expected = ask(engine, request_of(turn, 6))[0].wait()
    assert second.read.cached_tokens == 48
    assert second.ids == expected.ids
