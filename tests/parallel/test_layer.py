"""`MoELayer(..., group=...)`: experts over processes, by the argument of the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallel_checks import grouped_layer, layer_over_group
from rank_pool import RankPool

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.layer import MoELayer
from moe_runtime.parallel import ExpertSpread, ParallelExperts
from moe_runtime.parallel.transport import LocalTransport


@pytest.mark.parametrize("etp", [None, 1, 2])
def test_a_layer_over_two_ranks_equals_one_process(
    etp: int | None, ranks: Callable[[int], RankPool]
) -> None:
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(4, 8, generator=random, dtype=torch.float64)
    parts = torch.randn(2, 5, 8, generator=random, dtype=torch.float64)
    experts = ParallelExperts(
        4, 8, 6, activation=ActivationSpec("gelu"), bias=True, seed=3, dtype=torch.float64
    )
    x = parts.flatten(0, 1).requires_grad_()
    expected = grouped_layer(weight, experts=experts)(x)
    expected.square().sum().backward()
    assert x.grad is not None
    found = ranks(2).run(layer_over_group, weight, parts, etp)
    for rank, (out, gradient) in enumerate(found):
        mine = slice(5 * rank, 5 * rank + 5)
        torch.testing.assert_close(out, expected[mine].detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, x.grad[mine], rtol=1e-12, atol=1e-12)


def test_groups_that_cannot_be() -> None:
    here = ExpertSpread(groups=LocalTransport())
    with pytest.raises(ValueError, match="either group or experts"):
        MoELayer(8, 6, 4, 2, group=here, experts=torch.nn.Identity())
    with pytest.raises(ValueError, match="several widths cannot be spread"):
        MoELayer(8, [6, 7], 2, 1, group=here)
