"""GPTQ and AWQ as their own packers write them.

`data/gptq_awq_packers.npz` has what `pack_original` and `dequantize_weight` of GPTQModel (git
f4c327a17, with its conversion to version 1) and `WQLinear_GEMM.from_linear` and `dequantize_gemm`
of AutoAWQ (git 88e4c76b2) make of random matrices of 64 x 64, whose first row has no negative
number and whose last row no positive one: their zero points are extremes. Values are in fp16.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_runtime.checkpoints.dense_weights import read_matrix
from moe_runtime.checkpoints.formats import packed_weights
from moe_runtime.checkpoints.safetensors_index import read_header

PACKED = Path(__file__).parent / "data" / "gptq_awq_packers.npz"
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FOUR, EIGHT = {"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 64}


class WholeFiles:
    """Reads what a reader of dense weights reads."""

    def bytes_of(self, name: str, file: Path, offset: int, num_bytes: int) -> Tensor:
        del name
        found = bytearray(file.read_bytes()[offset : offset + num_bytes])
        return torch.frombuffer(found, dtype=torch.uint8)

    def report(self, weight: Any) -> None:
        """Nobody waits for it."""


@pytest.mark.parametrize(
    ("name", "zeros", "config"),
    [
        ("gptq4", "gptq4_v1_qzeros", GPTQ | FOUR),
        ("gptq4", "gptq4_qzeros", GPTQ | FOUR | {"checkpoint_format": "gptq_v2"}),
        ("gptq8", "gptq8_v1_qzeros", GPTQ | EIGHT | {"checkpoint_format": "gptq"}),
        ("gptq8", "gptq8_qzeros", GPTQ | EIGHT | {"checkpoint_format": "gptq_v2"}),
        ("awq", "awq_qzeros", AWQ),
    ],
)
def test_the_values_are_those_of_the_formats_own_tools(name, zeros, config, tmp_path):
    parts: dict[str, Tensor] = {}
    with np.load(PACKED) as found:
        for part in ("qweight", "scales", "g_idx"):
            if f"{name}_{part}" in found:
                parts[f"w.{part}"] = torch.from_numpy(found[f"{name}_{part}"])
        parts["w.qzeros"] = torch.from_numpy(found[zeros])
        values = torch.from_numpy(found[f"{name}_values"])
    save_file(parts, tmp_path / "model.safetensors")
    (weight,) = packed_weights(config, read_header(tmp_path / "model.safetensors")).values()
    reader: Any = WholeFiles()
    # codes less zero points have nine bits and scales eleven: products are exact until fp16
    assert torch.equal(read_matrix(reader, weight).dequantize().half(), values)
