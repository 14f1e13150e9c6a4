"""What a message blames where tensors and configuration do not belong together."""

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from changed_checkpoints import EXPERT, SAMPLES, Originals, changed, mapped, refusal
from safetensors.torch import load_file, save_file
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.opening import read_config
from moe_runtime.errors import CheckpointError, MoERuntimeError, MoERuntimeWarning

Change = Callable[[dict[str, Tensor]], Any]
LAYER = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Originals(tmp_path_factory.mktemp("misfits"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    model = tiny_checkpoints.tiny_model(SAMPLES["qwen3_moe-gptq"].family)
    tiny_checkpoints.save(model.to(torch.bfloat16), folder, sharded=False)
    return folder


def with_config(original: Path, folder: Path, value: object, key: str = "") -> Path:
    shutil.copytree(original, folder)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    values |= {key or "quantization_config": value}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("value", ["gptq", [], 0], ids=str)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_quantization_config_that_is_no_object(originals, tmp_path, key, value):
    folder = with_config(originals("qwen3_moe-gptq"), tmp_path / "a", value, key)
    message = refusal(folder)
    assert f"config.json: expected {key} to be an object" in message
    assert message.endswith(f"found {value!r}")


@pytest.mark.parametrize("value", [None, {}], ids=str)
def test_one_that_says_nothing(originals, tmp_path, value):
    folder = with_config(originals("qwen3_moe-gptq"), tmp_path / "a", value)
    message = refusal(folder, MoERuntimeError)
    named = "g_idx, a part of gptq: correct the quantization_config of config.json"
    assert named in message or "quant_method None cannot be read yet" in message


def part(suffix: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[EXPERT + suffix] = change(tensors[EXPERT + suffix]).contiguous()

    return apply


def ends(pattern: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Changes every tensor whose name ends so."""

    def apply(tensors: dict[str, Tensor]) -> None:
        for name in fnmatch.filter(tensors, f"*{pattern}"):
            tensors[name] = change(tensors[name]).contiguous()

    return apply


def without(*ends: str) -> Change:
    def apply(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if any(end in name for end in ends)]:
            del tensors[name]

    return apply


def as_gptq(tensors: dict[str, Tensor]) -> None:
    without(EXPERT)(tensors)
    tensors[f"{EXPERT}.qweight"] = torch.zeros(16, 128, dtype=torch.int32)


def codes_gone(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{EXPERT}.weight"]


def seventh(tensors: dict[str, Tensor]) -> None:
    new = {n.replace(".experts.3.", ".experts.6."): t for n, t in tensors.items() if LAYER in n}
    tensors |= {name: tensor.clone() for name, tensor in new.items()}


def braces(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT.replace(".3.", ".{x}.3.") + ".weight"] = tensors.pop(f"{EXPERT}.weight")


def renumbered(tensors: dict[str, Tensor]) -> None:
    """As many as there must be, which a stack by their order would take for others."""
    for name in [name for name in tensors if f"{LAYER}.3." in name]:
        tensors[name.replace(".experts.3.", ".experts.6.")] = tensors.pop(name)


def from_one_on(tensors: dict[str, Tensor]) -> None:
    """Gives the experts of a layer the numbers 1 to 6."""
    for expert in range(5, -1, -1):
        for name in [name for name in tensors if name.startswith(f"{LAYER}.{expert}.")]:
            new = name.replace(f"experts.{expert}.", f"experts.{expert + 1}.")
            tensors[new] = tensors.pop(name)


def rows_twice(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.startswith(f"{EXPERT}.weight")]:
        if tensors[name].ndim == 2:
            tensors[name] = tensors[name].repeat(2, 1)


GPTQ, AWQ = "qwen3_moe-gptq", "glm4_moe-awq"
CASES = [
    (GPTQ, part(".g_idx", lambda t: t + 1), "EXPERT.g_idx: expected groups 0 to 1 of 32"),
    (GPTQ, part(".g_idx", lambda t: t.flip(0)), "EXPERT.g_idx: permuted groups (desc_act)"),
    (GPTQ, part(".qweight", torch.t), "EXPERT.qweight: expected codes of 36 rows"),
    (GPTQ, part(".qweight", lambda t: t[:-1]), "columns of EXPERT.qweight [5, 36] with 4 bits"),
    (
        GPTQ,
        part(".g_idx", lambda t: t[:47]),
        "EXPERT.g_idx: expected [48], a group for each column of EXPERT.qweight [6, 36], as",
    ),
    (
        GPTQ,
        part(".g_idx", lambda t: t[:40]),
        "EXPERT.g_idx: expected a group of each of 48 columns of EXPERT.qweight [6, 36] with",
    ),
    (AWQ, part(".qweight", torch.t), "found those of 384 in [5, 48]; transposed"),
    (
        AWQ,
        part(".qweight", lambda t: t[:-1]),
        "EXPERT.qweight: expected I32 [48, 5] as in other layers and experts, found I32 [47, 5]",
    ),
    (
        AWQ,
        part(".qweight", lambda t: t[:-8]),
        "expected [40, 48] as those of other experts, found [40, 40] in EXPERT.qweight [40, 5]",
    ),
    (
        "glm4_moe-int8-zeros",
        without(f"{EXPERT}.weight_scale"),
        "expected the scales of EXPERT.weight in EXPERT.weight_scale",
    ),
    (
        "qwen3_moe-nvfp4-modelopt",
        codes_gone,
        "expected the codes of EXPERT.weight_scale_2 in EXPERT.weight, found no",
    ),
    (GPTQ, without(EXPERT), "EXPERT.weight: expected it for experts 0 to 5"),
    (GPTQ, without(LAYER), "has no tensors for LAYER.gate_up_proj; fetch the checkpoint"),
    (GPTQ, seventh, "LAYER.6.gate_proj.weight: expected experts 0 to 5"),
    ("deepseek_v3-fp8", as_gptq, "found EXPERT.qweight, a part of gptq or awq: correct the"),
    (
        "olmoe-mxfp8",
        rows_twice,
        "EXPERT.weight: expected [64, 64] as those of other experts, found",
    ),
    (GPTQ, part(".scales", lambda t: t.float()), "found the up weights of expert 3, EXPERT.weight"),
]
"""The sample, its change, and what is said, with names of this module in capitals."""


@pytest.mark.parametrize(("sample", "change", "words"), CASES)
def test_the_tensor_at_fault_is_named(originals, tmp_path, sample, change, words):
    words = words.replace("EXPERT", EXPERT).replace("LAYER", LAYER)
    assert words in refusal(changed(originals(sample), tmp_path, change), MoERuntimeError)


@pytest.mark.parametrize(
    ("sample", "config", "words"),
    [
        (GPTQ, {"group_size": 64}, "those of groups of 1 x 32, not of 1 x 64; correct the size"),
        (GPTQ, {"quant_method": "awq"}, "as quant_method gptq has them: correct the quantization"),
        (AWQ, {"quant_method": "gptq"}, "as quant_method awq has them: correct the quantization"),
        (
            "deepseek_v3-fp8",
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "weight_scale_inv, a part of fp8 or mxfp8: correct quant_method",
        ),
        (
            "deepseek_v3-fp8",
            {"weight_block_size": [64, 64]},
            "[1, 2], those of groups of 128 x 128, not of 64 x 64; correct the size of groups",
        ),
        ("qwen3_moe-nvfp4-modelopt", {"group_size": 32}, "groups of 1 x 16, not of 1 x 32"),
    ],
)
def test_a_configuration_at_fault_is_named(originals, tmp_path, sample, config, words):
    folder = changed(originals(sample), tmp_path, **config)
    assert words in refusal(folder, MoERuntimeError)


def test_an_index_of_a_dense_layer_that_is_short_is_named(originals, tmp_path):
    change = ends("layers.1.self_attn.q_proj.g_idx", lambda t: t[:-1])
    folder = changed(originals(GPTQ), tmp_path, change)
    with pytest.raises(CheckpointError) as caught:
        moe_runtime.load(folder, host_memory="64MiB")
    name = "model.layers.1.self_attn.q_proj"
    words = f"{name}.g_idx: expected [48], a group for each column of {name}.qweight [6, 48], as"
    assert words in str(caught.value)
    assert "found [47]" in str(caught.value)


def test_weights_that_no_part_takes_are_named_and_change_nothing(plain, tmp_path):
    """As `from_pretrained` reports them; it says nothing of layers that predict further tokens."""
    folder = tmp_path / "a"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {
        "model.layers.0.self_attn.q_proj.bias": torch.ones(32),
        "model.extra": torch.ones(1),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.warns(MoERuntimeWarning) as caught:
        found = mapped(folder)
    (words,) = {str(warning.message) for warning in caught}
    assert "of its tensors, 2 that Qwen3MoeForCausalLM has no place for, such as model.ext" in words
    assert "model.layers.0.self_attn.q_proj.bias, are not used" in words
    assert found.dense_entries.keys() == mapped(plain).dense_entries.keys()


def test_what_is_wrong_with_weights_that_are_never_used_refuses_nothing(originals, tmp_path):
    """Codes without scales in the layer of DeepSeek-V3 that predicts further tokens."""

    def add(tensors: dict[str, Tensor]) -> None:
        codes = tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
        tensors["model.layers.61.mlp.experts.0.up_proj.weight"] = codes.clone()
        tensors["model.layers.61.eh_proj.weight_scale_inv"] = torch.ones(1)

    original = originals("deepseek_v3-fp8")
    folder = changed(original, tmp_path, add)
    assert mapped(folder).type_names == mapped(original).type_names


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    family = SAMPLES["deepseek_v3-fp8"].family
    folder = tiny_checkpoints.save(tiny_checkpoints.tiny_model(family), tmp_path, sharded=False)
    with moe_runtime.load(folder, device="cpu").moe as handle:
        model_type = handle.facts.signature.model_type
    file = folder / "config.json"
    values = json.loads(file.read_text())
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    file.write_text(json.dumps(values | {"model_type": "kimi_k2", "auto_map": auto_map}))
    model = moe_runtime.load(folder, device="cpu")
    with model.moe:
        assert model.moe.facts.signature.model_type == model_type == "deepseek_v3"
        assert type(model).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("time_step_limit", "x", "a list of numbers, found 'x'"),
        ("pad_token_id", 1.5, "a whole number or null, found 1.5"),
        ("eos_token_id", "</s>", "a whole number or a list of whole numbers or null, found '</s>'"),
        ("rope_parameters", [1], "an object or null, found [1]"),
    ],
)
def test_types_that_a_setting_may_have_are_said_in_words(tmp_path, name, value, words):
    config = {"model_type": "nemotron_h" if name == "time_step_limit" else "qwen3_moe", name: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    assert str(caught.value).endswith(f"config.json: expected {name} to be {words}")


@pytest.mark.parametrize("has_config", [True, False])
def test_a_bias_that_nothing_says_how_to_read(originals, plain, tmp_path, has_config):
    """Whether or not the configuration calls other weights quantised."""
    original, folder = originals(GPTQ) if has_config else plain, tmp_path / "a"
    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder, MoERuntimeError)
    expected = f"{name} is I8, and no part of a weight that the checkpoint's configuration calls"
    assert message.startswith(expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{LAYER}.4.down"), f"{LAYER}.4.down_proj.weight: expected it for experts 0 to 5"),
        (part(".weight", lambda t: t[:, 1:]), f"{EXPERT}.weight: expected [36, 48] as those of"),
        (seventh, f"{LAYER}.6.gate_proj.weight: expected experts 0 to 5"),
        (braces, f"{LAYER}.4.up_proj.weight: expected the up weights of experts 0 to 5"),
        (renumbered, "found none of expert 3, but these"),
        (from_one_on, f"{LAYER}.1.gate_proj.weight: expected the gate weights of experts 0 to"),
    ],
)
def test_of_plain_experts_too(plain, tmp_path, change, words):
    folder = tmp_path / "a"
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert words in refusal(folder)


def test_a_plain_checkpoint_that_is_called_quantised(plain, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(plain, folder)
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(values))
    message = refusal(folder, MoERuntimeError)
    assert "expected weights in fp8, found none among" in message
    assert message.endswith("remove the part if none is quantised")
