"""Compare the simulator with measured layers and steps: `python benchmarks/scaling.py --ranks 1 2
4`.

Measures links, experts and copies in gloo processes, times whole expert-parallel layers and steps
of a model, and sets the simulator's prediction beside each. Runs under `torchrun` as well, with one
size of group.

Shape suffixes: T tokens, D model, K choices, E experts, P ranks, R rows, S slots.
"""

import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.benchmarks.cases.dispatch import meet, ranks_here
from moe_runtime.benchmarks.harness.scripting import ScriptResults, at_least, option, script
from moe_runtime.benchmarks.suite import Metric
from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.lab.simulate import scaling
from moe_runtime.lab.simulate.system import (
    SimulatedModel,
    SimulatedSteps,
    TrainLayout,
    simulate_training,
)
from moe_runtime.parallel import (
    ExpertSlots,
    FlatTransport,
    HierarchicalTransport,
    Overlap,
    Transport,
    combine,
    dispatch,
    expert_parallel,
)
from moe_runtime.parallel.cluster import Cluster, Link, fit_link
from moe_runtime.policies.placement import Devices, RoutingProfile, place_experts
from moe_runtime.routing import Routing

DIM, HIDDEN, NUM_EXPERTS, TOP_K, NUM_TOKENS = 512, 512, 16, 2, 1024
FLOPS_PER_ROW = 6 * DIM * HIDDEN


@dataclass(frozen=True)
class Case:
    """A layer that is timed and predicted."""

    zipf: float = 0.0
    degree: int = 1
    is_local_first: bool = False
    hierarchical: bool = False
    algorithm: str = "round-robin"
    num_replicas: int = 0
    straggler: int = 1


CASES = [
    *(Case(degree=degree, is_local_first=degree > 1) for degree in (1, 2, 4)),
    *(Case(zipf=1.0, degree=degree, is_local_first=degree > 1) for degree in (1, 4)),
    Case(zipf=1.0, algorithm="greedy"),
    Case(zipf=1.0, algorithm="eplb", num_replicas=4),
    Case(straggler=2),
    Case(hierarchical=True),
    Case(hierarchical=True, zipf=1.0, degree=2, is_local_first=True),
]


def make_experts(num_slots: int) -> StackedExperts:
    random = torch.Generator().manual_seed(0)
    return StackedExperts(
        gate_up=torch.randn(num_slots, 2 * HIDDEN, DIM, generator=random) / DIM**0.5,
        down=torch.randn(num_slots, DIM, HIDDEN, generator=random) / HIDDEN**0.5,
        has_gate=True,
    )


def time_in_turn(probes: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of the slowest rank, for each probe; all ranks run it at once."""
    times: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(rounds + 1):
        for name, probe in probes.items():
            dist.barrier()
            started = time.perf_counter()
            probe()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            times[name].append(float(seconds))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


EXPERT_ROWS = (16, 128, 512, 2048)
EXCHANGED_BYTES = (12 << 10, 48 << 10, 768 << 10, 3 << 20)
STAYING_TOKENS = (16, NUM_TOKENS)
READ_BYTES = 128 << 20
SMALL_TOKENS = 16


def machine_probes(transport: Transport) -> dict[str, Callable[[], Any]]:
    """The measurements that the simulator needs: experts, exchanges and copies."""
    here = NUM_EXPERTS // transport.size
    experts = make_experts(here)

    def compute(num_rows: int) -> None:
        counts_S = torch.full((here,), num_rows // here)
        grouped_expert_mlp(torch.ones(num_rows, DIM), counts_S, experts, activation="silu")

    def exchange(num_bytes: int) -> None:
        counts = torch.full((1, transport.size), num_bytes // (transport.size - 1))
        counts[0, transport.rank] = 0
        (route,) = transport.routes(counts, counts)
        rows = torch.zeros((int(counts.sum()), 1), dtype=torch.uint8)
        transport.exchange(rows, route).wait()

    read = torch.zeros(READ_BYTES // 4)
    return {
        "read": read.sum,
        **{f"experts {n}": partial(compute, n) for n in EXPERT_ROWS},
        **{f"exchange {n}": partial(exchange, n) for n in EXCHANGED_BYTES if transport.size > 1},
        **{f"stay {n}": partial(stay_here, n, transport) for n in STAYING_TOKENS},
    }


def as_machine(seconds: dict[str, float], num_ranks: int) -> tuple[Cluster, float]:
    """The machine, and the fixed cost of a layer: planning, in Python."""
    cores = len(os.sched_getaffinity(0))
    # Ranks that share a core were timed together; alone, each would take only its share.
    share = max(1.0, num_ranks / cores)

    def line(name: str, sizes: Sequence[int], amounts: Sequence[float]) -> Link:
        return fit_link(amounts, [seconds[f"{name} {n}"] / share for n in sizes])

    # Like a link, each has a fixed cost per call and a rate.
    experts = line("experts", EXPERT_ROWS, [n * FLOPS_PER_ROW for n in EXPERT_ROWS])
    exchanges = Link(alpha_s=0.0, bytes_per_s=float("inf"))
    if num_ranks > 1:
        exchanges = line("exchange", EXCHANGED_BYTES, EXCHANGED_BYTES)
    # Local rows pass through dispatch and combine without the exchange: they are read and written
    # before it, and written once more after it.
    copies = line("stay", STAYING_TOKENS, [4 * n * TOP_K * DIM * 4 for n in STAYING_TOKENS])
    link = Link(
        alpha_s=exchanges.alpha_s / max(1, num_ranks - 1),
        bytes_per_s=exchanges.bytes_per_s,
        # gloo copies on the CPU without a spare core: a rank that sends does not compute.
        occupies_compute=True,
    )
    cluster = Cluster(
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
        processors_per_node=cores,
        intra=link,
        inter=link,
        flops_per_s=experts.bytes_per_s,
        launch_s=experts.alpha_s,
        copy_bytes_per_s=copies.bytes_per_s,
        memory_bytes_per_s=READ_BYTES / (seconds["read"] / share),
    )
    # It includes three exchanges: of counts, and of no rows in both directions.
    return cluster, max(0.0, copies.alpha_s - 3 * exchanges.alpha_s)


def stay_here(num_tokens: int, transport: Transport | None) -> None:
    """Dispatch and combine of tokens whose experts are all local."""
    size, rank = (1, 0) if transport is None else (transport.size, transport.rank)
    here = NUM_EXPERTS // size
    ids_TK = torch.arange(num_tokens * TOP_K).view(-1, TOP_K) % here + rank * here
    routing = Routing(ids_TK, torch.ones(num_tokens, TOP_K), NUM_EXPERTS)
    with torch.no_grad():
        dispatched = dispatch(torch.ones(num_tokens, DIM), routing, transport)
        combine(dispatched.rows_RD, dispatched)


class Layer:
    """A case on this rank: a layer to time, and the rows for the simulator."""

    def __init__(
        self, case: Case, transport: Transport, seed: int = 1, num_tokens: int = NUM_TOKENS
    ) -> None:
        self._case, self._transport = case, transport
        rank, size = transport.rank, transport.size
        popularity_E = torch.arange(1, NUM_EXPERTS + 1) ** -case.zipf
        order = torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(seed))
        popularity_E = popularity_E[order]
        random = torch.Generator().manual_seed(rank)
        ids_TK = popularity_E.expand(num_tokens, -1).multinomial(TOP_K, generator=random)
        placement = place_experts(
            case.algorithm,
            RoutingProfile.from_loads(popularity_E.numpy()[None]),
            Devices(num_nodes=1, gpus_per_node=size),
            num_replicas=case.num_replicas,
        )
        ranks_PS = placement.expert_of_slot[0].reshape(size, -1).tolist()
        self._slots = ExpertSlots.from_ranks(ranks_PS, NUM_EXPERTS)
        self._experts = make_experts(self._slots.slots_per_rank)
        weights_TK = torch.full(ids_TK.shape, 1 / TOP_K)
        self._routing = Routing(ids_TK, weights_TK, NUM_EXPERTS)
        self._x_TD = torch.randn(num_tokens, DIM)

    def run(self) -> None:
        case = self._case
        with torch.no_grad():
            expert_parallel(
                self._x_TD,
                self._routing,
                self._compute,
                self._transport,
                slots=self._slots,
                overlap=Overlap(degree=case.degree, is_local_first=case.is_local_first),
            )

    def _compute(self, rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        for _ in range(self._case.straggler - 1 if self._transport.rank == 0 else 0):
            grouped_expert_mlp(rows_RD, counts_S, self._experts, activation="silu")
            stay_here(NUM_TOKENS, None)
        return grouped_expert_mlp(rows_RD, counts_S, self._experts, activation="silu")

    def predict_s(self, cluster: Cluster, fixed_s: float) -> float:
        """The simulator's seconds; a collective call."""
        case, rank, size = self._case, self._transport.rank, self._transport.size
        slots_TK = self._slots.table(rank, torch.device("cpu")).slots_of(self._routing.ids_TK)
        sent_P = (slots_TK.flatten() // self._slots.slots_per_rank).bincount(minlength=size)
        rows_PP = [torch.empty_like(sent_P) for _ in range(size)]
        dist.all_gather(rows_PP, sent_P)
        if case.hierarchical:
            # "Machines" of two ranks, each with its share of the cores.
            shared = max(1, (cluster.processors_per_node or size) // (size // 2))
            cluster = replace(cluster, ranks_per_node=2, processors_per_node=shared)
        slowdown_P = torch.ones(size, dtype=torch.float64)
        slowdown_P[0] = case.straggler
        workload = scaling.LayerWorkload(
            rows_PP=torch.stack(rows_PP).double().numpy(),
            row_bytes=4 * DIM,
            flops_per_row=FLOPS_PER_ROW,
            gate_s=fixed_s,
            slowdown_P=slowdown_P.numpy(),
        )
        schedule = scaling.LayerSchedule(
            degree=case.degree, hierarchical=case.hierarchical, is_local_first=case.is_local_first
        )
        return scaling.predict_layer(cluster, workload, schedule).layer_s


NUM_LAYERS = 4
STACK = SimulatedModel(
    num_layers=NUM_LAYERS,
    model_dim=DIM,
    num_experts=NUM_EXPERTS,
    top_k=TOP_K,
    expert_hidden=HIDDEN,
    dense_parameters=NUM_LAYERS * 8 * DIM * DIM,
    kv_bytes_per_token=1.0,
    bytes_per_weight=4,
    bytes_per_activation=4,
)
STEPS = {"step of 64": (64, False), "step of 1024": (1024, False), "training, 512": (512, True)}
"""Tokens of each rank, and whether the step trains (backward, all-reduce, AdamW)."""


class Stack:
    """This rank's model (dense matrices and experts of several layers) and its tokens."""

    def __init__(self, transport: Transport) -> None:
        self._transport, size = transport, transport.size
        random = torch.Generator().manual_seed(transport.rank)
        shapes = ((4 * DIM, DIM), (DIM, 4 * DIM))
        self._dense = [[torch.randn(s) / s[1] ** 0.5 for s in shapes] for _ in range(NUM_LAYERS)]
        self._experts = [make_experts(NUM_EXPERTS // size) for _ in range(NUM_LAYERS)]
        self._slots = ExpertSlots.contiguous(NUM_EXPERTS, size)
        self._x_TD = torch.randn(1024, DIM)
        ids_LTK = torch.rand(NUM_LAYERS, 1024, NUM_EXPERTS, generator=random).topk(TOP_K).indices
        self._ids_LTK = ids_LTK
        experts = [w for one in self._experts for w in (one.gate_up, one.down)]
        self._matrices = [w for pair in self._dense for w in pair]
        weights = [w.requires_grad_() for w in (*self._matrices, *experts)]
        self._optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=True)

    def run(self, num_tokens: int, is_training: bool) -> None:
        with torch.set_grad_enabled(is_training):
            x_TD = self._x_TD[:num_tokens]
            for layer, (up, down) in enumerate(self._dense):
                x_TD = x_TD + torch.relu(x_TD @ up.T) @ down.T / 8
                ids_TK = self._ids_LTK[layer, :num_tokens]
                weights_TK = torch.full(ids_TK.shape, 1 / TOP_K)
                routing = Routing(ids_TK, weights_TK, NUM_EXPERTS)
                compute = partial(self._compute, layer)
                x_TD = x_TD + expert_parallel(
                    x_TD, routing, compute, self._transport, slots=self._slots
                )
        if is_training:
            x_TD.sum().backward()
            if self._transport.size > 1:
                flat = torch.cat([w.grad.flatten() for w in self._matrices if w.grad is not None])
                dist.all_reduce(flat)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=False)

    def _compute(self, layer: int, rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        return grouped_expert_mlp(rows_RD, counts_S, self._experts[layer], activation="silu")

    @staticmethod
    def predict_s(cluster: Cluster, fixed_s: float) -> dict[str, float]:
        """The simulator's seconds of each step, with a fixed cost per layer call."""
        cluster = replace(cluster, launch_s=cluster.launch_s + fixed_s)
        times, found = SimulatedSteps(cluster, STACK), {}
        for name, (tokens, is_training) in STEPS.items():
            found[name] = times.step_s(tokens)
            if is_training:
                layout = TrainLayout(expert_ranks=cluster.num_ranks, tokens=tokens)
                found[name] = simulate_training(cluster, STACK, layout=layout).step_s
        return found


def measure(rounds: int) -> dict[str, Any]:
    """Measure the machine and all cases for this group size; on every rank."""
    group, size = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    flat: Transport = FlatTransport(group)
    grid, cases = flat, [case for case in CASES if not case.hierarchical]
    if size % 2 == 0 and size > 2:
        pairs = [[first, first + 1] for first in range(0, size, 2)]
        columns = [list(range(column, size, 2)) for column in (0, 1)]
        inside, _ = dist.new_subgroups_by_enumeration(pairs)
        across, _ = dist.new_subgroups_by_enumeration(columns)
        assert isinstance(inside, dist.ProcessGroup)
        assert isinstance(across, dist.ProcessGroup)
        grid, cases = HierarchicalTransport(inside, across), CASES
    layers = [Layer(case, grid if case.hierarchical else flat) for case in cases if size > 1]
    stack = Stack(flat)
    small = Layer(Case(), flat, num_tokens=SMALL_TOKENS)
    probes = {"small layer": small.run, **machine_probes(flat)}
    probes |= {f"layer {index}": layer.run for index, layer in enumerate(layers)}
    probes |= {name: partial(stack.run, *step) for name, step in STEPS.items()}
    seconds = time_in_turn(probes, rounds)
    cluster, fixed_s = as_machine(seconds, size)
    # Waking other ranks costs more than exchanges alone show; a layer of few rows measures it.
    rest_s = max(0.0, seconds["small layer"] - small.predict_s(cluster, fixed_s))
    fixed_s += rest_s / max(1.0, size / len(os.sched_getaffinity(0)))
    rows = []
    for name, predicted_s in stack.predict_s(cluster, fixed_s).items():
        error = predicted_s / seconds[name] - 1
        row = {"measured_s": seconds[name], "predicted_s": predicted_s, "error": error}
        rows.append({"step": name, "ranks": size, **row})
    for index, (case, layer) in enumerate(zip(cases, layers, strict=False)):
        measured_s, predicted_s = seconds[f"layer {index}"], layer.predict_s(cluster, fixed_s)
        error, row = predicted_s / measured_s - 1, {"ranks": size, **asdict(case)}
        rows.append(row | {"measured_s": measured_s, "predicted_s": predicted_s, "error": error})
    for row in rows if dist.get_rank() == 0 else ():
        times = f"{1e3 * row['measured_s']:.1f} ms, predicted {1e3 * row['predicted_s']:.1f} ms"
        print(f"{_words(row)}: measured {times} ({row['error']:+.0%})", flush=True)
    return {"cluster": asdict(cluster), "fixed_s": fixed_s, "layers": rows}


def _words(row: dict[str, Any]) -> str:
    if "step" in row:
        return f"{row['ranks']} ranks, {row['step']} tokens each"
    exchange = "two levels" if row["hierarchical"] else "flat"
    return (
        f"{row['ranks']} ranks, {exchange}, {row['degree']} chunks, zipf {row['zipf']:g}, "
        f"{row['algorithm']}, straggler {row['straggler']}"
    )


def follow(number: int, rounds: int, num_ranks: int, store: str) -> None:
    """The program of all ranks but the first, where this script starts them."""
    meet(number + 1, num_ranks, store, lambda: None)
    measure(rounds)
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit


@script(
    ranks=option([1, 2, 4], "sizes to measure", type=at_least(1), nargs="*"),
    rounds=option(7, type=at_least(2)),
    write_machine=option(None, "for `moe-runtime simulate --machine`", type=Path),
)
def main(options: Namespace) -> int:
    if dist.is_torchelastic_launched():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        measured, is_first = [measure(options.rounds)], dist.get_rank() == 0
        dist.destroy_process_group()
        if not is_first:
            return 0
    else:
        measured = []
        with tempfile.TemporaryDirectory() as folder:
            for size in sorted(options.ranks):
                store = str(Path(folder, f"store-{size}"))
                with ranks_here(options.rounds, size, store, follow):
                    measured.append(measure(options.rounds))
    rows = {_words(row): row for group in measured for row in group["layers"]}
    for what in ("layers", "steps"):
        errors = [
            abs(row["error"]) for row in rows.values() if ("step" in row) == (what == "steps")
        ]
        if errors:
            spread = f"median {statistics.median(errors):.0%}, largest {max(errors):.0%}"
            print(f"error of the prediction: {spread} of {len(errors)} {what}")
    machines = [{"cluster": group["cluster"], "fixed_s": group["fixed_s"]} for group in measured]
    for machine in machines:
        finite = {name: v for name, v in machine["cluster"].items() if v != float("inf")}
        finite |= {
            name: {key: v for key, v in finite[name].items() if v != float("inf")}
            for name in ("intra", "inter")
        }
        machine["cluster"] = finite
    metrics = {name: Metric("s") for name in rows}
    results = ScriptResults("scaling", options, {"machines": machines}, metrics)
    for what in ("measured", "predicted"):
        results.add(what, [{name: row[f"{what}_s"] for name, row in rows.items()}])
    if options.write_machine:
        cluster = measured[-1]["cluster"]
        fields = cluster | {name: Link(**cluster[name]) for name in ("intra", "inter")}
        said = "Measured by benchmarks/scaling.py."
        scaling.write_machine(Cluster(**fields), options.write_machine, said)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
