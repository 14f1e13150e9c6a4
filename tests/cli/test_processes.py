"""`run` and `train` under `torchrun`: what one process gives, printed once; deaths named once."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from finetuning_runs import MIXTRAL, checkpoint_of, write_text
from http_server import TEMPLATE
from launched import Launch, run_words
from rank_pool import start_server
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from training_runs import train, training_records, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_runtime.cli.main import main
from moe_runtime.cli.options import SeveralProcesses
from moe_runtime.cli.processes import _forwarded_signals, elastic_place, named_end
from moe_runtime.errors import RankFailureError

PROMPT = "The store reads"


def text_of_transformers(checkpoint: Path, num_tokens: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokens = model.generate(ids, max_new_tokens=num_tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_one_text_and_one_line_that_names_the_dead(checkpoint, tmp_path):
    with Launch(["run", str(checkpoint), "-p", PROMPT, "-n", "240"], 2, tmp_path) as launch:
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


@pytest.mark.parametrize(
    "words",
    [["inspect", "m"], ["pack", "m", "out"], ["doctor"], ["bench", "experts"]],
    ids=lambda words: words[0],
)
def test_what_works_in_one_process_is_refused_by_the_first_of_several(words, monkeypatch, capsys):
    name = words[1] if words[0] == "bench" else words[0]
    for rank in (0, 1):
        launched_as(rank, monkeypatch)
        assert main(words) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (1 if rank == 0 else 0)
        assert all(f"{name} works in one process; start it without torchrun" in n for n in lines)


def launched_as(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": str(rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)


SMALL = ("--host-memory", "64MiB", "--policy", "lru", "--prefetch", "off", "--json")


def asked(address: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(address + path, data, headers)
    return urllib.request.urlopen(request).read()


def started_server(checkpoint: Path, folder: Path, *words: str) -> tuple[Launch, str]:
    given = ["serve", str(checkpoint), "--port", "0", "--max-tokens", "512", *SMALL, *words]
    launch = Launch(given, 2, folder)
    launch.wait_for_text(1)
    return launch, json.loads(launch.stdout())["address"]


def test_two_processes_serve_what_one_does(checkpoint, tmp_path):
    launch, address = started_server(checkpoint, tmp_path)
    with launch:
        body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1}
        (choice,) = json.loads(asked(address, "/v1/completions", body))["choices"]
        assert choice["text"] == text_of_transformers(checkpoint, 12)
        assert len(choice["logprobs"]["token_logprobs"]) == 12
        drawn = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.5, "seed": 3}
        drawn_twice = [json.loads(asked(address, "/v1/completions", drawn)) for _ in range(2)]
        assert len({one["choices"][0]["text"] for one in drawn_twice}) == 1
        schema = {"name": "one", "schema": {"enum": ["ab", "ba"]}}
        asked_for = {"type": "json_schema", "json_schema": schema}
        grammar = {"prompt": PROMPT, "max_tokens": 9, "response_format": asked_for}
        (choice,) = json.loads(asked(address, "/v1/completions", grammar))["choices"]
        assert json.loads(choice["text"]) in ("ab", "ba")
        assert choice["finish_reason"] == "stop"
        lines = asked(address, "/metrics").decode().splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines)
        label = f'{{engine="0",model_name="{checkpoint.name}"}}'
        assert float(found[f"moe:expert_slots{label}"]) == 24
        assert 12 < float(found[f"moe:expert_misses_total{label}"]) <= 24
        with pytest.raises(urllib.error.HTTPError, match="400"):
            asked(address, "/models/unload", {"model": checkpoint.name})
        os.kill(launch.processes[0].pid or 0, signal.SIGTERM)
        assert launch.ended() == [143, 0]
        assert launch.stdout(1) == ""
        assert not launch.errors()


@pytest.mark.long  # tests/parallel/test_serving.py kills the ranks of an engine
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_names_the_process_that_died_to_its_clients(victim, checkpoint, tmp_path):
    launch, address = started_server(checkpoint, tmp_path)
    with launch:
        body = {"prompt": PROMPT, "max_tokens": 240, "stream": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{address}/v1/completions", json.dumps(body).encode(), headers
        )
        cut = contextlib.suppress(OSError, http.client.HTTPException)
        with cut, urllib.request.urlopen(request) as response:
            assert response.readline().startswith(b"data: {")
            launch.processes[victim].kill()
            rest = response.read()
            assert victim == 0 or b"rank 1 of 2 has ended" in rest
        codes = launch.ended()
        assert codes[victim] == -signal.SIGKILL
        assert codes[1 - victim] == 2
        (line,) = launch.errors()
        assert f"rank {victim}" in line
        assert "has ended" in line


@pytest.mark.long
def test_a_batch_goes_on_where_a_dead_process_has_ended_it(checkpoint, tmp_path):
    output = tmp_path / "out.jsonl"
    lines = [{"prompt": PROMPT, "max_tokens": 10 + 30 * number} for number in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ["generate", str(checkpoint), "--prompts", "-", "-o", str(output), *SMALL]
    typed = (tmp_path / "in.jsonl").read_text()
    # The longest begin: the first ends after 130 steps, all after 250 or more.
    words_of_two = [*words, "--max-running", "2"]
    with Launch(words_of_two, 2, tmp_path, typed=typed, dies_after=(190, output)) as launch:
        assert launch.ended() == [2, -signal.SIGKILL]
        assert "rank 1 of 2 has ended" in launch.errors()[0]
        begun = [json.loads(line) for line in output.read_text().splitlines()]
        assert 0 < len(begun) < 6
        assert not any("error" in one for one in begun)
    with Launch(words, 2, tmp_path, typed=typed) as launch:
        assert launch.ended() == [0, 0], launch.errors()
        counts = json.loads(launch.stdout())
        assert counts["kept"] == len(begun)
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert [one["new_tokens"] for one in found] == [line["max_tokens"] for line in lines]
        whole = text_of_transformers(checkpoint, 160)
        assert all(whole.startswith(one["text"]) for one in found)


@pytest.mark.long
def test_two_processes_chat_as_one(checkpoint, tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    said = ["What is a list?", "And a tuple?"]
    folder = tmp_path / "two"
    folder.mkdir()
    words = ["chat", str(model), "-n", "12", *SMALL[:-1]]
    with Launch(
        words, 2, folder, typed="".join(f"{line}\n" for line in (*said, "/stats"))
    ) as launch:
        assert launch.ended() == [0, 0], launch.errors()
        first, second = launch.stdout().strip("\n").split("\n", 1)
        assert main(["run", str(model), "--chat", "-p", said[0], "-n", "12", *SMALL]) == 0
        assert json.loads(capsys.readouterr().out)["text"].strip("\n") == first
        assert second
        assert "24 experts of" in (folder / "err-0").read_text()
    with Launch(words, 2, folder, typed="/model other\n") as launch:
        assert launch.ended() == [2, 0]
        assert "/model: several processes keep their model" in launch.errors()[0]


def test_what_one_process_serves_alone_is_refused(monkeypatch, capsys):
    launched_as(0, monkeypatch)
    for words, complaint in (
        (["m", "--prefix-disk", "1GiB"], "--prefix-disk is for one process: leave it out"),
        (["m", "--adapter", "a=b"], "--adapter is for one process: leave it out"),
        (["m", "n"], "several processes serve one model, got 2"),
        (["m", "--processes", "3"], "--processes asks for 3 processes, torchrun started 2"),
        (["m", "--processes", "2", "--draft", "lookup"], "--draft lookup is for one process"),
        (["m", "--gpus", "0,1", "--device", "cpu"], "--device cpu: --gpus names the devices"),
    ):
        assert main(["serve", *words]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["run", "m", "-p", "x", "--processes", "2", "--gpus", "0,1"]) == 2
    assert "--gpus starts a process for each GPU" in capsys.readouterr().err


@pytest.mark.long
def test_torchrun_with_one_process_lacks_nothing(checkpoint, tmp_path):
    words = ["serve", str(checkpoint), "--dry-run", "--prefix-disk", "1MiB", *SMALL]
    with Launch([*words, "--port", "0"], 1, tmp_path) as launch:
        assert launch.ended() == [0], launch.errors()


@pytest.mark.parametrize("name", ["run", "serve", "generate", "chat"])
def test_a_placement_map_is_read_by_one_process_too(name, checkpoint, tmp_path, capsys):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(checkpoint, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    text.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 1}))
    more = {
        "run": ("-p", PROMPT),
        "serve": ("--dry-run", "--port", "0"),
        "generate": ("--prompts", str(text), "-o", str(tmp_path / "out.jsonl")),
    }
    missing = str(tmp_path / "map.json")
    words = [name, str(model), "--placement", missing, *SMALL[:-1], *more.get(name, ())]
    assert main(words) == 2
    assert missing in capsys.readouterr().err


@contextlib.contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_signals_go_on_to_the_processes_unless_they_are_ignored(monkeypatch):
    said = "import signal; signal.signal(1, signal.SIG_DFL); print(flush=True); signal.pause()"
    with handled(signal.SIGHUP, signal.SIG_IGN), handled(signal.SIGTERM, signal.SIG_IGN):
        for ignored in (True, False):
            with contextlib.ExitStack() as stack:
                if not ignored:
                    stack.enter_context(handled(signal.SIGHUP, lambda *_: None))
                words = [sys.executable, "-c", said]
                child = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
                assert child.stdout is not None
                child.stdout.readline()
                started = SimpleNamespace(children=lambda child=child: [child])
                monkeypatch.setattr(psutil, "Process", lambda started=started: started)
                with _forwarded_signals():
                    signal.raise_signal(signal.SIGHUP)
                    signal.raise_signal(signal.SIGTERM)
                    assert (signal.getsignal(signal.SIGHUP) == signal.SIG_IGN) == ignored
                    if ignored:
                        child.kill()
                    assert child.wait() == (-signal.SIGKILL if ignored else -signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize(
    ("codes", "expected"),
    [({}, 0), ({0: 2, 1: -9}, 2), ({1: -11}, 139), ({0: 143, 1: -15}, 143), ({0: 143, 1: -9}, 2)],
)
def test_a_command_starts_its_own_processes(codes, expected, monkeypatch, capsys):
    """With torch's launcher, whose exit code is that of the first process that says one."""
    given: list[Any] = []
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def launch(config: Any, program: str) -> Any:
        def start(*words: str) -> None:
            given.extend([config, program, words])
            failures = {
                rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
                for rank, code in codes.items()
            }
            if failures:
                raise ChildFailedError("moe-runtime", failures)

        return start

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    words = ["run", "m", "-p", "x", "--processes", "2"]
    assert main(words) == expected
    assert ("rank 1 of 2 has ended" in capsys.readouterr().err) == (codes == {0: 143, 1: -9})
    config, program, started = given
    assert (config.nproc_per_node, config.max_restarts, program) == (2, 0, sys.executable)
    assert config.local_addr == "localhost"
    assert started[-len(words) :] == tuple(words)
    assert os.environ["OMP_NUM_THREADS"] == str(max(1, torch.get_num_threads() // 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert main([*words[:-2], "--gpus", "0,2"]) == expected
    assert (given[-3].nproc_per_node, os.environ["CUDA_VISIBLE_DEVICES"]) == (2, "0,2")
    for gpus, names in (("0,2", "3,GPU-5"), ("all", "3,1,GPU-5,7")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1, GPU-5,7")
        assert main([*words[:-2], "--gpus", gpus]) == expected
        assert os.environ["CUDA_VISIBLE_DEVICES"] == names


def test_processes_do_not_share_a_numbered_gpu():
    ctx: Any = SimpleNamespace(params={"device": "cuda:0"})
    with pytest.raises(ValueError, match="--processes would share this GPU"):
        SeveralProcesses(processes=2).check(ctx)


def test_gpus_that_are_not_here(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for gpus in ("all", "7,8"):
        assert main(["run", "m", "-p", "x", "--gpus", gpus]) == 2
        assert f"--gpus {gpus}: expected two different GPUs or more" in capsys.readouterr().err


@pytest.mark.long
def test_the_launcher_itself(checkpoint):
    program = [sys.executable, "-P", "-m", "moe_runtime.cli.program", "run"]
    words = [str(checkpoint), "-p", PROMPT, "-n", "20", "--processes", "2"]
    done = subprocess.run([*program, *words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == text_of_transformers(checkpoint, 20).strip()
    words = [str(checkpoint), "--port", "0", "--processes", "2", *SMALL]
    with handled(signal.SIGINT, signal.default_int_handler):
        server = subprocess.Popen(
            [*program[:-1], "serve", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    assert server.stdout is not None
    assert json.loads(server.stdout.readline())["address"]
    server.send_signal(signal.SIGINT)
    _, shown = server.communicate()
    assert server.returncode == 128 + signal.SIGINT, shown


@pytest.mark.long
def test_processes_that_torchrun_starts_anew_begin_with_nothing(tmp_path):
    """`--max-restarts`: its store still has what the processes before wrote into it."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    path = write_run(tmp_path)
    for attempt in range(2):
        steps = ("--set", f"run.steps={attempt + 1}", *FEW_STEPS[2:])
        words = ["train", str(path), "--resume", "--reschedule", *steps]
        with Launch(words, 2, tmp_path, store_port=store.port, attempt=attempt) as launch:
            assert launch.ended() == [0, 0], launch.errors()
    assert [record["step"] for record in training_records(tmp_path / "out")][-1] == 2


FEW_STEPS = ("--set", "run.steps=3", "--set", "run.evaluate_every=0", "--set", "run.threads=0")


def assert_trained_alike(found: Path, expected: Path) -> None:
    """fp32 in another order of sums, whose errors three steps cannot make much of."""
    pairs = zip(training_records(found), training_records(expected), strict=True)
    for one, other in pairs:
        assert one.keys() == other.keys()
        for name in ("loss", "aux_loss", "gradient_norm", "held_out_mean"):
            if name in one:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.long
def test_divided_heads_and_sequences_train_what_one_process_does(tmp_path):
    alone, path = write_run(tmp_path / "one"), write_run(tmp_path / "four")
    assert train(alone, *FEW_STEPS) == 0
    layout = ("--set", "parallel.tp=2", "--set", "parallel.cp=2", "--json")
    with Launch(["train", str(path), *FEW_STEPS, *layout], 4, tmp_path) as launch:
        assert launch.ended() == [0] * 4, launch.errors()
        assert [launch.stdout(rank) for rank in (1, 2, 3)] == [""] * 3
        summary = json.loads(launch.stdout())
        assert summary["complete"]
        assert Path(summary["model"], "config.json").is_file()
        # The first process shows the progress, and it alone.
        shown = [(tmp_path / f"err-{rank}").read_text() for rank in range(4)]
        assert [("step 3/3" in text) for text in shown] == [True, False, False, False]
    assert_trained_alike(path.parent / "out", alone.parent / "out")


@pytest.mark.long
@pytest.mark.parametrize("more", [(), ("--steps", "0")], ids=["trained", "refused"])
def test_adapters_by_two_processes_are_told_of_once(more, tmp_path):
    model, text = checkpoint_of(MIXTRAL, tmp_path / "model"), write_text(tmp_path)
    words = ["finetune", str(model), str(text), "-o", str(tmp_path / "out"), "--lora", "2"]
    words += ["--context", "16", "--sequences", "2", "--micro-batches", "2", "--steps", "1", *more]
    with Launch(words, 2, tmp_path) as launch:
        for process in launch.processes:
            process.join()
        expected = 2 if more else 0
        assert [process.exitcode for process in launch.processes] == [expected] * 2, launch.errors()
        assert launch.stdout(1) == ""
        shown = [(tmp_path / f"err-{rank}").read_text() for rank in range(2)]
        assert ["what was trained" in text for text in shown] == [not more, False]


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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def launchers(nodes: str, *words: str) -> list[subprocess.Popen[str]]:
    """Two launchers of a process each, as on two machines; the first keeps what they share."""
    port = free_port()
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    program = str(Path(sys.executable).with_name("moe-runtime"))
    soon = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        subprocess.Popen(
            [
                *(*torchrun, "--nnodes", nodes, "--nproc-per-node", "1", "--max-restarts", "3"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
                *("--rdzv-conf", f"is_host={number == 0},{soon}"),
                *(program, *words),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in range(2)
    ]  # fmt: skip


def kill_all(launcher: subprocess.Popen[str]) -> str:
    """Kills a launcher and its processes; what they have said."""
    for process in (*psutil.Process(launcher.pid).children(recursive=True), launcher):
        process.kill()
    return launcher.communicate()[0]


@pytest.mark.long
def test_two_launchers_serve_as_one_process_does(checkpoint):
    """Also after a process of either has died."""
    port = free_port()
    words = ("serve", str(checkpoint), "--port", str(port), "--max-tokens", "512", *SMALL)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    expected = text_of_transformers(checkpoint, 12)
    both = launchers("2", *words)
    try:
        for victim in (1, 0, None):
            answer = b""
            while not answer:
                assert [one.poll() for one in both] == [None, None]
                time.sleep(0.1)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    answer = asked(f"http://127.0.0.1:{port}", "/v1/completions", body)
            assert json.loads(answer)["choices"][0]["text"] == expected
            if victim is not None:
                (process,) = psutil.Process(both[victim].pid).children()
                process.kill()
    finally:
        said = [kill_all(one) for one in both]
    assert "has ended" in "".join(said)


@pytest.mark.long
def test_a_run_goes_on_without_a_launcher_that_is_lost(tmp_path):
    """With all of its processes, as a machine; from the last checkpoint."""
    path, steps = write_run(tmp_path), 60
    words = ("--set", f"run.steps={steps}", "--set", "run.checkpoint_every=1")
    first, second = launchers("1:2", "train", str(path), "--resume", *FEW_STEPS, *words)
    metrics = tmp_path / "out" / "metrics.jsonl"
    while first.poll() is None and not (metrics.exists() and len(metrics.open().readlines()) > 3):
        time.sleep(0.05)
    kill_all(second)
    said, _ = first.communicate()
    assert first.returncode == 0, said
    taken = [one["step"] for one in training_records(tmp_path / "out") if "loss" in one]
    assert taken == [*range(1, steps + 1)]


ELASTIC_TOKENS = 200


class Service(contextlib.AbstractContextManager["Service"]):
    """A server with ``--elastic`` and the processes that joined it."""

    def __init__(self, checkpoint: Path, folder: Path, sizes: str, *words: str) -> None:
        self.port = free_port()
        (folder / "in").write_text("")
        self.folder, self.checkpoint, self.words = folder, checkpoint, words
        self.processes: list[BaseProcess] = []
        self.start("--elastic", f"{sizes}@{self.port}", "--port", "0")

    def start(self, *words: str) -> int:
        number = len(self.processes)
        given = ["serve", str(self.checkpoint), "--max-tokens", "512", *SMALL, *self.words, *words]
        process = start_server().Process(
            target=run_words, args=(given, {}, self.folder, number), daemon=True
        )
        process.start()
        self.processes.append(process)
        return number

    def join(self) -> int:
        return self.start("--join", f"localhost:{self.port}")

    def said(self, number: int = 0) -> str:
        path = self.folder / f"err-{number}"
        return path.read_text() if path.exists() else ""

    def wait_for(self, words: str, times: int = 1, number: int = 0) -> None:
        while self.said(number).count(words) < times:
            assert self.processes[number].is_alive(), self.said(number)
            time.sleep(0.02)

    @property
    def address(self) -> str:
        out = self.folder / "out-0"
        while not (out.exists() and out.read_text().endswith("\n")):
            assert self.processes[0].is_alive(), self.said()
            time.sleep(0.02)
        return json.loads(out.read_text())["address"]

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def streamed(address: str, **body: Any) -> Iterator[str]:
    """The pieces of an answer's text as they come."""
    data = {"prompt": PROMPT, "max_tokens": ELASTIC_TOKENS, "stream": True, **body}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(data).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                assert "error" not in found, found
                yield found["choices"][0]["text"]


@pytest.mark.long
def test_requests_go_on_while_processes_come_and_go(checkpoint, tmp_path):
    with Service(checkpoint, tmp_path, "1:3", "--exact") as service:
        drawn = {"temperature": 1.3, "seed": 3}
        greedy = streamed(service.address, temperature=0)
        sampled = streamed(service.address, **drawn)
        texts = [next(greedy), next(sampled)]
        joined = service.join()
        service.wait_for("2 processes divide the model")
        texts[0] += next(greedy)
        os.kill(service.processes[joined].pid or 0, signal.SIGKILL)
        service.wait_for("rank 1 of 2 has ended")
        texts[0] += "".join(greedy)
        texts[1] += "".join(sampled)
        assert texts[0] == text_of_transformers(checkpoint, ELASTIC_TOKENS)
        assert "".join(streamed(service.address, **drawn)) == texts[1]
        other = service.start("--join", f"localhost:{service.port}", "--max-running", "3")
        service.processes[other].join()
        assert service.processes[other].exitcode == 2
        assert "this process differs from the service in the options of" in service.said(other)
        leaving = service.join()
        service.wait_for("2 processes divide the model", 2)
        os.kill(service.processes[0].pid or 0, signal.SIGTERM)
        service.processes[0].join()
        service.processes[leaving].join()
        codes = [service.processes[number].exitcode for number in (0, leaving)]
        assert codes == [143, 0], service.said(leaving)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--elastic", "4:1"), "--elastic 4:1: expected MIN:MAX, such as 1:4"),
        (("--elastic", "1:2@x"), "--elastic 1:2@x: expected MIN:MAX, such as 1:4"),
        (("--join", "here"), "--join here: expected HOST:PORT"),
        (("--join", "a:1", "--elastic", "1:2"), "leave one of them out"),
        (("--elastic", "1:2", "--processes", "2"), "divides it too: leave --elastic out"),
        (("--elastic", "1:2", "--prefix-disk", "1GiB"), "--prefix-disk is for one process"),
        (("--elastic", "1:2", "n"), "several processes serve one model, got 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_an_elastic_server_is_not_is_refused(words, complaint, capsys):
    assert main(["serve", "m", *words]) == 2
    assert complaint in capsys.readouterr().err


def test_other_ways_start_no_elastic_server(monkeypatch, capsys):
    ctx: Any = SimpleNamespace(params={"device": "cuda"}, command=SimpleNamespace(params=[]))
    with pytest.raises(ValueError, match="--join divides a model among CPUs: give --device cpu"):
        elastic_place(ctx, None, "a:1")
    launched_as(0, monkeypatch)
    assert main(["serve", "m", "--elastic", "1:2"]) == 2
    assert "--elastic starts without torchrun" in capsys.readouterr().err


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
