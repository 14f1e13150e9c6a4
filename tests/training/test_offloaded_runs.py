"""`moe-runtime train` with a budget: the same run with its experts on the disk."""

import dataclasses
import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training_runs import CONFIG, error_of, train, write_run

from moe_runtime.cli.disk import DiskSpeed
from moe_runtime.cli.main import main
from moe_runtime.training import loop
from moe_runtime.training.checkpoint import TrainingState, load_checkpoint, save_checkpoint

TIMES = ("step_s", "stall_s", "memory_bytes", "read_bytes", "written_bytes")


def records(folder: Path) -> list[dict[str, object]]:
    """What was measured, but for the time it took.

    The norm is summed over experts instead of stacks of them: its last bits may differ.
    """
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in TIMES}
        | {"gradient_norm": None}
        for line in lines
    ]


BUDGETS: dict[str, str] = {}
"""By configuration."""


def smallest_budget(config: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The smallest budget, which a refused run names."""
    text = re.sub(r"\nsteps = \d+", "", config.read_text())
    if text not in BUDGETS:
        assert main(["train", str(config), "--set", "run.host_memory=1MiB"]) == 2
        found = re.search(r"\((\d+) bytes\)", capsys.readouterr().err.replace("\n", " "))
        assert found is not None
        BUDGETS[text] = found[1]
    return ["--set", f"run.host_memory={BUDGETS[text]}B"]


SHORTCUTS = {
    "num_layers": "intermediate_size = 24\nnum_layers",
    "top_k = 2": 'top_k = 2\nshared_experts = 1\nshortcut = "middle"',
}
"""ScMoE: routed early, computed late."""


@pytest.mark.parametrize("changes", [{}, SHORTCUTS], ids=["plain", "shortcut"])
def test_same_run_as_in_memory(tmp_path, capsys, changes):
    """Losses and exported weights, to the bit, with all experts on the disk."""
    config = CONFIG.replace("[optimizer]", "[optimizer]\nclip_norm = 0.0")
    config = config.replace("steps = 8", "steps = 4")
    for old, new in changes.items():
        config = config.replace(old, new)
    plain = write_run(tmp_path / "plain", config=config)
    budgeted = write_run(tmp_path / "budgeted", config=config)
    assert main(["train", str(plain)]) == 0
    assert main(["train", str(budgeted), *smallest_budget(budgeted, capsys)]) == 0
    assert records(tmp_path / "plain") == records(tmp_path / "budgeted")
    outs = [tmp_path / name / "out" for name in ("plain", "budgeted")]
    in_memory, summary = (json.loads((out / "summary.json").read_text()) for out in outs)
    assert summary["offload"]["experts_in_memory"] == 0
    assert summary["offload"]["read_bytes"] > 0
    assert summary["parameters"] == in_memory["parameters"]
    if not changes:  # no architecture of transformers has shortcuts
        wanted, found = (load_file(out / "model" / "model.safetensors") for out in outs)
        assert wanted.keys() == found.keys()
        assert all(bool((wanted[name] == found[name]).all()) for name in wanted)


def test_goes_on_under_another_budget(tmp_path, capsys):
    """A run of a constant rate that is stopped at step 2, and one that is not."""
    config = CONFIG.replace("warmup_steps = 2", "final_share = 1.0").replace("short_", "# short_")
    config = config.replace("steps = 8", "steps = 4")
    whole = write_run(tmp_path / "whole", config=config)
    parts = write_run(tmp_path / "parts", config=config)
    small = smallest_budget(whole, capsys)
    assert main(["train", str(whole), *small]) == 0
    assert main(["train", str(parts), *small, "--set", "run.steps=2"]) == 0
    again = ["--resume", "--reschedule", "--set", "run.host_memory=1GiB"]
    assert main(["train", str(parts), *again]) == 0
    steps = [[r for r in records(tmp_path / n) if "loss" in r] for n in ("whole", "parts")]
    assert steps[0] == steps[1]
    assert list((tmp_path / "parts" / "out" / "checkpoints").iterdir())


def shorter(tensors: Mapping[Any, Any], name: Any, rows: int) -> dict[Any, Any]:
    return {**tensors, name: tensors[name][:rows].clone()}


def without_name(state: TrainingState) -> TrainingState:
    model = dict(state.model)
    del model["norm.weight"]
    return dataclasses.replace(state, model=model)


def narrow(state: TrainingState) -> TrainingState:
    return dataclasses.replace(state, model=shorter(state.model, "norm.weight", 1))


def without_expert(state: TrainingState) -> TrainingState:
    name = "blocks.1.feed_forward.experts.down_proj"
    return dataclasses.replace(state, model=shorter(state.model, name, 3))


def with_moment(state: TrainingState, number: int, moments: Any) -> TrainingState:
    named = {**state.optimizer["state"], number: moments}
    if moments is None:
        del named[number]
    return dataclasses.replace(state, optimizer={**state.optimizer, "state": named})


def one_element(state: TrainingState) -> TrainingState:
    return with_moment(state, 0, shorter(state.optimizer["state"][0], "exp_avg", 1))


def without_moment(state: TrainingState) -> TrainingState:
    return with_moment(state, 3, None)


UNFIT = {
    without_name: "lacks norm.weight",
    narrow: "norm.weight is (1, torch.float32), expected (32, torch.float32)",
    without_expert: "experts.down_proj is (3, 32, 16, torch.float32)",
    one_element: "exp_avg is (1, 32, torch.float32)",
    without_moment: "does not have the moments of",
}


def test_what_a_checkpoint_in_memory_lacks_is_refused_off_memory(tmp_path, capsys):
    """Nothing stored is broadcast or left out; and the other form's files go with its last
    checkpoint."""
    path, out = write_run(tmp_path), tmp_path / "out"
    again = ("--resume", "--reschedule", "--set")
    assert train(path, "--set", "run.steps=1", "--set", "run.host_memory=1GiB") == 0
    assert train(path, *again, "run.steps=2") == 0
    assert [*(out / "experts").glob("*.records")], "the checkpoint of step 1 names them"
    assert train(path, *again, "run.steps=3") == 0
    assert not (out / "experts").exists()
    last = out / "checkpoints" / "step-00000003.pt"
    whole = load_checkpoint(last)
    for change, words in UNFIT.items():
        save_checkpoint(last.parent, change(whole), keep=1)
        capsys.readouterr()
        line = error_of(capsys, path, *again, "run.steps=4", "--set", "run.host_memory=1GiB")
        assert words in line


SLOW = DiskSpeed(
    path=Path(), read_bytes=1, in_flight=1, direct_bytes_per_s=10.0, buffered_bytes_per_s=1.0
)


def test_a_run_warns_of_a_slow_disk(tmp_path, capsys, monkeypatch):
    """With the predicted time, before the first step; no warning if little moves."""
    monkeypatch.setattr("moe_runtime.cli.commands.train.measure_disk", lambda *_, **__: SLOW)
    config = write_run(tmp_path, config=CONFIG.replace("steps = 8", "steps = 1"))
    small = smallest_budget(config, capsys)
    for least, budget, warns in ((0, small, True), (2**30, small, False), (0, [], False)):
        monkeypatch.setattr("moe_runtime.cli.commands.train.WORTH_MEASURING_BYTES", least)
        out = ["--set", f"run.output=out-{least}-{warns}"]
        assert main(["train", str(config), *budget, *out]) == 0
        shown = capsys.readouterr().err
        assert ("10 B/s, so a step will take about" in shown) == warns
        assert shown.index("step 1/1") > shown.find("a step will take about")


def test_a_dry_run_warns_of_a_slow_disk(tmp_path, capsys, monkeypatch):
    """The time is that of the bytes at the measured speed, where computation takes less."""
    monkeypatch.setattr("moe_runtime.cli.commands.train.measure_disk", lambda *_, **__: SLOW)
    config = write_run(tmp_path)
    assert (
        main(["train", str(config), *smallest_budget(config, capsys), "--dry-run", "--json"]) == 0
    )
    shown = capsys.readouterr()
    plan = json.loads(shown.out)["offload"]
    moved = plan["read_bytes_per_step"] + plan["written_bytes_per_step"]
    assert plan["step_s"] == plan["disk_s"] == moved / 10
    assert "10 B/s, so a step will take about" in shown.err
    assert main(["train", str(config), "--set", "run.host_memory=1GiB", "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    assert "disk_s" not in json.loads(shown.out)["offload"]
    assert "warning" not in shown.err


def test_a_dry_run_says_what_will_move(tmp_path, capsys):
    """The plan's bytes are an upper bound, nearly reached if all experts get tokens."""
    config = write_run(tmp_path, config=CONFIG.replace("steps = 8", "steps = 3"))
    small = smallest_budget(config, capsys)
    assert main(["train", str(config), *small, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["offload"]
    assert plan["experts"] == 8
    assert plan["experts_in_memory"] == 0
    assert not list((tmp_path / "out" / "experts").glob("*"))
    assert main(["train", str(config), *small, "--json"]) == 0
    moved = json.loads(capsys.readouterr().out)["offload"]
    # the first versions, and evaluation, move something too
    assert moved["written_bytes"] <= 3 * plan["written_bytes_per_step"] + plan["disk_bytes"]
    assert moved["written_bytes"] >= 2 * plan["written_bytes_per_step"]


SHORT = CONFIG.replace("steps = 8", "steps = 3").replace("evaluate_every = 4", "")
SHORT = SHORT.replace("checkpoint_every = 3", "checkpoint_every = 1")
SHORT = SHORT.replace("[optimizer]", "[optimizer]\nclip_norm = 0.0")


def test_a_full_disk_ends_the_run_with_one_line(tmp_path, capsys, monkeypatch):
    """In the third step; the checkpoint of the second is intact, and --resume continues from it."""
    whole, parts = (write_run(tmp_path / name, config=SHORT) for name in ("whole", "parts"))
    assert main(["train", str(whole)]) == 0
    small = smallest_budget(parts, capsys)
    taken, plain = loop.Trainer._take_step, os.pwritev

    def fails(*place: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def step(trainer: loop.Trainer) -> loop.StepRecord:
        monkeypatch.setattr(os, "pwritev", fails if trainer.step == 2 else plain)
        return taken(trainer)

    monkeypatch.setattr(loop.Trainer, "_take_step", step)
    capsys.readouterr()
    assert main(["train", str(parts), *small]) == 2
    monkeypatch.undo()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "no room on the disk" in line
    assert main(["train", str(parts), *small, "--resume"]) == 0
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["run.host_memory=1MiB"], "the smallest that works is"),
        (["run.host_memory=lots"], "expected a size"),
        (["run.host_memory=1GiB", "run.storage_dir=absent"], "is not a directory"),
        (["run.storage_dir=absent"], "host_memory"),
        (["run.host_memory=1GiB", "run.compile=true"], "cannot be combined"),
        (["run.host_memory=1GiB", "run.device_memory=1GiB"], "on the CPU"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, settings, message):
    config = write_run(tmp_path)
    options = [option for setting in settings for option in ("--set", setting)]
    assert main(["train", str(config), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_compressed_states_of_a_run(tmp_path, capsys):
    """The plan has fewer bytes, the run says so and trains; an unknown format names the nearest."""
    config = write_run(tmp_path, config=CONFIG.replace("steps = 8", "steps = 2"))
    small = [*smallest_budget(config, capsys), "--json"]
    plans = []
    for moments in ("full", "fp8"):
        chosen = ["--set", f"run.offload.moments={moments}"]
        assert main(["train", str(config), *small, *chosen, "--dry-run"]) == 0
        plans.append(json.loads(capsys.readouterr().out)["offload"])
    # of twelve blocks in two-phase clipping, each moment is one block less where it is read
    assert plans[1]["read_bytes_per_step"] == plans[0]["read_bytes_per_step"] * 10 // 12
    assert main(["train", str(config), *small, "--set", "run.offload.moments=fp8"]) == 0
    assert json.loads(capsys.readouterr().out)["offload"]["written_bytes"] > 0
    assert main(["train", str(config), "--set", "run.offload.moments=fp16"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_activations_of_a_run(tmp_path, capsys):
    """The plan needs less memory where experts keep nothing; whole blocks cannot be both."""
    config = write_run(tmp_path)
    sizes = {}
    for kind in ("keep", "recompute"):
        chosen = ["--set", f"run.offload.activations={kind}", "--set", "run.host_memory=1GiB"]
        assert main(["train", str(config), *chosen, "--dry-run", "--json"]) == 0
        sizes[kind] = json.loads(capsys.readouterr().out)["offload"]["activation_bytes"]
    assert sizes["recompute"] < sizes["keep"]
    both = ["--set", "run.recompute=true", "--set", "run.offload.activations=swap"]
    assert main(["train", str(config), "--set", "run.host_memory=1GiB", *both]) == 2
    assert "whole blocks" in capsys.readouterr().err
