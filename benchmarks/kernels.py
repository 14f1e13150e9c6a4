"""The expert kernels on a GPU beside transformers' own, whole layer, forward and backward.

`python benchmarks/kernels.py --save`: first a dense bf16 product and a copy; then every shape and
backend: TFLOP/s (6 T K D F forward, 12 T K D F backward), shares of the dense product and of the
copy's bandwidth, what the forward pass keeps beside the closed form 2 T D + 4 T K F bytes, and the
peak of both passes. Then single products and quantised layers, and what is aimed at. `--shape` and
`--only` measure less. `--device cpu --tiny` is a rehearsal without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moe_runtime.benchmarks.harness.gpu import GpuResults, add_options, lacks_gpu
from moe_runtime.benchmarks.harness.gpu import median_s as wall_median_s
from moe_runtime.benchmarks.harness.scripting import run_script
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import ActivationSpec, QuantizedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.quantized import SCALES, QuantizedStack, WeightFormat
from moe_runtime.kernels.token_sort import token_sort

BYTES = 2  # of a bf16 number
# E, rows of an expert, D, F, and the exponent of the skewed loads.
SIZES, TINY_SIZES = (64, 512, 2048, 1024), (4, 16, 32, 16)
ZIPF = 1.0
PROJECTIONS, _LAYERS = "a token's queries, keys, values", 8


@torch.no_grad()
def measure_products(device: str, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of each product and of what it is held to; `ratio` is theirs over ours."""
    E, rows, D, F = TINY_SIZES if tiny else SIZES
    num_rows = E * rows
    x = torch.randn(num_rows, D, device=device).bfloat16()
    weight = torch.randn(E, F, D, device=device).bfloat16() * D**-0.5
    offsets = torch.arange(0, num_rows + 1, rows, device=device)
    equal = x.view(E, rows, D)
    batched_s = median_s(lambda: torch.bmm(equal, weight.mT), device)
    found = {
        "grouped product": (median_s(lambda: grouped_gemm(x, weight, offsets), device), batched_s)
    }

    columns = ExpertColumns.of([F] * E, block_columns=128 if not tiny else 16, device=device)
    topology = expert_topology(
        offsets, columns, num_rows=num_rows, block_rows=128 if not tiny else 16
    ).trimmed()
    flat = weight.flatten(0, 1)
    found["sampled dense-dense"] = (median_s(lambda: sdd(x, flat.T, topology), device), batched_s)
    values = sdd(x, flat.T, topology)
    hidden = torch.bmm(equal, weight.mT)
    back_s = median_s(lambda: torch.bmm(hidden, weight), device)
    found["dense-sparse"] = (median_s(lambda: dsd(values, flat, topology), device), back_s)

    counts = _zipf_counts(E, num_rows)
    skewed = torch.tensor([0, *counts], device=device).cumsum(0)
    padded = torch.zeros(E, max(counts), D, device=device, dtype=x.dtype)
    padded_s = median_s(lambda: torch.bmm(padded, weight.mT), device)
    found["skewed loads, beside padding"] = (
        median_s(lambda: grouped_gemm(x, weight, skewed), device),
        padded_s,
    )
    found["combine, beside a copy"] = _combine_beside_copy(x, device)
    layers = [torch.randn(3, D, D, device=device).bfloat16() for _ in range(_LAYERS)]
    ours_s, theirs_s = (
        graph_s(call, device) or median_s(call, device)
        for call in (partial(_projections, x[:1], layers, one) for one in (_together, _each))
    )
    found[PROJECTIONS] = ours_s / _LAYERS, theirs_s / _LAYERS
    return {
        name: {"seconds": ours, "peer_seconds": theirs, "ratio": theirs / ours}
        for name, (ours, theirs) in found.items()
    }


def _projections(x_1D: Tensor, layers: list[Tensor], project: Callable[..., Any]) -> None:
    """Queries, keys and values of one token in layer after layer, whose weights are no cache's."""
    for weights_3DD in layers:
        project(x_1D, *weights_3DD)


def _together(x_1D: Tensor, *weights: Tensor) -> None:
    if not x_1D.is_cuda or linears_of_a_row(x_1D, *((one, None) for one in weights)) is None:
        _each(x_1D, *weights)


def _each(x_1D: Tensor, *weights: Tensor) -> None:
    for one in weights:
        torch.nn.functional.linear(x_1D, one)


def _zipf_counts(num_experts: int, num_rows: int) -> list[int]:
    """Rows of each expert, as Zipf's law has them; the first one gets what rounding left."""
    shares = [1 / rank**ZIPF for rank in range(1, num_experts + 1)]
    counts = [int(num_rows * share / sum(shares)) for share in shares]
    counts[0] += num_rows - sum(counts)
    return counts


def _combine_beside_copy(y_RD: Tensor, device: str) -> tuple[float, float]:
    """Four rows to a token; the copy moves as many bytes, read and written together."""
    num_tokens, dim = len(y_RD) // 4, y_RD.shape[1]
    ids = torch.arange(4, device=y_RD.device).expand(num_tokens, 4).contiguous()
    order = token_sort(ids, 4)
    weights = torch.rand(num_tokens, 4, device=y_RD.device)
    num_copied = (y_RD.numel() + num_tokens * dim) // 2
    source = torch.zeros(num_copied, device=y_RD.device, dtype=y_RD.dtype)
    target = torch.empty_like(source)
    return median_s(lambda: combine(y_RD, weights, order), device), median_s(
        lambda: target.copy_(source), device
    )


# D, F, E, K of Qwen3-30B-A3B, and the numbers of tokens.
LAYER, TINY_LAYER = (2048, 768, 128, 8), (128, 128, 4, 2)
TOKENS, TINY_TOKENS = (1, 8, 128, 8192), (4, 40)
FEW_TOKENS = 16
FORMATS = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "fp8 blocks": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "int4 groups of 32": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    "int4 groups of 128": WeightFormat("uint4", "bf16", group_cols=128, has_zero_points=True),
}
ACTIVATION = ActivationSpec("silu")


@torch.no_grad()
def measure_packed(device: str, copy_bytes_s: float, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of each format and number of tokens, beside those of the values."""
    D, F, E, K = TINY_LAYER if tiny else LAYER
    found = {}
    for name, kind in FORMATS.items():
        gate, up = (_stack(kind, E, F, D, device) for _ in range(2))
        experts = QuantizedExperts(gate=gate, up=up, down=_stack(kind, E, D, F, device))
        for num_tokens in TINY_TOKENS if tiny else TOKENS:
            x = torch.randn(num_tokens, D, device=device).bfloat16()
            scores = torch.randn(num_tokens, E, device=device).softmax(-1)
            weights, ids = scores.topk(K)

            few = num_tokens <= FEW_TOKENS
            turns = [(ids + turn * K) % E for turn in range(max(1, E // ids.numel()) if few else 1)]
            wide = experts.widened(torch.arange(E, device=device) if few else ids, x.dtype)
            ours, theirs = (
                _seconds(partial(_in_turn, x, turns, weights, each), few, device) / len(turns)
                for each in (experts, wide)
            )
            written = median_s(partial(_written_out, x, ids, weights, experts), device)
            del wide
            num_bytes = len(ids.unique()) * _bytes(experts) / E
            found[f"{name}, T={num_tokens}"] = {
                "seconds": ours,
                "peer_seconds": theirs,
                "ratio": theirs / ours,
                "written_ratio": written / ours,
                "read_of_copy": num_bytes / ours / copy_bytes_s,
            }
    return found


def _seconds(call: Callable[[], Any], few: bool, device: str) -> float:
    call()  # kernels are compiled
    found = graph_s(call, device) if few else None
    return median_s(call, device) if found is None else found


def _in_turn(x: Tensor, turns: list[Tensor], weights: Tensor, experts: Any) -> None:
    for ids in turns:
        expert_mlp(x, ids, weights, experts, activation=ACTIVATION)


def _written_out(x: Tensor, ids: Tensor, weights: Tensor, experts: QuantizedExperts) -> Tensor:
    return expert_mlp(x, ids, weights, experts.widened(ids, x.dtype), activation=ACTIVATION)


def _stack(kind: WeightFormat, E: int, N: int, K: int, device: str) -> QuantizedStack:
    """Codes of any value under scales that keep activations of their size."""
    codes = torch.randint(0, 256, (E, N, kind.row_bytes(K)), dtype=torch.uint8, device=device)
    if kind.codes == "e4m3":
        # no NaN
        codes.bitwise_and_(0xF7)
    groups = (E, *kind.scales_shape(N, K))
    if kind.scales == "e8m0":
        scales = torch.full(groups, 120, dtype=torch.uint8, device=device)
    else:
        scales = torch.full(groups, 2.0**-10, device=device).to(SCALES[kind.scales])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.has_zero_points else None
    return QuantizedStack(kind, K, codes, scales, zeros)


def _bytes(experts: QuantizedExperts) -> int:
    total = 0
    for stack in (experts.gate, experts.up, experts.down):
        if stack is not None:
            parts = (stack.codes, stack.scales, stack.zero_points)
            total += sum(part.nbytes for part in parts if part is not None)
    return total


OURS, PEER = "moe_runtime", "grouped_mm"
# What is aimed at on an H100: at least, or for seconds at most. `of_peer`: times as fast as PEER.
MANY_TOKENS = {
    "forward_tflops": 480,
    "both_tflops": 430,
    "forward_of_peer": 1.2,
    "both_of_peer": 1.2,
}
DECODING = {"graph_read_of_copy": 0.7, "forward_of_peer": 1.0}
AIMS: dict[str, dict[str, float]] = {
    "120b": MANY_TOKENS,
    "fine-grained": {**MANY_TOKENS, "forward_tflops": 330, "both_tflops": 330},
    "qwen3-30b T=65536": MANY_TOKENS,
    "qwen3-30b T=16384": MANY_TOKENS,
    "qwen3-30b T=128": {"forward_s": 0.45e-3, "forward_of_peer": 1.0, "both_of_peer": 1.0},
    "qwen3-30b T=8": DECODING,
    "qwen3-30b T=1": DECODING,
    "olmoe-1b-7b T=1": DECODING,
    "tiny": {"forward_s": 1.0, "both_of_peer": 1.0},
}
PRODUCT_AIMS = {
    "grouped product": 0.9,
    "sampled dense-dense": 0.9,
    "dense-sparse": 0.9,
    "skewed loads, beside padding": 1.0,
    "combine, beside a copy": 0.7,
    PROJECTIONS: 1.5,
}
# Beside the same layer in bf16, which reads 3.6 to 3.9 times as many bytes as 4-bit codes and twice
# as many as fp8. With many tokens bytes do not count, and decoding costs.
PACKED_FEW_TOKENS = ("T=1", "T=4", "T=8")
PACKED_AIMS = {"few": 1.6, "many": 0.7}


def note_aims(results: GpuResults) -> None:
    """Writes every figure that is aimed at beside the measured one, of what was measured."""
    results.settings["aims"] = {}
    for name in results.systems:
        if (ratio := results.value(name, "ratio")) is not None:
            few = "few" if name.endswith(PACKED_FEW_TOKENS) else "many"
            results.aim(name, "ratio", PRODUCT_AIMS.get(name, PACKED_AIMS[few]), ratio)
    for name, shape in results.settings["shapes"].items():

        def value(field: str, name: str = name) -> float | None:
            if not field.endswith("_of_peer"):
                return results.value(f"{name}, {OURS}", field)
            seconds = field.replace("_of_peer", "_s")
            ours, peer = (results.value(f"{name}, {one}", seconds) for one in (OURS, PEER))
            return peer / ours if ours is not None and peer is not None else None

        for field, asked in AIMS[name].items():
            if (measured := value(field)) is not None:
                results.aim(name, field, asked, measured, at_most=field.endswith("_s"))
        if (kept := value("kept_bytes")) is not None:
            # Beside the closed form: gate weights, the order of the rows and their offsets.
            rows = shape["T"] * shape["K"]
            asked = shape["closed_form_bytes"] + (2 + 8) * rows + 8 * (shape["E"] + 1) + 4096
            results.aim(name, "kept_bytes", asked, kept, at_most=True)
    results.write()


# A loop over experts takes long with many tokens.
EAGER, EAGER_TOKENS = "eager", 128
# Copies the weights of every choice: transformers' own choice for decoding, hopeless for batches.
FEW_TOKENS_BACKEND = "batched_mm"
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
    shapes = TINY if is_tiny else SHAPES
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
    if "products" in options.only:
        add_products(results, measure_products(device, tiny=is_tiny))
    if "packed" in options.only:
        add_products(results, measure_packed(device, peak.copy_bytes_s, tiny=is_tiny))
    results.finish()
    return 0


def add_products(results: GpuResults, rows: Mapping[str, dict[str, float]]) -> None:
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
    kept_bytes = None
    if before is not None:  # what it left allocated without its output, and its input
        kept_bytes = torch.cuda.memory_allocated() - before - out.nbytes + x.nbytes
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
    # Weights of the experts that some token chose, each read once.
    read_of_copy = len(ids.unique()) * shape.expert_bytes / peak.copy_bytes_s
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


def both_passes_peak(
    forward: Callable[[], Tensor], inputs: list[Tensor], device: str
) -> int | None:
    """Most bytes that a forward and a backward pass held beside parameters and input."""
    before = allocated(device)
    if before is None:
        return None
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return torch.cuda.max_memory_allocated() - before


def allocated(device: str) -> int | None:
    """Bytes that tensors hold on the GPU; None without one."""
    return torch.cuda.memory_allocated() if device == "cuda" else None


def median_s(call: Callable[[], Any], device: str) -> float:
    """Median seconds of a call; by the GPU's own clock, with a cold cache, where there is one."""
    if device != "cuda":
        return wall_median_s(call, device)
    from triton.testing import do_bench

    call()
    return cast(float, do_bench(call, return_mode="median")) / 1e3


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
