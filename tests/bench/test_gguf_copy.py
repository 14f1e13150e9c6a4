import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from moe_runtime.benchmarks.synthetic import model_shapes
from moe_runtime.benchmarks.synthetic.gguf_files import write_gguf

gguf = pytest.importorskip("gguf", reason="extra peers is not installed")


def test_file_holds_the_checkpoints_weights(shape, checkpoint, tmp_path):
    target = tmp_path / "model.gguf"
    write_gguf(shape, checkpoint, target)
    assert sorted(tmp_path.iterdir()) == [target]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    places = model_shapes.locate_tensors(checkpoint)

    up = tensors["blk.1.ffn_up_exps.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.BF16
    assert up.shape.tolist() == [shape.model_width, shape.expert_width, shape.num_experts]
    for expert in range(shape.num_experts):
        place = places[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        stored = up.data[expert].view(np.uint16)
        np.testing.assert_array_equal(stored, place.read_bits())

    router = tensors["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    bits = places["model.layers.0.mlp.gate.weight"].read_bits()
    np.testing.assert_array_equal(router.data.view(np.uint32), bits.astype(np.uint32) << 16)

    num_values = sum(int(tensor.n_elements) for tensor in tensors.values())
    assert 2 * num_values == shape.total_bytes


def test_experts_of_gpt_oss_keep_their_codes(tmp_path):
    """By gguf's own dequantiser; rows of gate and up lie apart."""
    shape = model_shapes.make_shape(
        "gpt_oss", "gpt-oss-test", 2, 3, 2, 64, 32, 2, 320, 20_000, 1, 32
    )
    model_shapes.write_checkpoint(shape, tmp_path / "model", seed=3)
    write_gguf(shape, tmp_path / "model", tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    places = model_shapes.locate_tensors(tmp_path / "model")

    stem = "model.layers.1.mlp.experts.gate_up_proj"
    pairs = places[f"{stem}_blocks"].read_bits()
    exponents = places[f"{stem}_scales"].read_bits().astype(int) - 127
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack((pairs & 15, pairs >> 4), -1).reshape(*pairs.shape[:-1], 32)
    values = np.where(codes & 8, -1, 1) * magnitudes[codes & 7] * 2.0 ** exponents[..., None]
    values = values.reshape(3, 64, 64)
    for first, name in enumerate(("gate", "up")):
        tensor = tensors[f"blk.1.ffn_{name}_exps.weight"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.MXFP4
        assert tensor.shape.tolist() == [64, 32, 3]
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(3, 32, 64)
        np.testing.assert_array_equal(found, values[:, first::2])
        bits = places[f"{stem}_bias"].read_bits()[:, first::2].astype(np.uint32) << 16
        np.testing.assert_array_equal(
            tensors[f"blk.1.ffn_{name}_exps.bias"].data.view(np.uint32), bits
        )
    assert tensors["blk.0.attn_sinks.weight"].shape.tolist() == [2]
    assert tensors["blk.0.post_attention_norm.weight"].shape.tolist() == [64]


def test_fp8_in_blocks_becomes_q8_0(tmp_path):
    """Within half a step of Q8_0, whose step is the largest magnitude of 32 values over 127."""
    sizes = {"num_layers": 1, "num_experts": 4, "vocab_size": 512}
    shape = replace(model_shapes.SHAPES["qwen3-tiny-fp8"], **sizes)
    model_shapes.write_checkpoint(shape, tmp_path / "model", seed=5)
    write_gguf(shape, tmp_path / "model", tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "qwen3moe"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights, scales = (
        tensor_of(tmp_path / "model", f"model.layers.0.mlp.experts.3.down_proj.{name}")
        for name in ("weight", "weight_scale_inv")
    )
    blocks = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    expected = (weights.float() * blocks).numpy()
    tensor = tensors["blk.0.ffn_down_exps.weight"]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
    found = gguf.quants.dequantize(tensor.data[3], tensor.tensor_type)
    steps = np.abs(expected).reshape(len(expected), -1, 32).max(-1).repeat(32, -1) / 127
    # up to 127 steps, each rounded to fp16 (2^-25 where that is subnormal), and half a step
    assert (np.abs(found - expected) <= 127 * np.maximum(steps / 2**11, 2**-25) + steps / 2).all()
    assert tensors["output.weight"].tensor_type == gguf.GGMLQuantizationType.Q8_0
    assert tensors["blk.0.attn_q_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def tensor_of(folder: Path, name: str) -> torch.Tensor:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with safe_open(folder / index["weight_map"][name], "pt") as file:
        return file.get_tensor(name)
