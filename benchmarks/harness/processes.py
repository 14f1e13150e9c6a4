"""Runs one system in a process of its own, under a memory cap or without, and takes its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_runtime.bench.memory_cap import (
    MemoryCap,
    drop_page_cache,
    interruptions_held,
    memory_cap,
)

WORKER = Path(__file__).resolve().parent.parent / "worker.py"
LOG_TAIL_LINES = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """Everything one run depends on; it reaches the worker as JSON."""

    system: str
    checkpoint: str
    gguf: str
    prompt_ids: tuple[int, ...]
    decode_ids: tuple[int, ...]
    greedy: bool
    warmup_tokens: int
    max_decode_s: float
    num_threads: int
    cap_bytes: int | None = None
    host_memory: str = "auto"
    trace: str | None = None
    result: str = ""
    offload_folder: str = ""
    spawned_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave: numbers, or the reason why there are none."""

    numbers: dict[str, Any]
    failure: str | None
    log: str

    @property
    def succeeded(self) -> bool:
        return self.failure is None


def run_worker(spec: RunSpec, *, timeout_s: float, cold: bool = True) -> Outcome:
    """Runs `spec` in a fresh process, by default with a cold page cache, and waits for its end.

    The process is killed, with all it started, when time is up or this one is interrupted.
    """
    with (
        tempfile.TemporaryDirectory(prefix="moe-benchmark-") as scratch,
        nullcontext() if spec.cap_bytes is None else memory_cap(spec.cap_bytes) as cap,
    ):
        folder = Path(scratch)
        emptied = cold and drop_page_cache()
        result, log = folder / "result.json", folder / "log.txt"
        failure = _execute(replace(spec, result=str(result)), folder, log, cap, timeout_s)
        if failure is None and not result.is_file():
            failure = "ended without a result"
        numbers = json.loads(result.read_text()) if failure is None else {}
        numbers["cold_page_cache"] = emptied
        if cap is not None:
            numbers["group_peak_bytes"] = cap.peak_bytes()
        return Outcome(numbers, failure, _tail(log))


def _execute(
    spec: RunSpec, folder: Path, log: Path, cap: MemoryCap | None, timeout_s: float
) -> str | None:
    """Runs the worker to its end; returns why it failed, None when it did not."""
    spec_file = folder / "spec.json"
    command = [sys.executable, str(WORKER), str(spec_file)]
    if cap is not None:
        command = cap.wrap(command)
    threads = str(spec.num_threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    spec_file.write_text(json.dumps(asdict(replace(spec, spawned_at=time.monotonic()))))
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as sink, interruptions_held():
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"not finished after {timeout_s:.0f} s"
    finally:
        if process is not None:
            with interruptions_held():
                _kill_group(process)
    if cap is not None and cap.num_oom_kills():
        return "does not fit in the cap (killed by the kernel)"
    return None if code == 0 else f"ended with exit code {code}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").replace("\r", "\n").splitlines()
    return "\n".join(lines[-LOG_TAIL_LINES:])
