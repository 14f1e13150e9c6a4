"""`MoELayer(..., group=...)`: experts over processes, by the argument of the layer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_checks import (
    after_step,
    gate_in_ddp,
    grouped_layer,
    layer_over_group,
    loss_of,
    trained_layer,
    wrapped_spread_layer,
)
from thread_transport import ThreadGroup, ThreadTransport
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.layer import MoELayer
from moe_runtime.parallel import ExpertSpread, Overlap, ParallelExperts, expert_parallel
from moe_runtime.parallel.communication.transport import Arriving, LocalTransport
from moe_runtime.routing import Routing


def test_a_layer_over_two_ranks_equals_one_process(ranks):
    random = torch.Generator().manual_seed(5)
    weight = torch.randn(4, 8, generator=random, dtype=torch.float64)
    parts = torch.randn(2, 5, 8, generator=random, dtype=torch.float64)
    experts = ParallelExperts(
        4, 8, 6, activation=ActivationSpec("gelu"), bias=True, dtype=torch.float64
    )
    x = parts.flatten(0, 1).requires_grad_()
    expected = grouped_layer(weight, experts=experts)(x)
    expected.square().sum().backward()
    assert x.grad is not None
    for kind in ("group", "layout", "groups", "slices", "options"):
        found = ranks(2).run(layer_over_group, weight, parts, kind)
        for rank, (out, gradient) in enumerate(found):
            mine = slice(5 * rank, 5 * rank + 5)
            torch.testing.assert_close(out, expected[mine].detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, x.grad[mine], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("gate", "options", "is_compiled"),
    [
        ("sigmoid_topk", {"bias_update_rate": 0.02}, False),
        pytest.param("sigmoid_topk", {"bias_update_rate": 0.02}, True, marks=pytest.mark.long),
        ("moepp", {}, False),
        ("rl_r", {"top_p": 1e-9}, False),  # without chance: the likeliest expert
    ],
)
def test_a_layer_in_ddp_equals_one_process(ranks, gate, options, is_compiled):
    """Also where every backward pass of a step synchronises, and buffers with it."""
    parts = torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(3))
    parts[2:] += 1.0  # each process's experts are loaded in another way
    found = ranks(2).run(gate_in_ddp, gate, options, parts, is_compiled)
    layer = trained_layer(gate, options, 8)
    # the step's choices so far are those of both processes
    for pair in zip(*parts.chunk(2), strict=True):
        outs = layer(torch.cat(pair))
        loss_of(layer, outs).backward()
    layer.after_step()
    expected = after_step(layer)
    for one in found:
        assert one.keys() == expected.keys()
        for name, value in one.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrappers_refuse_experts_that_are_spread(wrapper, ranks):
    for text in ranks(2).run(wrapped_spread_layer, wrapper, "world"):
        assert "they hold different experts of this layer: " in text
    found = ranks(2).run(wrapped_spread_layer, wrapper, "alone")
    assert found == ["", ""], "copies may be kept equal"


class Narrated:
    """The transport of one rank, which notes when rows start to travel and when they are used."""

    def __init__(self, inner: ThreadTransport, events: list[str]) -> None:
        self._inner, self._events = inner, events
        self.rank, self.size = inner.rank, inner.size
        self.exchange_numbers, self.routes = inner.exchange_numbers, inner.routes

    def exchange(self, rows_RD: Tensor, route: object, **options: Any) -> Arriving:
        self._events.append(f"send {rows_RD.shape[1]}")
        arrived = self._inner.exchange(rows_RD, route, **options).wait()

        def wait() -> Tensor:
            self._events.append(f"use {arrived.shape[1]}")
            return arrived

        return Arriving(wait)


def narrate(transport: ThreadTransport, overlap: Overlap, panels: bool) -> list[list[str]]:
    """Events of this rank in a layer with shared experts: forward pass, and backward pass."""
    events: list[str] = []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            events.append(name)
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
            events.append(ctx.name)
            return grad, None

    class Columns:
        def panels(self, rows_RD: Tensor, counts_S: Tensor, num_panels: int) -> Iterator[Tensor]:
            for part in rows_RD.tensor_split(num_panels, dim=1):
                yield Told.apply(part, f"experts {part.shape[1]}")

    x_TD = torch.ones(4, 4, requires_grad=True)
    y_TD = expert_parallel(
        x_TD,
        Routing(torch.tensor([[0], [1], [0], [1]]), torch.ones(4, 1), 2),
        Columns() if panels else lambda rows, counts: Told.apply(rows, "experts 4"),
        Narrated(transport, events),
        overlap=overlap,
        shared=lambda x: Told.apply(x, "shared"),
    )
    forward = list(events)
    events.clear()
    y_TD.sum().backward()
    return [forward, events]


def test_what_is_computed_while_rows_travel():
    """Comet's order: rows that stay and shared experts first; a panel leaves before the next one is
    computed. The backward pass mirrors it."""
    all_at_once = Overlap(is_local_first=False)
    plain, backward = ThreadGroup(2).run(narrate, Overlap(), False)[0]
    assert plain[:4] == ["send 4", "shared", "experts 4", "use 4"]
    assert plain[4:] == ["experts 4", "send 4", "use 4"]
    assert backward == [
        *["send 4", "use 4", "experts 4", "send 4"],
        *["experts 4", "shared", "use 4"],
    ]
    chunks, backward = ThreadGroup(2).run(narrate, Overlap(degree=2, is_local_first=False), False)[
        0
    ]
    # The second chunk travels while the first is computed, results return behind it.
    assert chunks[:3] == ["send 4", "send 4", "shared"]
    assert chunks[3:] == [*["use 4", "experts 4", "send 4"] * 2, "use 4", "use 4"]
    panels, _ = ThreadGroup(2).run(narrate, replace(all_at_once, panels=2), True)[0]
    assert panels[:3] == ["send 4", "shared", "use 4"]
    assert panels[3:] == ["experts 2", "send 2", "experts 2", "send 2", "use 2", "use 2"]


def test_groups_that_cannot_be():
    here = ExpertSpread(groups=LocalTransport())
    with pytest.raises(ValueError, match="either group or experts"):
        MoELayer(8, 6, 4, 2, group=here, experts=torch.nn.Identity())
    with pytest.raises(ValueError, match="several widths cannot be spread"):
        MoELayer(8, [6, 7], 2, 1, group=here)
    with pytest.raises(TypeError, match="expected a process group, a layout or a Transport"):
        MoELayer(8, 6, 4, 2, group=4)  # pyright: ignore[reportArgumentType]
