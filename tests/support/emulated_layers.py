"""Layers beside the experts as a GPU has them, on the host: by Triton's kernels where a GPU uses
them, and never by the native kernels of a CPU, which no emulated graph records."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_runtime.inference.cpu import step_layers
from moe_runtime.inference.cpu.step_layers import SmallBatchLinear, SmallBatchRMSNorm
from moe_runtime.inference.device import fused_layers
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.rms_norm import rms_norm


def use_device_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has them for a test."""
    monkeypatch.setattr(SmallBatchRMSNorm, "forward", by_triton)
    monkeypatch.setattr(SmallBatchLinear, "forward", product_by_triton)
    monkeypatch.setattr(fused_layers, "linear", product_of_router)
    monkeypatch.setattr(step_layers, "native_attention", lambda *_: None)


def by_triton(norm: Any, x: torch.Tensor) -> torch.Tensor:
    """What a normalisation does on a GPU."""
    return rms_norm(x, norm.weight, norm.eps, form=norm.form, impl="triton")


def product_by_triton(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a linear layer does on a GPU."""
    is_row = x.numel() == x.shape[-1] and not torch.is_grad_enabled()
    return linear(x, layer.weight, layer.bias, impl="triton" if is_row else "torch")


def product_of_router(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
    return linear(x, weight, bias, impl="triton" if len(x) == 1 else "torch")
