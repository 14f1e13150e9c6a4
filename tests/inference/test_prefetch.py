"""Prefetching changes when experts are read, never a bit of what is computed."""

import re
from pathlib import Path

import pytest
import torch
from synthetic_routes import make_routes
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.lab.traces.learned import write_predictor
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.prediction import LIVE_PREDICTORS, PREDICTORS, Shape, make_estimator
from moe_runtime.types import ModelSignature, RuntimeStats

NEW_TOKENS = 28
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
def test_outputs_are_the_same_bits(
    without: torch.Tensor, trained: Path, predictor: str, slots: int
) -> None:
    chosen = trained if predictor == "trained" else predictor
    found, stats = generate(slots, prefetch="enforce", predictor=chosen)
    assert torch.equal(found, without)
    judged = stats.useful_guesses + stats.late_guesses + stats.wasted_guesses
    assert judged <= stats.guesses
    assert predictor != "next-gate" or stats.useful_guesses + stats.late_guesses > 0
    assert stats.predict_s > 0


def test_observing_reads_nothing(without: torch.Tensor) -> None:
    found, stats = generate(30, prefetch="observe")
    assert torch.equal(found, without)
    assert stats.guesses == 0
    assert stats.predict_s > 0
    assert stats.prefetch == "observe"


def test_auto_says_what_it_decided(without: torch.Tensor) -> None:
    """On or off and why, with the figures that it saw: which, the machine's speed decides."""
    found, stats = generate(30, prefetch="auto")
    assert torch.equal(found, without)
    assert re.fullmatch(r"auto, (on|off): .*\d.*; in use for \d+ of \d+ steps", stats.prefetch)


def test_wrong_settings_are_refused_before_loading(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'enforce'"):
        moe_runtime.load(pocket_path(), prefetch="enforced")
    with pytest.raises(ValueError, match="did you mean 'next-gate'"):
        moe_runtime.load(pocket_path(), predictor="nextgate")
    for name in PREDICTORS.keys() - set(LIVE_PREDICTORS):
        with pytest.raises(ValueError, match=f"predictor fit .* --predictor {name}"):
            moe_runtime.load(pocket_path(), prefetch="enforce", predictor=name)
    with pytest.raises(CheckpointError, match=r"missing\.npz"):
        moe_runtime.load(pocket_path(), predictor=tmp_path / "missing.npz")


def test_a_predictor_of_another_model_is_refused(tmp_path: Path) -> None:
    shape = Shape(num_layers=6, num_experts=8, top_k=2)
    other = ModelSignature(
        model_type="mixtral", num_layers=6, num_experts=8, top_k=2, vocab_size=32000
    )
    path = tmp_path / "other.npz"
    write_predictor(path, make_estimator("popularity", shape), other)
    with pytest.raises(CheckpointError, match=r"mixtral.*qwen3_moe"):
        moe_runtime.load(pocket_path(), prefetch="observe", predictor=path)
