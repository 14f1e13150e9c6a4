"""`bench latency` and `throughput` on a GPU: which one, who takes part, and what is said of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.benchmarks.cases.texts import TextPlan, measure_texts
from moe_runtime.benchmarks.commands.shared import show_results
from moe_runtime.benchmarks.suite import Rules, read_results, write_results
from moe_runtime.benchmarks.suite.peers import find_peer, started
from moe_runtime.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
POCKET = str(ROOT / "models" / "pocket")
# Its likeliest token is the number of the GPU that it sees; torch there is one that has computed.
COUNTING = """
import os, sys
from types import SimpleNamespace
INSTALL = "pip install nothing"
PACKAGES = ()
DEVICES = ("cpu", "cuda")
PEAKS = [300, 7000]
class Peer:
    def __init__(self, settings):
        self.seen = int(os.environ["CUDA_VISIBLE_DEVICES"] or 96)
        if settings["device"] != "cpu":
            sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(
                is_initialized=lambda: True, device_count=lambda: len(PEAKS),
                max_memory_allocated=lambda index: PEAKS[index],
                get_device_name=lambda index: f"GPU {index}",
            ))
    def load(self):
        pass
    def prefill_batch(self, prompts):
        return [self.seen for _ in prompts]
    def step_batch(self, tokens):
        return [self.seen for _ in tokens]
    def close(self):
        pass
"""


def counting(folder: Path, *without: str) -> str:
    lines = [line for line in COUNTING.splitlines() if not line.startswith(without or "#")]
    (folder / "counting.py").write_text("\n".join(lines) + "\n")
    return str(folder / "counting.py")


def measured(folder: Path, device: str, gpus: str) -> dict[str, Any]:
    peer = find_peer(counting(folder), {"num_threads": 1, "device": device})
    rules = Rules(judged=("first_token_s",), least=1, most=1)
    return measure_texts(
        replace(peer, gpus=gpus),
        [],
        TextPlan(case="latency", batches=[[[3, 5]]], num_new=3, timeout_s=600),
        rules,
        settings={"model": "m", "device": device},
    )


def test_a_peer_that_says_nothing_of_devices_is_one_of_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    file = counting(tmp_path, "DEVICES")
    assert main(["bench", "latency", POCKET, "--peer", file]) == 2
    err = capsys.readouterr().err
    assert f"--peer {file}: computes on cpu alone" in err
    assert "this run on cuda" in err
    assert err.count("\n") == 1
    assert find_peer(file, {"device": "cpu"}).name == "counting"
    (tmp_path / "counting.py").write_text(Path(file).read_text() + 'DEVICES = ("cuda",)\n')
    assert find_peer(file, {"device": "cuda:0"}).name == "counting"
    with pytest.raises(ValueError, match="computes on cuda alone"):
        find_peer(file, {"device": "cpu"})


@pytest.mark.parametrize(
    ("case", "device", "visible", "name", "gpus"),
    [
        ("latency", "cuda:1", None, "cuda:1", "1"),
        ("latency", "auto", "4,7", "cuda:0", "4"),
        ("throughput", "cuda:1", "4,7", "cuda:1", "7"),
    ],
)
def test_settings_reach_every_system(case, device, visible, name, gpus, monkeypatch):
    """Each sees one GPU, which is its first; results say which of this machine it was."""
    given: list[Any] = []

    def record(ours: Any, peers: Any, plan: Any, rules: Any, settings: Any) -> None:
        given.extend([settings, ours, *peers])
        raise ValueError("this is where it ends")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("moe_runtime.benchmarks.cases.texts.measure_texts", record)
    words = ["--device", device, "--device-memory", "3GiB", "--misses", "auto"]
    assert main(["bench", case, POCKET, *words, "--peer", "transformers"]) == 2
    settings, *programs = given
    assert settings["device"] == name
    assert [one.name for one in programs] == ["moe_runtime", "transformers"]
    for one in programs:
        assert one.gpus == gpus
        assert one.settings["device"] == "cuda:0"
        assert one.settings["device_memory"] == settings["device_memory"] == 3 << 30
        assert one.settings["misses"] == settings["misses"] == "auto"


def test_without_a_gpu_systems_see_none(tmp_path):
    """Also where the machine has some: all of a run compute on the same device."""
    results = measured(tmp_path, "cpu", "")
    (one,) = results["measurements"]
    assert one["failure"] is None
    assert "peak_device_bytes" not in one["summary"]
    assert "gpu" not in results["machine"]
    with started(
        replace(find_peer(counting(tmp_path), {"num_threads": 1}), gpus=""), 60
    ) as process:
        process.ask("start", settings={"device": "cpu"})
        process.ask("load")
        assert process.ask("measure", prompts=[[3]], num_new=2, given=None)["ids"] == [[96, 96]]


def test_results_say_which_gpu_and_its_peak(tmp_path, capsys):
    results = measured(tmp_path, "cuda:0", "5")
    path = tmp_path / "r.json"
    write_results(path, results)
    assert read_results(path)["machine"]["gpu"] == "GPU 1"
    (one,) = results["measurements"]
    assert one["repetitions"][0]["peak_device_bytes"] == 7000
    show_results(results)
    shown = capsys.readouterr().out
    assert "latency: m, on a GPU, GPU 1" in shown
    assert "peak device, kB" in shown
    plan = TextPlan(case="throughput", batches=[[[3], [5]]], num_new=2, timeout_s=600)
    peer = replace(find_peer(counting(tmp_path), {"num_threads": 1, "device": "cuda:0"}), gpus="5")
    rules = Rules(judged=("new_tokens_per_s",), least=1, most=1)
    batches = measure_texts(peer, [], plan, rules, settings={})
    assert batches["machine"]["gpu"] == "GPU 1"
    assert batches["measurements"][0]["summary"]["peak_device_bytes"]["median"] == 7000


def test_runs_of_different_devices_are_not_compared(tmp_path, capsys):
    """Of two GPUs as of two processors: that is what may be compared, and it is said."""
    on_gpu = measured(tmp_path, "cuda:0", "5")
    others = {
        "gpu": on_gpu,
        "other": on_gpu | {"machine": {**on_gpu["machine"], "gpu": "GPU 2"}},
        "cpu": measured(tmp_path, "cpu", ""),
        "old": on_gpu | {"settings": {"model": "m"}},  # before there was a choice
    }
    files = {name: str(tmp_path / f"{name}.json") for name in others}
    for name, results in others.items():
        write_results(Path(files[name]), results)
    assert main(["bench", "compare", files["gpu"], files["other"]]) == 0
    captured = capsys.readouterr()
    assert "machine: gpu: 'GPU 1' before, 'GPU 2' after" in captured.err
    assert "m, on a GPU" in " ".join(captured.out.split())
    assert main(["bench", "compare", files["cpu"], files["old"]]) == 0
    capsys.readouterr()
    for name in ("cpu", "old"):
        assert main(["bench", "compare", files[name], files["gpu"]]) == 2
        assert "device 'the CPU' before, 'a GPU' after" in capsys.readouterr().err
    table = tmp_path / "t.csv"
    words = ["-o", str(tmp_path / "p.html"), "--csv", str(table)]
    assert main(["bench", "report", files["cpu"], files["gpu"], *words]) == 0
    assert {"latency,m,counting", 'latency,"m, on a GPU",counting'} == {
        line.partition(",first_token_s,")[0] for line in table.read_text().splitlines()
        if "first_token_s" in line
    }  # fmt: skip


@pytest.mark.gpu
def test_the_command_measures_on_a_gpu(tmp_path, capsys):
    words = ["--shape", "olmoe-tiny", "--device", "cuda", "--device-memory", "0.5", "--json"]
    output = ["-o", str(tmp_path / "r.json")]
    assert main(["bench", "latency", *words, "--quick", "--time", "1", *output]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == read_results(tmp_path / "r.json")
    assert found["settings"]["device"] == "cuda:0"
    assert found["machine"]["gpu"] == torch.cuda.get_device_name(0)
    (ours,) = found["measurements"]
    assert ours["failure"] is None
    assert ours["summary"]["peak_device_bytes"]["median"] > 0
