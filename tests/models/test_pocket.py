"""The bundled pocket model: what it is made of, and that it has learnt something."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.models.pocket import pocket_path
from moe_runtime.models.pocket.corpus import KINDS, gather
from moe_runtime.models.pocket.evaluate import card_of, tokenize

PAGE_BYTES = 4096
CONTEXT = 512
TOKENS_PER_KIND = 4 * CONTEXT


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(pocket_path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(pocket_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out_ids(tokenizer: Any) -> torch.Tensor:
    """Token ids of text that training never saw: some of each kind."""
    found, num_characters = [], dict.fromkeys(KINDS, 0)
    for document in gather():
        # no token of this vocabulary has twelve characters on average
        if document.held_out and num_characters[document.kind] < 12 * TOKENS_PER_KIND:
            found.append(document)
            num_characters[document.kind] += len(document.text)
    streams = tokenize(found, tokenizer)
    assert all(len(stream) >= TOKENS_PER_KIND for stream in streams.values())
    parts = [stream[:TOKENS_PER_KIND].astype("int64") for stream in streams.values()]
    return torch.from_numpy(np.concatenate(parts))


@pytest.fixture(scope="module")
def held_out_run(model: Any, held_out_ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Mean log loss in nats over contexts of the text, and (L, E) counts of chosen experts."""
    usage = torch.zeros(model.config.num_hidden_layers, model.config.num_experts)
    nats, num_predicted = 0.0, 0
    with torch.inference_mode():
        for window in held_out_ids.split(CONTEXT):
            outputs = model(window[None], output_router_logits=True)
            logits = outputs.logits[0, :-1].double()
            nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
            num_predicted += len(window) - 1
            for layer, router_logits in enumerate(outputs.router_logits):
                chosen = router_logits.topk(model.config.num_experts_per_tok, dim=-1).indices
                usage[layer] += torch.bincount(chosen.reshape(-1), minlength=usage.shape[1])
    return nats / num_predicted, usage


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


@pytest.mark.long  # of a file that no code changes
def test_held_out_loss_is_clearly_below_any_unigram_model(held_out_run, held_out_ids):
    # The entropy of the text's own token frequencies: no unigram model can do better on it.
    counts = torch.tensor(list(Counter(held_out_ids.tolist()).values()), dtype=torch.float64)
    shares = counts / counts.sum()
    best_unigram = float(-(shares * shares.log()).sum())
    loss, _ = held_out_run
    assert loss < 0.75 * best_unigram


@pytest.mark.long  # as the one before
def test_no_expert_is_collapsed_on_held_out_text(held_out_run):
    _, usage = held_out_run
    shares = usage / usage.sum(dim=1, keepdim=True)
    # The least used expert was measured at 0.42 of even use; half of that leaves room for the
    # slightly different texts of other Python versions.
    assert float(shares.min()) > 0.2 / usage.shape[1]


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
