"""What ``moe-runtime run --json`` printed, read back and drawn."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import CheckpointError
from moe_runtime.files import read_bounded
from moe_runtime.lab.report.charts import BYTE_COLOURS, stacked_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_BYTES = 64 << 20
_COUNTS = (
    "prompt_tokens",
    "new_tokens",
    "hits",
    "late_hits",
    "misses",
    "bytes_read",
    "readahead_bytes",
    "expert_slots",
    "slot_bytes",
    "budget_bytes",
    "dense_bytes",
    "expert_bytes",
    "baseline_rss_bytes",
    "peak_rss_bytes",
    "guesses",
    "useful_guesses",
    "late_guesses",
    "wasted_guesses",
)
_SECONDS = ("load_s", "stall_s", "predict_s")
_OPTIONAL = ("ttft_s", "decode_tokens_per_s")


@dataclass(frozen=True, kw_only=True)
class RunStats:
    """The statistics of one run.

    Attributes:
        model, policy, prefetch: as the run was asked for.
        numbers: counts, bytes and seconds under the names that ``run --json`` gives them; what the
            run did not know is absent.
    """

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
    """Reads the object that ``run --json`` printed.

    Raises:
        CheckpointError: the file is missing, too large, not JSON, or not such an object.
    """
    try:
        raw = read_bounded(path, max_bytes=_MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: neither a trace (.npz, .jsonl) nor the JSON of `run --json`: {error}"
        ) from None
    if isinstance(value, dict) and set(value) == {"error"}:
        raise CheckpointError(f"{path}: the run failed: {value['error']}")
    missing = [name for name in ("model", "policy", *_COUNTS, *_SECONDS) if not _has(value, name)]
    if missing:
        raise CheckpointError(
            f"{path}: not what `run --json` prints: {', '.join(missing[:4])} missing or malformed"
        )
    names = [*_COUNTS, *_SECONDS, *(name for name in _OPTIONAL if _has(value, name))]
    return RunStats(
        model=value["model"],
        policy=value["policy"],
        prefetch=str(value.get("prefetch", "off")),
        numbers={name: float(value[name]) for name in names},
    )


def draw_requests(stats: RunStats) -> "Figure":
    """Where the experts were when a layer asked for them."""
    names = ("hits", "late_hits", "misses")
    values = [stats.numbers[name] for name in names]
    scale = 100 / max(1.0, stats.asked)
    kinds = ("in memory", "on their way", "read from disk")
    return stacked_bars({"experts asked for": values}, kinds, scale=scale, unit="share (%)")


def draw_bytes(stats: RunStats) -> "Figure":
    """Bytes that were read, by why."""
    demanded, ahead, wasted = bytes_by_kind(stats)
    return stacked_bars(
        {"read from disk": [demanded, ahead - wasted, wasted]},
        ("demanded", "read ahead, used", "prefetched, wasted"),
        scale=2**-20,
        unit="MiB",
        colours=BYTE_COLOURS,
    )


def draw_timeline(stats: RunStats) -> "Figure":
    """The run from loading to the last token."""
    numbers = stats.numbers
    first_s = numbers.get("ttft_s", 0.0)
    waited_s = min(numbers["stall_s"], first_s + stats.decode_s)
    return stacked_bars(
        {
            "from start to end": [numbers["load_s"], first_s, stats.decode_s, 0.0],
            "of this, waiting": [0.0, 0.0, 0.0, waited_s],
        },
        ("loading", "to the first token", "decoding", "waiting for experts"),
        scale=1.0,
        unit="time (s)",
    )


def draw_memory(stats: RunStats) -> "Figure":
    """What the model needs, what was allowed and what was used."""
    numbers = stats.numbers
    used = max(0.0, numbers["peak_rss_bytes"] - numbers["baseline_rss_bytes"])
    slots = numbers["expert_slots"] * numbers["slot_bytes"]
    return stacked_bars(
        {
            "model": [numbers["dense_bytes"], numbers["expert_bytes"], 0.0],
            "in memory": [numbers["dense_bytes"], slots, 0.0],
            "peak of the process": [0.0, 0.0, used],
            "budget": [0.0, 0.0, numbers["budget_bytes"]],
        },
        ("dense weights", "experts", "all together"),
        scale=2**-20,
        unit="MiB",
    )


def bytes_by_kind(stats: RunStats) -> tuple[float, float, float]:
    """Bytes demanded, bytes read ahead, and the part of the latter that nobody asked for."""
    ahead = stats.numbers["readahead_bytes"]
    wasted = min(ahead, stats.numbers["wasted_guesses"] * stats.numbers["slot_bytes"])
    return stats.numbers["bytes_read"] - ahead, ahead, wasted


def _has(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        return False
    if name in ("model", "policy"):
        return isinstance(value.get(name), str)
    number = value.get(name)
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < 1e18
