"""The commands that train and measure predictors, and what they refuse."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from synthetic_routes import make_routes

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import Trace, write_trace
from moe_runtime.lab.traces.learned import (
    keep_learned,
    read_predictor,
    write_learned,
)
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction import reuse, reuse_network
from moe_runtime.policies.eviction.reuse import new_estimator, watch
from moe_runtime.policies.prediction import PREDICTORS, Shape
from moe_runtime.types import ModelSignature

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)
MODEL = ModelSignature(model_type="olmoe", num_layers=3, num_experts=8, top_k=2, vocab_size=100)


def save(path: Path, *, model_type: str = "olmoe", gates: float = 1.0) -> Path:
    routes = make_routes(SHAPE, num_sequences=6, length=30)
    steps = routes.num_tokens
    lengths = np.diff(routes.offsets)
    trace = Trace(
        version=1,
        signature=replace(MODEL, model_type=model_type),
        step_phase=np.ones(steps, dtype=np.uint8),
        step_start=np.arange(steps + 1, dtype=np.int64),
        token_request=np.repeat(np.arange(6), lengths).astype(np.int32),
        token_id=routes.token_ids.astype(np.int32),
        token_position=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        expert_ids=routes.expert_ids.astype(np.uint8),
        gate_weights=(gates * routes.gate_weights).astype(np.float16),
    )
    write_trace(path, trace)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return save(tmp_path / "trace.npz")


def test_fit_writes_a_predictor_that_can_be_read(trace, tmp_path, capsys):
    target = tmp_path / "p.npz"
    assert main(["predictor", "fit", str(trace), "-o", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 180
    assert facts["file_bytes"] == target.stat().st_size
    assert read_predictor(target).name == "combined"


def test_evaluate_reports_every_predictor_and_the_control(trace, capsys):
    command = ["predictor", "evaluate", str(trace), "--distances", "1,2", "--json"]
    assert main(command) == 0
    facts = json.loads(capsys.readouterr().out)
    from_routing = [name for name, kind in PREDICTORS.items() if not kind.needs_hidden]
    assert [result["predictor"] for result in facts["results"]] == ["control", *from_routing]
    control, *others = facts["results"]
    assert all(recall["mean_at_k"] == 1.0 for recall in control["recalls"])
    assert facts["training_sequences"] + facts["test_sequences"] == 6
    assert all(0 < recall["mean_at_2k"] < 1 for other in others for recall in other["recalls"])


def test_a_mass_of_gates_without_weight_is_none(tmp_path, capsys):
    trace = save(tmp_path / "zeros.npz", gates=0)
    words = ["predictor", "evaluate", str(trace), *["--predictor", "popularity"] * 2]
    words += ["--distances", "1,1"]
    assert main([*words, "--json"]) == 0
    control, result = json.loads(capsys.readouterr().out)["results"]
    assert control["predictor"] == "control"
    assert len(result["recalls"]) == 1
    assert {recall["mean_mass_at_2k"] for recall in result["recalls"]} == {None}
    assert main(words) == 0
    assert "nan" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--predictor", "combind"], "did you mean 'combined'"),
        (["--predictor", "next-gate"], "hidden states"),
        (["--distances", "0"], "positive numbers"),
        (["--distances", "1,99999999999999999999"], "--distances must be below"),
        (["--test-share", "0.01"], "leaves nothing"),
    ],
)
def test_bad_options_are_one_line(trace, refused, words, complaint):
    assert complaint in refused("predictor", "evaluate", str(trace), *words)


def test_a_name_that_no_command_would_take_for_a_file_is_not_written(trace, tmp_path, capsys):
    output = tmp_path / "p.txt"
    assert main(["predictor", "fit", str(trace), "-o", str(output)]) == 2
    assert "expected a name that ends in .npz" in capsys.readouterr().err
    assert not output.exists()


def test_traces_of_two_models_are_refused(trace, tmp_path, capsys):
    other = save(tmp_path / "other.npz", model_type="mixtral")
    assert main(["predictor", "evaluate", str(trace), str(other)]) == 2
    message = capsys.readouterr().err
    assert "mixtral" in message
    assert "olmoe" in message


def test_the_look_ahead_is_trained_and_measured_from_a_model_and_a_text(tmp_path, capsys):
    text, target = tmp_path / "text.txt", tmp_path / "p.npz"
    text.write_text(Path(argparse.__file__).read_text(encoding="utf-8")[:2600], encoding="utf-8")
    source = ["--model", str(pocket_path()), "--text", str(text)]
    look = ["--predictor", "hidden-lookahead"]
    assert main(["predictor", "fit", *source, *look, "-o", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 128 * facts["sequences"]
    assert read_predictor(target).name == "hidden-lookahead"

    command = ["predictor", "evaluate", *source, *look, "--predictor", "next-gate", "--json"]
    assert main([*command, "--distances", "1"]) == 0
    control, *others = json.loads(capsys.readouterr().out)["results"]
    assert control["recalls"][0]["mean_at_k"] == 1.0
    assert [result["predictor"] for result in others] == ["hidden-lookahead", "next-gate"]
    assert all(result["recalls"][0]["mean_at_2k"] > 0.4 for result in others)


def test_traces_and_a_model_are_not_mixed(trace, tmp_path, capsys):
    output = ["-o", str(tmp_path / "p.npz")]
    for words, complaint in (
        ([str(trace), "--model", "m", "--text", "t"], "either traces, or --model"),
        ([], "either traces, or --model"),
        (["--model", "m"], "belong together"),
        (["--model", str(pocket_path()), "--text", str(tmp_path / "no.txt")], "no.txt"),
    ):
        assert main(["predictor", "fit", *words, *output]) == 2
        assert complaint in capsys.readouterr().err


def test_one_prompt_does_not_suffice_and_the_error_says_what_does(tmp_path, capsys):
    path = str(tmp_path / "one.npz")
    assert main(["run", str(pocket_path()), "-p", "Lists are", "-n", "9", "--trace", path]) == 0
    assert main(["predictor", "evaluate", path]) == 2
    assert "record more prompts, as `run --prompts FILE --trace` does" in capsys.readouterr().err


def chained_trace(path: Path, *, is_random: bool = False) -> Path:
    """Routing of the pocket model's sizes, in which the last token says where the next one goes."""
    rng = np.random.default_rng(0)
    shape = Shape(num_layers=6, num_experts=16, top_k=2)
    homes = rng.permuted(np.tile(np.arange(16), (14, 6, 1)), axis=2)[..., :2]
    states, state = [], 0
    for _ in range(600):
        state = (5 * state + 3) % 14 if rng.random() < 0.9 else int(rng.integers(14))
        states.append(state)
    ids = homes[states] if not is_random else rng.permuted(homes[states], axis=0)
    number = np.arange(600)
    trace = Trace(
        version=1,
        signature=ModelSignature(model_type="qwen3_moe", **asdict(shape), vocab_size=4096),
        step_phase=np.ones(600, dtype=np.uint8),
        step_start=np.arange(601, dtype=np.int64),
        token_request=(number // 60).astype(np.int32),
        token_id=np.zeros(600, np.int32),
        token_position=(number % 60).astype(np.int32),
        expert_ids=ids.astype(np.uint8),
        gate_weights=np.full(ids.shape, 0.5, np.float16),
    )
    write_trace(path, trace)
    return path


@pytest.fixture
def few_tokens_suffice(monkeypatch):
    monkeypatch.setattr(reuse, "LEAST_TOKENS", 200)


def test_a_model_is_taught_what_saves_misses(tmp_path, monkeypatch, capsys, few_tokens_suffice):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    trace = chained_trace(tmp_path / "trace.npz")
    assert main(["predictor", "teach", str(pocket_path()), str(trace), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["capacities"] == [0.125, 0.25, 0.5]
    assert sum(facts["taught_misses"]) < sum(facts["reuse_misses"])
    state = np.load(facts["file"])
    assert state["network_output"].shape == (6, reuse_network.WIDTH, 16)
    words = ["--prompt", "The for statement", "--max-new-tokens", "60", "--policy", "reuse"]
    assert main(["run", str(pocket_path()), *words, "--host-memory", "20MiB"]) == 0
    after = np.load(facts["file"])
    np.testing.assert_array_equal(after["network_output"], state["network_output"])
    assert (after["gram"] != state["gram"]).any()  # the run went on from it


def test_a_process_without_the_network_does_not_replace_it(tmp_path):
    taught, plain = new_estimator(SHAPE), new_estimator(SHAPE)
    rng = np.random.default_rng(0)
    sizes = ((3, 8, 24), (2, 3, 8, 24), (3, 24, 8), (3, 8))
    drawn = (rng.normal(size=size).astype(np.float32) for size in sizes)
    taught.take_network(reuse_network.ReuseNetwork(*drawn))
    watch(plain, make_routes(SHAPE, num_sequences=2, length=200))
    path = tmp_path / "learned.npz"
    for estimator, holds_network in ((plain, False), (taught, True), (plain, True)):
        keep_learned(estimator, MODEL, path)
        assert ("network_output" in np.load(path)) == holds_network


def test_a_process_with_the_network_of_before_does_not_replace_a_new_one(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "learned.npz"
    sizes = ((3, 8, 24), (2, 3, 8, 24), (3, 24, 8), (3, 8))
    before, new = new_estimator(SHAPE), new_estimator(SHAPE)
    for estimator in (before, new):
        drawn = (rng.normal(size=size).astype(np.float32) for size in sizes)
        estimator.take_network(reuse_network.ReuseNetwork(*drawn))
    write_learned(new, MODEL, path)
    keep_learned(before, MODEL, path)
    np.testing.assert_array_equal(np.load(path)["network_bias"], new.learned()["network_bias"])


def test_what_teaching_needs_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = str(pocket_path())
    for words, said in (
        ([model], "no routing of"),
        ([model, str(save(tmp_path / "other.npz"))], "is a trace of olmoe"),
        ([model, str(chained_trace(tmp_path / "few.npz"))], "600 tokens of"),
    ):
        assert main(["predictor", "teach", *words]) == 2
        assert said in capsys.readouterr().err
