"""Requests to a model on a GPU share passes, as on a CPU, and its own calls are as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_models import emulated, load_on_emulated_device
from engine_events import ask_all, drained, greedy, request_of
from moe_families import Family
from tiny_checkpoints import save, tiny_model
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.checkpoints.transformers_private import attention_name
from moe_runtime.serving import passes
from moe_runtime.serving.engine import Engine

pytest.importorskip("triton")
NEW = 4
PROMPTS = [(5, 7, 3), (11, 2), (9, 4, 8, 6)]
FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)


def check(model: Any) -> None:
    texts = [greedy(model, prompt, NEW) for prompt in PROMPTS]
    before = attention_name(model)
    with Engine(model) as engine:
        assert engine._passes.can_join
        found = ask_all(engine, [request_of(prompt, NEW) for prompt in PROMPTS])
        drained(engine)
        steps = engine.statistics().steps
    assert [answer.ids for answer in found] == texts
    assert steps < len(PROMPTS) * NEW
    assert attention_name(model) == before
    assert [greedy(model, prompt, NEW) for prompt in PROMPTS] == texts
    model.moe.check()


@emulated
def test_sequences_share_steps(checkpoint, monkeypatch):
    monkeypatch.setattr(passes, "_keeps_attention", lambda model: True)
    repair_interpreter()
    model = load_on_emulated_device(checkpoint, slots_a_layer=2)
    with model.moe:
        check(model)


@pytest.mark.gpu
def test_sequences_share_steps_on_a_gpu(checkpoint):
    model: Any = moe_runtime.load(checkpoint, device="cuda", dtype="float32", max_tokens=512)
    with model.moe, torch.inference_mode():
        check(model)
