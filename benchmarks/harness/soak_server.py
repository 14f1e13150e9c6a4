"""`moe-runtime serve` for the soak: says what its process held before it loaded, fails some reads.

`python -P benchmarks/harness/soak_server.py READS_PER_ERROR MODEL OPTION...`: one fetch in so many
fails as on a broken disk, none where it is 0. The first line of stdout is JSON: address, budget,
and resident bytes before loading and when it is ready.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.budget import resident_bytes
from moe_runtime.memory.io_queue import Read
from moe_runtime.memory.source import ExpertSource
from moe_runtime.serving.http import starting
from moe_runtime.types import ExpertKey


def fail_some_reads(reads_per_error: int) -> None:
    """From now on one fetch in so many fails."""
    real: Callable[..., None] = ExpertSource.fetch
    count = itertools.count(1)

    def fetch(self: ExpertSource, key: ExpertKey, slot: Tensor, read: Read) -> None:
        if next(count) % reads_per_error == 0:
            raise CheckpointError(f"expert {key.expert} of layer {key.layer}: injected read error")
        real(self, key, slot, read)

    ExpertSource.fetch = fetch


def tell_when_ready(reads_per_error: int) -> None:
    """What the command says when it is ready is said in a line of ours, too."""
    real = starting.run_server

    def run_server(settings: Any, *, on_ready: Callable[[Any], None], **others: Any) -> None:
        def ready(found: Any) -> None:
            if reads_per_error:
                fail_some_reads(reads_per_error)
            stats: Mapping[str, Any] = dataclasses.asdict(found.loaded[0].moe.stats())
            names = ("baseline_rss_bytes", "expert_slots", "slot_bytes", "expert_bytes")
            facts = {name: stats[name] for name in names}
            facts["model_budget_bytes"] = stats["budget_bytes"]
            facts["ready_rss_bytes"] = resident_bytes()
            print(json.dumps({"address": found.address, **facts}), flush=True)
            on_ready(found)

        real(settings, on_ready=ready, **others)

    starting.run_server = run_server


if __name__ == "__main__":
    tell_when_ready(int(sys.argv[1]))
    sys.exit(main(["serve", *sys.argv[2:], "--json"]))
