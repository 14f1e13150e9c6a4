"""The scripts of examples/ run, and say what is so."""

import importlib.util
import re
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.benchmarks.peers.transformers import Peer
from moe_runtime.cli.main import main
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.models.pocket import pocket_path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TESTED = {
    "run_a_big_model",
    "layer_in_your_model",
    "train_and_serve_an_adapter",
    "compare_policies",
    "add_a_policy",
    "add_a_format",
    "add_a_peer",
}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "trace.npz"
    words = ["run", str(pocket_path()), "-p", "Lists are", "-n", "24", "--trace", str(path)]
    assert main(words) == 0
    return path


def test_every_example_is_tested_and_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\w+)\.py\)", page)) == TESTED


def test_a_big_model_reads_experts_and_says_the_same(capsys):
    run = example("run_a_big_model").main
    run(str(pocket_path()), "20MiB")
    small = capsys.readouterr().out.splitlines()
    run(str(pocket_path()), "200MiB")
    large = capsys.readouterr().out.splitlines()
    assert small[:-1] == large[:-1]
    small_misses, large_misses = (int(lines[-1].split()[-1]) for lines in (small, large))
    assert small_misses > large_misses


def test_a_layer_in_a_model_learns(capsys):
    example("layer_in_your_model").main()
    first, last = map(float, re.findall(r"loss ([\d.]+)", capsys.readouterr().out))
    assert last < first / 2


def test_an_adapter_is_trained_and_served(tmp_path, capsys):
    module = example("train_and_serve_an_adapter")
    module.train(tmp_path)
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] / 2
    module.answer(tmp_path)
    plain, tuned = re.findall(r": '(.*)'", capsys.readouterr().out)
    assert "salty" in tuned
    assert "salty" not in plain


def test_policies_are_compared(tmp_path, capsys):
    example("compare_policies").main(str(pocket_path()), tmp_path)
    rows = {
        (name, share): float(hits)
        for name, share, hits in re.findall(
            r"^([\w-]+) +(\d+)% +([\d.]+)%$", capsys.readouterr().out, re.M
        )
    }
    for share in ("25", "50"):
        assert rows["belady-bypass", share] == max(
            hits for (_, other), hits in rows.items() if other == share
        )
    assert rows["lru", "50"] > rows["lru", "25"]


def test_a_policy_of_ones_own_does_what_it_says(trace, capsys):
    example("add_a_policy").compare(trace)
    shown = dict(line.split() for line in capsys.readouterr().out.splitlines())
    workload = workload_of(read_trace(trace))
    signature = workload.trace.signature
    held: deque[Any] = deque()
    hits = 0
    for keys in workload.keys:
        hits += sum(key in held for key in keys)
        for key in keys:
            if key in held:
                continue
            if len(held) == signature.num_layers * signature.num_experts // 2:
                held.remove(next(old for old in held if old not in keys))
            held.append(key)
    assert shown["FirstIn"] == f"{hits / sum(map(len, workload.keys)):.3f}"


def test_a_format_is_found_and_multiplied(tmp_path, capsys):
    module = example("add_a_format")
    module.main(tmp_path)
    said = capsys.readouterr().out
    assert "proj.weight: 64 x 128, int8" in said
    # rounding to the nearest level is half a step at most; the division rounds, too
    assert float(said.split()[-1]) <= 0.505
    with pytest.raises(moe_runtime.CheckpointError, match=r"expected proj\.step beside it"):
        list(module.weights_of(None, {"proj.levels": None}))


def test_a_peer_says_what_another_one_says():
    settings = {"model": str(pocket_path()), "num_threads": 1, "max_tokens": 16, "variant": "eager"}
    threads = torch.get_num_threads()
    one, other = example("add_a_peer").Peer(settings), Peer(settings)
    one.load()
    other.load()
    ids = [510, 11, 7]
    first = other.prefill_batch([ids])[0]
    assert one.prefill(ids) == first
    assert one.step(first) == other.step_batch([first])[0]
    assert one.prefill(ids) == first, "it does not forget"
    torch.set_num_threads(threads)
