"""`run` and `train` under `torchrun`: what one process gives, printed once; deaths named once."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launched import Launch
from torch.distributed import TCPStore
from training_runs import train, training_records, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cli.main import main
from moe_runtime.cli.processes import named_end
from moe_runtime.errors import RankFailureError

PROMPT = "The store reads"


def text_of_transformers(checkpoint: Path, num_tokens: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_one_text_and_one_line_that_names_the_dead(checkpoint, tmp_path):
    launch = Launch(["run", str(checkpoint), "-p", PROMPT, "-n", "240"], 2, tmp_path)
    try:
        launch.wait_for_text(20)
        launch.processes[1].kill()
        launch.processes[1].join()
        # As `torchrun` does once it has seen the death.
        launch.processes[0].terminate()
        launch.processes[0].join()
        assert launch.processes[0].exitcode not in (0, -signal.SIGTERM)
        assert len(launch.errors()) == 1
        assert "rank 1 of 2 has ended" in launch.errors()[0]
        assert launch.stdout(1) == ""
        # The last characters may belong to a token that was cut off.
        text = launch.stdout().strip()[:40]
        assert len(text) >= 10
        assert text_of_transformers(checkpoint, 60).startswith(text)
    finally:
        launch.close()


@pytest.mark.parametrize(
    "words",
    [
        *(["serve", "m"], ["generate", "m"], ["chat", "m"], ["inspect", "m"], ["pack", "m", "out"]),
        *(["doctor"], ["bench", "experts"]),
    ],
    ids=lambda words: words[0],
)
def test_what_works_in_one_process_is_refused_by_the_first_of_several(words, monkeypatch, capsys):
    name = words[1] if words[0] == "bench" else words[0]
    if words[0] == "generate":
        words = [*words, "--prompts", "in.jsonl", "-o", "out.jsonl"]
    for rank in (0, 1):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (1 if rank == 0 else 0)
        assert all(f"{name} works in one process; start it without torchrun" in n for n in lines)


def test_processes_that_torchrun_starts_anew_begin_with_nothing(tmp_path):
    """`--max-restarts`: its store still has what the processes before wrote into it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    path = write_run(tmp_path)
    for attempt in range(2):
        steps = ("--set", f"run.steps={attempt + 1}", *FEW_STEPS[2:])
        words = ["train", str(path), "--resume", "--reschedule", *steps]
        launch = Launch(words, 2, tmp_path, store_port=store.port, attempt=attempt)
        try:
            for process in launch.processes:
                process.join()
            assert [process.exitcode for process in launch.processes] == [0, 0], launch.errors()
        finally:
            launch.close()
    assert [record["step"] for record in training_records(tmp_path / "out")][-1] == 2


@pytest.mark.long
def test_torchrun_itself(checkpoint):
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    program = str(Path(sys.executable).with_name("moe-runtime"))
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node", "2"),
            *(program, "run", str(checkpoint), "-p", PROMPT, "-n", "20"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert done.stdout.strip() == text_of_transformers(checkpoint, 20).strip()


FEW_STEPS = ("--set", "run.steps=3", "--set", "run.evaluate_every=0", "--set", "run.threads=0")


def assert_trained_alike(found: Path, expected: Path) -> None:
    """fp32 in another order of sums, whose errors three steps cannot make much of."""
    pairs = zip(training_records(found), training_records(expected), strict=True)
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name in ("loss", "aux_loss", "gradient_norm", "held_out_mean"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name


def test_divided_heads_and_sequences_train_what_one_process_does(tmp_path):
    alone, path = write_run(tmp_path / "one"), write_run(tmp_path / "four")
    assert train(alone, *FEW_STEPS) == 0
    layout = ("--set", "parallel.tp=2", "--set", "parallel.cp=2", "--json")
    launch = Launch(["train", str(path), *FEW_STEPS, *layout], 4, tmp_path)
    try:
        for process in launch.processes:
            process.join()
        assert [process.exitcode for process in launch.processes] == [0] * 4, launch.errors()
        assert [launch.stdout(rank) for rank in (1, 2, 3)] == [""] * 3
        summary = json.loads(launch.stdout())
        assert summary["complete"]
        assert Path(summary["model"], "config.json").is_file()
        # The first process shows the progress, and it alone.
        shown = [(tmp_path / f"err-{rank}").read_text() for rank in range(4)]
        assert [("step 3/3" in text) for text in shown] == [True, False, False, False]
    finally:
        launch.close()
    assert_trained_alike(path.parent / "out", alone.parent / "out")


@pytest.mark.long
def test_every_dimension_at_once_under_torchrun_itself(tmp_path):
    """Attention TP 2 x CP 2 x PP 2, experts EP 4 x PP 2, over the same eight processes."""
    alone, path = write_run(tmp_path / "one"), write_run(tmp_path / "eight")
    assert train(alone, *FEW_STEPS) == 0
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    program = str(Path(sys.executable).with_name("moe-runtime"))
    layout = ("parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=4")
    settings = [word for setting in layout for word in ("--set", setting)]
    done = subprocess.run(
        [
            *(*torchrun, "--nproc-per-node", "8"),
            *(program, "train", str(path), *FEW_STEPS, *settings, "--json"),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert json.loads(done.stdout)["complete"]
    assert_trained_alike(path.parent / "out", alone.parent / "out")


class Launcher:
    """`torchrun` on a machine of its own, of several that come and go."""

    def __init__(self, port: int, path: Path, *settings: str) -> None:
        words = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
        words += ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
        words += ["--rdzv-conf", "last_call_timeout=3", "--local-addr", "localhost"]
        program = str(Path(sys.executable).with_name("moe-runtime"))
        options = [word for setting in settings for word in ("--set", setting)]
        self.process = subprocess.Popen(
            [*words, program, "train", str(path), "--resume", *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def worker(self) -> psutil.Process | None:
        return next(iter(psutil.Process(self.process.pid).children()), None)

    def kill(self) -> None:
        """The launcher and its worker at once, as a machine that is lost."""
        for process in (*psutil.Process(self.process.pid).children(), self.process):
            process.kill()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            self.kill()
        self.process.wait()


@pytest.mark.long
def test_launchers_go_on_after_a_killed_process_and_without_a_lost_machine(tmp_path):
    """Two launchers of one process; a process is killed, and later one launcher with its own."""
    settings = ("run.steps=60", "run.evaluate_every=0", "run.threads=0", "data.short_share=0.0")
    settings += ("run.snapshot_every=1", "run.checkpoint_every=0", "parallel.timeout_s=20")
    alone, path = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    options = [word for setting in settings for word in ("--set", setting)]
    assert train(alone, *options) == 0
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launchers = [Launcher(port, path, *settings)]
    metrics = tmp_path / "two" / "out" / "metrics.jsonl"

    def wait_for(step: int) -> None:
        deadline = time.monotonic() + 240
        while len(metrics.read_text().splitlines() if metrics.exists() else []) < step:
            assert time.monotonic() < deadline, "the processes stand still"
            assert launchers[0].process.poll() is None, "the first launcher has ended"
            time.sleep(0.05)

    try:
        # the first keeps what all of them agree by
        while socket.socket().connect_ex(("localhost", port)):
            assert launchers[0].process.poll() is None, "the first launcher has ended"
            time.sleep(0.1)
        launchers.append(Launcher(port, path, *settings))
        wait_for(5)
        while (worker := launchers[1].worker()) is None:
            time.sleep(0.05)
        worker.kill()
        wait_for(20)
        launchers[1].kill()
        assert launchers[0].process.wait(240) == 0
    finally:
        for launcher in launchers:
            launcher.close()
    assert_trained_alike(path.parent / "out", alone.parent / "out")


class OneDead:
    """Stands for a `CollectiveMonitor` of two ranks of which the second is gone."""

    size = 2

    def ended_ranks(self) -> tuple[int, ...]:
        return (1,)


@pytest.fixture
def term_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("term_as_before")
def test_a_termination_does_not_cut_off_the_line_about_the_dead():
    """A launcher may send it just after an exchange has failed, before the line is printed."""
    watch: Any = OneDead()
    with pytest.raises(RankFailureError, match="rank 1 of 2 has ended"), named_end(watch):
        raise RuntimeError("connection closed by peer")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("term_as_before")
def test_a_termination_names_the_dead():
    watch: Any = OneDead()
    with pytest.raises(RankFailureError, match="rank 1 of 2 has ended"), named_end(watch):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("term_as_before")
def test_a_block_that_ends_well_leaves_terminations_as_they_were():
    before = signal.getsignal(signal.SIGTERM)
    watch: Any = OneDead()
    with named_end(watch):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
