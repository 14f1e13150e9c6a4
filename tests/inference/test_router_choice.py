"""Routers that change after they were fused, and routers that cannot be fused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from triton_interpreter import repair_interpreter

from moe_runtime.inference.device.fused_layers import fuse_routers

pytest.importorskip("triton")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not torch.cuda.is_available():
        repair_interpreter()


class OwnRouter(MixtralTopKRouter):
    """Of a program."""


def router_of(kind: type[nn.Module], **settings: Any) -> Any:
    """With small weights and other settings."""
    config = SimpleNamespace(
        hidden_size=32, num_local_experts=16, num_experts_per_tok=4, **settings
    )
    torch.manual_seed(5)
    router = kind(config).eval().requires_grad_(False)
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor, std=0.1)
    fuse_routers(nn.ModuleList([router]))
    return router


def test_only_known_classes_are_fused(monkeypatch):
    assert "forward" in vars(router_of(MixtralTopKRouter))
    assert "forward" not in vars(router_of(OwnRouter))
    monkeypatch.setattr(MixtralTopKRouter, "forward", lambda self, x: x)
    assert "forward" not in vars(router_of(MixtralTopKRouter))


@pytest.mark.parametrize("changed", ["buffer", "parameter", "weight"])
def test_a_router_with_another_tensor_uses_its_own_forward(changed):
    router, x = router_of(MixtralTopKRouter), torch.randn(3, 32)
    if changed == "buffer":
        router.register_buffer("usage", torch.ones(16))
    elif changed == "parameter":
        router.lora_A = nn.Parameter(torch.zeros(2, 32))
    else:
        router.weight = nn.Parameter(torch.randn(600, 32))
    with torch.no_grad():
        assert all(map(torch.equal, router(x), MixtralTopKRouter.forward(router, x)))


def test_routers_that_limit_groups_are_left_alone():
    settings: dict[str, Any] = {"routed_scaling_factor": 2.5, "norm_topk_prob": True}
    settings |= {"n_routed_experts": 16, "num_experts": 16}
    for groups, is_fused in ((1, True), (4, False)):
        router = router_of(DeepseekV3TopkRouter, n_group=groups, topk_group=1, **settings)
        assert ("forward" in vars(router)) == is_fused


@pytest.mark.parametrize("least_sum", [0.0, 1e-20])
def test_sums_of_next_to_nothing_divide_as_in_the_router(least_sum):
    """DeepSeek-V3's form, and with 0 that without a least sum."""
    settings: dict[str, Any] = {"routed_scaling_factor": 1.0, "norm_topk_prob": True}
    settings |= {"n_routed_experts": 16, "num_experts": 16, "n_group": 1, "topk_group": 1}
    kind: Any = DeepseekV3TopkRouter if least_sum else MiniMaxM3VLTopKRouter
    router = router_of(kind, **settings)
    assert "forward" in vars(router)
    router.weight.copy_(torch.linspace(-1.5, -1.4, 16)[:, None].expand(16, 32))
    with torch.no_grad():
        _, found, ids = router(x := torch.ones(1, 32))
        _, expected, ids_own = kind.forward(router, x)
    assert torch.equal(ids.sort().values, ids_own.sort().values)
    assert (expected.sum() < 0.99) == (least_sum > 0)
    # exponentials of 48 are good to 48 units in the last place, and sums of four to a few more
    torch.testing.assert_close(found.sort().values, expected.sort().values, rtol=1e-5, atol=0)
