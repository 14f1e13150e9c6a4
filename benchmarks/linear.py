"""Speed of the native kernels beside torch: `python benchmarks/linear.py`.

Prints gigabytes of weights read a second (at few rows the machine's memory is the limit) and
floating-point operations (at many rows its arithmetic is) for single products and for a layer of
eight experts. Each measurement goes through enough different weights that no cache helps, several
times over; the median counts. The two implementations take turns in blocks, never call by call,
so that neither meets the other's threads still spinning.
"""

from __future__ import annotations

import argparse
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from harness.machine import commit, describe_machine, versions
from torch import Tensor

from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.native import NativeLibrary, require_native

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = ((2048, 2048), (1024, 2048), (50304, 2048))
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
EXPERT_DIM, EXPERT_HIDDEN, NUM_EXPERTS = 2048, 1024, 8
IMPLS = ("native", "torch")


def main() -> None:
    arguments = _arguments()
    library = require_native()
    library.select_isa(arguments.isa or library.isa)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
        library.set_num_threads(arguments.threads)
    _print_machine(library)
    memory = huge_pages(arguments.mib << 20)
    memory.view(torch.int16).fill_(0x2C01)  # a small positive number in each of the three types
    print(
        f"memory: {read_bandwidth(library, memory):.1f} GB/s read by {library.num_threads} threads"
    )
    print(f"\n{'weights':>20} {'rows':>5} {'native':>24} {'torch':>24} {'ratio':>6}")
    with torch.inference_mode():
        for name in arguments.dtypes:
            weights = memory.view(DTYPES[name])
            for shape in SHAPES:
                for rows in arguments.rows:
                    calls = linear_calls(weights, shape, rows)
                    _print_row(f"{name} {shape[0]}x{shape[1]}", rows, calls, arguments.repeats)
            for rows in arguments.rows:
                calls = expert_calls(weights, rows)
                _print_row(f"{name} {NUM_EXPERTS} experts", rows, calls, arguments.repeats)
    print(f"memory: {read_bandwidth(library, memory):.1f} GB/s at the end")


def huge_pages(num_bytes: int) -> Tensor:
    """Bytes in huge pages where the system has them: with small ones, address translation costs
    two fifths of the bandwidth on a virtual machine."""
    huge_page = 2 << 20
    memory = mmap.mmap(-1, num_bytes + huge_page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return flat[-flat.data_ptr() % huge_page :][:num_bytes]


class Calls:
    """The same work by either implementation.

    Attributes:
        run: Does all of it once, by the named implementation.
        weight_bytes: Bytes of weights it reads.
        operations: Floating-point operations, a multiplication and an addition counting as two.
    """

    def __init__(self, run: Callable[[str], None], weight_bytes: int, rows: int, size: int) -> None:
        self.run = run
        self.weight_bytes = weight_bytes
        self.operations = 2 * rows * weight_bytes // size


def linear_calls(memory: Tensor, shape: tuple[int, int], rows: int) -> Calls:
    """One product with each of the matrices of `shape` that fit into `memory`."""
    dim_out, dim_in = shape
    count = max(1, memory.numel() // (dim_out * dim_in))
    count = _fewer(count, rows, dim_out * dim_in)
    matrices = memory[: count * dim_out * dim_in].view(count, dim_out, dim_in).unbind()
    x = torch.ones(rows, dim_in, dtype=memory.dtype)

    def run(impl: str) -> None:
        for matrix in matrices:
            linear(x, matrix, impl=impl)  # type: ignore[arg-type]

    size = memory.element_size()
    return Calls(run, count * dim_out * dim_in * size, rows, size)


def expert_calls(memory: Tensor, rows: int) -> Calls:
    """Eight experts a call, each with the same number of rows."""
    dim, hidden = EXPERT_DIM, EXPERT_HIDDEN
    per_expert = 3 * dim * hidden
    layers = max(1, memory.numel() // (per_expert * NUM_EXPERTS))
    layers = _fewer(layers, rows, per_expert * NUM_EXPERTS)
    flat = memory[: layers * NUM_EXPERTS * per_expert].view(-1, 3, hidden * dim)
    experts = [
        ExpertWeights(gate.view(hidden, dim), up.view(hidden, dim), down.view(dim, hidden))
        for gate, up, down in flat
    ]
    x = torch.ones(rows, dim, dtype=memory.dtype)
    out = torch.empty(NUM_EXPERTS * rows, dim, dtype=memory.dtype)
    token_ids = torch.arange(rows).repeat(NUM_EXPERTS)
    destinations = torch.arange(NUM_EXPERTS * rows)
    counts = [rows] * NUM_EXPERTS

    def run(impl: str) -> None:
        for first in range(0, len(experts), NUM_EXPERTS):
            layer = experts[first : first + NUM_EXPERTS]
            expert_ffn(x, layer, counts, token_ids, destinations, out, activation="silu", impl=impl)  # type: ignore[arg-type]

    size = memory.element_size()
    return Calls(run, len(experts) * per_expert * size, rows, size)


def _fewer(count: int, rows: int, elements: int) -> int:
    """Fewer matrices where each takes long anyway, but no less than defeats the caches."""
    enough = max(1, int(3e10 / (2 * rows * elements)), int(1e8 / elements))
    return min(count, enough)


def measure(calls: Calls, repeats: int) -> dict[str, float]:
    """Median seconds of one run, by implementation."""
    seconds: dict[str, list[float]] = {impl: [] for impl in IMPLS}
    for impl in IMPLS:
        calls.run(impl)
        for _ in range(repeats):
            start = time.perf_counter()
            calls.run(impl)
            seconds[impl].append(time.perf_counter() - start)
    return {impl: statistics.median(values) for impl, values in seconds.items()}


def read_bandwidth(library: NativeLibrary, memory: Tensor) -> float:
    """Gigabytes a second that all threads together read, the best of five."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        library.read(memory)
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best / 1e9


def _print_row(label: str, rows: int, calls: Calls, repeats: int) -> None:
    seconds = measure(calls, repeats)
    cells = [
        f"{calls.weight_bytes / s / 1e9:7.1f} GB/s {calls.operations / s / 1e9:6.0f} GF/s"
        for s in seconds.values()
    ]
    ratio = seconds["torch"] / seconds["native"]
    print(f"{label:>20} {rows:>5} {cells[0]:>24} {cells[1]:>24} {ratio:>6.2f}", flush=True)


def _print_machine(library: NativeLibrary) -> None:
    facts = describe_machine()
    print(f"{facts['cpu']}, {facts['num_cores']} cores, {facts['system']}")
    print(f"native kernels: {library.isa}; torch {versions()['torch']}")
    print(f"commit {commit(Path(__file__).parent.parent)}")


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--threads", type=int, help="of torch and of the kernels")
    parser.add_argument("--isa", help="instruction set; the best by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mib", type=int, default=768, help="memory for weights")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
