"""Checkpoints whose tensors and configuration do not belong together, and sound variants of them.

`test_companions_fuzz.py` changes parts at random; here are the messages.
"""

import fnmatch
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import tiny_checkpoints
import torch
from changed_checkpoints import (
    EXPERT,
    SAMPLES,
    Originals,
    changed,
    mapped,
    matrices_of_expert,
    refusal,
)
from quantized_checkpoints import EXPERTS, INT4_32, INT8_CHANNEL, Quantized, groups
from safetensors.torch import load_file, save_file
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.formats import compressed_tensors
from moe_runtime.checkpoints.formats.packed_weight import Settings
from moe_runtime.checkpoints.opening import read_config
from moe_runtime.errors import (
    CheckpointError,
    MoERuntimeError,
    MoERuntimeWarning,
    UnsupportedModelError,
)
from moe_runtime.types import ExpertKey

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Any]
LAYER = "model.layers.1.mlp.experts"
GPTQ, AWQ, INT4 = "qwen3_moe-gptq", "glm4_moe-awq", "deepseek_v3-int4"
FP8, NVFP4 = "deepseek_v3-fp8", "qwen3_moe-nvfp4-modelopt"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Originals(tmp_path_factory.mktemp("formats"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_checkpoints.tiny_model(SAMPLES[GPTQ].family)
    folder = tmp_path_factory.mktemp("plain")
    return tiny_checkpoints.save(model.to(torch.bfloat16), folder, sharded=False)


def plainly_changed(plain: Path, folder: Path, change: Change) -> Path:
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_settings(original: Path, folder: Path, **settings: Any) -> Path:
    """A copy with other settings in its config.json, and none of quantised weights but these."""
    shutil.copytree(original, folder)
    values = json.loads((folder / "config.json").read_text())
    values.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(values | settings))
    return folder


def part(suffix: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Changes tensors of one expert, or those that a pattern names."""

    def apply(tensors: Tensors) -> None:
        for name in fnmatch.filter(tensors, suffix if "*" in suffix else EXPERT + suffix):
            tensors[name] = change(tensors[name]).contiguous()

    return apply


def without(*parts: str) -> Change:
    def apply(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in parts)]:
            del tensors[name]

    return apply


def added(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def as_gptq(tensors: Tensors) -> None:
    without(EXPERT)(tensors)
    tensors[f"{EXPERT}.qweight"] = torch.zeros(16, 128, dtype=torch.int32)


def seventh(tensors: Tensors) -> None:
    new = {n.replace(".experts.3.", ".experts.6."): t for n, t in tensors.items() if LAYER in n}
    tensors |= {name: tensor.clone() for name, tensor in new.items()}


def braces(tensors: Tensors) -> None:
    tensors[EXPERT.replace(".3.", ".{x}.3.") + ".weight"] = tensors.pop(f"{EXPERT}.weight")


def renumbered(tensors: Tensors) -> None:
    """As many as there must be: a stack by their order would take the last for another."""
    for name in [name for name in tensors if f"{LAYER}.3." in name]:
        tensors[name.replace(".experts.3.", ".experts.6.")] = tensors.pop(name)


def from_one_on(tensors: Tensors) -> None:
    """Gives the experts of a layer the numbers 1 to 6."""
    for expert in range(5, -1, -1):
        for name in [name for name in tensors if name.startswith(f"{LAYER}.{expert}.")]:
            new = name.replace(f"experts.{expert}.", f"experts.{expert + 1}.")
            tensors[new] = tensors.pop(name)


def rows_twice(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith(f"{EXPERT}.weight")]:
        if tensors[name].ndim == 2:
            tensors[name] = tensors[name].repeat(2, 1)


def unpacked_expert(tensors: Tensors) -> None:
    without(f"{EXPERT}.weight_")(tensors)
    tensors[f"{EXPERT}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)


TENSORS = [
    (GPTQ, part(".g_idx", lambda t: t + 1), "EXPERT.g_idx: expected groups 0 to 1 of 32"),
    (GPTQ, part(".g_idx", lambda t: t.flip(0)), "EXPERT.g_idx: permuted groups (desc_act)"),
    (GPTQ, part(".g_idx", lambda t: t[:47]), "expected [36, 48] as other experts have, found [36"),
    (GPTQ, part(".g_idx", lambda t: t[:40]), "EXPERT.g_idx: expected a group for each of 48"),
    (GPTQ, part(".qweight", torch.t), "EXPERT.scales: expected F16 or BF16 or F32 [9, 6] beside"),
    (GPTQ, part(".qweight", lambda t: t[:-1]), "columns of EXPERT.qweight [5, 36], found I32 [48]"),
    (GPTQ, part(".scales", lambda t: t.float()), "found the up weights of expert 3, EXPERT.weight"),
    (GPTQ, without(EXPERT), "EXPERT.weight: expected experts 0 to 5"),
    (GPTQ, without(LAYER), "has no tensors for LAYER.gate_up_proj; fetch the checkpoint"),
    (GPTQ, seventh, "LAYER.6.gate_proj.weight: expected experts 0 to 5"),
    (AWQ, part(".qweight", torch.t), "expected I32 [K, 48] with K, the columns, a multiple of 8"),
    (AWQ, part(".qweight", lambda t: t[:-1]), "EXPERT.qweight: expected I32 [K, 5] with K, the"),
    (
        AWQ,
        part(".qweight", lambda t: t[:-8]),
        "expected [40, 48] as other experts have, found [40, 40] in EXPERT.qweight [40, 5]",
    ),
    (FP8, as_gptq, "found EXPERT.qweight, a part of gptq or awq: correct the"),
    ("olmoe-mxfp8", rows_twice, "EXPERT.weight: expected [64, 64] as other experts have, found"),
    ("glm4_moe-int8-zeros", without(f"{EXPERT}.weight_scale"), "the scales of EXPERT.weight in"),
    (NVFP4, without(f"{EXPERT}.weight"), "LAYER.3.up_proj.weight: expected experts 0 to 5"),
    (INT4, part(".weight_shape", lambda t: t - 8), "EXPERT.weight_shape: expected the sizes of"),
    (INT4, added(f"{EXPERT}.weight_zero_point", torch.zeros(8, 2, dtype=torch.int32)), "_point"),
    (INT4, added(f"{EXPERT}.weight_g_idx", torch.zeros(8, dtype=torch.int32)), "weight_g_idx"),
    (INT4, unpacked_expert, "expected one type for all experts of a layer"),
    # dense codes that nothing gives a meaning would be taken for numbers
    (INT4, part("*.0.self_attn.o_proj.weight", lambda t: t.char()), "o_proj.weight is I8"),
    (
        "gpt_oss-mxfp4",
        part("*.0.mlp.experts.down_proj_bias", torch.Tensor.float),
        "up_bias is bfloat16 and down_bias is float32; expected one type",
    ),
]
"""A sample, its change, and a part of the message, with names of this module in capitals."""


@pytest.mark.parametrize(("sample", "change", "words"), TENSORS)
def test_the_tensor_at_fault_is_named(originals, tmp_path, sample, change, words):
    words = words.replace("EXPERT", EXPERT).replace("LAYER", LAYER)
    assert words in refusal(changed(originals(sample), tmp_path, change), MoERuntimeError)


def int4(**weights: Any) -> dict[str, Any]:
    return groups((["Linear"], "pack-quantized", INT4_32 | weights))


SETTINGS = [
    (FP8, {"quant_method": "hqq"}, "quant_method 'hqq' cannot be read yet"),
    (FP8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8 or mxfp8: correct quant_method"),
    (FP8, {"weight_block_size": [128]}, "two positive whole numbers"),
    (FP8, {"weight_block_size": [64, 64]}, "[1, 2]; fetch the checkpoint again, or"),
    (FP8, {"fmt": "e5m2"}, "fmt 'e5m2' cannot be read yet; expected e4m3"),
    (NVFP4, {"quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
    (NVFP4, {"quant_algo": "FP8"}, "expected F8_E4M3, as it has scales"),
    (NVFP4, {"group_size": 32}, "correct the quantization_config of config.json"),
    ("glm4_moe-mixed", {"format": "marlin-24"}, "expected format to be float-quantized or"),
    ("deepseek_v4-fp4", {"expert_dtype": "fp8"}, "expected F8_E4M3"),
    (INT4, {"config_groups": {}}, "among the targets of config_groups"),
    (INT4, {"ignore": ["re:.*experts.*"]}, "ignores"),
    (INT4, {"ignore": ["re:("]}, "a regular expression"),
    (INT4, {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
    (INT4, int4(symmetric=False), "expected a part of"),
    (INT4, int4(symmetric=False, strategy="tensor"), "strategy 'tensor' with zero points"),
    (INT4, int4(actorder="group"), "actorder of groups cannot be read yet"),
    (INT4, int4(type="float"), "type 'float' cannot be read yet"),
    (INT4, int4(group_size=64), "expected BF16 or F32 or F16"),
    (INT4, int4(group_size=None), "expected group_size to be there"),
    (INT4, int4(strategy="token"), "strategy 'token' cannot be read yet"),
    (GPTQ, {"group_size": 64}, "scales: expected F16 or BF16 or F32 [1, 48] beside"),
    (GPTQ, {"quant_method": "awq"}, "fetch the checkpoint again, or correct the"),
    (GPTQ, {"bits": 3}, "bits 3 cannot be read yet; expected 4 or 8"),
    (GPTQ, {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' cannot"),
    (GPTQ, {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic with settings"),
    (AWQ, {"bits": 8}, "bits 8 cannot be read yet; expected 4"),
    (AWQ, {"version": "gemv"}, "version 'gemv' cannot be read yet"),
]


@pytest.mark.parametrize(("sample", "config", "words"), SETTINGS)
def test_the_configuration_at_fault_is_named(originals, tmp_path, sample, config, words):
    assert words in refusal(changed(originals(sample), tmp_path, **config), MoERuntimeError)


@pytest.mark.parametrize(
    ("key", "value"),
    [("quantization_config", "gptq"), ("quantization_config", []), ("compression_config", 0)],
)
def test_a_quantization_config_that_is_no_object(originals, tmp_path, key, value):
    message = refusal(with_settings(originals(GPTQ), tmp_path / "a", **{key: value}))
    assert f"config.json: expected {key} to be an object" in message
    assert message.endswith(f"found {value!r}")


@pytest.mark.parametrize(
    ("sample", "settings", "words"),
    [
        (GPTQ, {}, "g_idx, a part of gptq: correct the quantization_config of config.json"),
        (GPTQ, {"quantization_config": {}}, "quant_method None cannot be read yet"),
        (FP8, {}, "is F8_E4M3"),
    ],
)
def test_codes_that_no_configuration_describes(originals, tmp_path, sample, settings, words):
    folder = with_settings(originals(sample), tmp_path / "a", **settings)
    assert words in refusal(folder, MoERuntimeError)


def test_a_plain_checkpoint_that_is_called_quantised(plain, tmp_path):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    folder = with_settings(plain, tmp_path / "a", quantization_config=config)
    message = refusal(folder, MoERuntimeError)
    assert "expected weights in fp8, found none among" in message
    assert message.endswith("remove the part if none is quantised")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without(f"{LAYER}.4.down"), f"{LAYER}.4.down_proj.weight: expected experts 0 to 5"),
        (part(".weight", lambda t: t[:, 1:]), f"{EXPERT}.weight: expected [36, 48] as other"),
        (seventh, f"{LAYER}.6.gate_proj.weight: expected experts 0 to 5"),
        (braces, f"{EXPERT}.weight: expected experts 0 to 5"),
        (renumbered, f"{LAYER}.3.gate_proj.weight: expected experts 0 to 5"),
        (from_one_on, f"{LAYER}.0.gate_proj.weight: expected experts 0 to 5"),
        (
            part("*.0.input_layernorm.weight", lambda t: t.to(torch.int8)),
            "model.layers.0.input_layernorm.weight is I8, and no part of a weight",
        ),
    ],
)
def test_of_plain_experts_too(plain, tmp_path, change, words):
    assert words in refusal(plainly_changed(plain, tmp_path / "a", change), MoERuntimeError)


def test_codes_of_a_dense_layer_that_are_short_are_named(originals, tmp_path):
    change = part("*layers.1.self_attn.q_proj.g_idx", lambda t: t[:-1])
    folder = changed(originals(GPTQ), tmp_path, change)
    name = "model.layers.1.self_attn.q_proj"
    words = rf"{name}\.weight: expected \[48, 48\], .* in {name}\.qweight \[6, 48\]; fetch"
    with pytest.raises(CheckpointError, match=words):
        moe_runtime.load(folder, host_memory="64MiB")


def test_weights_that_no_part_takes_are_named_and_change_nothing(plain, tmp_path):
    """As `from_pretrained` reports them; it says nothing of layers that predict further tokens."""

    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
        tensors["model.extra"] = torch.ones(1)

    folder = plainly_changed(plain, tmp_path / "a", add)
    with pytest.warns(MoERuntimeWarning) as caught:
        found = mapped(folder)
    (words,) = {str(warning.message) for warning in caught}
    assert "of its tensors, 2 that Qwen3MoeForCausalLM has no place for, such as model.ext" in words
    assert "model.layers.0.self_attn.q_proj.bias, are not used" in words
    assert found.dense_entries.keys() == mapped(plain).dense_entries.keys()


def test_faults_of_weights_that_are_never_used_refuse_nothing(originals, tmp_path):
    """Codes without scales in the layer of DeepSeek-V3 that predicts further tokens."""

    def add(tensors: Tensors) -> None:
        codes = tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
        tensors["model.layers.61.mlp.experts.0.up_proj.weight"] = codes.clone()
        tensors["model.layers.61.eh_proj.weight_scale_inv"] = torch.ones(1)

    folder = changed(originals(FP8), tmp_path, add)
    assert mapped(folder).type_names == mapped(originals(FP8)).type_names


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path):
    family = SAMPLES[FP8].family
    folder = tiny_checkpoints.save(tiny_checkpoints.tiny_model(family), tmp_path, sharded=False)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    file.write_text(json.dumps(values | {"model_type": "kimi_k2", "auto_map": auto_map}))
    model: Any = moe_runtime.load(folder, device="cpu")
    with model.moe:
        assert model.moe.facts.signature.model_type == "deepseek_v3"
        assert type(model).__name__ == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize(("name", "value"), [("pad_token_id", 1.5), ("dtype", "float7")])
def test_a_setting_that_transformers_refuses_is_one_line(tmp_path, name, value):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", name: value}))
    with pytest.raises(CheckpointError, match=rf"json: expected {name} to be [^\n]*{value}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": 5}, "expected hidden_act to be a name, found 5"),
        ({"rope_parameters": {"beta_fast": True}}, "expected beta_fast to be a number, found True"),
        # used only for texts beyond the original length
        ({"rope_parameters": {"long_factor": ["a"]}}, "expected long_factor to be a list of numb"),
    ],
)
def test_settings_of_wrong_types_are_refused(tmp_path, values, words):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | values))
    with pytest.raises(CheckpointError, match=words):
        read_config(tmp_path)


def test_an_activation_that_transformers_does_not_know_is_named(plain, tmp_path):
    folder = with_settings(plain, tmp_path / "a", hidden_act="telepathy")
    assert refusal(folder).endswith("transformers knows no hidden_act 'telepathy'")


def test_plain_matrices_beside_quantised_ones_of_an_expert_must_be_bf16(originals, tmp_path):
    """Known before the first token, which no product could compute."""

    def written(folder: str, dtype: torch.dtype) -> Path:
        def unpack(tensors: Tensors) -> None:
            stems = {name.rpartition(".")[0] for name in tensors}
            for stem in [s for s in stems if "mlp.experts" in s and s.endswith("down_proj")]:
                without(f"{stem}.weight_")(tensors)
                tensors[f"{stem}.weight"] = torch.zeros(64, 64, dtype=dtype)

        return changed(originals(INT4), tmp_path / folder, unpack)

    message = refusal(written("refused", torch.float16), UnsupportedModelError)
    assert "mlp.experts: of an expert's tensors, up is " in message
    assert "and down is float16; expected one type for them, or bfloat16 beside" in message
    assert mapped(written("taken", torch.bfloat16)).layouts


def test_experts_whose_codes_differ_by_a_sign_are_refused(tmp_path):
    """Both are int8 with the same scales, and codes of one are no codes of the other."""

    def repack(tensors: Tensors) -> None:
        codes = tensors.pop(f"{EXPERT}.weight")
        tensors[f"{EXPERT}.weight_shape"] = torch.tensor(codes.shape)
        tensors[f"{EXPERT}.weight_packed"] = (codes ^ -128).view(torch.int32)

    sample = Quantized(
        "olmoe-int8",
        quantized_checkpoints.Family("olmoe", "OlmoeForCausalLM", quantized_checkpoints.EVEN),
        groups(
            (["Linear"], "int-quantized", INT8_CHANNEL), ([EXPERT], "pack-quantized", INT8_CHANNEL)
        ),
        {EXPERTS: quantized_checkpoints.compressed("int-quantized", **INT8_CHANNEL)},
    )
    original = quantized_checkpoints.write(sample, tmp_path / "original").folder
    folder = changed(original, tmp_path / "changed", repack)
    assert "expected one type for all experts" in refusal(folder, UnsupportedModelError)


def assert_same_values(folder: Path, original: Path, *keys: ExpertKey) -> None:
    for key in keys or (ExpertKey(1, 3),):
        expected = matrices_of_expert(original, key)
        for name, matrix in matrices_of_expert(folder, key).items():
            assert torch.equal(matrix.dequantize(), expected[name].dequantize()), (key, name)


def test_scales_may_lie_in_another_file_than_their_codes(originals, tmp_path):
    folder = changed(originals(FP8), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"{'scale_inv' in name}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in tensors if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_values(folder, originals(FP8))


def test_zero_points_of_awq_are_read_where_there_are_some(originals, tmp_path):
    """GPTQModel writes `zero_point: false` beside those of symmetric codes."""
    folder = changed(originals(AWQ), tmp_path / "symmetric", zero_point=False)
    assert_same_values(folder, originals(AWQ))
    none = changed(folder, tmp_path / "without", without(".qzeros"), zero_point=False)
    assert "zero_point False cannot be read yet" in refusal(none, MoERuntimeError)


def test_groups_of_gptq_in_order_are_read_whatever_the_configuration_says(originals, tmp_path):
    mapped(changed(originals(GPTQ), tmp_path, desc_act=True))


def test_gptq_without_the_groups_of_columns_is_read_unless_they_may_be_permuted(
    originals, tmp_path
):
    """Where every column has a code: K is a multiple of what a word holds."""
    original = originals("deepseek_v3-gptq-int8")
    folder = changed(original, tmp_path / "without", without(".g_idx"))
    assert_same_values(folder, original)
    permuted = changed(folder, tmp_path / "permuted", desc_act=True)
    assert "desc_act of" in refusal(permuted, MoERuntimeError)


def fused(tensors: Tensors) -> None:
    """Experts of every layer in one stack of codes and one of scales, as models hold them."""
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        for suffix in ("weight", "weight_scale_inv"):
            gates, ups, downs = (
                [tensors.pop(f"{stem}.{expert}.{name}_proj.{suffix}") for expert in range(6)]
                for name in ("gate", "up", "down")
            )
            end = suffix.removeprefix("weight")
            both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
            tensors[f"{stem}.gate_up_proj{end}"] = torch.stack(both)
            tensors[f"{stem}.down_proj{end}"] = torch.stack(downs)


STACKED = Quantized(
    "qwen3_moe-fp8",
    quantized_checkpoints.Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {"hidden_size": 48, "moe_intermediate_size": 32}
    ),
    {"quant_method": "fp8", "weight_block_size": [16, 16]},
    {EXPERTS: quantized_checkpoints.fp8_block(torch.float32, 16)},
)


def test_stacked_experts_have_the_values_of_separate_ones(tmp_path):
    """Half a stack's scales are those of half its rows."""
    original = quantized_checkpoints.write(STACKED, tmp_path / "apart").folder
    folder = changed(original, tmp_path / "stacked", fused)
    assert_same_values(folder, original, ExpertKey(0, 0), ExpertKey(1, 3), ExpertKey(2, 5))


def test_stacks_that_are_cut_within_a_block_are_refused(originals, tmp_path):
    def fuse_codes(tensors: Tensors) -> None:
        fused(tensors)
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj_scale_inv"
            tensors[name] = tensors[name][:, :2].contiguous()  # 144 rows have two blocks of 128

    folder = changed(originals("qwen3_moe-fp8-ragged"), tmp_path, fuse_codes)
    words = "expected the rows of an expert's matrix to begin with a group"
    assert words in refusal(folder, UnsupportedModelError)


def test_scales_of_zero_and_none_are_what_they_say(originals, tmp_path):
    """An exponent of 0 is 2 ** -127, and 255 is not a number, as in microscaling formats."""

    def extremes(tensors: Tensors) -> None:
        scales = tensors[f"{EXPERT}.weight_scale_inv"]
        scales[0, 0], scales[1, 0] = 0, 255

    folder = changed(originals("olmoe-mxfp8"), tmp_path, extremes)
    values = matrices_of_expert(folder, ExpertKey(1, 3))["up"].dequantize()
    codes = load_file(folder / "model.safetensors")[f"{EXPERT}.weight"].float()
    assert torch.equal(values[0, :32], codes[0, :32] * 2.0**-127)
    assert values[1, :32].isnan().all()
    assert torch.isfinite(values[2:]).all()


@pytest.mark.parametrize(
    "targets",
    [
        ["Linear", "re:.*down_proj"],
        ["re:.*proj", "re:.*down_proj", "mlp.experts.3.down_proj"],
        ["re:.*experts.*", "re:.*down.*", "Linear"],
        ["mlp.experts.3.up_proj", "re:.*up_proj", "Linear", "re:mlp.*", "Linear"],
    ],
    ids=str,
)
def test_targets_count_as_in_compressed_tensors(targets):
    """Each in a group of its own; where two groups have a target, the later one counts."""
    from compressed_tensors.utils import match_targets

    config = {str(n): {"targets": [t], "weights": {"n": n}} for n, t in enumerate(targets)}
    found = compressed_tensors._targets_of(Settings({"config_groups": config, "format": "x"}))
    for name in ("mlp.experts.3.down_proj", "mlp.experts.3.up_proj", "mlp.experts.4.up_proj"):
        if matched := match_targets(name, torch.nn.Linear(1, 1), targets):
            last = len(targets) - 1 - targets[::-1].index(matched[0])
            assert compressed_tensors._how(name, name, found)[0].values == {"n": last}


def test_budgets_count_memory_beyond_the_bytes_of_the_file(originals):
    """Codes that are copied while they are put in order, and a byte for each zero point."""
    gptq, zeros = (mapped(originals(name)) for name in (GPTQ, "qwen3_moe-int4-zeros"))
    # 48 columns of 36 rows, or 36 of 48, in words of eight codes
    assert gptq.scratch_bytes == max(48 // 8 * 36, -(-36 // 8) * 48) * 4
    assert zeros.scratch_bytes == 0
    for experts, group in ((gptq, 32), (zeros, 12)):
        for layout in experts.layouts.values():
            num_zeros = 2 * 36 * -(-48 // group) + 48 * -(-36 // group)
            assert layout.slot_bytes >= num_zeros + sum(e.num_bytes for e in layout.extents)
