"""One benchmark session: prepares files, measures the disk, runs every planned run."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.disk import Measurement, ReadMode, measure, sweep
from harness.plan import OURS_PACKED, PlannedRun, Settings, cannot_work, cap_label, planned_runs
from harness.processes import Outcome, RunSpec, run_worker
from harness.prompt import Prompt
from harness.replay import Routes, read_routes
from moe_runtime.bench.memory_cap import drop_page_cache
from moe_runtime.bench.synthetic.checkpoint_writer import is_complete, write_checkpoint
from moe_runtime.bench.synthetic.gguf_copy import write_gguf
from moe_runtime.bench.synthetic.tensor_places import expert_ranges

# What a benchmark leaves free beside its files, and never more than the files themselves.
SPARE_DISK_BYTES = 2 << 30
PROGRESS_EVERY_S = 5.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A finished run: what was asked, what came, and the disk's speed around it."""

    run: PlannedRun
    outcome: Outcome
    disk_bytes_per_s: float | None


@dataclass(slots=True)
class Findings:
    """Everything a session found; filled as it goes, so an interrupted one keeps its part."""

    disk: list[Measurement] = field(default_factory=list)
    records: list[RunRecord] = field(default_factory=list)
    routes: Routes | None = None
    notes: list[str] = field(default_factory=list)


def prepare_files(settings: Settings, say: Say) -> None:
    """Makes the checkpoint and, where llama.cpp is to run, the GGUF file; keeps what is there.

    Raises:
        OSError: the disk has too little room, or packing failed.
    """
    shape = settings.shape
    settings.data.mkdir(parents=True, exist_ok=True)
    if not is_complete(shape, settings.checkpoint, seed=settings.seed):
        _require_room(settings.data, shape.total_bytes)
        say(f"writing checkpoint {settings.checkpoint} ({shape.total_bytes / 1e9:.1f} GB)")
        for derived in (settings.gguf, settings.trace_file):
            derived.unlink(missing_ok=True)
        shutil.rmtree(settings.packed, ignore_errors=True)
        write_checkpoint(
            shape, settings.checkpoint, seed=settings.seed, progress=_progress(say, "checkpoint")
        )
    is_wanted = cannot_work("llama.cpp", None, shape) is None
    if "llama.cpp" in settings.systems and is_wanted and not settings.gguf.is_file():
        _require_room(settings.data, shape.total_bytes)
        say(f"writing {settings.gguf} ({shape.total_bytes / 1e9:.1f} GB)")
        write_gguf(shape, settings.checkpoint, settings.gguf, progress=_progress(say, "GGUF"))
    is_wanted = OURS_PACKED in settings.systems and cannot_work(OURS_PACKED, None, shape) is None
    if is_wanted and not settings.packed.is_dir():
        say(f"packing {settings.packed}")
        program = Path(sys.executable).with_name("moe-runtime")
        # takes up what an interrupted run has written
        pack = [program, "pack", settings.checkpoint, settings.packed]
        if subprocess.run(pack, check=False).returncode:  # it has said why
            raise OSError(f"{settings.packed} cannot be packed")


def measure_disk(settings: Settings, findings: Findings, say: Say) -> None:
    """Measures random reads of one expert's size in every mode and notes the results."""
    ranges = expert_ranges(settings.checkpoint)
    if settings.cold:
        drop_page_cache()
    findings.disk = sweep(ranges, seconds=settings.disk_s)
    found = ", ".join(f"{result.mode} {result.bytes_per_s / 1e9:.2f}" for result in findings.disk)
    say(f"disk, random reads of {ranges[0][2] / 1e6:.1f} MB, GB/s: {found}")


def run_all(
    settings: Settings, caps: tuple[int | None, ...], prompt: Prompt, findings: Findings, say: Say
) -> None:
    """Runs everything planned, each run in its own process; failures are results too."""
    runs = list(planned_runs(settings, caps))
    for number, run in enumerate(runs, start=1):
        speed_before = _disk_speed(settings, findings, run, seed=2 * number)
        begin = time.monotonic()
        outcome = _execute(settings, prompt, run)
        speed_after = _disk_speed(settings, findings, run, seed=2 * number + 1)
        # The harder bound: the disk's speed drifts, and it was at least this fast just now.
        speed = max(filter(None, (speed_before, speed_after)), default=None)
        findings.records.append(RunRecord(run, outcome, speed))
        say(
            f"[{number}/{len(runs)}] {run.system}, cap {cap_label(run.cap_bytes)}, "
            f"repeat {run.repeat + 1}: {_one_line(outcome)} "
            f"({time.monotonic() - begin:.0f} s)"
        )


def trace_routes(
    settings: Settings,
    cap: int | None,
    prompt: Prompt,
    findings: Findings,
    say: Say,
    *,
    keeps: bool = False,
) -> None:
    """Records ours' routing in a run that is not timed; it is the same at every budget.

    With `keeps`, the recording of a session before is used if it is of a run of the same length.
    """
    trace_file = settings.trace_file
    if keeps and trace_file.is_file():
        routes = read_routes(trace_file, settings.new_tokens)
        expected = settings.prompt_tokens + settings.warmup_tokens, settings.new_tokens
        if (len(routes.prompt[0]), len(routes.decode[0])) == expected:
            findings.routes = routes
            return
    trace_file.unlink(missing_ok=True)
    outcome = _execute(settings, prompt, PlannedRun("ours", cap, 0), trace_file)
    if not outcome.succeeded:
        findings.notes.append(f"no routing trace: {outcome.failure}")
    else:
        findings.routes = read_routes(trace_file, outcome.numbers["decode_tokens"])
    say(findings.notes[-1] if findings.routes is None else f"routing recorded in {trace_file}")


def _execute(
    settings: Settings, prompt: Prompt, run: PlannedRun, trace_file: Path | None = None
) -> Outcome:
    spec = RunSpec(
        system=run.system,
        checkpoint=str(settings.packed if run.system == OURS_PACKED else settings.checkpoint),
        gguf=str(settings.gguf),
        prompt_ids=prompt.ids,
        decode_ids=prompt.continuation,
        greedy=settings.greedy,
        warmup_tokens=settings.warmup_tokens,
        # Every token is wanted in the trace, however slow.
        max_decode_s=settings.max_decode_s if trace_file is None else settings.timeout_s,
        num_threads=settings.num_threads,
        cap_bytes=run.cap_bytes,
        host_memory=settings.host_memory,
        trace=None if trace_file is None else str(trace_file),
        offload_folder=str(settings.offload_folder),
    )
    try:
        return run_worker(spec, timeout_s=settings.timeout_s, cold=settings.cold)
    finally:
        shutil.rmtree(settings.offload_folder, ignore_errors=True)


def _disk_speed(settings: Settings, findings: Findings, run: PlannedRun, seed: int) -> float | None:
    """Bytes per second of the best mode right now, where the run's bound needs it."""
    if run.system != "ours" or run.cap_bytes is None or not findings.disk:
        return None
    best: ReadMode = max(findings.disk, key=lambda result: result.bytes_per_s).mode
    ranges = expert_ranges(settings.checkpoint)
    if settings.cold:
        drop_page_cache()
    return measure(ranges, best, seconds=settings.disk_s, seed=seed).bytes_per_s


def _one_line(outcome: Outcome) -> str:
    if outcome.failure is not None:
        return outcome.failure
    numbers: dict[str, Any] = outcome.numbers
    return (
        f"first token after {numbers['ttft_s']:.1f} s, "
        f"prefill {numbers['prefill_warm_tokens_per_s']:.4g} tok/s, "
        f"decode {numbers['decode_tokens_per_s']:.3g} tok/s "
        f"over {numbers['decode_tokens']} tokens"
    )


def _progress(say: Say, what: str) -> Callable[[int, int], None]:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_EVERY_S:
            last = time.monotonic()
            say(f"  {what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

    return report


def _require_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    needed = num_bytes + min(num_bytes, SPARE_DISK_BYTES)
    if free < needed:
        raise OSError(
            f"{folder} has {free / 1e9:.1f} GB free, "
            f"needs {needed / 1e9:.1f} GB; choose another with --data"
        )
