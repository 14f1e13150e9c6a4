"""Simulate serving and training a model of 1 T parameters: `python benchmarks/trillion.py`.

No measurement: links and rates are those of `benchmarks/machines`.
"""

import functools
import sys
from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np

from moe_runtime.benchmarks.harness.scripting import ROOT, ScriptResults, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.lab.simulate.scaling import read_machine
from moe_runtime.lab.simulate.system import (
    Failures,
    SimulatedSteps,
    TrainLayout,
    poisson_arrivals,
    read_model,
    search_layouts,
    simulate_serving,
    simulate_training,
)

MACHINES = ROOT / "benchmarks" / "machines"
SERVED = {"cards-h800": (64, (1.0, 125.0)), "server": (16, (0.01, 0.25))}
"""Ranks of a machine, and requests per second."""
REQUESTS, PROMPT, NEW = 1000, 1024, 256
TRAINED = (384, 4096)
TOKENS = 8192
PIPELINE = TrainLayout(stages=61, expert_ranks=8, tokens=TOKENS, micro_batches=244)
HOST_LINKS = {"no": None, "a slow": 1e9, "a": 2.5e10}
"""Bytes a second between a card and its host, of two bad lanes and of PCIe 4.0 x16; assumed."""
FAILURE_DAYS = 1000
RESTART_S = 300.0


@script()
def main(options: Namespace) -> int:
    settings = {"requests": REQUESTS, "prompt": PROMPT, "new": NEW, "micro_batch": TOKENS}
    settings |= {"failure_days": FAILURE_DAYS, "restart_s": RESTART_S}
    metrics = facts("s", "between_tokens_s") | facts("tokens/s", "tokens_per_s")
    metrics |= facts("bytes", "expert_bytes", "dense_bytes") | facts("count", "kv_tokens")
    metrics |= facts("share", "resident_share", "lost_share")
    metrics |= facts("bytes", "held_bytes") | facts("count", "held_micro_batches")
    results = ScriptResults("trillion", options, settings, metrics, machine="simulated")
    model = read_model(MACHINES / "model-1t.toml")
    for machine, (ranks, rates) in SERVED.items():
        cluster = replace(read_machine(MACHINES / f"{machine}.toml"), num_ranks=ranks)
        steps: Any = functools.cache(SimulatedSteps)
        times = SimulatedSteps(cluster, model)
        room = {
            name: float(getattr(times, name))
            for name in ("expert_bytes", "dense_bytes", "kv_tokens", "resident_share")
        }
        results.add(f"{ranks} of {machine}", [room])
        for rate in rates:
            asked = poisson_arrivals(REQUESTS, rate, PROMPT, NEW)
            found = simulate_serving(cluster, model, asked, times=steps)
            between_s = float(np.median(found.between_s))
            served = {"between_tokens_s": between_s, "tokens_per_s": found.tokens_per_s}
            results.add(f"{ranks} of {machine}, {rate:g}/s", [served])
    cards = read_machine(MACHINES / "cards-h800.toml")
    failures = Failures(86400.0 * FAILURE_DAYS, RESTART_S)
    for ranks in TRAINED:
        some = replace(cards, num_ranks=ranks)
        layout = TrainLayout(expert_ranks=ranks, tokens=TOKENS)
        trained = simulate_training(some, model, layout=layout, failures=failures)
        best, *_ = search_layouts(some, model, tokens=TOKENS, failures=failures)
        for name, one in (("training", trained), ("training in the best layout", best)):
            lost = {"tokens_per_s": one.tokens_per_s, "lost_share": 1 - one.useful_share}
            results.add(f"{name} on {ranks} of cards-h800", [lost])
    ranks = PIPELINE.stages * PIPELINE.expert_ranks
    inputs = TOKENS * model.model_dim * model.bytes_per_activation  # of a layer, a stage has one
    for name, host_bytes_per_s in HOST_LINKS.items():
        some = replace(cards, num_ranks=ranks, host_bytes_per_s=host_bytes_per_s)
        piped = simulate_training(some, model, layout=PIPELINE)
        kept = {
            "tokens_per_s": piped.tokens_per_s,
            "held_micro_batches": piped.held_micro_batches,
            "held_bytes": piped.held_micro_batches * inputs,
        }
        results.add(f"{PIPELINE.stages} stages with {name} link to the host", [kept])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
