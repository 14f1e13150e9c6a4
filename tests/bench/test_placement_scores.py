"""`bench placements`: scores are those of a walk over the tokens, of every algorithm."""

import itertools
import json

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.benchmarks.cases import placements as placement_scores
from moe_runtime.benchmarks.cases.placements import PlacementsPlan, measure_placements
from moe_runtime.benchmarks.suite import Rules, read_results
from moe_runtime.cli.main import main
from moe_runtime.lab.traces import write_trace
from moe_runtime.lab.traces.format import Trace
from moe_runtime.policies.placement import Devices, Placement, PlacementOptions, RoutingProfile
from moe_runtime.policies.prediction import Shape
from moe_runtime.research.placement_solvers import ALGORITHMS, place_experts

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)
SEARCHING = {"exflow", "moetuner"}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(make_routes(SHAPE, num_sequences=4))


def walked(placement: Placement, ids: np.ndarray) -> dict[str, float]:
    """The scores of a placement without copies, token by token."""
    per_gpu = placement.slots_per_gpu
    where = [
        [[row.tolist().index(e) // per_gpu for e in experts] for row, experts in rows]
        for token in ids.tolist()
        for rows in [list(zip(placement.expert_of_slot, token, strict=True))]
    ]
    loads = np.zeros((placement.num_layers, placement.num_gpus))
    hops, first_hops, copies = [], [], []
    for token in where:
        for layer, gpus in enumerate(token):
            copies.append(len(set(gpus)))
            for gpu in gpus:
                loads[layer, gpu] += 1
        for here, there in itertools.pairwise(token):
            hops += [a != b for a in here for b in there]
            first_hops.append(here[0] != there[0])
    return {
        "balancedness": float((loads.mean(axis=1) / loads.max(axis=1)).mean()),
        "hops": float(np.mean(hops)),
        "primary_hops": float(np.mean(first_hops)),
        "devices_per_token": float(np.mean(copies)),
    }


@pytest.mark.usefixtures("plots")
def test_scores_are_those_of_a_walk_over_the_tokens(trace, tmp_path, capsys, worse):
    write_trace(tmp_path / "t.npz", trace)
    path = tmp_path / "r.json"
    words = ["--gpus", "2", "--fit", "0.25", "--load-slack", "0.3", "--time-limit", "20"]
    words += ["--precision", "1", "--time", "1", "-o", str(path), "--json"]
    assert main(["bench", "placements", str(tmp_path / "t.npz"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == read_results(path)
    found = {one["system"]: one for one in printed["measurements"]}
    assert found.keys() == {"random", *ALGORITHMS}
    num_past = trace.num_tokens // 4
    future = trace.expert_ids[num_past:]
    profile = RoutingProfile.from_ids(trace.expert_ids[:num_past], SHAPE.num_experts)
    told = PlacementOptions(load_slack=0.3, time_limit_s=20.0)
    for name in ALGORITHMS:
        devices = Devices(num_nodes=1, gpus_per_node=2)
        expected = walked(place_experts(name, profile, devices, options=told), future)
        assert found[name]["quality"] == {"compared": future.size, "equal": future.size}
        assert found[name]["summary"]["place_s"]["median"] > 0
        for metric, value in expected.items():
            assert found[name]["summary"][metric]["median"] == pytest.approx(value), (name, metric)
    assert "place_s" not in found["random"]["summary"]
    assert found["random"]["quality"]["equal"] == 5 * future.size  # drawn as often

    def hop(repetition: dict[str, float]) -> None:
        repetition["hops"] += 0.1

    assert worse(printed, hop) == {(name, "hops") for name in found}
    assert main(["bench", "report", str(path), "-o", str(tmp_path / "r.html")]) == 0
    assert "balancedness" in (tmp_path / "r.html").read_text("utf-8")


@pytest.mark.long
def test_copies_are_made_beside_and_searches_left_out(trace, tmp_path, capsys):
    write_trace(tmp_path / "t.npz", trace)
    words = ["bench", "placements", str(tmp_path / "t.npz"), "--quick", "--time", "1"]
    words += ["--gpus", "4", "--nodes", "2", "--replicas", "4", "--groups", "2", "--no-align"]
    assert main([*words, "--precision", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    summaries = {one["system"]: one["summary"] for one in printed["measurements"]}
    copying = {f"{name}, 4 replicas" for name in ("round-robin", "eplb")}
    assert summaries.keys() == {"random", *ALGORITHMS} - SEARCHING | copying
    for summary in summaries.values():
        assert 0 < summary["node_hops"]["median"] < summary["hops"]["median"]
    assert printed["settings"]["groups"] == 2
    assert printed["settings"]["aligned"] is False
    assert main([*words, "--precision", "1"]) == 0
    assert "eplb, 4 replicas" in capsys.readouterr().out


def test_who_cannot_place_has_no_numbers_and_the_others_have(trace, tmp_path, capsys):
    write_trace(tmp_path / "t.npz", trace)
    words = ["--gpus", "3", "--replicas", "1", "--quick", "--time", "1", "--precision", "1"]
    assert main(["bench", "placements", str(tmp_path / "t.npz"), *words, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for one in printed["measurements"]:
        # The baseline leaves slots empty.
        if one["system"] in ("random", "round-robin, 1 replicas", "eplb, 1 replicas"):
            assert one["failure"] is None
        else:
            assert "do not divide among 3 devices" in one["failure"]


def test_visits_counted_elsewhere_are_found_out(trace, monkeypatch):
    counted = placement_scores.gpus_of_tokens

    def with_one_wrong(placement: Placement, ids: np.ndarray) -> np.ndarray:
        gpus = counted(placement, ids).copy()
        gpus[3, 1, 0] = 1 - gpus[3, 1, 0]
        return gpus

    monkeypatch.setattr(placement_scores, "gpus_of_tokens", with_one_wrong)
    plan = PlacementsPlan(
        profile=RoutingProfile.from_ids(trace.expert_ids, SHAPE.num_experts),
        future=trace.expert_ids,
        devices=Devices(num_nodes=1, gpus_per_node=2),
        options=PlacementOptions(),
        searches=False,
    )
    rules = Rules(judged=(), least=1, most=1)
    results = measure_placements(plan, rules, settings={})
    for one in results["measurements"]:
        assert one["failure"].startswith("1 of ")
        assert not one["repetitions"]
