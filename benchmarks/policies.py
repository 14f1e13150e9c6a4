"""Eviction policies on a recorded trace: `python benchmarks/policies.py TRACE`.

Replays every policy at the given capacities from a cold start, prints hit rates between LRU and
Belady's optimum, the speed of the replay, and what the slower policies cost a token. With
`--golden FILE` (rows of exact hit counts by trace, capacity, scope and policy) the replay is first
held against those counts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.machine import commit, describe_machine, machine_name, versions

from moe_runtime.policies.eviction import POLICIES
from moe_runtime.tracing.experiment import Experiment, Row, run_experiment
from moe_runtime.tracing.readers import read_any_trace
from moe_runtime.tracing.workload import Workload, workload_of

GOLDEN_NAMES = {"belady_bypass": "belady-bypass", "static_oracle_pop": "static"}


def main() -> None:
    arguments = _arguments()
    trace = read_any_trace(arguments.trace, num_experts=arguments.num_experts)
    workload = workload_of(trace)
    checked = check_golden(workload, arguments.golden) if arguments.golden else None
    names = [name for name in POLICIES if name != "predicted"]
    experiment = Experiment(
        policies=arguments.policies or names,
        capacities=arguments.capacities,
        scope=arguments.scope,
    )
    rows = run_experiment(workload, experiment, on_progress=lambda what: print(f"  {what}"))
    print(f"\n{'policy':>18} {'capacity':>9} {'hits':>8} {'gap closed':>11} {'M accesses/s':>13}")
    for row in rows:
        gap = "" if row.gap_closed is None else f"{row.gap_closed:+.1%}"
        print(
            f"{row.policy:>18} {row.capacity:>9.1%} {row.hit_rate:>8.2%} {gap:>11} "
            f"{row.accesses_per_s / 1e6:>13.2f}"
        )
    if arguments.out:
        write(arguments.out, arguments.trace, workload, rows, checked)


def check_golden(workload: Workload, path: Path) -> int:
    """Replays every golden row; returns how many there were, all of them exact.

    Raises:
        SystemExit: a count differs.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    golden = content if isinstance(content, list) else content["rows"]
    signature = workload.trace.signature
    for row in golden:
        slots = row["capacity"] * (signature.num_layers if row["scope"] == "per_layer" else 1)
        experiment = Experiment(
            policies=[],
            capacities=[slots / (signature.num_layers * signature.num_experts)],
            scope=row["scope"].replace("_", "-"),
            reset_per_sequence=bool(row["reset_per_sequence"]),
        )
        name = GOLDEN_NAMES.get(row["policy"], row["policy"])
        (found,) = run_experiment(workload, replace(experiment, policies=[name]), bounds=False)
        exact = round(found.hit_rate * row["accesses"]) == row["hits"]
        if not exact or round(found.all_resident_rate, 6) != row["all_k_hit_rate"]:
            raise SystemExit(f"not as golden: {row}: got {found.hit_rate * row['accesses']:.0f}")
    print(f"all {len(golden)} golden rows are exact")
    return len(golden)


def write(
    out: Path, trace: Path, workload: Workload, rows: list[Row], num_golden: int | None
) -> None:
    """Writes the rows with machine, versions and commit."""
    facts = describe_machine()
    signature = workload.trace.signature
    result: dict[str, Any] = {
        "subject": "eviction policies on a recorded trace, cold start, no prefetch",
        "machine": facts,
        "versions": versions(),
        "commit": commit(Path(__file__).resolve().parents[1]),
        "trace": trace.name,
        "tokens": workload.trace.num_tokens,
        "layers": signature.num_layers,
        "experts": signature.num_experts,
        "top_k": signature.top_k,
        "golden_rows_exact": num_golden,
        "rows": [
            {
                "policy": row.policy,
                "capacity": row.capacity,
                "hit_rate": round(row.hit_rate, 6),
                "all_resident_rate": round(row.all_resident_rate, 6),
                "gap_closed": row.gap_closed and round(row.gap_closed, 4),
                "accesses_per_s": round(row.accesses_per_s),
            }
            for row in rows
        ],
    }
    path = out / f"policies-{machine_name(facts)}.json" if out.is_dir() else out
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a trace that `moe-runtime replay` reads")
    parser.add_argument("--golden", type=Path, help="JSON rows of exact hit counts to hold against")
    parser.add_argument("--policies", nargs="+", help="names; all that need no predictor if absent")
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument("--scope", default="per-layer", choices=["per-layer", "global"])
    parser.add_argument("--num-experts", type=int, help="where the trace does not say")
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
