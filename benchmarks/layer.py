"""`MoELayer` beside transformers' block and GShard's einsums: `python benchmarks/layer.py`.

Forward and backward of one layer, routing included, on the same weights and tokens; the systems
take turns and the median of each counts. `products` is the floor: the matrix products as our layer
computes them, on rows that are already gathered and sorted, without routing, activation or
dispatch; what a layer keeps (pre-activations, gradients of the parameters) goes into fresh memory
there too. GShard's formulation pads to a capacity factor of 1 in groups of 1024 tokens, which is to
its advantage: at real loads it drops tokens that the others compute. transformers' `eager` has to
be asked for (`--systems`): its backward pass fills a gradient of all experts for each of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from harness.machine import commit, describe_machine, machine_name, versions
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp import native_path
from moe_runtime.kernels.native import require_native
from moe_runtime.layer import MoELayer

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SYSTEMS = ("ours", "grouped_mm", "eager", "gshard", "products")
DEFAULT_SYSTEMS = ("ours", "grouped_mm", "gshard", "products")
GROUP = 1024
# A call as long as this needs no other to warm up before it.
LONG_S = 4.0


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.dtype]
    calls = {name: make_call(name, arguments, dtype) for name in arguments.systems}
    x = torch.randn(1, arguments.tokens, arguments.hidden, generator=seeded()).to(dtype)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(arguments.repeats + 1):  # the first turn warms up
        for name, call in calls.items():
            if len(times[name]) == arguments.repeats:
                continue
            leaf = x.clone().requires_grad_()
            gc.collect()
            start = time.perf_counter()
            call(leaf)
            seconds = time.perf_counter() - start
            if len(times[name]) < arguments.repeats and (turn or seconds > LONG_S):
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    report(medians, arguments)
    if arguments.no_results:
        return
    machine = describe_machine()
    output = arguments.output or ROOT / "benchmarks" / "results" / (
        f"layer-{arguments.dtype}-{machine_name(machine)}.json"
    )
    results = {
        "command": f"python benchmarks/layer.py --dtype {arguments.dtype}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "machine": machine,
        "versions": versions(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("output", "no_results")},
        "seconds": times,
        "medians": medians,
    }
    output.write_text(json.dumps(results, indent=1) + "\n")


def report(medians: dict[str, float], arguments: argparse.Namespace) -> None:
    """Times, and ours against each."""
    operations = 18 * arguments.tokens * arguments.top_k * arguments.hidden * arguments.inter
    for name, seconds in medians.items():
        ratio = seconds / medians["ours"] if "ours" in medians else float("nan")
        print(
            f"{name:12} {seconds:7.3f} s  {operations / seconds / 1e9:7.1f} GFLOP/s  {ratio:5.2f}x"
        )
    if {"ours", "products"} <= medians.keys():
        share = 1 - medians["products"] / medians["ours"]
        print(f"beyond the products: {100 * share:.1f} % of the layer's time")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_call(
    name: str, arguments: argparse.Namespace, dtype: torch.dtype
) -> Callable[[Tensor], None]:
    """Forward and backward of one system; weights drawn from the same seed."""
    torch.manual_seed(0)
    layer = MoELayer(
        arguments.hidden, arguments.inter, arguments.experts, arguments.top_k, dtype=dtype
    )
    module: nn.Module = layer
    if name == "products":
        return products(layer, arguments)
    if name == "gshard":
        module = GShardEinsum(layer, arguments.top_k)
    elif name != "ours":
        module = transformers_block(name, layer, arguments)

    def call(x: Tensor) -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    return call


def transformers_block(name: str, layer: MoELayer, arguments: argparse.Namespace) -> nn.Module:
    """Qwen3-MoE's block with one of transformers' backends, on the layer's weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.inter,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
        **cast(Any, {"experts_implementation": name}),
    )
    block = Qwen3MoeSparseMoeBlock(config)
    block.load_state_dict(layer.state_dict(), assign=True)
    return block


class GShardEinsum(nn.Module):
    """The published formulation: one-hot dispatch and combine tensors `[G, S, E, C]`."""

    def __init__(self, layer: MoELayer, top_k: int) -> None:
        super().__init__()
        self.layer, self.top_k = layer, top_k

    def forward(self, x: Tensor) -> Tensor:
        x_GSD = x.view(-1, GROUP, x.shape[-1])
        parameters = dict(self.layer.named_parameters())
        probs = F.linear(x_GSD.float(), parameters["gate.weight"].float()).softmax(-1)
        weights, ids = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        num_experts = probs.shape[-1]
        capacity = GROUP * self.top_k // num_experts
        taken = torch.zeros(len(x_GSD), 1, num_experts)
        combine = x.new_zeros(len(x_GSD), GROUP, num_experts, capacity)
        for k in range(self.top_k):
            chosen = F.one_hot(ids[..., k], num_experts)
            place = (chosen.cumsum(1) - 1 + taken) * chosen
            taken = taken + chosen.sum(1, keepdim=True)
            slot = F.one_hot(place.sum(-1).long().clamp(max=capacity), capacity + 1)[..., :capacity]
            weighted = (chosen * weights[..., k, None]).to(x.dtype)
            combine = combine + weighted[..., None] * slot[:, :, None, :].to(x.dtype)
        dispatch = (combine > 0).to(x.dtype)
        inside = torch.einsum("gsec,gsd->egcd", dispatch, x_GSD).flatten(1, 2)
        gate, up = torch.bmm(inside, parameters["experts.gate_up_proj"].mT).chunk(2, dim=-1)
        out = torch.bmm(F.silu(gate) * up, parameters["experts.down_proj"].mT)
        out = out.unflatten(1, (len(x_GSD), capacity))
        return torch.einsum("gsec,egcd->gsd", combine, out).view_as(x)


def products(layer: MoELayer, arguments: argparse.Namespace) -> Callable[[Tensor], None]:
    """The layer's matrix products alone: six for each expert, on the rows that it really gets."""
    first, down = (layer.experts.get_parameter(name) for name in ("gate_up_proj", "down_proj"))
    first, down = first.detach(), down.detach()
    with torch.no_grad():
        x = torch.randn(1, arguments.tokens, arguments.hidden, generator=seeded())
        bounds = [0, *layer.route(x.to(down.dtype)).counts_E.cumsum(0).tolist()]
    multiply = native_path.NativeSteps(require_native()).products(down.dtype)
    dtype = multiply.operand_dtype(down.dtype)
    most = max(last - first for first, last in pairwise(bounds))
    rows, wide = torch.randn(most, arguments.hidden), torch.randn(most, 2 * arguments.inter)
    rows, wide, hidden = (t.to(dtype) for t in (rows, wide, wide[:, : arguments.inter]))
    out_hidden, out_rows, out_wide = hidden.clone(), rows.clone(), wide.clone()

    def call(_: Tensor) -> None:
        kept_RZ = torch.empty(bounds[-1], 2 * arguments.inter, dtype=down.dtype)
        for e, (start, end) in enumerate(pairwise(bounds)):
            n = slice(end - start)
            kept = kept_RZ[start:end] if dtype == down.dtype else out_wide[n]
            multiply.forward(rows[n], first[e], None, kept)
            multiply.forward(hidden[n], down[e], None, out_rows[n])
        grad_first, grad_down = torch.empty_like(first), torch.empty_like(down)
        for e, (start, end) in enumerate(pairwise(bounds)):
            n = slice(end - start)
            multiply.backward(rows[n], down[e], out_hidden[n])
            multiply.outer(rows[n], hidden[n], grad_down[e], is_first=True)
            multiply.backward(wide[n], first[e], out_rows[n])
            multiply.outer(wide[n], rows[n], grad_first[e], is_first=True)

    return call


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inter", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--systems", nargs="*", default=list(DEFAULT_SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="results file to write")
    parser.add_argument("--no-results", action="store_true", help="print only")
    return parser.parse_args()


if __name__ == "__main__":
    main()
