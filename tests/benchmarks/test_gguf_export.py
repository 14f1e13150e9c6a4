from pathlib import Path

import numpy as np
import pytest
from harness.gguf_export import write_gguf
from harness.safetensors_files import locate_tensors
from harness.shapes import Shape

gguf = pytest.importorskip("gguf", reason="extra peers is not installed")


def test_file_holds_the_checkpoints_weights(shape: Shape, checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    write_gguf(shape, checkpoint, target)
    assert sorted(tmp_path.iterdir()) == [target]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(target).tensors}
    places = locate_tensors(checkpoint)

    up = tensors["blk.1.ffn_up_exps.weight"]
    assert up.tensor_type == gguf.GGMLQuantizationType.BF16
    assert up.shape.tolist() == [shape.model_width, shape.expert_width, shape.num_experts]
    for expert in range(shape.num_experts):
        place = places[f"model.layers.1.mlp.experts.{expert}.up_proj.weight"]
        stored = up.data[expert].view(np.uint16)
        np.testing.assert_array_equal(stored, place.read_bfloat16_bits())

    router = tensors["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type == gguf.GGMLQuantizationType.F32
    bits = places["model.layers.0.mlp.gate.weight"].read_bfloat16_bits()
    np.testing.assert_array_equal(router.data.view(np.uint32), bits.astype(np.uint32) << 16)

    num_values = sum(int(tensor.n_elements) for tensor in tensors.values())
    assert 2 * num_values == shape.total_bytes
