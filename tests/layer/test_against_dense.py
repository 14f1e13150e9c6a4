"""Each gate's layer against fp64 arithmetic that computes all experts on all tokens."""

import pytest
import torch
from dense_moe import dense_layer
from gate_cases import FORMULAS, GateCase
from gate_formulas import previous_scores, random_source, token_numbers

from moe_runtime.layer import MoELayer
from moe_runtime.routing import GATES

HIDDEN, INTER, TOKENS = 12, 10, 24


def make_layer(case: GateCase) -> MoELayer:
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
        **case.layer,
    )
    for parameter in layer.parameters():  # none may be zero: a zero hides what it multiplies
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    return layer.train(case.training)


def test_every_gate_has_a_formula():
    assert {case.gate for case in FORMULAS} == {*GATES}


@pytest.mark.parametrize("case", FORMULAS, ids=lambda case: case.label)
def test_outputs_and_gradients(case):
    """1e-10 relative: fp64 sums of at most a few hundred terms err by far less."""
    layer = make_layer(case)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    inputs = [x, *layer.parameters()]
    previous = previous_scores(TOKENS, 10 + 2 * ("more" in case.label))

    ours = layer(
        x,
        token_ids=token_numbers(TOKENS),
        previous_logits=previous if case.gate == "moepp" else None,
        generator=random_source(),
    )
    ours_grads = torch.autograd.grad((ours * direction).sum(), inputs, allow_unused=True)
    weights_TE = case.formula(layer, x)
    exact = dense_layer(layer, x, weights_TE)
    exact_grads = torch.autograd.grad((exact * direction).sum(), inputs, allow_unused=True)

    assert (weights_TE > 0).sum() >= 0.7 * TOKENS, "the formula chose hardly anybody"
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)
    for got, expected, wanted in zip(ours_grads, exact_grads, inputs, strict=True):
        zero = torch.zeros_like(wanted)
        torch.testing.assert_close(
            zero if got is None else got,
            zero if expected is None else expected,
            rtol=1e-10,
            atol=1e-10,
        )
