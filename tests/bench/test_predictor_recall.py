"""`bench predictors`: recall is what counting gives, and without a complete control nothing is."""

import dataclasses
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.benchmarks.cases import predictors
from moe_runtime.benchmarks.cases import predictors as predictor_recall
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.benchmarks.suite.comparing import heading_words
from moe_runtime.cli.main import main
from moe_runtime.lab.replay.evaluation import Evaluation
from moe_runtime.lab.replay.timed import Machine, replay_timed
from moe_runtime.lab.traces import write_trace
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.routes import routes_of, split_numbers, trace_of_routes
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.prediction import Routes, Shape, TrackedPredictor, make_estimator

SHAPE = Shape(num_layers=3, num_experts=16, top_k=2)
RULES = Rules(judged=(), least=2, most=2)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(make_routes(SHAPE, num_sequences=8))


def plan_of(trace: Trace, **fields: Any) -> predictors.PredictorsPlan:
    routes = routes_of(trace)
    training, test = map(routes.select, split_numbers(routes.num_sequences, test_share=0.5))
    served = workload_of(trace_of_routes(test, trace.signature))
    return predictors.PredictorsPlan(
        **{
            "predictors": ["popularity", "layer-affinity"],
            "training": training,
            "test": test,
            "served": served,
            "distances": (1, 2),
            **fields,
        }
    )


def counted_by_hand(training: Routes, test: Routes, width: int) -> float:
    """Recall of popularity, one token, layer and expert at a time; mean over layers."""
    shares = []
    for layer in range(SHAPE.num_layers):
        seen = training.expert_ids[:, layer].ravel().tolist()
        best = sorted(range(SHAPE.num_experts), key=lambda e, seen=seen: (-seen.count(e), e))
        visited = test.expert_ids[:, layer].ravel().tolist()
        shares.append(sum(one in best[:width] for one in visited) / len(visited))
    return sum(shares) / len(shares)


def test_recall_is_what_counting_by_hand_gives(trace):
    plan = plan_of(trace)
    results = predictors.measure_predictors(plan, RULES, settings={})
    popularity = results["measurements"][0]
    assert popularity["quality"] == {"compared": 4, "equal": 4}
    for repetition in popularity["repetitions"]:
        assert len(repetition["prediction_s"]) == plan.test.num_tokens
        for name, width in (("k", SHAPE.top_k), ("2k", 2 * SHAPE.top_k)):
            by_hand = counted_by_hand(plan.training, plan.test, width)
            for distance in (1, 2):
                assert repetition[f"recall_at_{name}_ahead_{distance}"] == pytest.approx(by_hand)


def test_without_a_complete_control_there_are_no_numbers(trace, monkeypatch):
    counted = predictor_recall.evaluate

    def with_a_miss(*words: Any, **options: Any) -> list[Evaluation]:
        control, *rest = counted(*words, **options)
        at_k = 0.999 * control.recalls[0].at_k
        first = dataclasses.replace(control.recalls[0], at_k=at_k)
        return [dataclasses.replace(control, recalls=(first, *control.recalls[1:])), *rest]

    monkeypatch.setattr(predictor_recall, "evaluate", with_a_miss)
    results = predictors.measure_predictors(plan_of(trace), RULES, settings={})
    assert results["ended"] == "failed"
    for one in results["measurements"]:
        assert one["failure"].endswith("found it in 3 of 4 recalls")
        assert not one["repetitions"]


def test_prefetching_is_that_of_a_timed_replay(trace):
    machine = Machine(
        bytes_per_s=1e9, latency_s=1e-5, expert_bytes=10**6, layer_s=1e-3, expert_s=1e-4
    )
    plan = plan_of(trace, machine=machine, capacities=[0.25])
    found = predictors.MeasuredPredictor("layer-affinity", plan).repeat()
    estimator = make_estimator("layer-affinity", SHAPE)
    estimator.fit(plan.training)
    without, with_it = (
        replay_timed(
            plan.served,
            make_policy("lru", num_slots=12, setting=Setting(shape=SHAPE)),
            12,
            machine,
            predictor=predictor,
        ).total
        for predictor in (None, TrackedPredictor(estimator))
    )
    assert with_it.prefetches > 0
    assert found["useful_prefetches_at_0.25"] == with_it.useful / with_it.prefetches
    reads = (with_it.misses + with_it.prefetches) / without.misses
    assert found["reads_of_lru_at_0.25"] == reads
    assert found["waits_of_lru_at_0.25"] == with_it.stall_s / without.stall_s


def test_what_was_counted_is_kept_when_it_is_stopped(trace):
    """Whoever stops it during the first one gets its numbers, timed once."""
    results = predictors.measure_predictors(
        plan_of(trace), replace(RULES, is_stopping=lambda: True), {}
    )
    assert results["ended"] == "interrupted"
    (one,) = results["measurements"]
    assert one["system"] == "popularity"
    assert len(one["repetitions"]) == 1
    assert one["summary"]["recall_at_k_ahead_1"]["median"] > 0


def test_sequences_as_a_trace_are_the_same_sequences():
    routes = make_routes(SHAPE, num_sequences=3, length=5)
    routes.expert_ids[4, 1] = SHAPE.num_experts
    trace = trace_of_routes(routes, trace_of(routes).signature)
    assert (trace.expert_ids[4, 1] == trace.absent).all()
    again = routes_of(trace)
    np.testing.assert_array_equal(again.expert_ids, routes.expert_ids)
    np.testing.assert_array_equal(again.offsets, routes.offsets)
    np.testing.assert_array_equal(again.token_ids, routes.token_ids)


@pytest.mark.usefixtures("plots")
def test_the_command_writes_what_the_other_commands_read(trace, tmp_path, capsys, worse):
    write_trace(tmp_path / "t.npz", trace)
    path = tmp_path / "r.json"
    words = ["--predictor", "popularity", "--predictor", "eam", "--precision", "1", "--time", "1"]
    words += ["--bandwidth", "3GB", "--expert-size", "1MB", "--layer-time", "0.002"]
    words += ["--capacity", "50%", "--side-by-side", "2", "--seed", "3", "--max-tokens", "60"]
    command = ["bench", "predictors", str(tmp_path / "t.npz"), *words, "-o", str(path)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "prefetches" in shown
    results = read_results(path)
    assert [one["system"] for one in results["measurements"]] == ["popularity", "eam"]
    popularity = results["measurements"][0]["summary"]
    assert f"{popularity['recall_at_k_ahead_1']['median']:.4g}" in shown
    assert all(len(one["prediction_s"]) == 30 for one in results["measurements"][0]["repetitions"])
    assert "seed 3, max tokens 60, side by side 2, " in heading_words(results)
    recall = ["predictor", "evaluate", str(tmp_path / "t.npz"), "--predictor", "popularity"]
    assert main([*recall, "--seed", "3", "--max-tokens", "60", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["results"][1]["recalls"]
    for one in told:
        assert popularity[f"recall_at_k_ahead_{one['distance']}"]["median"] == one["mean_at_k"]

    def recall_less(repetition: dict[str, float]) -> None:
        repetition["recall_at_2k_ahead_4"] *= 0.9

    expected = {(name, "recall_at_2k_ahead_4") for name in ("popularity", "eam")}
    assert worse(results, recall_less) == expected
    assert main(["bench", "report", str(path), "-o", str(tmp_path / "r.html")]) == 0
    assert "recall_at_k_ahead_1" in (tmp_path / "r.html").read_text("utf-8")


def test_another_trace_may_teach(trace, tmp_path, capsys):
    other = trace_of(make_routes(SHAPE, num_sequences=5, seed=1))
    write_trace(tmp_path / "t.npz", trace)
    write_trace(tmp_path / "other.npz", other)
    words = ["--predictor", "popularity", "--train", str(tmp_path / "other.npz"), "--time", "1"]
    words += ["--precision", "1", "--json"]
    assert main(["bench", "predictors", str(tmp_path / "t.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = printed["measurements"][0]["summary"]["recall_at_k_ahead_1"]["median"]
    assert found == pytest.approx(counted_by_hand(routes_of(other), routes_of(trace), SHAPE.top_k))
    assert printed["settings"]["training_sequences"] == 5
    assert printed["settings"]["test_sequences"] == 8
    # Three of eight were learned from: the others alone are held out.
    known = trace_of(routes_of(trace).select([0, 3, 5]))
    write_trace(tmp_path / "other.npz", known)
    assert main(["bench", "predictors", str(tmp_path / "t.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"]["test_sequences"] == 5
    found = printed["measurements"][0]["summary"]["recall_at_k_ahead_1"]["median"]
    held_out = routes_of(trace).select([1, 2, 4, 6, 7])
    assert found == pytest.approx(counted_by_hand(routes_of(known), held_out, SHAPE.top_k))


def test_the_quick_ones_are_three(trace, tmp_path, capsys):
    write_trace(tmp_path / "t.npz", trace)
    words = ["--quick", "--time", "1", "--precision", "1", "--json"]
    assert main(["bench", "predictors", str(tmp_path / "t.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed["measurements"]) == 3
    assert printed["settings"]["link"] is None
    assert not any("_at_0." in name for name in printed["measurements"][0]["summary"])
