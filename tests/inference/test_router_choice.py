"""Routers that are changed after they were fused, or are unlike those that can be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from triton_interpreter import repair_interpreter

from moe_runtime.inference.device.fused_layers import fuse_routers

pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not torch.cuda.is_available():
        repair_interpreter()


class SoftRouter(nn.Module):
    """The form of Mixtral's routers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32) * 0.1, requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_states.reshape(-1, 32), self.weight)
        weights, ids = torch.softmax(logits.float(), -1).topk(4, -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


class ClippingRouter(SoftRouter):
    """Of small logits it does the same."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_states.reshape(-1, 32), self.weight)
        weights, ids = torch.softmax(logits.float().clamp(-20, 20), -1).topk(4, -1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


class FlooredRouter(SoftRouter):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = super().forward(hidden_states)
        return logits, weights.clamp(min=1e-6), ids


class CountingRouter(SoftRouter):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens_per_expert", torch.zeros(16, dtype=torch.int64))


class ListedRouter(SoftRouter):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = [1, 2]


class SigmoidRouter(nn.Module):
    """DeepSeek-V3's form, and with 0 MiniMax-M3's."""

    def __init__(self, least_sum: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32) * 0.1, requires_grad=False)
        self.register_buffer("bias_of_choice", torch.randn(16))
        self.least_sum = least_sum

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = linear(hidden_states.reshape(-1, 32), self.weight)
        scores = logits.float().sigmoid()
        ids = (scores + self.bias_of_choice).topk(4, -1).indices
        weights = scores.gather(1, ids)
        return logits, weights / (weights.sum(-1, keepdim=True) + self.least_sum), ids


def fused(router: nn.Module) -> nn.Module:
    fuse_routers(nn.ModuleList([router.eval()]))
    return router


@pytest.mark.parametrize("kind", [ClippingRouter, FlooredRouter, CountingRouter, ListedRouter])
def test_routers_of_other_kinds_stay_as_they_are(kind: type[nn.Module]) -> None:
    assert "forward" not in vars(fused(kind()))


@pytest.mark.parametrize("changed", ["buffer", "parameter", "weight"])
def test_a_router_that_gets_another_tensor_goes_its_own_way(changed: str) -> None:
    router, x = fused(SoftRouter()), torch.randn(3, 32)
    assert "forward" in vars(router)
    if changed == "buffer":
        router.register_buffer("usage", torch.ones(16))
    elif changed == "parameter":
        router.lora_A = nn.Parameter(torch.zeros(2, 32))
    else:
        router.weight = nn.Parameter(torch.randn(600, 32))
    with torch.no_grad():
        found = router(x)
        assert all(map(torch.equal, found, SoftRouter.forward(router, x)))  # type: ignore[arg-type]


@pytest.mark.parametrize("least_sum", [0.0, 1e-20])
def test_sums_of_next_to_nothing_divide_as_in_the_router(least_sum: float) -> None:
    torch.manual_seed(5)
    router = fused(SigmoidRouter(least_sum))
    assert "forward" in vars(router)
    router.weight.copy_(torch.linspace(-1.5, -1.4, 16)[:, None].expand(16, 32))
    with torch.no_grad():
        _, found, ids = router(x := torch.ones(1, 32))
        _, expected, ids_own = SigmoidRouter.forward(router, x)  # type: ignore[arg-type]
    assert torch.equal(ids.sort().values, ids_own.sort().values)
    assert (expected.sum() < 0.99) == (least_sum > 0)
    # exponentials of 48 are good to 48 units in the last place, and sums of four to a few more
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-5, atol=0)
