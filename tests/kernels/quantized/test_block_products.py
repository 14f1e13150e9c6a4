"""`grouped_gemm` with weights in ggml's blocks: the Triton kernels against the values."""

import pytest
import torch
from low_precision import UNIT_ROUNDOFF
from quantized_matrices import BLOCK_FORMATS, HALVES, random_stack
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.grouped_gemm.packed import BLOCKS_READ
from moe_runtime.kernels.quantized import BLOCKS, QuantizedStack, WeightFormat

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP16_SCALES = (1.0, 0.75, -3.0, 2.0**-14, 2.0**-24, 0.0, 1000.0, 0.0999, 1 / 3)


def product(x: Tensor, stack: QuantizedStack, counts: list[int], **options: object) -> Tensor:
    offsets = torch.tensor([0, *counts]).cumsum(0).to(DEVICE)
    codes = QuantizedStack(stack.format, stack.num_cols, stack.codes.to(DEVICE))
    return grouped_gemm(x.to(DEVICE), codes, offsets, impl="triton", **options).cpu()  # type: ignore[arg-type]


def minima_of(stack: QuantizedStack, slot: int) -> Tensor:
    """What is subtracted from each scaled code: the values of the same blocks with codes 0."""
    kind, codes = stack.format, stack.codes[slot].clone()
    if not kind.has_minima:
        return torch.zeros(stack.shape[1:])
    blocks = codes.view(len(codes), -1, kind.block_bytes)
    blocks[..., 4 if kind.codes == "q4_1" else 16 :] = 0
    values = QuantizedStack(kind, stack.num_cols, codes[None]).matrix(0).dequantize()
    return -values


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", BLOCKS_READ)
def test_odd_sizes_against_the_values(name, generator):
    """Rows that no tile divides, an expert without rows, one left out, one in another slot."""
    num_rows, num_cols = 45, 3 * BLOCKS[name].num_codes
    stack = random_stack(BLOCK_FORMATS[name], 4, num_rows, num_cols, generator)
    counts, slots = [3, 0, 17, 1], [2, 1, 0, -1]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(sum(counts), num_cols, generator=generator).to(dtype)
        bias = torch.randn(4, num_rows, generator=generator)
        table = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        found = product(x, stack, counts, slot_of_expert=table, bias_SN=bias.to(DEVICE))
        assert (found[20:] == 0).all()
        for slot, rows in ((2, slice(0, 3)), (0, slice(3, 20))):
            weight, own = stack.matrix(slot).dequantize().double(), x[rows].double()
            exact = own @ weight.T + bias[slot].double()
            # K roundings of the sum of magnitudes and two for scales; where minima are subtracted,
            # scaled codes and minima are summed apart, and neither is larger than |w| + 2 |m|
            parts = weight.abs() + 2 * minima_of(stack, slot).abs()
            magnitude = own.abs() @ parts.T + bias[slot].abs()
            allowed = (num_cols + 4) * 2.0**-24 * magnitude
            allowed += UNIT_ROUNDOFF[dtype] * exact.abs()
            assert ((found[rows].double() - exact).abs() <= allowed).all()


def every_code(name: str) -> Tensor:
    """Blocks `[rows, bytes of a row]` in which every code is under every scale and minimum.

    Of blocks with scales of their own within, each row has other ones.
    """
    size = BLOCKS[name]
    halves = torch.tensor(FP16_SCALES).half()
    num_rows = 256 if name == "mxfp4_block" else 63
    each = 2 if size.num_codes == 32 else 1
    blocks = torch.arange(num_rows * each * size.num_bytes) * 37 % 251
    blocks = blocks.to(torch.uint8).view(num_rows, each, size.num_bytes)
    own = size.num_bytes - size.num_codes // (1 if name == "q8_0" else 2)
    if size.num_codes == 32:
        steps = torch.arange(size.num_bytes - own)
        blocks[:, 0, own:] = (steps * 17 if len(steps) == 16 else steps * 8).to(torch.uint8)
        blocks[:, 1, own:] = (steps * 15 + 3 if len(steps) == 16 else 255 - steps).to(torch.uint8)
    if name == "mxfp4_block":
        blocks[:, :, 0] = torch.arange(256, dtype=torch.uint8)[:, None]
    rows = torch.arange(num_rows)
    for turn, place in enumerate(HALVES.get(name, ())):
        chosen = halves[(rows // (len(halves) if turn else 1)) % len(halves)]
        blocks[:, :, place : place + 2] = chosen.view(torch.uint8).view(num_rows, 1, 2)
    return blocks.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS_READ)
def test_codes_under_scales_give_their_values(name, dtype):
    """Rows of the unit matrix give the weights themselves, to the bit: nothing else is added."""
    codes = every_code(name)
    kind = WeightFormat(name)  # type: ignore[arg-type]
    num_cols = codes.shape[1] // kind.block_bytes * kind.block_codes
    stack = QuantizedStack(kind, num_cols, codes[None])
    values = stack.matrix(0).dequantize()
    assert not values.isnan().any()
    if name == "mxfp4_block":
        # a sum that overflows is no sum: infinity times zero is none
        is_finite = values.isfinite().all(1)
        assert is_finite.sum() > 250
        stack = QuantizedStack(kind, 64, codes[None, is_finite])
        values = values[is_finite]
    found = product(torch.eye(stack.num_cols, dtype=dtype), stack, [stack.num_cols])
    assert torch.equal(found, values.T.to(dtype))


def test_blocks_that_no_kernel_decodes_are_refused(generator):
    stack = random_stack(BLOCK_FORMATS["iq4_xs"], 1, 24, 256, generator)
    with pytest.raises(ValueError, match="cannot read"):
        product(torch.zeros(2, 256), stack, [2])
