"""MoE++: experts without weights, heterogeneous loss and capacity, gating residuals."""

import math

import pytest
import torch
from torch import Tensor

from moe_runtime.layer import MoELayer
from moe_runtime.routing import Capacity, Routing, ZeroExpertCounts, make_gate

D = 16


def rows(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, D, generator=torch.Generator().manual_seed(0))


def moepp_layer(**options) -> MoELayer:
    torch.manual_seed(4)
    return MoELayer(D, 8, 4, 2, gate="moepp", gate_options=options, dtype=torch.float64)


def test_without_zero_experts_it_is_softmax_top_k():
    none = ZeroExpertCounts(0, 0, 0)
    layer = moepp_layer(zero_experts=none, gating_residual=False)
    plain = MoELayer(D, 8, 4, 2, dtype=torch.float64)
    plain.load_state_dict({n: t for n, t in layer.state_dict().items() if "zero." not in n})
    torch.testing.assert_close(layer(rows(20).double()), plain(rows(20).double()))


def test_tokens_of_zero_experts_only_are_exact_and_reach_no_expert():
    layer = moepp_layer(zero_experts=ZeroExpertCounts(constant=0, copy=1, zero=1))
    layer.gate.weight.data[:4] = 0.0
    layer.gate.weight.data[4:] = 50.0  # copy and zero win wherever the sum of x is positive
    x = rows(20).double().abs()
    routing: Routing = layer.route(x)
    assert routing.counts_E.sum() == 0, "no expert's weights are fetched for these tokens"
    assert routing.zero is not None
    assert (routing.zero.ids_TK < 2).all()
    assert torch.equal(layer(x), x), "weight 1 goes to the copy once the zero's is taken away"


def test_heterogeneous_capacity_and_loss():
    gate = make_gate("moepp", D, 16, 1, capacity=Capacity(1.1), tau=0.75)
    limits = gate.slot_limit(gate.capacity, 1000)
    assert limits.tolist() == [math.ceil(51.5625)] * 16 + [math.ceil(68.75)] * 4
    gate = make_gate("moepp", D, 3, 2, tau=0.5)
    routing = gate(rows(30))
    probs = routing.logits_TE.detach().softmax(-1)
    ids = torch.where(routing.ids_TK < 3, routing.ids_TK, routing.zero.ids_TK + 3)
    expected = sum(
        (1.0 if e < 3 else 0.5) * float((ids == e).sum()) / 30 * float(probs[:, e].mean())
        for e in range(7)
    )
    assert routing.losses["heterogeneous_balance"].item() == pytest.approx(expected, rel=1e-5)


def test_gating_residual_chain_differentiates():
    layers = [moepp_layer() for _ in range(3)]
    for layer in layers:
        torch.nn.init.normal_(layer.gate.residual, std=0.3)

    def chain(x: Tensor) -> Tensor:
        previous = None
        for layer in layers:
            x = x + layer(x, previous_logits=previous)
            previous = layer.aux.routing.logits_TE
        return x

    x = rows(1).double().requires_grad_()  # tokens do not meet here
    assert torch.autograd.gradcheck(chain, x)
    chain(rows(40).double()).sum().backward()  # one token may choose experts without weights only
    assert layers[1].gate.residual.grad.any()
    assert layers[0].zero.vectors.grad is not None
    unused = layers[0].gate.residual.grad
    assert unused is not None, "wrappers wait for a gradient of every parameter"
    assert not unused.any(), "no layer comes before the first one"
