"""The expert kernels on a GPU beside transformers' own, whole layer, forward and backward.

One command: `python benchmarks/kernels.py --save`. First what the GPU can do: a dense bf16 product
and a copy; then single products beside batched ones, and layers of quantised experts beside the
same in bf16. Then every shape, every backend in turn, medians by the GPU's own clock: TFLOP/s
(6 T K D F forward, 12 T K D F backward), the share of the dense product's, the share of the copy's
bandwidth at which the active experts were read, what the forward pass keeps for the backward pass
beside the closed form 2 T D + 4 T K F bytes, and the peak of both passes. Where a backend can be
captured, the forward pass is timed as a CUDA graph too: without the launches, as a decoding loop
would run it. Last, what is aimed at beside what came out. `--device cpu --tiny` is a rehearsal
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from harness.machine import commit, describe_machine, versions
from kernel_products import measure_products
from packed_products import measure_packed
from torch import Tensor

from moe_runtime.files import write_text

BYTES = 2  # of a bf16 number
OURS = "moe_runtime"
BACKENDS = ("eager", "grouped_mm", OURS)
# Copies the weights of every choice: transformers' own choice for decoding, hopeless for batches.
FEW_TOKENS_BACKEND, FEW_TOKENS = "batched_mm", 16
RESULTS = Path(__file__).parent / "results"


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
# What is aimed at on an H200: at least, or for seconds at most.
AIMS: dict[str, dict[str, float]] = {
    "120b": {"forward_tflops": 480, "backward_tflops": 430},
    "fine-grained": {"forward_tflops": 330, "backward_tflops": 330},
    "qwen3-30b T=8192": {"forward_s": 1.5e-3, "backward_s": 3.7e-3},
    "qwen3-30b T=128": {"forward_s": 0.32e-3},
    "qwen3-30b T=8": {"read_of_copy": 0.8},
    "qwen3-30b T=1": {"read_of_copy": 0.8},
    "tiny": {"forward_s": 1.0},
}
PRODUCT_AIMS = {
    "grouped product": 0.9,
    "sampled dense-dense": 0.9,
    "dense-sparse": 0.9,
    "skewed loads, beside padding": 1.0,
    "combine, beside a copy": 0.7,
}
# Beside the same layer in bf16, which reads 3.6 to 3.9 times as many bytes as 4-bit codes and twice
# as many as fp8. With many tokens bytes do not count, and decoding costs.
PACKED_FEW_TOKENS = ("T=1", "T=4", "T=8")
PACKED_AIMS = {"few": 1.6, "many": 0.7}


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
        "command": "python benchmarks/kernels.py --save",
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(Path(__file__).parents[1]),
        "gpu": gpu,
        "dense_tflops": peak.tflops,
        "copy_bytes_s": peak.copy_bytes_s,
        "products": {},
        "packed": {},
        "shapes": {},
        "aims": [],
    }
    path = options.out
    if options.save:
        name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
        path = RESULTS / f"kernels-{name}.json"
    print(f"dense product {peak.tflops:.1f} TFLOP/s, copy {peak.copy_bytes_s / 1e9:.0f} GB/s")
    timer = partial(median_s, device=options.device)
    results["products"] = measure_products(options.device, timer, tiny=options.tiny)
    results["packed"] = measure_packed(options.device, timer, peak.copy_bytes_s, tiny=options.tiny)
    for name, row in (results["products"] | results["packed"]).items():
        share = f", reads {row['read_of_copy']:4.0%} of copy" if "read_of_copy" in row else ""
        print(f"{name:30} {row['seconds'] * 1e3:8.3f} ms, {row['ratio']:5.2f} times as fast{share}")
    for name, shape in (TINY if options.tiny else SHAPES).items():
        experts = layer(shape, options.device)
        backends = BACKENDS + ((FEW_TOKENS_BACKEND,) if shape.T <= FEW_TOKENS else ())
        rows: dict[str, dict[str, float | None]] = {}
        results["shapes"][name] = {**shape._asdict(), "backends": rows}
        for backend in backends:
            rows[backend] = measure(experts, shape, backend, options.device, peak)
            print(line(name, backend, rows[backend], shape), flush=True)
        results["aims"] = list(compared(results))
        # After each shape: what was measured stays if the next one does not fit.
        if path is not None:
            write_text(path, json.dumps(results, indent=1) + "\n")
        del experts
    for aim in results["aims"]:
        print(aim_line(aim))
    return 0


def compared(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure that is aimed at beside the measured one, and the faster of the peers'."""
    for name, row in results["products"].items():
        yield _aim(name, "ratio", PRODUCT_AIMS[name], row["ratio"])
    for name, row in results["packed"].items():
        is_decoded = name.endswith(PACKED_FEW_TOKENS)
        yield _aim(name, "ratio", PACKED_AIMS["few" if is_decoded else "many"], row["ratio"])
    for name, shape in results["shapes"].items():
        ours = shape["backends"][OURS]
        for field, asked in AIMS[name].items():
            yield _aim(name, field, asked, ours[field])
        for field in ("forward_s", "backward_s"):
            asked = shape["backends"]["grouped_mm"][field]
            yield _aim(f"{name}, not slower than grouped_mm", field, asked, ours[field])
        if ours["kept_bytes"] is not None:
            # Beside the closed form: gate weights, the order of the rows and their offsets.
            rows = shape["T"] * shape["K"]
            asked = ours["closed_form_bytes"] + (2 + 8) * rows + 8 * (shape["E"] + 1) + 4096
            yield _aim(name, "kept_bytes", asked, ours["kept_bytes"])


def _aim(what: str, field: str, asked: float, measured: float) -> dict[str, Any]:
    is_upper = field.endswith(("_s", "_bytes"))
    holds = measured <= asked if is_upper else measured >= asked
    return {"what": what, "field": field, "asked": asked, "measured": measured, "holds": holds}


def aim_line(aim: dict[str, Any]) -> str:
    """One comparison for the terminal."""
    sign = "<=" if aim["field"].endswith(("_s", "_bytes")) else ">="
    verdict = "holds" if aim["holds"] else "MISSED"
    return (
        f"{aim['what']:45} {aim['field']:16} {sign} {aim['asked']:<12.6g} "
        f"{aim['measured']:<12.6g} {verdict}"
    )


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
        "peak_bytes": peak_bytes,
        "closed_form_bytes": shape.kept_bytes,
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
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kernels-GPU")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
