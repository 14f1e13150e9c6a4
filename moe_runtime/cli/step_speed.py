"""How long a step of offloaded training will take: what it moves, what it computes."""

import time
from pathlib import Path
from typing import Any

from moe_runtime.cli.console import say_line
from moe_runtime.cli.disk import measure_disk
from moe_runtime.config import format_bytes

_READ_BYTES = 4 << 20
_SECONDS = 0.2
_WIDTH = 512
WORTH_MEASURING_BYTES = 64 << 20
"""That a step moves, from which on a beginning run measures the disk."""
_OPERATIONS = 6
"""Of a parameter and a token, forward and backward: a product and a sum, three times."""


def predict_step(
    plan: dict[str, Any], folder: Path, *, tokens: int, active_parameters: int
) -> dict[str, float]:
    """The time of a step, from the speed of the disk and of products measured here and now.

    Both go on at the same time, so the longer one counts; writes are taken to be as fast as reads.

    Args:
        plan: `read_bytes_per_step` and `written_bytes_per_step`.
        folder: where experts would live; may not exist yet.
        tokens: of a step.
        active_parameters: that a token passes.

    Raises:
        OSError: the disk cannot be measured.
    """
    moved = plan["read_bytes_per_step"] + plan["written_bytes_per_step"]
    compute_s = _OPERATIONS * active_parameters * tokens / _operations_per_s()
    disk = {}
    if moved:
        there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
        speed = measure_disk(there, read_bytes=_READ_BYTES, seconds=_SECONDS)
        rate = speed.direct_bytes_per_s or speed.buffered_bytes_per_s
        disk = {"disk_bytes_per_s": rate, "disk_s": moved / rate}
    return {**disk, "compute_s": compute_s, "step_s": max(compute_s, disk.get("disk_s", 0.0))}


def speed_row(predicted: dict[str, float], tokens: int) -> str:
    """For people."""
    text = f"about {predicted['step_s']:.3g} s a step, {tokens / predicted['step_s']:,.0f} tokens/s"
    if "disk_s" in predicted:
        text += f"; {predicted['disk_s']:.3g} s of it for the disk, if it were alone"
    return text


def warn_of_slow_disk(predicted: dict[str, float], folder: Path) -> None:
    """Says on stderr when the disk makes a step take over twice as long as its products."""
    if predicted.get("disk_s", 0.0) > 2 * predicted["compute_s"]:
        say_line(
            f"warning: the disk of {folder} reads "
            f"{format_bytes(round(predicted['disk_bytes_per_s']))}/s, so a step will take about "
            f"{predicted['step_s']:.3g} s, its products alone {predicted['compute_s']:.3g} s; more "
            "memory, larger steps or a faster storage_dir help"
        )


def warn_where_much_moves(
    plan: dict[str, Any], folder: Path, *, tokens: int, active_parameters: int
) -> None:
    """`warn_of_slow_disk` as a run begins, where its steps move enough to be worth a measurement.

    Args:
        plan: as of `predict_step`; empty where nothing is offloaded.
        folder: where experts live, with their files already.
        tokens, active_parameters: as of `predict_step`.
    """
    moved = plan.get("read_bytes_per_step", 0) + plan.get("written_bytes_per_step", 0)
    if not plan or moved < WORTH_MEASURING_BYTES:
        return
    try:
        predicted = predict_step(plan, folder, tokens=tokens, active_parameters=active_parameters)
    except OSError:
        # a disk too full for the measurement is no reason not to train
        return
    warn_of_slow_disk(predicted, folder)


def _operations_per_s() -> float:
    """Of products in fp32, as wide as those of a small expert."""
    import torch

    left, right = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    done, started = 0, time.perf_counter()
    while done < 2 or time.perf_counter() - started < _SECONDS / 2:
        torch.mm(left, right)
        done += 1
    return 2 * _WIDTH**3 * done / (time.perf_counter() - started)
