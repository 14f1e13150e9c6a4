"""The expert kernels on a GPU, compared with transformers': whole layers, forward and backward.

`python benchmarks/kernels.py --save`: first a dense bf16 product and a copy; then every shape and
backend: TFLOP/s (6 T K D F forward, 12 T K D F backward), shares of the dense product and of the
copy's bandwidth, what the forward pass keeps beside the closed form 2 T D + 4 T K F bytes, and the
peak of both passes. Then single products and quantised layers, and what is aimed at. `--shape` and
`--only` measure less. `--device cpu --tiny` is a rehearsal without a GPU.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import moe_runtime
from moe_runtime.benchmarks.cases.products import median_seconds
from moe_runtime.benchmarks.harness.gpu import GpuResults, gpu_script
from moe_runtime.benchmarks.harness.gpu import median_s as wall_median_s
from moe_runtime.benchmarks.harness.scripting import option
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import ActivationSpec, QuantizedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.quantized import SCALES, QuantizedStack, WeightFormat
from moe_runtime.kernels.token_sort import token_sort

BYTES = 2  # of a bf16 number
OURS, PEER, EAGER = "moe_runtime", "grouped_mm", "eager"
EAGER_TOKENS = 128  # a loop over more experts is slow
FEW_TOKENS, FEW_TOKENS_BACKEND = 16, "batched_mm"  # copies the weights of every choice
PARTS = ("products", "packed", "shapes")


class Shape(NamedTuple):
    """A layer and its batch: tokens, model width, expert width, experts, top-k."""

    T: int
    D: int
    F: int
    E: int
    K: int

    @property
    def forward_flops(self) -> int:
        """Of the three products; the backward pass takes twice as many."""
        return 6 * self.T * self.K * self.D * self.F

    @property
    def kept_bytes(self) -> int:
        """The least to keep for backward: the input, and gate and up of every row."""
        return BYTES * self.T * self.D + 2 * BYTES * self.T * self.K * self.F


# Targets on an H100: minima, or maxima for seconds. `of_peer`: speed relative to PEER.
MANY = {"forward_tflops": 480, "both_tflops": 430, "forward_of_peer": 1.2, "both_of_peer": 1.2}
DECODING = {"graph_read_of_copy": 0.7, "forward_of_peer": 1.0}
SHAPES: dict[str, tuple[Shape, Mapping[str, float]]] = {
    "qwen3-30b T=16384": (Shape(16384, 2048, 768, 128, 8), MANY),
    "qwen3-30b T=65536": (Shape(65536, 2048, 768, 128, 8), MANY),
    "qwen3-30b T=1": (Shape(1, 2048, 768, 128, 8), DECODING),
    "olmoe-1b-7b T=1": (Shape(1, 2048, 1024, 64, 8), DECODING),
    "qwen3-30b T=8": (Shape(8, 2048, 768, 128, 8), DECODING),
    "qwen3-30b T=128": (
        Shape(128, 2048, 768, 128, 8),
        {"forward_s": 0.45e-3, "forward_of_peer": 1.0, "both_of_peer": 1.0},
    ),
    "120b": (Shape(32768, 4096, 1024, 128, 8), MANY),
    "fine-grained": (
        Shape(32768, 4096, 256, 256, 16),
        {**MANY, "forward_tflops": 330, "both_tflops": 330},
    ),
}
TINY = {"tiny": (Shape(32, 64, 48, 8, 2), {"forward_s": 1.0, "both_of_peer": 1.0})}
PROJECTIONS, _LAYERS = "a token's queries, keys, values", 8
PRODUCT_AIMS = {
    **dict.fromkeys(("grouped product", "sampled dense-dense", "dense-sparse"), 0.9),
    "skewed loads, beside padding": 1.0,
    "combine, beside a copy": 0.7,
    PROJECTIONS: 1.5,
}
# Compared with the same layer in bf16, which reads 3.6 to 3.9 times as many bytes as 4-bit codes
# and twice as many as fp8. With many tokens decoding costs more than bytes.
PACKED_FEW_TOKENS = ("T=1", "T=4", "T=8")
PACKED_AIMS = {True: 1.6, False: 0.7}
METRICS = {
    **{f"{name}_s": Metric("s") for name in ("forward", "backward", "both", "graph_forward")},
    "seconds": Metric("s"),
    **facts("s", "peer_seconds"),
    **facts("TFLOP/s", "forward_tflops", "backward_tflops", "both_tflops", better="more"),
    **facts("share", "forward_of_dense", "read_of_copy", "graph_read_of_copy", better="more"),
    **facts("share", "ratio", "written_ratio", better="more"),
    "kept_bytes": Metric("bytes"),
    "peak_bytes": Metric("bytes"),
}


class Peak(NamedTuple):
    """The device's limits: a dense bf16 product, and a copy in bytes per second."""

    dense_tflops: float
    copy_bytes_s: float


@gpu_script(
    shape=option(None, "this one, and others", action="append", choices=[*SHAPES]),
    only=option(None, "this part, and others", action="append", choices=PARTS),
)
def main(options: argparse.Namespace) -> int:
    moe_runtime.register_with_transformers()
    device, is_tiny = options.device, options.tiny
    only = options.only or (["shapes"] if options.shape else PARTS)
    peak = measure_peak(device, 256 if is_tiny else 8192)
    settings = peak._asdict() | {"shapes": {}}
    results = GpuResults("device-kernels", "kernels", options, settings, METRICS)
    print(peak)
    shapes = TINY if is_tiny else SHAPES
    for name in options.shape or shapes if "shapes" in only else ():
        shape, aims = shapes[name]
        experts, of_shape = layer(shape, device), results.settings["shapes"]
        of_shape[name] = shape._asdict() | {"closed_form_bytes": shape.kept_bytes}
        # backends worth measuring
        backends = [EAGER] * (shape.T <= EAGER_TOKENS) + [PEER, OURS]
        for backend in backends + [FEW_TOKENS_BACKEND] * (shape.T <= FEW_TOKENS):
            results.add(f"{name}, {backend}", [measure(experts, shape, backend, device, peak)])
        del experts
        note_aims(results, name, shape, aims)
    rows = measure_products(device, tiny=is_tiny) if "products" in only else {}
    if "packed" in only:
        rows |= measure_packed(device, peak.copy_bytes_s, tiny=is_tiny)
    for name, row in rows.items():
        results.add(name, [row])
        asked = PRODUCT_AIMS.get(name, PACKED_AIMS[name.endswith(PACKED_FEW_TOKENS)])
        results.aim(name, "ratio", asked, row["ratio"])
    return results.finish()


def note_aims(results: GpuResults, name: str, shape: Shape, aims: Mapping[str, float]) -> None:
    """Record every target together with the measured figure."""

    def value(field: str) -> float | None:
        if not field.endswith("_of_peer"):
            return results.value(f"{name}, {OURS}", field)
        seconds = field.replace("_of_peer", "_s")
        ours, peer = (results.value(f"{name}, {one}", seconds) for one in (OURS, PEER))
        return peer / ours if ours is not None and peer is not None else None

    for field, asked in aims.items():
        if (measured := value(field)) is not None:
            results.aim(name, field, asked, measured, at_most=field.endswith("_s"))
    if (kept := value("kept_bytes")) is not None:
        # Beyond the closed form: gate weights, the order of the rows and their offsets.
        asked = shape.kept_bytes + (2 + 8) * shape.T * shape.K + 8 * (shape.E + 1) + 4096
        results.aim(name, "kept_bytes", asked, kept, at_most=True)
    results.write()


def layer(shape: Shape, device: str) -> Any:
    """The experts of one Qwen3-MoE layer with random weights."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    _, width, hidden, num_experts, top_k = shape
    config = Qwen3MoeConfig(
        hidden_size=width,
        moe_intermediate_size=hidden,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
    )
    with torch.device(device), torch.no_grad():
        experts = Qwen3MoeExperts(config).to(torch.bfloat16)
        for parameter in experts.parameters():
            parameter.normal_(std=0.02)
    return experts


def measure_peak(device: str, size: int) -> Peak:
    """Time a square product of this side length and a copy of eight times as many numbers."""
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
    weights, inputs = weights.to(x.dtype), [x, *experts.parameters()]
    # Other experts every time, as in decoding layer after layer, so none is cached.
    turns = [(ids + turn * shape.K) % shape.E for turn in range(max(1, shape.E // ids.numel()))]

    @torch.no_grad()
    def forward(*every: Tensor) -> None:
        for one in every:
            experts(x, one, weights)

    forward_s = median_s(partial(forward, ids), device)
    peak_bytes = kept_bytes = before = None
    if device == "cuda":  # peak of both passes, without parameters and input
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = experts(x, ids, weights)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        peak_bytes = torch.cuda.max_memory_allocated() - before
        del out
        before = torch.cuda.memory_allocated()
    out = experts(x, ids, weights)
    if before is not None:  # allocated by the call, without its output and input
        kept_bytes = torch.cuda.memory_allocated() - before - out.nbytes + x.nbytes
    grad = torch.randn_like(out)
    backward = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
    backward_s = median_s(backward, device)
    del out, backward
    both_s = median_s(lambda: torch.autograd.grad(experts(x, ids, weights), inputs, grad), device)
    # A captured eager loop leaves the random generator unusable.
    turns_s = None if backend == EAGER else graph_s(partial(forward, *turns), device)
    graph_forward_s = None if turns_s is None else turns_s / len(turns)
    # The weights of the chosen experts, each read once.
    read_s = len(ids.unique()) * 3 * shape.D * shape.F * BYTES / peak.copy_bytes_s
    forward_tflops = shape.forward_flops / forward_s / 1e12
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "both_s": both_s,
        "graph_forward_s": graph_forward_s,
        "forward_tflops": forward_tflops,
        "backward_tflops": 2 * shape.forward_flops / backward_s / 1e12,
        "both_tflops": 3 * shape.forward_flops / both_s / 1e12,
        "forward_of_dense": forward_tflops / peak.dense_tflops,
        "read_of_copy": read_s / forward_s,
        "graph_read_of_copy": None if graph_forward_s is None else read_s / graph_forward_s,
        "kept_bytes": kept_bytes,
        "peak_bytes": peak_bytes,
    }


@torch.no_grad()
def measure_products(device: str, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of each product and of its reference; `ratio` is theirs over ours."""
    E, rows, D, F = (4, 16, 32, 16) if tiny else (64, 512, 2048, 1024)
    num_rows, block = E * rows, 16 if tiny else 128
    x = torch.randn(num_rows, D, device=device).bfloat16()
    weight = torch.randn(E, F, D, device=device).bfloat16() * D**-0.5
    offsets = torch.arange(0, num_rows + 1, rows, device=device)
    equal, flat = x.view(E, rows, D), weight.flatten(0, 1)
    columns = ExpertColumns.of([F] * E, block_columns=block, device=device)
    topology = expert_topology(offsets, columns, num_rows=num_rows, block_rows=block).trimmed()
    values, hidden = sdd(x, flat.T, topology), torch.bmm(equal, weight.mT)
    # Zipf-distributed rows; the first expert takes the rest.
    shares = [1 / rank for rank in range(1, E + 1)]
    counts = [int(num_rows * share / sum(shares)) for share in shares]
    counts[0] += num_rows - sum(counts)
    skewed = torch.tensor([0, *counts], device=device).cumsum(0)
    padded = torch.zeros(E, max(counts), D, device=device, dtype=x.dtype)
    # Four rows per token; the copy moves as many bytes, read and written.
    num_tokens = num_rows // 4
    ids = torch.arange(4, device=device).expand(num_tokens, 4).contiguous()
    order, gates = token_sort(ids, 4), torch.rand(num_tokens, 4, device=device)
    source = torch.zeros((num_rows + num_tokens) * D // 2, device=device, dtype=x.dtype)
    target = torch.empty_like(source)
    # Queries, keys and values of one token in layer after layer, with uncached weights.
    layers = [torch.randn(3, D, D, device=device).bfloat16() for _ in range(_LAYERS)]

    def each(*weights: Tensor) -> None:
        for one in weights:
            torch.nn.functional.linear(x[:1], one)

    def together(*weights: Tensor) -> None:
        if not x.is_cuda or linears_of_a_row(x[:1], *((one, None) for one in weights)) is None:
            each(*weights)

    dense = partial(torch.bmm, equal, weight.mT)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "grouped product": (partial(grouped_gemm, x, weight, offsets), dense),
        "sampled dense-dense": (partial(sdd, x, flat.T, topology), dense),
        "dense-sparse": (partial(dsd, values, flat, topology), partial(torch.bmm, hidden, weight)),
        "skewed loads, beside padding": (
            partial(grouped_gemm, x, weight, skewed),
            partial(torch.bmm, padded, weight.mT),
        ),
        "combine, beside a copy": (
            partial(combine, x, gates, order),
            partial(target.copy_, source),
        ),
        PROJECTIONS: (
            lambda: [together(*one) for one in layers],
            lambda: [each(*one) for one in layers],
        ),
    }
    found = {}
    for name, pair in calls.items():
        count = _LAYERS if name == PROJECTIONS else 1
        ours, theirs = (_seconds(call, name == PROJECTIONS, device) / count for call in pair)
        found[name] = _beside(ours, theirs)
    return found


FORMATS = {
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "fp8 blocks": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "int4 groups of 32": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    "int4 groups of 128": WeightFormat("uint4", "bf16", group_cols=128, has_zero_points=True),
}


@torch.no_grad()
def measure_packed(device: str, copy_bytes_s: float, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Seconds of each format and number of tokens, and those of bf16."""
    # D, F, E, K of Qwen3-30B-A3B
    D, F, E, K = (128, 128, 4, 2) if tiny else (2048, 768, 128, 8)
    activation, found = ActivationSpec("silu"), {}
    for name, kind in FORMATS.items():
        stacks = [_stack(kind, E, *size, device) for size in ((F, D), (F, D), (D, F))]
        experts = QuantizedExperts(gate=stacks[0], up=stacks[1], down=stacks[2])
        parts = [part for one in stacks for part in (one.codes, one.scales, one.zero_points)]
        num_bytes = sum(part.nbytes for part in parts if part is not None)
        for num_tokens in (4, 40) if tiny else (1, 8, 128, 8192):
            x = torch.randn(num_tokens, D, device=device).bfloat16()
            scores = torch.randn(num_tokens, E, device=device).softmax(-1)
            weights, ids = scores.topk(K)
            few = num_tokens <= FEW_TOKENS
            turns = [(ids + turn * K) % E for turn in range(max(1, E // ids.numel()) if few else 1)]
            wide = experts.widened(torch.arange(E, device=device) if few else ids, x.dtype)

            def in_turn(each: Any, every: list[Tensor] = turns, x: Tensor = x, weights=weights):
                for one in every:
                    of_turn: Any = each(one) if callable(each) else each
                    expert_mlp(x, one, weights, of_turn, activation=activation)

            ours, theirs = (
                _seconds(partial(in_turn, each), few, device) / len(turns)
                for each in (experts, wide)
            )
            widened: Any = lambda one, experts=experts, x=x: experts.widened(one, x.dtype)  # noqa: E731
            written = median_s(partial(in_turn, widened, [ids]), device)
            del wide
            read = len(ids.unique()) * num_bytes / E
            found[f"{name}, T={num_tokens}"] = _beside(ours, theirs) | {
                "written_ratio": written / ours,
                "read_of_copy": read / ours / copy_bytes_s,
            }
    return found


def _stack(kind: WeightFormat, E: int, N: int, K: int, device: str) -> QuantizedStack:
    """Random codes, scaled to preserve the size of activations."""
    codes = torch.randint(0, 256, (E, N, kind.row_bytes(K)), dtype=torch.uint8, device=device)
    if kind.codes == "e4m3":
        codes.bitwise_and_(0xF7)  # no NaN
    groups = (E, *kind.scales_shape(N, K))
    if kind.scales == "e8m0":
        scales = torch.full(groups, 120, dtype=torch.uint8, device=device)
    else:
        scales = torch.full(groups, 2.0**-10, device=device).to(SCALES[kind.scales])
    zeros = torch.full_like(scales, 8, dtype=torch.uint8) if kind.has_zero_points else None
    return QuantizedStack(kind, K, codes, scales, zeros)


def _beside(ours: float, theirs: float) -> dict[str, float]:
    return {"seconds": ours, "peer_seconds": theirs, "ratio": theirs / ours}


def _seconds(call: Callable[[], Any], in_graph: bool, device: str) -> float:
    """Seconds of a call, optionally as a captured graph."""
    call()  # compiles the kernels
    found = graph_s(call, device) if in_graph else None
    return median_s(call, device) if found is None else found


def median_s(call: Callable[[], Any], device: str) -> float:
    """Median seconds of a call; on a GPU by its clock, with a cold cache."""
    call()
    return wall_median_s(call, device) if device != "cuda" else median_seconds(call)


def graph_s(call: Callable[[], Any], device: str) -> float | None:
    """Seconds of a call as a replayed CUDA graph; None if it cannot be captured."""
    if device != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:  # the backend synchronises with the device
        torch.cuda.synchronize()
        return None
    return median_s(graph.replay, device)


if __name__ == "__main__":
    sys.exit(main())
