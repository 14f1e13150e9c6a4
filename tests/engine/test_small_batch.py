"""Layers made for few tokens replace only what computes the same."""

import copy

import pytest
import torch

from moe_runtime.engine.small_batch import (
    SmallBatchLinear,
    SmallBatchRMSNorm,
    use_small_batch_layers,
)


class LlamaLikeNorm(torch.nn.Module):
    def __init__(self, dim: int = 24, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(dim))
        self.variance_epsilon = eps

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class OnePlusWeight(LlamaLikeNorm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * wide.to(x.dtype)


class EpsilonOutside(LlamaLikeNorm):
    def forward(self, x):
        wide = x.float()
        wide = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class RoundedOnce(LlamaLikeNorm):
    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide).to(x.dtype)


class Gated(LlamaLikeNorm):
    def forward(self, x, gate=None):
        normed = super().forward(x)
        return normed if gate is None else normed * gate


class TopKRouter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(7, 24))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight).softmax(-1)


def replaced(module: torch.nn.Module, dtype=torch.bfloat16) -> torch.nn.Module:
    model = torch.nn.Sequential(copy.deepcopy(module)).to(dtype).requires_grad_(False)
    use_small_batch_layers(model)
    return model[0]


def test_the_usual_normalisation_is_replaced():
    original = LlamaLikeNorm()
    found = replaced(original)
    assert isinstance(found, SmallBatchRMSNorm)
    x = torch.randn(2, 40, 24).bfloat16()
    expected = original.bfloat16()(x)
    # many rows: the very operations of the original; few: sums in another order
    assert torch.equal(found(x), expected)
    assert torch.allclose(found(x[:1, :1]), expected[:1, :1], rtol=2**-7)


@pytest.mark.parametrize("kind", [OnePlusWeight, EpsilonOutside, RoundedOnce, Gated])
def test_other_normalisations_stay(kind):
    assert type(replaced(kind())) is kind


def test_routers_multiply_by_our_kernel_and_keep_their_weight():
    original = TopKRouter()
    found = replaced(original, torch.float32)
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
