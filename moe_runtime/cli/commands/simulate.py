"""``moe-runtime simulate``: a layer, a service, training, on ranks that one need not have."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import loading_bar, print_json, print_table
from moe_runtime.cli.strict import StrictCommand, argument, expanded, refuse_given
from moe_runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moe_runtime.lab.simulate.scaling import Imbalance, ScalingPoint, ShortcutSchedule
    from moe_runtime.lab.simulate.system import Failures, SimulatedModel
    from moe_runtime.parallel.cluster import Cluster

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

MOST_RANKS = 1 << 13

Some = Annotated[int, typer.Option(min=1, max=1_000_000)]
Sizes = Annotated[
    Path, argument("TOML file with the sizes of a model; see docs/scaling.md.", metavar="MODEL")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """What a model is spread over.

    Args:
        ranks: Numbers of ranks, separated by commas.
        machine: TOML file with measured links and rates; see docs/scaling.md.
        zipf: Skew of the experts' loads; 0 is none.
        algorithm: Placement, as in `moe-runtime place`.
        replicas_per_rank: Slots of each rank for second copies.
        straggler: How much slower rank 0 computes.
        failure_days: Days between two failures of one rank, on average; none when omitted.
        restart_seconds: From a failure to the next step.
    """

    ranks: str = "8,64,512"
    machine: Path | None = None
    zipf: options.NotNegative = 0.0
    algorithm: str = "round-robin"
    replicas_per_rank: options.Natural = 0
    straggler: Annotated[float, typer.Option(min=1.0)] = 1.0
    failure_days: Annotated[float | None, typer.Option(min=1e-6)] = None
    restart_seconds: options.NotNegative = 300.0

    def check(self, ctx: typer.Context) -> None:
        """Refuses what only failures make use of."""
        if self.failure_days is None:
            refuse_given(ctx, {"restart_seconds"}, "is for failures: give --failure-days too")


def simulate_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Predict layers, a service, or training on ranks that one need not have.",
        no_args_is_help=True,
    )
    for command in (layer, serve, train):
        app.command(cls=StrictCommand)(expanded(command))
    return app


def layer(
    ranks: str = "8,64,512",
    degrees: str = "1,2,4,8",
    machine: Path | None = None,
    tokens: options.Count = 8192,
    model_dim: options.Count = 4096,
    expert_hidden: options.Count = 14336,
    top_k: options.Count = 2,
    experts_per_rank: options.Count = 4,
    shared_hidden: options.Natural = 0,
    zipf: options.NotNegative = 0.0,
    algorithm: str = "round-robin",
    replicas_per_rank: options.Natural = 0,
    straggler: Annotated[float, typer.Option(min=1.0)] = 1.0,
    shortcut: str | None = None,
    plot: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Predict the time of one Mixture-of-Experts layer spread over many ranks.

    Compares a flat all-to-all with one in two levels, and numbers of chunks. Exposed is
    communication that no computation hides; its ratio is to a flat all-to-all without overlap.

    Args:
        ranks: Numbers of ranks, separated by commas.
        degrees: Numbers of chunks that rows are cut into.
        machine: TOML file with measured links and rates; see docs/scaling.md.
        tokens: Tokens of each rank.
        model_dim: Width of the model.
        expert_hidden: Hidden width of an expert.
        top_k: Experts of each token.
        experts_per_rank: Experts that each rank owns.
        shared_hidden: Hidden width of shared experts.
        zipf: Skew of the experts' loads; 0 is none.
        algorithm: Placement, as in `moe-runtime place`.
        replicas_per_rank: Slots of each rank for second copies.
        straggler: How much slower rank 0 computes.
        shortcut: Seconds of each operation that ScMoE's shortcut overlaps with the exchange, in
            order; the paper's are feed-forward, attention and shared expert: 3e-4,1e-3,2e-4.
        plot: Draw layer time and exposed communication (.png, .svg, .pdf).
    """
    numbers = _numbers(ranks, "--ranks", MOST_RANKS)
    chunks = _numbers(degrees, "--degrees", 64)
    try:
        backbone_s = (
            tuple(float(word) for word in shortcut.split(",")) if shortcut is not None else ()
        )
    except ValueError:
        backbone_s = (-1.0,)
    if not all(0 <= value < float("inf") for value in backbone_s):
        raise ValueError(
            f"--shortcut must be seconds with commas, such as 3e-4,1e-3, got {shortcut!r}"
        )
    if backbone_s and 1 not in chunks:
        raise ValueError("--shortcut hides the exchange in one piece: --degrees must have 1")
    from moe_runtime.lab.simulate.scaling import (
        ASSUMED,
        Imbalance,
        SimulatedLayer,
        read_machine,
        sweep_scaling,
    )
    from moe_runtime.research.placement_solvers import place_experts

    if plot is not None and plot.suffix and plot.suffix.lower() not in PLOT_SUFFIXES:
        endings = ", ".join(PLOT_SUFFIXES)
        raise ValueError(f"--plot {plot}: expected a name that ends in one of {endings}")
    cluster = ASSUMED if machine is None else read_machine(machine)
    shape = SimulatedLayer(
        tokens_per_rank=tokens,
        model_dim=model_dim,
        expert_hidden=expert_hidden,
        top_k=top_k,
        experts_per_rank=experts_per_rank,
        shared_hidden=shared_hidden,
    )
    imbalance = Imbalance(
        zipf=zipf, algorithm=algorithm, replicas_per_rank=replicas_per_rank, straggler=straggler
    )
    with loading_bar() as progress:
        points = list(
            sweep_scaling(
                cluster,
                shape,
                imbalance,
                ranks=numbers,
                degrees=chunks,
                place=place_experts,
                on_point=lambda done, total: progress(f"simulating {done} of {total}", 0, 0),
            )
        )
    if plot is not None:
        draw(points, plot)
    schedules = _shortcut_schedules(points, backbone_s) if backbone_s else {}
    if as_json:
        print_json(
            {
                "machine": _finite(dataclasses.asdict(cluster)),
                "is_assumed": machine is None,
                "shape": dataclasses.asdict(shape),
                "imbalance": dataclasses.asdict(imbalance),
                "points": [dataclasses.asdict(point) for point in points],
                "shortcut": [
                    {"num_ranks": num_ranks, **dataclasses.asdict(schedule)}
                    for num_ranks, schedule in schedules.items()
                ],
            }
        )
        return
    _print(points, assumed=machine is None)
    if plot is not None:
        print(f"wrote {plot}")
    if schedules:
        names = ("ranks", "experts after operation", "block ms", "exposed ms")
        rows = [
            (
                str(num_ranks),
                str(schedule.position),
                f"{1e3 * schedule.block_s:.3f}",
                f"{1e3 * schedule.exposed_s:.3f}",
            )
            for num_ranks, schedule in schedules.items()
        ]
        print_table("with a shortcut", [(name, "right") for name in names], rows)


def serve(
    ctx: typer.Context,
    model: Sizes,
    *,
    system: System,
    arrivals: Path | None = None,
    rates: str = "1",
    requests: Some = 1000,
    prompt_tokens: Some = 1024,
    new_tokens: Some = 256,
    step_tokens: options.Count = 256,
    prefill_ranks: options.Natural = 0,
    first_token: Annotated[float, typer.Option(min=1e-6)] = 2.0,
    between_tokens: Annotated[float, typer.Option(min=1e-6)] = 0.1,
    as_json: options.Json = False,
) -> None:
    """Predict throughput and latency of a service whose experts are spread over many ranks.

    Each rank generates for its own requests; all take a step together. Failures of a rank restart
    the service, and what was under way begins again.

    Args:
        arrivals: CSV file with TIMESTAMP, ContextTokens and GeneratedTokens of requests, as Azure
            published; without it they come at random.
        rates: Requests a second, separated by commas; with --arrivals, how many times as fast.
        requests: How many.
        prompt_tokens: Of each request.
        new_tokens: Of each request.
        step_tokens: Prompt tokens of a rank in a step.
        prefill_ranks: Ranks that read prompts alone and send keys and values to the others.
        first_token: Seconds to the first token that are good enough.
        between_tokens: Seconds between tokens that are good enough.
    """
    if arrivals is not None:
        named = {"requests", "prompt_tokens", "new_tokens"}
        refuse_given(ctx, named, "is for requests that --arrivals does not name")
    numbers = _numbers(system.ranks, "--ranks", MOST_RANKS)
    factors = _positive(rates, "--rates")
    import numpy as np

    from moe_runtime.lab.simulate import system as simulated
    from moe_runtime.research.placement_solvers import place_experts

    cluster, sizes, imbalance, failures = _read_system(model, system)
    recorded = None if arrivals is None else simulated.read_arrivals(arrivals)
    found = []
    with loading_bar() as progress:
        for num_ranks in numbers:
            times: Any = functools.cache(simulated.SimulatedSteps)
            for factor in factors:
                progress(f"simulating {num_ranks} ranks", len(found), len(numbers) * len(factors))
                asked = (
                    simulated.poisson_arrivals(requests, factor, prompt_tokens, new_tokens)
                    if recorded is None
                    else recorded.faster(factor)
                )
                served = simulated.simulate_serving(
                    dataclasses.replace(cluster, num_ranks=num_ranks),
                    sizes,
                    asked,
                    step_tokens=step_tokens,
                    prefill_ranks=prefill_ranks,
                    imbalance=imbalance,
                    failures=failures,
                    place=place_experts,
                    times=times,
                )
                first, between = (
                    dict(zip(("p50", "p95"), np.quantile(one, (0.5, 0.95)).tolist(), strict=True))
                    for one in (served.first_s, served.between_s)
                )
                found.append(
                    {
                        "num_ranks": num_ranks,
                        "requests_per_s": asked.rate,
                        "tokens_per_s": served.tokens_per_s,
                        "first_token_s": first,
                        "between_tokens_s": between,
                        "good_share": served.met(first_token, between_tokens),
                        "failures": served.num_failures,
                    }
                )
    if as_json:
        print_json(_described(cluster, sizes, system, found))
        return
    names = ("ranks", "requests/s", "tokens/s", "first p50", "p95", "between p50", "p95", "good")
    rows = [
        (
            str(one["num_ranks"]),
            f"{one['requests_per_s']:.2f}",
            f"{one['tokens_per_s']:.0f}",
            *(f"{one['first_token_s'][name]:.2f} s" for name in ("p50", "p95")),
            *(f"{1e3 * one['between_tokens_s'][name]:.1f} ms" for name in ("p50", "p95")),
            f"{one['good_share']:.0%}",
        )
        for one in found
    ]
    print_table(_title(system, sizes), [(name, "right") for name in names], rows)


def train(
    model: Sizes,
    *,
    system: System,
    tokens: options.Count = 8192,
    micro_batches: options.Count = 1,
    checkpoint_minutes: Annotated[float | None, typer.Option(min=0.001)] = None,
    as_json: options.Json = False,
) -> None:
    """Predict throughput of training a model whose experts are spread over many ranks.

    Args:
        tokens: Of a micro-batch on each rank.
        micro_batches: Of a step on each rank.
        checkpoint_minutes: Between two checkpoints; when omitted, what loses least.
    """
    numbers = _numbers(system.ranks, "--ranks", MOST_RANKS)
    from moe_runtime.lab.simulate import system as simulated
    from moe_runtime.research.placement_solvers import place_experts

    cluster, sizes, imbalance, failures = _read_system(model, system)
    found = []
    with loading_bar() as progress:
        for num_ranks in numbers:
            progress(f"simulating {num_ranks} ranks", len(found), len(numbers))
            trained = simulated.simulate_training(
                dataclasses.replace(cluster, num_ranks=num_ranks),
                sizes,
                tokens=tokens,
                micro_batches=micro_batches,
                checkpoint_every_s=None if checkpoint_minutes is None else 60 * checkpoint_minutes,
                imbalance=imbalance,
                failures=failures,
                place=place_experts,
            )
            found.append(
                {"num_ranks": num_ranks, "step_s": trained.step_s, **dataclasses.asdict(trained)}
            )
    if as_json:
        print_json(_described(cluster, sizes, system, found))
        return
    names = ("ranks", "step", "layers", "all-reduce", "optimizer", "useful", "tokens/s")
    rows = [
        (
            str(one["num_ranks"]),
            *(f"{one[name]:.3f} s" for name in ("step_s", "layers_s", "reduce_s", "optimizer_s")),
            f"{one['useful_share']:.1%}",
            f"{one['tokens_per_s']:.0f}",
        )
        for one in found
    ]
    print_table(_title(system, sizes), [(name, "right") for name in names], rows)


def _read_system(
    model: Path, system: System
) -> "tuple[Cluster, SimulatedModel, Imbalance, Failures]":
    from moe_runtime.lab.simulate.scaling import ASSUMED, Imbalance, read_machine
    from moe_runtime.lab.simulate.system import Failures, read_model

    imbalance = Imbalance(
        zipf=system.zipf,
        algorithm=system.algorithm,
        replicas_per_rank=system.replicas_per_rank,
        straggler=system.straggler,
    )
    days = system.failure_days
    mean_s = math.inf if days is None else 86400 * days
    cluster = ASSUMED if system.machine is None else read_machine(system.machine)
    return cluster, read_model(model), imbalance, Failures(mean_s, system.restart_seconds)


def _described(
    cluster: "Cluster", sizes: "SimulatedModel", system: System, found: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "machine": _finite(dataclasses.asdict(cluster)),
        "is_assumed": system.machine is None,
        "model": dataclasses.asdict(sizes),
        "points": [_finite(one) for one in found],
    }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON has no word for is None."""
    return {name: None if value == math.inf else value for name, value in values.items()}


def _title(system: System, sizes: "SimulatedModel") -> str:
    source = "assumed" if system.machine is None else "measured"
    return f"{sizes.parameters / 1e9:.4g} B parameters, {source} links and rates"


def _positive(text: str, name: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{name} must be positive numbers with commas, got {text!r}")
    return numbers


def draw(points: "list[ScalingPoint]", path: Path) -> None:
    """Draws layer time over ranks, and exposed communication over the number of chunks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure, (times, exposed) = pyplot.subplots(1, 2, figsize=(11, 4))
    degrees, sizes = (sorted({getattr(p, n) for p in points}) for n in ("degree", "num_ranks"))

    def lines(axes: "Axes", x: str, of: str, values: list[int], unit: str, y: Any) -> None:
        for level, (name, style) in enumerate((("flat", "--"), ("two levels", "-"))):
            for number, value in enumerate(values):
                own = [p for p in points if p.hierarchical == level and getattr(p, of) == value]
                heights, label = [y(point) for point in own], f"{name}, {unit}: {value}"
                places = [getattr(point, x) for point in own]
                look = {"color": f"C{number}", "marker": "o", "markersize": 4}
                axes.plot(places, heights, style, label=label, **look)

    lines(times, "num_ranks", "degree", degrees, "chunks", lambda p: 1e3 * p.prediction.layer_s)
    lines(exposed, "degree", "num_ranks", sizes, "ranks", lambda p: 100 * p.exposed_ratio)
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="layer time (ms)")
    percent = "exposed communication\n(% of flat without overlap)"
    exposed.set(xscale="log", xlabel="chunks", ylabel=percent, ylim=(0, 150))
    # Every tenth of a decade would be written over its neighbours.
    times.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 4.0, 6.0)))
    for axes, shown in ((times, sizes), (exposed, degrees)):
        axes.set_xticks(shown, [str(number) for number in shown])
        axes.yaxis.set_major_formatter(ScalarFormatter())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=3)
    figure.tight_layout()
    with write_atomically(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or None, dpi=120)
    pyplot.close(figure)


def _numbers(text: str, name: str, most: int) -> list[int]:
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1 or numbers[-1] > most:
        raise ValueError(f"{name} must be numbers from 1 to {most} with commas, got {text!r}")
    return numbers


def _shortcut_schedules(
    points: "list[ScalingPoint]", backbone_s: tuple[float, ...]
) -> "dict[int, ShortcutSchedule]":
    """The best place of the experts for each number of ranks, by the faster unchunked exchange."""
    from moe_runtime.lab.simulate.scaling import ShortcutCosts, best_shortcut_schedule

    found = {}
    for num_ranks in sorted({point.num_ranks for point in points}):
        layer = min(
            (p.prediction for p in points if p.num_ranks == num_ranks and p.degree == 1),
            key=lambda prediction: prediction.layer_s,
        )
        travel_s = (layer.layer_s - layer.compute_s) / 2
        found[num_ranks] = best_shortcut_schedule(
            ShortcutCosts(
                backbone_s=backbone_s, there_s=travel_s, experts_s=layer.compute_s, back_s=travel_s
            )
        )
    return found


def _print(points: "list[ScalingPoint]", *, assumed: bool) -> None:
    names = ("ranks", "all-to-all", "chunks", "layer ms", "compute ms", "exposed ms", "ratio")
    rows = [
        (
            str(point.num_ranks),
            "two levels" if point.hierarchical else "flat",
            str(point.degree),
            f"{1e3 * point.prediction.layer_s:.3f}",
            f"{1e3 * point.prediction.compute_s:.3f}",
            f"{1e3 * point.prediction.exposed_s:.3f}",
            f"{point.exposed_ratio:.0%}",
        )
        for point in points
    ]
    columns = [(name, "left" if name == "all-to-all" else "right") for name in names]
    balance = min(point.balancedness for point in points)
    source = "assumed links and rates" if assumed else "measured links and rates"
    print_table(f"one layer, {source}, balance of ranks {balance:.3f} or better", columns, rows)
