"""Results of other memory caps, measured before in the same circumstances, kept in one file.

A full comparison takes an hour. With this it can be made cap by cap, and each cap still has its
systems in turn in one session.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

# What must be equal for results to stand in one file.
CIRCUMSTANCES = ("benchmark", "commit", "machine", "versions", "shape", "prompt")
# Settings that may differ between sessions.
OWN_SETTINGS = ("systems", "caps", "trace")
ROWS_BY_CAP = ("summary", "ratios_ours_over_peer", "ours", "runs")


def check_circumstances(content: dict[str, Any], path: Path) -> None:
    """Finds out before anything is measured whether new results may stand beside a file's.

    Args:
        content: the circumstances of this session, and its `settings`.
        path: a results file; there need not be one.

    Raises:
        ValueError: the file's results were made in other circumstances.
    """
    if not path.is_file():
        return
    old = json.loads(path.read_text())
    own, theirs = content["settings"], old["settings"]
    differing = [name for name in CIRCUMSTANCES if old.get(name) != content[name]]
    differing += [n for n in own if n not in OWN_SETTINGS and theirs.get(n) != own[n]]
    if differing:
        raise ValueError(
            f"the results in {path} cannot be kept: they have another {', '.join(differing)}; "
            "leave out --keep, or name another file with --results"
        )


def with_kept(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """New results together with those that a file has of other caps.

    Args:
        content: what this session found.
        path: a results file; there need not be one.

    Raises:
        ValueError: as `check_circumstances`.
    """
    if not path.is_file():
        return content
    check_circumstances(content, path)
    old = json.loads(path.read_text())
    own, theirs = content["settings"], old["settings"]
    merged = dict(content)
    merged["command"] = f"{old['command']} && {content['command']}"
    merged["notes"] = list(dict.fromkeys([*old["notes"], *content["notes"]]))
    merged["disk"] = [*old["disk"], *content["disk"]]
    for section in ROWS_BY_CAP:
        kept = [row for row in old[section] if row["cap_bytes"] not in own["caps"]]
        merged[section] = sorted([*kept, *content[section]], key=_largest_first)
    caps = dict.fromkeys(row["cap_bytes"] for row in merged["summary"])
    systems = dict.fromkeys([*theirs["systems"], *own["systems"]])
    merged["settings"] = {**own, "caps": list(caps), "systems": list(systems)}
    return merged


def _largest_first(row: dict[str, Any]) -> float:
    return -math.inf if row["cap_bytes"] is None else -row["cap_bytes"]
