"""`moe-runtime serve` with routing from a trace: `python -P -m ... ROUTES.npz MODEL OPTION...`.

The file is written by `RecordedRouting.saved`. Requests take those of the trace in turn.
"""

import sys
from collections.abc import Sequence
from typing import Any

from moe_runtime.benchmarks.cases.routed_model import RoutedModel
from moe_runtime.cli.main import main


def route(loaded: Sequence[Any]) -> None:
    """Route a server's model before the server reports that it is ready."""
    if len(loaded) != 1:
        raise ValueError(f"--routing: expected one model that is loaded at once, got {len(loaded)}")
    RoutedModel(loaded[0], sys.argv[1])


if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[2:], "--device", "cpu"], on_loaded=route))
