"""Sequences on a GPU decode in rows of a static cache, whose steps are recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_layers import use_device_layers
from emulated_models import emulated, load_on_emulated_device
from engine_events import ask, request_of
from moe_families import Family
from tiny_checkpoints import save, tiny_model
from transformers import AutoModelForCausalLM
from triton_interpreter import repair_interpreter

from moe_runtime.inference.device import decode_graphs
from moe_runtime.inference.device.decoding_model import fuse_steps
from moe_runtime.serving import passes
from moe_runtime.serving.engine import Engine

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
def loaded(checkpoint: Path, slots: int = NUM_EXPERTS, *, is_fused: bool = True) -> Iterator[Any]:
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots, max_tokens=CAPACITY)
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


def texts_of(checkpoint: Path, asked: list[tuple[tuple[int, ...], int]]) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for prompt, num_new in asked:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False, eos_token_id=None
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@emulated
@pytest.mark.parametrize("slots", [2, NUM_EXPERTS])
def test_one_sequence_after_another_replays_the_steps_of_a_row(
    checkpoint: Path, slots: int
) -> None:
    expected = texts_of(checkpoint, [(prompt, 6) for prompt in PROMPTS])
    recordings = Recordings()
    with loaded(checkpoint, slots) as model, Engine(model) as engine, recordings.watch():
        found = [ask(engine, request_of(prompt, 6))[0].wait().ids for prompt in PROMPTS]
        assert engine.drain(10.0)
        engine.check()
        model.moe.check()
    assert found == expected
    assert set(recordings.replayed) == {1}
    # one in parts, and one of the whole when every expert has come
    assert len(recordings.recorded) <= 2
    assert len(recordings.replayed) == 5 * len(PROMPTS) - 1
