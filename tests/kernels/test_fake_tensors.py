"""Tensors without values go through torch's operations: compiled kernels would read address 0."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.decode_step.prepared import ExpertStep
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.linear import linear, quantized_linear
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.rms_norm import rms_norm


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def expert() -> ExpertWeights:
    return ExpertWeights(rows(32, 64), rows(32, 64), rows(64, 32))


def of_experts() -> Tensor:
    out_RO = rows(4, 64)
    expert_ffn(rows(4, 64), [expert()], [4], [0, 1, 2, 3], [0, 1, 2, 3], out_RO, activation="silu")
    return out_RO


def by_codes() -> Tensor:
    codes, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.zeros(32, 2, dtype=torch.uint8)
    weight = QuantizedMatrix(WeightFormat("e2m1", "e8m0", group_cols=32), 64, codes, scales)
    return quantized_linear(rows(4, 64), weight)


@pytest.mark.parametrize(
    "compute",
    [
        lambda: linear(rows(4, 64), rows(32, 64)),
        lambda: rms_norm(rows(4, 64), rows(64), 1e-6),
        lambda: combine_assignments(rows(8, 64), torch.rand(4, 2)),
        of_experts,
        by_codes,
    ],
    ids=["linear", "rms_norm", "combine", "experts", "codes"],
)
@torch.no_grad()
def test_shapes_are_those_of_values(compute):
    real = compute()
    with FakeTensorMode():
        fake = compute()
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@torch.no_grad()
def test_a_named_kernel_refuses_them():
    with FakeTensorMode():
        with pytest.raises(ValueError, match="no fake tensors"):
            linear(rows(4, 64), rows(32, 64), impl="native")
        own = expert()
        assert (
            ExpertStep(own.shape, "silu").layer(rows(4, 64), torch.rand(4, 1), [0] * 4, [own])
            is None
        )
