"""The cost of a killed process: `python benchmarks/recovery.py`.

Two processes train a small model under `torchrun --max-restarts`. One is killed with SIGKILL some
steps after a checkpoint, and the clock runs until the step that was under way is done: once from
the checkpoint on the disk, once from a snapshot in memory. Then runs of one process take the same
steps with and without checkpoints between them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import psutil

from moe_runtime.benchmarks.harness.scripting import ROOT, ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.errors import MoERuntimeError

METRICS = facts("s", "recover_s") | facts("count", "lost_steps")
_CONFIG = """
[run]
output = "out"
steps = {steps}
threads = 1
evaluate_every = 0
checkpoint_every = {every}
snapshot_every = {snapshot}
[model]
hidden_size = 128
num_layers = 4
num_heads = 4
num_kv_heads = 2
head_dim = 32
max_positions = 128
[model.moe]
num_experts = 16
top_k = 2
intermediate_size = 128
[data]
context = 128
tokens_per_step = 2048
micro_batches = 2
[data.sources.pages]
files = ["{pages}"]
[tokenizer]
vocab_size = 1024
[optimizer]
peak_rate = 1e-3
"""
_PATIENCE_S, _SOON = 600, 10


def write_config(folder: Path, *, steps: int, every: int, snapshot: int) -> Path:
    path = folder / "train.toml"
    pages = ROOT / "docs" / "*.md"
    path.write_text(_CONFIG.format(steps=steps, every=every, snapshot=snapshot, pages=pages))
    return path


def started(words: list[str], path: Path, *options: str) -> subprocess.Popen[bytes]:
    program = str(Path(sys.executable).with_name("moe-runtime"))
    return subprocess.Popen(
        [*words, program, "train", str(path), "--resume", "--reschedule", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def taken(folder: Path) -> list[dict[str, float]]:
    """The records of the steps so far."""
    metrics = folder / "out" / "metrics.jsonl"
    text = metrics.read_text() if metrics.exists() else ""
    whole = text.rpartition("\n")[0].splitlines()
    return [record for record in map(json.loads, whole) if "step_s" in record]


def wait_for(folder: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    """Wait until a step is recorded; return the smallest number of records seen."""
    deadline = time.monotonic() + _PATIENCE_S
    fewest = step
    while len(steps := taken(folder)) < step:
        fewest = min(fewest, len(steps))
        if process.poll() is not None or time.monotonic() > deadline:
            raise MoERuntimeError(f"the run came to {len(steps)} steps, expected {step}")
        time.sleep(0.01)
    return fewest


def recovery(every: int, snapshot: int) -> dict[str, float]:
    """Seconds from the death of a process to the first step that was not yet recorded."""
    words = [sys.executable, "-P", "-m", "torch.distributed.run", "--no-python"]
    words += ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = write_config(folder, steps=every + 3, every=0, snapshot=snapshot)
        if started([], path, "--set", "run.steps=1").wait(_PATIENCE_S):
            raise MoERuntimeError("the first step failed")
        process = started(words, path)
        try:
            wait_for(folder, every, process)
            last = len(taken(folder))
            # the process with the higher rank
            workers = sorted(psutil.Process(process.pid).children(), key=lambda one: one.pid)
            workers[-1].send_signal(signal.SIGKILL)
            died = time.monotonic()
            # repeated steps are cut off first
            fewest = wait_for(folder, last + 1, process)
            found = time.monotonic() - died
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
            process.kill()
            process.wait()
    return {"recover_s": found, "lost_steps": float(last - fewest)}


@script(
    every=option(100, "steps since a checkpoint"),
    repeats=3,
)
def main(options: Namespace) -> int:
    every = options.every
    settings = {"every": every, "tokens_per_step": 2048}
    settings |= {"processes": 2, "steps": every + 3, "steps_in_memory": _SOON + 3}
    results = ScriptResults("recovery", options, settings, METRICS)
    systems = {
        "from the disk": lambda: recovery(every, 0),
        # with snapshots, earlier steps are not repeated
        "from a snapshot in memory": lambda: recovery(_SOON, 1),
    }
    results.add_rounds(systems, options.repeats)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
