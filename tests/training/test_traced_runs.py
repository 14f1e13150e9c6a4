"""`run.trace`: the routing of training in the format of all traces, wherever experts live."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import CONFIG, write_run

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import Trace, read_trace
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.train_run import prepare, start

TRACED = ["--set", "run.trace=routing.npz", "--set", "run.trace_steps=2"]
# sequences of one length, and numbers that do not depend on the order of a norm's sum
PLAIN = CONFIG.replace("short_", "# short_").replace("peak_rate", "clip_norm = 0.0\npeak_rate")
PLAIN = PLAIN.replace("steps = 8", "steps = 3").replace("evaluate_every = 4", "")


def traced(folder: Path, *options: str, config: str = PLAIN) -> Trace:
    """A run of three steps of two micro-batches, two of which are recorded."""
    assert main(["train", str(write_run(folder, config=config)), *TRACED, *options]) == 0
    return read_trace(folder / "routing.npz")


def assert_same(found: Trace, expected: Trace) -> None:
    for name in Trace.__dataclass_fields__:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_the_same_trace_wherever_experts_live(tmp_path):
    """In memory; on the disk, micro-batches side by side; and with blocks that are recomputed."""
    in_memory = traced(tmp_path / "memory", "--set", "run.recompute=true")
    assert in_memory.step_update is not None
    assert in_memory.step_update.tolist() == [1, 1, 2, 2]
    assert set(in_memory.step_phase) == {2}
    assert np.diff(in_memory.step_start).tolist() == [128] * 4
    assert in_memory.token_position.tolist() == list(range(32)) * 16
    assert in_memory.token_request.tolist() == np.repeat(np.arange(16), 32).tolist()
    assert (in_memory.expert_ids < 4).all()
    assert in_memory.signature.model_type == "qwen3_moe"
    assert in_memory.expert_bytes == 3 * 32 * 16 * 4  # as the exported checkpoint has it
    budget = ["--set", "run.host_memory=64MiB"]
    assert_same(traced(tmp_path / "disk", *budget), in_memory)


def test_what_is_recorded_is_what_the_gates_chose(tmp_path):
    """Against the layers' own account of a forward pass with the first weights."""
    folder = tmp_path / "run"
    first = traced(folder).steps(0, 1)
    config = read_tree(TrainConfig, folder / "train.toml", settings=("run.output=other",))
    preparation = prepare(config, folder)
    model: LanguageModel = preparation.model
    windows = torch.from_numpy(preparation.batches.draw(8)[:4])
    assert first.token_id.tolist() == windows[:, :-1].flatten().tolist()
    model.train().losses(windows[:, :-1], windows[:, 1:])
    for layer, aux in enumerate(model.layer_aux()):
        assert np.array_equal(first.expert_ids[:, layer], aux.routing.ids_TK.numpy())
        weights = aux.routing.weights_TK.detach().numpy().astype(np.float16)
        assert np.array_equal(first.gate_weights[:, layer], weights)


@pytest.mark.parametrize("gate", ["capacity", "moepp"])
def test_choices_of_no_expert_are_not_recorded(tmp_path, gate):
    options = {
        "capacity": "top_k = 2\ncapacity_factor = 0.5",
        "moepp": 'top_k = 2\ngate = "moepp"\nzero_experts = { zero = 1, copy = 1 }',
    }
    trace = traced(tmp_path, config=PLAIN.replace("top_k = 2", options[gate]))
    absent = trace.expert_ids == trace.absent
    assert absent.any()
    assert not absent.all()
    assert (trace.gate_weights[absent] == 0).all()


def test_a_run_that_goes_on_has_a_trace_of_its_own(tmp_path, monkeypatch):
    """Ctrl-C after two steps writes what there is; the rest goes to another file."""
    from moe_runtime.training import loop

    whole = traced(tmp_path / "whole", "--set", "run.trace_steps=0")
    config = write_run(tmp_path / "parts", config=PLAIN)
    taken = loop.Trainer._take_step

    def interrupted(trainer: loop.Trainer) -> loop.StepRecord:
        record = taken(trainer)
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
        return record

    command = ["train", str(config), "--set", "run.trace=routing.npz", "--set", "run.trace_steps=0"]
    ended = []

    @contextlib.contextmanager
    def joined(session: Any) -> Iterator[None]:
        yield
        ended.append(session)

    monkeypatch.setattr("moe_runtime.cli.commands.train.joined_processes", joined)
    monkeypatch.setattr(loop.Trainer, "_take_step", interrupted)
    assert main(command) == 130
    assert ended  # the exit code is no error of the group of processes
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    before = read_trace(tmp_path / "parts" / "routing.npz")
    after = read_trace(tmp_path / "parts" / "routing-from-2.npz")
    assert_same(before, whole.steps(0, 4))
    assert np.array_equal(after.expert_ids, whole.steps(4, 6).expert_ids)
    assert after.step_update is not None
    assert after.step_update.tolist() == [3, 3]


def test_the_report_says_how_tiers_follow_the_use(tmp_path, capsys, monkeypatch):
    """Without its drawings, which tests of reports look at."""
    monkeypatch.setattr("moe_runtime.lab.report.page.to_svg", lambda *_: "")
    traced(tmp_path)
    page = tmp_path / "page.html"
    command = ["report", str(tmp_path / "routing.npz"), "--predictor", "none", "--capacity", "50%"]
    assert main([*command, "-o", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sections"][0] == "tiers"
    text = page.read_text()
    assert "a step of 2 micro-batches" in text
    assert "exchanged by use" in text
    replay = ["replay", str(tmp_path / "routing.npz"), "--capacity", "50%", "--json"]
    assert main(replay) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.trace=absent/routing.npz"], "there is no folder"),
        (["run.trace=routing.npz", "run.compile=true"], "leave one of them out"),
        (["run.trace=routing.npz", "run.trace_steps=-1"], "at least 0"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, settings, message):
    options = [option for setting in settings for option in ("--set", setting)]
    assert main(["train", str(write_run(tmp_path)), *options]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert message in line


def test_nothing_is_held_once_the_trace_is_written(tmp_path):
    config = write_run(tmp_path, config=PLAIN)
    settings = ("run.trace=routing.npz", "run.trace_steps=1")
    preparation = prepare(read_tree(TrainConfig, config, settings=settings), tmp_path)
    trainer = start(preparation, resume=False)
    trainer.train(should_stop=lambda: trainer.step == 1, on_record=lambda record: None)
    assert read_trace(tmp_path / "routing.npz").num_steps == 2
    assert not any(layer.experts._forward_pre_hooks for layer in preparation.model.routed_layers())
    trainer.close()
