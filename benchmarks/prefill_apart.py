"""Simulate prefill and decode on separate ranks: `python benchmarks/prefill_apart.py F...`.

The highest rate of recorded requests (CSV files as Azure published them) at which nine of ten have
their first token and the others in time: all ranks for both, and every division of the ranks that
holds the model twice, each with its best number of prompt tokens a step. As Splitwise and DistServe
compare. No measurement: the machine is that of `--machine`.
"""

import functools
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import ROOT, ScriptResults, option, positive, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.errors import CapacityError
from moe_runtime.lab.simulate.scaling import read_machine
from moe_runtime.lab.simulate.system import (
    Arrivals,
    SimulatedSteps,
    read_arrivals,
    read_model,
    simulate_serving,
)

MACHINES = ROOT / "benchmarks" / "machines"
STEP_TOKENS = (32, 64, 128, 256, 512, 1024)
GOOD_SHARE = 0.9


def best_rate(arrivals: Arrivals, least: float, serve: Any, limits: tuple[float, float]) -> float:
    """The highest rate, to 2 %, at which enough requests are in time; 0 if none is."""

    def is_good(factor: float) -> bool:
        return serve(arrivals.faster(factor)).met(*limits) >= GOOD_SHARE

    if not is_good(least):
        return 0.0
    low = high = least
    while is_good(high := 2 * high):
        low = high
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low * arrivals.rate


@script(
    files=option(Path, nargs="+"),
    machine=option(MACHINES / "cards-h800.toml", type=Path),
    model=option(MACHINES / "model-1t.toml", type=Path),
    ranks=option([64, 128], type=positive, nargs="*"),
    first_token=option(1.0, "seconds"),
    between_tokens=option(0.05, "seconds"),
)
def main(options: Namespace) -> int:
    limits = options.first_token, options.between_tokens
    names = [f"{path.stem} on {ranks}" for path in options.files for ranks in options.ranks]
    settings = {"machine": options.machine.stem, "model": options.model.stem, "limits_s": limits}
    metrics = facts("requests/s", *names)
    metrics |= facts("count", *(f"ranks for prompts, {name}" for name in names))
    results = ScriptResults("prefill-apart", options, settings, metrics, machine="simulated")
    found: dict[str, dict[str, float]] = {"together": {}, "apart": {}}
    for path in options.files:
        arrivals = read_arrivals(path)
        for ranks in options.ranks:
            cluster = replace(read_machine(options.machine), num_ranks=ranks)
            cluster = replace(cluster, disk_bytes_per_s=float("inf"))  # for small groups
            times: Any = functools.cache(SimulatedSteps)
            rates: dict[tuple[int, int], float] = {}
            for apart in (0, *range(8, ranks, 8)):
                for tokens in STEP_TOKENS:
                    serve = functools.partial(
                        simulate_serving,
                        cluster,
                        read_model(options.model),
                        step_tokens=tokens,
                        prefill_ranks=apart,
                        times=times,
                    )
                    try:
                        rates[apart, tokens] = best_rate(arrivals, 0.25, serve, limits)
                    except CapacityError:
                        break
            name = f"{path.stem} on {ranks}"
            for system, is_apart in (("together", False), ("apart", True)):
                own = {key: rate for key, rate in rates.items() if (key[0] > 0) == is_apart}
                best = max(own, key=own.__getitem__)
                found[system] |= {name: own[best], f"ranks for prompts, {name}": best[0]}
                print(f"{name}, {system}: {own[best]:.1f}/s with {best} ranks apart, tokens")
    for system, rates_of in found.items():
        results.add(system, [rates_of])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
