"""One row times packed weights by the Triton kernels, against the values of the format in fp64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from quantized_matrices import (
    AWQ,
    FP8_BLOCK,
    FP8_CHANNEL,
    GPTQ8,
    INT4,
    INT8,
    MXFP4,
    MXFP8,
    NVFP4,
    PUBLISHED,
    assert_right,
    random_matrix,
)
from torch import Tensor

from moe_runtime.kernels.grouped_gemm.tile import GpuLimits
from moe_runtime.kernels.linear import kernel as linear_kernel
from moe_runtime.kernels.linear import quantized_linear
from moe_runtime.kernels.linear.gpu import reads_packed
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each launch of the kernel of one row."""
    found: list[str] = []
    launch: Callable[..., Any] = linear_kernel.launch_packed_row

    def noted(*arguments: Any) -> Tensor:
        found.append("row")
        return launch(*arguments)

    monkeypatch.setattr(linear_kernel, "launch_packed_row", noted)
    return found


@pytest.fixture(params=[True, False], ids=["converts", "decodes"])
def converts_fp8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the GPU has instructions for codes of fp8."""
    if DEVICE == "cuda" and request.param and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has none")
    limits = GpuLimits(converts_fp8=request.param)
    monkeypatch.setattr(linear_kernel, "describe_device", lambda _: limits)
    linear_kernel._prepare_packed.cache_clear()
    yield request.param
    linear_kernel._prepare_packed.cache_clear()


def placed(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The same on the device, each row of codes among bytes that are NaN in every type."""
    row_bytes = matrix.codes.shape[1]
    memory = torch.full((len(matrix.codes), -(-row_bytes // 16) * 16 + 32), 255, dtype=torch.uint8)
    memory = memory.to(DEVICE)
    codes = memory[:, :row_bytes]
    codes.copy_(matrix.codes)
    return replace(matrix.to(torch.device(DEVICE)), codes=codes)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize(
    ("num_rows", "num_cols", "is_row"), [(37, 96, True), (5, 1120, True), (3, 41, False)]
)
def test_odd_sizes_against_fp64(name, num_rows, num_cols, is_row, generator, launches):
    """Rows of a fraction of a step, of more than one, and those that end within a word."""
    matrix = placed(random_matrix(PUBLISHED[name], num_rows, num_cols, generator))
    bias = torch.randn(num_rows, generator=generator).to(DEVICE)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        x = torch.randn(1, num_cols, generator=generator).to(DEVICE, dtype)
        assert_right(matrix, x, impl="triton")
    assert launches == ["row"] * (3 * is_row)
    assert_right(matrix, x, bias, impl="triton")
    assert_right(matrix, torch.randn(3, num_cols, generator=generator).to(DEVICE), impl="triton")
    assert len(launches) == 4 * is_row


@pytest.mark.usefixtures("poisoned_memory")
def test_blocks_of_two_scales_for_each_group(generator, launches):
    """All codes, scales and minima; rows of blocks that no step divides."""
    kind = WeightFormat("q4_k")
    for num_rows, num_cols in ((37, 256), (130, 768)):
        matrix = placed(random_matrix(kind, num_rows, num_cols, generator))
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(1, num_cols, generator=generator).to(DEVICE, dtype)
            assert_right(matrix, x, torch.ones(num_rows, device=DEVICE), impl="triton")
    assert len(launches) == 4
    whole = matrix.codes.clone()
    shifted = torch.full((len(whole), whole.shape[1] + 8), 255, dtype=torch.uint8, device=DEVICE)
    shifted[:, 8:] = whole
    assert_right(replace(matrix, codes=shifted[:, 8:]), x, impl="triton")
    assert len(launches) == 4


E8M0 = torch.tensor([0, 1, 2, 7, 126, 127, 128, 200, 252], dtype=torch.uint8)
HALVES = torch.tensor([1.0, 0.75, -3.0, 2.0**-14, 2.0**-24, 0.0, 1000.0, 0.0999, 1 / 3]).half()
CODES = [
    (MXFP4, E8M0),
    (MXFP8, E8M0[3:8]),
    (replace(NVFP4, global_scale="none"), HALVES.clamp(max=448).to(torch.float8_e4m3fn)),
    (FP8_CHANNEL, HALVES.bfloat16()),
    (INT4, HALVES.bfloat16()),
    (AWQ, HALVES),
    (GPTQ8, HALVES),
    (INT8, HALVES.bfloat16()),
]


@pytest.mark.parametrize(("kind", "scales"), CODES, ids=lambda value: getattr(value, "codes", ""))
def test_every_code_in_every_place_under_every_scale(kind, scales, converts_fp8):
    """A row that is 1 in one place and else 0 gives the weights themselves, to the bit."""
    codes = torch.arange(256, dtype=torch.uint8)
    if kind.codes == "e4m3":
        codes[codes & 127 == 127] = 0
    num_cols, count = 64, len(codes) * len(scales)
    codes = codes.repeat(len(scales))[:, None].expand(count, num_cols * kind.bits // 8).contiguous()
    groups = kind.scales_shape(count, num_cols)[1]
    spread = scales.view(torch.uint8) if scales.dtype == torch.float8_e4m3fn else scales
    spread = spread.repeat_interleave(256)[:, None].expand(count, groups).contiguous()
    zeros = None
    if kind.has_zero_points:
        zeros = (torch.arange(count) % 255).to(torch.uint8)[:, None].expand(count, groups)
        zeros = zeros.contiguous()
    matrix = QuantizedMatrix(kind, num_cols, codes, spread.view(scales.dtype), zeros)
    values, matrix = matrix.dequantize(), matrix.to(torch.device(DEVICE))
    for column in range(2 * 32 // kind.bits):
        x = torch.zeros(1, num_cols, device=DEVICE)
        x[0, column] = 1
        found = quantized_linear(x, matrix, impl="triton")[0].cpu()
        assert torch.equal(found, values[:, column])


def test_what_is_no_number_stays_none(generator, launches, converts_fp8):
    for kind in (MXFP4, MXFP8):
        matrix = random_matrix(kind, 40, 96, generator)
        assert matrix.scales is not None
        matrix.scales[5, 1] = 255
        if kind is MXFP8:
            matrix.codes[7, 3], matrix.codes[8, 95], matrix.codes[9, 0] = 127, 255, 126
        expected = matrix.dequantize().isnan().any(1)
        assert expected.sum() == (1 if kind is MXFP4 else 3)
        x = torch.zeros(1, 96, device=DEVICE)
        found = quantized_linear(x, matrix.to(torch.device(DEVICE)), impl="triton")[0].cpu()
        assert torch.equal(found.isnan(), expected)
    assert len(launches) == 2


def test_large_and_small_rows_keep_their_digits(generator, converts_fp8):
    """Up to 2 ** 64: beyond that a row is no longer multiplied by 2 ** 63 in fp32."""
    for kind in (MXFP4, FP8_BLOCK):
        matrix = random_matrix(kind, 33, 256, generator).to(torch.device(DEVICE))
        x = torch.randn(1, 256, generator=generator).to(DEVICE)
        plain = quantized_linear(x, matrix, impl="triton")
        for power in (-30, 60):
            found = quantized_linear(x * 2.0**power, matrix, impl="triton")
            assert torch.equal(found, plain * 2.0**power)


def test_what_is_not_read_as_it_lies_is_refused(generator):
    assert not reads_packed(WeightFormat("uint4", "bf16", group_cols=8))
    assert not reads_packed(replace(MXFP4, int8_activations=True))
    matrix = random_matrix(MXFP4, 8, 64, generator)
    x = torch.randn(1, 64, generator=generator)
    for bad, message in (
        (x[:, :32], r"x must be \[R, 64\], got \[1, 32\]"),
        (x.double(), "x must be fp32, bf16 or fp16 on cpu, got torch.float64"),
        (x.clone().requires_grad_(), "they have no gradients"),
    ):
        with pytest.raises(ValueError, match=message):
            quantized_linear(bad, matrix, impl="triton")
    with pytest.raises(ValueError, match=r"bias must be \[8\], got \[7\]"):
        quantized_linear(x, matrix, torch.zeros(7), impl="triton")
    odd = random_matrix(WeightFormat("uint4", "bf16", group_cols=8), 8, 64, generator)
    with pytest.raises(ValueError, match="they cannot read WeightFormat"):
        quantized_linear(x, odd, impl="triton")
