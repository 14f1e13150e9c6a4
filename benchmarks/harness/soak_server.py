"""`moe-runtime serve` for the soak: says what its process held before it loaded, fails some reads.

`python -P benchmarks/harness/soak_server.py MODEL OPTION...`: now and then a fetch finds an expert
that cannot be read for some seconds. The first line of stdout is JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.budget import resident_bytes
from moe_runtime.memory.reads import Transfer
from moe_runtime.memory.source import ExpertSource
from moe_runtime.serving.http import starting
from moe_runtime.types import ExpertKey

FETCHES_PER_FAULT = 5000
BROKEN_S = 3.0
"""Longer than requests take to try again alone."""


def fail_some_reads(fetches_per_fault: int, clock: Callable[[], float] = time.monotonic) -> None:
    """From now on one fetch in so many finds its expert on a bad spot of the disk, for a while."""
    real: Callable[..., None] = ExpertSource.fetch
    count = itertools.count(1)
    broken_until: dict[ExpertKey, float] = {}

    def fetch(self: ExpertSource, key: ExpertKey, slot: Tensor, read: Transfer) -> None:
        if next(count) % fetches_per_fault == 0:
            broken_until[key] = clock() + BROKEN_S
        if clock() < broken_until.get(key, -math.inf):
            fail_at_its_end(key, read)
        real(self, key, slot, read)

    ExpertSource.fetch = fetch


def fail_at_its_end(key: ExpertKey, read: Transfer) -> None:
    """A read that has not ended yet will end with an error."""
    tell = read._on_done

    def tell_of_error(ended: Transfer) -> None:
        where = f"expert {key.expert} of MoE layer {key.layer}"
        ended.error = CheckpointError(f"cannot read {where}: injected read error")
        print(json.dumps({"injected": [key.layer, key.expert]}), file=sys.stderr, flush=True)
        tell(ended)

    read._on_done = tell_of_error


def change_when_ready(change: Callable[[Any], object]) -> None:
    """From now on a server is changed before it says that it is ready."""
    real = starting.run_server

    def run_server(settings: Any, *, on_ready: Callable[[Any], None], **others: Any) -> None:
        def ready(found: Any) -> None:
            change(found)
            on_ready(found)

        real(settings, on_ready=ready, **others)

    starting.run_server = run_server


def fail_and_tell(found: Any) -> None:
    """What the command says when it is ready is said in a line of ours, too."""
    fail_some_reads(FETCHES_PER_FAULT)
    stats: Mapping[str, Any] = dataclasses.asdict(found.loaded[0].moe.stats())
    names = ("baseline_rss_bytes", "expert_slots", "slot_bytes", "expert_bytes")
    facts = {name: stats[name] for name in names}
    facts["model_budget_bytes"] = stats["budget_bytes"]
    facts["ready_rss_bytes"] = resident_bytes()
    print(json.dumps({"address": found.address, **facts}), flush=True)


if __name__ == "__main__":
    change_when_ready(fail_and_tell)
    sys.exit(main(["serve", *sys.argv[1:], "--json"]))
