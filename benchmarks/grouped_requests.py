"""What learning from requests gains a server: `python benchmarks/grouped_requests.py`.

The pocket model answers prompts from many documents, and its routing is recorded. Half of the
requests teach, the others are served in groups: so many decode side by side, a step has a token of
each, and the next request takes the place of one that ends. Hit rates of `activation-aware`,
without and with what the first half taught, stand between LRU's and the optimum's (Belady with
bypass), and beside them what prefetching by `eam` reads in modelled time. `--trace FILE` asks about
another recording, `--save` writes the results file, and `--table` the table in docs/policies.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness.decoded_traces import decoded, modelled_machine
from harness.machine import machine_name, run_facts
from readme_table import replaced
from told_policies import documents, learner_of, record

from moe_runtime.files import write_text
from moe_runtime.lab.replay.timed import replay_timed
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, split_sequences, without_repeats
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import LayerShares, Setting, make_policy
from moe_runtime.policies.prediction import Routes, TrackedPredictor, make_estimator
from moe_runtime.policies.prediction.base import Learner, shape_of
from moe_runtime.policies.prediction.estimator import State

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "policies.md"
BEGIN, END = "<!-- grouped-requests: begin -->", "<!-- grouped-requests: end -->"
NUM_REQUESTS = 240
TRANSFER_OVER_LAYER = 0.5
"""How long the modelled link takes for an expert, over the time that a layer computes."""


def main() -> int:
    arguments = _arguments()
    if arguments.table or arguments.check:
        page = PAGE.read_text(encoding="utf-8")
        wanted = replaced(page, BEGIN, END, table_of(newest()))
        if not arguments.check:
            write_text(PAGE, wanted)
        return int(arguments.check and wanted != page)
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace
        if path is None:
            texts = documents("**/*.py", arguments.requests)
            path = record(Path(folder) / "trace.npz", texts)
        trace = read_any_trace(path)
    train, test = split_sequences(without_repeats(routes_of(trace)), test_share=0.5, seed=0)
    rows: list[dict[str, Any]] = []
    for count in arguments.groups:
        taught, served = (workload_of(grouped(routes, count)) for routes in (train, test))
        for capacity in arguments.capacities:
            rows.append({"group": count, "capacity": capacity} | measure(taught, served, capacity))
            print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if arguments.save:
        facts = run_facts(ROOT)
        result = {
            "subject": "learning from requests that are served in groups",
            **facts,
            "trace": path.name if arguments.trace else "pocket, recorded by this script",
            "layers": trace.signature.num_layers,
            "experts": trace.signature.num_experts,
            "top_k": trace.signature.top_k,
            "requests_learned_from_and_served": [train.num_sequences, test.num_sequences],
            "tokens_served": test.num_tokens,
            "transfer_over_layer": TRANSFER_OVER_LAYER,
            "rows": rows,
        }
        name = f"grouped-requests-{machine_name(facts['machine'])}.json"
        write_text(ROOT / "benchmarks" / "results" / name, json.dumps(result, indent=1) + "\n")
        print(f"written to {name}")
    return 0


def grouped(routes: Routes, count: int) -> Trace:
    """Requests that decode side by side, as a trace of so many tokens a step.

    The first ``count`` requests begin together; one that ends makes room for the next. It ends
    when fewer than so many are left. Tokens of prompts are steps like others.
    """
    flat = decoded(routes, routes.num_tokens)
    waiting = deque(range(routes.num_sequences))
    running: list[deque[int]] = []
    rows: list[int] = []
    while True:
        running = [one for one in running if one]
        while waiting and len(running) < count:
            part = routes.tokens_of(waiting.popleft())
            running.append(deque(range(part.start, part.stop)))
        if len(running) < count:
            break
        rows += [one.popleft() for one in running]
    steps = len(rows) // count
    return replace(
        flat,
        step_phase=flat.step_phase[:steps],
        step_start=np.arange(0, len(rows) + 1, count, dtype=np.int64),
        **{
            name: getattr(flat, name)[rows]
            for name in ("token_request", "token_id", "token_position", "expert_ids")
        },
        gate_weights=flat.gate_weights[rows],
    )


def measure(taught: Workload, served: Workload, capacity: float) -> dict[str, Any]:
    """Hit rates on the requests that are served, and what prefetching by `eam` reads.

    Args:
        taught: requests that what is kept was learned from.
        served: the requests that are counted.
        capacity: share of the experts that fit.
    """
    signature = served.trace.signature
    num_slots = round(capacity * signature.num_layers * signature.num_experts)
    shape = shape_of(signature)

    def make(name: str, state: State | None = None, future: Any = None) -> LayerShares:
        policy = make_policy(name, num_slots=num_slots, setting=Setting(shape=shape, future=future))
        if state:
            learner_of(policy).restore(state)
        return policy

    def rate(name: str, state: State | None = None) -> float:
        found = replay_demand(served, lambda events: make(name, state, events), num_slots)
        return round(found.hit_rate, 4)

    teacher = make("activation-aware")
    replay_demand(taught, lambda _: teacher, num_slots)
    kept = what_was_learned(learner_of(teacher))
    rates = {
        "lru": rate("lru"),
        "activation_aware": rate("activation-aware"),
        "activation_aware_kept": rate("activation-aware", kept),
        "optimum": rate("belady-bypass"),
    }
    machine = modelled_machine(TRANSFER_OVER_LAYER, signature.top_k)
    guesser = TrackedPredictor(make_estimator("eam", shape))
    for number, (begins, routed) in enumerate(taught.routing(0, taught.num_events)):
        if begins is not None:
            taught.begin(number, begins, [guesser])
        guesser.observe(routed)
    predictor = TrackedPredictor(make_estimator("eam", shape))
    predictor.restore(what_was_learned(guesser))
    plain = replay_timed(served, make("lru"), num_slots, machine)
    ahead = replay_timed(served, make("lru"), num_slots, machine, predictor=predictor)
    counts, base = ahead.total, plain.total
    return {
        "hit_rates": rates,
        "eam_prefetch": {
            "prefetches_a_layer": round(counts.prefetches / counts.events, 4),
            "useful_share": round(counts.useful / max(1, counts.prefetches), 4),
            "traffic_ratio": round((counts.misses + counts.prefetches) / base.misses, 4),
            "stall_ratio": round(counts.stall_s / base.stall_s, 4),
            "speed_ratio": round(ahead.tokens_per_s / plain.tokens_per_s, 4),
        },
    }


def what_was_learned(learner: Learner) -> State:
    """A copy of what a learner would keep; it may learn on."""
    return {name: array.copy() for name, array in learner.learned().items()}


def table_of(results: dict[str, Any]) -> str:
    """The table of a results file."""
    lines = [
        "| experts in memory | requests at a time | LRU | `activation-aware` | with what was kept "
        "| optimum | `eam`: useful prefetches | reads, of LRU's | waits, of LRU's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(results["rows"], key=lambda one: (one["capacity"], one["group"])):
        rates, ahead = row["hit_rates"], row["eam_prefetch"]
        shares = [rates[name] for name in rates]
        shares += [ahead[name] for name in ("useful_share", "traffic_ratio", "stall_ratio")]
        cells = [f"{row['capacity']:.0%}".replace("%", " %"), str(row["group"])]
        cells += [f"{100 * share:.1f} %" for share in shares]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def newest() -> dict[str, Any]:
    """The results file that the page shows."""
    (path,) = (ROOT / "benchmarks" / "results").glob("grouped-requests-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a trace that `moe-runtime replay` reads")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="that are recorded")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    parser.add_argument("--table", action="store_true", help="write the table in the docs")
    parser.add_argument("--check", action="store_true", help="exit 1 where that table is stale")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
