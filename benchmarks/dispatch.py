"""Dispatch and combine beside a padded all-to-all: `python benchmarks/dispatch.py`.

The peer does what GShard and Tutel do: every expert gets the same number of slots (as many as the
busiest one needs, so that nothing is dropped), the slots travel in equal parts, and come back. It
gets its places from the same sort, so the difference is what travels and how often it is copied.
Both sides take turns in one run, after a barrier; the slowest rank's time counts, and the median of
all rounds is reported. Bytes on the wire are counted where rows enter the process group, and
compared with the closed form. The results file is written after every measurement, so that a run
that is cut short leaves what it has.

Starts its processes by itself, or runs under `torchrun`, on one machine or several.

Shape suffixes: T tokens, D model, K choices, E experts, C slots of an expert, R rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness.machine import commit, describe_machine, versions
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from moe_runtime.files import write_text
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.parallel import FlatTransport, combine, dispatch
from moe_runtime.parallel.communication.transport import Pending
from moe_runtime.routing import Routing

LOADS = ("balanced", "uniform", "zipf")
_FEWEST_ROUNDS = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """One measurement.

    Attributes:
        load: `balanced` (every expert equally often), `uniform` (chosen at random), or `zipf`
            (popularity 1 / rank of the expert, experts in random order).
    """

    num_tokens: int
    dim: int
    num_experts: int
    top_k: int
    load: str
    dtype: str


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        rounds: of each side and shape, the first of which does not count.
        time_limit_s: of all rounds together, each shape having an equal share.
        output: where results go.
    """

    shapes: list[Shape]
    rounds: int
    time_limit_s: float
    output: Path | None


class CountingTransport:
    """A transport that counts the bytes of rows that leave this rank."""

    def __init__(self, inner: FlatTransport) -> None:
        self._inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.row_bytes = 0

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        return self._inner.exchange_numbers(numbers_PN)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> Sequence[object]:
        return self._inner.routes(sent_CP, received_CP)

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        self.row_bytes += rows_RD.numel() * rows_RD.element_size()
        return self._inner.exchange(rows_RD, route, reverse=reverse, out=out)


def make_ids(shape: Shape, rank: int) -> Tensor:
    """`[T, K]` experts of this rank's tokens."""
    random = torch.Generator().manual_seed(17)
    order = torch.randperm(shape.num_experts, generator=random)
    random = torch.Generator().manual_seed(rank)
    if shape.load == "balanced":
        first_T = torch.arange(shape.num_tokens) * shape.top_k
        ids_TK = (first_T[:, None] + torch.arange(shape.top_k)) % shape.num_experts
        return order[ids_TK][torch.randperm(shape.num_tokens, generator=random)]
    popularity_E = torch.ones(shape.num_experts)
    if shape.load == "zipf":
        popularity_E = 1 / torch.arange(1, shape.num_experts + 1)
    picks_TK = popularity_E.expand(shape.num_tokens, -1).multinomial(shape.top_k, generator=random)
    return order[picks_TK]


def padded_round(x_TD: Tensor, routing: Routing) -> Tensor:
    """Equal splits: every expert's slots, padded to those of the busiest one anywhere."""
    size, num_experts = dist.get_world_size(), routing.num_experts
    num_tokens, top_k = routing.ids_TK.shape
    by_expert = token_sort(routing.ids_TK, num_experts)
    capacity = by_expert.counts_E.max()
    dist.all_reduce(capacity, dist.ReduceOp.MAX)
    num_slots = int(capacity)
    expert_R = routing.ids_TK.flatten()
    place_R = by_expert.inverse_R - by_expert.offsets_E1[expert_R] + expert_R * num_slots
    sent = x_TD.new_zeros((num_experts * num_slots, x_TD.shape[1]))
    for k in range(top_k):
        sent.index_copy_(0, place_R.view(num_tokens, top_k)[:, k], x_TD)
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent)
    # Rank by rank as they come; expert by expert as the experts want them.
    grid = (size, num_experts // size, num_slots, -1)
    rows = arrived.view(grid).transpose(0, 1).contiguous()
    back = rows.transpose(0, 1).contiguous()
    returned = torch.empty_like(sent)
    dist.all_to_all_single(returned, back)
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    for k in range(top_k):
        picked_TD = returned.index_select(0, place_R.view(num_tokens, top_k)[:, k])
        out_TD.addcmul_(picked_TD.to(torch.float32), routing.weights_TK[:, k, None])
    return out_TD.to(x_TD.dtype)


def our_round(x_TD: Tensor, routing: Routing, transport: CountingTransport) -> Tensor:
    dispatched = dispatch(x_TD, routing, transport)
    return combine(dispatched.rows_RD, dispatched)


def closed_form_bytes(ids_TK: Tensor, num_experts: int, rank: int, size: int, row: int) -> int:
    """Rows for other ranks on the way there, and other ranks' rows on the way back."""
    owner_TK = ids_TK // (num_experts // size)
    there = int((owner_TK != rank).sum())
    arriving = torch.tensor([int((owner_TK == p).sum()) for p in range(size)])
    arriving[rank] = 0
    back = torch.empty_like(arriving)
    dist.all_to_all_single(back, arriving)
    return (there + int(back.sum())) * row


def measure_here(rank: int, size: int, store: str, options: Options) -> None:
    """One of the processes that this script starts by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    measure(options)
    dist.destroy_process_group()


def measure(options: Options) -> None:
    """All measurements, on every rank of the default group."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    results = []
    for shape in options.shapes:
        ids_TK = make_ids(shape, rank)
        row = shape.dim * DTYPES[shape.dtype].itemsize
        x_TD = torch.randn(shape.num_tokens, shape.dim).to(DTYPES[shape.dtype])
        routing = Routing(ids_TK, torch.rand(ids_TK.shape), shape.num_experts)
        transport = CountingTransport(FlatTransport(group))
        with torch.no_grad():
            difference = our_round(x_TD, routing, transport) - padded_round(x_TD, routing)
        if float(difference.abs().max()) != 0.0:
            raise SystemExit("the two sides do not compute the same")
        expected = closed_form_bytes(ids_TK, shape.num_experts, rank, size, row)
        if transport.row_bytes != expected:
            raise SystemExit(f"{transport.row_bytes} bytes travelled, expected {expected}")
        sides: dict[str, Callable[[], Tensor]] = {
            "ours": lambda x=x_TD, r=routing, t=transport: our_round(x, r, t),
            "padded": lambda x=x_TD, r=routing: padded_round(x, r),
        }
        times = {name: [] for name in sides}
        # The times are the same on all ranks, so all stop after the same round.
        left_s = options.time_limit_s / len(options.shapes)
        with torch.no_grad():
            for number in range(options.rounds):
                if number >= _FEWEST_ROUNDS and left_s < 0:
                    break
                for name, side in sides.items():
                    times[name].append(_slowest(side))
                    left_s -= times[name][-1]
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        results.append(
            {
                **vars(shape),
                "rounds": len(times["ours"]) - 1,
                "seconds": medians,
                "ratio": medians["ours"] / medians["padded"],
                "bytes_on_the_wire_rank_0": expected,
            }
        )
        if rank == 0:
            _print_row(shape, results[-1])
            _write(options.output, size, results)


def _write(path: Path | None, num_ranks: int, results: list[dict]) -> None:
    if path is None:
        return
    report = {
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(Path(__file__).parent),
        "ranks": num_ranks,
        "backend": "gloo",
        "results": results,
    }
    write_text(path, json.dumps(report, indent=2) + "\n")


def _slowest(side: Callable[[], Tensor]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter()
    side()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _print_row(shape: Shape, result: dict) -> None:
    ours, padded = (1e3 * result["seconds"][name] for name in ("ours", "padded"))
    print(
        f"{shape.load:>9} {shape.dtype} T={shape.num_tokens} D={shape.dim} E={shape.num_experts} "
        f"K={shape.top_k}: ours {ours:7.1f} ms, padded {padded:7.1f} ms, "
        f"ratio {result['ratio']:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="the first one does not count")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        help="seconds of rounds in all; fewer of them where they take longer",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, nargs="+", default=[2])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=list(DTYPES))
    parser.add_argument("--output", type=Path, help="where to write the results as JSON")
    told = parser.parse_args()
    shapes = [
        Shape(told.tokens, told.dim, told.experts, top_k, load, dtype)
        for top_k in told.top_k
        for dtype in told.dtypes
        for load in told.loads
    ]
    options = Options(shapes, told.rounds, told.time_limit, told.output)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        measure(options)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        spawn(measure_here, (told.ranks, store, options), nprocs=told.ranks)


if __name__ == "__main__":
    main()
