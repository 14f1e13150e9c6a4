"""`moe-runtime serve`, routed by a trace: `python -P -m ... ROUTES.npz MODEL OPTION...`.

The file is written by `RecordedRouting.saved`. Requests take those of the trace in turn.
"""

import sys

from moe_runtime.benchmarks.cases.routed_model import RoutedModel
from moe_runtime.benchmarks.harness.soak_server import change_when_ready
from moe_runtime.cli.main import main

if __name__ == "__main__":
    path, *words = sys.argv[1:]
    change_when_ready(lambda ready: [RoutedModel(one, path) for one in ready.loaded])
    sys.exit(main(["serve", *words]))
