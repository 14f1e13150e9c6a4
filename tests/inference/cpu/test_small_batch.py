"""Layers for few tokens replace only layers of known forms."""

import copy

import pytest
import torch
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from moe_runtime.inference.cpu.step_layers import (
    SmallBatchLinear,
    SmallBatchRMSNorm,
    use_small_batch_layers,
)
from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library


class TopKRouter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 24))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight).softmax(-1)


class BiasedRouter(TopKRouter):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(7))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias).softmax(-1)


def replaced(module: torch.nn.Module, dtype=torch.bfloat16) -> torch.nn.Module:
    model = torch.nn.Sequential(copy.deepcopy(module)).to(dtype).requires_grad_(False)
    use_small_batch_layers(model)
    return model[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "form"),
    [(MixtralRMSNorm, "rounded"), (GptOssRMSNorm, "wide"), (Qwen3NextRMSNorm, "plus_one")],
)
def test_the_usual_normalisations_are_replaced(kind, form, dtype):
    original = kind(24)
    torch.nn.init.normal_(original.weight)
    found = replaced(original, dtype)
    assert isinstance(found, SmallBatchRMSNorm)
    assert found.form == form
    x = torch.randn(2, 40, 24).to(dtype)
    expected = original.to(dtype)(x)
    # in bf16 many rows are the very operations of the original; else sums have another order
    assert torch.allclose(found(x), expected, rtol=0 if dtype == torch.bfloat16 else 1e-6)
    assert torch.allclose(found(x[:1, :1]), expected[:1, :1], rtol=2**-7)


class OwnNorm(MixtralRMSNorm):
    """Of a program."""


def test_other_normalisations_stay(monkeypatch):
    for other in (OwnNorm(24), Qwen3NextRMSNormGated(24), Gemma4RMSNorm(24, with_scale=False)):
        assert type(replaced(other)) is type(other)
    monkeypatch.setattr(MixtralRMSNorm, "forward", lambda self, x: 2 * x)
    assert type(replaced(MixtralRMSNorm(24))) is MixtralRMSNorm


@pytest.mark.parametrize("kind", [TopKRouter, BiasedRouter])
def test_routers_multiply_by_our_kernel_and_keep_their_weight(kind):
    original = kind()
    found = replaced(original, torch.float32)
    assert type(found.weight) is not torch.nn.Parameter
    x = torch.randn(1, 24)
    assert torch.allclose(found(x), original(x), atol=1e-6)
    assert torch.equal(found.state_dict()["weight"], original.weight)
    doubled = copy.deepcopy(found).double()
    assert torch.allclose(doubled(x.double()), original.double()(x.double()))


def test_linear_layers_are_replaced_and_subclasses_are_not():
    class Special(torch.nn.Linear):
        pass

    assert type(replaced(torch.nn.Linear(4, 5))) is SmallBatchLinear
    assert type(replaced(Special(4, 5))) is Special


def small_layers(dtype: torch.dtype) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Layers and their replacements, frozen, with shared weights."""
    linear_layer = torch.nn.Linear(24, 40, dtype=dtype)
    norm = MixtralRMSNorm(24, eps=1e-5).to(dtype)
    for module in (linear_layer, norm):
        module.requires_grad_(False)
    return [
        (linear_layer, SmallBatchLinear(linear_layer)),
        (norm, SmallBatchRMSNorm(norm, norm.variance_epsilon, "rounded")),
    ]


def takes_native(rows: torch.Tensor) -> bool:
    library = native_library()
    num_rows = rows.numel() // rows.shape[-1]
    return library is not None and num_rows <= native_row_limit(library, rows.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prepared_layers_have_the_bits_of_unprepared_ones(dtype):
    """Rows beyond the limits, rows apart in memory and gradients take the other way."""
    for layer, small in small_layers(dtype):
        for rows in (torch.randn(3, 24), torch.randn(2, 1, 24), torch.randn(700, 24)):
            rows = rows.to(dtype)
            with torch.no_grad():
                bound = small(rows)
                apart = torch.stack((rows, rows), dim=-1)[..., 0]
                # Of torch's products, which take what the kernel does not, distances between rows
                # may change the order of sums.
                if takes_native(rows):
                    assert torch.equal(small(apart), bound)
            with torch.enable_grad():
                assert torch.equal(small(rows), bound)
                probe = rows.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(small(probe).sum(), probe)
                (expected,) = torch.autograd.grad(layer(probe).sum(), probe)
                assert torch.equal(gradient, expected)
            error = (bound.double() - layer(rows).double()).abs().max()
            # sums of 24 terms and the bias, and one rounding to the type
            unit = max(torch.finfo(dtype).eps, 25 * torch.finfo(torch.float32).eps)
            assert error <= unit * bound.double().abs().max()
        with torch.no_grad():
            assert small(rows[:0]).shape[0] == 0


@torch.no_grad()
def test_forward_mode_goes_through_replaced_layers():
    """The compiled kernels would drop the tangent without a word."""
    for layer, small in small_layers(torch.float32):
        x, tangent = torch.randn(3, 24), torch.randn(3, 24)
        small(x)
        found = torch.func.jvp(small, (x,), (tangent,))
        expected = torch.func.jvp(layer, (x,), (tangent,))
        assert all(map(torch.allclose, found, expected))


@torch.no_grad()
def test_a_moved_or_converted_weight_is_prepared_again():
    for _, small in small_layers(torch.float32):
        x = torch.randn(2, 24)
        small(x)
        weight = small.get_parameter("weight")
        weight.data = weight.data * 2
        assert torch.equal(small(x), type(small).forward(fresh(small), x))
        small.to(torch.bfloat16)
        assert small(x.bfloat16()).dtype == torch.bfloat16
        assert torch.equal(small(x.bfloat16()), type(small).forward(fresh(small), x.bfloat16()))
        assert torch.equal(copy.deepcopy(small)(x.bfloat16()), small(x.bfloat16()))


@torch.no_grad()
def test_a_new_bias_and_a_transposed_weight_count():
    for dtype in (torch.float32, torch.bfloat16):
        layer, x = torch.nn.Linear(24, 24, dtype=dtype), torch.randn(2, 24).to(dtype)
        small = SmallBatchLinear(layer)
        small(x)

        def turn(small=small):
            small.weight.data = small.weight.data.t()  # where it was

        def give_bias(small=small, dtype=dtype):
            small.bias = torch.nn.Parameter(torch.randn(24).to(dtype))

        def take_bias(small=small):
            small.register_parameter("bias", None)

        for change in (turn, give_bias, take_bias):
            change()
            weight, bias = small.weight.double(), small._parameters["bias"]
            added = torch.zeros(24).double() if bias is None else bias.double()
            error = (small(x).double() - (x.double() @ weight.T + added)).abs()
            # sums of 24 terms and the bias, and one rounding to the type
            unit = max(torch.finfo(dtype).eps, 25 * torch.finfo(torch.float32).eps)
            assert (error <= unit * (x.double().abs() @ weight.abs().T + added.abs())).all()


def fresh(small: torch.nn.Module) -> torch.nn.Module:
    """The same layer, never called."""
    if isinstance(small, SmallBatchRMSNorm):
        return SmallBatchRMSNorm(small, small.eps, small.form)
    assert isinstance(small, SmallBatchLinear)
    return SmallBatchLinear(small)
