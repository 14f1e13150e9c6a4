"""`moe-runtime serve`, routed by a trace: `python -P -m ... ROUTES.npz MODEL OPTION...`.

The file is written by `RecordedRouting.saved`. Requests take those of the trace in turn.
"""

import sys
from collections.abc import Callable
from typing import Any

from moe_runtime.benchmarks.cases.routed_model import RoutedModel
from moe_runtime.cli.main import main
from moe_runtime.serving.http import starting


def route(path: str) -> None:
    """From now on the models of a server are routed before it says that it is ready."""
    real = starting.run_server

    def run_server(settings: Any, *, on_ready: Callable[[Any], None], **others: Any) -> None:
        def ready(found: Any) -> None:
            for loaded in found.loaded:
                RoutedModel(loaded, path)
            on_ready(found)

        real(settings, on_ready=ready, **others)

    starting.run_server = run_server


if __name__ == "__main__":
    route(sys.argv[1])
    sys.exit(main(["serve", *sys.argv[2:], "--device", "cpu"]))
