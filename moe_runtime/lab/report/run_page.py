"""The output of ``moe-runtime run --json`` as a page."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, blamed_on
from moe_runtime.files import read_bounded
from moe_runtime.lab.report.page import BYTE_COLOURS, Page, Section, Table, stacked_bars

_MAX_BYTES = 64 << 20
_NEEDED = (
    *("prompt_tokens", "new_tokens", "hits", "late_hits", "misses", "bytes_read"),
    *("readahead_bytes", "expert_slots", "slot_bytes", "budget_bytes", "dense_bytes"),
    *("expert_bytes", "baseline_rss_bytes", "peak_rss_bytes", "guesses", "useful_guesses"),
    *("late_guesses", "wasted_guesses", "load_s", "stall_s", "predict_s"),
)
_OPTIONAL = ("ttft_s", "decode_tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """The statistics of one run, under the names of ``run --json``."""

    model: str
    policy: str
    prefetch: str
    numbers: dict[str, float]

    @property
    def asked(self) -> float:
        """Experts that layers asked for."""
        return sum(self.numbers[name] for name in ("hits", "late_hits", "misses"))

    @property
    def decode_s(self) -> float:
        """Seconds from the first new token to the last; 0 where there were fewer than two."""
        rate = self.numbers.get("decode_tokens_per_s", 0.0)
        return (self.numbers["new_tokens"] - 1) / rate if rate else 0.0


def read_run_stats(path: Path) -> RunStats:
    """Reads the object that ``run --json`` printed."""
    raw = read_bounded(path, max_bytes=_MAX_BYTES)
    with blamed_on(f"{path}: neither a trace (.npz, .jsonl) nor the JSON of `run --json`"):
        value = json.loads(raw)
    if isinstance(value, dict) and set(value) == {"error"}:
        raise CheckpointError(f"{path}: the run failed: {value['error']}")
    missing = [name for name in ("model", "policy", *_NEEDED) if not _has(value, name)]
    if missing:
        raise CheckpointError(
            f"{path}: not what `run --json` prints: {', '.join(missing[:4])} missing or malformed"
        )
    names = [*_NEEDED, *(name for name in _OPTIONAL if _has(value, name))]
    return RunStats(
        model=value["model"],
        policy=value["policy"],
        prefetch=str(value.get("prefetch", "off")),
        numbers={name: float(value[name]) for name in names},
    )


def _has(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        return False
    if name in ("model", "policy"):
        return isinstance(value.get(name), str)
    number = value.get(name)
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < 1e18


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
        figure=stacked_bars(
            {"experts asked for": [numbers[name] for name in ("hits", "late_hits", "misses")]},
            ("in memory", "on their way", "read from disk"),
            scale=100 / max(1.0, stats.asked),
            unit="share (%)",
        ),
        alt="Bar of experts asked for: in memory, on their way, read from disk.",
    )


def _bytes(stats: RunStats) -> Section:
    numbers = stats.numbers
    ahead = numbers["readahead_bytes"]
    demanded = numbers["bytes_read"] - ahead
    wasted = min(ahead, numbers["wasted_guesses"] * numbers["slot_bytes"])
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
        figure=stacked_bars(
            {"read from disk": [demanded, ahead - wasted, wasted]},
            ("demanded", "read ahead, used", "prefetched, wasted"),
            scale=2**-20,
            unit="MiB",
            colours=BYTE_COLOURS,
        ),
        alt="Bar of bytes read: demanded, read ahead and used, prefetched wasted.",
        table=Table(
            header=("", "experts"),
            rows=[(key.replace("_", " "), f"{numbers[key]:,.0f}") for key in guesses],
        ),
    )


def _timeline(stats: RunStats) -> Section:
    numbers = stats.numbers
    first_s = numbers.get("ttft_s", 0.0)
    busy_s = first_s + stats.decode_s
    share = numbers["stall_s"] / busy_s if busy_s else 0.0
    return Section(
        name="timeline",
        title="Where the time went",
        lesson=(
            f"Loading took {numbers['load_s']:.2f} s, the text {busy_s:.2f} s; {share:.0%} of the "
            f"latter was waiting for experts. Guessing took {numbers['predict_s']:.2f} s."
        ),
        how="`run --timeline FILE` records every layer's wait for a trace viewer.",
        figure=stacked_bars(
            {
                "from start to end": [numbers["load_s"], first_s, stats.decode_s, 0.0],
                "of this, waiting": [0.0, 0.0, 0.0, min(numbers["stall_s"], busy_s)],
            },
            ("loading", "to the first token", "decoding", "waiting for experts"),
            scale=1.0,
            unit="time (s)",
        ),
        alt="Bars of seconds: loading, to the first token, decoding, and the part spent waiting.",
    )


def _memory(stats: RunStats) -> Section:
    numbers = stats.numbers
    dense, experts, budget = (
        numbers[name] for name in ("dense_bytes", "expert_bytes", "budget_bytes")
    )
    room = numbers["expert_slots"] * numbers["slot_bytes"]
    held = max(0.0, numbers["peak_rss_bytes"] - numbers["baseline_rss_bytes"])
    sizes = {
        "dense weights": dense,
        "all experts": experts,
        "room for experts": room,
        "peak of the process": held,
        "budget": budget,
    }
    return Section(
        name="memory",
        title="What it took",
        lesson=(
            f"The model has {format_bytes(int(dense + experts))}, of which experts are "
            f"{experts / max(1.0, dense + experts):.0%}; the budget was "
            f"{format_bytes(int(budget))}."
        ),
        how="The peak counts what the process held beyond its libraries.",
        figure=stacked_bars(
            {
                "model": [dense, experts, 0.0],
                "in memory": [dense, room, 0.0],
                "peak of the process": [0.0, 0.0, held],
                "budget": [0.0, 0.0, budget],
            },
            ("dense weights", "experts", "all together"),
            scale=2**-20,
            unit="MiB",
        ),
        alt="Bars of memory: the model, what was held in memory, the peak and the budget.",
        table=Table(
            header=("", "size"),
            rows=[(name, format_bytes(int(size))) for name, size in sizes.items()],
        ),
    )
