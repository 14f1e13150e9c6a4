"""Rows of quantised weights: which scales are theirs, wherever a model cuts a stack."""

import itertools

import pytest
import quantized_checkpoints
import torch
import weight_packers
from safetensors.torch import save_file
from torch import Tensor

from moe_runtime.checkpoints.formats import PackedWeight, packed_weights
from moe_runtime.checkpoints.safetensors_index import read_header
from moe_runtime.errors import UnsupportedModelError

SIZES = (3, 40, 24)
BLOCK = 16


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackedWeight, Tensor]:
    """Three matrices of 40 x 24 in blocks of 16 x 16, and their values."""
    file = tmp_path_factory.mktemp("stack") / "model.safetensors"
    pack = quantized_checkpoints.fp8_block(torch.bfloat16, BLOCK)
    parts = [pack("w", matrix) for matrix in torch.randn(SIZES)]
    stored = {name: torch.stack([tensors[name] for tensors, _ in parts]) for name in parts[0][0]}
    save_file(stored, file)
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    weight = packed_weights(config, read_header(file))["w"]
    return weight, torch.cat([values for _, values in parts])


def rows_of(weight: PackedWeight, first: int, step: int, count: int) -> Tensor:
    raw = bytearray(weight.codes.file.read_bytes())
    parts = {}
    for name, part in weight.ranges(first, step, count).items():
        flat = torch.frombuffer(raw[part.offset : part.offset + part.span_bytes], dtype=torch.uint8)
        parts[name] = flat.view(part.dtype).as_strided(part.shape, part.stride)
    return weight.packing.matrix(parts).dequantize()


def test_any_rows_have_their_own_scales_or_are_refused(stack):
    weight, values = stack
    outcomes = set()
    for first, step, count in itertools.product(range(0, 120, 8), (1, 2, 3), (1, 5, 8, 24)):
        row, last = first % 40, first % 40 + (count - 1) * step
        is_served = last < 40 and (
            row // BLOCK == last // BLOCK or (row % BLOCK == 0 and step == 1)
        )
        outcomes.add(is_served)
        if is_served:
            expected = values[first : first + (count - 1) * step + 1 : step]
            assert torch.equal(rows_of(weight, first, step, count), expected)
        else:
            with pytest.raises(UnsupportedModelError, match="begin with a group of 16"):
                weight.ranges(first, step, count)
    assert outcomes == {True, False}


@pytest.mark.parametrize("most_elements", [1, 24, 24 * 7, 24 * 16, 24 * 33, 24 * 1000])
def test_pieces_are_all_rows_once(stack, most_elements):
    weight, values = stack
    found, largest = values_in_pieces(weight, most_elements)
    assert torch.equal(found, values)
    assert largest <= max(24, most_elements)


def values_in_pieces(weight: PackedWeight, most_elements: int) -> tuple[Tensor, int]:
    """The values of all pieces, each where it belongs, and the elements of the largest."""
    values, largest = torch.full((weight.total_rows, weight.num_cols), torch.nan), 0
    raw = bytearray(weight.codes.file.read_bytes())
    for rows, ranges in weight.pieces(most_elements):
        parts = {}
        for name, part in ranges.items():
            stored = raw[part.offset : part.offset + part.span_bytes]
            parts[name] = part.view(torch.frombuffer(stored, dtype=torch.uint8))
        piece = values[rows]
        assert piece.isnan().all(), "a piece twice"
        values[rows] = weight.packing.matrix(parts).dequantize()
        largest = max(largest, piece.numel())
    return values, largest


ORDERS = {
    "gptq": (weight_packers.gptq(4, 24, version=1), {"bits": 4, "group_size": 24}),
    "gptq-int8": (weight_packers.gptq(8, 20, version=1), {"bits": 8, "group_size": 20}),
    "gptq-rows": (weight_packers.gptq(8, -1, version=1), {"bits": 8, "group_size": -1}),
    "awq": (weight_packers.awq(24), {"bits": 4, "group_size": 24}),
    "compressed-tensors": (
        quantized_checkpoints.int4(**quantized_checkpoints.INT4_ZEROS),
        quantized_checkpoints.groups(
            (["Linear"], "pack-quantized", quantized_checkpoints.INT4_ZEROS)
        ),
    ),
}
"""Ways in which numbers lie in another order, each with its packer and configuration."""


@pytest.mark.parametrize("name", ORDERS)
def test_weights_in_another_order_have_their_values(tmp_path, name):
    """`[40, 60]`: the last group is shorter, and groups of 20 are not a multiple of eight."""
    pack, config = ORDERS[name]
    stored, values = pack("w.weight", torch.randn(40, 60 if name != "awq" else 64))
    save_file(stored, tmp_path / "model.safetensors")
    method = {"quant_method": name.partition("-")[0]} | config
    weight = packed_weights(method, read_header(tmp_path / "model.safetensors"))["w.weight"]
    assert torch.equal(values_in_pieces(weight, 700)[0], values)
    with pytest.raises(UnsupportedModelError, match="in tensors of its own"):
        weight.ranges(8, 1, 8)
