"""Quantised checkpoints that are damaged, or quantised in ways that nothing here reads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
from changed_checkpoints import EXPERT, Originals, changed, mapped, matrices_of_expert, refusal
from quantized_checkpoints import EXPERTS, Quantized
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime.checkpoints.formats import compressed_tensors
from moe_runtime.checkpoints.formats.packed_weight import Settings
from moe_runtime.errors import MoERuntimeError, UnsupportedModelError
from moe_runtime.types import ExpertKey


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Originals(tmp_path_factory.mktemp("formats"))


PARTS = [
    ("gpt_oss-mxfp4", "model.layers.1.mlp.experts.gate_up_proj_scales"),
    ("deepseek_v3-fp8", f"{EXPERT}.weight_scale_inv"),
    ("deepseek_v3-int4", f"{EXPERT}.weight_scale"),
    ("qwen3_moe-int4-zeros", f"{EXPERT}.weight_zero_point"),
    ("qwen3_moe-gptq", f"{EXPERT}.qzeros"),
    ("glm4_moe-awq", f"{EXPERT}.qweight"),
    ("mixtral-nvfp4", "model.layers.1.block_sparse_moe.experts.3.w3.weight_global_scale"),
    ("qwen3_moe-nvfp4-modelopt", f"{EXPERT}.weight_scale_2"),
    ("deepseek_v4-fp4", "model.layers.1.ffn.experts.3.w3.scale"),
]


@pytest.mark.parametrize("damage", ["missing", "longer", "retyped"])
@pytest.mark.parametrize(("sample", "part"), PARTS)
def test_a_damaged_part_is_one_line_that_names_it(originals, tmp_path, sample, part, damage):
    def change(tensors: dict[str, Tensor]) -> None:
        tensor = tensors.pop(part)
        if damage == "longer":
            tensors[part] = torch.atleast_1d(tensor).repeat_interleave(2, 0).contiguous()
        elif damage == "retyped":
            tensors[part] = torch.zeros(tensor.shape, dtype=torch.int16)

    message = refusal(changed(originals(sample), tmp_path, change), MoERuntimeError)
    # of a longer part, the other parts are those that do not fit
    stem = part.rpartition("." if EXPERT in part else "_")[0] or part
    named = {"missing": part.removesuffix("weight"), "longer": stem.removesuffix(".scale")}
    assert named.get(damage, f"{part}: expected") in message


def test_a_wrong_shape_of_packed_integers_is_refused(originals, tmp_path):
    def lie(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.weight_shape"] = torch.tensor([64, 56])

    folder = changed(originals("deepseek_v3-int4"), tmp_path, lie)
    assert f"{EXPERT}.weight_shape: expected the sizes of" in refusal(folder)


@pytest.mark.parametrize(
    ("sample", "config", "words"),
    [
        ("deepseek_v3-fp8", {"quant_method": "hqq"}, "quant_method 'hqq' cannot be read yet"),
        ("deepseek_v3-fp8", {"quant_method": 3}, "expected quant_method to be a name"),
        ("deepseek_v3-fp8", {"weight_block_size": [128]}, "two positive whole numbers"),
        ("deepseek_v3-fp8", {"fmt": "e5m2"}, "fmt 'e5m2' cannot be read yet; expected e4m3"),
        ("qwen3_moe-nvfp4-modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
        ("qwen3_moe-nvfp4-modelopt", {"quant_algo": "FP8"}, "expected F8_E4M3, as it has scales"),
        ("glm4_moe-mixed", {"format": "marlin-24"}, "expected format to be float-quantized or"),
        ("deepseek_v4-fp4", {"expert_dtype": "fp8"}, "expected F8_E4M3"),
        ("deepseek_v3-int4", {"config_groups": {}}, "among the targets of config_groups"),
        ("deepseek_v3-int4", {"ignore": ["re:.*experts.*"]}, "ignores"),
        ("deepseek_v3-int4", {"ignore": ["re:("]}, "a regular expression"),
        ("deepseek_v3-int4", {"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
    ],
)
def test_what_the_configuration_says_is_judged(originals, tmp_path, sample, config, words):
    folder = changed(originals(sample), tmp_path, **config)
    assert words in refusal(folder, MoERuntimeError)


def test_codes_without_a_configuration_are_refused(originals, tmp_path):
    folder = changed(originals("deepseek_v3-fp8"), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (folder / "config.json").write_text(json.dumps(values))
    assert "is F8_E4M3" in refusal(folder, UnsupportedModelError)


def test_dense_codes_without_a_meaning_are_refused(originals, tmp_path):
    """Else they would be taken for the numbers that their bytes are."""
    name = "model.layers.0.self_attn.o_proj.weight"

    def retype(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.ones(tensors[name].shape, dtype=torch.int8)

    folder = changed(originals("deepseek_v3-int4"), tmp_path, retype)
    assert f"{name} is I8" in refusal(folder, UnsupportedModelError)


def test_experts_of_two_formats_in_a_layer_are_refused(originals, tmp_path):
    def unpack(tensors: dict[str, Tensor]) -> None:
        for suffix in ("packed", "scale", "shape"):
            del tensors[f"{EXPERT}.weight_{suffix}"]
        tensors[f"{EXPERT}.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)

    folder = changed(originals("deepseek_v3-int4"), tmp_path, unpack)
    assert "expected one type for all experts" in refusal(folder, UnsupportedModelError)


def test_plain_matrices_beside_quantised_ones_of_an_expert_must_be_bf16(originals, tmp_path):
    """Known before the first token, which no product could compute."""

    def written(folder: str, plain: torch.dtype) -> Path:
        def unpack(tensors: dict[str, Tensor]) -> None:
            stems = {name.rpartition(".")[0] for name in tensors}
            for stem in [s for s in stems if "mlp.experts" in s and s.endswith("down_proj")]:
                for suffix in ("packed", "scale", "shape"):
                    del tensors[f"{stem}.weight_{suffix}"]
                tensors[f"{stem}.weight"] = torch.zeros(64, 64, dtype=plain)

        return changed(originals("deepseek_v3-int4"), tmp_path / folder, unpack)

    message = refusal(written("refused", torch.float16), UnsupportedModelError)
    assert "mlp.experts: of an expert's tensors, up is " in message
    assert "and down is float16; expected one type for them, or bfloat16 beside" in message
    assert mapped(written("taken", torch.bfloat16)).layouts


def test_scales_may_lie_in_another_file_than_their_codes(originals, tmp_path):
    original = originals("deepseek_v3-fp8")
    folder = changed(original, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    file_of = {name: f"{'scale_inv' in name}.safetensors" for name in tensors}
    for file in set(file_of.values()):
        part = {name: tensors[name] for name in tensors if file_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    key = ExpertKey(1, 3)
    expected = matrices_of_expert(original, key)
    for name, matrix in matrices_of_expert(folder, key).items():
        assert torch.equal(matrix.dequantize(), expected[name].dequantize())


def fused(tensors: dict[str, Tensor]) -> None:
    """Experts of every layer in one stack of codes and one of scales, as models hold them."""
    for layer in range(3):
        stem = f"model.layers.{layer}.mlp.experts"
        for suffix in ("weight", "weight_scale_inv"):
            parts = {
                name: [tensors.pop(f"{stem}.{e}.{name}.{suffix}") for e in range(6)]
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            end = suffix.removeprefix("weight")
            both = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            tensors[f"{stem}.gate_up_proj{end}"] = torch.stack([torch.cat(p) for p in both])
            tensors[f"{stem}.down_proj{end}"] = torch.stack(parts["down_proj"])


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

    groups = {str(n): {"targets": [t], "weights": {"n": n}} for n, t in enumerate(targets)}
    found = compressed_tensors._targets_of(Settings({"config_groups": groups, "format": "x"}))
    for name in ("mlp.experts.3.down_proj", "mlp.experts.3.up_proj", "mlp.experts.4.up_proj"):
        matched = match_targets(name, torch.nn.Linear(1, 1), targets)
        if matched:
            last = len(targets) - 1 - targets[::-1].index(matched[0])
            assert compressed_tensors._how(name, name, found)[0].values == {"n": last}


def test_stacked_experts_have_the_values_of_separate_ones(originals, tmp_path):
    """Half a stack's scales are those of half its rows."""
    original = quantized_checkpoints.write(STACKED, tmp_path / "apart").folder
    folder = changed(original, tmp_path / "stacked", fused)
    for key in (ExpertKey(0, 0), ExpertKey(1, 3), ExpertKey(2, 5)):
        apart, stacked = matrices_of_expert(original, key), matrices_of_expert(folder, key)
        for name, matrix in apart.items():
            assert torch.equal(stacked[name].dequantize(), matrix.dequantize()), (key, name)


def test_stacks_that_are_cut_within_a_block_are_refused(originals, tmp_path):
    def fuse_codes(tensors: dict[str, Tensor]) -> None:
        fused(tensors)
        for layer in range(3):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj_scale_inv"
            tensors[name] = tensors[name][:, :2].contiguous()  # 144 rows have two blocks of 128

    folder = changed(originals("qwen3_moe-fp8-ragged"), tmp_path, fuse_codes)
    assert "expected the rows of an expert's matrix to begin with a group" in refusal(
        folder, UnsupportedModelError
    )


STACKED = Quantized(
    "qwen3_moe-fp8",
    quantized_checkpoints.Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {"hidden_size": 48, "moe_intermediate_size": 32}
    ),
    {"quant_method": "fp8", "weight_block_size": [16, 16]},
    {EXPERTS: quantized_checkpoints.fp8_block(torch.float32, 16)},
)


def test_scales_of_zero_and_none_are_what_they_say(originals, tmp_path):
    """An exponent of 0 is 2 ** -127 and 255 is no number, as the microscaling formats have them."""

    def extremes(tensors: dict[str, Tensor]) -> None:
        scales = tensors[f"{EXPERT}.weight_scale_inv"]
        scales[0, 0], scales[1, 0] = 0, 255

    folder = changed(originals("olmoe-mxfp8"), tmp_path, extremes)
    up = matrices_of_expert(folder, ExpertKey(1, 3))["up"]
    codes = load_file(folder / "model.safetensors")[f"{EXPERT}.weight"].float()
    values = up.dequantize()
    assert torch.equal(values[0, :32], codes[0, :32] * 2.0**-127)
    assert values[1, :32].isnan().all()
    assert torch.isfinite(values[2:]).all()
