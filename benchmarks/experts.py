"""One layer of experts beside the backends of transformers: `python benchmarks/experts.py`.

Times the experts module of a transformers model on random weights, with
`experts_implementation="moe_runtime"` and with those of transformers, forward and with backward.
The implementations take turns, block by block; the median of each counts. Every call has other
routing than the one before, so that at few tokens the weights come from memory, as in a model.
`--isa avx512` (or `avx2`) holds our products, oneDNN, MKL and torch to the instructions of an older
processor (loops that the compiler vectorised for several processors go by the real one: gates, sums
of rows and copies); these results are saved in a file of their own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.arguments import positive
from harness.machine import commit, describe_machine, machine_name, versions
from harness.older_isa import add_isa, hold_to

import moe_runtime
from moe_runtime.bench.experts.layers import (
    OURS,
    SHAPES,
    ExpertLayer,
    median_of_block,
    synthetic_layer,
)
from moe_runtime.files import write_text

RESULTS = Path(__file__).parent / "results"


TOKENS = (1, 16, 64, 256, 2048)
# A peer that takes as many times longer than the quickest peer has one turn only.
FAR = 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    arguments = _arguments()
    if arguments.isa:
        hold_to(arguments.isa)
    moe_runtime.register_with_transformers()
    facts = describe_machine()
    head = commit(Path(__file__).parent.parent)
    print(f"{facts['cpu']}, {facts['num_cores']} cores; torch {versions()['torch']}; commit {head}")
    dtype = DTYPES[arguments.dtype]
    rows: list[dict[str, Any]] = []
    for name in arguments.shapes:
        layer = synthetic_layer(name, dtype)
        for passes in arguments.passes:
            for num_tokens in arguments.tokens:
                row = {
                    "shape": name,
                    "pass": passes,
                    "tokens": num_tokens,
                    "dtype": arguments.dtype,
                }
                row |= measure(layer, num_tokens, passes, arguments)
                rows.append(row)
                print(_line(row), flush=True)
        del layer
        gc.collect()
    if arguments.save:
        _save(rows, facts, head, arguments.isa)


def measure(
    layer: ExpertLayer, num_tokens: int, passes: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Median milliseconds of one call by implementation, and the ratio to the best peer."""
    trains = passes == "forward+backward"
    module = layer.module.requires_grad_(trains)
    calls = [layer.routing(num_tokens, seed) for seed in range(4)]
    x = layer.tokens(num_tokens)

    def run(index: int) -> None:
        ids, weights = calls[index % len(calls)]
        if not trains:
            with torch.no_grad():
                module(x, ids, weights)
            return
        leaf, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        module(leaf, ids, weights).backward(x)
        module.zero_grad(set_to_none=True)

    contenders = layer.contenders(num_tokens, trains=trains)
    seconds: dict[str, list[float]] = {name: [] for name in (OURS, *contenders)}
    for _ in range(arguments.rounds):
        for name, values in seconds.items():
            is_peer = name != OURS and bool(values) and not arguments.all_peers
            if is_peer and values[0] > FAR * min(seconds[peer][0] for peer in contenders):
                continue
            layer.select(name)
            values.append(median_of_block(run, arguments.block_s))
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    best = min(contenders, key=medians.__getitem__)
    ratios = [b / a for a, b in zip(seconds[OURS], seconds[best], strict=True)]
    return {
        "rounds": arguments.rounds,
        "ms": medians,
        "ratio": medians[best] / medians[OURS],
        "ratios": ratios,
    }


def _line(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {value:9.2f}" for name, value in row["ms"].items())
    return (
        f"{row['shape']:>14} {row['dtype']} {row['pass']:>16} T={row['tokens']:<5} {times} ms"
        f"  {row['ratio']:5.2f}x"
    )


def _save(rows: list[dict[str, Any]], facts: dict[str, object], head: str, isa: str | None) -> None:
    """Adds the rows to this machine's results; rows of the same case are replaced."""
    path = RESULTS / f"experts-{f'{isa}-' if isa else ''}{machine_name(facts)}.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {_case(row) for row in rows}
    rows = [row for row in kept if _case(row) not in new] + [row | {"commit": head} for row in rows]
    rows.sort(key=lambda row: (row["shape"], row["dtype"], row["pass"], row["tokens"]))
    command = f"python benchmarks/experts.py{f' --isa {isa}' if isa else ''} --save"
    report = {"command": command, "machine": facts, "versions": versions(), "rows": rows}
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path.name}")


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"], row["dtype"], row["pass"], row["tokens"]


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=positive, default=list(TOKENS))
    passes = ("forward", "forward+backward")
    parser.add_argument("--passes", nargs="+", choices=passes, default=list(passes))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of every implementation")
    parser.add_argument("--block-s", type=float, default=0.5, help="seconds of one turn")
    parser.add_argument(
        "--all-peers", action="store_true", help="as many turns for peers that are far behind"
    )
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="add to this machine's results file")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
