"""Killed, interrupted and extended runs."""

import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from training_runs import CONFIG, error_of, states_equal, train, training_records, write_run
from warm_python import warm_python

from moe_runtime.training import prepared
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig
from moe_runtime.training.train_run import prepare, start

# More steps than any machine takes before it is told to stop.
ENDLESS = ("run.steps=1000000", "run.checkpoint_every=2")
# Gates that use randomness and state between steps, so that a resumed run must restore both.
NOISY = CONFIG.replace(
    "loss_weights = { load_balance = 0.01, z = 1e-3 }", 'gate = "noisy_topk"\ncapacity_factor = 1.0'
)


def start_process(path: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [warm_python(), "-P", "-m", "moe_runtime.cli.main", "train", str(path), *words]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)


def wait_for_step(output: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Waits until the process has recorded a step, however long that takes."""
    while not (output / "metrics.jsonl").is_file() or not any(
        record["step"] >= step for record in training_records(output)
    ):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def train_until(path: Path, step: int, *, resume: bool) -> None:
    """Trains in this process, and stops after a step as Ctrl-C does."""
    preparation = prepare(read_tree(TrainConfig, path, settings=ENDLESS), path.parent)
    trainer = start(preparation, resume=resume)
    trainer.train(should_stop=lambda: trainer.step >= step, on_record=lambda record: None)
    trainer.close()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path):
    """After a kill between checkpoints, the last steps are repeated with the same result."""
    killed = write_run(tmp_path / "killed", config=NOISY)
    process = start_process(killed, *(word for key in ENDLESS for word in ("--set", key)))
    wait_for_step(tmp_path / "killed" / "out", 3, process)
    process.kill()
    process.communicate()
    before = training_records(tmp_path / "killed" / "out")
    # As far as the kill came on this machine, and a little further.
    end = before[-1]["step"] + 2
    whole = write_run(tmp_path / "whole", config=NOISY)
    train_until(whole, end, resume=False)
    train_until(killed, end, resume=True)
    assert training_records(tmp_path / "killed" / "out") == training_records(
        tmp_path / "whole" / "out"
    )
    last = Path("out") / "checkpoints" / f"step-{end:08}.pt"
    assert states_equal(tmp_path / "whole" / last, tmp_path / "killed" / last)
    dropped = [record.get("dropped_share", 0) for record in before]
    assert max(dropped) > 0  # the capacity of this run does drop tokens


# Runs the training command once in a child for each moment, which kills itself there: a child is
# cheaper than an interpreter, and nothing of torch's threads has begun when it is made.
KILLED = """
import os, signal, sys
import torch
from moe_runtime.cli.main import main
from moe_runtime.training.metrics import JsonLines
from moe_runtime.training.optimizer import Optimizer

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def first_step():
    Optimizer.step = die

def half_a_checkpoint():
    save = torch.save
    def partly(content, file):
        if content["step"] < 6:
            return save(content, file)
        file.write(b"half of it")
        file.flush()
        die()
    torch.save = partly

def before_the_name():
    sync = os.fsync
    seen = []
    def late(descriptor):
        sync(descriptor)
        seen.append("step-00000006" in os.readlink(f"/proc/self/fd/{descriptor}"))
        if seen[-1]:
            die()
    os.fsync = late

def half_a_record():
    write = JsonLines.write
    def partly(self, record):
        if record.step < 5:
            return write(self, record)
        self._file.write(b'{"step": 5, "lo')
        self._file.flush()
        die()
    JsonLines.write = partly

moment, words = sys.argv[1], sys.argv[2:]
for name in moment.split(","):
    child = os.fork()
    if not child:
        globals()[name]()
        main([word.replace("MOMENT", name) for word in words])
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), name
"""
MOMENTS = ("first_step", "half_a_checkpoint", "before_the_name", "half_a_record")


def test_a_kill_at_any_moment_loses_no_step_and_repeats_none(tmp_path):
    few = NOISY.replace("tokens_per_step = 256", "tokens_per_step = 64")
    few = few.replace("steps = 8", "steps = 6")
    whole = write_run(tmp_path / "whole", config=few)
    assert train(whole) == 0
    expected = training_records(whole.parent / "out")
    for moment in MOMENTS:
        write_run(tmp_path / moment, config=few)
    words = ["train", str(tmp_path / "MOMENT" / "train.toml")]
    killed = subprocess.run(
        [warm_python(), "-P", "-c", KILLED, ",".join(MOMENTS), *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == 0, killed.stderr
    for moment, last in zip(MOMENTS, (0, 3, 3, 3), strict=True):
        out = tmp_path / moment / "out"
        left = [path.name for path in (out / "checkpoints").glob("*.pt")]
        assert left == ([f"step-{last:08}.pt"] if last else []), moment
        assert train(tmp_path / moment / "train.toml", "--resume") == 0
        assert training_records(out) == expected, moment
        final = Path("checkpoints") / "step-00000006.pt"
        assert states_equal(out / final, whole.parent / "out" / final), moment


def test_a_run_that_began_with_another_course_of_the_rate_is_refused(tmp_path, capsys, monkeypatch):
    path = write_run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "COURSE", "a straight line")
        assert train(path, "--set", "run.steps=3") == 0
    more = ("--resume", "--set", "run.steps=3")
    line = error_of(capsys, path, *more)
    assert "optimizer.course = 'a straight line'" in line
    assert "add --reschedule" in line
    assert train(path, *more, "--reschedule") == 0


def test_a_new_schedule_holds_for_the_steps_to_come(tmp_path, capsys):
    path = write_run(tmp_path)
    assert train(path, "--set", "run.steps=3") == 0
    before = training_records(tmp_path / "out")
    steps = ("--set", "run.steps=6", "--set", "optimizer.peak_rate=5e-3")
    line = error_of(capsys, path, "--resume", *steps)
    assert "optimizer.peak_rate = 0.01, the configuration now says 0.005" in line
    assert "add --reschedule" in line
    line = error_of(capsys, path, "--resume", "--reschedule", "--set", "run.steps=2")
    assert "has taken 3 steps already, run.steps asks for 2" in line
    line = error_of(capsys, path, "--resume", "--reschedule", "--set", "run.seed=1")
    assert "run.seed = 0" in line
    assert "--reschedule" not in line
    assert "give --resume too" in error_of(capsys, path, "--reschedule")
    assert training_records(tmp_path / "out") == before
    assert train(path, "--resume", "--reschedule", *steps) == 0
    taken = [record for record in training_records(tmp_path / "out") if "loss" in record]
    assert [record["step"] for record in taken] == [1, 2, 3, 4, 5, 6]
    # Half a cosine over the four steps after the warm-up, to a tenth of the peak behind the last.
    cosine = [0.5 * (1 + math.cos(math.pi * part / 4)) for part in (1, 2, 3)]
    expected = [5e-3 * (0.1 + 0.9 * share) for share in cosine]
    assert [record["rate"] for record in taken[3:]] == pytest.approx(expected)
    # Once changed, the new settings are the run's.
    assert train(path, "--resume", *steps) == 0


def test_an_interrupt_finishes_the_step_and_saves(tmp_path):
    path = write_run(tmp_path)
    process = start_process(path, "--set", ENDLESS[0], "--set", "run.checkpoint_every=0")
    wait_for_step(tmp_path / "out", 2, process)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate()
    assert process.returncode == 130, shown
    assert "stopping after this step" in shown
    assert "--resume" in shown
    last = training_records(tmp_path / "out")[-1]["step"]
    assert [file.name for file in (tmp_path / "out" / "checkpoints").iterdir()] == [
        f"step-{last:08}.pt"
    ]
    assert not (tmp_path / "out" / "model").exists()


# One rate and one length throughout, so that a longer run begins as a shorter one.
STEADY = CONFIG.replace("warmup_steps = 2", "final_share = 1.0").replace(
    "short_share = 0.5", "short_share = 0.0"
)


def test_a_run_that_is_extended_is_the_longer_run(tmp_path):
    whole = write_run(tmp_path / "whole", config=STEADY)
    assert train(whole) == 0
    parts = write_run(tmp_path / "parts", config=STEADY)
    assert train(parts, "--set", "run.steps=5") == 0
    assert train(parts, "--resume", "--reschedule") == 0
    one, other = (
        [record for record in training_records(path.parent / "out") if "loss" in record]
        for path in (whole, parts)
    )
    assert one == other
    last = Path("out") / "checkpoints" / "step-00000008.pt"
    assert states_equal(tmp_path / "whole" / last, tmp_path / "parts" / last)
