"""A process begins with the learned state of policies and predictors of earlier ones."""

import subprocess
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from warm_python import warm_python

import moe_runtime
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.learning import WRITE_EVERY_S, KeptLearning
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.learned import learned_path, write_predictor
from moe_runtime.lab.traces.recent import recent_path
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.prediction import EamCollection
from moe_runtime.policies.prediction.base import COLLECTED_MATRICES, shape_of

SLOTS = 30
POCKET = pocket_path()
SUMMARY = inspect_checkpoint(POCKET, max_tokens=128)
SIGNATURE = SUMMARY.signature
BUDGET = SUMMARY.smallest_budget_bytes + (SLOTS - 2) * SUMMARY.slot_bytes
POLICY_FILE = "activation-aware"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, and no warning that a test does not ask for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", MoERuntimeWarning)
        yield


def open_model(policy: str = "activation-aware", **settings: Any) -> Any:
    return moe_runtime.load(
        POCKET, device="cpu", host_memory=BUDGET, max_tokens=128, policy=policy, **settings
    )


def answer(model: Any, first_token: int = 5) -> torch.Tensor:
    prompt = torch.arange(first_token, first_token + 10)[None]
    return model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)


def begins_with(model: Any) -> np.ndarray:
    """``[number, L, E]`` matrices that a loaded model's policy would keep now."""
    (learner,) = model.moe._store._policy.watchers
    return learner.learned().get("matrices", np.zeros((0,)))


def test_a_second_process_begins_with_what_the_first_one_learned(tmp_path):
    """The matrices equal the counts of the first process's recorded routing."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The for statement\nA class has\n")
    command = ["-m", "moe_runtime.cli.main", "run", str(POCKET), "--prompts", str(prompts)]
    options = ["--policy", "activation-aware", "--max-new-tokens", "8", "--host-memory", "24MiB"]
    trace_path = tmp_path / "trace.npz"
    subprocess.run(
        [warm_python(), "-P", *command, *options, "--trace", str(trace_path)],
        check=True,
        capture_output=True,
        timeout=600,
    )
    trace = read_trace(trace_path)
    requests = np.unique(trace.token_request)
    assert len(requests) == 2
    counts = np.zeros((2, SIGNATURE.num_layers, SIGNATURE.num_experts), np.float32)
    for place, request in enumerate(requests):
        for ids_LK in trace.expert_ids[trace.token_request == request]:
            for layer, ids in enumerate(ids_LK):
                counts[place, layer, ids] += 1
    with open_model().moe as handle:
        (learner,) = handle._store._policy.watchers
        np.testing.assert_array_equal(learner.learned()["matrices"], counts)


def test_learning_accumulates_and_changes_no_bit():
    with (plain := open_model("lru")).moe:
        expected = [answer(plain, first) for first in (5, 90)]
    assert not learned_path(POLICY_FILE, SIGNATURE, POCKET).exists()
    for number, first in enumerate((5, 90)):
        model = open_model()
        with model.moe:
            assert len(begins_with(model)) == number
            assert torch.equal(answer(model, first), expected[number])
            model.moe.check()
    model = open_model()
    assert len(begins_with(model)) == 2
    model.moe.close()


def test_an_untrained_eam_predictor_warns(tmp_path):
    path = learned_path("eam", SIGNATURE, POCKET)
    for number in (1, 2):
        with pytest.warns(match="eam begins empty") if number == 1 else nullcontext():
            model = open_model("lru", prefetch="observe", predictor="eam")
        with model.moe:
            answer(model, 5 + number)
        kept = np.load(path)
        assert len(kept["matrices"]) == number
        # every token that was computed visits K experts of every layer
        assert (kept["matrices"].sum(axis=(1, 2)) == 15 * SIGNATURE.num_layers * 2).all()
    # a trained predictor's file is its beginning
    estimator = EamCollection(shape_of(SIGNATURE))
    write_predictor(tmp_path / "trained.npz", estimator, SIGNATURE)
    before = path.read_bytes()
    model = open_model("lru", prefetch="observe", predictor=str(tmp_path / "trained.npz"))
    with model.moe:
        answer(model)
        assert len(model.moe.prefetcher._predictor.estimator.collection) == 0
    assert path.read_bytes() == before


def test_a_second_process_starts_with_the_result_of_the_last_trial():
    with (model := open_model("lru", prefetch="auto")).moe as handle:
        assert not handle.prefetcher.is_active
        handle.prefetcher.controller.restore({"has_won": np.ones(1, np.uint8)})
        answer(model)
    with open_model("lru", prefetch="auto").moe as handle:
        assert handle.prefetcher.is_active
        assert handle.prefetcher.describe().startswith("auto, on, as in an earlier run")
    with open_model("lru", prefetch="observe").moe as handle:
        assert not handle.prefetcher.is_active


def test_an_interrupted_run_keeps_what_it_learned():
    def interrupt(model: Any) -> None:
        with model.moe:
            answer(model)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt(open_model())
    assert learned_path(POLICY_FILE, SIGNATURE, POCKET).exists()


def test_a_model_that_fails_in_its_first_step_keeps_nothing(monkeypatch):
    model = open_model()
    last = model.model.layers[-1].mlp.experts

    def fail(*_: Any) -> None:
        raise RuntimeError("in the first step")

    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="first step"), model.moe:
        answer(model)
    handle.remove()
    assert not learned_path(POLICY_FILE, SIGNATURE, POCKET).exists()


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def damage(path: Path, how: str) -> None:
    arrays = arrays_of(path)
    header = arrays["header"].tobytes()
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:200])
        return
    if how == "another version":
        header = header.replace(b'"version": 1', b'"version": 9')
    elif how == "another model":
        header = header.replace(b'"top_k": 2', b'"top_k": 3')
    elif how == "too many":
        arrays["matrices"] = np.repeat(arrays["matrices"], COLLECTED_MATRICES + 1, axis=0)
    elif how == "too large":
        arrays["matrices"] = np.repeat(arrays["matrices"], 100 * COLLECTED_MATRICES, axis=0)
    arrays["header"] = np.frombuffer(header, np.uint8)
    np.savez(path, allow_pickle=False, **arrays)


def test_a_damaged_learned_file_is_reported_and_replaced():
    with (model := open_model()).moe:
        expected = answer(model)
    path = learned_path(POLICY_FILE, SIGNATURE, POCKET)
    whole = arrays_of(path)
    for how, said in {
        "truncated": "not an .npz file",
        "another version": "version 9 is not known",
        "another model": "expected 'activation-aware' and",
        "too many": "at most 120 matrices of counts",
        "too large": "when unpacked, expected at most",
    }.items():
        damage(path, how)
        with pytest.warns(MoERuntimeWarning, match=said) as caught:
            model = open_model()
        assert len(caught) == 1, how
        assert "\n" not in str(caught[0].message)
        with model.moe:
            assert torch.equal(answer(model), expected)
        np.testing.assert_array_equal(arrays_of(path)["matrices"], whole["matrices"])


def test_a_cache_that_cannot_be_written_fails_no_run(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with (model := open_model()).moe:
        answer(model)


def test_only_one_process_of_a_group_writes():
    with (model := open_model()).moe:
        answer(model)
        (learner,) = model.moe._store._policy.watchers
        other = KeptLearning(SIGNATURE, POCKET, "next-gate", writes=False)
        model._steps.listeners.add(other)
        other.keep(learner)
        answer(model)
        other.close()
        assert not learned_path(POLICY_FILE, SIGNATURE, POCKET).exists()
    assert learned_path(POLICY_FILE, SIGNATURE, POCKET).exists()


@pytest.mark.parametrize("name", [POLICY_FILE, "eam"])
def test_learning_is_written_between_requests(name):
    """As after SIGKILL, nothing is closed; requests that run go on."""
    now_s = 0.0
    path = learned_path(name, SIGNATURE, POCKET)
    eam = {"policy": "lru", "prefetch": "observe", "predictor": "eam"}
    with pytest.warns(match="eam begins empty") if name == "eam" else nullcontext():
        model = open_model(**eam if name == "eam" else {})
    with model.moe:
        learning = model.moe._learning
        learning._clock, learning._written_s = lambda: now_s, 0.0
        answer(model)
        answer(model)
        assert not path.exists()  # too early
        now_s = WRITE_EVERY_S
        answer(model)
        whole = arrays_of(path)["matrices"]
        assert len(whole) == 2  # the third one runs
        answer(model)
        assert len(arrays_of(path)["matrices"]) == 2  # too early again
    kept = arrays_of(path)["matrices"]
    np.testing.assert_array_equal(kept[:2], whole)
    assert (kept.sum(axis=(1, 2)) == 15 * SIGNATURE.num_layers * 2).all()
    assert len(kept) == 4


def test_checkpoints_of_one_shape_have_files_of_their_own(tmp_path):
    paths = []
    for name, weights in (("base", b"1234"), ("tuned", b"1235"), ("copy", b"1234")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(1 << 20) + weights)
        paths.append(learned_path(POLICY_FILE, SIGNATURE, folder))
    assert paths[0] == paths[2] != paths[1]
    paths = [recent_path(SIGNATURE, tmp_path / name) for name in ("base", "tuned")]
    assert paths[0] != paths[1]
