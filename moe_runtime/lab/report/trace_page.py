"""A trace's findings as a page: charts, titles and lessons."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.config import format_bytes
from moe_runtime.lab.record_tiers import TIER_CHANGE_MARGIN, TIER_CHANGE_STEPS
from moe_runtime.lab.replay.experiment import Row
from moe_runtime.lab.replay.timed import LayerCounts
from moe_runtime.lab.report.findings import TraceFindings, TrainingReuse
from moe_runtime.lab.report.page import (
    BYTE_COLOURS,
    INK,
    MUTED,
    SERIES,
    WIDTH,
    Page,
    Section,
    Table,
    chart,
    drawing,
    stacked_bars,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """Share of steps that use each expert, and hits of tiers in memory."""
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
    """Milliseconds of the first steps: computing, and waiting by kind of prefetch."""
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


_COLD = (
    "Replayed from an empty cache, every layer with an equal share of the slots; each miss is "
    "loaded when it is asked for."
)


_WAYS = {"spread": "spread evenly", "by_use": "exchanged by use", "best": "best fixed ones"}


def trace_page(found: TraceFindings, name: str) -> Page:
    """Lays out the findings of one trace."""
    signature = found.trace.signature
    num_requests = len(np.unique(found.trace.token_request))
    sections = [_load_section(found), _popularity_section(found), _reuse_section(found)]
    sections += [_hit_section(found), _recall_section(found)]
    sections += [_traffic_section(found), _timeline_section(found)]
    if found.training is not None:
        sections.insert(0, _training_section(found.training))
    busiest = found.loads.max(axis=1) / np.maximum(found.loads.mean(axis=1), 1e-12)
    facts = [
        (f"{found.trace.num_tokens:,}", f"tokens in {num_requests:,} requests"),
        (
            f"{signature.num_layers} × {signature.num_experts}",
            f"layers × experts, {signature.top_k} for each token",
        ),
        (f"{busiest.mean():.2f} ×", "the busiest expert's load over an even one, mean of layers"),
    ]
    if not np.isnan(found.overlap).all():
        facts.append(
            (f"{np.nanmean(found.overlap):.0%}", "of a token's experts served the token before")
        )
    middle = _row(found, "lru")
    model = "" if signature.model_type == "unknown" else f" of a {signature.model_type} model"
    facts.append(
        (f"{middle.hit_rate:.0%}", f"found by LRU with room for {middle.capacity:.0%} of experts")
    )
    return Page(
        title="Where the tokens go",
        subtitle=f"{name} – routing trace{model}",
        facts=facts,
        sections=sections,
    )


def _load_section(found: TraceFindings) -> Section:
    relative = found.loads * found.loads.shape[1] / found.trace.signature.top_k
    layer, expert = np.unravel_index(int(relative.argmax()), relative.shape)
    idle = int((found.loads == 0).sum())
    return Section(
        name="activation",
        title="Which experts the tokens visit",
        lesson=(
            f"An even load would be one colour. Here expert {expert} of layer {layer} is visited "
            f"{relative.max():.1f} times as often as an average one, and "
            + (f"{idle} of {relative.size} experts never." if idle else "every expert is used.")
            + " Bright spots are what a cache should keep; dark ones are cheap to leave on disk."
        ),
        how=(
            f"All {found.trace.num_tokens:,} recorded tokens. The scale ends at the 99.5th "
            "percentile."
        ),
        figure=heat_map(found),
        alt="Heat map of expert loads, one row for each layer and one column for each expert.",
        table=Table(
            header=("layer", "busiest expert", "its load (×)", "idle experts", "overlap"),
            rows=[
                (
                    str(number),
                    str(int(row.argmax())),
                    f"{row.max():.2f}",
                    str(int((row == 0).sum())),
                    "–" if np.isnan(found.overlap[number]) else f"{found.overlap[number]:.1%}",
                )
                for number, row in enumerate(relative)
            ],
        ),
    )


def _popularity_section(found: TraceFindings) -> Section:
    curves = found.popularity
    quarter, half = (round(share * (curves.shape[1] - 1)) for share in (0.25, 0.5))
    return Section(
        name="popularity",
        title="How uneven the load is",
        lesson=(
            f"In the median layer the busiest quarter of the experts serves "
            f"{np.median(curves[:, quarter]):.0%} of the visits and the busier half "
            f"{np.median(curves[:, half]):.0%}. This is the most that pinning experts by their "
            "popularity could ever find in memory; the distance to the hit rates below is what "
            "watching the text adds."
        ),
        figure=popularity(found),
        alt="Share of visits over share of most visited experts: median layer, range, even load.",
        table=Table(
            header=("most visited experts", "least skewed layer", "median", "most skewed layer"),
            rows=[
                (
                    f"{n / (curves.shape[1] - 1):.0%}",
                    *(f"{f(curves[:, n]):.1%}" for f in (np.min, np.median, np.max)),
                )
                for n in sorted({*range(0, curves.shape[1], max(1, curves.shape[1] // 8))})
            ],
        ),
    )


def _reuse_section(found: TraceFindings) -> Section:
    counts = found.distances
    num_experts = counts.shape[1] - 1
    total = max(1, int(counts.sum()))
    reached = np.cumsum(counts[:, :-1].sum(axis=0)) / total
    half = int(np.searchsorted(reached, 0.5)) + 1
    return Section(
        name="reuse",
        title="How soon experts come back",
        lesson=(
            (
                f"Half of all accesses return to one of the {half} experts that their layer used "
                "last. "
                if half <= num_experts
                else "Fewer than half of the accesses return to an expert used before. "
            )
            + "Read a number of slots on the horizontal axis: the height is the hit rate of an "
            "LRU cache of that size in the layer. A steep start rewards even a small cache."
        ),
        how=(
            f"Reuse distances of {found.replayed_tokens:,} tokens; all experts of a layer's visit "
            f"are looked up at once. {counts[:, -1].sum() / total:.2%} of the accesses are first "
            "uses, which no cache can find."
        ),
        figure=reuse(found),
        alt="Share of accesses over reuse distance, for the first, middle and last layer.",
        table=Table(
            header=("within so many experts", "accesses"),
            rows=[
                (str(n), f"{reached[n - 1]:.1%}")
                for n in range(1, num_experts + 1, max(1, num_experts // 12))
            ],
        ),
    )


def _hit_section(found: TraceFindings) -> Section:
    lru, best = _row(found, "lru"), _row(found, "belady-bypass")
    others = [
        row
        for row in found.rows
        if row.capacity == lru.capacity
        and row.policy not in ("belady", "belady-bypass", "random", "lru")
    ]
    lesson = (
        f"With room for {lru.capacity:.0%} of the experts LRU finds {lru.hit_rate:.1%} of what is "
        f"asked for and Belady's optimum, which knows the future, {best.hit_rate:.1%}: no policy "
        "can do better without prefetching."
    )
    if others:
        top = max(others, key=lambda row: row.hit_rate)
        lesson += f" {top.policy} reaches {top.hit_rate:.1%}"
        if top.gap_closed is not None:
            lesson += f", {top.gap_closed:.0%} of the way"
        lesson += "."
    return Section(
        name="hit-rates",
        title="What a cache of each size finds",
        lesson=lesson,
        how=(
            f"{_COLD} {found.replayed_tokens:,} tokens. Uniform random routing finds exactly the "
            "share that fits, whatever the policy."
        ),
        figure=hit_rates(found),
        alt="Hit rate over cache capacity for each policy, random eviction and Belady's optimum.",
        table=Table(
            header=("policy", "capacity", "hits", "no load needed", "loads/layer", "of LRU → opt."),
            rows=[
                (
                    row.policy,
                    f"{row.capacity:.1%}",
                    f"{row.hit_rate:.2%}",
                    f"{row.all_resident_rate:.1%}",
                    f"{row.loads_per_layer_token:.3f}",
                    "–" if row.gap_closed is None else f"{row.gap_closed:+.0%}",
                )
                for row in found.rows
            ],
        ),
    )


def _recall_section(found: TraceFindings) -> Section:
    title = "How well the next experts can be predicted"
    if not found.evaluations:
        return Section(
            name="recall",
            title=title,
            lesson="Not measured: predictors are judged on whole requests that they were not "
            "trained on, and this trace has too few different ones. Record several prompts.",
        )
    control, *results = found.evaluations
    best = max(results, key=lambda one: one.recalls[0].mean_at_2k)
    near, far = best.recalls[0], best.recalls[-1]
    lesson = (
        f"{best.name} names {near.mean_at_2k:.1%} of the visited experts among its "
        f"{2 * found.trace.signature.top_k} likeliest of the next layer"
    )
    if far is not near:
        lesson += f", and {far.mean_at_2k:.1%} {far.distance} layers ahead"
    return Section(
        name="recall",
        title=title,
        lesson=lesson + ". What is predicted early enough can be read while others compute.",
        how=(
            f"Trained and measured on different requests ({found.test_sequences} held out, "
            f"{best.num_tokens:,} tokens, repeated prompts left out); K is "
            f"{found.trace.signature.top_k}. The control knows the answer and must read 100 %. "
            "Layers with no known layer so far back are predicted from the tokens alone."
        ),
        figure=recall(found),
        alt="Recall at 2K by layer for each predictor, one panel for each look-ahead distance.",
        table=Table(
            header=("predictor", "ahead", "@K", "@2K", "gate mass @2K", "calibr. error", "µs"),
            rows=[
                (
                    result.name,
                    str(one.distance),
                    f"{one.mean_at_k:.1%}",
                    f"{one.mean_at_2k:.1%}",
                    f"{one.mean_mass_at_2k:.1%}",
                    f"{result.calibration_error:.4f}",
                    f"{1e6 * result.call_s:.0f}",
                )
                for result in (control, *results)
                for one in result.recalls
            ],
        ),
    )


def _traffic_section(found: TraceFindings) -> Section:
    names = list(found.timed)
    off = found.timed["off"].total
    lesson = (
        f"With LRU and room for {found.settings.capacity:.0%} of the experts, "
        f"{_loads(off):.2f} experts are loaded for a layer's visit."
    )
    if len(names) > 1:
        ours = found.timed[names[1]].total
        lesson += (
            f" Prefetching by {names[1]} loads {_loads(ours):.2f}, "
            f"{_loads(ours) / max(_loads(off), 1e-9):.2f} times as many, and "
            f"{_share(ours.useful, ours.prefetches):.0%} of what it reads ahead is used."
        )
    return Section(
        name="traffic",
        title="What is moved, and why",
        lesson=lesson,
        how=_machine_words(found),
        figure=traffic(found),
        alt="Bars of bytes moved for each token: demanded, prefetched and used, wasted.",
        table=Table(
            header=("", "demanded", "prefetched", "used", "wasted", "late", "stall (s)"),
            rows=[
                (
                    name,
                    f"{replay.total.misses:,}",
                    f"{replay.total.prefetches:,}",
                    f"{replay.total.useful:,}",
                    f"{replay.total.prefetches - replay.total.useful:,}",
                    f"{replay.total.late_hits:,}",
                    f"{replay.total.stall_s:.2f}",
                )
                for name, replay in found.timed.items()
            ],
        ),
    )


def _timeline_section(found: TraceFindings) -> Section:
    off = found.timed["off"]
    waited = _share(off.total.stall_s, off.seconds)
    lesson = f"Without prefetch {waited:.0%} of the modelled time is waiting for experts."
    for name, replay in list(found.timed.items())[1:]:
        lesson += (
            f" With {name} it is {_share(replay.total.stall_s, replay.seconds):.0%}: "
            f"{_share(replay.total.stall_s, off.total.stall_s):.2f} of the wait, "
            f"{replay.tokens_per_s:.1f} instead of {off.tokens_per_s:.1f} tokens/s."
        )
    return Section(
        name="timeline",
        title="Where the time goes",
        lesson=lesson,
        how="The first steps of the same replay. `run --timeline` records the real one.",
        figure=timeline(found),
        alt="Time of each step, computing and waiting, without and with prefetch.",
    )


def _training_section(found: TrainingReuse) -> Section:
    """Lays out what micro-batches and steps had in common."""
    return Section(
        name="tiers",
        title="What training uses again, and where experts should live",
        lesson=f"{_grouping(found)} {_returning(found)} {_tier_words(found)}",
        how=(
            "A step's experts, each once. The experts in memory are spread evenly at first; after "
            f"every {TIER_CHANGE_STEPS} steps, experts used in at least {TIER_CHANGE_MARGIN:.0%} "
            "more of them "
            "change places with those in memory used least, which is what training does. An expert "
            "that is not in memory costs a step its weights twice and its moments once from the "
            "disk, and all three back."
        ),
        figure=training_tiers(found, _WAYS),
        alt="Share of a step's experts found in memory, over the share of all experts kept there.",
        table=Table(
            header=("experts in memory", *_WAYS.values(), "exchanges"),
            rows=[
                (
                    f"{share:.1%}",
                    *(f"{getattr(tiers, way) / max(1, tiers.uses):.1%}" for way in _WAYS),
                    f"{tiers.exchanges:,}",
                )
                for share, tiers in found.tiers.items()
            ],
        ),
    )


def _grouping(found: TrainingReuse) -> str:
    share = f"A micro-batch asks for {found.pass_share:.0%} of the experts"
    if found.num_passes == found.num_steps:
        return f"{share}; a step has one micro-batch."
    times = found.asked / max(1, found.fetched)
    return (
        f"{share}, a step of {found.num_passes / found.num_steps:.3g} micro-batches for "
        f"{found.step_share:.0%}: fetched once for all of them, experts cross the link "
        f"{times:.2f} times less often than micro-batch by micro-batch."
    )


def _returning(found: TrainingReuse) -> str:
    if np.isnan(found.returning):
        return "There is one step, so nothing comes back."
    return f"{found.returning:.0%} of a step's experts were asked for by the step before."


def _tier_words(found: TrainingReuse) -> str:
    share, tiers = next(iter(found.tiers.items()))
    at = {way: getattr(tiers, way) / max(1, tiers.uses) for way in _WAYS}
    return (
        f"With {share:.1%} of the experts in memory, an even spread finds {at['spread']:.1%} of "
        f"what steps ask for, tiers chosen by use {at['by_use']:.1%} "
        f"({tiers.exchanges:,} exchanges), the best fixed choice {at['best']:.1%}."
    )


def _machine_words(found: TraceFindings) -> str:
    machine = found.settings.machine
    assumed = " (assumed: the trace does not say)" if found.settings.assumes_size else ""
    return (
        f"A modelled machine: experts of {format_bytes(machine.expert_bytes)}{assumed} over a "
        f"link of {machine.bytes_per_s / 1e9:.3g} GB/s, {1e3 * machine.layer_s:.3g} ms for a "
        f"layer and {1e3 * machine.expert_s:.3g} ms for each expert. "
        f"{found.timed['off'].num_tokens:,} tokens of the later requests; predictors learned "
        "from the earlier ones."
    )


def _row(found: TraceFindings, policy: str) -> Row:
    """The policy at the replayed capacity nearest to the one asked for."""
    mine = [row for row in found.rows if row.policy == policy]
    return min(mine, key=lambda row: abs(row.capacity - found.settings.capacity))


def _loads(counts: LayerCounts) -> float:
    return _share(counts.misses + counts.prefetches, counts.events)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
