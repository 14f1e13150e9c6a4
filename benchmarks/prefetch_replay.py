"""What prefetching would move and save: `python benchmarks/prefetch_replay.py TRACE`.

Whole sequences, repeated ones left out, are split into training and test. A predictor learns from
the first half; sequences of the second are replayed in modelled time, with prefetch and without,
from an empty cache. Each machine is one number: the time of moving an expert over the time that a
layer computes. Traffic and waits stand beside those of LRU without prefetch on the same machine.
Training takes longest: with `--predictor FILE` what was trained is written there, and read from
there the next time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness.machine import commit, describe_machine, machine_name, versions

from moe_runtime.files import write_text
from moe_runtime.lab.replay.experiment import Experiment, run_experiment
from moe_runtime.lab.replay.link_model import Machine
from moe_runtime.lab.replay.timed import TimedReplay
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.predictor_file import read_predictor, write_predictor
from moe_runtime.lab.traces.readers import read_any_trace, read_plain_ids
from moe_runtime.lab.traces.routes import routes_of, split_sequences, without_repeats
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import POLICIES
from moe_runtime.policies.prediction import PREDICTORS, Estimator, Routes, make_estimator
from moe_runtime.types import ModelSignature

EXPERT_BYTES = 16 << 20
LAYER_S = 1e-3
"""Time that a layer computes, experts included; only the link's time relative to it matters."""
EXPERTS_SHARE = 0.4
"""Of that, the experts; they compute while others are still on their way."""


def main() -> None:
    arguments = _arguments()
    trace = read_any_trace(arguments.trace, num_experts=arguments.num_experts)
    routes = without_repeats(routes_of(trace))
    train, test = split_sequences(routes, test_share=0.5, seed=arguments.seed)
    predictor = trained(arguments, trace.signature, train)
    held_out = workload_of(decoded(test, arguments.tokens))
    num_tokens = held_out.trace.num_tokens
    name = arguments.trace.name
    print(f"{name}: {train.num_tokens} tokens to learn from, {num_tokens} others replayed")
    rows: list[dict[str, Any]] = []
    for ratio in arguments.ratios:
        experiment = Experiment(
            policies=list(dict.fromkeys(["lru", *arguments.policies])),
            capacities=[arguments.capacity],
            machine=modelled_machine(ratio, trace.signature.top_k),
            predictor=predictor.name,
            trained=predictor,
        )
        found = run_experiment(held_out, experiment, bounds=False)
        lru = found[0].timed["off"]
        for row in found:
            for kind, replay in row.timed.items():
                rows.append(as_row(ratio, row.policy, kind, replay, lru))
                print("  " + "  ".join(f"{key} {value}" for key, value in rows[-1].items()))
    if arguments.out:
        write(arguments, trace.signature, train.num_tokens, num_tokens, rows)


def trained(
    arguments: argparse.Namespace, signature: ModelSignature, training: Routes
) -> Estimator:
    """The predictor, from its file if there is one."""
    path = arguments.predictor
    if path is not None and path.exists():
        return read_predictor(path, signature)
    predictor = make_estimator(arguments.name, training.shape)
    predictor.fit(training)
    if path is not None:
        write_predictor(path, predictor, signature)
    return predictor


def decoded(routes: Routes, num_tokens: int) -> Trace:
    """The first whole sequences of so many tokens, as a trace of one token a step."""
    ends = routes.offsets[1:]
    num_sequences = min(int((ends < num_tokens).sum()) + 1, routes.num_sequences)
    some = routes.select(range(num_sequences))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held_out.npz"
        np.savez(
            path,
            ids=some.expert_ids,
            probs=some.gate_weights,
            token_ids=some.token_ids,
            offsets=some.offsets,
        )
        return read_plain_ids(path, num_experts=routes.shape.num_experts)


def modelled_machine(ratio: float, top_k: int) -> Machine:
    """A machine whose link takes so many times as long for an expert as a layer computes."""
    return Machine(
        bytes_per_s=EXPERT_BYTES / (ratio * LAYER_S),
        latency_s=0.0,
        expert_bytes=EXPERT_BYTES,
        layer_s=(1 - EXPERTS_SHARE) * LAYER_S,
        expert_s=EXPERTS_SHARE * LAYER_S / top_k,
    )


def as_row(
    ratio: float, policy: str, kind: str, replay: TimedReplay, lru: TimedReplay
) -> dict[str, Any]:
    """One outcome; ratios are to LRU without prefetch on the same machine."""
    counts, base = replay.total, lru.total
    asked = counts.hits + counts.late_hits + counts.misses
    return {
        "transfer_over_layer": ratio,
        "policy": policy,
        "prefetch": kind,
        "hit_rate": round(counts.hits / asked, 4),
        "late_rate": round(counts.late_hits / asked, 4),
        "loads_per_layer_token": round((counts.misses + counts.prefetches) / counts.events, 4),
        "traffic_ratio": round(
            (counts.misses + counts.prefetches) / (base.misses + base.prefetches), 4
        ),
        "stall_ratio": round(counts.stall_s / base.stall_s, 4),
        "useful_share": round(counts.useful / max(1, counts.prefetches), 4),
        "speed_ratio": round(replay.tokens_per_s / lru.tokens_per_s, 4),
    }


def write(
    arguments: argparse.Namespace,
    signature: ModelSignature,
    training_tokens: int,
    num_tokens: int,
    rows: list[dict[str, Any]],
) -> None:
    """Writes the rows with machine, versions and commit."""
    facts = describe_machine()
    report = {
        "subject": "prefetch in modelled time on held-out sequences, cold start",
        "machine": facts,
        "versions": versions(),
        "commit": commit(Path(__file__).resolve().parents[1]),
        "trace": arguments.trace.name,
        "layers": signature.num_layers,
        "experts": signature.num_experts,
        "top_k": signature.top_k,
        "capacity": arguments.capacity,
        "training_tokens": training_tokens,
        "replayed_tokens": num_tokens,
        "seed": arguments.seed,
        "rows": rows,
    }
    out = arguments.out
    path = out / f"prefetch-replay-{machine_name(facts)}.json" if out.is_dir() else out
    write_text(path, json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="a trace that `moe-runtime replay` reads")
    parser.add_argument("--predictor", type=Path, help="file of the trained predictor")
    parser.add_argument("--name", default="combined", choices=sorted(PREDICTORS), help="its kind")
    parser.add_argument("--policies", nargs="+", default=["lru"], choices=list(POLICIES))
    parser.add_argument("--capacity", type=float, default=0.25, help="share of experts that fit")
    parser.add_argument(
        "--ratios", nargs="+", type=float, default=[0.25, 0.5, 1.0], help="machines; see above"
    )
    parser.add_argument("--tokens", type=int, default=1500, help="held-out tokens to replay")
    parser.add_argument("--num-experts", type=int, help="where the trace does not say")
    parser.add_argument("--seed", type=int, default=0, help="of the split")
    parser.add_argument("--out", type=Path, help="folder or file for the results as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
