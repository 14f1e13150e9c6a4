"""Shared parts of the GPU scripts: checkpoints drawn on the GPU, hardware rates, and targets.

Unlike in `model_shapes`, what experts compute reaches the logits, so that outputs can be compared.
"""

import argparse
import contextlib
import functools
import gc
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe_runtime.benchmarks.harness.scripting import Main, ScriptResults, option, script
from moe_runtime.benchmarks.suite import Metric
from moe_runtime.benchmarks.synthetic import model_shapes
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn

TINY = model_shapes.make_shape("qwen3_moe", "tiny", 2, 8, 2, 64, 32, 2, 320, 10**6, 1, 32)
MEMORY_FOLDER = Path("/dev/shm")
MEMORY = ("budget_bytes", "peak_bytes", "peak_reserved_bytes")
CPU_EXPERTS = 30
"""Enough experts to exceed the caches."""
REHEARSED: dict[str, Any] = {
    "tiny": option(False, "a tiny shape, as a rehearsal"),
    "device": option("cuda", choices=("cuda", "cpu")),
}
Repetitions = list[dict[str, float]]


def gpu_script(**declared: Any) -> Callable[[Main], Callable[..., int]]:
    """Like `script`, on a GPU; without one a rehearsal."""

    return lambda main: script(**REHEARSED, **declared)(on_gpu(main))


def on_gpu(main: Main) -> Main:
    """Refuse to run without a GPU, unless a rehearsal is asked for."""

    @functools.wraps(main)
    def checked(options: argparse.Namespace) -> int:
        if options.device == "cuda" and not torch.cuda.is_available():
            print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
            return 2
        return main(options)

    return checked


def shape_of(name: str, num_layers: int, *, is_tiny: bool) -> model_shapes.ModelShape:
    """A named shape with fewer layers, or the tiny shape of a rehearsal."""
    return TINY if is_tiny else replace(model_shapes.SHAPES[name], num_layers=num_layers)


@contextlib.contextmanager
def drawn_checkpoint(shape: model_shapes.ModelShape, device: str) -> Iterator[Path]:
    """The folder of a checkpoint, in /dev/shm if it fits twice. Its parent is temporary."""
    generator = torch.Generator(device).manual_seed(0)

    def make(plan: model_shapes.TensorPlan, seed: int) -> list[Any]:
        del seed
        values = torch.ones(plan.shape, dtype=torch.bfloat16, device=device)
        if plan.std is not None:
            std = model_shapes.WEIGHT_STD if plan.std == model_shapes.SMALL_STD else plan.std
            values.normal_(std=std, generator=generator)
        return [values.cpu().view(torch.uint16).numpy()]

    place = MEMORY_FOLDER
    if not place.is_dir() or shutil.disk_usage(place).free < 2 * shape.total_bytes:
        place = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-", dir=place) as folder:
        model_shapes.write_checkpoint(shape, Path(folder, "model"), make=make)
        yield Path(folder, "model")


class Rates(NamedTuple):
    """Bytes per second of a copy within the device (reads and writes both counted) and of a copy
    from pinned memory (None on a CPU), and seconds of an expert of one row on the CPU."""

    copy_bytes_s: float
    link_bytes_s: float | None
    cpu_expert_s: float


def measure_rates(shape: model_shapes.ModelShape, device: str, num_bytes: int) -> Rates:
    """Measure with tensors of `num_bytes` and with experts of the shape."""
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
    """Median seconds of a call after one warm-up, including the device's work."""
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
    """Free the memory of a deleted model."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def device_memory(plan: Any) -> dict[str, int]:
    """The budget on a GPU, and the peak of torch's memory beyond it."""
    if plan is None:
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return dict(zip(MEMORY, (plan.budget_bytes, *peaks), strict=True))


class GpuResults(ScriptResults):
    """Results with targets. The file is named after the GPU."""

    def __init__(
        self,
        kind: str,
        file: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        metrics: Mapping[str, Metric],
    ) -> None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        settings = {"gpu": gpu, **settings, "aims": dict[str, Any]()}
        super().__init__(kind, options, settings, metrics, file=file, machine=gpu or "rehearsal")

    def aim(
        self, what: str, field: str, asked: float, measured: float, *, at_most: bool = False
    ) -> None:
        """Record a target and the measured value."""
        holds = measured <= asked if at_most else measured >= asked
        aim = {"sign": "<=" if at_most else ">=", "asked": asked, "measured": measured}
        self.settings["aims"][f"{what}: {field}"] = aim | {"holds": holds}

    def finish(self) -> int:
        for what, aim in self.settings["aims"].items():
            numbers = f"{aim['sign']} {aim['asked']:<12.6g} {aim['measured']:<12.6g}"
            print(f"{what:62} {numbers} {'holds' if aim['holds'] else 'MISSED'}")
        return super().finish()
