"""`save_pretrained` of models whose weights are quantised or packed: nothing is rounded once more.

Quantised tensors are those of the checkpoint, byte for byte; packed ones become plain again.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
from moe_families import ADAPTED, FAMILIES, Family
from safetensors.torch import load_file
from tiny_checkpoints import PROMPT, save, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

import moe_runtime
from moe_runtime.checkpoints.opening import open_checkpoint
from moe_runtime.checkpoints.packing import pack_checkpoint
from moe_runtime.errors import UnsupportedModelError, UnsupportedUseError
from moe_runtime.inference.inspection import inspect_checkpoint

SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
KINDS = (
    *("gpt_oss-mxfp4", "deepseek_v3-fp8", "glm4_moe-mixed", "qwen3_moe-gptq"),
    *(
        pytest.param(kind, marks=pytest.mark.long)
        for kind in (
            *("deepseek_v3-int4", "mixtral-nvfp4", "qwen3_moe-nvfp4-modelopt"),
            *("qwen3_moe-int4-zeros", "deepseek_v4-fp4", "glm4_moe-awq"),
        )
    ),
)
"""Each kind of code and of scales, experts stacked and apart, dense weights quantised and not."""
# rows that the lossless code makes shorter
SIZES = {"hidden_size": 128, "intermediate_size": 64}
PACKED = [
    Family("mixtral", "MixtralForCausalLM", SIZES),
    Family("gpt_oss", "GptOssForCausalLM", SIZES),
    Family(
        "nemotron_h",
        "NemotronHForCausalLM",
        next(family.config for family in FAMILIES if family.folder == "nemotron_h"),
    ),
]


def load(folder: Path, **options: Any) -> Any:
    return moe_runtime.load(folder, device="cpu", host_memory="1GiB", **options)


def saved(folder: Path, into: Path, **options: Any) -> Tensor:
    """Logits of a loaded model that was saved."""
    model = load(folder)
    with model.moe, torch.no_grad():
        model.save_pretrained(into, **options)
        model.moe.check()
        return model(PROMPT).logits


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def different(folder: Path, other: Path) -> set[str]:
    """Tensors that have not the same type, sizes and bytes.

    What transformers keeps in fp32 in a model of bf16 may be as wide in `folder`.
    """
    found, expected = tensors(folder), tensors(other)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.dtype == torch.bfloat16 and ".experts." not in name:
            expected[name] = tensor.to(found[name].dtype)
    return {name for name in found if described(found[name]) != described(expected[name])}


def described(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, content


def said(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tensors_are_written_as_they_were(tmp_path, kind):
    if not SAMPLES[kind].family.computes_in_bf16:
        pytest.skip("this transformers computes the family in fp32 alone")
    written = quantized_checkpoints.write(SAMPLES[kind], tmp_path)
    logits = saved(written.folder, tmp_path / "saved", max_shard_size=50_000)
    assert len([*(tmp_path / "saved").glob("*.safetensors")]) > 1
    assert not different(tmp_path / "saved", written.folder)
    name = "quantization_config"
    assert said(tmp_path / "saved")[name] == said(written.folder)[name]
    again = load(tmp_path / "saved")
    with again.moe, torch.no_grad():
        assert torch.equal(again(PROMPT).logits, logits)


def test_transformers_loads_what_is_saved_with_the_same_values(tmp_path):
    written = quantized_checkpoints.write(SAMPLES["gpt_oss-mxfp4"], tmp_path)
    saved(written.folder, tmp_path / "saved")
    states = [
        AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
        ).state_dict()
        for folder in (written.folder, tmp_path / "saved")
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16


def test_a_separate_quantisation_file_is_copied(tmp_path):
    written = quantized_checkpoints.write(SAMPLES["qwen3_moe-nvfp4-modelopt"], tmp_path)
    config = said(written.folder)
    del config["quantization_config"]
    (written.folder / "config.json").write_text(json.dumps(config))
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    beside = {"quantization": quantization}
    (written.folder / "hf_quant_config.json").write_text(json.dumps(beside))
    found = inspect_checkpoint(written.folder).expert_dtype
    assert found == "fp4 with e4m3 scales for 1 x 16"
    saved(written.folder, tmp_path / "saved")
    assert said(tmp_path / "saved", "hf_quant_config.json") == beside
    assert "quantization_config" not in said(tmp_path / "saved")
    load(tmp_path / "saved").moe.close()


def test_only_plain_weights_may_change(tmp_path):
    written = quantized_checkpoints.write(SAMPLES["deepseek_v3-fp8"], tmp_path)
    model = load(written.folder)
    with model.moe, torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.25)
        expected = model(PROMPT).logits
        model.save_pretrained(tmp_path / "saved")
        packed = open_checkpoint(written.folder, "auto").packed
        name = next(name for name in packed if "shared_experts" in name)
        path, _, own_name = name.rpartition(".")
        changed = torch.nn.Parameter(model.get_parameter(name) + 1, requires_grad=False)
        setattr(model.get_submodule(path), own_name, changed)
        with pytest.raises(UnsupportedUseError, match="not quantised anew") as caught:
            model.save_pretrained(tmp_path / "second")
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "second").exists()
    assert different(tmp_path / "saved", written.folder) == {"model.embed_tokens.weight"}
    again = load(tmp_path / "saved")
    with again.moe, torch.no_grad():
        assert torch.equal(again(PROMPT).logits, expected)


def test_a_quantised_checkpoint_may_be_written_over_itself(tmp_path):
    written = quantized_checkpoints.write(SAMPLES["deepseek_v3-int4"], tmp_path)
    shutil.copytree(written.folder, tmp_path / "before")
    saved(written.folder, written.folder)
    assert not different(written.folder, tmp_path / "before")
    name = "quantization_config"
    assert said(written.folder)[name] == said(tmp_path / "before")[name]


@pytest.mark.parametrize(
    ("family", "code"), [*zip(PACKED, ("planes", "none", "planes"), strict=True)], ids=str
)
def test_a_packed_model_is_written_as_it_was_before(tmp_path, family, code):
    save(tiny_model(family).bfloat16(), tmp_path / "first", sharded=False)
    pack_checkpoint(tmp_path / "first", tmp_path / "packed", code)
    saved(tmp_path / "packed", tmp_path / "second")
    assert not different(tmp_path / "second", tmp_path / "first")
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert said(tmp_path / "second") == said(tmp_path / "first")


def test_a_packed_folder_is_not_made_a_plain_one_in_place(tmp_path):
    save(tiny_model(PACKED[0]).bfloat16(), tmp_path / "first", sharded=False)
    pack_checkpoint(tmp_path / "first", tmp_path / "packed")
    before = {path: path.read_bytes() for path in (tmp_path / "packed").iterdir()}
    with pytest.raises(UnsupportedUseError, match="name another folder"):
        saved(tmp_path / "packed", tmp_path / "packed")
    assert {path: path.read_bytes() for path in (tmp_path / "packed").iterdir()} == before


def test_names_lost_in_packing_are_refused(tmp_path):
    """A family whose experts transformers does not have under an interface of its own."""
    family = next(family for family in ADAPTED if family.folder == "jetmoe")
    save(tiny_model(family).bfloat16(), tmp_path / "first", sharded=False)
    pack_checkpoint(tmp_path / "first", tmp_path / "packed", "none")
    with pytest.raises(UnsupportedModelError, match=r"experts of jetmoe.*that was packed"):
        saved(tmp_path / "packed", tmp_path / "second")
    assert not (tmp_path / "second").exists()
