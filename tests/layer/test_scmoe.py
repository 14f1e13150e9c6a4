"""ScMoE's equations, written out, and the order of events that makes the overlap possible."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from moe_runtime.layer import MoELayer, ScMoEBlock, ScMoEParts

D = 8


def make_block(shortcut: str, events: list[str] | None = None, executor=None) -> ScMoEBlock:
    torch.manual_seed(1)
    linear = [nn.Linear(D, D, dtype=torch.float64) for _ in range(4)]
    parts = ScMoEParts(
        first_attention=linear[0],
        mlp=linear[1],
        second_attention=linear[2],
        shared=linear[3],
        routed=MoELayer(D, 6, 4, 1, gate="switch", dtype=torch.float64).eval(),
        make_norm=lambda: nn.RMSNorm(D, dtype=torch.float64),
    )
    log = None if events is None else (lambda routing: events.append("routing"))
    if events is not None:
        for name, module in zip(
            ("attention 1", "mlp", "attention 2", "shared"), linear, strict=True
        ):
            module.register_forward_hook(lambda *_, name=name: events.append(name))
    block = ScMoEBlock(parts, shortcut=shortcut, on_routing=log, executor=executor)
    for number, parameter in enumerate(block.parameters()):
        if parameter.ndim == 1:
            nn.init.uniform_(parameter, 0.5, 1.5 + number / 10)
    return block


def written_out(block: ScMoEBlock, x: Tensor, shortcut: str) -> Tensor:
    a = x + block.first_attention(block.first_attention_norm(x))
    m = a + block.mlp(block.mlp_norm(a))
    b = m + block.second_attention(block.second_attention_norm(m))
    source = {"input": x, "middle": a, "output": m}[shortcut]
    return b + block.shared(block.shared_norm(b)) + block.routed(block.shortcut_norm(source))


@pytest.mark.parametrize("shortcut", ["input", "middle", "output"])
def test_equations_and_gradients(shortcut):
    block = make_block(shortcut)
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    inputs = [x, *block.parameters()]
    got = torch.autograd.grad(block(x).square().sum(), inputs)
    expected = torch.autograd.grad(written_out(block, x, shortcut).square().sum(), inputs)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shortcut", "events"),
    [
        ("input", ["routing", "attention 1", "mlp", "attention 2", "shared"]),
        ("middle", ["attention 1", "routing", "mlp", "attention 2", "shared"]),
        ("output", ["attention 1", "mlp", "routing", "attention 2", "shared"]),
    ],
)
def test_routing_is_known_before_what_hides_it(shortcut, events):
    seen: list[str] = []
    make_block(shortcut, seen)(torch.randn(1, 3, D, dtype=torch.float64))
    assert seen == events


def test_executor_changes_no_bit_and_leaves_gradients_alone():
    x = torch.randn(2, 5, D, dtype=torch.float64)
    with ThreadPoolExecutor(1) as executor:
        threaded, plain = make_block("middle", executor=executor), make_block("middle")
        with torch.no_grad():
            assert torch.equal(threaded(x), plain(x))
        assert torch.equal(threaded(x), plain(x))
        threaded(x).sum().backward()
        assert threaded.routed.gate.weight.grad is not None


def test_bad_input():
    linear = nn.Linear(D, D)
    with pytest.raises(ValueError, match="shortcut must be"):
        make_block("midle")
    with pytest.raises(ValueError, match="shared_experts=0"):
        ScMoEBlock(
            ScMoEParts(
                linear, linear, linear, linear, MoELayer(D, 6, 4, 1, shared_experts=1), nn.Identity
            )
        )
