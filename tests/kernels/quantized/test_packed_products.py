"""`grouped_gemm` with quantised weights: the Triton kernels against the values of the format."""

from dataclasses import replace

import pytest
import torch
from low_precision import UNIT_ROUNDOFF
from quantized_matrices import (
    AWQ,
    BLOCK_FORMATS,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    GPTQ8,
    HALVES,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    NVFP4_DIVIDED,
    random_stack,
)
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.grouped_gemm.packed import BLOCKS_READ
from moe_runtime.kernels.quantized import BLOCKS, QuantizedStack, WeightFormat
from moe_runtime.kernels.token_sort import token_sort

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT4_128 = WeightFormat("uint4", "bf16", group_cols=128, zero=8)
INT4_64_ZEROS = WeightFormat("uint4", "bf16", group_cols=64, has_zero_points=True)
FP8_BLOCK_BF16 = WeightFormat("e4m3", "bf16", group_rows=128, group_cols=128)
FORMATS = {
    "mxfp4": MXFP4,
    "fp8-block": FP8_BLOCK,
    "fp8-block-bf16": FP8_BLOCK_BF16,
    "fp8-channel": FP8_CHANNEL,
    "fp8-tensor": FP8_TENSOR,
    "mxfp8": MXFP8,
    "int4-32": INT4,
    "int4-64-zeros": INT4_64_ZEROS,
    "int4-128": INT4_128,
    "awq": AWQ,
    "int8": INT8,
    "gptq8": GPTQ8,
    "nvfp4": NVFP4,
    "nvfp4-divided": NVFP4_DIVIDED,
    **{name: BLOCK_FORMATS[name] for name in BLOCKS_READ},
}


def moved(stack: QuantizedStack) -> QuantizedStack:
    if DEVICE == "cpu":
        return stack
    parts = (stack.codes, stack.scales, stack.zero_points, stack.global_scale)
    every = (None if part is None else part.to(DEVICE) for part in parts)
    return QuantizedStack(stack.format, stack.num_cols, *every)  # type: ignore[arg-type]


def product(x: Tensor, stack: QuantizedStack, counts: list[int], **options: object) -> Tensor:
    offsets = torch.tensor([0, *counts]).cumsum(0).to(DEVICE)
    return grouped_gemm(x.to(DEVICE), moved(stack), offsets, impl="triton", **options).cpu()  # type: ignore[arg-type]


def minima_of(stack: QuantizedStack, slot: int) -> Tensor:
    """What is subtracted from each scaled code: the values of the same blocks with codes 0."""
    kind, codes = stack.format, stack.codes[slot].clone()
    if not kind.has_minima:
        return torch.zeros(stack.shape[1:])
    blocks = codes.view(len(codes), -1, kind.block_bytes)
    blocks[..., 4 if kind.codes == "q4_1" else 16 :] = 0
    return -QuantizedStack(kind, stack.num_cols, codes[None]).matrix(0).dequantize()


def assert_only_rounded(
    found: Tensor, x: Tensor, weight: Tensor, what: str = "", *, minima: Tensor | float = 0.0
) -> None:
    """Holds `x @ weight.T` to what rounding a sum of fp32 can do, and to one of the result.

    A sum of K products, in any order, is wrong by at most K roundings of fp32 of the sum of their
    magnitudes; each product has up to three more where scales multiply it, and the result one of
    its own type. Where minima are subtracted, scaled codes and minima are summed apart, and neither
    is larger than |w| + 2 |m|.
    """
    exact = x.double() @ weight.double().T
    parts = weight.double().abs() + 2 * torch.as_tensor(minima).double().abs()
    magnitude = x.double().abs() @ parts.T
    allowed = (x.shape[1] + 4) * 2.0**-24 * magnitude + UNIT_ROUNDOFF[found.dtype] * exact.abs()
    assert ((found.double() - exact).abs() <= allowed).all(), what


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", FORMATS)
def test_odd_sizes_against_the_values(name, generator):
    """Ragged groups and blocks, an expert without rows, one left out, one in another slot."""
    kind = FORMATS[name]
    num_rows, num_cols = (45, 3 * kind.block_codes) if kind.block_codes else (141, 173)
    stack = random_stack(kind, 4, num_rows, num_cols, generator)
    counts, slots = [3, 0, 17, 1], [2, 1, 0, -1]
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(sum(counts), num_cols, generator=generator).to(dtype)
        bias = torch.randn(4, num_rows, generator=generator)
        table = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
        found = product(x, stack, counts, slot_of_expert=table, bias_SN=bias.to(DEVICE))
        assert (found[20:] == 0).all()
        for slot, rows in ((2, slice(0, 3)), (0, slice(3, 20))):
            # the bias is one more column, of rows that are 1 there
            own = torch.nn.functional.pad(x[rows].float(), (0, 1), value=1.0)
            weight = torch.cat((stack.matrix(slot).dequantize(), bias[slot, :, None]), dim=1)
            minima = torch.nn.functional.pad(minima_of(stack, slot), (0, 1))
            assert_only_rounded(found[rows], own, weight, name, minima=minima)


@pytest.mark.usefixtures("poisoned_memory")
def test_many_rows_of_even_sizes(generator):
    """The widest tiles, without masks; gathered rows, written back in the order of the choices."""
    for name in ("mxfp4", "fp8-block", "int4-64-zeros", "nvfp4"):
        stack = random_stack(FORMATS[name], 2, 256, 256, generator)
        ids = torch.randint(0, 2, (150, 2), generator=generator)
        order = token_sort(ids.to(DEVICE), 2, impl="reference")
        x = torch.randn(150, 256, generator=generator).bfloat16()
        found = grouped_gemm(
            x.to(DEVICE), moved(stack), order.offsets_E1,
            sorted_tokens=order, gathers_choices=2, scatters=True, impl="triton",
        ).cpu()  # fmt: skip
        for expert in range(2):
            rows = (ids.flatten() == expert).nonzero()[:, 0]
            weight = stack.matrix(expert).dequantize()
            assert_only_rounded(found[rows], x[rows // 2], weight, name)


def every_code(kind: WeightFormat, scales: Tensor) -> QuantizedStack:
    """One matrix that has every code under each scale: a row a scale, groups of every code."""
    codes = torch.arange(256, dtype=torch.uint8).expand(1, len(scales), -1).clone()
    num_cols = 256 * 8 // kind.bits
    groups = kind.scales_shape(len(scales), num_cols)[1]
    zeros = None
    if kind.has_zero_points:
        zeros = torch.arange(len(scales), dtype=torch.uint8)[None, :, None].expand(1, -1, groups)
        zeros = zeros.contiguous()
    repeated = scales[None, :, None].expand(1, -1, groups).contiguous()
    return QuantizedStack(kind, num_cols, codes, repeated, zeros)


E8M0 = torch.tensor([0, 1, 2, 7, 126, 127, 128, 200, 252], dtype=torch.uint8)
FP16 = torch.tensor([1.0, 0.75, -3.0, 2.0**-14, 2.0**-24, 0.0, 1000.0, 0.0999, 1 / 3]).half()


CODES = [
    (MXFP4, E8M0),
    (MXFP8, E8M0[3:8]),
    (FP8_CHANNEL, FP16.bfloat16()),
    # beyond the largest number, versions of torch differ: some give NaN
    (
        WeightFormat("e4m3", "e4m3", group_cols=16),
        FP16.clamp(max=448).to(torch.float8_e4m3fn),
    ),
    (INT4, FP16.bfloat16()),
    (AWQ, FP16),
    (GPTQ8, FP16),
    (INT8, FP16.bfloat16()),
]


@pytest.mark.parametrize(
    ("kind", "scales", "dtype"),
    [
        # each format in one type, half of them in either
        pytest.param(*codes, dtype, marks=[pytest.mark.long] * ((place + turn) % 2))
        for place, codes in enumerate(CODES)
        for turn, dtype in enumerate((torch.bfloat16, torch.float32))
    ],
    ids=lambda value: f"{value.codes}-{value.scales}" if isinstance(value, WeightFormat) else None,
)
def test_every_code_under_every_scale(kind, scales, dtype):
    """Rows of the unit matrix give the weights themselves, to the bit: nothing else is added.

    Subnormal codes and scales, the smallest power of two, scale 0 and negative zeros among them.
    """
    stack = every_code(kind, scales)
    values = stack.matrix(0).dequantize()
    is_nan = values.isnan().any(0)
    codes = stack.codes
    if kind.codes == "e4m3":
        # NaN is tested by itself: a row of the weights that has one gives nothing else
        codes[codes & 127 == 127] = 0
        assert is_nan.sum() == 2
        values = stack.matrix(0).dequantize()
    found = product(torch.eye(stack.num_cols, dtype=dtype), stack, [stack.num_cols])
    assert torch.equal(found, values.T.to(dtype))


def every_code_of_blocks(name: str) -> Tensor:
    """Blocks `[rows, bytes of a row]` in which every code is under every scale and minimum.

    Of blocks with scales of their own within, each row has other ones.
    """
    size = BLOCKS[name]
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
        chosen = FP16[(rows // (len(FP16) if turn else 1)) % len(FP16)]
        blocks[:, :, place : place + 2] = chosen.view(torch.uint8).view(num_rows, 1, 2)
    return blocks.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS_READ)
def test_every_code_of_blocks_under_scales(name, dtype):
    """As above: rows of the unit matrix give the weights themselves, to the bit."""
    codes, kind = every_code_of_blocks(name), BLOCK_FORMATS[name]
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


@pytest.mark.parametrize(
    ("factor", "dtype"),
    [
        pytest.param(factor, dtype, marks=[pytest.mark.long] * (place != turn))
        for place, factor in enumerate((2.0**-5, 1 / 3, 0.00123))
        for turn, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16))
    ],
)
def test_every_code_under_every_scale_of_nvfp4(factor, dtype):
    """All codes under all scales of fp8 but NaN; the global scale rounds once, at the end.

    The specification rounds scale times global scale too: a factor that is a power of two gives
    its bits, others those of the exact product.
    """
    scales = torch.arange(256).to(torch.uint8)
    scales = scales[scales & 127 != 127].view(torch.float8_e4m3fn)
    global_scale = torch.tensor([[factor]])
    low = torch.arange(0, 16, 2)
    codes = torch.cat((low | (low + 1) << 4, (low + 1) | low << 4)).to(torch.uint8)
    for kind in (NVFP4, NVFP4_DIVIDED):
        plain = QuantizedStack(
            replace(kind, global_scale="none"),
            32,
            codes.expand(1, len(scales), -1).contiguous(),
            scales[None, :, None].expand(1, -1, 2).contiguous(),
        )
        stack = replace(plain, format=kind, global_scale=global_scale)
        found = product(torch.eye(stack.num_cols, dtype=dtype), stack, [stack.num_cols])
        values = plain.matrix(0).dequantize().double()
        wide = global_scale.double()
        exact = (values * wide if kind is NVFP4 else values / wide).float()
        assert torch.equal(found, exact.T.to(dtype))
        if factor == 2.0**-5:
            assert torch.equal(exact, stack.matrix(0).dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_stays_none(dtype, generator):
    """A scale of 255 and the codes 127 and 255 of fp8 reach the rows of the weights they are of."""
    for kind in (MXFP4, MXFP8):
        stack = random_stack(kind, 1, 40, 96, generator)
        stack.scales[0, 5, 1] = 255
        if kind is MXFP8:
            stack.codes[0, 7, 3], stack.codes[0, 8, 95] = 127, 255
        expected = stack.matrix(0).dequantize().isnan().any(1)
        assert expected.sum() == (1 if kind is MXFP4 else 3)
        x = torch.randn(20, 96, generator=generator).to(dtype)
        found = product(x, stack, [20])
        assert torch.equal(found.isnan(), expected.expand(20, -1))


def test_fp16_rows(generator):
    """No power of two is multiplied into a tile that lacks the exponents for it."""
    stack = random_stack(MXFP4, 1, 48, 64, generator)
    stack.scales[0, 3] = 127 - 30
    x = torch.randn(4, 64, generator=generator).half()
    # 2 ** -24 is the smallest number of the result: half of it is lost below the normal ones
    found, weight = product(x, stack, [4]), stack.matrix(0).dequantize()
    exact = x.double() @ weight.double().T
    assert ((found.double() - exact).abs() <= 2.0**-11 * exact.abs() + 2.0**-25 + 1e-6).all()


def test_slots_far_apart(generator):
    """Codes past 2 ** 31 bytes, of which only a few pages are ever touched."""
    near = random_stack(INT4, 2, 16, 32, generator)
    far = 2**31 + 64
    memory = torch.empty(far + 16 * 16, dtype=torch.uint8)
    codes = memory.as_strided((2, 16, 16), (far, 16, 1)).copy_(near.codes)
    stack = QuantizedStack(near.format, 32, codes, near.scales)
    x = torch.randn(3, 32, generator=generator)
    assert torch.equal(product(x, stack, [1, 2]), product(x, near, [1, 2]))


def test_other_implementations_take_the_values(generator):
    stack = random_stack(NVFP4_LIKE, 2, 24, 32, generator)
    x = torch.randn(5, 32, generator=generator)
    offsets = torch.tensor([0, 2, 5])
    for impl in ("torch", "reference"):
        found = grouped_gemm(x, stack, offsets, impl=impl)
        for expert, rows in enumerate((slice(0, 2), slice(2, 5))):
            assert_only_rounded(found[rows], x[rows], stack.matrix(expert).dequantize())


NVFP4_LIKE = WeightFormat("e2m1", "e4m3", group_cols=16)


def test_what_does_not_fit_is_refused(generator):
    stack = random_stack(INT4, 2, 24, 32, generator)
    x, offsets = torch.zeros(5, 32), torch.tensor([0, 2, 5])
    with pytest.raises(ValueError, match=r"quantised weights are \[S, N, K\]"):
        grouped_gemm(x, stack, offsets, is_transposed=True)
    with pytest.raises(ValueError, match=r"x must be \[\*, 32\]"):
        grouped_gemm(x[:, :31], stack, offsets)
    with pytest.raises(ValueError, match="no gradient of quantised weights"):
        product(x.requires_grad_(), stack, [2, 3])
    factors = torch.ones(3, 1)
    with pytest.raises(ValueError, match=r"global scales must be \[2, 1\] on cpu"):
        QuantizedStack(NVFP4, 32, stack.codes, stack.scales, global_scale=factors)
    for kind, num_cols in (
        (WeightFormat("uint4", "bf16", group_cols=8), 32),
        (replace(NVFP4, codes="uint4"), 32),
        (BLOCK_FORMATS["iq4_xs"], 256),
    ):
        with pytest.raises(ValueError, match="cannot read"):
            product(
                torch.zeros(5, num_cols), random_stack(kind, 2, 24, num_cols, generator), [2, 3]
            )
    with pytest.raises(ValueError, match="2 slots on cpu like the codes"):
        QuantizedStack(INT4, 32, stack.codes, stack.scales[:1])
    with pytest.raises(ValueError, match="scales must be"):
        QuantizedStack(INT4, 32, stack.codes, stack.scales[:, :, :0])
