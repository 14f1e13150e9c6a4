"""What a GPU, the link to it and the CPU beside it can do: the bounds of decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.native import native_library

CPU_EXPERTS = 30
"""Enough to lie in memory, not in a cache."""


class Rates(NamedTuple):
    """Bytes a second of a copy within the device, read and written bytes both counted; of a copy
    from pinned memory to the device, None on a CPU; and seconds of an expert with one row on the
    CPU, as kernels compute it here, and with other threads: torch's or their own, so many."""

    copy_bytes_s: float
    link_bytes_s: float | None
    cpu_expert_s: float
    cpu_expert_s_by_threads: dict[str, float]


def measure_rates(shape: ModelShape, device: str, num_bytes: int) -> Rates:
    """Measures with tensors of `num_bytes`, and with experts of the shape."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    link_s = None
    if device == "cuda":
        pinned = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        link_s = median_s(lambda: target.copy_(pinned, non_blocking=True), device)
    cpu_expert_s, by_threads = _cpu_expert_s(shape)
    return Rates(
        copy_bytes_s=2 * num_bytes / copy_s,
        link_bytes_s=None if link_s is None else num_bytes / link_s,
        cpu_expert_s=cpu_expert_s,
        cpu_expert_s_by_threads=by_threads,
    )


def _cpu_expert_s(shape: ModelShape) -> tuple[float, dict[str, float]]:
    width, hidden = shape.model_width, shape.expert_width

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.full((rows, cols), 0.01, dtype=torch.bfloat16)

    experts = [
        ExpertWeights(matrix(hidden, width), matrix(hidden, width), matrix(width, hidden))
        for _ in range(CPU_EXPERTS)
    ]
    x_TD = torch.ones(1, width, dtype=torch.bfloat16)
    y_TD = torch.empty_like(x_TD)

    def median() -> float:
        seconds = []
        for expert in experts:
            begun_s = time.perf_counter()
            expert_ffn(x_TD, [expert], [1], [0], [0], y_TD, activation="silu")
            seconds.append(time.perf_counter() - begun_s)
        return statistics.median(seconds)

    library, most = native_library(), torch.get_num_threads()
    found = median()
    if library is None or library.num_threads != most:
        return found, {}
    by_threads = {}
    for number in sorted({1, most // 4, most // 2, most - 1, most} - {0}):
        library.set_num_threads(number)
        for owner in ("torch's", "own"):
            torch.set_num_threads(number if owner == "torch's" else 1)
            if library.shares_threads() == (owner == "torch's"):
                by_threads[f"{number} {owner}"] = median()
    library.set_num_threads(most)
    torch.set_num_threads(most)
    return found, by_threads


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
    """Returns when a device has done what was queued."""
    if device == "cuda":
        torch.cuda.synchronize()
