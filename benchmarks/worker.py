"""Runs one system once and writes its numbers: `worker.py SPEC.json`; started by `generate.py`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.interruption import release_interruptions
from harness.processes import RunSpec
from harness.systems import System, make_system

LEAST_TIMED_TOKENS = 4


def main() -> None:
    """Reads the run's specification, runs it, writes the result as JSON."""
    release_interruptions()
    fields = json.loads(Path(sys.argv[1]).read_text())
    fields["prompt_ids"] = tuple(fields["prompt_ids"])
    fields["decode_ids"] = tuple(fields["decode_ids"])
    spec = RunSpec(**fields)
    result = run(spec)
    Path(spec.result).write_text(json.dumps(result))


def run(spec: RunSpec) -> dict[str, Any]:
    """Loads, reads the prompt twice (first and warm), decodes; all times in seconds."""
    system = make_system(spec)
    imported_at = time.monotonic()
    rss_after_imports = _memory_status("VmRSS")
    system.load()
    loaded_at = time.monotonic()
    system.prefill(spec.prompt_ids)
    first_token_at = time.monotonic()
    after_first = system.counters()
    next_token = system.prefill(spec.prompt_ids)
    warm_at = time.monotonic()
    after_warm = system.counters()
    decoded = _decode(system, spec, next_token)
    counters = system.counters()
    peak_rss = _memory_status("VmHWM")
    system.close()
    num_prompt = len(spec.prompt_ids)
    return {
        "import_s": imported_at - spec.spawned_at,
        "load_s": loaded_at - imported_at,
        "ttft_s": first_token_at - spec.spawned_at,
        "prefill_first_s": first_token_at - loaded_at,
        "prefill_first_tokens_per_s": num_prompt / (first_token_at - loaded_at),
        "prefill_warm_s": warm_at - first_token_at,
        "prefill_warm_tokens_per_s": num_prompt / (warm_at - first_token_at),
        **decoded,
        "rss_after_imports_bytes": rss_after_imports,
        "peak_rss_bytes": peak_rss,
        "peak_rss_less_imports_bytes": peak_rss - rss_after_imports,
        "counters": counters,
        "first_prefill_counters": after_first,
        "warm_prefill_counters": _difference(after_warm, after_first),
    }


def _decode(system: System, spec: RunSpec, next_token: int) -> dict[str, Any]:
    """Decodes the given tokens one by one, the first few untimed, until they or the time end."""
    predictions = [next_token]
    step_s: list[float] = []
    before: dict[str, Any] = system.counters()
    for index, given in enumerate(spec.decode_ids):
        if index == spec.warmup_tokens:
            before = system.counters()
        begin = time.perf_counter()
        predictions.append(system.step(predictions[-1] if spec.greedy else given))
        if index >= spec.warmup_tokens:
            step_s.append(time.perf_counter() - begin)
        if len(step_s) >= LEAST_TIMED_TOKENS and sum(step_s) > spec.max_decode_s:
            break
    return {
        "decode_tokens": len(step_s),
        "decode_s": sum(step_s),
        "decode_tokens_per_s": len(step_s) / sum(step_s),
        "decode_step_s": step_s,
        "decode_counters": _difference(system.counters(), before),
        "predictions": predictions,
    }


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """What each numeric counter gained."""
    return {
        name: value - before[name]
        for name, value in after.items()
        if isinstance(value, int | float) and isinstance(before.get(name), int | float)
    }


def _memory_status(field: str) -> int:
    """A memory field of this process in bytes, as the kernel keeps it."""
    # `getrusage` will not do: its peak includes the process image before `exec`.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"the kernel does not report {field}")


if __name__ == "__main__":
    main()
