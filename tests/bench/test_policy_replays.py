"""`bench policies`: hits are those of the policies themselves, and fewer hits are a regression."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.benchmarks.cases import policies as policy_replays
from moe_runtime.benchmarks.cases.policies import beginning, measure_policies, require_golden
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.benchmarks.suite.comparing import work_of
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.lab.replay.experiment import Experiment, run_experiment
from moe_runtime.lab.replay.untimed import DemandReplay
from moe_runtime.lab.traces import write_trace
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.routes import routes_of, side_by_side
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.prediction import Shape
from moe_runtime.types import ExpertKey

SHAPE = Shape(num_layers=3, num_experts=16, top_k=2)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(make_routes(SHAPE, num_sequences=8))


def test_a_replay_that_is_not_the_policy_has_no_numbers(trace, monkeypatch):
    plan = Experiment(policies=["lru", "reuse"], capacities=[0.25], scope="global")
    asked = policy_replays.ask_policy

    def with_one_hit_more(*words: Any) -> DemandReplay:
        found = asked(*words)
        found.hits[7] += 1
        return found

    monkeypatch.setattr(policy_replays, "ask_policy", with_one_hit_more)
    rules = Rules(judged=(), least=1, most=1)
    for one in measure_policies(plan, rules, {}, workload_of(trace))["measurements"]:
        assert "events differ between the replay and the policy" in one["failure"]
        assert one["quality"]["compared"] - one["quality"]["equal"] == 1


def test_the_beginning_is_a_shorter_trace(trace):
    whole = workload_of(trace)
    first = beginning(whole, 30)
    assert first.num_events == 30 < whole.num_events
    assert first.keys == whole.keys[:30]
    assert first.num_keys.tolist() == [len(keys) for keys in whole.keys[:30]]
    assert len(first.key_numbers) == first.num_keys.sum()


def test_the_command_finds_what_a_replay_finds_and_compares(trace, tmp_path, capsys, worse):
    write_trace(tmp_path / "t.npz", trace)
    path = tmp_path / "r.json"
    words = ["--policy", "lru,belady,random", "--capacity", "25%,0.5", "--time", "60"]
    words += ["--precision", "1", "-o", str(path), "--json"]
    assert main(["bench", "policies", str(tmp_path / "t.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    experiment = Experiment(policies=["lru", "belady", "random"], capacities=[0.25, 0.5])
    expected = {
        (row.policy, row.capacity): row.hit_rate
        for row in run_experiment(workload_of(trace), experiment)
    }
    for one in printed["measurements"]:
        assert one["quality"]["equal"] == one["quality"]["compared"] == 2 * 3 * trace.num_tokens
        for capacity in (0.25, 0.5):
            found = one["summary"][f"hit_rate_at_{capacity:g}"]
            assert found["median"] == expected[one["system"], capacity]
            assert found["high"] - found["low"] == pytest.approx(0, abs=1e-12)

    # One hit fewer in a hundred, every time: worse beyond a bound of half a percent, not of two.
    def hit_less(repetition: dict[str, float]) -> None:
        repetition["hit_rate_at_0.25"] *= 0.99

    expected_worse = {(name, "hit_rate_at_0.25") for name in ("lru", "belady", "random")}
    assert worse(printed, hit_less, "--bound", "0.005") == expected_worse
    assert worse(printed, hit_less, "--bound", "0.02") == set()


def test_learners_are_taught_and_requests_decode_side_by_side(trace, tmp_path, capsys):
    """With a cache for each request there is nothing but what was taught."""
    other = trace_of(make_routes(SHAPE, num_sequences=8, seed=1))
    write_trace(tmp_path / "t.npz", trace)
    write_trace(tmp_path / "other.npz", other)
    train = str(tmp_path / "other.npz")
    words = [str(tmp_path / "t.npz"), "--policy", "activation-aware,lru", "--capacity", "25%"]
    words += ["--quick", "--time", "1", "--precision", "1", "--json"]
    experiment = Experiment(policies=["activation-aware", "lru"], capacities=[0.25])
    for more, workload, asked in (
        (["--train", train], trace, replace(experiment, training=routes_of(other))),
        (["--reset"], trace, replace(experiment, reset_per_sequence=True)),
        (["--side-by-side", "3"], side_by_side(trace, count=3), experiment),
    ):
        assert main(["bench", "policies", *words, *more]) == 0
        printed = json.loads(capsys.readouterr().out)
        rows = run_experiment(workload_of(workload), asked, bounds=False)
        found = [one["summary"]["hit_rate_at_0.25"]["median"] for one in printed["measurements"]]
        assert found == [row.hit_rate for row in rows]
    assert work_of(printed)["side_by_side"] == 3


@pytest.mark.long
def test_predicted_asks_what_was_trained_and_bytes_are_weighed(trace, tmp_path, capsys):
    other = trace_of(make_routes(SHAPE, num_sequences=8, seed=1))
    write_trace(tmp_path / "t.npz", trace)
    write_trace(tmp_path / "other.npz", other)
    fit = ["predictor", "fit", str(tmp_path / "other.npz"), "--predictor", "layer-affinity"]
    assert main([*fit, "-o", str(tmp_path / "p.npz"), "--json"]) == 0
    sizes = [3 << 20, 1 << 20, 2 << 20]
    words = [str(tmp_path / "t.npz"), "--policy", "predicted,lec", "--capacity", "25%", "--scope"]
    words += ["global", "--time", "1", "--precision", "1", "--expert-size", "3MiB,1MiB,2MiB"]
    expected = {
        row.policy: row
        for row in run_experiment(
            workload_of(trace),
            Experiment(
                policies=["predicted", "lec"],
                capacities=[0.25],
                scope="global",
                training=routes_of(other),
                predictor="layer-affinity",
                sizes={
                    ExpertKey(layer, expert): size
                    for layer, size in enumerate(sizes)
                    for expert in range(SHAPE.num_experts)
                },
            ),
            bounds=False,
        )
    }
    capsys.readouterr()
    for more in (
        ["--predictor", "layer-affinity", "--train", str(tmp_path / "other.npz")],
        ["--predictor", str(tmp_path / "p.npz")],
    ):
        assert main(["bench", "policies", *words, *more, "--json"]) == 0
        for one in json.loads(capsys.readouterr().out)["measurements"]:
            summary, row = one["summary"], expected[one["system"]]
            assert summary["hit_rate_at_0.25"]["median"] == row.hit_rate
            assert summary["read_bytes_at_0.25"]["median"] == row.loaded_bytes
    assert main(["bench", "policies", *words, *more]) == 0
    assert "read bytes at 0.25, " in capsys.readouterr().out


def golden_rows(trace: Trace) -> list[dict[str, Any]]:
    """What a replay of two policies counts, as somebody else would write it down."""
    rows = []
    for policy, scope, slots in (("belady_bypass", "per_layer", 4), ("lru", "global", 24)):
        share = slots * (3 if scope == "per_layer" else 1) / (3 * 16)
        experiment = Experiment(
            policies=[policy.replace("_", "-")],
            capacities=[share],
            scope=scope.replace("_", "-"),
            reset_per_sequence=True,
        )
        (found,) = run_experiment(workload_of(trace), experiment, bounds=False)
        accesses = len(workload_of(trace).key_numbers)
        rows.append(
            {
                "policy": policy,
                "scope": scope,
                "capacity": slots,
                "reset_per_sequence": 1,
                "accesses": accesses,
                "hits": round(found.hit_rate * accesses),
                "all_k_hit_rate": round(found.all_resident_rate, 6),
            }
        )
    return rows


def test_golden_counts_are_found_again(trace, tmp_path):
    path = tmp_path / "golden.json"
    rows = golden_rows(trace)
    path.write_text(json.dumps({"rows": rows}))
    assert require_golden(workload_of(trace), path) == 2
    rows[1]["hits"] += 1
    path.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"row 1 \(lru, global, 24 slots\): expected .* hits"):
        require_golden(workload_of(trace), path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"policy": "lrru"}, r"row 0 \(lrru, .*unknown"),
        ({"capacity": 0}, r"row 0 \(belady_bypass, per_layer, 0 slots\)"),
        ({"scope": "everywhere"}, r"row 0 .*everywhere"),
        ({"hits": "many"}, "row 0: expected a number as 'hits'"),
        ({"accesses": None}, "row 0: expected a number as 'accesses'"),
    ],
)
def test_rows_that_are_none_are_one_line(change, complaint, trace, tmp_path, capsys):
    write_trace(tmp_path / "t.npz", trace)
    path = tmp_path / "golden.json"
    path.write_text(json.dumps([golden_rows(trace)[0] | change]))
    words = ["bench", "policies", str(tmp_path / "t.npz"), "--quick", "--golden", str(path)]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert re.search(complaint, err)
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ["[", "[]", "{}", "[1]", '{"rows": 3}'])
def test_a_file_without_rows_is_refused(content, trace, tmp_path):
    path = tmp_path / "golden.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"golden\.json: "):
        require_golden(workload_of(trace), path)
