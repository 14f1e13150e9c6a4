"""Where the time of a call goes, as text: the device's work, torch's calls, Python's."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

ROWS = 18


def profiled(title: str, call: Callable[[], Any], device: str) -> str:
    """Calls twice: with torch's profiler, and with Python's."""
    lines = [f"==== {title}"]
    activities, order = [ProfilerActivity.CPU], ["self_cpu_time_total"]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        order.append("self_cuda_time_total")
    with profile(activities=activities) as found:
        call()
    averages = found.key_averages()
    for key in order:
        lines.append(averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=60))
    python = cProfile.Profile()
    python.runcall(call)
    text = io.StringIO()
    pstats.Stats(python, stream=text).sort_stats("tottime").print_stats(ROWS * 2)
    return "\n".join([*lines, text.getvalue()])
