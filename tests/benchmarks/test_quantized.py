"""The benchmark of quantised experts runs, and its steps are those of the library."""

import itertools

import pytest
import quantized
import torch

from moe_runtime.kernels.native import native_library

SHAPE = quantized.Shape(num_experts=6, top_k=2, dim_model=64, dim_hidden=40)


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
@pytest.mark.parametrize("kind", quantized.FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_rows_say_what_was_moved(kind: str, num_tokens: int) -> None:
    experts = quantized.make_experts(SHAPE, quantized.FORMATS[kind], memory=1 << 20)
    assert len(experts) == SHAPE.num_experts
    ticks = itertools.count()
    row = quantized.measure(SHAPE, experts, num_tokens, 3, lambda: float(next(ticks)))
    bits = 8 * row["expert_bytes"] / (3 * 64 * 40)
    assert {"bf16": 16, "fp8": 8, "mxfp4": 4.25, "int4": 4.5}[kind] <= bits < 17
    assert SHAPE.top_k <= row["visited"] <= SHAPE.num_experts
    assert row["ms"] == {"experts": 1000.0, "read": 1000.0}
    assert row["of_read"] == 1.0


def test_no_more_experts_than_fit() -> None:
    experts = quantized.make_experts(SHAPE, None, memory=4 * 3 * 64 * 40 * 2)
    assert len(experts) == 4
    assert torch.equal(experts[0].up, experts[3].up)  # type: ignore[arg-type]
    assert experts[0].up.data_ptr() != experts[3].up.data_ptr()  # type: ignore[union-attr]
