"""The benchmark as a whole, on its smallest shape."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from harness.machine import commit
from warm_python import warm_python

from moe_runtime.bench.memory_cap import CGROUP_ROOT, why_unavailable

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "generate.py"
SHORT = ("--quick", "--prompt-tokens", "24", "--new-tokens", "6", "--max-decode-s", "3600")


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(PROGRAM), *arguments]


@pytest.mark.slow
def test_quick_run_measures_every_system_and_they_agree(tmp_path: Path) -> None:
    systems = ["ours", "transformers", *(["llama.cpp"] if find_spec("llama_cpp") else [])]
    results = tmp_path / "results.json"
    arguments = [*SHORT, "--caps", "none", "--systems", ",".join(systems)]
    folders = ["--data", str(tmp_path / "data"), "--results", str(results)]
    words = command(*arguments, *folders)[1:]
    done = subprocess.run([warm_python(), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())

    assert found["commit"] == commit(PROGRAM.parent)
    assert found["versions"]["torch"]
    assert found["settings"]["new_tokens"] == 6
    assert len(found["disk"]) >= 4
    runs = {run["system"]: run for run in found["runs"]}
    assert list(runs) == systems
    for run in runs.values():
        assert run["failure"] is None
        assert run["decode_tokens"] == 6
        assert run["ttft_s"] > run["load_s"] > 0
        assert run["peak_rss_bytes"] > 0
    # Different kernels in bf16: a near tie may fall either way, a wrong model agrees nowhere.
    for system in systems[1:]:
        pairs = zip(runs["ours"]["predictions"], runs[system]["predictions"], strict=True)
        assert sum(mine == theirs for mine, theirs in pairs) >= 7
    assert len(found["ratios_ours_over_peer"]) == len(systems) - 1
    (ours,) = found["ours"]
    assert ours["belady_misses_per_token"] <= ours["lru_misses_per_token"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    folders = ["--data", str(tmp_path), "--results", str(tmp_path / "results.json")]
    cap = "1GiB" if why_unavailable() is None else "none"
    process = subprocess.Popen(
        command(*SHORT, "--systems", "transformers", "--caps", cap, *folders),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        worker = wait_for_worker(process)
        process.send_signal(number)
        output, _ = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert has_ended(worker)
    assert not list(CGROUP_ROOT.glob(f"**/moe-benchmark-{process.pid}-*"))
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == []


def has_ended(process: psutil.Process) -> bool:
    """Also if nobody has collected it yet."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_worker(benchmark: subprocess.Popen[str]) -> psutil.Process:
    parent = psutil.Process(benchmark.pid)
    while not has_ended(parent):
        for child in parent.children():
            # Other children come and go while one looks.
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(part.endswith("worker.py") for part in child.cmdline()):
                    return child
        time.sleep(0.05)
    raise AssertionError(f"the benchmark started no worker: {benchmark.communicate()[0]}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--systems", "vllm"], "expected systems among"),
        (["--caps", "7 apples"], "expected a size"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--systems", "transformers:fast"], "expected systems among"),
    ],
)
def test_bad_options_get_one_line(arguments: list[str], message: str) -> None:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 2
    assert message in done.stdout
    assert len(done.stdout.splitlines()) == 1


def test_help_teaches() -> None:
    done = subprocess.run(command("--help"), capture_output=True, text=True, check=True)
    assert "--quick" in done.stdout
    assert "examples:" in done.stdout
