"""`--shape CONFIG.json`: any family that transformers makes, with random weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.benchmarks.synthetic.config_shape import read_config_shape
from moe_runtime.benchmarks.synthetic.shape_checkpoint import shape_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError, UnsupportedModelError

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 2}
QWEN3_NEXT = SMALL | {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_model_is_made_kept_and_computed_as_transformers_does(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shape = read_config_shape(written(tmp_path, QWEN3_NEXT))
    assert (shape.num_layers, shape.vocab_size) == (4, 300)

    def files(said: list[str]) -> Any:
        return shape_checkpoint(shape, tmp_path, keep=True, needs_gguf=False, say=said.append)

    said = list[str]()
    with files(said) as first:
        folder = first.checkpoint
    assert len(said) == 1
    assert said[0].startswith(f"writing random weights of {shape.name}")
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) >= shape.total_bytes
    with files(said):
        assert said[1] == f"{folder} is there from an earlier run, and stays"
    (folder / "shape.json").write_text("{}")
    with files(said):
        assert shape.name in (folder / "shape.json").read_text()
    ids = AutoTokenizer.from_pretrained(folder)("a list of words", return_tensors="pt").input_ids
    assert int(ids.max()) < 300
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")(ids).logits
        model: Any = moe_runtime.load(folder, device="cpu", dtype="float32", max_tokens=64)
        with model.moe:
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
            experts = model.moe.stats().expert_slots
    assert experts == 4 * 6


def test_configurations_of_another_content_have_names_of_their_own(tmp_path):
    one = read_config_shape(written(tmp_path, QWEN3_NEXT))
    other = read_config_shape(written(tmp_path, QWEN3_NEXT | {"num_experts": 8}))
    assert one.name.startswith("mine-")
    assert one.name != other.name
    assert other.total_bytes - one.total_bytes == 4 * 2 * 2 * (3 * 32 * 64 + 64)


@pytest.mark.parametrize(
    ("name", "stem"), [(b"\xff.json", "\ufffd"), (b"x" * 250 + b".json", "x" * 40)]
)
def test_any_file_name_becomes_a_folder_s(name, stem, tmp_path):
    path = tmp_path / os.fsdecode(name)
    path.write_text(json.dumps(QWEN3_NEXT))
    assert read_config_shape(path).name.rpartition("-")[0] == stem


@pytest.mark.parametrize("name", ["qwen3-next", "granite-hybrid"])
def test_configurations_of_the_checkout_are_read(name):
    shape = read_config_shape(ROOT / "benchmarks" / "shapes" / f"{name}.json")
    assert shape.num_layers == 4
    assert shape.total_bytes > 128 * 4 * 3 * 512 * 1024 * 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "no model can be made of it: "),
        ("[]", "no model can be made of it"),
        ({}, "expected model_type to be the name of an architecture"),
        ({"model_type": "none"}, "no model can be made of it: KeyError: 'none'"),
        (QWEN3_NEXT | {"hidden_size": "x"}, "expected hidden_size to be a whole number"),
        (QWEN3_NEXT | {"quantization_config": {}}, "has quantization_config; leave it out"),
        (QWEN3_NEXT | {"num_hidden_layers": 10**9}, "to be at most 10000, found 1000000000"),
        (QWEN3_NEXT | {"num_experts_per_tok": 9}, "to be at most the 6 experts, found 9"),
        ({"model_type": "t5"}, "transformers has no AutoModelForCausalLM of t5\n"),
        (
            QWEN3_NEXT | {"moe_intermediate_size": 0},
            "layers.0.mlp.experts.gate_up_proj would be [6, 0, 64]: some size is 0",
        ),
        (QWEN3_NEXT | {"vocab_size": 256}, "expected a vocab_size of at least 257"),
    ],
)
def test_what_is_no_configuration_is_one_line(content, complaint, tmp_path, capsys):
    path = written(tmp_path, content)
    assert main(["bench", "throughput", "--shape", str(path)]) == 2
    err = capsys.readouterr().err
    assert f"{path}: " in err
    assert complaint in err
    assert err.count("\n") == 1


def test_what_a_configuration_has_not_is_said(tmp_path, monkeypatch, capsys):
    dense = {key: value for key, value in QWEN3_NEXT.items() if "linear" not in key}
    with pytest.raises(UnsupportedModelError, match="qwen3 has no routed experts"):
        read_config_shape(written(tmp_path, dense | {"model_type": "qwen3"}))
    path = written(tmp_path, QWEN3_NEXT)
    assert main(["bench", "throughput", "--shape", str(path), "--layers", "2"]) == 2
    assert f"--layers: how many layers there are, {path} says" in capsys.readouterr().err
    assert main(["bench", "throughput", "--shape", str(tmp_path / "no.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    shape = read_config_shape(path)

    def files(*, needs_gguf: bool) -> Any:
        return shape_checkpoint(
            shape, tmp_path / "shapes", keep=False, needs_gguf=needs_gguf, say=lambda _: None
        )

    with pytest.raises(UnsupportedModelError, match="no GGUF file is made of mine-"):
        files(needs_gguf=True).__enter__()
    monkeypatch.setattr("moe_runtime.inference.budget.available_host_bytes", lambda: 1 << 16)
    with pytest.raises(CapacityError, match="is made in memory"), files(needs_gguf=False):
        pass
    assert not [*(tmp_path / "shapes").glob("*")]
