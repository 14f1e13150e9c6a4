"""The bundled pocket model: what it is made of, and that it has learnt something."""

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.models.pocket import pocket_path
from moe_runtime.models.pocket.evaluate import card_of

PAGE_BYTES = 4096
CONTEXT = 512
TOKENS_PER_KIND = 4 * CONTEXT


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pocket_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(pocket_path(), dtype=torch.float32).eval()


def test_checkpoint_is_small_and_holds_each_expert_apart():
    folder = pocket_path()
    names = ["config.json", "generation_config.json", "model.safetensors"]
    names += ["tokenizer.json", "tokenizer_config.json", "evaluation.json", "README.md"]
    assert sum((folder / name).stat().st_size for name in names) <= 25_000_000
    config = json.loads((folder / "config.json").read_text())
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        keys = set(file.keys())
        for layer in range(config["num_hidden_layers"]):
            for expert in range(config["num_local_experts"]):
                for matrix in ("gate_proj", "up_proj", "down_proj"):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
                    assert key in keys
                    part = file.get_slice(key)
                    assert part.get_dtype() == "BF16"
                    # Reads of single experts are only worth testing when they span pages.
                    assert 2 * part.get_shape()[0] * part.get_shape()[1] > PAGE_BYTES


def test_tokenizer_round_trips_any_text(tokenizer):
    for text in ("The for statement\n    x = 1\n", "naïve ∑ 日本 \x00\t\r\n", "  a  b "):
        ids = tokenizer(text)["input_ids"]
        assert max(ids) < 4096
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_greedy_text_is_deterministic_and_printable(model, tokenizer):
    inputs = tokenizer("The for statement", return_tensors="pt")
    texts = [
        tokenizer.decode(
            model.generate(**inputs, max_new_tokens=20, do_sample=False)[0],
            skip_special_tokens=True,
        )
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("The for statement") + 20
    assert all(character.isprintable() or character in "\n\t" for character in texts[0])
    assert "�" not in texts[0]


def test_missing_checkpoint_is_named(tmp_path, monkeypatch):
    import moe_runtime.models.pocket as package

    monkeypatch.setattr(package, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        pocket_path()


def test_card_is_written_from_the_measured_numbers():
    folder = pocket_path()
    evaluation = json.loads((folder / "evaluation.json").read_text())
    assert (folder / "README.md").read_text(encoding="utf-8") == card_of(folder)
    losses = evaluation["held_out_mixture"]
    assert losses["moe"]["nats_per_token"] < losses["unigram"]["nats_per_token"] - 2
