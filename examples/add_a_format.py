"""A format of quantised weights: which tensors are the codes and scales of which weight.

python examples/add_a_format.py

The format of this example writes a weight `X.weight` as `X.levels`, int8 `[N, K]`, and `X.step`,
fp32 `[N, 1]`: a value is a level times the step of its row. To have it loaded, put `weights_of`
into a file of `moe_runtime/checkpoints/formats` and a row of `FORMATS` beside it; CONTRIBUTING.md
has the tests that go with it.
"""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from moe_runtime.checkpoints.formats.packed_weight import (
    PackedWeight,
    Settings,
    codes_shape,
    with_scales,
)
from moe_runtime.checkpoints.safetensors_index import TensorEntry, read_header
from moe_runtime.errors import CheckpointError
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat


def weights_of(settings: Settings, entries: Mapping[str, TensorEntry]) -> Iterator[PackedWeight]:
    """The quantised weights of a checkpoint.

    Raises:
        CheckpointError: a part of one is missing or has another type or shape.
    """
    for name, codes in entries.items():
        if not name.endswith(".levels"):
            continue
        weight = name.removesuffix(".levels")
        scales = entries.get(f"{weight}.step")
        if scales is None:
            raise CheckpointError(f"{name}: expected {weight}.step beside it, found none")
        sizes = codes_shape(codes, ["I8"])
        kind = WeightFormat("int8", "f32", group_rows=1, group_cols=0)
        yield with_scales(f"{weight}.weight", codes, sizes, scales, ["F32"], kind)


def main(folder: Path) -> None:
    """Writes a file in the format, finds its weight, and multiplies by it."""
    torch.manual_seed(0)
    weight_NK = torch.randn(64, 128)
    step_N1 = weight_NK.abs().amax(dim=1, keepdim=True) / 127
    levels_NK = (weight_NK / step_N1).round().to(torch.int8)
    save_file({"proj.levels": levels_NK, "proj.step": step_N1}, folder / "model.safetensors")

    (found,) = weights_of(Settings({}), read_header(folder / "model.safetensors"))
    print(f"{found.name}: {found.num_rows} x {found.num_cols}, {found.format.codes}")

    matrix = QuantizedMatrix(found.format, 128, levels_NK.view(torch.uint8), step_N1)
    error = (matrix.dequantize(torch.float32) - weight_NK).abs().max() / step_N1.max()
    print(f"largest error in steps: {error:.2f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
