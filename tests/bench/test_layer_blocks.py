"""`bench layer`: blocks agree with the formula in float64; one that routes otherwise is out."""

import json

import pytest
import torch
from text_checkpoint import NUM_EXPERTS, TOP_K, save_text_checkpoint

from moe_runtime.benchmarks.cases.expert_layers import ExpertsPlan, in_float64
from moe_runtime.benchmarks.cases.layer import make_layer, measure_layer
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.cli.main import main

SIZES = LayerSizes(num_experts=6, top_k=2, dim_model=32, dim_hidden=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_forgets_to_normalise_the_gate_has_no_numbers(dtype):
    layer = make_layer(SIZES, dtype)
    plan = ExpertsPlan(layer=layer, tokens=(1, 24), trains=True, block_s=0.001)
    rules = Rules(judged=(), least=1, most=1)
    for one in measure_layer(plan, rules, {})["measurements"]:
        assert one["quality"] == {"compared": 50, "equal": 50}
        assert len(one["summary"]) == 4
    layer.module.blocks["eager"].gate.norm_topk_prob = False
    ours, eager, grouped = measure_layer(plan, rules, {})["measurements"]
    assert "tokens differ by more than roundings allow" in eager["failure"]
    assert ours["failure"] is grouped["failure"] is None
    layer.module.ours.gate.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="rounds too roughly"):
        layer.tokens(3)


def test_float64_is_what_transformers_finds_in_float64():
    layer = make_layer(SIZES, torch.float32)
    exact = {trains: in_float64(layer, 24, trains=trains, count=24) for trains in (False, True)}
    x, block = layer.tokens(24).double(), layer.module.blocks["eager"].double()
    x.requires_grad_()
    out = block(x[None])[0]
    out.backward(x.detach())
    # Its router computes probabilities in fp32 whatever the type of the rest.
    for found, expected in ((out, exact[False]), (x.grad, exact[True])):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_the_command_measures_the_layer(tmp_path, capsys):
    save_text_checkpoint(tmp_path / "model")
    path = tmp_path / "r.json"
    words = ["--tokens", "3", "--training", "--quick", "--time", "1", "--threads", "1"]
    words += ["--precision", "1", "-o", str(path), "--json"]
    assert main(["bench", "layer", str(tmp_path / "model"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    names = [one["system"] for one in printed["measurements"]]
    assert names == ["moe_runtime", "eager", "grouped_mm"]
    for one in printed["measurements"]:
        assert one["quality"] == {"compared": 6, "equal": 6}
        assert list(one["summary"]) == ["forward_3_s", "backward_3_s"]
    found = printed["settings"]
    sizes = [found[name] for name in ("experts", "top_k", "dim_model", "dim_hidden")]
    assert sizes == [NUM_EXPERTS, TOP_K, 64, 48]
