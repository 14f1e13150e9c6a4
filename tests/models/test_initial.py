"""Weights from a Hugging Face checkpoint: those of ours and those that transformers saved."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from language_models import EXPORTED, VOCAB, build, experts, shape
from safetensors.torch import load_file, save_file

from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.models.lm.export import export_hugging_face, import_hugging_face

IDS = torch.arange(2 * 31).reshape(2, 31) % VOCAB


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_comes_back_bit_for_bit(name, tmp_path):
    _, changes = EXPORTED[name]
    model = build(shape(**changes))
    export_hugging_face(model, tmp_path)
    other = build(shape(**changes), seed=1)
    import_hugging_face(other, tmp_path)
    assert other.state_dict().keys() == model.state_dict().keys()
    for key, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe"])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_models_of_transformers_compute_the_same_here(family, tmp_path):
    from transformers import AutoModelForCausalLM

    changes = next(changes for kind, changes in EXPORTED.values() if kind == family)
    export_hugging_face(build(shape(**changes)), tmp_path / "ours")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    # Small shards, so that the index is read too.
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    model = build(shape(**changes), seed=1)
    import_hugging_face(model, tmp_path / "theirs")
    with torch.no_grad():
        assert (theirs.eval()(IDS).logits - model(IDS)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 48, this model's is 32"),
        ({"rope_theta": 1e4}, "rope_theta"),
        ({"moe": experts(top_k=2)}, "num_experts_per_tok is 3, this model's is 2"),
        ({"moe": experts(gate_options={"renormalize": False})}, "norm_topk_prob"),
        ({"moe": experts(gate="sigmoid_topk")}, "model_type is 'qwen3_moe'"),
        ({"tie_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_another_architecture_is_named(changes, message, tmp_path):
    export_hugging_face(build(shape(moe=experts())), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        import_hugging_face(build(shape(**{"moe": experts(), **changes})), tmp_path)


def test_tensors_that_do_not_fit_are_named_and_nothing_changes(tmp_path):
    model = build(shape(moe=experts(), num_layers=1))
    export_hugging_face(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.5.up_proj.weight"]
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(8, 47)
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(8, 48)
    save_file(tensors, file, {"format": "pt"})
    other = build(model.config, seed=1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        import_hugging_face(other, tmp_path)
    for part in (
        "missing model.layers.0.mlp.experts.5.up_proj.weight",
        "unexpected model.layers.1.mlp.gate.weight",
        "model.layers.0.mlp.gate.weight must be [8, 48], got [8, 47]",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


def test_a_selection_bias_needs_a_gate_that_has_one(tmp_path):
    with_bias = shape(moe=experts(gate="sigmoid_topk", gate_options={"bias_update_rate": 1e-3}))
    export_hugging_face(build(with_bias), tmp_path)
    without = dataclasses.replace(with_bias, moe=experts(gate="sigmoid_topk"))
    other = build(without)
    with pytest.raises(CheckpointError, match=r"no place for model\.layers\.0\.mlp\.gate\.e_score"):
        import_hugging_face(other, tmp_path)


def test_folders_without_a_checkpoint_are_explained(tmp_path):
    model = build(shape(moe=experts()))
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        import_hugging_face(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such"}))
    with pytest.raises(CheckpointError, match="cannot be used"):
        import_hugging_face(model, tmp_path)
    with pytest.raises(UnsupportedModelError, match="swiglu"):
        import_hugging_face(build(shape(moe=experts(activation="relu2"))), tmp_path)
