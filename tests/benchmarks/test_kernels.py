"""`benchmarks/kernels.py`: what of it needs no GPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from warm_python import warm_python

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "no GPU here; rehearse with --device cpu --tiny\n"


def test_the_rehearsal_measures_every_backend(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run("--device", "cpu", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert results["commit"]
    assert results["dense_tflops"] > 0
    (shape,) = results["shapes"].values()
    # 2 T D + 4 T K F bytes for T, D, F, K = 32, 64, 48, 2.
    rows = shape["backends"]
    assert list(rows) == ["eager", "grouped_mm", "moe_runtime"]
    for row in rows.values():
        assert row["closed_form_bytes"] == 2 * 32 * 64 + 4 * 32 * 2 * 48
        seconds = 6 * 32 * 2 * 64 * 48 / row["forward_tflops"] / 1e12
        assert seconds == pytest.approx(row["forward_s"])
        assert row["forward_of_dense"] == pytest.approx(
            row["forward_tflops"] / results["dense_tflops"]
        )
        # Every expert was chosen by somebody: all weights were read.
        read = 8 * 3 * 64 * 48 * 2 / row["forward_s"]
        assert row["read_of_copy"] == pytest.approx(read / results["copy_bytes_s"])
        assert row["both_tflops"] * row["both_s"] == pytest.approx(18 * 32 * 2 * 64 * 48 / 1e12)
        assert row["graph_forward_s"] is None
        assert row["graph_read_of_copy"] is None
        assert row["kept_bytes"] is None
        assert row["peak_bytes"] is None
    for layer in results["packed"].values():
        assert layer["read_of_copy"] > 0
        assert layer["written_ratio"] > 0
    for product in (results["products"] | results["packed"]).values():
        assert product["ratio"] == pytest.approx(product["peer_seconds"] / product["seconds"])
    aims = {(aim["what"], aim["field"]): aim for aim in results["aims"]}
    num_products = len(results["products"]) + len(results["packed"])
    assert len(aims) == len(results["aims"]) == num_products + 2
    beside = aims["tiny", "both_of_peer"]
    assert beside["measured"] == rows["grouped_mm"]["both_s"] / rows["moe_runtime"]["both_s"]
    for aim in results["aims"]:
        at_most = aim["field"].endswith("_s")
        assert aim["holds"] == (
            aim["measured"] <= aim["asked"] if at_most else aim["measured"] >= aim["asked"]
        )
    # Each is said once more, in words.
    assert sum(word in ("holds", "MISSED") for word in done.stdout.split()) == len(aims)
