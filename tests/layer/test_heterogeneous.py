"""A layer whose experts differ in width."""

import copy

import pytest
import torch

from moe_runtime.layer import HeterogeneousExperts, MoELayer, export_state


def test_equals_the_experts_by_hand():
    widths = [8, 24, 40]
    layer = MoELayer(12, widths, num_experts=3, top_k=2).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    out = layer(x)
    assert layer.aux is not None
    routing = layer.aux.routing
    experts = layer.experts
    assert isinstance(experts, HeterogeneousExperts)
    parts = {name: p.split(widths) for name, p in experts.named_parameters()}
    for token, x_D in enumerate(x.reshape(-1, 12)):
        expected = torch.zeros(12, dtype=torch.float64)
        for expert, weight in zip(
            routing.ids_TK[token].tolist(), routing.weights_TK[token], strict=True
        ):
            gate, up, down = (parts[f"{name}_proj"][expert] for name in ("gate", "up", "down"))
            expected += weight * ((torch.nn.functional.silu(gate @ x_D) * (up @ x_D)) @ down)
        torch.testing.assert_close(out.reshape(-1, 12)[token], expected)


def test_equal_widths_are_the_ordinary_layer():
    ordinary = MoELayer(16, 20, num_experts=4, top_k=2, bias=True)
    layer = MoELayer(16, [20] * 4, num_experts=4, top_k=2, bias=True, recompute=True)
    assert [p.abs().max() for n, p in layer.experts.named_parameters() if "bias" in n] == [0] * 3
    layer.gate.load_state_dict(ordinary.gate.state_dict())
    for name, parameter in ordinary.experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    state = ordinary.experts.state_dict()
    gate, up = state["gate_up_proj"].chunk(2, dim=1)
    gate_bias, up_bias = state["gate_up_proj_bias"].chunk(2, dim=1)
    layer.experts.load_state_dict(
        {
            "gate_proj": gate.flatten(0, 1),
            "up_proj": up.flatten(0, 1),
            "down_proj": state["down_proj"].transpose(1, 2).flatten(0, 1),
            "gate_proj_bias": gate_bias.flatten(),
            "up_proj_bias": up_bias.flatten(),
            "down_proj_bias": state["down_proj_bias"],
        }
    )
    x = torch.randn(9, 16)
    torch.testing.assert_close(layer(x), ordinary(x))
    for one in (layer, ordinary):
        one(x).square().sum().backward()
    torch.testing.assert_close(layer.gate.weight.grad, ordinary.gate.weight.grad)
    wanted = ordinary.experts.down_proj.grad.transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(layer.experts.down_proj.grad, wanted)


def test_copies_and_runs_under_autocast():
    layer = MoELayer(16, [8, 16, 32, 64], num_experts=4, top_k=2, activation="relu2")
    x = torch.randn(30, 16)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_what_such_a_layer_cannot_be():
    wrong = [
        ({}, [8, 8], "one for each of 3 experts; got 2 numbers"),
        ({"shared_experts": 1}, [8, 8, 9], "shared_experts need one intermediate_size"),
        ({}, [8, 0, 9], r"a list of one for each expert, got \[8, 0, 9\]"),
        ({"impl": "fast"}, [8, 8, 9], "impl must be one of auto, triton, native, reference, torch"),
    ]
    for options, widths, message in wrong:
        with pytest.raises(ValueError, match=message):
            MoELayer(8, widths, num_experts=3, top_k=1, **options)(torch.zeros(2, 8))
    layer = MoELayer(8, [8, 8, 9], num_experts=3, top_k=1)
    with pytest.raises(ValueError, match="experts of different widths"):
        export_state(layer, "megablocks")
