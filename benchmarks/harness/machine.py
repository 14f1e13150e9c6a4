"""What a result depends on besides the code: hardware, versions, commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from moe_runtime.lab.this_machine import describe_machine as describe_machine
from moe_runtime.lab.this_machine import num_usable_cores as num_usable_cores
from moe_runtime.lab.this_machine import total_memory_bytes as total_memory_bytes
from moe_runtime.lab.this_machine import versions as versions


def machine_name(facts: dict[str, object]) -> str:
    """A file-name-safe name made of processor, cores and memory."""
    gib = round(int(str(facts["memory_bytes"])) / 2**30)
    words = f"{facts['cpu']}-{facts['num_cores']}c-{gib}g".lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", words)).strip("-")


def commit(repository: Path) -> str:
    """The commit of the checkout, with `+changes` when files other than results differ from it."""
    try:
        head = _git(repository, "rev-parse", "--short=12", "HEAD")
        measured = (":/", ":(top,exclude)benchmarks/results")
        changed = _git(repository, "status", "--porcelain", "--untracked-files=no", "--", *measured)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
