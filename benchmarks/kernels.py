"""The expert kernels on a GPU beside transformers' own, whole layer, forward and backward.

One command: `python benchmarks/kernels.py --save`. First what the GPU can do: a dense bf16 product
and a copy. Then every shape, every backend in turn, medians by the GPU's own clock: TFLOP/s
(6 T K D F forward, 12 T K D F backward), the share of the dense product's, the share of the copy's
bandwidth at which the active experts were read, what the forward pass keeps for the backward pass
beside the closed form 2 T D + 4 T K F bytes, and the peak of both passes. The forward pass is timed
as a CUDA graph too, but for eager, whose loop over experts asks the device for numbers: without the
launches, as a decoding loop would run it. Then single products beside batched ones, and layers of
quantised experts beside the same in bf16; last, what is aimed at beside what came out. `--shape`
and `--only` measure less. `--device cpu --tiny` is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.benchmarks.gpu_parts.gpu_results import GpuResults, add_options, lacks_gpu
from moe_runtime.benchmarks.gpu_parts.kernel_aims import OURS, PEER, note_aims
from moe_runtime.benchmarks.gpu_parts.kernel_products import measure_products
from moe_runtime.benchmarks.gpu_parts.packed_products import measure_packed
from moe_runtime.benchmarks.harness.interrupts import run_script
from moe_runtime.benchmarks.suite.results import Metric

BYTES = 2  # of a bf16 number
# A loop over experts: with many tokens it takes long, and nobody would choose it.
EAGER, EAGER_TOKENS = "eager", 128
# Copies the weights of every choice: transformers' own choice for decoding, hopeless for batches.
FEW_TOKENS_BACKEND, FEW_TOKENS = "batched_mm", 16
_RATES = ("forward_tflops", "backward_tflops", "both_tflops")
_SHARES = ("forward_of_dense", "read_of_copy", "graph_read_of_copy", "ratio", "written_ratio")
_SECONDS = ("forward_s", "backward_s", "both_s", "graph_forward_s", "seconds")
METRICS = {
    **{name: Metric("s") for name in _SECONDS},
    "peer_seconds": Metric("s", is_judged=False),
    **{name: Metric("TFLOP/s", "more", is_judged=False) for name in _RATES},
    **{name: Metric("share", "more", is_judged=False) for name in _SHARES},
    "kept_bytes": Metric("bytes"),
    "peak_bytes": Metric("bytes"),
}


class Shape(NamedTuple):
    """A layer and its batch: tokens, model width, expert width, experts, choices of a token."""

    T: int
    D: int
    F: int
    E: int
    K: int

    @property
    def forward_flops(self) -> int:
        """Of the three products; the backward pass has twice as many."""
        return 6 * self.T * self.K * self.D * self.F

    @property
    def expert_bytes(self) -> int:
        return 3 * self.D * self.F * BYTES

    @property
    def kept_bytes(self) -> int:
        """The least to keep for the backward pass: the input, and gate and up of every row."""
        return BYTES * self.T * self.D + 2 * BYTES * self.T * self.K * self.F


SHAPES = {
    "qwen3-30b T=16384": Shape(16384, 2048, 768, 128, 8),
    "qwen3-30b T=65536": Shape(65536, 2048, 768, 128, 8),
    "qwen3-30b T=1": Shape(1, 2048, 768, 128, 8),
    "olmoe-1b-7b T=1": Shape(1, 2048, 1024, 64, 8),
    "qwen3-30b T=8": Shape(8, 2048, 768, 128, 8),
    "qwen3-30b T=128": Shape(128, 2048, 768, 128, 8),
    "120b": Shape(32768, 4096, 1024, 128, 8),
    "fine-grained": Shape(32768, 4096, 256, 256, 16),
}
TINY = {"tiny": Shape(32, 64, 48, 8, 2)}


class Peak(NamedTuple):
    """What the device can do: TFLOP/s of a dense bf16 product, bytes a second of a copy."""

    tflops: float
    copy_bytes_s: float


def main() -> int:
    options = _arguments()
    if lacks_gpu(options):
        return 2
    import moe_runtime

    moe_runtime.register_with_transformers()
    device, is_tiny = options.device, options.tiny
    peak = measure_peak(device, 256 if is_tiny else 8192)
    settings = {"dense_tflops": peak.tflops, "copy_bytes_s": peak.copy_bytes_s, "shapes": {}}
    results = GpuResults("device-kernels", "kernels", options, settings, METRICS)
    print(f"dense product {peak.tflops:.1f} TFLOP/s, copy {peak.copy_bytes_s / 1e9:.0f} GB/s")
    timer, shapes = partial(median_s, device=device), TINY if is_tiny else SHAPES
    for name in options.shape or shapes if "shapes" in options.only else ():
        shape = shapes[name]
        experts = layer(shape, device)
        closed = {"closed_form_bytes": shape.kept_bytes}
        results.settings["shapes"][name] = shape._asdict() | closed
        for backend in backends_of(shape):
            row = measure(experts, shape, backend, device, peak)
            results.add(f"{name}, {backend}", [row])
            print(line(name, backend, row, shape), flush=True)
        del experts
        note_aims(results)
    graphs = partial(graph_s, device=device)
    if "products" in options.only:
        add_products(results, measure_products(device, timer, graphs, tiny=is_tiny))
    if "packed" in options.only:
        add_products(
            results, measure_packed(device, timer, graphs, peak.copy_bytes_s, tiny=is_tiny)
        )
    results.finish()
    return 0


def add_products(results: GpuResults, rows: Mapping[str, dict[str, float]]) -> None:
    """Takes rows of products, and says them."""
    for name, row in rows.items():
        results.add(name, [row])
        note_aims(results)
        share = f", reads {row['read_of_copy']:4.0%} of copy" if "read_of_copy" in row else ""
        print(f"{name:30} {row['seconds'] * 1e3:8.3f} ms, {row['ratio']:5.2f} times as fast{share}")


def backends_of(shape: Shape) -> list[str]:
    """Those that are worth measuring, the fewest tokens' too."""
    few = [FEW_TOKENS_BACKEND] if shape.T <= FEW_TOKENS else []
    return [EAGER] * (shape.T <= EAGER_TOKENS) + [PEER, OURS] + few


def layer(shape: Shape, device: str) -> Any:
    """The experts of one Qwen3-MoE layer with random weights."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=shape.D,
        moe_intermediate_size=shape.F,
        num_experts=shape.E,
        num_experts_per_tok=shape.K,
    )
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    return experts


def measure_peak(device: str, size: int) -> Peak:
    """A square product of that side length, and a copy of eight times as many numbers."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    product_s = median_s(lambda: left @ right, device)
    source = torch.empty(4 * size, 2 * size, device=device, dtype=torch.bfloat16).zero_()
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    return Peak(2 * size**3 / product_s / 1e12, 2 * BYTES * source.numel() / copy_s)


def measure(
    experts: Any, shape: Shape, backend: str, device: str, peak: Peak
) -> dict[str, float | None]:
    """Seconds, shares of the peak and kept bytes of one backend."""
    experts.config._experts_implementation = backend
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape.T, shape.D, device=device, generator=generator).bfloat16()
    x.requires_grad_()
    scores = torch.randn(shape.T, shape.E, device=device, generator=generator).softmax(-1)
    weights, ids = scores.topk(shape.K)
    weights = weights.to(x.dtype)

    def forward() -> Tensor:
        with torch.no_grad():
            return experts(x, ids, weights)

    forward_s = median_s(forward, device)
    inputs = [x, *experts.parameters()]
    peak_bytes = both_passes_peak(lambda: experts(x, ids, weights), inputs, device)
    before = allocated(device)
    out = experts(x, ids, weights)
    kept_bytes = None if before is None else kept(before, cast(int, allocated(device)), x, out)
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    backward_s = median_s(backward, device)
    del out, backward

    def both() -> Any:
        return torch.autograd.grad(experts(x, ids, weights), inputs, grad)

    both_s = median_s(both, device)
    # Other experts every time, as in layer after layer of a decoding loop: none is in the cache.
    turns = [(ids + turn * shape.K) % shape.E for turn in range(max(1, shape.E // ids.numel()))]

    def in_turn() -> None:
        with torch.no_grad():
            for turn in turns:
                experts(x, turn, weights)

    # Captured, an eager loop leaves the generator of random numbers in a state of no use.
    all_turns_s = None if backend == EAGER else graph_s(in_turn, device)
    graph_forward_s = None if all_turns_s is None else all_turns_s / len(turns)
    read_of_copy = active_bytes(ids, shape) / peak.copy_bytes_s
    forward_tflops = shape.forward_flops / forward_s / 1e12
    backward_tflops = 2 * shape.forward_flops / backward_s / 1e12
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "both_s": both_s,
        "graph_forward_s": graph_forward_s,
        "forward_tflops": forward_tflops,
        "backward_tflops": backward_tflops,
        "both_tflops": 3 * shape.forward_flops / both_s / 1e12,
        "forward_of_dense": forward_tflops / peak.tflops,
        "read_of_copy": read_of_copy / forward_s,
        "graph_read_of_copy": None if graph_forward_s is None else read_of_copy / graph_forward_s,
        "kept_bytes": kept_bytes,
        "peak_bytes": peak_bytes,
    }


def kept(before: int, after: int, x: Tensor, out: Tensor) -> int:
    """What a forward pass keeps: what it left allocated without its output, and its input."""
    return after - before - out.numel() * out.element_size() + x.numel() * x.element_size()


def both_passes_peak(
    forward: Callable[[], Tensor], inputs: list[Tensor], device: str
) -> int | None:
    """Most bytes that a forward and a backward pass held beside parameters and input.

    The gradients of the parameters are among them.
    """
    before = allocated(device)
    if before is None:
        return None
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return torch.cuda.max_memory_allocated() - before


def active_bytes(ids_TK: Tensor, shape: Shape) -> int:
    """Weights of the experts that some token chose, each read once."""
    return len(ids_TK.unique()) * shape.expert_bytes


def allocated(device: str) -> int | None:
    """Bytes that tensors hold on the GPU; None without one."""
    return torch.cuda.memory_allocated() if device == "cuda" else None


def median_s(call: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Median seconds of a call; by the GPU's own clock, with a cold cache, where there is one."""
    call()
    if device == "cuda":
        from triton.testing import do_bench

        return cast(float, do_bench(call, return_mode="median")) / 1e3
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def graph_s(call: Callable[[], Any], device: str) -> float | None:
    """Seconds of a call as a replayed CUDA graph; None where it cannot be captured."""
    if device != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        # A backend that asks the device for a number.
        torch.cuda.synchronize()
        return None
    return median_s(graph.replay, device)


def line(name: str, backend: str, row: dict[str, float | None], shape: Shape) -> str:
    """One row for the terminal."""

    def milliseconds(field: str) -> str:
        seconds = row[field]
        return "       -" if seconds is None else f"{seconds * 1e3:8.3f}"

    text = (
        f"{name:18} {backend:12} forward {milliseconds('forward_s')} ms (graph "
        f"{milliseconds('graph_forward_s')}) {row['forward_tflops']:6.1f} TFLOP/s "
        f"{row['forward_of_dense']:4.0%} of dense, reads {row['read_of_copy']:4.0%} of copy | "
        f"backward {milliseconds('backward_s')} ms {row['backward_tflops']:6.1f} TFLOP/s | "
        f"both {row['both_tflops']:6.1f} TFLOP/s"
    )
    if row["graph_read_of_copy"] is not None:
        text += f" | graph reads {row['graph_read_of_copy']:4.0%} of copy"
    if row["kept_bytes"] is not None:
        text += f" | keeps {row['kept_bytes'] / shape.kept_bytes:.2f} of the closed form"
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, "kernels")
    shapes = [*SHAPES]
    parser.add_argument("--shape", action="append", choices=shapes, help="this one, and others")
    parts = ("products", "packed", "shapes")
    parser.add_argument("--only", action="append", choices=parts, help="this part, and others")
    options = parser.parse_args()
    options.only = options.only or (["shapes"] if options.shape else parts)
    return options


if __name__ == "__main__":
    sys.exit(run_script(main))
