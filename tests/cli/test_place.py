"""``moe-runtime place``: from a trace to a map, scored on tokens that it was not made from."""

import json
from pathlib import Path

import numpy as np
import pytest
from fixture_types import Capsys

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import TraceRecorder
from moe_runtime.parallel.placement_map import load_placement_map
from moe_runtime.types import ModelSignature

LAYERS, EXPERTS, TOP_K = 4, 16, 2


def record(path: Path, *, model_type: str = "olmoe", tokens: int = 400, seed: int = 0) -> Path:
    """Tokens that keep to one of four groups of experts."""
    signature = ModelSignature(
        model_type=model_type, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, vocab_size=10
    )
    random = np.random.default_rng(seed)
    with TraceRecorder(path, signature) as recorder:
        for step in range(tokens // 10):
            recorder.begin_step(phase="decode", token_ids=[1] * 10, positions=[step] * 10)
            groups = random.integers(0, 4, 10)
            for layer in range(LAYERS):
                members = np.stack([random.permutation(4)[:TOP_K] for _ in groups])
                ids = (groups[:, None] + layer) % 4 + 4 * members
                recorder.routing(layer, ids, np.full(ids.shape, 0.5))
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("place") / "trace.npz")


def run_json(words: list[str], capsys: Capsys) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("algorithm", ["exflow", "moetuner"])
def test_groups_are_kept_together(trace, algorithm, tmp_path, capsys):
    output = tmp_path / "map.json"
    words = ["place", str(trace), "--gpus", "4", "--algorithm", algorithm, "-o", str(output)]
    slack = ["--load-slack", "0.5"] if algorithm == "moetuner" else []
    report = run_json([*words, "--time-limit", "1000000", *slack], capsys)
    assert report["scores"][algorithm]["hops"] == 0
    assert report["scores"]["random"]["hops"] > 0.6
    assert report["fit_tokens"] == report["scored_tokens"] == 200
    assert load_placement_map(output).algorithm == algorithm


def test_replicas_nodes_and_the_map_in_use(trace, tmp_path, capsys):
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    words = ["place", str(trace), "--gpus", "4", "--nodes", "2", "--groups", "2"]
    run_json([*words, "--replicas", "4", "-o", str(first)], capsys)
    report = run_json([*words, "--replicas", "4", "--fit", "0.3", "--from", str(first),
                       "-o", str(second)], capsys)  # fmt: skip
    assert report["slots_per_gpu"] == 5
    old, new = load_placement_map(first), load_placement_map(second)
    lacking = sum(
        len(new.placement.holds(layer, gpu) - old.placement.holds(layer, gpu))
        for layer in range(LAYERS)
        for gpu in range(4)
    )
    assert report["transfers"] == lacking
    assert report["scores"]["eplb"]["balancedness"] > 0.7


def test_devices_are_renamed_to_save_hops_unless_told_otherwise(trace, capsys):
    words = ["place", str(trace), "--gpus", "4", "--algorithm", "greedy"]
    aligned, plain = (run_json([*words, *more], capsys) for more in ([], ["--no-align"]))
    scores = [report["scores"]["greedy"] for report in (aligned, plain)]
    assert scores[0]["hops"] < scores[1]["hops"]
    assert scores[0]["balancedness"] == scores[1]["balancedness"]


def test_tables(trace, capsys):
    assert main(["place", str(trace), "--gpus", "4", "--algorithm", "greedy"]) == 0
    out = capsys.readouterr().out
    assert "round-robin" in out
    assert "scored on the next 200" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "4", "--nodes", "3"], "--gpus 4 is not a multiple of --nodes 3"),
        (["--gpus", "3"], "16 experts and 0 replicas do not divide among 3 devices; 2 replicas"),
        (["--gpus", "4", "--algorithm", "epbl"], "did you mean 'eplb'"),
        (["--gpus", "4", "--algorithm", "exflow", "--replicas", "4"], "makes no replicas"),
        (["--gpus", "4", "--fit", "1.0"], "nothing to score on"),
        (["--gpus", "4", "--groups", "3"], "do not divide among 3 groups"),
        (["--gpus", "4", "-o", "no/such/folder/map.json"], "no folder"),
        (["--gpus", "4", "--from", "missing.json"], "missing.json"),
        (["--gpu", "4"], "--gpus"),
        ([], "--gpus"),
    ],
)
def test_bad_words_get_one_line(trace, words, message, refused):
    assert message in refused("place", str(trace), *words)


def test_map_of_another_model_is_refused(trace, tmp_path, refused, capsys):
    other = record(tmp_path / "other.npz", model_type="mixtral")
    output = tmp_path / "map.json"
    assert main(["place", str(other), "--gpus", "4", "-o", str(output)]) == 0
    capsys.readouterr()
    line = refused("place", str(trace), "--gpus", "4", "--from", str(output))
    assert "made for mixtral" in line
    assert "used with olmoe" in line


def test_an_interrupt_leaves_the_map_in_use_alone(trace, tmp_path, monkeypatch, capsys):
    output = tmp_path / "map.json"
    words = ["place", str(trace), "--gpus", "4", "-o", str(output)]
    assert main(words) == 0
    before = output.read_bytes()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_runtime.research.placement_solvers.place_experts", interrupt)
    assert main([*words, "--algorithm", "moetuner"]) == 130
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]
    assert "Traceback" not in capsys.readouterr().err
