"""The part of a trace's page about training: reuse between micro-batches and steps, and tiers."""

from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.lab.record_tiers import TIER_CHANGE_MARGIN, TIER_CHANGE_STEPS
from moe_runtime.lab.report.page import Section, Table
from moe_runtime.lab.report.style import INK, SERIES, drawing
from moe_runtime.lab.report.training_reuse import TrainingReuse

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WAYS = {"spread": "spread evenly", "by_use": "exchanged by use", "best": "best fixed ones"}


def training_section(found: TrainingReuse) -> Section:
    """Lays out what micro-batches and steps had in common."""
    return Section(
        name="tiers",
        title="What training uses again, and where experts should live",
        lesson=f"{_grouping(found)} {_returning(found)} {_tiers(found)}",
        how=(
            "A step's experts, each once. The experts in memory are spread evenly at first; after "
            f"every {TIER_CHANGE_STEPS} steps, experts used in at least {TIER_CHANGE_MARGIN:.0%} "
            "more of them "
            "change places with those in memory used least, which is what training does. An expert "
            "that is not in memory costs a step its weights twice and its moments once from the "
            "disk, and all three back."
        ),
        figure=_draw(found),
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


def _tiers(found: TrainingReuse) -> str:
    share, tiers = next(iter(found.tiers.items()))
    at = {way: getattr(tiers, way) / max(1, tiers.uses) for way in _WAYS}
    return (
        f"With {share:.1%} of the experts in memory, an even spread finds {at['spread']:.1%} of "
        f"what steps ask for, tiers chosen by use {at['by_use']:.1%} "
        f"({tiers.exchanges:,} exchanges), the best fixed choice {at['best']:.1%}."
    )


def _draw(found: TrainingReuse) -> "Figure":
    shares = [100 * share for share in found.tiers]
    with drawing() as new_figure:
        figure = new_figure(figsize=(9.2, 3.7))
        left, right = figure.subplots(1, 2, width_ratios=(1, 1))
        ranked = -np.sort(-100 * found.use.ravel())
        experts = 100 * np.arange(1, len(ranked) + 1) / len(ranked)
        left.fill_between(experts, 0, ranked, color=SERIES[2], alpha=0.3, linewidth=0)
        left.plot(experts, ranked, color=SERIES[2])
        left.set_xlabel("experts, most used first (%)")
        left.set_ylabel("steps that ask for it (%)")
        for (way, label), colour in zip(_WAYS.items(), (SERIES[0], SERIES[1], INK), strict=True):
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
