"""Losses against their formulas, transformers' function, and their known values."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_runtime.routing import LOSSES, LossInputs, make_gate

T, E, K = 30, 6, 2


def inputs(seed: int = 0, **changes) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, E, dtype=torch.float64, generator=generator)
    weights, ids = logits.softmax(-1).topk(K)
    values = {
        "logits_TE": logits,
        "probs_TE": logits.softmax(-1),
        "ids_TK": ids,
        "weights_TK": weights,
    }
    return LossInputs(**{**values, **changes})


def test_load_balance_is_transformers_loss_over_k():
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    case = inputs()
    theirs = load_balancing_loss_func((case.logits_TE,), num_experts=E, top_k=K)
    torch.testing.assert_close(
        LOSSES["load_balance"](case) * K, theirs.double(), rtol=1e-6, atol=1e-6
    )


def balance_by_hand(case: LossInputs, ids: Tensor, tokens: range) -> float:
    total = 0.0
    for e in range(E):
        share = sum(int(i == e) for t in tokens for i in ids[t]) / (len(tokens) * ids.shape[1])
        total += share * sum(case.probs_TE[t, e].item() for t in tokens) / len(tokens)
    return E * total


def test_balance_losses_by_hand():
    case = inputs(num_groups=3, num_sequences=5)
    groups = [range(g * 10, g * 10 + 10) for g in range(3)]
    sequences = [range(s * 6, s * 6 + 6) for s in range(5)]
    ids = case.ids_TK
    expected = {
        "load_balance": sum(balance_by_hand(case, ids, g) for g in groups) / 3,
        "first_choice_balance": sum(balance_by_hand(case, ids[:, :1], g) for g in groups) / 3,
        "sequence_balance": sum(balance_by_hand(case, ids, s) for s in sequences) / 5,
    }
    for name, value in expected.items():
        assert LOSSES[name](case).item() == pytest.approx(value, rel=1e-12), name


def test_global_balance_takes_the_load_of_the_batch_and_the_scores_of_its_part():
    """The mean over parts of a batch, values and gradients, is `load_balance` of all of it."""
    logits = inputs().logits_TE.clone().requires_grad_()
    ids = logits.topk(K).indices
    counts = ids.flatten().bincount(minlength=E)
    parts = [
        LossInputs(part, part.softmax(-1), of_part, part.softmax(-1), batch_counts_E=counts)
        for part, of_part in zip(logits.chunk(3), ids.chunk(3), strict=True)
    ]
    mean = sum(LOSSES["global_balance"](part) for part in parts) / 3
    whole = LOSSES["load_balance"](LossInputs(logits, logits.softmax(-1), ids, logits))
    torch.testing.assert_close(mean, whole)
    for one, other in zip(
        torch.autograd.grad(mean, logits), torch.autograd.grad(whole, logits), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("gate", ["softmax_topk", "sigmoid_topk", "moepp", "dense_to_sparse"])
def test_global_balance_counts_the_micro_batches_of_a_step(gate):
    torch.manual_seed(0)
    options = {"bias_update_rate": 1e-3} if gate == "sigmoid_topk" else {}
    layer = make_gate(
        gate, 8, E, K, loss_weights={"global_balance": 1.0, "load_balance": 1.0}, **options
    )
    assert not layer.state_dict().keys() & {"step_counts_E"}
    parts = torch.randn(3, 10, 8)
    for _ in range(2):  # a step starts from nothing
        first, *_, last = (layer(part) for part in parts)
        own = first.losses["load_balance"]
        torch.testing.assert_close(first.losses["global_balance"], own)
        assert not torch.allclose(last.losses["global_balance"], last.losses["load_balance"])
        layer.after_step()
    before = layer.step_counts_E.clone()
    for quiet in (layer.eval(), layer.train().requires_grad_(False)):
        with torch.set_grad_enabled(not quiet.training):
            quiet(parts[0])
    assert torch.equal(layer.step_counts_E, before), "only training counts"


def test_recomputed_activations_do_not_change_the_gradient_of_global_balance():
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        gate = make_gate("softmax_topk", 8, E, K, loss_weights={"global_balance": 1.0})
        for part in torch.randn(3, 10, 8):
            routing = checkpoint(gate, part, use_reentrant=False) if recompute else gate(part)
            routing.losses["global_balance"].backward()
        gradients.append(gate.weight.grad)
    assert torch.equal(*gradients)


def test_importance_and_z_by_hand():
    case = inputs()
    sums = [
        sum(
            w.item()
            for w, i in zip(case.weights_TK.flatten(), case.ids_TK.flatten(), strict=True)
            if i == e
        )
        for e in range(E)
    ]
    mean = sum(sums) / E
    variance = sum((s - mean) ** 2 for s in sums) / (E - 1)
    assert LOSSES["importance"](case).item() == pytest.approx(variance / mean**2, rel=1e-9)
    z = sum(torch.log(row.exp().sum()).item() ** 2 for row in case.logits_TE) / T
    assert LOSSES["z"](case).item() == pytest.approx(z, rel=1e-12)


def test_sentinels_count_for_nobody():
    case = inputs()
    ids = torch.cat([case.ids_TK, torch.full((T, 1), E)], dim=1)
    weights = torch.cat([case.weights_TK, torch.zeros(T, 1)], dim=1)
    padded = inputs(ids_TK=ids, weights_TK=weights)
    for loss in LOSSES.values():
        torch.testing.assert_close(loss(padded), loss(case))


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_against_differences(name):
    ids = inputs().ids_TK

    def loss(logits: Tensor) -> Tensor:
        probs = logits.softmax(-1)
        return LOSSES[name](LossInputs(logits, probs, ids, probs.gather(1, ids)))

    assert torch.autograd.gradcheck(loss, inputs().logits_TE[:T].requires_grad_())
