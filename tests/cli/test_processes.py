"""`run` and `train` under `torchrun`: what one process gives, printed once; deaths named once."""

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
from finetuning_runs import MIXTRAL, checkpoint_of, write_text
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


@pytest.mark.parametrize("more", [(), ("--steps", "0")], ids=["trained", "refused"])
def test_adapters_by_two_processes_are_told_of_once(more, tmp_path):
    model, text = checkpoint_of(MIXTRAL, tmp_path / "model"), write_text(tmp_path)
    words = ["finetune", str(model), str(text), "-o", str(tmp_path / "out"), "--lora", "2"]
    words += ["--context", "16", "--sequences", "2", "--micro-batches", "2", "--steps", "1", *more]
    launch = Launch(words, 2, tmp_path)
    try:
        for process in launch.processes:
            process.join()
        expected = 2 if more else 0
        assert [process.exitcode for process in launch.processes] == [expected] * 2, launch.errors()
        assert launch.stdout(1) == ""
        shown = [(tmp_path / f"err-{rank}").read_text() for rank in range(2)]
        assert ["what was trained" in text for text in shown] == [not more, False]
    finally:
        launch.close()


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


def launchers(path: Path, nodes: str, *more: str) -> list[subprocess.Popen[str]]:
    """Two launchers of a process each, as on two machines; the first keeps what they share."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    program = str(Path(sys.executable).with_name("moe-runtime"))
    soon = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        subprocess.Popen(
            [
                *(*torchrun, "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
                *("--rdzv-conf", f"is_host={number == 0},{soon}"),
                *(program, "train", str(path), "--resume", *FEW_STEPS, *more),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in range(2)
    ]  # fmt: skip


@pytest.mark.long
def test_two_launchers_train_what_one_process_does(tmp_path):
    alone, path = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    assert train(alone, *FEW_STEPS) == 0
    both = launchers(path, "2")
    said = [one.communicate()[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert_trained_alike(path.parent / "out", alone.parent / "out")


@pytest.mark.long
def test_a_run_goes_on_without_a_launcher_that_is_lost(tmp_path):
    """With all of its processes, as a machine; from the last checkpoint."""
    path, steps = write_run(tmp_path), 60
    first, second = launchers(
        path, "1:2", "--set", f"run.steps={steps}", "--set", "run.checkpoint_every=1"
    )
    metrics = tmp_path / "out" / "metrics.jsonl"
    while first.poll() is None and not (metrics.exists() and len(metrics.open().readlines()) > 3):
        time.sleep(0.05)
    for process in (*psutil.Process(second.pid).children(recursive=True), second):
        process.kill()
    second.communicate()
    said, _ = first.communicate()
    assert first.returncode == 0, said
    taken = [one["step"] for one in training_records(tmp_path / "out") if "loss" in one]
    assert taken == [*range(1, steps + 1)]


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
