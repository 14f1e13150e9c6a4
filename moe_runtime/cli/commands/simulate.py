"""``moe-runtime simulate``: predict a layer, a service or training on many ranks."""

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
class Spread:
    """Ranks, and how experts are placed on them.

    Args:
        ranks: Numbers of ranks, separated by commas.
        machine: TOML file with measured links and rates; see docs/scaling.md.
        zipf: Skew of the experts' loads; 0 is none.
        algorithm: Placement, as in `moe-runtime place`.
        replicas_per_rank: Slots of each rank for second copies.
        straggler: How much slower rank 0 computes.
    """

    ranks: str = "8,64,512"
    machine: Path | None = None
    zipf: options.NotNegative = 0.0
    algorithm: str = "round-robin"
    replicas_per_rank: options.Natural = 0
    straggler: Annotated[float, typer.Option(min=1.0)] = 1.0

    def numbers(self) -> list[int]:
        return _numbers(self.ranks, "--ranks", MOST_RANKS)

    def cluster(self) -> "Cluster":
        from moe_runtime.lab.simulate.scaling import ASSUMED, read_machine

        return ASSUMED if self.machine is None else read_machine(self.machine)

    def imbalance(self) -> "Imbalance":
        from moe_runtime.lab.simulate.scaling import Imbalance

        names = ("zipf", "algorithm", "replicas_per_rank", "straggler")
        return Imbalance(**{name: getattr(self, name) for name in names})

    def described(self, cluster: "Cluster") -> dict[str, Any]:
        """The machine for JSON, which has no word for infinity."""
        machine = _without_infinity(dataclasses.asdict(cluster))
        return {"machine": machine, "is_assumed": self.machine is None}

    @property
    def source(self) -> str:
        return f"{'assumed' if self.machine is None else 'measured'} links and rates"


@dataclasses.dataclass(frozen=True, kw_only=True)
class System(Spread):
    """Ranks and their failures.

    Args:
        failure_days: Days between two failures of one rank, on average; none when omitted.
        restart_seconds: From a failure to the next step.
    """

    failure_days: Annotated[float | None, typer.Option(min=1e-6)] = None
    restart_seconds: options.NotNegative = 300.0

    def check(self, ctx: typer.Context) -> None:
        if self.failure_days is None:
            refuse_given(ctx, {"restart_seconds"}, "is for failures: give --failure-days too")

    def failures(self) -> "Failures":
        from moe_runtime.lab.simulate.system import Failures

        mean_s = math.inf if self.failure_days is None else 86400 * self.failure_days
        return Failures(mean_s, self.restart_seconds)


def simulate_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Predict the speed of a layer, a service or training on any number of ranks.",
        no_args_is_help=True,
    )
    for command in (layer, serve, train):
        app.command(cls=StrictCommand)(expanded(command))
    return app


def layer(
    *,
    spread: Spread,
    degrees: str = "1,2,4,8",
    tokens: options.Count = 8192,
    model_dim: options.Count = 4096,
    expert_hidden: options.Count = 14336,
    top_k: options.Count = 2,
    experts_per_rank: options.Count = 4,
    shared_hidden: options.Natural = 0,
    shortcut: str | None = None,
    plot: Path | None = None,
    as_json: options.Json = False,
) -> None:
    """Predict the time of one Mixture-of-Experts layer spread over many ranks.

    Compares a flat all-to-all with one in two levels, and numbers of chunks. Exposed is
    communication that no computation hides; its ratio is to a flat all-to-all without overlap.

    Args:
        degrees: Numbers of chunks that rows are cut into.
        tokens: Tokens of each rank.
        model_dim: Width of the model.
        expert_hidden: Hidden width of an expert.
        top_k: Experts of each token.
        experts_per_rank: Experts that each rank owns.
        shared_hidden: Hidden width of shared experts.
        shortcut: Seconds of each operation that ScMoE's shortcut overlaps with the exchange, in
            order; the paper's are feed-forward, attention and shared expert: 3e-4,1e-3,2e-4.
        plot: Draw layer time and exposed communication (.png, .svg, .pdf).
    """
    numbers, chunks = spread.numbers(), _numbers(degrees, "--degrees", 64)
    fewest = min(numbers) * experts_per_rank
    if top_k > fewest:
        raise ValueError(f"--top-k {top_k}: {min(numbers)} ranks have {fewest} experts")
    backbone_s: list[float] = []
    if shortcut is not None:
        backbone_s = options.numbers_of(
            shortcut,
            "--shortcut",
            "seconds with commas, such as 3e-4,1e-3",
            is_sound=lambda value: 0 <= value < math.inf,
            repeats=True,
        )
        if 1 not in chunks:
            raise ValueError("--shortcut hides the exchange in one piece: --degrees must have 1")
    from moe_runtime.lab.simulate.scaling import SimulatedLayer, sweep_scaling
    from moe_runtime.research.placement_solvers import place_experts

    if plot is not None and plot.suffix and plot.suffix.lower() not in PLOT_SUFFIXES:
        endings = ", ".join(PLOT_SUFFIXES)
        raise ValueError(f"--plot {plot}: expected a name that ends in one of {endings}")
    cluster, imbalance = spread.cluster(), spread.imbalance()
    shape = SimulatedLayer(
        tokens_per_rank=tokens,
        model_dim=model_dim,
        expert_hidden=expert_hidden,
        top_k=top_k,
        experts_per_rank=experts_per_rank,
        shared_hidden=shared_hidden,
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
    schedules = _shortcut_schedules(points, tuple(backbone_s)) if backbone_s else {}
    if as_json:
        print_json(
            {
                **spread.described(cluster),
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
    rows = [
        (
            str(point.num_ranks),
            "two levels" if point.hierarchical else "flat",
            str(point.degree),
            *(f"{1e3 * getattr(point.prediction, f'{n}_s'):.3f}" for n in ("layer", "compute")),
            f"{1e3 * point.prediction.exposed_s:.3f}",
            f"{point.exposed_ratio:.0%}",
        )
        for point in points
    ]
    balance = min(point.balancedness for point in points)
    names = ("ranks", "all-to-all", "chunks", "layer ms", "compute ms", "exposed ms", "ratio")
    title = f"one layer, {spread.source}, balance of ranks {balance:.3f} or better"
    print_table(title, _columns(names), rows)
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
        print_table("with a shortcut", _columns(names), rows)


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

    Each rank generates for its own requests; all take a step together. A failure of a rank restarts
    the service and its unfinished requests.

    Args:
        arrivals: CSV file with TIMESTAMP, ContextTokens and GeneratedTokens of requests, as Azure
            published; without it they come at random.
        rates: Requests a second, separated by commas; with --arrivals, how many times as fast.
        requests: Number of requests.
        prompt_tokens: Prompt tokens of each request.
        new_tokens: New tokens of each request.
        step_tokens: Prompt tokens of a rank in a step.
        prefill_ranks: Ranks that read prompts alone and send keys and values to the others.
        first_token: A request is good if its first token takes at most these seconds.
        between_tokens: A request is good if at most these seconds lie between its tokens.
    """
    if arrivals is not None:
        named = {"requests", "prompt_tokens", "new_tokens"}
        refuse_given(ctx, named, "is for requests that --arrivals does not name")
    numbers = system.numbers()
    factors = options.numbers_of(
        rates,
        "--rates",
        "positive numbers with commas",
        is_sound=lambda value: 0 < value < math.inf,
    )
    import numpy as np

    from moe_runtime.lab.simulate import system as simulated
    from moe_runtime.research.placement_solvers import place_experts

    def middles(values: np.ndarray) -> dict[str, float | None]:
        found = np.quantile(values, (0.5, 0.95)).tolist() if len(values) else (None, None)
        return dict(zip(("p50", "p95"), found, strict=True))

    cluster, sizes = system.cluster(), simulated.read_model(model)
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
                    imbalance=system.imbalance(),
                    failures=system.failures(),
                    place=place_experts,
                    times=times,
                )
                has_more = np.isfinite(served.between_s)
                first, between = map(middles, (served.first_s, served.between_s[has_more]))
                found.append(
                    {
                        "num_ranks": num_ranks,
                        "requests_per_s": factor if recorded is None else asked.rate,
                        "tokens_per_s": served.tokens_per_s,
                        "first_token_s": first,
                        "between_tokens_s": between,
                        "good_share": served.met(first_token, between_tokens),
                        "failures": served.num_failures,
                    }
                )
    names = ("ranks", "requests/s", "tokens/s", "first p50", "p95", "between p50", "p95", "good")
    rows = [
        (
            str(one["num_ranks"]),
            f"{one['requests_per_s']:.2f}",
            f"{one['tokens_per_s']:.0f}",
            *(f"{one['first_token_s'][name]:.2f} s" for name in ("p50", "p95")),
            *(
                "-" if value is None else f"{1e3 * value:.1f} ms"
                for value in one["between_tokens_s"].values()
            ),
            f"{one['good_share']:.0%}",
        )
        for one in found
    ]
    _print(system, cluster, sizes, found, names, rows, as_json=as_json)


def train(
    model: Sizes,
    *,
    system: System,
    tokens: options.Count = 8192,
    micro_batches: options.Count = 1,
    checkpoint_minutes: Annotated[float | None, typer.Option(min=0.001)] = None,
    layouts: options.Natural = 0,
    as_json: options.Json = False,
) -> None:
    """Predict throughput of training a model whose experts are spread over many ranks.

    Args:
        tokens: Tokens of a micro-batch on each rank.
        micro_batches: Micro-batches of a step on each rank.
        layouts: Search stages of a pipeline, ranks that divide experts, and sizes of micro-batches
            for steps of as many tokens; show so many layouts, fastest first. 0 divides experts
            between all ranks.
        checkpoint_minutes: Between two checkpoints; when omitted, the interval that loses least.
    """
    numbers = system.numbers()
    from moe_runtime.lab.simulate import system as simulated
    from moe_runtime.research.placement_solvers import place_experts

    cluster, sizes = system.cluster(), simulated.read_model(model)
    found = []
    with loading_bar() as progress:
        for num_ranks in numbers:
            progress(f"simulating {num_ranks} ranks", len(found), len(numbers))
            spread: dict[str, Any] = {
                "checkpoint_every_s": checkpoint_minutes and 60 * checkpoint_minutes,
                "imbalance": system.imbalance(),
                "failures": system.failures(),
                "place": place_experts,
            }
            ranks = dataclasses.replace(cluster, num_ranks=num_ranks)
            step = {"tokens": tokens, "micro_batches": micro_batches}
            if layouts:
                search = simulated.search_layouts(ranks, sizes, **step, **spread)
            else:
                layout = simulated.TrainLayout(expert_ranks=num_ranks, **step)
                search = [simulated.simulate_training(ranks, sizes, layout=layout, **spread)]
            found += [
                {"num_ranks": num_ranks, "step_s": one.step_s, **dataclasses.asdict(one)}
                for one in search[: max(layouts, 1)]
            ]
    parts = ("stages", "expert_ranks", "micro_batches", "tokens") if layouts else ()
    names = ("step", "layers", "all-reduce", "optimizer", "useful", "tokens/s")
    names = ("ranks", *(name.replace("_", " ") for name in parts), *names)
    rows = [
        (
            str(one["num_ranks"]),
            *(str(one["layout"][name]) for name in parts),
            *(f"{one[name]:.3f} s" for name in ("step_s", "layers_s", "reduce_s", "optimizer_s")),
            f"{one['useful_share']:.1%}",
            f"{one['tokens_per_s']:.0f}",
        )
        for one in found
    ]
    _print(system, cluster, sizes, found, names, rows, as_json=as_json)


def _print(
    system: System,
    cluster: "Cluster",
    sizes: "SimulatedModel",
    found: list[dict[str, Any]],
    names: tuple[str, ...],
    rows: list[tuple[str, ...]],
    *,
    as_json: bool,
) -> None:
    if as_json:
        points = [_without_infinity(one) for one in found]
        model = dataclasses.asdict(sizes)
        print_json({**system.described(cluster), "model": model, "points": points})
        return
    title = f"{sizes.parameters / 1e9:.4g} B parameters, {system.source}"
    print_table(title, _columns(names), rows)


def _columns(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, "left" if name == "all-to-all" else "right") for name in names]


def _without_infinity(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in values.items()}


def _numbers(text: str, name: str, most: int) -> list[int]:
    expected = f"numbers from 1 to {most} with commas"
    found = options.numbers_of(text, name, expected, int, is_sound=lambda n: 1 <= n <= most)
    return sorted(found)


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
