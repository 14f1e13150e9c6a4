"""`MoELayer` beside transformers' block and GShard's einsums: `python benchmarks/layer.py`.

Forward, backward and the step of a fused AdamW, routing included, on the same weights and tokens,
as in a training loop of one's own. The systems take turns and the median of each counts. Of our own
calls it is also measured how long the matrix products, the activations between them and the
optimizer take; what is left is routing, dispatch and combination, conversions and Python. GShard's
formulation pads to a capacity factor of 1 in groups of 1024 tokens, which is to its advantage: at
real loads it drops tokens that the others compute. transformers' `eager` has to be asked for
(`--systems`): its backward pass fills a gradient of all experts for each of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from harness.arguments import positive
from harness.machine import commit, describe_machine, machine_name, versions
from torch import Tensor, nn

from moe_runtime.bench.experts.layers import LayerSizes
from moe_runtime.bench.layer_blocks import transformers_block
from moe_runtime.files import write_text
from moe_runtime.kernels.expert_mlp.implementations.native_path import NativeSteps
from moe_runtime.kernels.expert_mlp.implementations.products import NativeProducts
from moe_runtime.layer import MoELayer

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SYSTEMS = ("ours", "grouped_mm", "eager", "gshard")
DEFAULT_SYSTEMS = ("ours", "grouped_mm", "gshard")
GROUP = 1024
# A call as long as this needs no other to warm up before it.
LONG_S = 4.0


def main() -> None:
    arguments = _arguments()
    if "ours" not in arguments.systems:
        raise SystemExit("--systems must have ours, which the others are compared to")
    torch.set_num_threads(arguments.threads)
    dtype = DTYPES[arguments.dtype]
    calls = {name: make_call(name, arguments, dtype) for name in arguments.systems}
    x = torch.randn(1, arguments.tokens, arguments.hidden, generator=seeded()).to(dtype)
    times: dict[str, list[float]] = {name: [] for name in calls}
    shares: list[dict[str, float]] = []
    for turn in range(arguments.repeats + 1):  # the first turn warms up
        for name, call in list(calls.items()):
            if len(times[name]) == arguments.repeats:
                continue
            leaf = x.clone().requires_grad_()
            gc.collect()
            start = time.perf_counter()
            try:
                with PartTimes() if name == "ours" else nullcontext() as parts:
                    call(leaf)
            except RuntimeError as error:
                if name == "ours":
                    raise
                print(f"{name:12} left out: {str(error).splitlines()[0]}")
                del calls[name], times[name]
                continue
            seconds = time.perf_counter() - start
            if parts is not None:
                shares.append({part: s / seconds for part, s in parts.seconds.items()})
            if len(times[name]) < arguments.repeats and (turn or seconds > LONG_S):
                times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    # the first call also touches new memory and compiles
    warm = shares[1:] or shares
    share = {part: statistics.median(one[part] for one in warm) for part in PartTimes.METHODS}
    report(medians, share, arguments)
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
        "shares_of_ours": share,
    }
    write_text(output, json.dumps(results, indent=1) + "\n")


def report(
    medians: dict[str, float], share: dict[str, float], arguments: argparse.Namespace
) -> None:
    """Times, ours against each, and what ours is made of."""
    operations = 18 * arguments.tokens * arguments.top_k * arguments.hidden * arguments.inter
    for name, seconds in medians.items():
        ratio = seconds / medians["ours"]
        print(
            f"{name:12} {seconds:7.3f} s  {operations / seconds / 1e9:7.1f} GFLOP/s  {ratio:5.2f}x"
        )
    rest = 1 - sum(share.values())
    parts = ", ".join(f"{part} {value:.1%}" for part, value in share.items())
    print(f"of ours: {parts}, routing, dispatch and all else {rest:.1%}")


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_call(
    name: str, arguments: argparse.Namespace, dtype: torch.dtype
) -> Callable[[Tensor], None]:
    """A step of one system; weights drawn from the same seed."""
    torch.manual_seed(0)
    layer = MoELayer(
        arguments.hidden, arguments.inter, arguments.experts, arguments.top_k, dtype=dtype
    )
    module: nn.Module = layer
    if name == "gshard":
        module = GShardEinsum(layer, arguments.top_k)
    elif name != "ours":
        sizes = (arguments.experts, arguments.top_k, arguments.hidden, arguments.inter)
        module = transformers_block(name, layer, LayerSizes(*sizes))

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def call(x: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        module(x).sum().backward()
        optimizer.step()

    return call


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


class PartTimes:
    """Seconds that the products and the activations of our layer take, on the CPU.

    While it is entered, the methods that compute them are timed; both passes run them on the thread
    of the caller or of autograd, one at a time.
    """

    METHODS: ClassVar[dict[str, list[tuple[type, str]]]] = {
        "products": [(NativeProducts, name) for name in ("forward", "backward", "outer")],
        "activation": [(NativeSteps, name) for name in ("activate", "activate_backward")],
        "optimizer": [(torch.optim.AdamW, "step")],
    }

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(self.METHODS, 0.0)

    def __enter__(self) -> PartTimes:
        self._originals = [
            (kind, name, kind.__dict__[name])
            for methods in self.METHODS.values()
            for kind, name in methods
        ]
        for part, methods in self.METHODS.items():
            for kind, name in methods:
                setattr(kind, name, self._timed(part, kind.__dict__[name]))
        return self

    def __exit__(self, *exception: object) -> None:
        for kind, name, original in self._originals:
            setattr(kind, name, original)

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = method(*arguments, **options)
            self.seconds[part] += time.perf_counter() - start
            return result

        return call


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--hidden", type=positive, default=1024)
    parser.add_argument("--inter", type=positive, default=512)
    parser.add_argument("--experts", type=positive, default=64)
    parser.add_argument("--top-k", type=positive, default=8)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--systems", nargs="*", default=list(DEFAULT_SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--output", type=Path, help="results file to write")
    parser.add_argument("--no-results", action="store_true", help="print only")
    arguments = parser.parse_args()
    if arguments.top_k > arguments.experts:
        parser.error(f"--top-k {arguments.top_k} is more than --experts {arguments.experts}")
    return arguments


if __name__ == "__main__":
    main()
