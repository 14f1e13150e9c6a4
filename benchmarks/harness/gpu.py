"""What the GPU scripts share: checkpoints drawn on the GPU, rates of the hardware, profiles, and
results that are written row by row.

Unlike in `model_shapes`, what experts compute reaches the logits, so that outputs can be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import gc
import io
import pstats
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from moe_runtime.benchmarks.harness.scripting import RESULTS, SAVE, parser_of, write_systems
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, middle
from moe_runtime.benchmarks.synthetic.checkpoint_writer import write_checkpoint
from moe_runtime.benchmarks.synthetic.model_shapes import (
    SHAPES,
    SMALL_STD,
    WEIGHT_STD,
    ModelShape,
    TensorPlan,
    make_shape,
)
from moe_runtime.files import check_output_path
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn

TINY = make_shape("qwen3_moe", "tiny", 2, 8, 2, 64, 32, 2, 320, 10**6, 1, 32)
MEMORY_FOLDER = Path("/dev/shm")
MEMORY = ("budget_bytes", "peak_bytes", "peak_reserved_bytes")
CPU_EXPERTS = 30
"""Enough to lie in memory, not in a cache."""
PROFILED_ROWS = 18
Repetitions = list[dict[str, float]]


def parse_options(
    doc: str | None, file: str, add: Callable[[argparse.ArgumentParser], None]
) -> argparse.Namespace | None:
    """Options of a script; a file of this name is written with `--save`. None without a GPU."""
    parser = parser_of(doc, "--tiny=a tiny shape, as a rehearsal", f"{SAVE}: {file}-GPU")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, help="write the results here")
    add(parser)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
        return None
    return options


def shape_of(name: str, num_layers: int, *, is_tiny: bool) -> ModelShape:
    """The shape of a name with fewer layers, or the one of a rehearsal."""
    return TINY if is_tiny else replace(SHAPES[name], num_layers=num_layers)


@contextlib.contextmanager
def drawn_checkpoint(shape: ModelShape, device: str) -> Iterator[Path]:
    """The checkpoint's folder, in memory where it fits twice; all beside it is removed, too."""
    generator = torch.Generator(device).manual_seed(0)

    def make(plan: TensorPlan, seed: int) -> list[Any]:
        del seed
        values = torch.ones(plan.shape, dtype=torch.bfloat16, device=device)
        if plan.std is not None:
            std = WEIGHT_STD if plan.std == SMALL_STD else plan.std
            values.normal_(std=std, generator=generator)
        return [values.cpu().view(torch.uint16).numpy()]

    place = MEMORY_FOLDER
    if not place.is_dir() or shutil.disk_usage(place).free < 2 * shape.total_bytes:
        place = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-", dir=place) as folder:
        write_checkpoint(shape, Path(folder, "model"), make=make)
        yield Path(folder, "model")


class Rates(NamedTuple):
    """Bytes a second of a copy within the device, read and written bytes both counted; of a copy
    from pinned memory to the device, None on a CPU; seconds of an expert of one row on the CPU."""

    copy_bytes_s: float
    link_bytes_s: float | None
    cpu_expert_s: float


def measure_rates(shape: ModelShape, device: str, num_bytes: int) -> Rates:
    """Measures with tensors of `num_bytes`, and with experts of the shape."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s, link_s = median_s(lambda: target.copy_(source), device), None
    if device == "cuda":
        pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        link_s = median_s(lambda: target.copy_(pinned, non_blocking=True), device)
    width, hidden = shape.model_width, shape.expert_width
    sizes = ((hidden, width), (hidden, width), (width, hidden))
    x_TD, seconds = torch.ones(1, width, dtype=torch.bfloat16), []
    y_TD = torch.empty_like(x_TD)
    for expert in [
        ExpertWeights(*(torch.full(size, 0.01, dtype=torch.bfloat16) for size in sizes))
        for _ in range(CPU_EXPERTS)
    ]:
        begun_s = time.perf_counter()
        expert_ffn(x_TD, [expert], [1], [0], [0], y_TD, activation="silu")
        seconds.append(time.perf_counter() - begun_s)
    link_bytes_s = None if link_s is None else num_bytes / link_s
    return Rates(2 * num_bytes / copy_s, link_bytes_s, statistics.median(seconds))


def median_s(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Median seconds of a call after one that is not counted, the device's work included."""
    seconds = []
    for _ in range(repeats + 1):
        wait_for(device)
        begun_s = time.perf_counter()
        call()
        wait_for(device)
        seconds.append(time.perf_counter() - begun_s)
    return statistics.median(seconds[1:])


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_memory() -> None:
    """Frees the memory of a model that is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device_memory(plan: Any) -> dict[str, int]:
    """The budget of a GPU, and the most that tensors and torch have held there beside it."""
    if plan is None:
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(MEMORY, (plan.budget_bytes, *peaks), strict=True))


class GpuResults:
    """A results file that is written after each row: what was measured stays if another fails."""

    def __init__(
        self,
        kind: str,
        file: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        metrics: Mapping[str, Metric],
    ) -> None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        self.settings = {"gpu": gpu, **settings, "aims": dict[str, Any]()}
        self.systems = dict[str, Repetitions | str]()
        self.qualities = dict[str, Mapping[str, int]]()
        self.began_s = psutil.Process().create_time()
        self._kind, self._metrics, self._path = kind, metrics, options.out
        if options.save:
            name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
            self._path = RESULTS / f"{file}-{name}.json"
        if self._path is not None:
            check_output_path(self._path, "results")
        self._ended = "interrupted"

    def add(self, name: str, found: Sequence[Mapping[str, float | None]] | str) -> None:
        """Takes a row, writes the file and says it; of what is None there was nothing to measure"""
        if not isinstance(found, str):
            found = [{key: v for key, v in one.items() if v is not None} for one in found]
        self.systems[name] = found
        self.write()
        values = {metric: self.value(name, metric) for metric in self._metrics}
        said = ", ".join(f"{key} {value:.4g}" for key, value in values.items() if value is not None)
        since_s = time.time() - self.began_s
        print(f"{since_s:5.1f} s  {name}: {found if isinstance(found, str) else said}", flush=True)

    def value(self, name: str, metric: str) -> float | None:
        """The median over a row's repetitions; None where it has none."""
        found = self.systems.get(name, "")
        rows = [] if isinstance(found, str) else [*found]
        values = MeasuredSystem(repetitions=[*rows]).values(metric)
        return middle(values) if values else None

    def aim(
        self, what: str, field: str, asked: float, measured: float, *, at_most: bool = False
    ) -> None:
        """Notes what is aimed at beside what was measured."""
        holds = measured <= asked if at_most else measured >= asked
        aim = {"sign": "<=" if at_most else ">=", "asked": asked, "measured": measured}
        self.settings["aims"][f"{what}: {field}"] = aim | {"holds": holds}

    def write(self) -> None:
        if self._path is not None:
            given = self.settings, self.systems, self._metrics, self.qualities
            write_systems(self._path, self._kind, *given, ended=self._ended)

    def finish(self) -> int:
        """Writes that nothing is missing, and says what is aimed at beside what was measured."""
        self._ended = "most"
        self.write()
        for what, aim in self.settings["aims"].items():
            numbers = f"{aim['sign']} {aim['asked']:<12.6g} {aim['measured']:<12.6g}"
            print(f"{what:62} {numbers} {'holds' if aim['holds'] else 'MISSED'}")
        print(f"done after {time.time() - self.began_s:.1f} s")
        return 0


def profiled(title: str, call: Callable[[], Any], device: str) -> str:
    """Calls twice: with torch's profiler, and with Python's."""
    lines = [f"==== {title}"]
    kinds = ("cpu", "cuda") if device == "cuda" else ("cpu",)
    with profile(activities=[getattr(ProfilerActivity, kind.upper()) for kind in kinds]) as found:
        call()
    averages: Any = found.key_averages()
    lines += (
        averages.table(sort_by=f"self_{kind}_time_total", row_limit=PROFILED_ROWS) for kind in kinds
    )
    python, text = cProfile.Profile(), io.StringIO()
    python.runcall(call)
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(2 * PROFILED_ROWS)
    return "\n".join([*lines, text.getvalue()])
