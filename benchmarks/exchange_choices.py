"""`[parallel] ... = "auto"` and fixed choices: `python benchmarks/exchange_choices.py [--save]`.

Layers of several shapes run in virtual time on clusters of several kinds, under loads that drift.
No clock and no device is used: the seconds follow from links, products and rows. Fixed are every
transport, overlap and kind of experts; `auto` chooses by the same code as a run. Sparse experts,
which take memory for copies on every rank, are told apart: `auto` takes none.

Shape suffixes: E experts, P ranks, N steps.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moe_runtime.benchmarks.harness import scripting
from moe_runtime.benchmarks.suite import facts
from moe_runtime.lab.simulate.scaling import (
    ASSUMED,
    LayerSchedule,
    LayerWorkload,
    predict_layer,
    read_machine,
)
from moe_runtime.parallel import ExpertSlots
from moe_runtime.parallel.cluster import Cluster, Link
from moe_runtime.parallel.parallel_experts import RebalanceRule, rank_loads
from moe_runtime.parallel.replicas import transfers_between
from moe_runtime.research.hecate import plan_copies
from moe_runtime.research.parallelism_switching import cheapest_degree
from moe_runtime.training.exchange_choice import (
    DEGREES,
    ExchangeChoice,
    RoutedLayerShape,
    SecondsOfMoves,
)

METRICS = facts("s", "auto_s", "best_s", "worst_s", "with_copies_s") | facts("share", "of_the_best")
EVERY, COPIES, PASSES = 10, 2, 2
"""Steps between looks; Hecate's copies per rank; passes per step."""
PLACES = ("static", "rebalanced", "switching")


@dataclass(frozen=True)
class Layer:
    """A layer of experts on a cluster, and the attention before it.

    Attributes:
        dim: of the model.
    """

    cluster: Cluster
    shape: RoutedLayerShape
    dim: int

    @property
    def attention_s(self) -> float:
        """Seconds of a pass's attention (four projections), which hides the transfer of copies."""
        tokens = self.shape.rows / TOP_K[self.shape.num_experts]
        return tokens * 8 * self.dim**2 / self.cluster.flops_per_s


TOP_K = {32: 2, 128: 8, 64: 4}
SHAPES = {
    "few large experts": (8192, 32, 4096, 14336),
    "many experts": (4096, 128, 2048, 768),
    "small experts": (16384, 64, 512, 256),
}
"""Tokens per rank and pass, experts, model width, expert width; bf16."""


def clusters() -> dict[str, Cluster]:
    measured = read_machine(Path(__file__).parent / "machines" / "h800.toml")
    slow = replace(ASSUMED, inter=Link(alpha_s=3e-5, bytes_per_s=2.5e9))
    gloo = Link(alpha_s=1e-4, bytes_per_s=2e9, occupies_compute=True)
    return {
        "one machine of 4": replace(ASSUMED, num_ranks=4),
        "two machines of 2 H800": replace(measured, ranks_per_node=2, num_ranks=4),
        "two machines of 2 on a slow network": replace(slow, ranks_per_node=2, num_ranks=4),
        "4 processes of a CPU": Cluster(
            num_ranks=4, ranks_per_node=4, intra=gloo, inter=gloo, flops_per_s=1e11
        ),
    }


BLOCK = {"equal": 8, "still": 8, "slow": 8, "sudden": 8, "fast": 4}
"""Steps with equal loads, by kind of drift."""


def loads_of(kind: str, num_experts: int, num_steps: int) -> np.ndarray:
    """`[N, E]`: Zipf-distributed loads whose order drifts."""
    random = np.random.default_rng(0)
    zipf_E = np.arange(1, num_experts + 1) ** -0.8
    order_E = random.permutation(num_experts)
    rows = []
    for step in range(num_steps):
        if step % BLOCK[kind]:
            rows.append(rows[-1])
            continue
        if kind == "slow":
            one, other = random.integers(num_experts, size=2)
            order_E[[one, other]] = order_E[[other, one]]
        if kind == "fast" or (kind == "sudden" and step == num_steps // 2):
            order_E = random.permutation(num_experts)
        loads_E = np.ones(num_experts) if kind == "equal" else zipf_E[order_E]
        rows.append(loads_E * random.lognormal(0, 0.1, num_experts))
    return np.stack(rows)


class Run:
    """Simulates the steps of a layer and sums their `seconds`.

    Args:
        schedules: fixed where there is one.
        places: "auto" or a fixed kind.
    """

    def __init__(self, layer: Layer, schedules: list[LayerSchedule], places: str) -> None:
        self._layer, self._places = layer, places
        self._choice = choice = ExchangeChoice(layer.cluster, layer.shape, schedules)
        size = layer.cluster.num_ranks
        self._schedule = choice.best(np.ones(size))
        experts = layer.shape.num_experts
        self._slots = replace(
            ExpertSlots.contiguous(experts, size), ranks_per_node=layer.cluster.local_ranks
        )
        costs = SecondsOfMoves(choice, PASSES * EVERY) if places == "auto" else None
        if places == "auto":
            self._places = "switching" if choice.gathers else "rebalanced"
        self._rule = RebalanceRule(experts, costs=costs)
        self._counted_E, self._last_E = np.zeros(experts), np.ones(experts)
        self._gathers = self._places == "switching" and self._cheapest() == 0
        self.seconds, self._known = 0.0, dict[bytes, float]()

    def _cheapest(self) -> int:
        """The choice of switching experts, by the link between the slowest ranks."""
        cluster, shape = self._layer.cluster, self._layer.shape
        link = cluster.inter if cluster.num_nodes > 1 else cluster.intra
        return cheapest_degree(
            (0, 1), row_bytes=shape.rows * shape.row_bytes, expert_bytes=shape.expert_bytes,
            num_experts=shape.num_experts, num_ranks=cluster.num_ranks,
            alpha_s=link.alpha_s, beta_s_per_byte=1 / link.bytes_per_s,
        )  # fmt: skip

    def step(self, number: int, loads_E: np.ndarray) -> None:
        if self._gathers:
            self.seconds += PASSES * self._choice.gather_s()
        elif self._places == "sparse":
            self.seconds += PASSES * self._once(loads_E, self._last_E)
        else:
            self.seconds += PASSES * self._once(rank_loads(loads_E, self._slots))
        self._last_E = loads_E
        self._counted_E += loads_E
        if (number + 1) % EVERY:
            return
        if self._places == "rebalanced":
            slots, _, _ = self._rule.look(self._counted_E, self._slots)
            if slots is not None:
                self.seconds += self._choice.move_s(transfers_between(self._slots, slots))
                self._slots = slots
        loads_P = rank_loads(self._counted_E, self._slots)
        self._schedule = self._choice.best(loads_P, self._schedule)
        self._counted_E = np.zeros_like(self._counted_E)

    def _once(self, loads: np.ndarray, last_E: np.ndarray | None = None) -> float:
        """Seconds of a pass with loads of ranks, or with present and previous loads of experts."""
        key = loads.tobytes() + repr(self._schedule).encode()
        if last_E is not None:
            key += last_E.tobytes()
        if key not in self._known:
            self._known[key] = (
                self._choice.layer_s(loads, self._schedule)
                if last_E is None
                else self._sparse_s(loads, last_E)
            )
        return self._known[key]

    def _sparse_s(self, loads_E: np.ndarray, last_E: np.ndarray) -> float:
        """Seconds with copies by the loads of the previous step; attention hides their transfer."""
        layer, shape, slots = self._layer, self._layer.shape, self._slots
        size, each = layer.cluster.num_ranks, layer.cluster.local_ranks
        owners = [held[0][0] // slots.slots_per_rank for held in slots.holders]
        copies = plan_copies(
            last_E.tolist(), owners, num_devices=size, devices_per_node=each,
            max_experts=COPIES, slots_per_device=COPIES,
        )  # fmt: skip
        share_E = shape.rows * loads_E / loads_E.sum()
        rows_PP = np.zeros((size, size))
        for expert, owner in enumerate(owners):
            rows_PP[:, owner] += share_E[expert]
        for rank, held in enumerate(copies):
            for expert in held:
                rows_PP[rank, owners[expert]] -= share_E[expert]
                rows_PP[rank, rank] += share_E[expert]
        workload = LayerWorkload(
            rows_PP=rows_PP, row_bytes=shape.row_bytes, flops_per_row=shape.flops_per_row
        )
        sent = np.bincount([owners[e] for held in copies for e in held], minlength=size)
        moved = max(int(sent.max(initial=0)), max(map(len, copies)))
        link = layer.cluster.inter if layer.cluster.num_nodes > 1 else layer.cluster.intra
        copy_s = float(link.seconds(size - 1, moved * shape.expert_bytes))
        is_hidden = not link.occupies_compute
        seconds = predict_layer(layer.cluster, workload, self._schedule).layer_s
        return seconds + max(0.0, copy_s - is_hidden * layer.attention_s)


def schedules_on(cluster: Cluster) -> list[LayerSchedule]:
    ways = (False, True) if cluster.num_nodes > 1 else (False,)
    return [
        LayerSchedule(degree=degree, hierarchical=way, is_local_first=True, is_shared_first=True)
        for way in ways
        for degree in DEGREES
    ]


def seconds_of(layer: Layer, loads_NE: np.ndarray) -> Iterator[tuple[str, float]]:
    """Seconds with auto, with sparse experts, and with every fixed choice."""
    schedules = schedules_on(layer.cluster)
    runs = {name: Run(layer, schedules, name) for name in ("auto", "sparse")}
    for schedule, places in itertools.product(schedules, PLACES):
        way = "hierarchical" if schedule.hierarchical else "flat"
        runs[f"{way}, {schedule.degree}, {places}"] = Run(layer, [schedule], places)
    for name, run in runs.items():
        for number, loads_E in enumerate(loads_NE):
            run.step(number, loads_E)
        yield name, run.seconds


@scripting.script(steps=240)
def main(options: Namespace) -> int:
    settings = {"steps": options.steps, "every": EVERY, "copies": COPIES, "zipf": 0.8}
    results = scripting.ScriptResults(
        "exchange-choices", options, settings, METRICS, machine="virtual"
    )
    worst = 0.0
    for (where, cluster), (what, sizes) in itertools.product(clusters().items(), SHAPES.items()):
        tokens, experts, dim, width = sizes
        shape = RoutedLayerShape(
            rows=tokens * TOP_K[experts], row_bytes=2 * dim, num_experts=experts,
            expert_numbers=3 * dim * width, number_bytes=2,
        )  # fmt: skip
        layer = Layer(cluster, shape, dim)
        for kind in BLOCK:
            found = dict(seconds_of(layer, loads_of(kind, experts, options.steps)))
            auto_s = found.pop("auto")
            copies_s = found.pop("sparse")
            best = min(found, key=lambda name: found[name])
            row = {
                "auto_s": auto_s,
                "with_copies_s": copies_s,
                "best_s": found[best],
                "worst_s": max(found.values()),
            }
            worst = max(worst, ratio := auto_s / found[best])
            name = f"{where}, {what}, loads {kind}; best fixed: {best}"
            results.add(name, [row | {"of_the_best": ratio}])
    print(f"auto takes at most {worst:.3f} of the time of the best fixed choice")
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
