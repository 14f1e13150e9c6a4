"""Each gate's layer against fp64 arithmetic that computes all experts on all tokens."""

import pytest
import torch
from dense_moe import dense_layer
from gate_formulas import FORMULAS, GateCase

from moe_runtime.layer import MoELayer

HIDDEN, INTER, TOKENS = 12, 10, 24


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case.label)
def test_outputs_and_gradients(case: GateCase) -> None:
    """1e-10 relative: fp64 sums of at most a few hundred terms err by far less."""
    torch.manual_seed(3)
    layer = MoELayer(
        HIDDEN,
        INTER,
        case.num_experts,
        case.top_k,
        gate=case.gate,
        gate_options=case.options,
        dtype=torch.float64,
        bias=True,
    )
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    layer.train(case.training)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    inputs = [x, *layer.parameters()]

    ours = layer(x)
    ours_grads = torch.autograd.grad((ours * direction).sum(), inputs, allow_unused=True)
    weights_TE = case.formula(layer, x)
    exact = dense_layer(layer, x, weights_TE)
    exact_grads = torch.autograd.grad((exact * direction).sum(), inputs, allow_unused=True)

    assert (weights_TE > 0).sum() > 0, "the formula chose nobody, which proves nothing"
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
    for got, expected, wanted in zip(ours_grads, exact_grads, inputs, strict=True):
        zero = torch.zeros_like(wanted)
        torch.testing.assert_close(
            zero if got is None else got,
            zero if expected is None else expected,
            rtol=1e-10,
            atol=1e-10,
        )
