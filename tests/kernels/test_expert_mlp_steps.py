"""What lies around the products in C beside the same in torch, in every pair of types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.expert_mlp.native_path import NativeSteps
from moe_runtime.kernels.expert_mlp.steps import TorchSteps
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.operands.activation import GateLayout

HALVES = [torch.float32, torch.bfloat16, torch.float16]
library = native_library()
needs_library = pytest.mark.skipif(library is None, reason="the native library was not built")


SILU = ActivationSpec("silu")


def native_steps() -> NativeSteps:
    assert library is not None
    return NativeSteps(library, SILU)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@needs_library
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("widens", [False, True])
def test_gathered_rows_are_the_tokens_rows(dtype: torch.dtype, widens: bool) -> None:
    """Also of tokens whose rows do not lie side by side, and in any order."""
    source_TD = torch.randn(9, 70).to(dtype)[:, :37]
    tokens_n = torch.tensor([8, 0, 3, 3, 7])
    out_nD = poisoned(5, 37, dtype=torch.float32 if widens else dtype)
    assert native_steps().gather(source_TD, tokens_n, out_nD) is out_nD
    assert torch.equal(out_nD, source_TD[tokens_n].to(out_nD.dtype))
    assert torch.equal(
        TorchSteps(SILU).gather(source_TD, tokens_n, poisoned(5, 37)), out_nD.float()
    )


@needs_library
@pytest.mark.parametrize("columns", [1, 255, 257, 700])
def test_weighted_sums_of_rows(columns: int) -> None:
    """Whatever the ranges of columns that threads take; a token may have several rows."""
    tokens_n, rows_nD = torch.tensor([2, 0, 2, 5]), torch.randn(4, columns)
    weights_n, start_TD = torch.rand(4), torch.randn(6, columns)
    sums_TD = start_TD.clone()
    native_steps().add_rows(sums_TD, tokens_n, rows_nD, weights_n)
    exact_TD = start_TD.double()
    exact_TD.index_add_(0, tokens_n, weights_n.double()[:, None] * rows_nD.double())
    # two products and two additions of numbers below 8, each rounded once
    assert (sums_TD - exact_TD).abs().max() <= 4 * 8 * 2**-24


@needs_library
@pytest.mark.parametrize("z_dtype", HALVES)
@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("is_concatenated", [True, False])
def test_activation_reads_and_keeps_narrow_preactivations(
    z_dtype: torch.dtype, has_gate: bool, is_concatenated: bool
) -> None:
    """fp32 work beside pre-activations of another type: kept ones are rounded once, and the way
    back reads them as they were kept, to the bit of the same call on their widened copy."""
    hidden, rows = 530, 5  # more than one piece of a row
    width = hidden * (2 if has_gate else 1)
    layout, steps = GateLayout(has_gate, is_concatenated), native_steps()
    z_nZ, kept_nZ = torch.randn(rows, width), poisoned(rows, width, dtype=z_dtype)
    values_nF, expected_nF = poisoned(rows, hidden), poisoned(rows, hidden)
    steps.activate(z_nZ, layout, values_nF, kept_nZ)
    TorchSteps(SILU).activate(z_nZ, layout, expected_nF)
    assert torch.equal(kept_nZ, z_nZ.to(z_dtype))
    # the exponential of C is exact to 2 units in the last place, about ten roundings follow it
    torch.testing.assert_close(values_nF, expected_nF, rtol=16 * 2**-23, atol=1e-6)

    grad_nF, weights_n = torch.randn(rows, hidden), torch.rand(rows)
    found = []
    for kept in (kept_nZ, kept_nZ.float()):
        hidden_nF, grad_z_nZ = grad_nF.clone(), poisoned(rows, width)
        gate_grad_n = steps.activate_backward(kept, layout, hidden_nF, weights_n, grad_z_nZ)
        found.append((hidden_nF, grad_z_nZ, gate_grad_n))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    hidden_nF, grad_z_nZ = grad_nF.clone(), poisoned(rows, width)
    gate_grad_n = TorchSteps(SILU).activate_backward(
        kept_nZ, layout, hidden_nF, weights_n, grad_z_nZ
    )
    for one, other in zip(found[0], (hidden_nF, grad_z_nZ, gate_grad_n), strict=True):
        # sums of 530 products of either sign keep that many roundings of the largest
        torch.testing.assert_close(one, other, rtol=16 * 2**-23, atol=530 * 2**-23)
