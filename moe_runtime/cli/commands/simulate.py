"""``moe-runtime simulate``: time of an expert-parallel layer on ranks that one need not have."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import loading_bar, print_json, print_table
from moe_runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from moe_runtime.lab.simulate.layer_simulation import ShortcutSchedule
    from moe_runtime.lab.simulate.scaling import ScalingPoint

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

MOST_RANKS = 1 << 13


def simulate(
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
    backbone_s = None if shortcut is None else _seconds(shortcut, "--shortcut")
    if backbone_s is not None and 1 not in chunks:
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
    schedules = {} if backbone_s is None else _shortcut_schedules(points, backbone_s)
    if as_json:
        print_json(
            {
                "machine": dataclasses.asdict(cluster),
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
    else:
        _print(points, assumed=machine is None, plot=plot)
        if schedules:
            _print_shortcuts(schedules)


def draw(points: "list[ScalingPoint]", path: Path) -> None:
    """Draws layer time over ranks, and exposed communication over the number of chunks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (times, exposed) = pyplot.subplots(1, 2, figsize=(11, 4))
    degrees, sizes = ({getattr(p, n) for p in points} for n in ("degree", "num_ranks"))

    def line(axes: "Axes", own: "list[ScalingPoint]", x: str, y: Any, number: int, of: str) -> None:
        name, style = ("two levels", "-") if own[0].hierarchical else ("flat", "--")
        axes.plot(
            [getattr(point, x) for point in own],
            [y(point) for point in own],
            style,
            color=f"C{number}",
            marker="o",
            markersize=4,
            label=f"{name}, {of}",
        )

    for level in (False, True):
        mine = [point for point in points if point.hierarchical == level]
        for number, degree in enumerate(sorted(degrees)):
            own = [point for point in mine if point.degree == degree]
            of = f"{degree} chunk{'s' if degree > 1 else ''}"
            line(times, own, "num_ranks", lambda p: 1e3 * p.prediction.layer_s, number, of)
        for number, size in enumerate(sorted(sizes)):
            own = [point for point in mine if point.num_ranks == size]
            line(exposed, own, "degree", lambda p: 100 * p.exposed_ratio, number, f"{size} ranks")
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="layer time (ms)")
    exposed.set(
        xscale="log",
        xlabel="chunks",
        ylabel="exposed communication\n(% of flat without overlap)",
        ylim=(0, 150),
    )
    for axes, numbers in ((times, sizes), (exposed, degrees)):
        plain_numbers(axes, sorted(numbers))
        axes.legend(fontsize=7, handlelength=3)
    figure.tight_layout()
    with write_atomically(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or None, dpi=120)
    pyplot.close(figure)


def plain_numbers(axes: "Axes", shown: Sequence[int]) -> None:
    """Marks what was computed on a logarithmic axis below, and writes numbers without powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes.set_xticks(shown, [str(number) for number in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    if axes.get_yscale() == "log":
        # Every tenth of a decade would be written over its neighbours.
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 4.0, 6.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _numbers(text: str, name: str, most: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= number <= most for number in numbers):
        raise ValueError(f"{name} must be numbers from 1 to {most} with commas, got {text!r}")
    return sorted(set(numbers))


def _seconds(text: str, name: str) -> tuple[float, ...]:
    try:
        seconds = tuple(float(word) for word in text.split(","))
    except ValueError:
        seconds = (-1.0,)
    if not all(0 <= value < float("inf") for value in seconds):
        raise ValueError(f"{name} must be seconds with commas, such as 3e-4,1e-3, got {text!r}")
    return seconds


def _shortcut_schedules(
    points: "list[ScalingPoint]", backbone_s: tuple[float, ...]
) -> "dict[int, ShortcutSchedule]":
    """The best place of the experts for each number of ranks, by the faster unchunked exchange."""
    from moe_runtime.lab.simulate.layer_simulation import ShortcutCosts, best_shortcut_schedule

    found = {}
    for num_ranks in sorted({point.num_ranks for point in points}):
        layer = min(
            (p.prediction for p in points if p.num_ranks == num_ranks and p.degree == 1),
            key=lambda prediction: prediction.layer_s,
        )
        travel_s = (layer.layer_s - layer.compute_s) / 2
        found[num_ranks] = best_shortcut_schedule(
            ShortcutCosts(
                backbone_s=backbone_s,
                there_s=travel_s,
                experts_s=layer.compute_s,
                back_s=travel_s,
            )
        )
    return found


def _print_shortcuts(schedules: "dict[int, ShortcutSchedule]") -> None:
    columns = [
        (name, "right") for name in ("ranks", "experts after operation", "block ms", "exposed ms")
    ]
    rows = [
        (
            str(num_ranks),
            str(schedule.position),
            f"{1e3 * schedule.block_s:.3f}",
            f"{1e3 * schedule.exposed_s:.3f}",
        )
        for num_ranks, schedule in schedules.items()
    ]
    print_table("with a shortcut", columns, rows)


def _print(points: "list[ScalingPoint]", *, assumed: bool, plot: Path | None) -> None:
    columns = [
        ("ranks", "right"),
        ("all-to-all", "left"),
        ("chunks", "right"),
        ("layer ms", "right"),
        ("compute ms", "right"),
        ("exposed ms", "right"),
        ("ratio", "right"),
    ]
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
    balance = min(point.balancedness for point in points)
    source = "assumed links and rates" if assumed else "measured links and rates"
    print_table(f"one layer, {source}, balance of ranks {balance:.3f} or better", columns, rows)
    if plot is not None:
        print(f"wrote {plot}")
