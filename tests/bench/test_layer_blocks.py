"""`bench layer`: blocks agree with the formula in float64; one that routes otherwise is out."""

import json

import pytest
import torch
from text_checkpoint import NUM_EXPERTS, TOP_K, save_text_checkpoint

from moe_runtime.benchmarks.cases.layer import (
    LayerPlan,
    block_system,
    expect,
    make_layer,
    run_block,
    transformers_block,
)
from moe_runtime.benchmarks.cases.layer_shapes import LayerSizes
from moe_runtime.benchmarks.suite import PeerFailedError, read_results
from moe_runtime.cli.main import main

SIZES = LayerSizes(num_experts=6, top_k=2, dim_model=32, dim_hidden=16)


def plan_in(dtype: torch.dtype) -> LayerPlan:
    return LayerPlan(sizes=SIZES, dtype=dtype, tokens=(1, 24), trains=True, block_s=0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_who_forgets_to_normalise_the_gate_has_no_numbers(dtype):
    plan = plan_in(dtype)
    layer = make_layer(plan)
    expected = {
        name: expect(layer, plan, tokens, trains=trains) for name, tokens, trains in plan.calls()
    }
    # Random gates have few near choices: most tokens are compared.
    assert all(one.clear.sum() >= 0.75 * len(one.clear) for one in expected.values())
    block = transformers_block("eager", layer, SIZES)
    sound = block_system("eager", block, plan, expected)
    assert sound.repeat().keys() == expected.keys()
    assert sound.equal == sound.compared > 0
    block.gate.norm_topk_prob = False
    wrong = block_system("eager", block, plan, expected)
    with pytest.raises(PeerFailedError, match="tokens differ by more than roundings allow"):
        wrong.repeat()
    assert all(one.judge(torch.full_like(one.ours, torch.nan))[1] == 0 for one in expected.values())


def test_float64_is_what_transformers_finds_in_float64():
    plan = plan_in(torch.float32)
    layer = make_layer(plan)
    block = transformers_block("eager", layer, SIZES).double()
    for trains in (False, True):
        expected = expect(make_layer(plan), plan, 24, trains=trains)
        theirs = run_block(block, plan.x(24).double(), trains=trains)[expected.clear][:2]
        # Its router computes probabilities in fp32 whatever the type of the rest.
        torch.testing.assert_close(theirs, expected.exact, rtol=1e-5, atol=1e-7)


def test_the_command_measures_the_layer(tmp_path, capsys):
    save_text_checkpoint(tmp_path / "model")
    path = tmp_path / "r.json"
    words = ["--tokens", "3", "--training", "--quick", "--time", "1", "--threads", "1"]
    words += ["--precision", "1", "-o", str(path), "--json"]
    assert main(["bench", "layer", str(tmp_path / "model"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    assert [one["system"] for one in printed["measurements"]] == [
        *("moe_runtime", "eager", "grouped_mm")
    ]
    for one in printed["measurements"]:
        assert one["quality"]["equal"] == one["quality"]["compared"] > 0
        assert list(one["summary"]) == ["forward_3_s", "backward_3_s"]
    found = printed["settings"]
    sizes = [found[name] for name in ("experts", "top_k", "dim_model", "dim_hidden")]
    assert sizes == [NUM_EXPERTS, TOP_K, 64, 48]
