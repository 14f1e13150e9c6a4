"""Depthwise convolutions in half precision are sums of shifted products."""

import copy
import pickle
from typing import Any

import pytest
import tiny_checkpoints
import torch
from moe_families import FAMILIES
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import moe_runtime
from moe_runtime.inference.cpu import recurrent_steps as depthwise
from moe_runtime.inference.cpu.step_layers import use_small_batch_layers

HALF = [torch.bfloat16, torch.float16]
TAPS = 4


class Operations(TorchDispatchMode):
    """Names of torch's operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _short_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor for which oneDNN has nothing in half precision; short portions."""
    monkeypatch.setattr(depthwise, "PORTION", 64)
    monkeypatch.setattr(depthwise, "_slow_types", lambda: frozenset(HALF))


def layers(
    dtype: torch.dtype, *, channels: int = 6, bias: bool = True, **options: Any
) -> tuple[Any, Any]:
    """A frozen layer as torch computes it, and as a loaded model does."""
    torch.manual_seed(0)
    options = {"groups": channels, "padding": TAPS - 1} | options
    plain = torch.nn.Conv1d(channels, channels, TAPS, bias=bias, **options)
    plain.to(dtype).requires_grad_(False)
    model = torch.nn.Sequential(copy.deepcopy(plain))
    use_small_batch_layers(model)
    return plain, model[0]


def called(layer: torch.nn.Conv1d, x: torch.Tensor, pad: int) -> torch.Tensor:
    """As families call it."""
    weight = layer.weight.squeeze(1)
    channels = x.shape[1]
    return F.conv1d(x, weight=weight.unsqueeze(1), bias=layer.bias, padding=pad, groups=channels)


def bounds(plain: torch.nn.Conv1d, x: torch.Tensor, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact outputs, and how far one rounding and fp32 sums of the products are from them."""
    weight, bias, x = plain.weight.double(), plain.bias, x.double()
    bias = None if bias is None else bias.double()
    options = {"padding": pad, "groups": x.shape[1]}
    exact = F.conv1d(x, weight, bias, **options)
    sizes = F.conv1d(x.abs(), weight.abs(), None if bias is None else bias.abs(), **options)
    sums = TAPS * torch.finfo(torch.float32).eps / 2 * sizes
    limits = torch.finfo(plain.weight.dtype)
    return exact, (exact.abs() + sums) * limits.eps / 2 + sums + limits.tiny * limits.eps


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_values_are_the_exact_ones_rounded_once(dtype, bias):
    plain, layer = layers(dtype, bias=bias)
    for batch, length, pad in [(1, TAPS, 0), (3, TAPS, 0), (1, 1, 3), (2, 13, 3), (1, 47, 1)]:
        wide = torch.randn(batch, length, 12).to(dtype)
        by_position, apart = wide[..., :6].transpose(1, 2), wide[..., ::2].transpose(1, 2)
        for x in (by_position, by_position.contiguous(), apart):
            with Operations() as operations:
                found = called(layer, x, pad)
            assert "convolution" not in operations.names
            exact, error = bounds(plain, x, pad)
            assert found.dtype == dtype
            assert found.shape == exact.shape
            assert ((found.double() - exact).abs() <= error).all()
            if pad == layer.padding[0]:
                assert torch.equal(layer(x), found)
            # a position has its bits in whatever portion it is
            assert torch.equal(called(layer, x[..., :TAPS], pad)[..., :1], found[..., :1])
    assert layer(x[:0]).shape == plain.float()(x[:0].float()).shape


@pytest.mark.parametrize("dtype", HALF)
def test_gradients(dtype):
    plain, layer = layers(dtype)
    layer.requires_grad_()
    x = torch.randn(2, 6, 31).to(dtype)
    given = (x.clone().requires_grad_(), layer.weight, layer.bias)
    found = layer(given[0])
    assert torch.equal(found, layer.requires_grad_(False)(x))
    layer.requires_grad_()
    upstream = torch.randn(found.shape).to(dtype)
    gradients = torch.autograd.grad(layer(given[0]), given, upstream)
    double = plain.double().requires_grad_()
    wide = x.double().requires_grad_()
    exact = torch.autograd.grad(double(wide), (wide, double.weight, double.bias), upstream.double())
    for gradient, expected in zip(gradients, exact, strict=True):
        assert gradient.dtype == dtype
        assert torch.allclose(gradient.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@torch.no_grad()
def test_other_convolutions_have_torchs_bits():
    """Another type, other layers, and calls that torch refuses."""
    x = torch.randn(2, 6, 31)
    for dtype, options in [
        (torch.float32, {}),
        (torch.float64, {}),
        (torch.bfloat16, {"groups": 3}),
        (torch.bfloat16, {"groups": 1}),
        (torch.bfloat16, {"stride": 2}),
        (torch.bfloat16, {"dilation": 2}),
        (torch.bfloat16, {"padding": 5}),
        (torch.bfloat16, {"padding": "valid"}),
    ]:
        plain, layer = layers(dtype, **options)
        assert torch.equal(layer(x.to(dtype)), plain(x.to(dtype)))
    plain, layer = layers(torch.bfloat16)
    assert torch.equal(layer(x[0].bfloat16()), plain(x[0].bfloat16()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), plain(x))
    for wrong in (x, x[:, :5].bfloat16(), x[0, 0].bfloat16(), x[None].bfloat16()):
        with pytest.raises(RuntimeError) as expected:
            plain(wrong)
        with pytest.raises(RuntimeError) as found:
            layer(wrong)
        assert str(found.value) == str(expected.value)
    with pytest.raises(RuntimeError, match="Kernel size"):
        called(layer, x[..., :2].bfloat16(), 0)


@torch.no_grad()
def test_half_precision_with_onednn_stays_with_torch(monkeypatch):
    _, layer = layers(torch.bfloat16)
    monkeypatch.setattr(depthwise, "_slow_types", lambda: frozenset((torch.float16,)))
    with Operations() as operations:
        layer(torch.randn(1, 6, 9).bfloat16())
    assert "convolution" in operations.names


@torch.no_grad()
def test_layers_are_copied_stored_and_converted_like_torchs():
    plain, layer = layers(torch.bfloat16)
    x = torch.randn(1, 6, 9).bfloat16()
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert type(copy.deepcopy(layer).weight) is type(layer.weight)
    state = layer.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(
        ("weight", "bias"), torch.Tensor
    )
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
    loaded = pickle.loads(pickle.dumps(layer))
    assert torch.equal(loaded.weight, plain.weight)
    assert torch.allclose(loaded(x), expected, rtol=2**-7)
    layer.load_state_dict({name: 2 * value for name, value in state.items()})
    assert torch.equal(layer(x), 2 * expected)
    assert torch.equal(layer.float()(x.float()), 2 * plain.float()(x.float()))
    assert torch.equal(layer.bfloat16()(x), 2 * expected)
    assert layer.to("meta")(x.to("meta")).shape == expected.shape


@pytest.mark.parametrize("name", ["Qwen3Next", "Jamba", "Lfm2Moe"])
@torch.no_grad()
def test_models_are_as_near_the_truth_as_transformers(name, tmp_path):
    family = next(row for row in FAMILIES if str(row) == f"{name}ForCausalLM")
    original = tiny_checkpoints.tiny_model(family)
    torch.manual_seed(0)
    tiny_checkpoints.randomise(original)
    original.bfloat16()
    tiny_checkpoints.save(original, tmp_path, sharded=False)
    theirs = tiny_checkpoints.prompt_and_step_logits(original, family)
    model: Any = moe_runtime.load(tmp_path, device="cpu", max_tokens=64)
    with model.moe, Operations() as operations:
        ours = tiny_checkpoints.prompt_and_step_logits(model, family)
    assert "convolution" not in operations.names
    original.set_experts_implementation("eager")  # torch's grouped products are not for fp64
    exact = tiny_checkpoints.prompt_and_step_logits(original.double(), family)
    assert distance(ours, exact) < 1.5 * distance(theirs, exact)


def distance(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Of logits of a median token: one that goes to another expert is far off."""
    difference, size = (
        torch.cat(rows, dim=1).norm(dim=-1)
        for rows in ([one - other for one, other in zip(found, exact, strict=True)], exact)
    )
    return (difference / size).median().item()
