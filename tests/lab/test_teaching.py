"""The policy `reuse` is taught in the background from kept routing, and `auto` goes by that."""

import shutil
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of
from warm_python import warm_python

from moe_runtime.cli.console import Session
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.files import locked, make_folders
from moe_runtime.lab.replay import teaching
from moe_runtime.lab.replay.choice import choose_policy
from moe_runtime.lab.replay.teaching import LEAST_KEPT_TOKENS, is_due, start_teaching, teach_kept
from moe_runtime.lab.traces import Trace, write_trace
from moe_runtime.lab.traces.learned import (
    Lesson,
    learned_path,
    read_lesson,
    read_predictor,
    write_lesson,
)
from moe_runtime.lab.traces.recent import FILE_TOKENS, recent_path
from moe_runtime.policies.eviction.reuse import new_estimator
from moe_runtime.policies.prediction import Shape
from moe_runtime.policies.prediction.base import shape_of

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2)
CHECKPOINT = Path("/made-up")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def kept(num_tokens: int, num_requests: int = 10, seed: int = 0) -> Trace:
    """Routing in which the last token says where the next one goes."""
    rng = np.random.default_rng(seed)
    routes = make_routes(SHAPE, num_sequences=num_requests, length=-(-num_tokens // num_requests))
    homes = rng.permuted(np.tile(np.arange(8), (13, 2, 1)), axis=2)[..., :2]
    states = (np.cumsum(rng.random(routes.num_tokens) < 0.9) * 5) % 13
    trace = trace_of(replace(routes, expert_ids=homes[states], token_ids=states))
    return trace.steps(0, num_tokens)


def lesson_of(trace: Trace, **changed: Any) -> Lesson:
    lesson = Lesson(
        tokens=trace.num_tokens,
        last_marks=teaching._marks(trace)[-64:],
        capacities=np.array([0.25, 0.5]),
        misses=np.array([[100, 50], [90, 48], [60, 40]]),
        is_kept=True,
        policy_s=1e-6,
        recall=0.7,
    )
    return replace(lesson, **changed)


def test_it_is_time_to_teach_when_as_much_is_new_as_was_taught():
    trace = kept(6000)
    assert not is_due(kept(LEAST_KEPT_TOKENS - 1), None)
    assert not is_due(kept(4000, num_requests=2), None)
    assert is_due(trace, None)
    for seen, due in ((2500, True), (3000, True), (3001, False), (6000, False)):
        assert is_due(trace, lesson_of(trace.steps(0, seen))) == due
    other = lesson_of(kept(6000, seed=1))  # nothing of it is left
    assert is_due(trace, other)
    # a full file never holds twice as much
    assert is_due(trace, replace(lesson_of(kept(2500, seed=1)), tokens=10**6)) is (
        FILE_TOKENS // 2 <= 6000
    )


def test_what_is_taught_in_the_background_is_what_the_next_run_begins_with(capsys):
    trace = kept(LEAST_KEPT_TOKENS)
    path = recent_path(trace.signature, CHECKPOINT)
    make_folders(path.parent)
    write_trace(path, trace)
    lock = learned_path("lesson", trace.signature, CHECKPOINT).with_suffix(".lock")
    make_folders(lock.parent)
    with locked(lock):
        assert not teach_kept(path, CHECKPOINT)  # another process teaches
    assert read_lesson(trace.signature, CHECKPOINT) is None

    assert teach_kept(path, CHECKPOINT)
    assert capsys.readouterr() == ("", "")
    lesson = read_lesson(trace.signature, CHECKPOINT)
    assert lesson is not None
    assert lesson.tokens == LEAST_KEPT_TOKENS
    assert lesson.is_kept
    assert (lesson.misses[2] < lesson.misses[0]).all()
    predictor = read_predictor(learned_path("predictor", trace.signature, CHECKPOINT))
    assert predictor.name == "combined"
    assert lesson.recall > 0.5  # a quarter by chance
    estimator = new_estimator(shape_of(trace.signature))
    estimator.restore(dict(np.load(learned_path("reuse", trace.signature, CHECKPOINT))))
    assert "network_bias" in estimator.learned()
    # The program, whose priority makes it slow beside other tests: nothing is new.
    words = ["-P", "-m", teaching.__name__, str(path), str(CHECKPOINT)]
    done = subprocess.run([warm_python(), *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not lock.exists()


def test_a_process_is_started_only_where_it_would_teach(monkeypatch):
    started: list[tuple[list[str], dict[str, Any]]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: started.append((words, how)))
    assert not start_teaching(kept(1000), CHECKPOINT)
    assert not started
    trace = kept(2500)
    assert start_teaching(trace, CHECKPOINT)
    ((words, how),) = started
    assert words[-2:] == [str(recent_path(trace.signature, CHECKPOINT)), str(CHECKPOINT)]
    assert how["start_new_session"]
    assert how["stdin"] == how["stdout"] == how["stderr"] == subprocess.DEVNULL
    write_lesson(lesson_of(trace), trace.signature, CHECKPOINT)
    assert not start_teaching(trace, CHECKPOINT)
    monkeypatch.setattr("sys.executable", "")
    assert not start_teaching(kept(2500, seed=1), CHECKPOINT)


def test_auto_takes_the_taught_policy_if_what_it_saves_is_worth_its_time():
    trace = trace_of(make_routes(SHAPE, num_sequences=4, length=200))
    signature, slots = trace.signature, 4

    def chosen(expert_bytes: int = 1 << 20, **changed: Any) -> str:
        lesson = lesson_of(trace, **changed)
        choice = choose_policy(signature, trace, slots, expert_bytes, lesson)
        assert choice.policy != "reuse" or "40% fewer than lru" in choice.reason
        assert f"reuse as taught from {trace.num_tokens} tokens" in choice.reason
        return choice.policy

    assert chosen() == "reuse"
    assert chosen(policy_s=1.0) != "reuse"
    assert chosen(expert_bytes=1) != "reuse"
    assert chosen(misses=np.array([[100, 50], [90, 48], [99, 49]])) != "reuse"
    assert chosen(is_kept=False, misses=np.array([[100, 50], [60, 30], [99, 49]])) == "reuse"


def test_what_a_lesson_says_between_its_capacities():
    lesson = lesson_of(kept(100))
    for capacity, share in ((0.1, 0.6), (0.25, 0.6), (0.375, 0.7), (0.5, 0.8), (0.9, 0.8)):
        assert lesson.share_of_lru(capacity) == pytest.approx(share)


@pytest.mark.parametrize(
    "changed",
    [
        {"misses": np.zeros((2, 2), np.int64)},
        {"capacities": np.zeros(0)},
        {"policy_s": float("nan")},
        {"last_marks": np.zeros((1, 2), np.int64)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_damaged_lesson_is_none(changed):
    trace = kept(100)
    signature = trace.signature
    write_lesson(lesson_of(trace), signature, CHECKPOINT)
    assert read_lesson(signature, CHECKPOINT) is not None
    assert read_lesson(replace(signature, top_k=1), CHECKPOINT) is None
    path = learned_path("lesson", signature, CHECKPOINT)
    write_lesson(lesson_of(trace, **changed), signature, CHECKPOINT)
    for content in (path.read_bytes(), b"PK" + bytes(100), b""):
        path.write_bytes(content)
        with pytest.warns(MoERuntimeWarning, match=f"not used: {path}: "):
            assert read_lesson(signature, CHECKPOINT) is None


def test_a_lesson_of_another_model_is_named_by_a_command_once(capsys, monkeypatch):
    trace = kept(100)
    other = replace(trace.signature, vocab_size=trace.signature.vocab_size + 1)
    write_lesson(lesson_of(trace), trace.signature, CHECKPOINT)
    path = learned_path("lesson", other, CHECKPOINT)
    shutil.copy(learned_path("lesson", trace.signature, CHECKPOINT), path)
    with warnings.catch_warnings():
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        Session().begin(debug=False, as_json=False)
        for _ in range(3):
            assert read_lesson(other, CHECKPOINT) is None
    assert capsys.readouterr().err.count(str(path)) == 1
