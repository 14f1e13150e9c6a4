"""What a run's statistics are called, and what one learns from each of them."""

from moe_runtime.config import format_bytes
from moe_runtime.lab.report.page import Page, Section, Table
from moe_runtime.lab.report.run_stats import (
    RunStats,
    bytes_by_kind,
    draw_bytes,
    draw_memory,
    draw_requests,
    draw_timeline,
)


def run_page(stats: RunStats, name: str) -> Page:
    """Lays out the statistics of one run."""
    numbers = stats.numbers
    facts = [(f"{numbers['new_tokens']:,.0f}", "new tokens")]
    if "decode_tokens_per_s" in numbers:
        facts.append((f"{numbers['decode_tokens_per_s']:.2f}", "tokens/s while decoding"))
    if stats.asked:
        facts.append((f"{numbers['hits'] / stats.asked:.1%}", "of the experts were in memory"))
    facts.append((f"{numbers['stall_s']:.2f} s", "waiting for experts"))
    facts.append((format_bytes(int(numbers["bytes_read"])), "read from disk"))
    return Page(
        title="What the runtime did",
        subtitle=f"{name} – {stats.model}, policy {stats.policy}, prefetch {stats.prefetch}",
        facts=facts,
        sections=[_requests(stats), _bytes(stats), _timeline(stats), _memory(stats)],
    )


def _requests(stats: RunStats) -> Section:
    numbers = stats.numbers
    return Section(
        name="requests",
        title="Where the experts were",
        lesson=(
            f"Layers asked for {stats.asked:,.0f} experts: {numbers['hits']:,.0f} lay in memory, "
            f"{numbers['late_hits']:,.0f} were on their way, {numbers['misses']:,.0f} had to be "
            f"read. There is room for {numbers['expert_slots']:,.0f} experts at once."
        ),
        figure=draw_requests(stats),
        alt="Bar of experts asked for: in memory, on their way, read from disk.",
    )


def _bytes(stats: RunStats) -> Section:
    demanded, ahead, wasted = bytes_by_kind(stats)
    numbers = stats.numbers
    guesses = ("guesses", "useful_guesses", "late_guesses", "wasted_guesses")
    return Section(
        name="bytes",
        title="What was read, and why",
        lesson=(
            f"{format_bytes(int(demanded))} were demanded by a waiting layer, "
            f"{format_bytes(int(ahead))} were read before they were asked for."
            + (
                f" Of {numbers['guesses']:,.0f} guesses {numbers['useful_guesses']:,.0f} came in "
                f"time, {numbers['late_guesses']:,.0f} late and {numbers['wasted_guesses']:,.0f} "
                "wasted."
                if numbers["guesses"]
                else " Nothing was guessed."
            )
        ),
        how=f"Wasted: about {format_bytes(int(wasted))}, by the number of wasted guesses.",
        figure=draw_bytes(stats),
        alt="Bar of bytes read: demanded, read ahead and used, prefetched wasted.",
        table=Table(
            header=("", "experts"),
            rows=[(key.replace("_", " "), f"{numbers[key]:,.0f}") for key in guesses],
        ),
    )


def _timeline(stats: RunStats) -> Section:
    numbers = stats.numbers
    busy_s = numbers.get("ttft_s", 0.0) + stats.decode_s
    share = numbers["stall_s"] / busy_s if busy_s else 0.0
    return Section(
        name="timeline",
        title="Where the time went",
        lesson=(
            f"Loading took {numbers['load_s']:.2f} s, the text {busy_s:.2f} s; {share:.0%} of the "
            f"latter was waiting for experts. Guessing took {numbers['predict_s']:.2f} s."
        ),
        how="`run --timeline FILE` records every layer's wait for a trace viewer.",
        figure=draw_timeline(stats),
        alt="Bars of seconds: loading, to the first token, decoding, and the part spent waiting.",
    )


def _memory(stats: RunStats) -> Section:
    numbers = stats.numbers
    held_bytes = max(0.0, numbers["peak_rss_bytes"] - numbers["baseline_rss_bytes"])
    sizes = {
        "dense weights": numbers["dense_bytes"],
        "all experts": numbers["expert_bytes"],
        "room for experts": numbers["expert_slots"] * numbers["slot_bytes"],
        "peak of the process": held_bytes,
        "budget": numbers["budget_bytes"],
    }
    model_bytes = numbers["dense_bytes"] + numbers["expert_bytes"]
    return Section(
        name="memory",
        title="What it took",
        lesson=(
            f"The model has {format_bytes(int(model_bytes))}, of which experts are "
            f"{numbers['expert_bytes'] / max(1.0, model_bytes):.0%}; the budget was "
            f"{format_bytes(int(numbers['budget_bytes']))}."
        ),
        how="The peak counts what the process held beyond its libraries.",
        figure=draw_memory(stats),
        alt="Bars of memory: the model, what was held in memory, the peak and the budget.",
        table=Table(
            header=("", "size"),
            rows=[(name, format_bytes(int(size))) for name, size in sizes.items()],
        ),
    )
