"""Prefetching changes when experts are read, never a bit of the result."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetic_routes import make_routes
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.inference import prediction
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.prediction import NEXT_GATE_RECALL
from moe_runtime.lab.traces.learned import Lesson, learned_path, write_lesson, write_predictor
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.prediction import LIVE_PREDICTORS, PREDICTORS, Shape, make_estimator
from moe_runtime.types import ModelSignature, RuntimeStats

NEW_TOKENS = 16
PROMPTS = ("The for statement", "class Reader:\n    def read(self")
POCKET = ModelSignature(
    model_type="qwen3_moe", num_layers=6, num_experts=16, top_k=2, vocab_size=4096
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A predictor of the pocket model's shape. It has learned nonsense: many wrong guesses."""
    shape = Shape(num_layers=6, num_experts=16, top_k=2)
    estimator = make_estimator("combined", shape)
    estimator.fit(make_routes(shape, num_sequences=6))
    path = tmp_path_factory.mktemp("predictor") / "combined.npz"
    write_predictor(path, estimator, POCKET)
    return path


def generate(slots: int, **settings) -> tuple[torch.Tensor, RuntimeStats]:
    path = pocket_path()
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokens = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    summary = inspect_checkpoint(path, max_tokens=64)
    budget = summary.smallest_budget_bytes + (slots - 2) * summary.slot_bytes
    model = moe_runtime.load(path, device="cpu", host_memory=budget, max_tokens=64, **settings)
    torch.manual_seed(0)
    with model.moe:
        batch = model.generate(**tokens, max_new_tokens=8, do_sample=True, temperature=2.0)
        single = model.generate(
            tokens["input_ids"][1:], max_new_tokens=NEW_TOKENS, do_sample=True, temperature=2.0
        )
        model.moe.check()
        stats = model.moe.stats()
    return torch.cat((batch.flatten(), single.flatten())), stats


@pytest.fixture(scope="module")
def without() -> torch.Tensor:
    return generate(96)[0]


@pytest.mark.parametrize(
    ("predictor", "slots"), [("next-gate", 30), ("running-counts", 2), ("trained", 30)]
)
def test_outputs_are_the_same_bits(without, trained, predictor, slots):
    chosen = trained if predictor == "trained" else predictor
    found, stats = generate(slots, prefetch="enforce", predictor=chosen)
    assert torch.equal(found, without)
    judged = stats.useful_guesses + stats.late_guesses + stats.wasted_guesses
    assert judged <= stats.guesses
    assert predictor != "next-gate" or stats.useful_guesses + stats.late_guesses > 0
    assert stats.predict_s > 0


def test_observing_reads_nothing(without):
    found, stats = generate(30, prefetch="observe")
    assert torch.equal(found, without)
    assert stats.guesses == 0
    assert stats.predict_s > 0
    assert stats.prefetch == "observe"


def test_auto_says_what_it_decided(without):
    """On or off and why, with the figures that it saw: which, the machine's speed decides."""
    found, stats = generate(30, prefetch="auto")
    assert torch.equal(found, without)
    assert re.fullmatch(r"auto, (on|off): .*\d.*; in use for \d+ of \d+ steps", stats.prefetch)


def test_auto_takes_a_trained_predictor_with_a_higher_recall(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def asked() -> str:
        model = moe_runtime.load(
            pocket_path(), device="cpu", max_tokens=64, prefetch="observe", predictor="auto"
        )
        with model.moe:
            return model.moe.prefetcher._predictor.estimator.name

    def teach(recall: float) -> None:
        lesson = Lesson(
            tokens=1,
            last_marks=np.zeros(1, np.int64),
            capacities=np.array([0.25]),
            misses=np.ones((3, 1), np.int64),
            is_kept=False,
            policy_s=0.0,
            recall=recall,
        )
        write_lesson(lesson, POCKET, pocket_path())

    assert asked() == "next-gate"
    monkeypatch.setattr(prediction, "MOST_TABLES", 1.0)
    path = learned_path("predictor", POCKET, pocket_path())
    teach(NEXT_GATE_RECALL + 0.01)
    path.write_bytes(trained.read_bytes())
    assert asked() == "combined"
    teach(NEXT_GATE_RECALL - 0.01)
    assert asked() == "next-gate"
    teach(NEXT_GATE_RECALL + 0.01)
    monkeypatch.setattr(prediction, "MOST_TABLES", 0.0)
    assert asked() == "next-gate"
    path.write_bytes(b"PK")
    with pytest.warns(MoERuntimeWarning, match="the predictor is next-gate"):
        assert asked() == "next-gate"


def test_wrong_settings_are_refused_before_loading(trained, tmp_path):
    with pytest.raises(ValueError, match="did you mean 'enforce'"):
        moe_runtime.load(pocket_path(), prefetch="enforced")
    with pytest.raises(ValueError, match="did you mean 'next-gate'"):
        moe_runtime.load(pocket_path(), predictor="nextgate")
    for name in PREDICTORS.keys() - set(LIVE_PREDICTORS):
        with pytest.raises(ValueError, match=f"predictor fit .* --predictor {name}"):
            moe_runtime.load(pocket_path(), prefetch="enforce", predictor=name)
    with pytest.raises(CheckpointError, match=r"missing\.npz"):
        moe_runtime.load(pocket_path(), predictor=tmp_path / "missing.npz")


def test_a_predictor_of_another_model_is_refused(tmp_path):
    shape = Shape(num_layers=6, num_experts=8, top_k=2)
    other = ModelSignature(
        model_type="mixtral", num_layers=6, num_experts=8, top_k=2, vocab_size=32000
    )
    path = tmp_path / "other.npz"
    write_predictor(path, make_estimator("popularity", shape), other)
    with pytest.raises(CheckpointError, match=r"mixtral.*qwen3_moe"):
        moe_runtime.load(pocket_path(), prefetch="observe", predictor=path)
