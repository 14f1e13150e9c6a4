"""The charts of a trace; each function draws one thing and says nothing about the page."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.lab.report.findings import TraceFindings, TrainingReuse
from moe_runtime.lab.report.page import INK, MUTED, SERIES, WIDTH, chart, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BYTE_COLOURS = (SERIES[0], SERIES[2], SERIES[4])
"""Of what was demanded, read ahead and used, and read and never used."""
_REFERENCES = {"belady-bypass": "Belady's optimum", "random": "random eviction", "lru": "LRU"}
_LONGEST_TIMELINE = 240


def heat_map(found: TraceFindings) -> "Figure":
    """Loads of all experts, layer by layer, as multiples of an even load."""
    num_layers, num_experts = found.loads.shape
    relative = found.loads * num_experts / found.trace.signature.top_k
    height = min(9.0, max(3.0, 1.4 + 0.17 * num_layers))
    with chart(height) as (figure, axes):
        ceiling = max(2.0, float(np.quantile(relative, 0.995)))
        image = axes.imshow(
            relative, aspect="auto", cmap="viridis", vmin=0, vmax=ceiling, interpolation="nearest"
        )
        axes.grid(visible=False)
        axes.set_xlabel("expert (number)")
        axes.set_ylabel("layer (number)")
        _whole_ticks(axes.yaxis, num_layers)
        bar = figure.colorbar(image, ax=axes, extend="max", pad=0.015)
        bar.set_label("tokens that visit it,\nas multiples of an even load (×)")
        bar.outline.set_visible(False)
    return figure


def popularity(found: TraceFindings) -> "Figure":
    """How much of the work the most visited experts do."""
    curves = found.popularity
    share = 100 * np.arange(curves.shape[1]) / (curves.shape[1] - 1)
    with chart() as (figure, axes):
        look: dict[str, Any] = {"color": SERIES[0], "alpha": 0.22, "linewidth": 0}
        low, high = 100 * curves.min(axis=0), 100 * curves.max(axis=0)
        axes.fill_between(share, low, high, label="least to most skewed layer", **look)
        axes.plot(share, 100 * np.median(curves, axis=0), color=SERIES[0], label="median layer")
        axes.plot([0, 100], [0, 100], color=MUTED, linestyle="--", linewidth=1.2, label="even load")
        _percent(axes, "most visited experts of a layer (% of its experts)", "visits (%)")
        axes.legend(loc="lower right")
    return figure


def reuse(found: TraceFindings) -> "Figure":
    """Share of the accesses that come back within a number of other experts."""
    counts = found.distances
    num_experts = counts.shape[1] - 1
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    reached = 100 * np.cumsum(counts[:, :-1] / totals, axis=1)
    slots = np.arange(1, num_experts + 1)
    with chart() as (figure, axes):
        look: dict[str, Any] = {"color": SERIES[2], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(slots, reached.min(0), reached.max(0), label="all layers", **look)
        some_layers = sorted({0, len(counts) // 2, len(counts) - 1})
        for layer, colour in zip(some_layers, SERIES, strict=False):
            axes.plot(slots, reached[layer], color=colour, label=f"layer {layer}")
        _axis_from_zero(axes, "experts of the layer used since, itself included (count)")
        axes.set_xlim(1, num_experts)
        axes.set_ylabel("accesses that come back\nwithin so many (%)")
        axes.legend(loc="lower right")
    return figure


def hit_rates(found: TraceFindings) -> "Figure":
    """Hit rate over capacity, for policies between chance and the optimum."""
    by_policy: dict[str, list[tuple[float, float]]] = {}
    for row in found.rows:
        by_policy.setdefault(row.policy, []).append((100 * row.capacity, 100 * row.hit_rate))
    shown = [name for name in by_policy if name != "belady"]
    with chart(4.2) as (figure, axes):
        axes.plot(
            [0, 100], [0, 100], color=MUTED, linewidth=0.9, label="uniform random routing", zorder=1
        )
        colours = iter(SERIES)
        for name in sorted(shown, key=lambda name: -by_policy[name][0][1]):
            capacity, rate = zip(*by_policy[name], strict=True)
            look: dict[str, Any] = {"color": next(colours)}
            if name == "belady-bypass":
                look = {"color": INK, "linestyle": "--"}
            elif name == "random":
                look = {"color": MUTED, "linestyle": ":"}
            label = _REFERENCES.get(name, name)
            axes.plot(capacity, rate, marker="o", markersize=4, label=label, **look)
        _percent(axes, "capacity (% of the experts that fit)", "experts found in the cache (%)")
        axes.legend(loc="lower right")
    return figure


def recall(found: TraceFindings) -> "Figure":
    """Recall of each predictor by layer, one panel for each look-ahead distance."""
    distances = [one.distance for one in found.evaluations[0].recalls]
    with drawing() as new_figure:
        figure = new_figure(figsize=(WIDTH, 4.0))
        panels = figure.subplots(1, len(distances), sharey=True, squeeze=False)[0]
        for axes, distance in zip(panels, distances, strict=True):
            for result, colour in zip(found.evaluations[1:], SERIES, strict=False):
                look = {"color": colour, "marker": "o", "markersize": 2.5}
                axes.plot(100 * result.at(distance).at_2k, label=result.name, **look)
            control = found.evaluations[0].at(distance).at_2k
            axes.plot(100 * control, color=INK, linestyle=":", label="control")
            axes.set_title(f"{distance} layer{'s' if distance > 1 else ''} ahead")
            axes.set_xlabel("layer (number)")
            axes.set_ylim(0, 104)
            axes.set_xlim(-0.5, len(control) - 0.5)
            _whole_ticks(axes.xaxis, len(control))
        panels[0].set_ylabel("experts among the 2K likeliest (%)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def traffic(found: TraceFindings) -> "Figure":
    """Bytes moved for a token, by why they were moved."""
    size = found.settings.machine.expert_bytes
    kinds = ("demanded", "prefetched, used", "prefetched, wasted")
    bars = {
        name: [
            replay.total.misses * size,
            replay.total.useful * size,
            (replay.total.prefetches - replay.total.useful) * size,
        ]
        for name, replay in found.timed.items()
    }
    tokens = max(1, next(iter(found.timed.values())).num_tokens)
    named = {_prefetch_label(name): values for name, values in bars.items()}
    return stacked_bars(
        named, kinds, scale=1 / tokens / 2**20, unit="MiB for each token", colours=BYTE_COLOURS
    )


def stacked_bars(
    bars: Mapping[str, Sequence[float]],
    kinds: Sequence[str],
    *,
    scale: float,
    unit: str,
    colours: Sequence[str] = SERIES,
) -> "Figure":
    """Horizontal bars, each made of the same kinds of things."""
    with chart(1.5 + 0.55 * len(bars)) as (figure, axes):
        left = np.zeros(len(bars))
        for number, kind in enumerate(kinds):
            width = scale * np.array([values[number] for values in bars.values()])
            axes.barh(list(bars), width, left=left, color=colours[number], height=0.62, label=kind)
            left += width
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        axes.set_xlim(0, 1.02 * (float(left.max()) or 1.0))
        figure.legend(loc="outside upper left", ncols=len(kinds))
    return figure


def timeline(found: TraceFindings) -> "Figure":
    """Modelled time of the first steps, computing and waiting, without and with prefetch."""
    compute_ms, waits = _step_times(found)
    steps = np.arange(len(compute_ms))
    top = max(float((compute_ms + stall).max()) for stall in waits.values()) * 1.05
    with drawing() as new_figure:
        figure = new_figure(figsize=(WIDTH, 1.2 + 1.7 * len(waits)))
        panels = figure.subplots(len(waits), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, stall_ms) in zip(panels, waits.items(), strict=True):
            look: dict[str, Any] = {"step": "mid", "linewidth": 0}
            axes.fill_between(steps, 0, compute_ms, color=SERIES[0], label="computing", **look)
            look |= {"color": SERIES[1], "label": "waiting for experts"}
            axes.fill_between(steps, compute_ms, compute_ms + stall_ms, **look)
            axes.set_ylim(0, top)
            axes.set_xlim(0, max(1, len(steps) - 1))
            axes.set_ylabel("time of a step (ms)")
            axes.set_title(_prefetch_label(name))
        panels[-1].set_xlabel("step (number)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    return figure


def training_tiers(found: TrainingReuse, ways: Mapping[str, str]) -> "Figure":
    """How many steps ask for each expert, and what tiers in memory would have found."""
    shares = [100 * share for share in found.tiers]
    with drawing() as new_figure:
        figure = new_figure(figsize=(WIDTH, 3.7))
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        ranked = -np.sort(-100 * found.use.ravel())
        experts = 100 * np.arange(1, len(ranked) + 1) / len(ranked)
        left.fill_between(experts, 0, ranked, color=SERIES[2], alpha=0.3, linewidth=0)
        left.plot(experts, ranked, color=SERIES[2])
        left.set_xlabel("experts, most used first (%)")
        left.set_ylabel("steps that ask for it (%)")
        for (way, label), colour in zip(ways.items(), (SERIES[0], SERIES[1], INK), strict=True):
            rates = [100 * getattr(h, way) / max(1, h.uses) for h in found.tiers.values()]
            style = "--" if way == "best" else "-"
            right.plot(
                shares, rates, color=colour, linestyle=style, marker="o", markersize=4, label=label
            )
        right.set_xlabel("experts whose tier is memory (%)")
        right.set_ylabel("a step's experts in memory (%)")
        right.legend(loc="lower right")
        for axes in (left, right):
            axes.set_xlim(0, 100)
            axes.set_ylim(0, 102)
    return figure


def _step_times(found: TraceFindings) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Milliseconds of the first steps: computing, and waiting by what was prefetched."""
    workload, machine = found.timed_workload, found.settings.machine
    num_steps = workload.trace.num_steps
    compute_s = np.bincount(
        workload.step,
        weights=machine.layer_s + workload.num_keys * machine.expert_s,
        minlength=num_steps,
    )
    waits = {}
    for name, replay in found.timed.items():
        stall_s = np.zeros(num_steps)
        for step, _, begin, end in replay.stalls:
            stall_s[step] += end - begin
        waits[name] = 1e3 * stall_s[:_LONGEST_TIMELINE]
    return 1e3 * compute_s[:_LONGEST_TIMELINE], waits


def _prefetch_label(name: str) -> str:
    return "without prefetch" if name == "off" else f"prefetch by {name}"


def _percent(axes: "Axes", x_label: str, y_label: str) -> None:
    axes.set_xlim(0, 100)
    axes.set_ylabel(y_label)
    _axis_from_zero(axes, x_label)


def _axis_from_zero(axes: "Axes", x_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylim(0, 102)


def _whole_ticks(axis: Any, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=min(8, max(1, count)), integer=True))
