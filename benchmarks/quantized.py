"""Routed experts computed from their codes: `python benchmarks/quantized.py`.

Times one layer's routed experts, as a decode step of a loaded model calls them, in bf16 and in the
formats that checkpoints are published in, beside a plain read of as many bytes by the same threads.
The two take turns, and every call has other routing than the one before, so that weights come from
memory. Only as many experts are made as fit in `--memory`; routing is uniform over them.
`--kt-kernel FOLDER`, the unpacked wheel, lets kt-kernel's operators take turns with ours: the same
shape, format and number of experts, with one thread and with as many as ours, each in a process of
its own that stands still while it is not its turn; the faster of the two counts. Its int4
products round what they multiply to int8; ours are exact. `--save` writes this machine's results
file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from harness.suite_results import save_results
from harness.waiting_process import PeerEndedError, WaitingProcess, kt_kernel
from torch import Generator, Tensor

from moe_runtime.bench.results import Metric
from moe_runtime.config import parse_bytes
from moe_runtime.kernels.combine import combine_assignments
from moe_runtime.kernels.expert_mlp import ExpertStep, ExpertWeights, expert_ffn
from moe_runtime.kernels.native import require_native
from moe_runtime.kernels.quantized import SCALES, QuantizedMatrix, WeightFormat
from moe_runtime.memory.slab import Slab

FORMATS = {
    "bf16": None,
    "fp8": WeightFormat("e4m3", "f32", group_rows=128, group_cols=128),
    "mxfp4": WeightFormat("e2m1", "e8m0", group_cols=32),
    "int4": WeightFormat("uint4", "bf16", group_cols=32, zero=8),
    "mxfp4-int8": WeightFormat("e2m1", "e8m0", group_cols=32, int8_activations=True),
    "int4-int8": WeightFormat("uint4", "bf16", group_cols=32, zero=8, int8_activations=True),
    "q8_0": WeightFormat("q8_0"),
    "q4_k": WeightFormat("q4_k"),
    "q6_k": WeightFormat("q6_k"),
    "q8_0-int8": WeightFormat("q8_0", int8_activations=True),
    "q4_k-int8": WeightFormat("q4_k", int8_activations=True),
    "q6_k-int8": WeightFormat("q6_k", int8_activations=True),
}
"""Those that end in `-int8` round activations, as `load(activations="int8")` does; the last six
are GGUF's, whose blocks divide the columns of no matrix of gpt-oss but for `q8_0`."""
BLOCK_SCALES = {"q8_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}
"""Where the fp16 numbers of a block lie, in bytes."""
CALLS = 8
"""Routings that are gone through in turn."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's experts: E, K, D, F."""

    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int


SHAPES = {
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v3": Shape(256, 8, 7168, 2048),
}


def main() -> None:
    arguments = _arguments()
    library = require_native()
    if arguments.one_thread:
        library.set_num_threads(1)
        torch.set_num_threads(1)
    clock = time.thread_time if arguments.one_thread else time.perf_counter
    print(f"{library.isa}, {library.num_threads} threads")
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes:
        for kind in arguments.formats:
            if not has_whole_blocks(SHAPES[name], FORMATS[kind]):
                print(f"{name:>14} {kind:>5} has no whole blocks")
                continue
            experts = make_experts(SHAPES[name], FORMATS[kind], parse_bytes(arguments.memory))
            for num_tokens in arguments.tokens:
                folder = None if kind.endswith("-int8") else arguments.kt_kernel
                with _peers(folder, kind, SHAPES[name], len(experts), num_tokens) as peers:
                    row = {"shape": name, "format": kind, "tokens": num_tokens}
                    row |= measure(
                        SHAPES[name], experts, num_tokens, arguments.rounds, clock, peers
                    )
                    rows.append(row)
                    print(_line(row), flush=True)
    if arguments.save:
        save(rows, arguments)


def has_whole_blocks(shape: Shape, kind: WeightFormat | None) -> bool:
    """Whether rows of both sizes can be written in the format."""
    block = kind.block_codes if kind else 0
    return not block or not (shape.dim_model % block or shape.dim_hidden % block)


def make_experts(shape: Shape, kind: WeightFormat | None, memory: int) -> list[ExpertWeights]:
    """Random experts in slots of a cache's memory, as many as there are or as fit."""
    sizes = (shape.dim_hidden, shape.dim_model), (shape.dim_model, shape.dim_hidden)
    up, down = (_matrix(kind, *size) for size in sizes)
    count = max(shape.top_k, min(shape.num_experts, memory // (2 * up.nbytes + down.nbytes)))
    parts = [part for matrix in (up, up, down) for part in _parts(matrix)]
    slab = Slab(count, sum(map(_room, parts)))
    every = (_copied((up, up, down), slab.slot(index)) for index in range(count))
    return [ExpertWeights(gate, up, down) for gate, up, down in every]


def _matrix(kind: WeightFormat | None, num_rows: int, num_cols: int) -> Tensor | QuantizedMatrix:
    generator = torch.Generator().manual_seed(0)
    if kind is None:
        return torch.randn(num_rows, num_cols, generator=generator).bfloat16() * num_cols**-0.5
    if kind.block_codes:
        return QuantizedMatrix(kind, num_cols, _blocks(kind, num_rows, num_cols, generator), None)
    codes = _codes(kind, torch.randn(num_rows, num_cols, generator=generator))
    scales = torch.full(kind.scales_shape(num_rows, num_cols), 2.0**-7)
    if kind.scales == "e8m0":
        return QuantizedMatrix(kind, num_cols, codes, torch.full_like(scales, 120).byte())
    return QuantizedMatrix(kind, num_cols, codes, scales.to(SCALES[kind.scales]))


def _codes(kind: WeightFormat, values_NK: Tensor) -> Tensor:
    """Codes of Gaussian weights whose scale puts the end of the range at four deviations."""
    if kind.codes == "e4m3":
        return (values_NK * 112).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if kind.codes == "uint4":
        codes_NK = (values_NK * 2 + 8).round().clamp(0, 15).byte()
    else:
        ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])  # between fp4 magnitudes
        codes_NK = torch.bucketize(values_NK.abs() * 1.5, ends).byte() | (values_NK < 0).byte() << 3
    return codes_NK[:, ::2] | codes_NK[:, 1::2] << 4


def _blocks(kind: WeightFormat, num_rows: int, num_cols: int, generator: Generator) -> Tensor:
    """Blocks of any bytes with one small scale."""
    size = (num_rows, num_cols // kind.block_codes, kind.block_bytes)
    blocks = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    scale = torch.tensor([2.0**-12], dtype=torch.float16).view(torch.uint8)
    for first in BLOCK_SCALES[kind.codes]:
        blocks[..., first : first + 2] = scale
    return blocks.flatten(1)


def _copied(
    matrices: Iterable[Tensor | QuantizedMatrix], slot: Tensor
) -> Iterator[Tensor | QuantizedMatrix]:
    """Copies of matrices one behind the other in a slot, as a loaded model has them."""
    offset = 0
    for matrix in matrices:
        copies = []
        for part in _parts(matrix):
            copies.append(slot[offset : offset + part.nbytes].view(part.dtype).view_as(part))
            copies[-1].copy_(part)
            offset += _room(part)
        if isinstance(matrix, Tensor):
            yield copies[0]
        else:
            yield QuantizedMatrix(matrix.format, matrix.num_cols, copies[0], (*copies, None)[1])


def _parts(matrix: Tensor | QuantizedMatrix) -> list[Tensor]:
    if isinstance(matrix, Tensor):
        return [matrix]
    return [part for part in (matrix.codes, matrix.scales) if part is not None]


def _room(part: Tensor) -> int:
    return -(-part.nbytes // 64) * 64


@torch.no_grad()
def measure(
    shape: Shape,
    experts: list[ExpertWeights],
    num_tokens: int,
    rounds: int,
    clock: Callable[[], float],
    peers: Mapping[int, WaitingProcess] = MappingProxyType({}),
) -> dict[str, Any]:
    """Medians of a call and of a plain read, in milliseconds, and what they move.

    Args:
        shape: of a layer.
        experts: of one format.
        num_tokens: a call.
        rounds: calls.
        clock: seconds.
        peers: by their threads; they take turns with ours, and the fastest is compared.
    """
    library = require_native()
    generator = torch.Generator().manual_seed(1)
    x_TD = torch.randn(num_tokens, shape.dim_model, generator=generator).bfloat16()
    run = _runner(shape, experts, x_TD)
    routings = []
    for _ in range(CALLS):
        scores = torch.rand(num_tokens, len(experts), generator=generator)
        weights_TK, ids_TK = scores.topk(shape.top_k)
        routings.append((ids_TK, weights_TK))
    matrices = (experts[0].gate, experts[0].up, experts[0].down)
    expert_bytes = sum(matrix.nbytes for matrix in matrices if matrix is not None)
    visited = [len(ids_TK.unique()) for ids_TK, _ in routings]
    # as long as the call moves, from memory: neither the cache nor the kernel's page of zeros
    room = Slab(1, max(1 << 29, max(visited) * expert_bytes)).slot(0).fill_(1)
    seconds: dict[str, list[float]] = {"experts": [], "read": []}
    for index in range(rounds):
        ids_TK, weights_TK = routings[index % CALLS]
        num_bytes = visited[index % CALLS] * expert_bytes
        first = index * num_bytes % (len(room) - num_bytes + 1) // 64 * 64
        seconds["read"].append(_timed(clock, library.read, room[first : first + num_bytes]))
        seconds["experts"].append(_timed(clock, run, ids_TK, weights_TK))
        for threads, peer in peers.items():
            seconds.setdefault(_peer_name(threads), []).append(peer.call_ms(1)[0] / 1e3)
    beside = {}
    if peers:
        best = min(statistics.median(seconds[_peer_name(threads)]) for threads in peers)
        errors = [float(peer.first_answer) for peer in peers.values()]
        ratio = best / statistics.median(seconds["experts"])
        beside = {"over_kt_kernel": ratio, "kt_kernel_error": max(errors)}
    return beside | {
        "experts": len(experts),
        "visited": statistics.median(visited),
        "expert_bytes": expert_bytes,
        "ms": {name: statistics.median(values) * 1e3 for name, values in seconds.items()},
        "of_read": statistics.median(
            read / own for read, own in zip(seconds["read"], seconds["experts"], strict=True)
        ),
    }


def _runner(
    shape: Shape, experts: list[ExpertWeights], x_TD: Tensor
) -> Callable[[Tensor, Tensor], Tensor]:
    step = ExpertStep(experts[0].shape, "silu")

    def run(ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ids_R = ids_TK.flatten().tolist()
        visited = [*dict.fromkeys(ids_R)]
        place_of = {expert: place for place, expert in enumerate(visited)}
        some = [experts[expert] for expert in visited]
        out = step(x_TD, weights_TK, [place_of[expert] for expert in ids_R], some)
        if out is not None:
            return out
        rows = [[r for r, own in enumerate(ids_R) if own == expert] for expert in visited]
        every = [row for own in rows for row in own]
        out_RD = x_TD.new_empty(len(ids_R), shape.dim_model)
        tokens = [row // shape.top_k for row in every]
        expert_ffn(x_TD, some, [*map(len, rows)], tokens, every, out_RD, activation="silu")
        return combine_assignments(out_RD, weights_TK)

    return run


def _peer_name(threads: int) -> str:
    return f"kt_kernel_{threads}_thread{'s' * (threads > 1)}"


@contextmanager
def _peers(
    folder: Path | None, kind: str, shape: Shape, num_experts: int, num_tokens: int
) -> Iterator[dict[int, WaitingProcess]]:
    """The peer by its threads: one, and as many as ours; none that ends on this format."""
    sizes = num_experts, shape.top_k, shape.dim_model, shape.dim_hidden, num_tokens
    with ExitStack() as stack:
        peers: dict[int, WaitingProcess] = {}
        if folder is None:
            yield peers
            return
        for threads in sorted({1, require_native().num_threads}):
            try:
                peers[threads] = stack.enter_context(kt_kernel(folder, kind, sizes, threads))
            except PeerEndedError as error:
                print(f"{'':14} {kind:>5} T={num_tokens:<3} {error}", flush=True)
        yield peers


def _timed(clock: Callable[[], float], call: Callable[..., object], *arguments: object) -> float:
    start = clock()
    call(*arguments)
    return clock() - start


def _line(row: dict[str, Any]) -> str:
    gb_per_s = row["visited"] * row["expert_bytes"] / row["ms"]["experts"] / 1e6
    name = f"{row['shape']:>14} {row['format']:>5} T={row['tokens']:<3}"
    return (
        f"{name} {row['ms']['experts']:8.2f} ms"
        f"  {gb_per_s:5.1f} GB/s  {row['of_read']:4.2f} of a plain read"
        + (f"  {row['over_kt_kernel']:4.2f} x kt-kernel" if "over_kt_kernel" in row else "")
    )


def save(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Writes the rows: a format is a system, and so is the peer in it."""
    systems: dict[str, dict[str, float]] = {}
    metrics: dict[str, Metric] = {}
    for row in rows:
        name, ms = f"{row['shape']}_{row['tokens']}", dict(row["ms"])
        own = {f"{name}_s": ms.pop("experts") / 1e3, f"{name}_read_s": ms.pop("read") / 1e3}
        moved = {f"{name}_bytes": row["visited"] * row["expert_bytes"]}
        metrics |= {metric: Metric("s", is_judged="read" not in metric) for metric in own}
        metrics |= {metric: Metric("bytes", is_judged=False) for metric in moved}
        systems.setdefault(row["format"], {}).update(own | moved)
        for peer, value in ms.items():
            systems.setdefault(f"{peer}, {row['format']}", {})[f"{name}_s"] = value / 1e3
    library = require_native()
    settings = {"isa": library.isa, "threads": library.num_threads, "rounds": arguments.rounds}
    settings |= {"memory": arguments.memory, "is_processor_time": arguments.one_thread}
    kind = "quantized-one-thread" if arguments.one_thread else "quantized"
    save_results(kind, settings, {name: [found] for name, found in systems.items()}, metrics)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=24, help="turns of experts and reads")
    parser.add_argument("--memory", default="2GiB", help="for the experts of a layer")
    one = "one thread, in its processor time: for a machine that others use meanwhile"
    parser.add_argument("--one-thread", action="store_true", help=one)
    parser.add_argument("--kt-kernel", type=Path, metavar="FOLDER", help="its wheel, unpacked")
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    arguments = parser.parse_args()
    if arguments.one_thread and arguments.kt_kernel:
        parser.error("--one-thread times this process alone: leave out --kt-kernel")
    return arguments


if __name__ == "__main__":
    main()
