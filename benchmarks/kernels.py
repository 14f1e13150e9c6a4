"""The expert kernels on a GPU beside transformers' own, whole layer, forward and backward.

One command: `python benchmarks/kernels.py --out results.json`. First what the GPU can do: a dense
bf16 product and a copy. Then every shape, every backend in turn, medians by the GPU's own clock:
TFLOP/s (6 T K D F forward, 12 T K D F backward), the share of the dense product's, the share of the
copy's bandwidth at which the active experts were read, and what the forward pass keeps for the
backward pass beside the closed form 2 T D + 4 T K F bytes. Where a backend can be captured, the
forward pass is timed as a CUDA graph too: without the launches, as a decoding loop would run it.
`--device cpu --tiny` is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from harness.machine import commit, describe_machine, versions
from torch import Tensor

BYTES = 2  # of a bf16 number
BACKENDS = ("eager", "grouped_mm", "moe_runtime")


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
    "120b": Shape(32768, 4096, 1024, 128, 8),
    "fine-grained": Shape(32768, 4096, 256, 256, 16),
    "qwen3-30b T=8192": Shape(8192, 2048, 768, 128, 8),
    "qwen3-30b T=128": Shape(128, 2048, 768, 128, 8),
    "qwen3-30b T=8": Shape(8, 2048, 768, 128, 8),
    "qwen3-30b T=1": Shape(1, 2048, 768, 128, 8),
}
TINY = {"tiny": Shape(32, 64, 48, 8, 2)}


class Peak(NamedTuple):
    """What the device can do: TFLOP/s of a dense bf16 product, bytes a second of a copy."""

    tflops: float
    copy_bytes_s: float


def main() -> int:
    options = _arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
        return 2
    import moe_runtime

    moe_runtime.register_with_transformers()
    peak = measure_peak(options.device, 256 if options.tiny else 8192)
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(Path(__file__).parents[1]),
        "gpu": gpu,
        "dense_tflops": peak.tflops,
        "copy_bytes_s": peak.copy_bytes_s,
        "shapes": {},
    }
    print(f"dense product {peak.tflops:.1f} TFLOP/s, copy {peak.copy_bytes_s / 1e9:.0f} GB/s")
    for name, shape in (TINY if options.tiny else SHAPES).items():
        experts = layer(shape, options.device)
        rows = {b: measure(experts, shape, b, options.device, peak) for b in BACKENDS}
        results["shapes"][name] = {**shape._asdict(), "backends": rows}
        for backend, row in rows.items():
            print(line(name, backend, row, shape), flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n")
        del experts
    return 0


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
    before = allocated(device)
    out = experts(x, ids, weights)
    kept_bytes = None if before is None else kept(before, cast(int, allocated(device)), x, out)
    grad = torch.randn_like(out)
    inputs = [x, *experts.parameters()]
    backward_s = median_s(lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device)
    forward_tflops = shape.forward_flops / forward_s / 1e12
    backward_tflops = 2 * shape.forward_flops / backward_s / 1e12
    read_bytes_s = active_bytes(ids, shape) / forward_s
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "graph_forward_s": graph_s(forward, device),
        "forward_tflops": forward_tflops,
        "backward_tflops": backward_tflops,
        "forward_of_dense": forward_tflops / peak.tflops,
        "backward_of_dense": backward_tflops / peak.tflops,
        "read_of_copy": read_bytes_s / peak.copy_bytes_s,
        "kept_bytes": kept_bytes,
        "closed_form_bytes": shape.kept_bytes,
    }


def kept(before: int, after: int, x: Tensor, out: Tensor) -> int:
    """What a forward pass keeps: what it left allocated without its output, and its input."""
    return after - before - out.numel() * out.element_size() + x.numel() * x.element_size()


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
        # A backend that asks the device for a number, as eager's loop over experts does.
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
        f"backward {milliseconds('backward_s')} ms {row['backward_tflops']:6.1f} TFLOP/s"
    )
    if row["kept_bytes"] is not None:
        text += f" | keeps {row['kept_bytes'] / shape.kept_bytes:.2f} of the closed form"
    return text


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="one tiny shape, as a rehearsal")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
