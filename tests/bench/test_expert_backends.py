"""`bench experts`: results are held to float64, and who computes something else has no numbers."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.benchmarks.cases import expert_layers
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.checkpoints.transformers_private import ExpertsInterface
from moe_runtime.cli.main import main


def by_hand(layer: expert_layers.ExpertLayer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """SwiGLU experts, token by token in float64."""
    both, down = (p.detach().double() for p in (layer.module.gate_up_proj, layer.module.down_proj))
    rows = []
    for token, experts, shares in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        parts = [(both[expert] @ token).chunk(2) for expert in experts]
        hidden = [gate * torch.sigmoid(gate) * up for gate, up in parts]
        outputs = [down[expert] @ h for expert, h in zip(experts, hidden, strict=True)]
        rows.append(sum(share * y for share, y in zip(shares, outputs, strict=True)))
    return torch.stack(rows)


def test_the_reference_is_the_formula(model):
    layer = expert_layers.layer_of_model(model, torch.bfloat16)
    ids, weights = layer.routing(5, 0)
    expected = by_hand(layer, layer.tokens(5), ids, weights)[:2]
    torch.testing.assert_close(expert_layers.in_float64(layer, 5, trains=False), expected)
    assert layer.module.num_experts == layer.num_experts > len(ids[:2].unique())


def grouped(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    return ExpertsInterface()["grouped_mm"](module, x, ids, weights)


def off_by_one_weight(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The last token has one gate weight that is 2 % too large."""
    weights = weights.clone()
    weights[-1, 0] *= 1.02
    return grouped(module, x, ids, weights)


def tf32_like(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Rounds tokens to 10 bits, as TF32 does."""
    return grouped(module, (x * 2**-3).half().float() * 2**3, ids, weights)


def refuses(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    raise RuntimeError("no kernel for this type\nand a trace")


@pytest.mark.parametrize(
    ("implementation", "failure"),
    [
        (grouped, None),
        (off_by_one_weight, "2 of 6 tokens differ by more than roundings allow"),
        (tf32_like, "6 of 6 tokens differ by more than roundings allow"),
        (refuses, "no kernel for this type"),
    ],
)
def test_who_computes_something_else_has_no_numbers(implementation, failure, model, monkeypatch):
    ExpertsInterface.register("tested", implementation)
    monkeypatch.setattr("moe_runtime.benchmarks.cases.expert_layers.PEERS", ("tested",))
    layer = expert_layers.layer_of_model(model, torch.float32)
    plan = expert_layers.ExpertsPlan(layer=layer, tokens=(1, 5), trains=False, block_s=0.001)
    rules = Rules(judged=("forward_1_s",), least=1, most=1)
    results = expert_layers.measure_experts(plan, rules, settings={})
    ours, tested = results["measurements"]
    assert ours["quality"] == {"compared": 6, "equal": 6}
    assert ours["summary"].keys() == {"forward_1_s", "forward_5_s"}
    if failure is None:
        assert tested["quality"] == {"compared": 6, "equal": 6}
    else:
        assert tested["failure"].startswith(failure)
        assert tested["repetitions"] == []


def test_the_command_measures_both_passes(model, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ["--tokens", "3,1", "--training", "--quick", "--time", "1", "--threads", "1"]
    words += ["--precision", "1", "-o", str(path)]
    assert main(["bench", "experts", str(model), *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    names = [one["system"] for one in printed["measurements"]]
    assert names == ["moe_runtime", "eager", "grouped_mm", "batched_mm"]
    for one in printed["measurements"]:
        assert one["quality"] == {"compared": 8, "equal": 8}
        assert list(one["summary"]) == [
            *("forward_1_s", "forward_3_s", "backward_1_s", "backward_3_s")
        ]


@pytest.mark.gpu
def test_a_layer_on_a_gpu_is_held_to_the_same(model):
    layer = expert_layers.layer_of_model(model, torch.bfloat16)
    layer.module.to("cuda")
    plan = expert_layers.ExpertsPlan(layer=layer, tokens=(1, 5), trains=True, block_s=0.001)
    results = expert_layers.measure_experts(
        plan, Rules(judged=("forward_1_s",), least=1, most=1), settings={}
    )
    for one in results["measurements"]:
        assert one["quality"] == {"compared": 12, "equal": 12}
