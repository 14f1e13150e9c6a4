"""`bench kernels --output`: products in turn, as results that `compare` and `report` read.

The GPU is a stand-in: products count their calls, and their times are given.
"""

import itertools
import os
import signal
from typing import Any

import pytest
import torch

from moe_runtime.benchmarks.suite import read_results
from moe_runtime.cli.main import main
from moe_runtime.kernels.grouped_gemm import tile as tiles
from moe_runtime.kernels.grouped_gemm import tuner
from moe_runtime.kernels.grouped_gemm.tile import Tile, TileKey
from moe_runtime.kernels.grouped_gemm.tuner import LayerBatch, Problem

TILE = Tile(64, 64, 64, 4, 3)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU on which each product takes 1, 2 and 3 ms in turn; the names of those that ran."""
    pytest.importorskip("triton")
    names: list[str] = []
    clock = itertools.cycle((1e-3, 2e-3, 3e-3))

    def problems(layer: LayerBatch, *_: Any) -> list[Problem]:
        def problem(name: str, dim_n: int) -> Problem:
            key = TileKey("plain", 16, dim_n, layer.dim_model, 1)
            return Problem(name, key, 7, TILE, lambda tile: names.append(f"{name} {tile == TILE}"))

        return [problem("down", layer.dim_model), problem("gradient", layer.dim_hidden)]

    def seconds_of(call: Any) -> float:
        call()
        return next(clock)

    monkeypatch.setattr(tuner, "layer_problems", problems)
    monkeypatch.setattr(tiles, "describe_device", lambda device: None)
    monkeypatch.setattr("moe_runtime.kernels.triton_support.require_triton", lambda device: None)
    monkeypatch.setattr("moe_runtime.benchmarks.cases.products.median_seconds", seconds_of)
    fake = {"is_available": lambda: True, "current_device": lambda: 0}
    fake |= {"get_device_name": lambda device: "GPU of a test"}
    for name, function in fake.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return names


def test_products_are_results_that_compare_and_report_read(ran, tmp_path, capsys):
    path = tmp_path / "k.json"
    words = ["--shape", "8,32,16,4,2", "--shape", "3,32,16,4,2", "-o", str(path)]
    assert main(["bench", "kernels", *words]) == 0
    results = read_results(path)
    assert (results["case"], results["ended"]) == ("kernels", "most")
    assert [one["system"] for one in results["measurements"]] == [
        f"{what}, T={tokens} D=32 F=16 E=4 K=2"
        for tokens in (8, 3)
        for what in ("down", "gradient")
    ]
    for one in results["measurements"]:
        assert len(one["repetitions"]) == 20
        assert {found["product_s"] for found in one["repetitions"]} <= {1e-3, 2e-3, 3e-3}
        assert results["settings"]["tiles"][one["system"]]["block_m"] == 64
    # once each while tiles are looked for, then in turn, always in the tile found
    assert len(ran) == 4 + 4 * 20
    assert {name.split()[1] for name in ran} == {"True"}
    assert main(["bench", "compare", str(path), str(path)]) == 0
    assert "noise" in capsys.readouterr().out
    assert main(["bench", "report", str(path), "-o", str(tmp_path / "k.html")]) == 0


def test_times_of_all_are_shown(ran, capsys):
    """The median of 1, 2 and 3 ms is 2 ms, in which 7 operations are 3.5e-9 TFLOP/s."""
    assert main(["bench", "kernels", "--shape", "8,32,16,4,2"]) == 0
    shown, said = capsys.readouterr()
    assert "tile 64 x 64 x 64" in said
    assert "TFLOP/s" in shown
    assert all(f"{what}, T=8 D=32 F=16 E=4 K=2: tile" in said for what in ("down", "gradient"))


def test_a_signal_ends_it_with_what_was_found(ran, tmp_path, monkeypatch):

    def seconds_of(call: Any) -> float:
        call()
        if len(ran) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return 1e-3 * len(ran)

    monkeypatch.setattr("moe_runtime.benchmarks.cases.products.median_seconds", seconds_of)
    path = tmp_path / "k.json"
    assert main(["bench", "kernels", "--shape", "8,32,16,4,2", "-o", str(path)]) == 130
    results = read_results(path)
    assert results["ended"] == "interrupted"
    assert sum(len(one["repetitions"]) for one in results["measurements"]) == 9 - 2


def test_a_signal_before_the_first_repetition_leaves_older_results(
    ran, tmp_path, monkeypatch, capsys
):

    def seconds_of(call: Any) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 1e-3

    monkeypatch.setattr("moe_runtime.benchmarks.cases.products.median_seconds", seconds_of)
    path = tmp_path / "k.json"
    path.write_text("an older run's")
    assert main(["bench", "kernels", "--shape", "8,32,16,4,2", "-o", str(path)]) == 130
    assert path.read_text() == "an older run's"
    assert f"nothing was measured, and {path} is left as it was" in capsys.readouterr().err
