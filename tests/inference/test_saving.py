"""`save_pretrained` of a loaded model writes a checkpoint with equal logits in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_families import FAMILIES, Family
from safetensors.torch import load_file
from tiny_checkpoints import PROMPT, save, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_runtime

MIXTRAL, GPT_OSS, DEEPSEEK = (
    next(family for family in FAMILIES if family.folder == name)
    for name in ("mixtral", "gpt_oss", "deepseek_v3")
)


def load(folder: Path, **options: Any) -> Any:
    return moe_runtime.load(folder, device="cpu", host_memory="1GiB", **options)


def checkpoint(folder: Path, family: Family = MIXTRAL, **kind: bool) -> PreTrainedModel:
    model = tiny_model(family)
    save(model, folder, sharded=kind.pop("sharded", False), **kind)
    return model


@torch.no_grad()
def logits(folder: Path, **options: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **options)
    return model(PROMPT).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.mark.parametrize(
    ("family", "own_names", "sharded"),
    [
        (MIXTRAL, False, False),
        (MIXTRAL, True, True),
        (GPT_OSS, False, True),
        (DEEPSEEK, False, True),
    ],
    ids=str,
)
def test_every_weight_is_written(tmp_path, family, own_names, sharded):
    made = checkpoint(tmp_path / "first", family, own_names=own_names, sharded=sharded)
    with torch.no_grad():
        expected = made(PROMPT).logits
    model = load(tmp_path / "first")
    with model.moe:
        model.save_pretrained(tmp_path / "second")
    first, second = tensors(tmp_path / "first"), tensors(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # the same weights; where they lie in memory decides how MKL sums on old processors
    torch.testing.assert_close(logits(tmp_path / "second"), logits(tmp_path / "first"))
    torch.testing.assert_close(logits(tmp_path / "second"), expected, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config == json.loads((tmp_path / "first" / "config.json").read_text())


def test_changed_weights_are_written_beside_experts_as_they_were(tmp_path):
    """Loaded in fp32 from bf16 and trained: dense weights are fp32, experts keep their bytes."""
    made = tiny_model(MIXTRAL).bfloat16()
    save(made, tmp_path / "first", sharded=False)
    model = load(tmp_path / "first", dtype="float32")
    with model.moe, torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.25)
        expected = model(PROMPT).logits
        model.save_pretrained(tmp_path / "second")
    first, second = tensors(tmp_path / "first"), tensors(tmp_path / "second")
    name = "model.embed_tokens.weight"
    assert torch.equal(second[name], first[name].float() * 1.25)
    experts = [name for name in first if ".experts." in name]
    assert experts
    assert all(torch.equal(first[name], second[name]) for name in experts)
    torch.testing.assert_close(logits(tmp_path / "second"), expected, rtol=1e-5, atol=1e-5)


def test_a_size_divides_and_a_variant_names_the_files(tmp_path):
    made = checkpoint(tmp_path / "first")
    model = load(tmp_path / "first")
    out = tmp_path / "second"
    with model.moe:
        model.save_pretrained(out, max_shard_size=20_000, variant="fp32")
        names = sorted(path.name for path in out.glob("*.safetensors"))
        assert len(names) > 2
        assert names[0] == f"model.fp32-00001-of-{len(names):05d}.safetensors"
        assert (out / "model.safetensors.index.fp32.json").is_file()
        torch.testing.assert_close(logits(out, variant="fp32"), made(PROMPT).logits)
        # a later save in fewer files takes the place of all of these
        model.save_pretrained(out, variant="fp32")
    assert [path.name for path in out.glob("*.safetensors")] == ["model.fp32.safetensors"]
    assert not (out / "model.safetensors.index.fp32.json").exists()
    torch.testing.assert_close(logits(out, variant="fp32"), made(PROMPT).logits)


def test_other_files_stay_and_the_checkpoint_can_be_saved_over_itself(tmp_path):
    made = checkpoint(tmp_path / "first", sharded=True)
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    model = load(tmp_path / "first")
    with model.moe, torch.no_grad():
        before = model(PROMPT).logits
        model.save_pretrained(tmp_path / "first")
        model.save_pretrained(tmp_path / "first", max_shard_size=20_000)
        assert torch.equal(model(PROMPT).logits, before)
    assert (tmp_path / "first" / "tokenizer.json").read_text() == "{}"
    torch.testing.assert_close(logits(tmp_path / "first"), made(PROMPT).logits)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    checkpoint(tmp_path / "first")
    model = load(tmp_path / "first")
    with model.moe:
        model.save_pretrained(tmp_path / "second")
        before = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.pwrite", full)
        model.model.embed_tokens.weight.data.mul_(2)
        with pytest.raises(OSError, match="No space left"):
            model.save_pretrained(tmp_path / "second")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}


def test_a_resized_vocabulary_is_written(tmp_path):
    checkpoint(tmp_path / "first")
    model = load(tmp_path / "first")
    with model.moe, torch.no_grad():
        model.resize_token_embeddings(101, mean_resizing=False)
        expected = model(PROMPT).logits
        model.save_pretrained(tmp_path / "second")
    assert expected.shape[-1] == 101
    torch.testing.assert_close(logits(tmp_path / "second"), expected, rtol=1e-5, atol=1e-5)


def test_a_process_beside_the_main_one_writes_nothing(tmp_path):
    checkpoint(tmp_path / "first")
    model = load(tmp_path / "first")
    with model.moe:
        model.save_pretrained(tmp_path / "second", is_main_process=False)
    assert not (tmp_path / "second").exists()


def test_unsupported_options_are_refused_by_name(tmp_path):
    checkpoint(tmp_path / "first")
    with (model := load(tmp_path / "first")).moe:
        for name, value, reason in (
            ("push_to_hub", True, "call model.push_to_hub"),
            ("distributed_checkpoint", True, "one process"),
            ("safe_serialization", False, "safetensors"),
            ("save_original_format", False, "of the checkpoint that was loaded"),
            ("max_shards", 3, "no such option"),
            ("state_dict", {}, "state_dict has no"),
        ):
            with pytest.raises(moe_runtime.UnsupportedUseError, match=reason) as caught:
                model.save_pretrained(tmp_path / "second", **{name: value})
            assert name in str(caught.value)
            assert "\n" not in str(caught.value)
            assert not (tmp_path / "second").exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_experts_of_another_checkpoint_are_not_written_as_the_models(tmp_path, sharded):
    """The folder's files were replaced since loading; the model still reads the old ones."""
    checkpoint(tmp_path / "first", sharded=sharded)
    other = tiny_model(MIXTRAL)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    save(other, tmp_path / "other", sharded=sharded)
    model = load(tmp_path / "first")
    with model.moe:
        for path in (tmp_path / "other").glob("*.safetensors"):
            path.replace(tmp_path / "first" / path.name)
        with pytest.raises(moe_runtime.CheckpointError, match="is not the file any more"):
            model.save_pretrained(tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path):
    checkpoint(tmp_path / "first")
    (tmp_path / "file").write_text("x")
    model = load(tmp_path / "first")
    with model.moe:
        with pytest.raises(NotADirectoryError, match=r"is a file; name a folder.*/file'"):
            model.save_pretrained(tmp_path / "file")
        with pytest.raises(OSError, match=r"no folder can be made.*'/proc/made'"):
            model.save_pretrained("/proc/made")


@pytest.mark.parametrize(("place", "name"), [(".", "."), ("below", "..")])
def test_the_working_directory_may_be_saved_to(tmp_path, monkeypatch, place, name):
    checkpoint(folder := tmp_path / "first")
    (folder / "below").mkdir()
    (folder / "notes").write_text("mine")
    before = tensors(folder)
    monkeypatch.chdir(folder / place)
    model = load(folder)
    with model.moe:
        for _ in range(2):  # the second save reads experts from the files of the first
            model.save_pretrained(name, max_shard_size=40_000)
    assert len(list(Path(name).glob("model-*.safetensors"))) > 1
    saved = tensors(Path(name))
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[key], before[key]) for key in before)
    assert (folder / "notes").read_text() == "mine"
    assert not (folder / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_model_loaded_by_a_relative_name_is_saved_from_elsewhere(tmp_path, monkeypatch):
    checkpoint(tmp_path / "first")
    monkeypatch.chdir(tmp_path)
    model = load(Path("first"))
    monkeypatch.chdir("/")
    with model.moe:
        model.save_pretrained(tmp_path / "second")
    torch.testing.assert_close(logits(tmp_path / "second"), logits(tmp_path / "first"))
