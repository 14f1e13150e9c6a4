"""Route a loaded model by a recorded trace, for benchmarks.

`python -P -m moe_runtime.benchmarks.cases.routed_model ROUTES.npz MODEL OPTION...` is
`moe-runtime serve` with such a model. `RecordedRouting.saved` writes the file.

Shape suffixes: T tokens of a pass, K experts of a token.
"""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.steps import Listener, Step


class RoutedModel(Listener):
    """Gives a model's experts the choices and weights of a trace instead of its gates'.

    The gates still compute. Each request takes a request of the trace, each token the row of its
    position; after the last row they start again. Other listeners see the trace's token ids.
    """

    def __init__(self, model: Any, path: str) -> None:
        with np.load(path, allow_pickle=False) as file:
            ids, weights, self._length = file["ids"], file["weights"], int(file["length"])
            self._tokens = file["tokens"]
        self._num_requests = len(ids) // self._length
        self._ids = torch.from_numpy(ids.astype(np.int64)).transpose(0, 1).contiguous()
        self._weights = torch.from_numpy(weights.astype(np.float32)).transpose(0, 1).contiguous()
        self._rows = torch.zeros(0, dtype=torch.int64)
        self._taken: Sequence[int] | None = None
        for module in model.modules():
            if isinstance(module, OffloadedExperts):
                module.register_forward_pre_hook(self._replace)
        model._steps.listeners.add(self, is_first=True)

    def take(self, requests: Sequence[int]) -> None:
        """Use these requests of the trace for the sequences of the next passes."""
        self._taken = requests

    def begin(self, step: Step) -> None:
        if self._taken is None:
            numbers = step.requests % self._num_requests
        else:
            numbers = np.array(self._taken)[step.sequences]
        places = np.maximum(step.positions, 0) % self._length
        rows = numbers * self._length + places
        step.token_ids, self._rows = self._tokens[rows], torch.from_numpy(rows)

    def _replace(self, module: OffloadedExperts, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_TD, _, weights_TK = given
        of_layer = self._weights[module.layer]
        return hidden_TD, self._ids[module.layer][self._rows], of_layer[self._rows].to(weights_TK)


def route(loaded: Sequence[Any]) -> None:
    """Route a server's model before the server reports that it is ready."""
    if len(loaded) != 1:
        raise ValueError(f"--routing: expected one model that is loaded at once, got {len(loaded)}")
    RoutedModel(loaded[0], sys.argv[1])


if __name__ == "__main__":
    from moe_runtime.cli.main import main

    sys.exit(main(["serve", *sys.argv[2:], "--device", "cpu"], on_loaded=route))
