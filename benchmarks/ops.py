"""What each op of `kernels/` takes on this machine: `python benchmarks/ops.py --save`.

One layer (E = 32, K = 4, D = 1024, F = 512) in bf16, forward without gradients and
forward with backward, medians. The table in kernels/README.md is made from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness.machine import commit, describe_machine, machine_name, versions
from torch import Tensor

from moe_runtime.files import write_text
from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import PackedExperts, StackedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.token_sort import token_sort

RESULTS = Path(__file__).parent / "results"
E, K, D, F = 32, 4, 1024, 512
TINY = (4, 2, 32, 16)
TOKENS = (16, 256)


class Op(NamedTuple):
    """One op: a call, and the tensors whose gradients it gives; none, no backward pass."""

    name: str
    call: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()


def ops(num_tokens: int, sizes: tuple[int, int, int, int]) -> Iterator[Op]:
    """Every op of the layer, on the operands that it has in one."""
    num_experts, top_k, dim_d, dim_f = sizes
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        return values.mul_(shape[-1] ** -0.5).requires_grad_()

    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, ids = (part.contiguous() for part in scores.topk(top_k))
    weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
    num_rows = ids.numel()
    x, gate_up = leaf(num_tokens, dim_d), leaf(num_experts, 2 * dim_f, dim_d)
    yield Op("token_sort", lambda: token_sort(ids, num_experts).order_R)
    order = token_sort(ids, num_experts)
    product: dict[str, Any] = {"sorted_tokens": order, "gathers_choices": top_k}
    yield Op(
        "grouped_gemm",
        lambda: grouped_gemm(x, gate_up, order.offsets_E1, **product),
        (x, gate_up),
    )
    y = leaf(num_rows, dim_d)
    yield Op("combine", lambda: combine(y, weights, order), (y, weights))
    down = leaf(num_experts, dim_d, dim_f)
    experts = StackedExperts(gate_up=gate_up, down=down)
    yield Op(
        "expert_mlp",
        lambda: expert_mlp(x, ids, weights, experts, activation="silu"),
        (x, weights, gate_up, down),
    )
    columns = ExpertColumns.of([dim_f] * num_experts, block_columns=128)
    topology = expert_topology(order.offsets_E1, columns, num_rows=num_rows).trimmed()
    up, second, third = (leaf(num_experts * dim_f, dim_d) for _ in range(3))
    yield Op("block_sparse `sdd`", lambda: sdd(x, up.T, topology, **product), (x, up))
    values = sdd(x, up.T, topology, **product).detach().requires_grad_()
    yield Op("block_sparse `dsd`", lambda: dsd(values, second, topology), (values, second))
    packed = PackedExperts(gate=up, up=second, down=third, columns=columns)
    yield Op(
        "heterogeneous_mlp",
        lambda: expert_mlp(x, ids, weights, packed, activation="silu"),
        (x, weights, up, second, third),
    )


def measure(op: Op, block_s: float) -> dict[str, float | None]:
    """Median milliseconds of a forward pass, and of one with its backward pass."""

    def forward() -> None:
        with torch.no_grad():
            op.call()

    def both() -> None:
        out = op.call()
        torch.autograd.grad(out, op.leaves, torch.ones_like(out))

    return {
        "forward_ms": median_ms(forward, block_s),
        "both_ms": median_ms(both, block_s) if op.leaves else None,
    }


def median_ms(call: Callable[[], None], block_s: float) -> float:
    """Milliseconds of a call: one untimed, then as many as fit into the block, at least one."""
    call()
    times: list[float] = []
    while not times or sum(times) < block_s:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Measures, prints and saves."""
    options = _arguments()
    sizes = TINY if options.tiny else (E, K, D, F)
    rows = []
    for num_tokens in TOKENS:
        for op in ops(num_tokens, sizes):
            row = {"op": op.name, "tokens": num_tokens, **measure(op, options.block_s)}
            rows.append(row)
            both = "" if row["both_ms"] is None else f"{row['both_ms']:9.2f} ms with backward"
            print(f"{op.name:20} T={num_tokens:<5} {row['forward_ms']:9.2f} ms {both}", flush=True)
    facts = describe_machine()
    report = {
        "command": "python benchmarks/ops.py --save",
        "machine": facts,
        "versions": versions(),
        "commit": commit(Path(__file__).parent.parent),
        "shape": dict(zip("EKDF", sizes, strict=True)),
        "rows": rows,
    }
    path = options.out
    if options.save:
        path = RESULTS / f"ops-{machine_name(facts)}.json"
    if path is not None:
        write_text(path, json.dumps(report, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="a tiny layer, as a rehearsal")
    parser.add_argument("--block-s", type=float, default=0.3, help="seconds of one measurement")
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
