"""Run GPU tests and benchmarks in nine minutes: `python benchmarks/on_a_gpu.py --results FOLDER`.

Each part is ended when its time is over; the next one gets what it leaves. `--times` gives more,
`--only` runs some parts. Logs and results are in the folder as soon as a part is over. A part that
fails stops no other: the exit code is 1 then.
"""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_runtime.benchmarks.harness.scripting import option, script
from moe_runtime.benchmarks.suite.programs import running
from moe_runtime.kernels.grouped_gemm.tile import cache_folder

GRACE_S = 15.0
"""After an interrupt, to remove a checkpoint of gigabytes."""
SHOWN_LINES = 12
LATE = "its time ended"


class Part(NamedTuple):
    name: str
    seconds: float
    command: Callable[[float], Sequence[str]]


class PartOutcome(NamedTuple):
    """How a part ended, and its seconds."""

    name: str
    end: str
    seconds: float

    @property
    def has_failed(self) -> bool:
        """Whether it ended on its own with an error."""
        return self.end not in ("done", LATE)


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    written: Sequence[Path],
    *,
    root: Path,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartOutcome]:
    """Run all parts and report how each ended."""

    def stamps() -> set[tuple[Path, int]]:
        found = (path for one in written for path in one.glob("*.json"))
        return {(path, path.stat().st_mtime_ns) for path in found}

    folder.mkdir(parents=True, exist_ok=True)
    before, end_s, outcomes = stamps(), clock(), []
    for part in parts:
        begun_s, end_s = clock(), end_s + part.seconds
        command = [*part.command(end_s - begun_s - GRACE_S)]
        print(f"== {part.name}: {shlex.join(command)[:300]}", flush=True)
        log = folder / f"{part.name}.log"
        try:
            with log.open("wb") as output:
                end = _run(command, output.fileno(), end_s - begun_s, root)
        finally:
            for path, _ in stamps() - before:
                shutil.copy2(path, folder)
        outcomes.append(PartOutcome(part.name, end, clock() - begun_s))
        print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]))
        print(f"== {part.name}: {end} after {outcomes[-1].seconds:.0f} s", flush=True)
    return outcomes


def _run(command: Sequence[str], output: int, seconds: float, root: Path) -> str:
    """Run a program; interrupt it when it is late, then kill it and its children."""
    pipes = {"stdout": output, "stderr": subprocess.STDOUT}
    with running(command, asked=signal.SIGINT, grace_s=GRACE_S, cwd=root, **pipes) as program:
        try:
            status = program.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return LATE
        return "done" if status == 0 else f"failed with {status}"


ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(@|marks=)pytest\.mark\.gpu\b|import .*\bPLACES\b")
COMPUTING = re.compile(r'"cuda" if torch\.cuda\.is_available|\b(HAS|IS)_GPU\b')
"""Matches test files with tests marked `gpu`, or that use a GPU if there is one."""


def tests(marked: str, pattern: re.Pattern[str]) -> list[str]:
    words = [sys.executable, "-P", "-m", "pytest", "-v", "-m", f"{marked} and not long"]
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    found = [str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text())]
    return [*words, "--numprocesses", "auto", "--maxprocesses", "8", *found]


def measuring(words: str) -> list[str]:
    """The command of a benchmark that saves its results."""
    name, *others = words.split()
    return [sys.executable, f"benchmarks/{name}.py", *others, "--save"]


def decoding(shape: str, layers: int, seconds: float) -> list[str]:
    """The command that measures decoding; no row starts in the last tenth of the time."""
    words = f"device_decode --shape {shape} --layers {layers} --caches static"
    return measuring(f"{words} --seconds {0.9 * seconds:.0f}")


def bench(words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("moe-runtime")), "bench", *words.split()]


# first tokens and steps compared with transformers, on a card of 12 GB
LATENCY = (
    "latency --shape olmoe-1b-7b --layers 4 --device cuda --quick --device-memory 12GiB --peer "
    "transformers:grouped_mm --time 20 -o benchmarks/results/latency-olmoe-1b-7b-4-layers-cuda.json"
)
# tiles for a layer of Qwen3-30B-A3B in training and in decoding
TILES = "kernels --tune --shape 16384,2048,768,128,8 --shape 1,2048,768,128,8"
TRAINED = "--layers 2 --rows 16 --context 512"
PARTS = (
    Part("tests-marked-gpu", 85, lambda _: tests("gpu", MARKED)),
    Part("decode-olmoe-1b-7b", 95, lambda s: decoding("olmoe-1b-7b", 16, s)),
    Part("decode-qwen3-30b-a3b", 80, lambda s: decoding("qwen3-30b-a3b", 12, s)),
    Part("latency-olmoe-1b-7b", 70, lambda _: bench(LATENCY)),
    Part("training", 55, lambda _: measuring(f"fine_tuning device {TRAINED}")),
    Part("tests-of-kernels", 50, lambda _: tests("not gpu", COMPUTING)),
    Part("kernels", 60, lambda _: measuring("kernels")),
    Part("tiles", 25, lambda _: bench(TILES)),
)


NAMES = [part.name for part in PARTS]


@script(
    saves=False,
    results=option(ROOT / "build" / "gpu", type=Path),
    times=option(1.0, "as long for each part"),
    only=option(None, ", ".join(NAMES), nargs="+", choices=NAMES, metavar="PART"),
)
def main(options: Namespace) -> int:
    """Run the parts; return 1 if one failed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("no GPU here; the parts of this can be rehearsed without one", file=sys.stderr)
        return 2
    # a part has its own session and would continue
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts = [
        p._replace(seconds=p.seconds * options.times)
        for p in PARTS
        if p.name in (options.only or [p.name])
    ]
    written = ROOT / "benchmarks" / "results", cache_folder()
    outcomes = run_parts(parts, options.results, written, root=ROOT)
    print()
    for name, end, seconds in outcomes:
        print(f"{name:24} {seconds:5.0f} s  {end}")
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
