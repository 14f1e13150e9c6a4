"""Eviction policies on a recorded trace: `python benchmarks/policies.py TRACE`.

Replays policies at the given capacities from a cold start and prints hit rates between LRU and
Belady's optimum and the speed of the replay. Without `--policies` these are the ones that have a
compiled replay; `--policies all` takes minutes on a trace of millions of accesses. With
`--golden FILE` (rows of exact hit counts by trace, capacity, scope, reset and policy) every row is
first held against the replay. `--out` writes it all down; `--keep` leaves what an earlier run on
the same trace wrote there about other policies, so that slow ones can be measured by themselves.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from harness.machine import commit, describe_machine, machine_name, versions

from moe_runtime.files import write_text
from moe_runtime.lab.replay.experiment import Experiment, Row, run_experiment
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import POLICIES
from moe_runtime.policies.eviction.compiled import RULES, is_available

GOLDEN_NAMES = {"belady_bypass": "belady-bypass", "static_oracle_pop": "static"}


def main() -> None:
    arguments = _arguments()
    start_s = time.perf_counter()
    trace = read_any_trace(arguments.trace, num_experts=arguments.num_experts)
    workload = workload_of(trace)
    accesses = len(workload.key_numbers)
    print(f"{arguments.trace.name}: {accesses} accesses in {time.perf_counter() - start_s:.1f} s")
    golden = check_golden(workload, arguments.golden) if arguments.golden else []
    rows: list[Row] = []
    for scope in arguments.scopes:
        experiment = Experiment(
            policies=chosen_policies(arguments.policies),
            capacities=arguments.capacities,
            scope=scope,
        )
        found = run_experiment(workload, experiment, on_progress=lambda what: print(f"  {what}"))
        _print(scope, found)
        rows += found
    if arguments.out:
        write(
            arguments.out,
            arguments.trace,
            workload,
            arguments.scopes,
            rows,
            golden,
            keep=arguments.keep,
        )


def chosen_policies(names: list[str] | None) -> list[str]:
    """The policies to replay, the named ones or a default."""
    if names == ["all"]:
        return [name for name in POLICIES if name != "predicted"]
    return names or list(RULES)


def check_golden(workload: Workload, path: Path) -> list[dict[str, Any]]:
    """Replays every golden row; returns what was counted, all of it exact.

    Raises:
        SystemExit: a count differs.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    golden = content if isinstance(content, list) else content["rows"]
    signature = workload.trace.signature
    start_s = time.perf_counter()
    checked = []
    for number, row in enumerate(golden):
        slots = row["capacity"] * (signature.num_layers if row["scope"] == "per_layer" else 1)
        experiment = Experiment(
            policies=[GOLDEN_NAMES.get(str(row["policy"]), str(row["policy"]))],
            capacities=[slots / (signature.num_layers * signature.num_experts)],
            scope=row["scope"].replace("_", "-"),
            reset_per_sequence=bool(row["reset_per_sequence"]),
        )
        (found,) = run_experiment(workload, experiment, bounds=False)
        num_hits = round(found.hit_rate * row["accesses"])
        all_resident = round(found.all_resident_rate, 6)
        if (num_hits, all_resident) != (row["hits"], row["all_k_hit_rate"]):
            raise SystemExit(f"not as golden: {row}: got {num_hits} hits, {all_resident} all K")
        checked.append(
            {
                "policy": found.policy,
                "scope": experiment.scope,
                "reset": experiment.reset_per_sequence,
                "capacity": round(found.capacity, 6),
                "hits": num_hits,
                "all_resident_rate": all_resident,
                "accesses_per_s": round(found.accesses_per_s),
            }
        )
        if (number + 1) % 10 == 0 or number + 1 == len(golden):
            print(f"  {number + 1} of {len(golden)} golden rows are exact", flush=True)
    slowest = min(row["accesses_per_s"] for row in checked) / 1e6
    elapsed_s = time.perf_counter() - start_s
    print(f"all golden rows in {elapsed_s:.1f} s, the slowest at {slowest:.1f} M accesses/s")
    return checked


def write(
    out: Path,
    trace: Path,
    workload: Workload,
    scopes: list[str],
    rows: list[Row],
    golden: list[dict[str, Any]],
    *,
    keep: bool,
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
        "compiled_replay": is_available(),
        "golden_rows_exact": len(golden),
        "golden_rows": golden,
        "rows": [
            {
                "scope": scopes[number * len(scopes) // len(rows)],
                "policy": row.policy,
                "capacity": row.capacity,
                "hit_rate": round(row.hit_rate, 6),
                "all_resident_rate": round(row.all_resident_rate, 6),
                "gap_closed": row.gap_closed and round(row.gap_closed, 4),
                "accesses_per_s": round(row.accesses_per_s),
            }
            for number, row in enumerate(rows)
        ],
    }
    path = out / f"policies-{machine_name(facts)}.json" if out.is_dir() else out
    if keep and path.exists():
        keep_earlier(result, json.loads(path.read_text(encoding="utf-8")))
    write_text(path, json.dumps(result, indent=1) + "\n")
    print(f"written to {path}")


def keep_earlier(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Adds what an earlier file on the same trace says about other policies and golden rows."""
    if any(result[name] != earlier[name] for name in ("trace", "tokens", "layers", "experts")):
        raise SystemExit(f"the results there are of {earlier['trace']}; leave out --keep")
    measured = {(row["scope"], row["policy"], row["capacity"]) for row in result["rows"]}
    result["rows"] += [
        {"commit": earlier["commit"], **row}
        for row in earlier["rows"]
        if (row["scope"], row["policy"], row["capacity"]) not in measured
    ]
    if not result["golden_rows"]:
        for name in ("golden_rows", "golden_rows_exact"):
            result[name] = earlier[name]


def _print(scope: str, rows: list[Row]) -> None:
    print(f"\n{scope:>18} {'capacity':>9} {'hits':>8} {'gap closed':>11} {'M accesses/s':>13}")
    for row in rows:
        gap = "" if row.gap_closed is None else f"{row.gap_closed:+.1%}"
        print(
            f"{row.policy:>18} {row.capacity:>9.1%} {row.hit_rate:>8.2%} {gap:>11} "
            f"{row.accesses_per_s / 1e6:>13.2f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a trace that `moe-runtime replay` reads")
    parser.add_argument("--golden", type=Path, help="JSON rows of exact hit counts to hold against")
    parser.add_argument("--policies", nargs="+", help="names, or all; by default the quick ones")
    parser.add_argument("--capacities", nargs="+", type=float, default=[0.25, 0.5])
    parser.add_argument(
        "--scopes", nargs="+", default=["per-layer"], choices=["per-layer", "global"]
    )
    parser.add_argument("--keep", action="store_true", help="keep earlier rows in the file")
    parser.add_argument("--num-experts", type=int, help="where the trace does not say")
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
