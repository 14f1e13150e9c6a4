"""What runs take of their memory budgets: `python benchmarks/budget.py --save`.

The pocket model runs under budgets from too small to unlimited, with and without the native
library, each run a process of its own. The peak of resident memory, less what the process held
before it loaded, must be within the budget. The smallest budget that loads, less one byte, must be
refused. `--all` adds every eviction policy and predictor. A broken promise is exit code 1.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness.scripting import (
    ScriptResults,
    results_parser,
    run_script,
)
from moe_runtime.benchmarks.suite.results import Metric, facts
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction import LIVE_POLICIES
from moe_runtime.policies.prediction import LIVE_PREDICTORS

BUDGETS = ("16MiB", "20MiB", "24MiB", "32MiB", "48MiB", "64MiB", "auto")
TIGHT = "20MiB"
"""The budget of the sweeps over policies and predictors."""
PREFETCH = ("off", "observe", "enforce", "auto")
KERNELS = ("native", "none")
NEW_TOKENS = 16
METRICS = {
    "used_bytes": Metric("bytes"),
    **facts("bytes", "budget_bytes"),
    **facts("count", "expert_slots", better="more"),
}
PROMPTS = tuple(
    " ".join(f"{words} {i}" for i in range(count))
    for words, count in (
        ("The for statement is used to iterate", 8),
        ("import", 2),
        ("A class definition is an executable statement", 5),
        ("Raise", 1),
        ("The with statement wraps the execution of a block", 3),
    )
)
"""Of 80, 8, 50, 2 and 30 tokens, about."""

_RUN = """
import sys
from moe_runtime.cli.main import main
if sys.argv.pop(1) == "none":
    from moe_runtime.kernels import native
    from moe_runtime.policies.eviction import compiled
    for module in (native, compiled):
        module.LIBRARY_PATH = module.LIBRARY_PATH.with_name("not_built.so")
sys.exit(main(sys.argv[1:]))
"""
"""The command line with one kind of kernels."""


@dataclass(frozen=True, kw_only=True)
class Case:
    budget: str
    kernels: str
    requests: int = 1
    kept: bool = False
    policy: str = "auto"
    prefetch: str = "auto"
    predictor: str = "auto"


def cases(kernels: str, *, all_policies: bool) -> Iterator[Case]:
    for budget in ("less", "smallest", *BUDGETS):
        yield Case(budget=budget, kernels=kernels)
    for budget in ("smallest", TIGHT):
        yield Case(budget=budget, kernels=kernels, requests=5, kept=True)
    if all_policies:
        tight = Case(budget=TIGHT, kernels=kernels)
        for policy, prefetch in itertools.product(LIVE_POLICIES, PREFETCH):
            yield replace(tight, policy=policy, prefetch=prefetch)
        for predictor in LIVE_PREDICTORS:
            yield replace(tight, prefetch="enforce", predictor=predictor)


def run(case: Case, cache: Path, smallest: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a case, where the smallest budget has so many bytes, in a process of its own, which
    keeps its learning in `cache`."""
    words = ["run", str(pocket_path()), "--json", "--max-new-tokens", str(NEW_TOKENS)]
    words += itertools.chain(*(("--prompt", prompt) for prompt in PROMPTS[: case.requests]))
    budget = {"smallest": str(smallest), "less": str(smallest - 1)}.get(case.budget, case.budget)
    words += ["--host-memory", budget, "--policy", case.policy, "--prefetch", case.prefetch]
    # that of `auto` is the default, and is refused where nothing is prefetched
    words += [] if case.predictor == "auto" else ["--predictor", case.predictor]
    return subprocess.run(
        [sys.executable, "-P", "-c", _RUN, case.kernels, *words],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )


def measure(case: Case, smallest: int, kept: Path) -> dict[str, Any]:
    """The row of a case; `kept` is the cache of an earlier process."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        if case.kept:
            shutil.copytree(kept, cache)
        return row_of(case, run(case, cache, smallest))


def row_of(case: Case, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What came of a case: bytes at the peak, or the line of a refusal."""
    row: dict[str, Any] = asdict(case) | {"exit_code": done.returncode}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error: " in line]
        return row | {"refused": " ".join(said)}
    stats = json.loads(done.stdout)
    used = stats["peak_rss_bytes"] - stats["baseline_rss_bytes"]
    found = {name: stats[name] for name in ("budget_bytes", "expert_slots")}
    return row | found | {"used_bytes": used, "within": used <= stats["budget_bytes"]}


def smallest_budget(kernels: str, requests: int, cache: Path) -> int:
    """The smallest budget that loads, as the refusal of one byte says."""
    case = Case(budget="1", kernels=kernels, requests=requests)
    named = re.search(r"\((\d+) bytes\)", run(case, cache).stderr)
    assert named is not None
    return int(named[1])


def rows_of(kernels: str, *, all_policies: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder)
        run(Case(budget=TIGHT, kernels=kernels, policy="reuse", prefetch="observe"), kept)
        smallest = {requests: smallest_budget(kernels, requests, kept) for requests in (1, 5)}
        for case in cases(kernels, all_policies=all_policies):
            yield measure(case, smallest[case.requests], kept)


def main() -> int:
    options = results_parser(__doc__, "--all=policies and predictors, too").parse_args()
    settings = {"model": "pocket", "new_tokens": NEW_TOKENS, "prompts": list(PROMPTS)}
    results, broken = ScriptResults("budget", options, settings, METRICS), 0
    for row in (row for one in KERNELS for row in rows_of(one, all_policies=options.all)):
        name = " ".join(str(row[field]) for field in Case.__dataclass_fields__)
        found = [{metric: row[metric] for metric in METRICS}] if not row["exit_code"] else []
        results.add(name, found or row["refused"])
        if is_broken(row):
            print(f"BROKEN: {name}")
            broken = 1
    return results.finish() or broken


def is_broken(row: dict[str, Any]) -> bool:
    """Whether a promise was not kept: a run beyond its budget, or a wrong refusal."""
    if not row["exit_code"]:
        return not row["within"] or row["budget"] == "less"
    is_refusal = row["exit_code"] == 2 and "too small" in row["refused"]
    return not (is_refusal and row["budget"] in ("less", BUDGETS[0]))


if __name__ == "__main__":
    sys.exit(run_script(main))
