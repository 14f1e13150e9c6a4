"""`bench experts --formats`: what is moved, what results are held to, and who has numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_runtime.benchmarks.cases import formats
from moe_runtime.benchmarks.cases import formats as format_layers
from moe_runtime.benchmarks.cases.expert_layers import in_float64
from moe_runtime.benchmarks.suite import Rules, middle, read_results
from moe_runtime.benchmarks.synthetic.model_shapes import LayerSizes
from moe_runtime.cli.main import main
from moe_runtime.kernels.native import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="no native library")
SIZES = LayerSizes(num_experts=6, top_k=2, dim_model=512, dim_hidden=256)
BITS = {"bf16": 16, "fp8": 8, "mxfp4": 4.25, "int4": 4.5, "q8_0": 8.5, "q4_k": 4.5, "q6_k": 6.5625}


def measure(*names: str, memory: int = 1 << 24) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The results, and the rows of systems by name."""
    plan = formats.FormatsPlan(names, SIZES, memory, tokens=[1, 17], block_s=1e-4)
    rules = Rules(judged=["forward_1_s"], least=2, most=2)
    results = formats.measure_formats(plan, rules, settings={})
    return results, {one["system"]: one for one in results["measurements"]}


def by_hand(layer: formats.FormatLayer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert decoded from its own place in memory, token by token in float64."""
    rows = []
    for token, choices, shares in zip(x.double(), ids.tolist(), weights.double(), strict=True):
        row = torch.zeros_like(token)
        for expert, share in zip(choices, shares, strict=True):
            own = layer.experts[expert]
            gate, up, down = (
                (one if isinstance(one, Tensor) else one.dequantize()).double()
                for one in (own.gate, own.up, own.down)
            )
            hidden = gate @ token
            row += share * (down @ (hidden * torch.sigmoid(hidden) * (up @ token)))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_a_format_moves_its_bytes_and_is_held_to_its_decoded_weights(name):
    layer = formats.make_format_layer(name, SIZES, 1 << 24)
    bits = 8 * layer.expert_bytes / (3 * SIZES.dim_model * SIZES.dim_hidden)
    assert BITS[name.removesuffix("-int8")] == pytest.approx(bits, abs=0.01)
    assert layer.num_experts == SIZES.num_experts
    assert layer.expert_bytes * layer.num_experts <= len(layer.memory) <= 1 << 24
    ids, weights = layer.routing(3, 0)
    expected = by_hand(layer, layer.tokens(3), ids, weights)
    torch.testing.assert_close(in_float64(layer, 3, trains=False, count=3), expected)
    with torch.no_grad():
        found = layer.module(layer.tokens(3), ids, weights).double()
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    # bf16 rounds the result, and nothing else is rounded so roughly but activations
    assert (error < (0.05 if name.endswith("-int8") else 0.006)).all()
    assert (error > 0.006).any() == name.endswith("-int8")


def test_formats_are_systems_beside_reads_of_as_many_bytes():
    results, rows = measure("int4", "bf16")
    assert list(rows) == ["int4", "read, int4", "bf16", "read, bf16"]
    for name in ("int4", "bf16"):
        own, read = rows[name], rows[f"read, {name}"]
        assert own["quality"] == {"compared": 18, "equal": 18}
        assert read["quality"] is None
        layer = formats.make_format_layer(name, SIZES, 1 << 24)
        moved = {number: read["summary"][f"forward_{number}_bytes"]["median"] for number in (1, 17)}
        assert moved == {1: 2 * layer.expert_bytes, 17: 6 * layer.expert_bytes}
        for first, second in zip(own["repetitions"], read["repetitions"], strict=True):
            share = middle(second["forward_17_s"]) / middle(first["forward_17_s"])
            assert first["forward_17_of_read"] == share
        assert "forward_1_of_read" not in read["summary"]
    assert results["settings"]["experts_made"] == {"int4": 6, "bf16": 6}


def test_no_more_experts_than_fit_and_what_cannot_be_made_says_why():
    expert = 3 * SIZES.dim_model * SIZES.dim_hidden * 2
    results, rows = measure("bf16", "q8_0", memory=4 * expert)
    assert results["settings"]["experts_made"] == {"bf16": 4, "q8_0": 6}
    results, rows = measure("bf16", "q8_0", memory=2 * expert - 1)
    assert rows["bf16"]["failure"] == f"1 experts of {expert} bytes fit, and a token takes 2"
    assert (rows["q8_0"]["failure"], results["ended"]) == (None, "most")
    with pytest.raises(ValueError, match="q4_k must have a multiple of 256 columns, got 128"):
        formats.make_format_layer("q4_k", SIZES._replace(dim_hidden=128), 1 << 24)
    results, rows = measure("bf16", memory=1)
    assert (list(rows), results["ended"]) == (["bf16"], "failed")


def test_a_format_that_computes_something_else_has_no_numbers(monkeypatch):
    right = format_layers._decode_step
    monkeypatch.setattr(
        format_layers, "_decode_step", lambda experts: right([*experts[1:], experts[0]])
    )
    _, rows = measure("mxfp4", "mxfp4-int8")
    for name in ("mxfp4", "mxfp4-int8"):
        told = "18 of 18 tokens differ by more than roundings allow"
        assert rows[name]["failure"].startswith(told)
        assert rows[name]["repetitions"] == []
        assert rows[f"read, {name}"]["failure"] is None


def test_the_command_writes_results_and_a_row_for_each(model, tmp_path, capsys):
    path = tmp_path / "r.json"
    words = ["--formats", "fp8,bf16,fp8", "--quick", "--time", "1"]
    words += ["--threads", "1", "--precision", "1", "--tokens", "2", "-o", str(path)]
    assert main(["bench", "experts", str(model), *words]) == 0
    found = read_results(path)
    assert found["settings"]["formats"] == ["fp8", "bf16"]
    assert found["settings"]["memory"] == 2 << 30
    printed = capsys.readouterr().out
    for one in found["measurements"]:
        assert {*one["system"].split()} <= {*printed.split()}  # a header may be folded
        assert one["failure"] is None
    assert {"of", "read"} <= {*printed.split()}
    assert main(["bench", "compare", str(path), str(path), "--json"]) == 0
    assert '"forward_2_of_read"' in capsys.readouterr().out
    report = tmp_path / "report.html"
    assert main(["bench", "report", str(path), "-o", str(report)]) == 0
    assert "read, fp8" in report.read_text()
