"""Placements side by side: `python benchmarks/placement.py --trace TRACE.npz`.

Without a trace, only the rebalancing is timed: 58 layers of 256 experts onto 288 slots of 32
devices, by every packing in turn, three rounds and more, medians. With a trace
(of `moe-runtime run --trace`, or any `.npz` with `ids [T, L, K]` and optionally `offsets`), every
algorithm places by the first half of the sequences and is scored on the second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness.machine import commit, describe_machine, machine_name, versions
from rich.console import Console
from rich.table import Table

from moe_runtime.files import write_text
from moe_runtime.lab.traces import read_trace
from moe_runtime.planning.placement import PlacementOptions, random_score, split_window
from moe_runtime.policies.placement import PACKINGS, Devices, RoutingProfile, rebalance
from moe_runtime.policies.placement.scoring import score_placement
from moe_runtime.research.placement_solvers import ALGORITHMS, place_experts

REPLICATING = ("eplb",)
COLUMNS = {
    "balancedness": "balance",
    "mean_max_load": "peak",
    "hops": "hops",
    "primary_hops": "1st hops",
    "devices_per_token": "devices",
}


def main() -> None:
    arguments = _arguments()
    console = Console()
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": versions(),
        "commit": commit(Path(__file__).parent.parent),
        "rebalance": time_rebalancing(arguments.rounds),
    }
    _print_rebalancing(console, results["rebalance"])
    if arguments.trace is not None:
        ids, num_experts, first_scored = read_ids(arguments.trace)
        results["placements"] = compare(
            ids, num_experts, first_scored, arguments.gpus, arguments.replicas, arguments.time_limit
        )
        _print_placements(console, results["placements"])
    output = arguments.output
    if output is None:
        name = f"placement-{machine_name(results['machine'])}.json"
        output = Path(__file__).parent / "results" / name
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(results, indent=1) + "\n")
    console.print(f"wrote {output}")


def time_rebalancing(rounds: int) -> list[dict[str, Any]]:
    """Seconds and balance of every packing, by kind of hierarchy."""
    random = np.random.default_rng(0)
    loads = random.gamma(1.0, 100.0, (58, 256))
    devices = Devices(num_nodes=4, gpus_per_node=8)
    found = []
    for num_groups in (8, 1):
        calls: dict[str, Callable[[], Any]] = {
            packing: lambda packing=packing, num_groups=num_groups: rebalance(
                loads, devices, num_slots=288, num_groups=num_groups, packing=packing
            )
            for packing in PACKINGS
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        for name, call in calls.items():
            found.append(
                {
                    "num_groups": num_groups,
                    "packing": name,
                    "median_s": statistics.median(seconds[name]),
                    "seconds": seconds[name],
                    "balancedness": _balancedness(call().expert_of_slot, loads, devices.num_gpus),
                }
            )
    return found


def _balancedness(slots_LS: np.ndarray, loads_LE: np.ndarray, num_gpus: int) -> float:
    """Mean over largest device load, averaged over layers; an expert without a slot is an error."""
    copies = np.stack([np.bincount(row, minlength=loads_LE.shape[1]) for row in slots_LS])
    if copies.min() < 1:
        raise AssertionError("an expert has no slot: its load would vanish from the score")
    per_slot = np.take_along_axis(loads_LE / copies, slots_LS, axis=1)
    totals = per_slot.reshape(len(slots_LS), num_gpus, -1).sum(axis=2)
    return float((totals.mean(axis=1) / totals.max(axis=1)).mean())


def read_ids(path: Path) -> tuple[np.ndarray, int, int]:
    """Routing, number of experts, and the first row that is scored: half of the sequences."""
    with np.load(path, allow_pickle=False) as arrays:
        if "header" not in arrays:
            ids = arrays["ids"]
            num_experts = int(ids.max()) + 1
            offsets = arrays["offsets"] if "offsets" in arrays else np.array([0, len(ids)])
            half = offsets[len(offsets) // 2] if len(offsets) > 2 else len(ids) // 2
            return ids, num_experts, int(half)
    trace = read_trace(path)
    return trace.expert_ids, trace.signature.num_experts, trace.num_tokens // 2


def compare(
    ids: np.ndarray,
    num_experts: int,
    first_scored: int,
    num_gpus: int,
    num_replicas: int,
    time_limit_s: float,
) -> list[dict[str, Any]]:
    """Scores of all algorithms on rows from ``first_scored``; placed by the rows before."""
    devices = Devices(num_nodes=1, gpus_per_node=num_gpus)
    past, future = split_window(ids, first_scored / len(ids))
    profile = RoutingProfile.from_ids(past, num_experts)
    random = random_score(future, num_experts, devices)
    found = [{"algorithm": "random", "replicas": 0, "place_s": 0.0, **asdict(random)}]
    options = PlacementOptions(time_limit_s=time_limit_s, load_slack=0.05)
    for algorithm in ALGORITHMS:
        replicas = num_replicas if algorithm in REPLICATING else 0
        start = time.perf_counter()
        placement = place_experts(
            algorithm, profile, devices, num_replicas=replicas, options=options
        )
        seconds = time.perf_counter() - start
        score = score_placement(placement, future, devices)
        found.append(
            {"algorithm": algorithm, "replicas": replicas, "place_s": seconds, **asdict(score)}
        )
    for row in found:
        row["hops_less_than_random"] = 1 - row["hops"] / random.hops
    return found


def _print_rebalancing(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="58 layers x 256 experts, 288 slots, 4 nodes, 32 devices")
    for name in ("groups", "packing", "ms", "balance"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["num_groups"]),
            row["packing"],
            f"{1e3 * row['median_s']:.2f}",
            f"{row['balancedness']:.4f}",
        )
    console.print(table)


def _print_placements(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title="scored on the second half of the sequences")
    for name in ("algorithm", "copies", "s", *COLUMNS.values(), "fewer hops"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["algorithm"],
            str(row["replicas"]),
            f"{row['place_s']:.2f}",
            *(f"{row[name]:.3f}" for name in COLUMNS),
            f"{row['hops_less_than_random']:.0%}",
        )
    console.print(table)


def _arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="routing to place by and to score on")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=8, help="of algorithms that replicate")
    parser.add_argument("--time-limit", type=float, default=30.0, help="of solvers, in seconds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
