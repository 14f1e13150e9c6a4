"""Checkpoints written quantised: what compressed-tensors writes, and what others read of it."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints as samples
import torch
from moe_families import Family
from quantized_checkpoints import Quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import PROMPT, save, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.checkpoints.formats.packed_weight import matches
from moe_runtime.checkpoints.packing import Scheme, pack_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.kernels.quantized import WeightFormat
from moe_runtime.kernels.quantized.rounding import quantize

INT4_128 = samples.INT4_32 | {"group_size": 128}
INT8_32 = samples.INT4_32 | {"num_bits": 8}
INT8_128 = INT8_32 | {"group_size": 128}


@dataclass(frozen=True)
class Case:
    """A family in a scheme, and how compressed-tensors is asked for the same."""

    scheme: Scheme
    family: Family
    format: str
    arguments: dict[str, Any]

    @property
    def sample(self) -> Quantized:
        """The checkpoint as compressed-tensors writes it."""
        pack = samples.compressed(self.format, **self.arguments)
        weights = self.arguments | samples.IN_JSON
        config = samples.groups(([r"re:.*\.experts\.\d+\..*"], self.format, weights))
        return Quantized(self.scheme, self.family, config, {samples.EXPERTS: pack})


DEEPSEEK = Family("deepseek_v3", "DeepseekV3ForCausalLM", samples.ALL_HEADS | samples.WIDE)
# rows and columns are odd, so that no element that is wider than a byte is aligned by chance
MIXTRAL = Family("mixtral", "MixtralForCausalLM", {"hidden_size": 65, "intermediate_size": 33})
OLMOE = Family("olmoe", "OlmoeForCausalLM", samples.EVEN)
QWEN3 = Family("qwen3_moe", "Qwen3MoeForCausalLM", samples.EVEN)
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96})

CASES = {
    "int4": Case("int4", OLMOE, samples.PACKED, samples.INT4_32),
    "int8": Case("int8", DEEPSEEK, samples.PACKED, INT8_128),
    "fp8": Case("fp8", MIXTRAL, "float-quantized", samples.FP8_CHANNEL),
    "mxfp4": Case("mxfp4", QWEN3, "mxfp4-pack-quantized", samples.MXFP4),
}
every = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))


def source_of(family: Family, folder: Path, *, own_names: bool = False) -> Path:
    model = tiny_model(family).bfloat16()
    return save(model, folder, sharded=False, own_names=own_names)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        (samples.PACKED, samples.INT4_32, WeightFormat("uint4", "bf16", 1, 32, 8)),
        (samples.PACKED, INT4_128, WeightFormat("uint4", "bf16", 1, 128, 8)),
        (samples.PACKED, INT8_128, WeightFormat("uint8", "bf16", 1, 128, 128)),
        ("float-quantized", samples.FP8_CHANNEL, WeightFormat("e4m3", "bf16")),
        ("mxfp4-pack-quantized", samples.MXFP4, WeightFormat("e2m1", "e8m0", 1, 32)),
    ],
    ids=["int4-32", "int4-128", "int8-128", "fp8", "mxfp4"],
)
def test_codes_and_scales_are_those_of_compressed_tensors(name, arguments, kind):
    """Of Gaussian rows, and of rows of zeros, of very small and large ones, and of ties."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[0], weight[1, :128] = 0.0, 0.0
    weight[2], weight[3], weight[4] = weight[2] * 1e-30, weight[3] * 1e30, 1e-42
    ties = torch.tensor([0.25, -0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 6.96, -7.0])
    weight[5, :252] = ties.repeat(21).bfloat16()
    weight[6:8] = (torch.arange(512).view(2, 256) / 2 - 60).bfloat16()
    parts, values = samples.compressed(name, **arguments)("m.weight", weight.float())
    codes = parts["m.weight_packed" if "m.weight_packed" in parts else "m.weight"]
    found = quantize(weight, kind)
    assert torch.equal(found.codes, codes.view(torch.uint8))
    assert torch.equal(found.scales, parts["m.weight_scale"])
    assert torch.equal(found.dequantize(), values)


@every
def test_files_hold_what_compressed_tensors_writes(case, tmp_path):
    """All tensors to the bit, which transformers reads; logits are those of the same values."""
    expected = samples.write(case.sample, tmp_path / "expected")
    source = source_of(case.family, tmp_path / "source")
    found = pack_checkpoint(source, tmp_path / "out", quantize=case.scheme)
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(expected.folder)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    plain = tensors_of(source)
    experts = [name for name in plain if ".experts." in name]
    assert found.expert_bytes == sum(plain[name].nbytes for name in experts)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    for name in (name for name, tensor in plain.items() if tensor.ndim == 2):
        is_expert, module = ".experts." in name, name.removesuffix(".weight")
        assert matches(module, group["targets"]) is is_expert
        assert matches(module, config["ignore"]) is not is_expert
    assert found.packed_bytes == sum(ours[n].nbytes for n in ours if ".experts." in n)
    reference = AutoModelForCausalLM.from_pretrained(
        expected.plain, dtype=torch.float32, experts_implementation="eager"
    )
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    values = dict(read.named_parameters())
    for name, value in reference.named_parameters():
        assert torch.equal(values[name], value.bfloat16()), name
    model: Any = moe_runtime.load(tmp_path / "out", device="cpu", dtype="float32")
    with torch.inference_mode():
        logits, wanted = model(PROMPT).logits, reference(PROMPT).logits
    model.moe.close()
    # both compute in fp32 from the same values, and differ in how sums are ordered
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_gpt_oss_keeps_its_own_layout(tmp_path):
    """Blocks and scales of stacks, as compressed-tensors rounds; transformers reads the values."""
    source = source_of(GPT_OSS, tmp_path / "source")
    pack_checkpoint(source, tmp_path / "out", quantize="mxfp4")
    ours, plain = tensors_of(tmp_path / "out"), tensors_of(source)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    values = dict(model.named_parameters())
    pack = samples.compressed("mxfp4-pack-quantized", **samples.MXFP4)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            assert torch.equal(ours[name], tensor)
            continue
        blocks, scales = ours[f"{name}_blocks"], ours[f"{name}_scales"]
        for expert, weight in enumerate(tensor):
            parts, expected = pack("m.weight", weight.T.float().contiguous())
            assert torch.equal(blocks[expert].flatten(1), parts["m.weight_packed"])
            assert torch.equal(scales[expert], parts["m.weight_scale"])
            assert torch.equal(values[name][expert], expected.T.bfloat16())
    with torch.inference_mode():
        wanted = model.float()(PROMPT).logits
        own: Any = moe_runtime.load(tmp_path / "out", device="cpu", dtype="float32")
        logits = own(PROMPT).logits
    own.moe.close()
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_experts_that_lie_stacked_are_written_apart(tmp_path):
    """As the official FP8 checkpoints of families that stack them in bf16."""
    apart = source_of(QWEN3, tmp_path / "apart")
    stacked = source_of(QWEN3, tmp_path / "stacked", own_names=True)
    assert any(name.endswith("gate_up_proj") for name in tensors_of(stacked))
    for folder in (apart, stacked):
        pack_checkpoint(folder, tmp_path / f"{folder.name}-out", quantize="int4")
    both = [tensors_of(tmp_path / f"{name}-out") for name in ("apart", "stacked")]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def test_the_error_that_was_made_is_said(tmp_path, capsys):
    case = CASES["int4"]
    expected = samples.write(case.sample, tmp_path / "expected")
    source, out = source_of(case.family, tmp_path / "source"), tmp_path / "out"
    assert main(["pack", str(source), str(out), "--quantize", "int4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["code"], found["quantize"]) == (None, "int4")
    plain, values = tensors_of(source), tensors_of(expected.plain)
    assert len(found["errors"]) == 3 * 3
    for error in found["errors"]:
        squares = []
        for expert in range(6):
            name = f"{error['module']}.{expert}.{error['matrix']}_proj.weight"
            weight = plain[name].double()
            squares.append(((values[name] - weight).square().sum(), weight.square().sum()))
        each = [math.sqrt(of_error / of_weight) for of_error, of_weight in squares]
        whole = math.sqrt(sum(s[0] for s in squares) / sum(s[1] for s in squares))
        # sums of some 1e5 numbers in fp64
        assert error["relative_rms"] == pytest.approx(whole, rel=1e-10)
        assert error["worst_expert"] == each.index(max(each))
        assert error["worst_relative_rms"] == pytest.approx(max(each), rel=1e-10)
    assert json.loads((out / "quantized_experts.json").read_text())["errors"] == found["errors"]
    # the same folder again, which nothing but an own output may be
    assert main(["pack", str(source), str(out), "--quantize", "int4"]) == 0
    shown = capsys.readouterr().out
    assert "int4 is not lossless" in shown
    for matrix in ("gate", "up", "down"):
        own = [error for error in found["errors"] if error["matrix"] == matrix]
        shares = [error["relative_rms"] for error in own]
        assert f"{min(shares):.2%} to {max(shares):.2%}" in shown
        assert f"{max(error['worst_relative_rms'] for error in own):.2%}, expert" in shown
    (out / "letter").write_text("keep me")
    assert main(["pack", str(source), str(out), "--quantize", "fp8"]) == 2
    assert "holds letter" in capsys.readouterr().err


def test_what_cannot_be_is_one_line(tmp_path):
    source, out = source_of(OLMOE, tmp_path / "source"), tmp_path / "out"
    with pytest.raises(ValueError, match="name only one of them"):
        pack_checkpoint(source, out, "planes", "int4")
    with pytest.raises(ValueError, match="quantize must be mxfp4 or int4"):
        pack_checkpoint(source, out, quantize="int3")  # type: ignore[arg-type]
    pack_checkpoint(source, tmp_path / "int4", quantize="int4")
    with pytest.raises(UnsupportedModelError, match=r"quantising of quantised weights[^\n]*$"):
        pack_checkpoint(tmp_path / "int4", out, quantize="fp8")
    pack_checkpoint(source, tmp_path / "planes")
    with pytest.raises(UnsupportedModelError, match=r"quantising of a packed checkpoint[^\n]*$"):
        pack_checkpoint(tmp_path / "planes", out, quantize="fp8")
    narrow = replace(OLMOE, config=samples.EVEN | {"intermediate_size": 48})
    odd = source_of(narrow, tmp_path / "odd")
    with pytest.raises(UnsupportedModelError, match=r"groups of 32 columns[^\n]* 48 and 64[^\n]*$"):
        pack_checkpoint(odd, out, quantize="int8")
    gpt_oss = source_of(GPT_OSS, tmp_path / "gpt-oss")
    with pytest.raises(UnsupportedModelError, match=r"no [^\n]*in gpt_oss; [^\n]*mxfp4$"):
        pack_checkpoint(gpt_oss, out, quantize="int8")
    assert not out.exists()


def test_weights_that_are_no_numbers_are_named(tmp_path, capsys):
    source = source_of(OLMOE, tmp_path / "source")
    tensors = tensors_of(source)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name][3, 5] = float("inf")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}[^\n]*finite"):
        pack_checkpoint(source, tmp_path / "out", quantize="mxfp4")
    assert not (tmp_path / "out").exists()
    capsys.readouterr()
    assert main(["pack", str(source), str(tmp_path / "out"), "--quantize", "mxfp4"]) == 2
    said = capsys.readouterr().err
    assert name in said.splitlines()[-1]
    assert "begins again" not in said
