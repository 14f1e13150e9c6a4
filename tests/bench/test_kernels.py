"""`benchmarks/kernels.py`: what of it needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

from moe_runtime.benchmarks.suite.results import read_results

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm_python(), str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_the_rehearsal_measures_every_backend(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run("--device", "cpu", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    results = read_results(out)
    settings = results["settings"]
    assert settings["dense_tflops"] > 0
    (shape,) = settings["shapes"].values()
    # 2 T D + 4 T K F bytes for T, D, F, K = 32, 64, 48, 2.
    assert shape["closed_form_bytes"] == 2 * 32 * 64 + 4 * 32 * 2 * 48
    found = {one["system"]: one["repetitions"][0] for one in results["measurements"]}
    assert [*found][:3] == ["tiny, eager", "tiny, grouped_mm", "tiny, moe_runtime"]
    rows = [found.pop(name) for name in [*found][:3]]
    for row in rows:
        seconds = 6 * 32 * 2 * 64 * 48 / row["forward_tflops"] / 1e12
        assert seconds == pytest.approx(row["forward_s"])
        assert row["forward_of_dense"] == pytest.approx(
            row["forward_tflops"] / settings["dense_tflops"]
        )
        # Every expert was chosen by somebody: all weights were read.
        read = 8 * 3 * 64 * 48 * 2 / row["forward_s"]
        assert row["read_of_copy"] == pytest.approx(read / settings["copy_bytes_s"])
        assert row["both_tflops"] * row["both_s"] == pytest.approx(18 * 32 * 2 * 64 * 48 / 1e12)
        # What takes a GPU is absent.
        assert not {"graph_forward_s", "graph_read_of_copy", "kept_bytes", "peak_bytes"} & {*row}
    packed = [product for name, product in found.items() if "T=" in name]
    assert len(packed) == 8
    assert all(layer["read_of_copy"] > 0 and layer["written_ratio"] > 0 for layer in packed)
    assert len(found) == 6 + 8
    for product in found.values():
        assert product["ratio"] == pytest.approx(product["peer_seconds"] / product["seconds"])
    aims = settings["aims"]
    assert [*aims] == [f"{name}: ratio" for name in found] + [
        "tiny: forward_s",
        "tiny: both_of_peer",
    ]
    assert aims["tiny: both_of_peer"]["measured"] == rows[1]["both_s"] / rows[2]["both_s"]
    assert aims["mxfp4, T=4: ratio"]["asked"] == 1.6
    assert aims["mxfp4, T=40: ratio"]["asked"] == 0.7
    for name, aim in aims.items():
        at_most = name.endswith("_s")
        assert aim["holds"] == (
            aim["measured"] <= aim["asked"] if at_most else aim["measured"] >= aim["asked"]
        )
    # Each is said once more, in words.
    assert sum(word in ("holds", "MISSED") for word in done.stdout.split()) == len(aims)
