"""Exact hit counts of somebody else's replay of the same trace, which ours must find again.

A file of them is a JSON list of rows (or an object with it as ``rows``): ``policy``, ``scope``
(``per_layer`` or ``global``), ``capacity`` in slots (of each layer, or of all), whether the cache
is emptied between sequences (``reset_per_sequence``), and what was counted: ``accesses``, ``hits``
and ``all_k_hit_rate``, the share of a layer's visits without a load, of six digits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError
from moe_runtime.files import read_bounded
from moe_runtime.lab.replay.experiment import Experiment, run_experiment
from moe_runtime.lab.traces.workload import Workload

_MAX_BYTES = 64 << 20
# What others call Belady's optimum with the right to keep a newcomer out, and the best fixed set.
_OTHER_NAMES = {"belady_bypass": "belady-bypass", "static_oracle_pop": "static"}
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "policy": str,
    "scope": str,
    "capacity": int,
    "reset_per_sequence": int,
    "accesses": int,
    "hits": int,
    "all_k_hit_rate": (int, float),
}


def require_golden(workload: Workload, path: Path) -> int:
    """Replays every row of a file.

    Returns:
        How many there are.

    Raises:
        ValueError: a count differs; or a row has a policy, scope or capacity that there is not.
        CheckpointError: the file has no such rows.
        OSError: it cannot be read.
    """
    rows = _rows(path)
    for number, row in enumerate(rows):
        place = f"{path}: row {number} ({row['policy']}, {row['scope']}, {row['capacity']} slots)"
        try:
            found = _replay(workload, row)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        wanted = (row["hits"], row["all_k_hit_rate"])
        if found != wanted:
            raise ValueError(
                f"{place}: expected {wanted[0]} hits and {wanted[1]} of the visits without a load, "
                f"the replay gives {found[0]} and {found[1]}"
            )
    return len(rows)


def _replay(workload: Workload, row: Mapping[str, Any]) -> tuple[int, float]:
    """Hits, and the share of visits without a load."""
    signature = workload.trace.signature
    slots = row["capacity"] * (signature.num_layers if row["scope"] == "per_layer" else 1)
    experiment = Experiment(
        policies=[_OTHER_NAMES.get(str(row["policy"]), str(row["policy"]))],
        capacities=[slots / (signature.num_layers * signature.num_experts)],
        scope=row["scope"].replace("_", "-"),
        reset_per_sequence=bool(row["reset_per_sequence"]),
    )
    (found,) = run_experiment(workload, experiment, bounds=False)
    return round(found.hit_rate * row["accesses"]), round(found.all_resident_rate, 6)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(read_bounded(path, max_bytes=_MAX_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows:
        raise CheckpointError(f"{path}: expected a list of rows of hit counts")
    for number, row in enumerate(rows):
        for name, kind in _KINDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                wanted = "a text" if kind is str else "a number"
                raise CheckpointError(f"{path}: row {number}: expected {wanted} as {name!r}")
    return rows
