"""The property tests of the papers, one gate after another."""

import math
from functools import partial

import pytest
import torch
from gate_cases import FORMULAS
from gate_formulas import VOCAB
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_runtime.layer import MoELayer
from moe_runtime.routing import LOSSES, Capacity, RoutingContext, expert_counts, make_gate
from moe_runtime.routing.assigned import best_assignment, log_transport_plan

D = 16
RANDOM = {"switch", "gshard", "noisy_topk", "dense_to_sparse", "rl_r"}
CASES = {case.label: case for case in FORMULAS}
# Gates that document that they wait for the device: a solver on the host, ids of unknown width.
WAITING = {"base", "dense_to_sparse", "expert_choice"}
# Groups, capacity and turns depend on the order of tokens by design.
ORDERLESS = [
    label
    for label, case in CASES.items()
    if not case.layer and case.gate not in {*RANDOM, "round_robin"}
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, D, generator=seeded(seed))


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("num_tokens", [0, 1, 24])
def test_every_gate_keeps_the_contract(label, num_tokens):
    case = CASES[label]
    gate = make_gate(case.gate, D, case.num_experts, case.top_k, **case.options).train(
        case.training
    )
    context = RoutingContext(token_ids_T=torch.arange(num_tokens) % VOCAB, generator=seeded())
    routing = gate(rows(num_tokens), context)
    assert routing.ids_TK.shape[0] == num_tokens
    assert ((routing.ids_TK >= 0) & (routing.ids_TK <= case.num_experts)).all()
    assert (routing.weights_TK[~routing.is_dispatched_TK] == 0).all()
    assert routing.weights_TK.isfinite().all()
    assert (routing.weights_TK >= 0).all()
    assert routing.counts_E.sum() == routing.is_dispatched_TK.sum()
    assert all(loss.isfinite() for loss in routing.losses.values())
    for ids in routing.ids_TK:  # nobody is chosen twice
        real = ids[ids < case.num_experts].tolist()
        assert len(real) == len(set(real))


@pytest.mark.parametrize("label", ORDERLESS)
def test_permuted_tokens_and_experts_permute_the_output(label):
    """Expert numbers name places only, and so does the order of tokens."""
    case = CASES[label]
    torch.manual_seed(2)
    layer = MoELayer(
        D,
        8,
        case.num_experts,
        case.top_k,
        gate=case.gate,
        gate_options=case.options,
        dtype=torch.float64,
    ).train(case.training)
    x, ids = rows(24).double(), torch.arange(24) * 7 % VOCAB
    order = torch.randperm(24, generator=seeded(5))
    out = layer(x, token_ids=ids)
    torch.testing.assert_close(layer(x[order], token_ids=ids[order]), out[order])
    if case.gate in ("hash", "prototype", "sam", "group_limited_topk", "moepp"):
        return  # these give numbers a meaning
    experts = torch.randperm(case.num_experts, generator=seeded(6))
    state = layer.state_dict()
    for name in state:
        if state[name].shape[:1] == (case.num_experts,):
            state[name] = state[name][experts]
    layer.load_state_dict(state)
    torch.testing.assert_close(layer(x, token_ids=ids), out)


@pytest.mark.parametrize("label", [label for label in CASES if CASES[label].gate not in WAITING])
def test_nothing_is_read_back_from_the_device(label):
    """On the meta device, where reading a value is an error: choices, places, losses, backward."""
    case = CASES[label]
    options = {name: 3 if name == "max_iterations" else o for name, o in case.options.items()}
    gate = make_gate(
        case.gate,
        D,
        case.num_experts,
        case.top_k,
        capacity=Capacity(1.0, "priority"),
        loss_weights=None if case.gate == "hash" else dict.fromkeys(LOSSES, 1.0),
        device="meta",
        **options,
    ).train(case.training)
    x = torch.randn(24, D, device="meta", requires_grad=True)
    context = RoutingContext(torch.zeros(24, dtype=torch.int64, device="meta"))
    routing = gate.finish(gate.decide(x, context), context)  # `forward` adds autocast's switch
    if gate.loss_weights:
        (routing.weights_TK.sum() + sum(routing.losses.values())).backward()
        assert x.grad is not None
    assert routing.counts_E.is_meta
    gate.after_step()


def test_gradient_reaches_every_gate_but_hash():
    for label, case in CASES.items():
        if case.gate == "rl_r":  # rewards reach it, the output does not: see test_reinforce.py
            continue
        layer = MoELayer(
            D,
            8,
            case.num_experts,
            case.top_k,
            gate=case.gate,
            gate_options=case.options,
            **case.layer,
        ).train(case.training)
        out = layer(rows(24)[None], token_ids=torch.arange(24)[None])
        out.square().sum().backward()
        parameters = {n: p for n, p in layer.gate.named_parameters() if n != "residual"}
        assert bool(parameters) == (case.gate != "hash")
        for name, parameter in parameters.items():
            if case.training or name != "noise_weight":
                assert parameter.grad is not None, (label, name)
                assert parameter.grad.any(), (label, name)


def test_gshard_uses_the_second_expert_as_often_as_twice_its_weight():
    gate = make_gate("gshard", 2, 2, 2)
    gap = 1.2
    gate.weight.data = torch.tensor([[gap, 0.0], [0.0, 0.0]])
    second = 1 / (1 + math.exp(gap))
    num = 100_000
    routing = gate(torch.tensor([[1.0, 0.0]]).expand(num, 2), RoutingContext(generator=seeded()))
    rate = routing.is_dispatched_TK[:, 1].double().mean().item()
    sigma = math.sqrt(2 * second * (1 - 2 * second) / num)
    assert abs(rate - 2 * second) < 3 * sigma
    assert routing.is_dispatched_TK[:, 0].all()
    assert gate.eval()(torch.ones(9, 2)).is_dispatched_TK.all(), "evaluation is not random"


def test_one_prototype_is_switch_bit_for_bit():
    one, switch = make_gate("prototype", D, 6, 1), make_gate("switch", D, 6, 1, jitter=0.0)
    switch.load_state_dict(one.state_dict())
    a, b = one(rows(20)), switch(rows(20))
    assert torch.equal(a.ids_TK, b.ids_TK)
    assert torch.equal(a.weights_TK, b.weights_TK)


def test_each_prototype_serves_every_token_once_and_order_does_not_matter():
    gate = make_gate("prototype", D, 6, 3)
    routing = gate(rows(25))
    assert routing.counts_E.view(3, 2).sum(dim=1).tolist() == [25, 25, 25]
    swapped = make_gate("prototype", D, 6, 3)
    swapped.weight.data = gate.weight.data.view(3, 2, D)[[2, 0, 1]].reshape(6, D)
    torch.testing.assert_close(swapped(rows(25)).weights_TK, routing.weights_TK[:, [2, 0, 1]])


def test_prototype_capacity_of_top_1():
    x = rows(60)
    for slots, limit in (("k", 20), ("1", 10)):
        gate = make_gate("prototype", D, 6, 2, capacity=Capacity(1.0), slots=slots)
        assert gate(x).counts_E.max() <= limit
        assert gate.slot_limit(gate.capacity, 60) == limit


def test_noisy_expected_load_is_what_redrawn_noise_gives():
    """The load that the loss uses, against the mean over many draws of one expert's noise."""
    torch.manual_seed(0)
    clean, sigma = torch.randn(1, 5).double(), torch.rand(1, 5).double() + 0.5
    noisy = clean + torch.randn(1, 5).double() * sigma
    gate = make_gate("noisy_topk", D, 5, 2)
    load = gate.expected_load(clean, noisy, sigma, noisy.topk(3).values)
    num = 40_000
    for e in range(5):
        again = noisy.repeat(num, 1)
        again[:, e] = clean[0, e] + torch.randn(num, generator=seeded(e)).double() * sigma[0, e]
        rate = (again.topk(2).indices == e).any(dim=1).double().mean()
        assert abs(rate - load[e]) < 4 * math.sqrt(0.25 / num)


def test_expert_choice_is_balanced_and_caps_experts_of_a_token():
    gate = make_gate("expert_choice", D, 8, 2, num_groups=2)
    routing = gate(rows(64))
    assert routing.counts_E.tolist() == [16] * 8
    capped = make_gate("expert_choice", D, 8, 2, max_experts_per_token=3)
    capped.load_state_dict(gate.state_dict())
    few = capped(rows(64))
    assert few.ids_TK.shape[1] == 3
    assert few.counts_E.max() <= 16


def test_sinkhorn_marginals_and_fewer_collisions_with_iterations():
    logits = torch.randn(200, 8, generator=seeded()).double() + torch.linspace(0, 3, 8)
    plan = log_transport_plan(logits, 500, 1e-12).exp()
    assert plan.sum(0).tolist() == pytest.approx([1 / 8] * 8, rel=1e-9)
    assert plan.sum(1).tolist() == pytest.approx([1 / 200] * 200, rel=1e-6)

    def variation(ids: Tensor) -> float:
        counts = expert_counts(ids, 8).double()
        return float(counts.std(correction=0) / counts.mean())

    few, many = (log_transport_plan(logits, n, 0.0).argmax(1) for n in (1, 100))
    assert variation(logits.argmax(1)) > 1.5 * variation(few)
    assert variation(many) <= variation(few)
    assert variation(many) < 0.35


def test_sinkhorn_is_the_best_assignment_when_it_is_cold():
    logits = torch.randn(16, 4, generator=seeded(3)).double()
    plan = log_transport_plan(logits * 60, 5000, 1e-13)
    assert torch.equal(plan.argmax(1), best_assignment(logits))


def test_base_against_all_assignments_and_equal_shares():
    from itertools import permutations

    logits = torch.randn(6, 3, generator=seeded(1)).double()
    columns = [0, 0, 1, 1, 2, 2]
    best_score = max(
        sum(logits[t, e].item() for t, e in enumerate(order))
        for order in set(permutations(columns))
    )
    ids = best_assignment(logits)
    assert expert_counts(ids, 3).tolist() == [2, 2, 2]
    assert logits.gather(1, ids[:, None]).sum().item() == pytest.approx(best_score)
    routing = make_gate("base", D, 4, 1, num_groups=2)(rows(44))
    assert routing.counts_E.max() <= 12


def test_hash_table_is_balanced_on_a_zipf_corpus():
    """The load can be no more even than the most frequent token allows; 1.1 times that is asked."""
    vocab, experts = 2000, 8
    frequencies = [1 / (rank + 1) for rank in range(vocab)]
    gate = make_gate("hash", D, experts, 1, vocab_size=vocab, frequencies=frequencies)
    load = torch.zeros(experts).index_add(0, gate.table[:, 0], torch.tensor(frequencies))
    ideal = max(frequencies[0], sum(frequencies) / experts)
    assert load.max() <= 1.1 * ideal
    assert gate.table.flatten().bincount(minlength=experts).min() > 0


def test_sam_stays_in_one_group_and_alignment_is_what_it_loses():
    gate = make_gate("sam", D, 8, 2, num_expert_groups=4)
    routing = gate(rows(50))
    groups = routing.ids_TK // 2
    assert (groups == groups[:, :1]).all()
    probs = routing.logits_TE.detach().softmax(-1)
    expected = 0.0
    for t in range(50):
        weakest = probs[t, routing.ids_TK[t]].min()
        expected += sum(
            max(0.0, float(probs[t, e] - weakest)) for e in range(8) if e // 2 != groups[t, 0]
        )
    assert routing.losses["alignment"].item() == pytest.approx(expected / 50, rel=1e-5)


def test_dense_to_sparse_uses_fewer_experts_as_it_cools():
    torch.manual_seed(0)
    gate = make_gate("dense_to_sparse", D, 8, 1, tau_start=4.0, tau_end=0.02, anneal_steps=10)
    used = []
    for _ in range(12):
        used.append(
            gate(rows(200), RoutingContext(generator=seeded())).is_dispatched_TK.sum().item()
        )
        gate.after_step()
    assert used[0] > 6 * 200
    assert used == sorted(used, reverse=True)
    assert used[-1] < 1.3 * 200
    assert "num_steps" in gate.state_dict()


def test_group_limit_and_biased_selection_with_unbiased_weights():
    gate = make_gate("group_limited_topk", D, 16, 4, num_expert_groups=4, num_limited_groups=2)
    routing = gate(rows(40))
    assert all(len(set((ids // 4).tolist())) <= 2 for ids in routing.ids_TK)
    biased = make_gate("sigmoid_topk", D, 8, 2, bias_update_rate=1e-3)
    biased.expert_bias[5] = 10.0
    chosen = biased(rows(40))
    assert (chosen.ids_TK == 5).any(dim=1).all(), "the bias decides who is chosen"
    raw = chosen.logits_TE.sigmoid().gather(1, chosen.ids_TK)
    torch.testing.assert_close(chosen.weights_TK, raw / raw.sum(-1, keepdim=True))


def test_bias_moves_against_the_load_and_balances():
    torch.manual_seed(0)
    gate = make_gate("sigmoid_topk", D, 8, 2, bias_update_rate=1e-2, loss_weights={})
    x = rows(400) + 1.0  # a common direction: some experts are everybody's favourites
    gate(x)
    counts = gate.load_E.float()
    gate.after_step()
    step = 1e-2 * torch.sign(counts.mean() - counts)
    torch.testing.assert_close(gate.expert_bias, step - step.mean())
    assert gate.load_E.sum() == 0
    first = counts.max() / counts.mean()
    for _ in range(300):
        gate(x)
        gate.after_step()
    last = gate(x).counts_E
    assert first > 2
    assert last.max() / last.double().mean() < 1.15


def weights_of(gate: torch.nn.Module, x: Tensor) -> Tensor:
    return gate(x).weights_TK


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_that_are_made_again_in_the_backward_pass_count_once(reentrant):
    """Also where some calls of a step are checkpointed and others are not."""
    parts = [rows(40).requires_grad_() for _ in range(3)]
    loads, counted = [], []
    for checkpointed in (set(), {1}, {0, 2}, {0, 1, 2}):
        torch.manual_seed(0)
        gate = make_gate(
            "sigmoid_topk", D, 8, 2, bias_update_rate=1e-3, loss_weights={"global_balance": 1.0}
        )
        for number, part in enumerate(parts):
            weigh = partial(weights_of, gate)
            if number in checkpointed:
                weigh = partial(checkpoint, weigh, use_reentrant=reentrant)
            weigh(part).sum().backward()
        loads.append(gate.load_E)
        counted.append(gate.step_counts_E)
    assert loads[0].sum() == 3 * 40 * 2
    assert all(torch.equal(load, loads[0]) for load in loads)
    assert all(torch.equal(counts, counted[0]) for counts in counted)


def test_bias_is_kept_in_fp32_and_evaluation_counts_nothing():
    gate = make_gate("sigmoid_topk", D, 8, 2, bias_update_rate=1e-3).to(torch.bfloat16)
    gate.expert_bias += 1e-5
    gate.to(torch.bfloat16).half()
    assert gate.expert_bias.dtype == torch.float32
    assert torch.equal(gate.expert_bias, torch.full((8,), 1e-5))
    gate.eval()(rows(10))
    assert gate.load_E.sum() == 0
