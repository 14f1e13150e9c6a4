"""`bench ops`: every op of a layer, held against its reference before it is timed."""

import json

import pytest
import torch

from moe_runtime.benchmarks.cases import ops
from moe_runtime.benchmarks.cases.ops import OpCall, OpsPlan, draw_weights, op_calls, op_system
from moe_runtime.benchmarks.suite import PeerFailedError, read_results
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.cli.main import main

SIZES = LayerSizes(num_experts=4, top_k=2, dim_model=32, dim_hidden=16)
NAMES = ["token_sort", "grouped_gemm", "combine", "expert_mlp", "sdd", "dsd", "heterogeneous_mlp"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_every_op_equals_its_reference_and_has_gradients(num_tokens, dtype):
    plan = OpsPlan(sizes=SIZES, dtype=dtype, tokens=[num_tokens], trains=True, block_s=1e-4)
    calls = list(op_calls(num_tokens, SIZES, draw_weights(SIZES, dtype)))
    assert [op.name for op in calls] == NAMES
    for op in calls:
        system = op_system({num_tokens: op}, plan)
        found = system.repeat()
        expected = {f"{what}_{num_tokens}_s" for what in ("forward", "backward")}
        assert set(found) == (expected if op.leaves else {f"forward_{num_tokens}_s"})
        assert (system.compared, system.equal) == (1, 1)


@pytest.mark.parametrize("excess", [0.9, 1.1])
def test_an_op_that_is_wrong_has_no_numbers(excess):
    """By as much as roundings allow, and by a little more."""
    exact = torch.tensor([[1.0, -8.0]])
    wrong = exact + torch.tensor([[excess * 4 * torch.finfo(torch.float32).eps * 8, 0.0]])
    op = OpCall("odd", lambda impl: exact if impl == "reference" else wrong)
    plan = OpsPlan(sizes=SIZES, dtype=torch.float32, tokens=[1], trains=False, block_s=1e-4)
    system = op_system({1: op}, plan)
    if excess < 1:
        assert system.repeat()
        return
    with pytest.raises(PeerFailedError, match="differ from those of the reference"):
        system.repeat()
    sorted_rows = OpCall("sort", lambda impl: torch.tensor([0, 1 + (impl == "auto")]))
    with pytest.raises(PeerFailedError, match="differ from those of the reference"):
        op_system({1: sorted_rows}, plan).repeat()


@pytest.mark.long
def test_the_command_measures_ops(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "SIZES", SIZES)
    path = tmp_path / "r.json"
    words = ["--tokens", "3,5", "--training", "--quick", "--time", "1", "--threads", "1"]
    words += ["--precision", "1", "-o", str(path)]
    assert main(["bench", "ops", *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    assert [one["system"] for one in printed["measurements"]] == NAMES
    for one in printed["measurements"]:
        assert one["quality"] == {"compared": 2, "equal": 2}
    assert printed["settings"]["dim_hidden"] == 16
    assert main(["bench", "ops", *words]) == 0
    shown = capsys.readouterr().out
    assert "ops: num experts 4, top k 2, dim model 32, dim hidden 16, bfloat16" in shown
    assert all(name in shown for name in (*NAMES, "forward 3", "backward 5"))
    assert main(["bench", "compare", str(path), str(path)]) == 0


def test_weights_are_drawn_once_for_all_numbers_of_tokens():
    weights = draw_weights(SIZES, torch.float32)
    calls = [list(op_calls(tokens, SIZES, weights)) for tokens in (3, 5)]
    leaves = [{id(leaf) for op in ops for leaf in op.leaves} for ops in calls]
    assert leaves[0] & leaves[1] == {id(one) for one in (*weights[:2], *weights.packed)}
