"""Prefetch off, enforce and auto, by policy: `python benchmarks/prefetch_matrix.py TRACE`.

The routing of a trace is replayed in virtual time: predictors and policies that other requests of
the model taught, shares of its experts in memory, and disks and links of many speeds. No clock is
used: the seconds follow from the machine. The policy, the predictor, the admission of guesses and
the controller are the objects that run live.
"""

import argparse
import copy
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.cases.routed import TracedModel, take_routes
from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.lab.replay.timed import Machine, TimedReplay, replay_timed
from moe_runtime.lab.replay.untimed import DemandReplay, replay_demand
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.lab.traces.routes import routes_of, trace_of_routes
from moe_runtime.lab.traces.workload import Workload, workload_of
from moe_runtime.policies.eviction import LRU, LayerShares, Setting, even_shares, make_policy, reuse
from moe_runtime.policies.eviction.base import Maker
from moe_runtime.policies.prediction import Estimator, Routes, TrackedPredictor, make_estimator
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.policies.prefetch import Controller

SHARES, LINKS_GB_S = (0.125, 0.25, 0.5), (3.4, 12, 25, 50)
PREDICTORS = ("running-counts", "layer-affinity", "combined")
LATENCY_S, PREDICT_S = 1e-4, 8e-5
LAYER_S, EXPERT_S = {"CPU": 1.5e-3, "device": 1e-4}, {"CPU": 6.5e-4, "device": 3e-5}
"""Attention and one expert: of gpt-oss-20b on two cores, and on a device. Disks of up to 4 GB/s
serve the CPU, links the device."""
BF16_BYTES = 49_766_400
CODES = {"bf16": (1.0, 1.0), "lossless code": (0.698, 0.72)}
"""Bytes read and bytes of a slot, relative to bf16."""
METRICS = facts("s", "off_s", "enforce_s", "auto_s", "bound_s", "optimum_bound_s") | facts(
    "share", "auto_of_best", "hits", "useful", better="more"
)


def machine_of(expert_bytes: int, link_gb_s: float) -> Machine:
    place = "CPU" if link_gb_s < 4 else "device"
    return Machine(
        bytes_per_s=link_gb_s * 1e9,
        latency_s=LATENCY_S if place == "CPU" else LATENCY_S / 10,
        expert_bytes=expert_bytes,
        layer_s=LAYER_S[place],
        expert_s=EXPERT_S[place],
        predict_s=PREDICT_S,
    )


def taught(learned: Routes) -> Callable[[], reuse.ReuseEstimator | reuse.CompiledReuse]:
    """Makes estimators of `reuse` that start from the training requests alone."""
    first = reuse.new_estimator(learned.shape)
    if not reuse.teach(first, learned):
        raise UnsupportedUseError("the trace of --train has too few tokens; record more prompts")
    state = first.learned()

    def make() -> reuse.ReuseEstimator | reuse.CompiledReuse:
        estimator = reuse.new_estimator(learned.shape)
        estimator.restore(state)
        return estimator

    return make


def served_and_learned(options: argparse.Namespace) -> tuple[Workload, Routes]:
    """The first tokens of some requests, and all requests to learn from."""
    learned = read_any_trace(options.train)
    signature = learned.signature
    asked = TracedModel(options.train.name, signature, signature.num_layers)
    try:
        routes = take_routes(options.trace, asked, options.requests, options.steps)
    except ValueError as error:
        raise UnsupportedUseError(str(error)) from None
    return workload_of(trace_of_routes(routes, signature)), routes_of(learned)


def optimum(served: Workload, num_slots: int) -> DemandReplay:
    """Reads of Belady's optimum with bypassing."""
    setting = Setting(shape=shape_of(served.trace.signature))
    return replay_demand(
        served,
        lambda events: make_policy(
            "belady-bypass", num_slots=num_slots, setting=replace(setting, future=events)
        ),
        num_slots,
    )


TRACES: dict[str, Any] = {
    "trace": option(Path, "recorded routing that is served"),
    "train": option(Path, "other requests, which teach", required=True),
    "requests": option(4, "that are served"),
}


def compare(
    served: Workload,
    make: Callable[[], Maker],
    machine: Machine,
    num_slots: int,
    estimators: Mapping[str, Estimator],
) -> dict[str, dict[str, float]]:
    """`METRICS` of a policy, by predictor: means of a step."""
    signature, steps = served.trace.signature, served.trace.num_steps

    def replay(estimator: Estimator | None, *, auto: bool = False) -> TimedReplay:
        return replay_timed(
            served,
            LayerShares(make(), even_shares(num_slots, signature.num_layers)),
            num_slots,
            machine,
            predictor=None if estimator is None else TrackedPredictor(copy.deepcopy(estimator)),
            controller=Controller() if auto else None,
        )

    def reads_s(number: int) -> float:
        return number * machine.transfer_s / steps

    computing_s = machine.layer_s * signature.num_layers
    computing_s += machine.expert_s * len(served.key_numbers) / steps
    best = optimum(served, num_slots)
    off, found = replay(None), {}
    for name, estimator in estimators.items():
        on, auto = replay(estimator), replay(estimator, auto=True)
        total = on.total
        found[name] = {
            "off_s": off.seconds / steps,
            "enforce_s": on.seconds / steps,
            "auto_s": auto.seconds / steps,
            "bound_s": max(computing_s, reads_s(total.misses + total.prefetches)),
            "optimum_bound_s": max(computing_s, reads_s(best.num_accesses - best.num_hits)),
            "auto_of_best": min(off.seconds, on.seconds) / auto.seconds,
            "hits": off.total.hits / len(served.key_numbers),
            "useful": total.useful / max(total.prefetches, 1),
        }
    return found


def compare_codes(
    served: Workload,
    policies: Mapping[str, Callable[[], Maker]],
    estimators: Mapping[str, Estimator],
    milliseconds: Sequence[float],
    results: ScriptResults,
) -> None:
    """Experts in bf16 and in the lossless code, in memory for a quarter of the bf16 experts."""
    signature = served.trace.signature
    disk = machine_of(BF16_BYTES, LINKS_GB_S[0])
    for name, (share, of_slot), ms in zip(CODES, CODES.values(), milliseconds, strict=True):
        num_slots = round(signature.num_layers * signature.num_experts / 4 / of_slot)
        machine = replace(disk, expert_bytes=round(BF16_BYTES * share), expert_s=ms / 1e3)
        for policy in ("lru", "reuse, taught"):
            found = compare(served, policies[policy], machine, num_slots, estimators)
            results.add(f"{name}; {policy}", [found["combined"]])


def draw(results: ScriptResults, path: Path) -> None:
    """Plot milliseconds of a step by share and link, with each predictor's bound as a mark."""
    from moe_runtime.lab.report.page import INK, SERIES, drawing

    cases = dict.fromkeys(tuple(name.split("; ")[:2]) for name in results.systems)
    columns = list(dict.fromkeys(name.split("; ", 2)[2] for name in results.systems))
    with drawing() as new_figure:
        rows = -(-len(cases) // len(SHARES))
        figure = new_figure(figsize=(10, 2.6 * rows))
        for number, case in enumerate(cases, 1):
            axes = figure.add_subplot(rows, len(SHARES), number)
            for place, kind in enumerate(("off_s", "enforce_s", "auto_s", "bound_s")):
                values = [results.value("; ".join((*case, one)), kind) or 0.0 for one in columns]
                heights = [1e3 * value for value in values]
                if kind == "bound_s":
                    axes.plot(range(len(columns)), heights, "_", color=INK, label="bound")
                else:
                    where = [at + 0.27 * (place - 1) for at in range(len(columns))]
                    axes.bar(where, heights, 0.25, color=SERIES[place], label=kind[:-2])
            axes.set_title(", ".join(case), fontsize=8)
            axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=5)
            axes.set_ylabel("ms", fontsize=7)
        figure.legend(
            *figure.axes[-1].get_legend_handles_labels(), loc="outside upper right", ncols=4
        )
        figure.savefig(path, dpi=100)


INSTEAD = "instead: experts in bf16 and in the lossless code, which take so long to compute"


@script(
    **TRACES,
    steps=option(100, "of each request"),
    expert_bytes=13_300_000,
    bf16=option(None, INSTEAD, type=float, nargs=2, metavar="MS"),
    links=option(LINKS_GB_S, "disks and links", type=float, nargs="+", metavar="GB/S"),
    picture=option(None, "draw the steps here", type=Path),
)
def main(options: argparse.Namespace) -> int:
    served, learned = served_and_learned(options)
    signature, shape = served.trace.signature, learned.shape
    estimators = {name: make_estimator(name, shape) for name in PREDICTORS}
    for estimator in estimators.values():
        estimator.fit(learned)
    new_taught = taught(learned)
    policies: dict[str, Callable[[], Maker]] = {
        "lru": lambda: LRU,
        "reuse": lambda: reuse.maker_of(reuse.new_estimator(shape)),
        "reuse, taught": lambda: reuse.maker_of(new_taught()),
    }
    settings = {"trace": options.trace.name, "train": options.train.name, "steps": options.steps}
    results = ScriptResults("prefetch-matrix", options, settings, METRICS)
    if options.bf16 is not None:
        settings["milliseconds"] = options.bf16
        compare_codes(served, policies, {"combined": estimators["combined"]}, options.bf16, results)
        return results.finish()
    for link, share, policy in itertools.product(options.links, SHARES, policies):
        num_slots = round(share * signature.num_layers * signature.num_experts)
        machine = machine_of(options.expert_bytes, link)
        found = compare(served, policies[policy], machine, num_slots, estimators)
        for name, numbers in found.items():
            results.add(f"{link:g} GB/s; {share:.1%} resident; {policy}, {name}", [numbers])
    if options.picture is not None:
        draw(results, options.picture)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
