"""What regrouping batches by their experts would save: `python benchmarks/regrouping.py`.

A server has N sequences to decode. It may step all of them at once, so that an expert is read once
for all who want it, or in two batches that take turns: as they came, or regrouped before every step
as ExpertFlow does, by the experts of each sequence's token before or by those it will really visit,
which no predictor can beat. Experts that a step wants and the cache of a layer (LRU) lacks are
counted, for sequences of a recorded trace that decode side by side; without one the pocket model's
routing is recorded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
from harness.machine import commit, machine_name
from harness.machine import describe_machine as describe
from harness.regrouping import regroup
from told_policies import record

from moe_runtime.files import write_text
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, without_repeats

RESULTS = Path(__file__).parent / "results"
HOW = ("one batch", "two batches", "regrouped", "regrouped, foreseen")


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.trace or record(Path(folder) / "trace.npz")
        trace = read_any_trace(path)
    routes = without_repeats(routes_of(trace))
    num_experts, steps = trace.signature.num_experts, arguments.steps + 1
    parts = [routes.tokens_of(sequence) for sequence in range(routes.num_sequences)]
    whole = [routes.expert_ids[part][-steps:] for part in parts if part.stop - part.start >= steps]
    order = np.random.default_rng(0).permutation(len(whole))
    rows = []
    for count in arguments.sequences:
        if count > len(whole):
            print(f"{count} sequences: the trace has {len(whole)} of {steps} tokens")
            continue
        paths_NTLK = np.stack([whole[index] for index in order[:count]])
        for capacity in arguments.capacities:
            slots = round(capacity * num_experts)
            tokens = arguments.steps * count
            found = {
                how: round(reads(paths_NTLK, slots, num_experts, how) / tokens, 2) for how in HOW
            }
            rows.append({"sequences": count, "capacity": capacity, "reads_a_token": found})
            print(f"{count} sequences, {capacity:.0%} of the experts: {found}", flush=True)
    if arguments.save:
        facts = describe()
        result = {
            "subject": "experts read a decoded token, all layers together",
            "command": "python benchmarks/regrouping.py --trace TRACE --save",
            "machine": facts,
            "commit": commit(Path(__file__).resolve().parents[1]),
            "trace": arguments.trace.name if arguments.trace else "pocket, recorded by this script",
            "layers": trace.signature.num_layers,
            "experts": num_experts,
            "top_k": trace.signature.top_k,
            "steps": arguments.steps,
            "rows": rows,
        }
        path = RESULTS / f"regrouping-{machine_name(facts)}.json"
        write_text(path, json.dumps(result, indent=1) + "\n")
        print(f"written to {path.name}")


def reads(paths_NTLK: np.ndarray, num_slots: int, num_experts: int, how: str) -> int:
    """Experts that are not in a layer's cache when a step wants them, over all steps but the first.

    Args:
        paths_NTLK: ``[N, T, L, K]``, the experts of each sequence's tokens; the number of experts
            where none was recorded.
        num_slots: experts that the cache of a layer keeps, between steps.
        num_experts: of a layer.
        how: one of `HOW`.
    """
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(paths_NTLK.shape[2])]
    for expert in range(num_slots):
        for cache in caches:
            cache[expert] = None
    half, total = (len(paths_NTLK) + 1) // 2, 0
    for step in range(1, paths_NTLK.shape[1]):
        batches = [np.arange(half), np.arange(half, len(paths_NTLK))]
        if how == "one batch":
            batches = [np.arange(len(paths_NTLK))]
        elif how != "two batches":
            known = paths_NTLK[:, step if how.endswith("foreseen") else step - 1]
            plan = regroup(_visited(known, num_experts))
            batches = [plan.first, plan.second]
        for batch in batches:
            for layer, cache in enumerate(caches):
                wanted = np.unique(paths_NTLK[batch, step, layer])
                total += _take(cache, wanted[wanted < num_experts].tolist(), num_slots)
    return total


def _visited(paths_NLK: np.ndarray, num_experts: int) -> np.ndarray:
    """The same as ``[N, L, E]`` bool."""
    experts = np.arange(num_experts)
    return (paths_NLK[..., None, :] == experts[:, None]).any(axis=-1)


def _take(cache: OrderedDict[int, None], wanted: list[int], num_slots: int) -> int:
    """Reads what a step wants; gives how many were not there. The last ones stay."""
    missing = [expert for expert in wanted if expert not in cache]
    for expert in wanted:
        cache[expert] = None
        cache.move_to_end(expert)
    while len(cache) > num_slots:
        cache.popitem(last=False)
    return len(missing)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="a recorded trace")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--steps", type=int, default=60, help="tokens each sequence decodes")
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--save", action="store_true", help="write this machine's results file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
