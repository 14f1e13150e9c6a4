"""The expert kernels on a GPU beside transformers' own, whole layer, forward and backward.

One command: `python benchmarks/kernels.py --out results.json`. Every shape runs transformers'
`grouped_mm` and ours in turn and reports medians. TFLOP/s count
6 T K D F forward and 12 T K D F backward. `--device cpu --tiny` is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

# T, D, F, E, K.
SHAPES = {
    "120b": (32768, 4096, 1024, 128, 8),
    "fine-grained": (32768, 4096, 256, 256, 16),
    "qwen3-30b T=8192": (8192, 2048, 768, 128, 8),
    "qwen3-30b T=128": (128, 2048, 768, 128, 8),
    "qwen3-30b T=8": (8, 2048, 768, 128, 8),
    "qwen3-30b T=1": (1, 2048, 768, 128, 8),
}
TINY = {"tiny": (32, 64, 48, 8, 2)}
BACKENDS = ("grouped_mm", "moe_runtime")


def median_s(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Median seconds of a call; the GPU's own clock where there is one."""
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


def layer(shape: tuple[int, ...], device: str) -> Any:
    """The experts of one Qwen3-MoE layer with random weights."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    _, dim, hidden, num_experts, top_k = shape
    config = Qwen3MoeConfig(
        hidden_size=dim,
        moe_intermediate_size=hidden,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    with torch.device(device):
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    return experts


def measure(experts: Any, shape: tuple[int, ...], backend: str, device: str) -> dict[str, float]:
    """Seconds, TFLOP/s and peak bytes of one backend."""
    num_tokens, dim, hidden, num_experts, top_k = shape
    experts.config._experts_implementation = backend
    x = torch.randn(num_tokens, dim, device=device, dtype=torch.bfloat16, requires_grad=True)
    scores = torch.randn(num_tokens, num_experts, device=device).softmax(-1)
    weights, ids = scores.topk(top_k)

    def forward() -> Tensor:
        with torch.no_grad():
            return experts(x, ids, weights.to(x.dtype))

    forward_s = median_s(forward, device, 5)
    out = experts(x, ids, weights.to(x.dtype))
    grad = torch.randn_like(out)
    inputs = [x, *experts.parameters()]
    backward_s = median_s(
        lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True), device, 5
    )
    flops = 6 * num_tokens * top_k * dim * hidden
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "forward_tflops": flops / forward_s / 1e12,
        "backward_tflops": 2 * flops / backward_s / 1e12,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="one tiny shape, as a rehearsal")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; rehearse with --device cpu --tiny")
    import moe_runtime

    moe_runtime.register_with_transformers()
    results: dict[str, Any] = {"torch": torch.__version__}
    if options.device == "cuda":
        results["gpu"] = torch.cuda.get_device_name()
    for name, shape in (TINY if options.tiny else SHAPES).items():
        experts = layer(shape, options.device)
        results[name] = {b: measure(experts, shape, b, options.device) for b in BACKENDS}
        for backend, row in results[name].items():
            print(
                f"{name:18} {backend:12} forward {row['forward_s'] * 1e3:9.3f} ms "
                f"{row['forward_tflops']:6.1f} TFLOP/s   "
                f"backward {row['backward_s'] * 1e3:9.3f} ms "
                f"{row['backward_tflops']:6.1f} TFLOP/s"
            )
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
