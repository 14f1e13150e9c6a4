"""Random quantised weights of every format, for the tests of what multiplies them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.linear.op import LinearImpl
from moe_runtime.kernels.quantized import (
    BLOCKS,
    SCALES,
    QuantizedMatrix,
    QuantizedStack,
    WeightFormat,
)

MXFP4 = WeightFormat("e2m1", "e8m0", group_cols=32)
NVFP4 = WeightFormat("e2m1", "e4m3", group_cols=16, global_scale="multiply")
NVFP4_DIVIDED = WeightFormat("e2m1", "e4m3", group_cols=16, global_scale="divide")
INT4 = WeightFormat("uint4", "bf16", group_cols=32, zero=8)
AWQ = WeightFormat("uint4", "f16", group_cols=128, has_zero_points=True)
FP8_BLOCK = WeightFormat("e4m3", "f32", group_rows=128, group_cols=128)
FP8_CHANNEL = WeightFormat("e4m3", "bf16")
FP8_TENSOR = WeightFormat("e4m3", "f32", group_rows=0)
MXFP8 = WeightFormat("e4m3", "e8m0", group_cols=32)
INT8 = WeightFormat("int8", "bf16")
GPTQ8 = WeightFormat("uint8", "f16", group_cols=64, has_zero_points=True)
PUBLISHED = {
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "nvfp4-divided": NVFP4_DIVIDED,
    "int4": INT4,
    "awq": AWQ,
    "fp8-block": FP8_BLOCK,
    "fp8-channel": FP8_CHANNEL,
    "fp8-tensor": FP8_TENSOR,
    "mxfp8": MXFP8,
    "int8": INT8,
    "gptq8": GPTQ8,
}
"""The formats that checkpoints are published in."""
BLOCK_FORMATS = {name: WeightFormat(name) for name in BLOCKS}
"""Those of GGUF files."""


def every_format() -> list[WeightFormat]:
    """Every code with every scale and group, with and without zero points."""
    formats = []
    groups = ((1, 16), (1, 32), (1, 64), (128, 128), (1, 0))
    for codes, scales, (rows, cols) in itertools.product(
        ("e2m1", "e4m3", "uint4", "uint8", "int8"), SCALES, groups
    ):
        zero = {"uint4": 8, "uint8": 128}.get(codes, 0)
        formats.append(WeightFormat(codes, scales, rows, cols, zero))
        if zero:
            formats.append(WeightFormat(codes, scales, rows, cols, has_zero_points=True))
    return formats


def random_matrix(
    kind: WeightFormat, num_rows: int, num_cols: int, generator: torch.Generator
) -> QuantizedMatrix:
    """Codes of every value but NaN, under scales that make the weights about 1 / sqrt(K)."""
    codes = _bytes((num_rows, kind.row_bytes(num_cols)), generator)
    if kind.codes in BLOCKS:
        return QuantizedMatrix(kind, num_cols, _with_small_scales(codes, kind.codes))
    if kind.codes == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x30
    groups = kind.scales_shape(num_rows, num_cols)
    largest = {"e2m1": 6, "e4m3": 448, "uint4": 16, "uint8": 256, "int8": 128}[kind.codes]
    scales = torch.rand(groups, generator=generator) * num_cols**-0.5 / largest
    zeros = factor = None
    if kind.has_zero_points:
        zeros = _bytes(groups, generator)
        zeros = zeros % 17 if kind.codes == "uint4" else zeros
    if kind.global_scale != "none":
        factor = torch.tensor([3e-3 if kind.global_scale == "multiply" else 3e2])
        scales = scales * 300
    if kind.scales == "e8m0":
        stored = (scales.log2().floor() + 127).to(torch.uint8)
    else:
        scales = scales * (64 if kind.scales == "e4m3" else 1)
        stored = scales.clamp(max=448).to(SCALES[kind.scales])
    return QuantizedMatrix(kind, num_cols, codes, stored, zeros, factor)


HALVES = {
    **dict.fromkeys(("q4_0", "q5_0", "q8_0", "iq4_nl", "iq4_xs", "f16_block"), (0,)),
    **dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)),
    **{"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)},
}
"""Where in a block its numbers in fp16 lie."""


def any_blocks(name: str, count: int, generator: torch.Generator) -> Tensor:
    """`uint8 [count, bytes of a block]`, all codes and scales among them."""
    return _bytes((count, BLOCKS[name].num_bytes), generator)


def _with_small_scales(codes: Tensor, name: str) -> Tensor:
    """The same with numbers of the size that trained weights have, where bytes may be any."""
    blocks = codes.view(-1, BLOCKS[name].num_bytes)
    if name == "mxfp4_block":
        blocks[:, 0] = blocks[:, 0] % 8 + 118
    if name == "f32_block":
        blocks[:, 3] = blocks[:, 3] & 0xBF | 0x30
    for place in HALVES.get(name, ()):
        numbers = blocks[:, place : place + 2].contiguous().view(torch.int16) & 0x8FFF | 0x1000
        blocks[:, place : place + 2] = numbers.view(torch.uint8)
    return codes


def _bytes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def random_stack(
    kind: WeightFormat, num_slots: int, num_rows: int, num_cols: int, generator: torch.Generator
) -> QuantizedStack:
    """As `random_matrix`, one a slot; they lie apart, among bytes that are NaN in every type."""
    matrices = [random_matrix(kind, num_rows, num_cols, generator) for _ in range(num_slots)]

    def stacked(part: str) -> Tensor:
        values = torch.stack([getattr(matrix, part) for matrix in matrices])
        size = values[0].numel() * values.element_size()
        # slots begin at 16 bytes, and rows of codes may lie at any distance
        memory = torch.full((num_slots, -(-size // 16) * 16 + 32), 255, dtype=torch.uint8)
        view = memory[:, :size].view(torch.uint8) if size else memory[:, :0]
        view.copy_(values.flatten(1).contiguous().view(torch.uint8).view(num_slots, size))
        return view.view(values.dtype).unflatten(1, values.shape[1:])

    scales = None if kind.scales == "none" else stacked("scales")
    zeros = stacked("zero_points") if kind.has_zero_points else None
    factors = None
    if kind.global_scale != "none":
        # each matrix has its own
        factors = stacked("global_scale") * (1 + torch.arange(num_slots)[:, None] / 7)
    return QuantizedStack(kind, num_cols, stacked("codes"), scales, zeros, factors)


def assert_right(
    weight: QuantizedMatrix,
    x_RK: Tensor,
    bias: Tensor | None = None,
    *,
    impl: LinearImpl = "native",
) -> None:
    """Within the roundings of fp32 sums, and one of the result.

    A sum of K products in any order, a few of them for scales, is within (K + 8) u of the sum of
    magnitudes; x is exact, and so are codes, scales and what lies between.
    """
    exact = x_RK.double() @ weight.dequantize().double().T
    magnitude = x_RK.double().abs() @ weight.dequantize().double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    allowed = (weight.num_cols + 8) * 2.0**-24 * magnitude + 2.0**-126
    if x_RK.dtype != torch.float32:
        kind = torch.finfo(x_RK.dtype)
        allowed += (kind.eps * exact.abs()).clamp(min=kind.smallest_normal * kind.eps)
    found = quantized_linear(x_RK, weight, bias, impl=impl)
    assert found.dtype == x_RK.dtype
    assert ((found.double() - exact).abs() <= allowed).all()
