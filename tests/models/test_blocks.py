"""Blocks with shortcuts, and blocks that `torch.compile` has fused."""

from typing import Any

import pytest
import torch
from language_models import VOCAB, build, experts, shape
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.routing import RoutingContext

IDS = torch.arange(2 * 21).reshape(2, 21) * 5 % VOCAB


def shortcut_shape(shortcut: str, **changes: Any) -> Any:
    moe = experts(shortcut=shortcut, shared_experts=2, **changes)
    return shape(moe=moe, num_layers=4, intermediate_size=30)


def by_definition(model: Any, shortcut: str, ids: Tensor) -> Tensor:
    """ScMoE's equations (Cai et al. 2024), every expert computed for every token."""
    x = model.embedding(ids)
    for block in model.blocks:
        pair = block.pair
        middle = x + pair.first_attention(pair.first_attention_norm(x), model.rotary)
        output = middle + pair.mlp(pair.mlp_norm(middle))
        source = pair.shortcut_norm({"input": x, "middle": middle, "output": output}[shortcut])
        h = output + pair.second_attention(pair.second_attention_norm(output), model.rotary)
        gate, up = (pair.shared_norm(h) @ pair.shared.gate_up_proj.weight.T).chunk(2, dim=-1)
        shared = (F.silu(gate) * up) @ pair.shared.down_proj.weight.T
        probs = (source @ pair.routed.gate.weight.T).softmax(dim=-1)
        best = probs >= probs.topk(3, dim=-1).values[..., -1:]
        weights = probs * best / (probs * best).sum(-1, keepdim=True)
        gate, up = torch.einsum("bcd,efd->bcef", source, pair.routed.experts.gate_up_proj).chunk(
            2, dim=-1
        )
        each = torch.einsum("bcef,edf->bced", F.silu(gate) * up, pair.routed.experts.down_proj)
        x = h + shared + (weights[..., None] * each).sum(dim=2)
    return model.output(model.norm(x))


@pytest.mark.parametrize("shortcut", ["input", "middle", "output"])
def test_shortcuts_are_the_papers_equations(shortcut):
    model = build(shortcut_shape(shortcut)).double()
    reference = by_definition(model, shortcut, IDS)
    # The rotation's table is float32; both sides use it.
    assert torch.allclose(model(IDS), reference, atol=1e-10)
    assert [layer.name for layer in model.routed_layers()] == ["layer 1", "layer 3"]
    losses = model.losses(IDS[:, :-1], IDS[:, 1:])
    (losses.cross_entropy + losses.auxiliary).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_shortcuts_give_gates_what_they_ask_for():
    """Token ids for hash routing, and the previous routed layer's scores for MoE++."""
    model = build(shortcut_shape("middle", gate="moepp"))
    asked: list[RoutingContext] = []
    layers = list(model.routed_layers())
    for layer in layers:
        layer.gate.register_forward_pre_hook(lambda _, inputs: asked.append(inputs[1]))
    model(IDS)
    for context in asked:
        assert context.token_ids_T is not None
        assert torch.equal(context.token_ids_T, IDS.flatten())
        assert context.num_sequences == 2
    assert asked[0].previous_logits_TE is None
    assert layers[0].aux is not None
    assert asked[1].previous_logits_TE is layers[0].aux.routing.logits_TE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers must be even for moe.shortcut"),
        ({"dense_layers": (0,)}, "omit dense_layers"),
        ({"intermediate_size": None}, "intermediate_size is needed"),
        ({"moe": {"shared_experts": 0}}, "shared_experts >= 1, got 0"),
        ({"moe": {"shared_expert_gate": True}}, "no shared_expert_gate"),
    ],
)
def test_shortcuts_that_do_not_fit_are_explained(changes, message):
    moe = {"shortcut": "middle", "shared_experts": 1, **changes.get("moe", {})}
    sizes: dict[str, Any] = {"num_layers": 2, "intermediate_size": 8, **changes}
    with pytest.raises(ValueError, match=message):
        shape(**(sizes | {"moe": experts(**moe)}))


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.long), True])
def test_compiled_blocks_compute_the_same(recompute):
    config = shape(moe=experts(shared_experts=1), num_layers=1)
    plain, compiled = build(config).train(), build(config).train()
    compiled.recompute = recompute
    # The compiler's own fusion is torch's affair; that everything can be captured is ours.
    compiled.compile_blocks(backend="aot_eager")
    for model in (plain, compiled):
        losses = model.losses(IDS[:, :-1], IDS[:, 1:])
        (losses.cross_entropy + losses.auxiliary).backward()
    for (name, mine), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        assert "_orig_mod" not in name
        assert mine.grad is not None
        assert theirs.grad is not None
        # Gradients below 1, summed in another order over 42 tokens.
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=1e-5)
