"""Families that get the experts interface from an adapter, beyond equal logits."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from finetuning_runs import SEQUENCES, SIZES, checkpoint_of, config_of, finetuned
from moe_families import ADAPTED, Family
from safetensors.torch import load_file, save_file

import moe_runtime
from moe_runtime.checkpoints.families import BLOCKS
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.training.finetune.finetune_run import prepare

PROMPT = torch.tensor([[5, 7, 11, 13]])


def family_of(folder: str) -> Family:
    return next(family for family in ADAPTED if family.folder == folder)


@pytest.fixture(params=ADAPTED, ids=str)
def checkpoint(request, tmp_path) -> tuple[torch.nn.Module, Path]:
    model = tiny_checkpoints.tiny_model(request.param)
    return model, tiny_checkpoints.save(model, tmp_path / "checkpoint", sharded=False)


def test_every_row_of_the_table_has_a_family():
    assert {family.folder for family in ADAPTED} == {family.name for family in BLOCKS.values()}


def test_router_logits_are_those_of_transformers(checkpoint):
    reference, folder = checkpoint
    with torch.no_grad():
        expected = reference(PROMPT, output_router_logits=True)
    model = moe_runtime.load(folder, device="cpu", host_memory="1GiB")
    with model.moe, torch.no_grad():
        found = model(PROMPT, output_router_logits=True)
    # a block that transformers no longer recognised would record nothing
    pairs = zip(expected.get("router_logits", ()), found.get("router_logits", ()), strict=True)
    for one, other in pairs:
        # fp32 on both sides, sums of a few dozen products in another order
        assert (one - other).abs().max() <= 1e-5 * one.abs().max()


def test_experts_that_a_checkpoint_lacks_weights_for_add_their_input(tmp_path):
    """Published LongCat checkpoints have no tensors for identity experts; transformers' own do."""
    reference = tiny_checkpoints.tiny_model(family_of("longcat_flash"))
    # the correction bias sends every token to one identity expert and one other
    for layer in reference.model.layers:
        layer.mlp.router.e_score_correction_bias[-1] = 10.0
    with torch.no_grad():
        expected = reference(PROMPT).logits
    padded = tiny_checkpoints.save(reference, tmp_path / "padded", sharded=False)
    published = tmp_path / "published"
    shutil.copytree(padded, published)
    file = published / "model.safetensors"
    tensors = load_file(file)
    surplus = [name for name in tensors if ".experts.6." in name or ".experts.7." in name]
    assert surplus
    save_file({n: t for n, t in tensors.items() if n not in surplus}, file, {"format": "pt"})
    for folder in (padded, published):
        trace = tmp_path / f"{folder.name}.npz"
        model = moe_runtime.load(folder, device="cpu", host_memory="1GiB", trace=trace)
        with model.moe, torch.no_grad():
            found = model(PROMPT).logits
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_llama4_with_several_experts_a_token_is_refused(tmp_path):
    family = family_of("llama4")
    model = tiny_checkpoints.tiny_model(
        Family(family.folder, family.model_class, family.config | {"num_experts_per_tok": 2})
    )
    folder = tiny_checkpoints.save(model, tmp_path, sharded=False)
    with pytest.raises(moe_runtime.UnsupportedModelError, match="num_experts_per_tok 1"):
        build_on_meta(open_checkpoint(folder, "auto"))


@pytest.mark.parametrize("is_text", [False, True])
def test_llama4_with_pictures_is_refused_where_transformers_cannot_run_it(
    is_text, tmp_path, monkeypatch
):
    monkeypatch.setattr("transformers.__version__", "5.24.0")
    config: Any = family_of("llama4").config
    kind, given = "Llama4ForCausalLM", config
    if not is_text:
        kind, given = "Llama4ForConditionalGeneration", {"text_config": config}
    model = tiny_checkpoints.tiny_model(Family("llama4", kind, given))
    checkpoint = open_checkpoint(tiny_checkpoints.save(model, tmp_path, sharded=False), "auto")
    if is_text:
        assert build_on_meta(checkpoint)
        return
    with pytest.raises(moe_runtime.UnsupportedModelError, match=r"^transformers 5\.24\.0 cannot"):
        build_on_meta(checkpoint)


@pytest.mark.parametrize("name", ["jetmoe", "longcat_flash"])
def test_fine_tuning_changes_a_checkpoint_that_transformers_loads(name, tmp_path):
    """The first loss is that of the model in memory; what is written has the family's own names."""
    sizes = {"vocab_size": SIZES["vocab_size"]}
    family = dataclasses.replace(family_of(name), config=family_of(name).config | sizes)
    folder = checkpoint_of(family, tmp_path / "first")
    losses, summary = finetuned(config_of(folder, tmp_path))
    model_class = tiny_checkpoints.model_class_of(family)
    before, after = (
        model_class.from_pretrained(path, dtype=torch.float32)
        for path in (folder, summary["model"])
    )
    windows = torch.from_numpy(prepare(config_of(folder, tmp_path)).batches.draw(SEQUENCES))
    with torch.no_grad():
        first, last = (
            torch.nn.functional.cross_entropy(
                model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten()
            ).item()
            for model in (before, after)
        )
    # fp32 on both sides, in another order of sums; the loss is a mean over windows
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert last < first - 0.1
