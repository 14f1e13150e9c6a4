"""DynaMoE: rules step by step, buffers against dropless experts, runs that resume."""

from pathlib import Path

import pytest
import torch
from language_models import VOCAB, experts, shape
from torch import Tensor
from training_runs import CONFIG, error_of, states_equal, train, training_records, write_run

from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.research.dynamoe import CapacityRule, Recompile, RecompilingOptimizer
from moe_runtime.training.checkpoint import checkpoints_in
from moe_runtime.training.run_config import OptimizerConfig, RecompileConfig

SETTINGS = OptimizerConfig(peak_rate=1e-2)
FIXED, ADAPTED = RecompileConfig(), RecompileConfig(adapt_capacity=True)


def model_of(**moe: object) -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(shape(num_layers=2, moe=experts(**moe)))


def loss_of(model: LanguageModel, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids_BC = torch.randint(VOCAB, (4, 13), generator=generator)
    losses = model.losses(ids_BC[:, :-1], ids_BC[:, 1:])
    return losses.cross_entropy + losses.auxiliary


def test_a_trigger_alters_and_is_counted():
    altered: list[int] = []
    asked = iter([False, True, False, True])
    one = Recompile(lambda: next(asked), lambda: altered.append(one.count))
    for _ in range(4):
        one.on_condition()
    assert (altered, one.count) == ([0, 1], 2)


def test_capacity_grows_at_once_and_shrinks_late():
    rule = CapacityRule(2.0)
    assert [rule.observe(1.3, 0.0) for _ in range(49)] == [2.0] * 49
    assert rule.observe(1.3, 0.0) == 1.5  # 1.43 with its margin
    assert rule.observe(1.6, 0.0005) == 1.5  # few are dropped
    assert rule.observe(1.6, 0.002) == 2.0
    # one high need among 50 keeps the size, and the next 49 do
    assert {rule.observe(need, 0.0) for need in [1.9] + [1.0] * 49} == {2.0}
    assert rule.observe(1.0, 0.0) == 1.25
    assert rule.observe(30.0, 0.5) == 4.0
    assert rule.observe(30.0, 0.5) == 4.0


def test_a_factor_off_the_grid_may_stay():
    rule = CapacityRule(5.0)
    assert {rule.observe(9.0, 0.5) for _ in range(60)} == {5.0}
    assert [rule.observe(1.0, 0.0) for _ in range(50)][-1] == 1.25


@pytest.mark.parametrize("bias", [False, True])
def test_buffers_compute_what_dropless_experts_do(bias):
    """Room for all of a layer's choices; gradients too."""
    whole, padded = model_of(bias=bias), model_of(bias=bias, capacity_factor=8.0)
    RecompilingOptimizer(padded, SETTINGS, recompile=FIXED)
    found, expected = loss_of(padded), loss_of(whole)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected)
    for one, other in zip(padded.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["choice", "priority"])
def test_buffers_drop_what_the_gate_drops(policy):
    given = {"capacity_factor": 1.0, "drop_policy": policy}
    plain, padded = model_of(**given), model_of(**given)
    RecompilingOptimizer(padded, SETTINGS, recompile=FIXED)
    torch.testing.assert_close(loss_of(padded), loss_of(plain))
    assert all(float(aux.dropped_share) > 0 for aux in padded.layer_aux())


def test_dropped_choices_give_a_layer_the_factor_that_it_needs():
    model = model_of(capacity_factor=1.0)
    optimizer = RecompilingOptimizer(model, SETTINGS, recompile=ADAPTED)
    optimizer.backward([lambda: loss_of(model)], rate=1e-2)
    needs = [float(aux.max_load) for aux in model.layer_aux()]
    optimizer.step(1e-2)
    for layer, need in zip(model.routed_layers(), needs, strict=True):
        assert layer.gate.capacity is not None
        assert need <= layer.gate.capacity.factor < 1.4 * need
    assert [one.count for one in optimizer.recompiles] == [1, 1]


def choices_of(model: LanguageModel) -> list[Tensor]:
    return [aux.routing.ids_TK.clone() for aux in model.layer_aux()]


def test_choices_of_before_are_used_once_gates_agree():
    """Weights are those of the gate now; what differs lowers the score, and ends it."""
    model = model_of()
    optimizer = RecompilingOptimizer(model, SETTINGS, recompile=RecompileConfig(reuse_at=0.009))
    cache = optimizer.altered["assignments"]
    expected = loss_of(model)
    first = choices_of(model)
    assert cache.scores == [0.0, 0.0]  # nothing was known
    loss_of(model)
    assert cache.scores == pytest.approx([0.01, 0.01])
    optimizer.recompiles[0].on_condition()
    assert cache.is_used
    # equal choices, equal numbers
    assert torch.equal(loss_of(model), expected)
    with torch.no_grad():
        for layer in model.routed_layers():
            assert layer.gate.weight is not None
            layer.gate.weight.neg_()
    used = loss_of(model)
    assert all(map(torch.equal, choices_of(model), first))
    assert not torch.equal(used, expected)
    for aux in model.layer_aux():
        shares = aux.routing.logits_TE.softmax(-1).gather(1, aux.routing.ids_TK)
        torch.testing.assert_close(aux.routing.weights_TK, shares / shares.sum(1, keepdim=True))
    while cache.scores[0] + cache.scores[1] >= 0.018:
        loss_of(model, seed=0)
        with torch.no_grad():
            for layer in model.routed_layers():
                layer.gate.weight.neg_()
    optimizer.recompiles[0].on_condition()
    assert not cache.is_used
    # other sequences are unknown
    loss_of(model, seed=1)
    model.eval()
    before = list(cache.scores)
    with torch.no_grad():
        loss_of(model)
    assert cache.scores == before


CAPACITY = CONFIG.replace("top_k = 2", "top_k = 2\ncapacity_factor = 1.0")
REPEATED = CONFIG.replace("steps = 8", "steps = 24").replace("short_context = 16", "")
REPEATED = REPEATED.replace("short_share = 0.5", "")
CASES = {
    "capacity": (CAPACITY, "adapt_capacity = true"),
    # long enough to see rules again
    "assignments": (REPEATED, "reuse_at = 0.001"),
}


def last_checkpoint(path: Path) -> Path:
    return checkpoints_in(path.parent / "out" / "checkpoints")[-1]


@pytest.mark.parametrize(("config", "key"), CASES.values(), ids=CASES)
def test_a_run_resumes_to_the_bit(config, key, tmp_path):
    text = f"{config}\n[research.recompile]\n{key}\n"
    whole, stopped = (write_run(tmp_path / name, config=text) for name in ("whole", "stopped"))
    for path in (whole, stopped):
        assert train(path) == 0
    last_checkpoint(stopped).unlink()
    assert last_checkpoint(stopped).name != last_checkpoint(whole).name
    assert train(stopped, "--resume") == 0
    assert states_equal(last_checkpoint(whole), last_checkpoint(stopped))
    states = [
        torch.load(last_checkpoint(path))["optimizer"]["altered"] for path in (whole, stopped)
    ]
    assert str(states[0]) == str(states[1])
    if config == REPEATED:
        assert states[0]["assignments"]["is_used"]
    else:
        dropped = [
            r["dropped_share"] for r in training_records(tmp_path / "whole/out") if "loss" in r
        ]
        assert dropped[0] > 0.001
        assert dropped[-1] <= 0.001
        assert {one["factor"] for one in states[0].values()} <= {1.25, 1.5, 2.0, 3.0, 4.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["adapt_capacity=true"], "give model.moe.capacity_factor, without num_groups"),
        (["reuse_at=1.5"], "reuse_at must lie in [0, 1], got 1.5"),
        (["reuse_at=0.5", "adapt_capacity=true"], "reuse_at and adapt_capacity do not go together"),
        (["reuse_at=0.5", "gate"], "reuse_at is for the gates softmax_topk and sigmoid_topk"),
        (["reuse_at=0.5", "run"], "run.recompute repeats calls of the gates"),
    ],
)
def test_what_cannot_be_altered_is_refused(settings, message, tmp_path, capsys):
    known = {"gate": "model.moe.gate=noisy_topk", "run": "run.recompute=true"}
    named = [known.get(one, f"research.recompile.{one}") for one in settings]
    words = [part for one in named for part in ("--set", one)]
    path = write_run(tmp_path)
    assert message in error_of(capsys, path, *words)
    assert message in error_of(capsys, path, *words, "--dry-run")
