"""Integers in groups: what of them is refused, and in which words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import quantized_checkpoints
import torch
from changed_checkpoints import EXPERT, Originals, changed, mapped, matrices_of_expert, refusal
from quantized_checkpoints import EXPERTS, Quantized
from torch import Tensor

from moe_runtime.errors import MoERuntimeError, UnsupportedModelError
from moe_runtime.types import ExpertKey


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Originals(tmp_path_factory.mktemp("integers"))


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"symmetric": False}, "expected a part of"),
        ({"symmetric": False, "strategy": "tensor"}, "strategy 'tensor' with zero points"),
        ({"actorder": "group"}, "actorder of groups cannot be read yet"),
        ({"type": "float"}, "type 'float' cannot be read yet"),
        ({"group_size": 64}, "expected BF16 or F32 or F16"),
        ({"group_size": None}, "expected group_size to be there"),
        ({"strategy": "token"}, "strategy 'token' cannot be read yet"),
    ],
)
def test_what_the_configuration_says_of_integers_is_judged(originals, tmp_path, weights, words):
    config = quantized_checkpoints.groups(
        (["Linear"], "pack-quantized", quantized_checkpoints.INT4_32 | weights)
    )
    folder = changed(originals("deepseek_v3-int4"), tmp_path, **config)
    assert words in refusal(folder, MoERuntimeError)


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight_g_idx"])
def test_zero_points_of_symmetric_integers_and_permuted_groups_are_refused(
    originals, tmp_path, suffix
):
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.{suffix}"] = torch.zeros(8, 2, dtype=torch.int32)

    folder = changed(originals("deepseek_v3-int4"), tmp_path, add)
    assert f"{EXPERT}.{suffix}" in refusal(folder, MoERuntimeError)


def test_experts_whose_codes_differ_by_a_sign_are_refused(originals, tmp_path):
    """Both are int8 with the same scales, and codes of one are no codes of the other."""

    def repack(tensors: dict[str, Tensor]) -> None:
        codes = tensors.pop(f"{EXPERT}.weight")
        shape = torch.tensor(codes.shape)
        tensors[f"{EXPERT}.weight_packed"] = (codes ^ -128).view(torch.int32)
        tensors[f"{EXPERT}.weight_shape"] = shape

    int8 = quantized_checkpoints.INT8_CHANNEL
    sample = Quantized(
        "olmoe-int8",
        quantized_checkpoints.Family("olmoe", "OlmoeForCausalLM", quantized_checkpoints.EVEN),
        quantized_checkpoints.groups(
            (["Linear"], "int-quantized", int8), ([EXPERT], "pack-quantized", int8)
        ),
        {EXPERTS: quantized_checkpoints.compressed("int-quantized", **int8)},
    )
    original = quantized_checkpoints.write(sample, tmp_path / "original").folder
    folder = changed(original, tmp_path / "changed", repack)
    assert "expected one type for all experts" in refusal(folder, UnsupportedModelError)


def test_biases_of_two_types_in_an_expert_are_refused(originals, tmp_path):
    def widen(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.0.mlp.experts.down_proj_bias"
        tensors[name] = tensors[name].float()

    folder = changed(originals("gpt_oss-mxfp4"), tmp_path, widen)
    message = refusal(folder, UnsupportedModelError)
    assert "up_bias is bfloat16 and down_bias is float32; expected one type" in message


@pytest.mark.parametrize(
    ("sample", "config", "words"),
    [
        ("qwen3_moe-gptq", {"bits": 3}, "bits 3 cannot be read yet; expected 4 or 8"),
        (
            "qwen3_moe-gptq",
            {"bits": 8},
            "qzeros: expected 12 words, 48 zero points of 8 bits, found 6, as of 4",
        ),
        ("qwen3_moe-gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' cannot"),
        ("qwen3_moe-gptq", {"dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic with settings"),
        ("qwen3_moe-gptq", {"group_size": 16}, "those of groups of 1 x 32, not of 1 x 16; correct"),
        ("glm4_moe-awq", {"bits": 8}, "bits 8 cannot be read yet; expected 4"),
        ("glm4_moe-awq", {"version": "gemv"}, "version 'gemv' cannot be read yet"),
    ],
)
def test_what_the_configuration_says_of_gptq_and_awq_is_judged(
    originals, tmp_path, sample, config, words
):
    folder = changed(originals(sample), tmp_path, **config)
    assert words in refusal(folder, MoERuntimeError)


def test_zero_points_of_awq_are_read_where_there_are_some(originals, tmp_path):
    """GPTQModel writes `zero_point: false` beside those of symmetric codes."""

    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qzeros")]:
            del tensors[name]

    original = originals("glm4_moe-awq")
    folder = changed(original, tmp_path / "symmetric", zero_point=False)
    expected = matrices_of_expert(original, ExpertKey(1, 3))
    for name, matrix in matrices_of_expert(folder, ExpertKey(1, 3)).items():
        assert torch.equal(matrix.dequantize(), expected[name].dequantize())
    without = changed(folder, tmp_path / "without", remove, zero_point=False)
    assert "zero_point False cannot be read yet" in refusal(without, MoERuntimeError)


def test_groups_of_gptq_that_are_in_order_are_read_whatever_the_configuration_says(
    originals, tmp_path
):
    mapped(changed(originals("qwen3_moe-gptq"), tmp_path, desc_act=True))


def test_gptq_without_the_groups_of_columns_is_read_unless_they_may_be_permuted(
    originals, tmp_path
):
    """Where every column has a code: K is a multiple of what a word holds."""

    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".g_idx")]:
            del tensors[name]

    original = originals("deepseek_v3-gptq-int8")
    folder = changed(original, tmp_path / "without", remove)
    expected = matrices_of_expert(original, ExpertKey(1, 3))
    for name, matrix in matrices_of_expert(folder, ExpertKey(1, 3)).items():
        assert torch.equal(matrix.dequantize(), expected[name].dequantize())
    permuted = changed(folder, tmp_path / "permuted", desc_act=True)
    assert "desc_act of" in refusal(permuted, MoERuntimeError)


def test_budgets_count_what_takes_memory_beside_the_bytes_of_the_file(originals):
    """Codes that are copied aside while they are put in order, and a byte for each zero point."""
    gptq, zeros = (mapped(originals(name)) for name in ("qwen3_moe-gptq", "qwen3_moe-int4-zeros"))
    # 48 columns of 36 rows, or 36 of 48, in words of eight codes
    assert gptq.scratch_bytes == max(48 // 8 * 36, -(-36 // 8) * 48) * 4
    assert zeros.scratch_bytes == 0
    for experts, group in ((gptq, 32), (zeros, 12)):
        for layout in experts.layouts.values():
            num_zeros = 2 * 36 * -(-48 // group) + 48 * -(-36 // group)
            assert layout.slot_bytes >= num_zeros + sum(e.num_bytes for e in layout.extents)
