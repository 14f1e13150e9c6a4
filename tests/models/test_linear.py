"""Linear maps under autocast, beside fp64."""

import pytest
import torch
from torch.nn import functional as F

from moe_runtime.models.lm import layers


@pytest.fixture(params=[False, True])
def is_widened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor multiplies half precision faster as fp32, whatever this one does."""
    monkeypatch.setattr(layers, "native_library", lambda: object())
    monkeypatch.setattr(layers, "is_faster_widened", lambda library, dtype: request.param)
    return request.param


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_under_autocast(is_widened, bias):
    """As exact as `nn.Linear` in bf16 or better, whose operands and results have 8 bits."""
    torch.manual_seed(0)
    layer = layers.Linear(33, 17, bias=bias)
    x = torch.randn(3, 5, 33, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    grad = torch.randn_like(y)
    y.backward(grad)
    wide = {name: value.detach().double() for name, value in layer.named_parameters()}
    x64 = x.detach().double()
    y64 = F.linear(x64, wide["weight"], wide.get("bias"))
    grad64 = grad.double()
    sizes = F.linear(x64.abs(), wide["weight"].abs(), *([wide["bias"].abs()] if bias else []))
    # two operands rounded to 8 bits, and a result: half a unit of 2**-8 each
    assert ((y.double() - y64).abs() <= 4 * 2.0**-9 * sizes).all()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad.dtype, layer.weight.grad.dtype) == (torch.float32, torch.float32)
    expected, size = grad64 @ wide["weight"], grad64.abs() @ wide["weight"].abs()
    assert ((x.grad.double() - expected).abs() <= 4 * 2.0**-9 * size).all()
    rows, grads = x64.view(-1, 33), grad64.view(-1, 17)
    expected, size = grads.T @ rows, grads.abs().T @ rows.abs()
    assert ((layer.weight.grad.double() - expected).abs() <= 4 * 2.0**-9 * size).all()
    if is_widened:  # nothing but the result was rounded
        exact = F.linear(x.detach(), layer.weight.detach(), layer.bias).bfloat16()
        assert torch.equal(y.detach(), exact)


@pytest.mark.usefixtures("is_widened")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torchs_own_bits_without_autocast(dtype):
    layer, x = layers.Linear(33, 17).to(dtype), torch.randn(5, 33).to(dtype)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    if dtype == torch.float64:  # which autocast leaves alone
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
