"""`--shape` of GGUF files of random blocks: whole, with a tokenizer, computed as they lie."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.benchmarks.synthetic.gguf_files import FILE_NAME, GGUF_SHAPES
from moe_runtime.benchmarks.synthetic.model_shapes import with_layers
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.cli.main import main

pytest.importorskip("gguf", reason="extra peers is not installed")
TINY = GGUF_SHAPES["qwen3.6-tiny-q4_k"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shape")
    TINY.write(made)
    return made


def test_the_file_has_all_that_the_model_has(folder):
    """Next to a token stands itself in the residual: texts differ where their last tokens do."""
    tokens = load_tokenizer(folder / FILE_NAME)("a list of words")["input_ids"]
    TINY.write_settings(folder / "..")
    assert load_tokenizer(folder.parent)("a list of words")["input_ids"] == tokens
    model: Any = moe_runtime.load(folder / FILE_NAME, device="cpu", max_tokens=64)
    with model.moe, torch.no_grad():
        logits = model(torch.arange(8)[:, None]).logits[:, -1]
        assert model.config.get_text_config().num_hidden_layers == TINY.num_layers
        assert model.moe.stats().expert_slots == TINY.num_layers * TINY.num_experts
    assert logits.isfinite().all()
    assert len(logits.argmax(-1).unique()) >= 6
    top = logits.topk(2).values
    # Rounding to eight bits moves logits by less than a hundredth of their spread.
    assert ((top[:, 0] - top[:, 1]) > 0.01 * logits.std()).all()


def test_layers_are_asked_for_and_the_file_is_what_is_measured(tmp_path, monkeypatch, capsys):
    assert with_layers(GGUF_SHAPES, TINY.name, 4) is TINY
    name = "qwen3.6-35b-a3b-q4_k"
    assert with_layers(GGUF_SHAPES, name, 2).name == f"{name}-2-layers"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = list[Any]()

    def measure(measured: Any, peers: Any, plan: Any, rules: Any, settings: Any) -> None:
        path = Path(measured.settings["model"])
        assert path.name == FILE_NAME
        assert path.is_file()
        given.append(settings)
        raise ValueError("this is where it ends")

    monkeypatch.setattr("moe_runtime.benchmarks.cases.texts.measure_texts", measure)
    words = ["bench", "latency", "--quick", "--shape"]
    assert main([*words, TINY.name, "--layers", "1"]) == 2
    assert "this is where it ends" in capsys.readouterr().err
    asked = {name: given[0][name] for name in ("model", "layers", "layers_of_shape", "weights")}
    assert [*asked.values()] == [TINY.name, 1, 4, "random"]
    assert main([*words, "qwen3.6"]) == 2
    assert "qwen3.6-tiny-q4_k" in capsys.readouterr().err
