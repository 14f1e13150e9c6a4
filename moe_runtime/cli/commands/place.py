"""``moe-runtime place``: place a model's experts on devices, from a recorded trace."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import loading_bar, print_json, print_table
from moe_runtime.cli.strict import refuse_given

if TYPE_CHECKING:
    from moe_runtime.policies.placement import Devices, PlacementOptions

_READERS = {
    "groups": {"eplb"},
    "load_slack": {"moetuner"},
    "time_limit": {"exflow", "moetuner"},
    "align": {"eplb", "greedy", "anti-correlation"},
}
"""Parameters of some algorithms only; the others are of all."""

_COLUMNS = {
    "balancedness": "balance",
    "mean_max_load": "peak load",
    "hops": "hops",
    "node_hops": "node hops",
    "devices_per_token": "devices/token",
    "staying_rows": "rows, staying",
}


@dataclass(frozen=True, kw_only=True)
class Placing:
    """Devices, and how experts are placed on them.

    Args:
        gpus: Devices (ranks) on all nodes together.
        nodes: Number of machines that the devices are divided among.
        replicas: Slots of a layer for second copies of hot experts.
        groups: Groups of experts that stay on one node (eplb).
        fit: Share of the trace that the placement is made from; the rest is for scores.
        load_slack: Load beyond the best balance that may buy fewer hops (moetuner).
        time_limit: Seconds for the search (exflow, moetuner), which returns the best placement
            found.
        align: Rename devices layer by layer to save hops (eplb, greedy, anti-correlation). Balance
            does not change.
    """

    gpus: options.Count
    nodes: options.Count = 1
    replicas: options.Natural = 0
    groups: options.Count = 1
    fit: float = 0.5
    load_slack: options.NotNegative = 0.1
    time_limit: Annotated[float, typer.Option(min=0.1)] = 30.0
    align: bool = True

    def devices(self) -> "Devices":
        from moe_runtime.policies.placement import Devices

        if self.gpus % self.nodes:
            raise ValueError(f"--gpus {self.gpus} is not a multiple of --nodes {self.nodes}")
        return Devices(num_nodes=self.nodes, gpus_per_node=self.gpus // self.nodes)

    def options(self) -> "PlacementOptions":
        from moe_runtime.policies.placement import PlacementOptions

        return PlacementOptions(
            num_groups=self.groups,
            time_limit_s=self.time_limit,
            load_slack=self.load_slack,
            aligned=self.align,
        )


def place(
    ctx: typer.Context,
    *,
    trace: Annotated[Path, typer.Argument(metavar="TRACE")],
    placing: Placing,
    algorithm: str = "eplb",
    output: Annotated[Path | None, typer.Option("--output", "-o")] = None,
    from_map: Annotated[Path | None, typer.Option("--from")] = None,
    as_json: options.Json = False,
) -> None:
    """Place experts and replicas on devices, and score the placement on the rest of the trace.

    Balance is the mean load of the devices divided by the largest (1 is perfect). A hop is a token
    that changes device between two layers. Scores use tokens that the placement was not made from.

    Args:
        trace: Recorded by `run --trace`, of the same model.
        algorithm: eplb balances load with replicas; greedy and anti-correlation without; exflow
            saves hops between devices; moetuner does both; round-robin is the default without a
            map.
        output: Map to write; only scores are shown without it.
        from_map: The map in use: the new one needs the fewest transfers from it.
    """
    refuse_given(
        ctx,
        {name for name, readers in _READERS.items() if algorithm not in readers},
        f"has no effect on {algorithm}; leave it out, or name another --algorithm",
    )
    devices = placing.devices()
    from moe_runtime.lab.traces import read_trace
    from moe_runtime.parallel.placement_map import PlacementMap, load_placement_map
    from moe_runtime.policies.placement import RoundRobin, RoutingProfile
    from moe_runtime.policies.placement.scoring import random_score, score_placement, split_window
    from moe_runtime.research.placement_solvers import SEARCHING, check_algorithm, place_experts

    check_algorithm(algorithm)
    with loading_bar() as progress:

        def say(stage: str) -> None:
            progress(stage, 0, 0)

        say(f"reading {trace.name}")
        recorded = read_trace(trace)
        recorded.require_choices(trace)
        signature = recorded.signature
        current = None if from_map is None else load_placement_map(from_map)
        if current is not None:
            current.require(signature)
        past, future = split_window(recorded.expert_ids, placing.fit)
        say(f"counting the routing of {len(past)} tokens")
        profile = RoutingProfile.from_ids(past, signature.num_experts)
        limit = f", {placing.time_limit:g} s at most" if algorithm in SEARCHING else ""
        say(f"placing by {algorithm}{limit}")
        placement = place_experts(
            algorithm, profile, devices, num_replicas=placing.replicas, options=placing.options()
        )
        new = PlacementMap(
            signature=signature, devices=devices, placement=placement, algorithm=algorithm
        )
        update = None if current is None else current.update(new)
        if update is not None:
            new = update.target
        say(f"scoring on {len(future)} tokens")
        scores = {algorithm: score_placement(new.placement, future, devices)}
        if signature.num_experts % placing.gpus == 0 and algorithm != "round-robin":
            plain = RoundRobin()(profile, devices, num_replicas=0)
            scores["round-robin"] = score_placement(plain, future, devices)
        drawn = f"on {len(future)} tokens"
        scores["random"] = random_score(
            future,
            signature.num_experts,
            devices,
            on_draw=lambda number: say(f"scoring random placement {number} {drawn}"),
        )
    if output is not None:
        new.save(output)
    if as_json:
        print_json(
            {
                "algorithm": new.algorithm,
                "signature": dataclasses.asdict(new.signature),
                "num_nodes": new.devices.num_nodes,
                "num_gpus": new.devices.num_gpus,
                "slots_per_gpu": new.placement.slots_per_gpu,
                "output": None if output is None else str(output),
                "fit_tokens": len(past),
                "scored_tokens": len(future),
                "scores": {name: dataclasses.asdict(score) for name, score in scores.items()},
                "moves": None if update is None else len(update.moves),
                "transfers": None if update is None else update.num_transfers,
            }
        )
        return
    print_table(
        f"{new.devices.num_gpus} devices, {new.placement.slots_per_gpu} slots each; placed by "
        f"{len(past)} tokens, scored on the next {len(future)}",
        [("placement", "left"), *((title, "right") for title in _COLUMNS.values())],
        [
            (name, *(f"{getattr(score, column):.3f}" for column in _COLUMNS))
            for name, score in scores.items()
        ],
    )
    if update is not None:
        print(f"from the map in use: {update.num_transfers} experts move between devices")
    if output is not None:
        print(f"wrote {output}")
