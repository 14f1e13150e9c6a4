"""RL-R: sampled choices and their rewards, against enumeration and the definition."""

import pytest
import torch
from torch import Tensor

from moe_runtime.layer import MoELayer
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.routing import Policy, Reinforce, RoutingContext
from moe_runtime.routing.reinforce import nucleus

D, E = 6, 5


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_nucleus_is_the_fewest_that_hold_the_share():
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.97, 0.01, 0.01, 0.01]], dtype=torch.float64)
    kept = nucleus(probs.log(), 0.65).exp()
    expected = torch.tensor([[0, 4 / 7, 0, 3 / 7], [1, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(kept, expected)
    torch.testing.assert_close(nucleus(probs.log(), 1.0).exp(), probs)


def test_experts_are_sampled_as_likely_as_they_are():
    gate = Reinforce(D, E, top_p=0.9)
    num_tokens = 40_000
    x = torch.randn(1, D, generator=seeded()).expand(num_tokens, D)
    routing = gate(x, RoutingContext(generator=seeded()))
    expected = nucleus((x[:1] @ gate.weight.T).log_softmax(-1), 0.9).exp()[0].detach()
    shares = routing.counts_E / num_tokens
    sigma = (expected * (1 - expected) / num_tokens).sqrt()
    assert ((shares - expected).abs() <= 4 * sigma + 1e-9).all()
    assert routing.policy is not None
    log_p = expected.log()[routing.ids_TK[:, 0]]
    torch.testing.assert_close(routing.policy.log_probs_T, log_p)
    again = gate(x, RoutingContext(generator=seeded()))
    assert torch.equal(again.ids_TK, routing.ids_TK)
    assert gate.eval()(x).policy is None


def test_the_gradient_is_that_of_the_expected_reward():
    """Averaged over all choices with their probabilities; the baseline adds nothing to it."""
    gate = Reinforce(D, E, dtype=torch.float64)
    logits = torch.randn(E, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(E, dtype=torch.float64)
    probs = logits.softmax(-1)
    (exact,) = torch.autograd.grad(-(probs * rewards).sum(), logits, retain_graph=True)
    estimated = torch.zeros(E, dtype=torch.float64)
    for expert in range(E):
        value = torch.full((1,), 0.7, dtype=torch.float64)
        policy = Policy(logits.log_softmax(-1)[expert : expert + 1], value)
        loss = gate.policy_loss(policy, rewards[expert : expert + 1])
        (gradient,) = torch.autograd.grad(loss, logits)
        estimated += probs[expert].detach() * gradient
    torch.testing.assert_close(estimated, exact, rtol=1e-12, atol=1e-12)


def test_the_baseline_follows_the_rewards_and_leaves_the_tokens_alone():
    gate = Reinforce(D, E, dtype=torch.float64)
    x = torch.randn(30, D, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(30, dtype=torch.float64)
    routing = gate(x)
    loss = gate.policy_loss(routing.policy, rewards)
    bias, weight = torch.autograd.grad(
        loss, [gate.value_bias, gate.value_weight], retain_graph=True
    )
    # Zero at first, so the derivative of half the mean square is minus the mean of the rewards.
    torch.testing.assert_close(bias, -rewards.mean())
    torch.testing.assert_close(weight, -(rewards @ x.detach()) / 30)
    # The tokens learn from the policy alone: the same gradient without the baseline's square.
    (of_x,) = torch.autograd.grad(loss, x, retain_graph=True)
    (expected,) = torch.autograd.grad(-(rewards * routing.policy.log_probs_T).mean(), x)
    torch.testing.assert_close(of_x, expected)


def test_a_rewarded_expert_becomes_the_choice():
    torch.manual_seed(0)
    gate = Reinforce(D, E, loss_weights={})
    x = torch.randn(1, D).expand(64, D)
    optimizer = torch.optim.Adam(gate.parameters(), lr=0.05)
    for _ in range(120):
        routing = gate(x)
        rewards = (routing.ids_TK[:, 0] == 3).float()
        optimizer.zero_grad()
        gate.policy_loss(routing.policy, rewards).backward()
        optimizer.step()
    assert (gate.eval()(x).ids_TK == 3).all()
    assert gate.train()(x).policy.values_T.mean() > 0.8


def test_the_language_model_rewards_with_its_own_loss():
    torch.manual_seed(0)
    moe = ExpertsConfig(
        num_experts=E,
        top_k=1,
        intermediate_size=8,
        gate="rl_r",
        gate_options={"policy_weight": 0.5},
    )
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    model = LanguageModel(LanguageModelConfig(**sizes, max_positions=16, vocab_size=40, moe=moe))
    ids = torch.randint(40, (3, 13))
    torch.manual_seed(1)
    losses = model.losses(ids[:, :-1], ids[:, 1:])
    torch.manual_seed(1)
    logits = model(ids[:, :-1]).flatten(0, 1)
    each: Tensor = torch.nn.functional.cross_entropy(
        logits, ids[:, 1:].reshape(-1), reduction="none"
    ).detach()
    expected = 0.0
    for layer in model.routed_layers():
        assert isinstance(layer, MoELayer)
        policy = layer.aux.routing.policy
        surprise = -each - policy.values_T
        loss = surprise.square().mean() / 2 - (surprise * policy.log_probs_T).mean()
        expected += (layer.aux.loss + 0.5 * loss).item() / 2
    assert losses.auxiliary.item() == pytest.approx(expected, rel=1e-5)
    losses.auxiliary.backward()
    for layer in model.routed_layers():
        for parameter in layer.gate.parameters():
            assert parameter.grad is not None
            assert parameter.grad.any()
    model.eval()
    assert model.losses(ids[:, :-1], ids[:, 1:]).auxiliary.isfinite()


def test_bad_rewards_name_the_gate():
    gate = Reinforce(D, E, name="the gate of layer 3")
    routing = gate(torch.randn(4, D))
    with pytest.raises(ValueError, match=r"layer 3: expected \[4\] rewards, got \[3\]"):
        gate.policy_loss(routing.policy, torch.zeros(3))
