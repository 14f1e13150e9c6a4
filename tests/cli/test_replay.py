"""``moe-runtime replay``: rows for people and machines, and one line for what cannot be."""

import dataclasses
import json
import subprocess
import sys

import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import read_trace, write_trace
from moe_runtime.policies.prediction import Shape

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.npz"
    write_trace(path, trace_of(make_routes(SHAPE, num_sequences=4, length=20)))
    return str(path)


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.npz"
    write_trace(path, trace_of(make_routes(SHAPE, num_sequences=4, length=20, seed=9)))
    return str(path)


def test_rows_as_json(trace, other, capsys):
    args = ["replay", trace, "--json", "--policy", "lfu,reuse", "--capacity", "25%,0.5"]
    args += ["--bandwidth", "1GB/s", "--predictor", "previous-token", "--train", other]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tokens"], result["layers"], result["experts"]) == (80, 2, 8)
    rows = {(row["policy"], row["capacity"]): row for row in result["rows"]}
    names = ("lfu", "reuse", "random", "lru", "belady", "belady-bypass")
    assert set(rows) == {(name, capacity) for name in names for capacity in (0.25, 0.5)}
    for capacity in (0.25, 0.5):
        best = rows["belady-bypass", capacity]
        assert best["gap_closed"] == 1.0
        assert rows["lru", capacity]["gap_closed"] == 0.0
        assert all(rows[name, capacity]["hit_rate"] <= best["hit_rate"] for name in names)
        assert rows["lfu", capacity]["uniform_random_hit_rate"] == capacity
        for name in names:
            assert len(rows[name, capacity]["hit_rate_by_layer"]) == 2
            prefetches = name in ("lfu", "reuse", "lru")
            kinds = {"off", "previous-token"} if prefetches else {"off"}
            assert set(rows[name, capacity]["timed"]) == kinds
            if not prefetches:
                continue
            timed = rows[name, capacity]["timed"]["previous-token"]
            assert timed["prefetch_bytes"] == timed["useful_bytes"] + timed["wasted_bytes"]
            assert timed["tokens_per_s"] > 0
            assert sum(layer["stall_s"] for layer in timed["by_layer"]) == pytest.approx(
                timed["stall_s"]
            )


def test_a_table_for_people(trace, capsys):
    assert (
        main(["replay", trace, "--policy", "all", "--capacity", "50%", "--bandwidth", "1GB"]) == 0
    )
    out = capsys.readouterr().out
    assert "belady-bypass" in out
    assert "modelled time" in out
    assert "* trained on the replayed trace" in out
    assert "static*" in out


def test_time_is_modelled_with_experts_of_the_size_that_the_trace_says(trace, tmp_path, capsys):
    sized = tmp_path / "sized.npz"
    write_trace(sized, dataclasses.replace(read_trace(trace), expert_bytes=196_608))
    found = {}
    for name, more in ((trace, []), (str(sized), []), (trace, ["--expert-size", "192KiB"])):
        args = ["replay", name, "--json", "--policy", "lru", "--capacity", "50%"]
        assert main([*args, "--bandwidth", "1GB", *more]) == 0
        shown = capsys.readouterr()
        assert ("16MiB are assumed" in shown.err) == (name == trace and not more)
        timed = json.loads(shown.out)["rows"][0]["timed"]["off"]
        found[name, *more] = timed["demand_bytes"]
    misses = found[trace,] // (16 << 20)
    assert misses > 0
    assert list(found.values()) == [misses * size for size in (16 << 20, 196_608, 196_608)]


@pytest.mark.parametrize("words", [("--scope", "global"), ("--shares", "adaptive")])
def test_scopes_shares_and_resets(trace, capsys, words):
    assert main(["replay", trace, "--json", *words, "--reset", "--capacity", "50%"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["scope"] == ("global" if "global" in words else "per-layer")
    assert outcome["rows"]


def test_a_reset_that_would_be_left_out_is_refused(trace, capsys):
    for more, expected in (
        (["--bandwidth", "1GB"], "modelled time (bandwidth) goes on over all of them"),
        (["--side-by-side", "2"], "requests of this trace run at the same time"),
    ):
        assert main(["replay", trace, "--reset", *more]) == 2
        assert expected in capsys.readouterr().err
    rows = []
    for more in ([], ["--side-by-side", "1"]):
        words = ["replay", trace, "--reset", "--capacity", "50%,0.5", "--json", *more]
        assert main(words) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"])
    hits = [{row["policy"]: row["hit_rate"] for row in own} for own in rows]
    assert hits[0] == hits[1]
    assert [len(own) for own in rows] == [len(hits[0])] * 2, "equal capacities are one"


def test_a_policy_that_learns_from_the_replayed_trace_is_told(trace, other, capsys):
    for train, is_told in ((other, False), (trace, True)):
        assert main(["replay", trace, "--policy", "static", "--train", train]) == 0
        assert ("is the replayed trace itself" in capsys.readouterr().err) == is_told


def test_sizes_of_layers_weigh_what_is_read(trace, capsys):
    """With a pool over all layers, LEC reads less than LRU where one layer's experts are dear."""
    args = ["replay", trace, "--json", "--policy", "lec,gdsf", "--capacity", "50%"]
    args += ["--scope", "global", "--expert-size", "1KiB,100KiB"]
    assert main(args) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    visits = 80 * SHAPE.top_k
    for row in rows.values():
        misses = [round(visits * (1 - rate)) for rate in row["hit_rate_by_layer"]]
        assert row["loaded_bytes"] == misses[0] * 1024 + misses[1] * 100 * 1024
    assert rows["lec"]["loaded_bytes"] < rows["lru"]["loaded_bytes"]
    assert rows["lec"]["hit_rate_by_layer"][1] > rows["lec"]["hit_rate_by_layer"][0]

    assert main([arg for arg in args if arg != "--json"]) == 0
    assert "read" in capsys.readouterr().out
    even = [*args[:-1], ",".join(["1KiB"] * 16)]
    assert main(even) == 0
    found = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert main(args[:-2]) == 0
    plain = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name: row["hit_rate"] for name, row in found.items()} == {
        name: row["hit_rate"] for name, row in plain.items()
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "lur"], "did you mean 'lru'"),
        (["--capacity", "0%"], "more than 0 and at most 1"),
        (["--capacity", "half"], "must be shares such as"),
        (["--capacity", "10%"], "a token needs 4"),
        (["--scope", "globl"], "did you mean 'global'"),
        (["--scope", "global", "--shares", "adaptive"], "none to divide"),
        (["--shares", "odd"], "even or adaptive"),
        (["--capacity", "nan"], "more than 0 and at most 1"),
        (["--capacity", ""], "must be shares such as"),
        (["--expert-size", "1MB"], "--expert-size is about modelled time; give --bandwidth"),
        (["--expert-size", "1MB,2MB,3MB"], "one size, 2 for the layers, or 16 for the experts"),
        (
            ["--expert-size", "1MB,0"],
            "--expert-size must be positive and at least one byte, got '0'",
        ),
        (["--expert-size", "large,1MB"], "--expert-size: expected a size such as"),
        (
            ["--bandwidth", "1GB", "--layer-time", "0.1", "--known-ahead", "0.2"],
            "--known-ahead must be a part of --layer-time 0.1, got 0.2",
        ),
        (["--expert-size", "1MB,2MB", "--bandwidth", "1GB"], "must be one size"),
        (["--latency", "0.1"], "--latency is about modelled time; give --bandwidth"),
        (["--predictor", "missing.npz", "--bandwidth", "1GB"], "missing.npz: cannot be read"),
        (["--predictor", "previous-token"], "needs modelled time; give --bandwidth"),
        (["--predictor", "previous-token", "--bandwidth", "1GB"], "needs a training trace"),
        (["--policy", "predicted"], "needs a predictor"),
        (["--bandwidth", "0"], "--bandwidth must be positive and at least one byte, got '0'"),
        (["--bandwidth", "fast"], "--bandwidth: expected a size"),
    ],
)
def test_bad_input_is_one_line(trace, refused, args, message):
    assert message in refused("replay", trace, *args)


@pytest.fixture
def trained(other, tmp_path, capsys):
    path = str(tmp_path / "trained.npz")
    assert main(["predictor", "fit", other, "-o", path, "--predictor", "naive-bayes"]) == 0
    capsys.readouterr()
    return path


def test_a_trained_predictor_prefetches_as_one_trained_here(trace, other, trained, capsys):
    args = ["replay", trace, "--json", "--policy", "lru", "--capacity", "50%", "--bandwidth", "1GB"]
    outcomes = []
    for extra in (["--predictor", trained], ["--predictor", "naive-bayes", "--train", other]):
        assert main([*args, *extra]) == 0
        outcomes.append(json.loads(capsys.readouterr().out)["rows"][0]["timed"])
    assert set(outcomes[0]) == {"off", "naive-bayes"}
    assert outcomes[0] == outcomes[1]


def test_a_trace_or_predictor_of_another_model_names_both(trace, trained, tmp_path, capsys):
    path = str(tmp_path / "wide.npz")
    shape = Shape(num_layers=2, num_experts=9, top_k=2)
    write_trace(path, trace_of(make_routes(shape, num_sequences=2, length=5)))
    for words in (
        [trace, "--train", path, "--policy", "static"],
        [path, "--predictor", trained, "--bandwidth", "1GB"],
    ):
        assert main(["replay", *words]) == 2
        error = capsys.readouterr().err
        assert "layers of 9 experts" in error
        assert "layers of 8 experts" in error


def test_training_what_is_trained_is_a_contradiction(trace, other, trained, capsys):
    args = ["replay", trace, "--bandwidth", "1GB", "--predictor", trained, "--train", other]
    assert main([*args, "--policy", "lru"]) == 2
    assert "is trained already" in capsys.readouterr().err
    assert main([*args, "--policy", "static", "--capacity", "50%"]) == 0


def test_replaying_needs_no_torch(trace):
    program = (
        "import sys\n"
        "from moe_runtime.lab.replay.experiment import Experiment, run_experiment\n"
        "from moe_runtime.lab.traces.readers import read_any_trace\n"
        "from moe_runtime.lab.traces.workload import workload_of\n"
        f"workload = workload_of(read_any_trace({trace!r}))\n"
        "run_experiment(workload, Experiment(policies=['reuse'], capacities=[0.5]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("top_k", "expected"), [(2, {0.25, 0.5}), (5, {0.625})])
def test_without_capacities_those_with_room_for_a_token_are_replayed(
    tmp_path, capsys, top_k, expected
):
    shape, path = Shape(num_layers=2, num_experts=8, top_k=top_k), tmp_path / "t.npz"
    write_trace(path, trace_of(make_routes(shape, num_sequences=2, length=10)))
    assert main(["replay", str(path), "--json"]) == 0
    assert {row["capacity"] for row in json.loads(capsys.readouterr().out)["rows"]} == expected
    assert main(["replay", str(path), "--capacity", "12.5%"]) == 2
