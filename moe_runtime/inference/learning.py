"""What policies and predictors learn from requests: who tells them, and what is kept of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_runtime.inference import options
from moe_runtime.inference.steps import LayerRouting, Listener, Step
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.policies.prediction import PREDICTORS, LayerRouted, StepBegins
from moe_runtime.policies.prediction.base import Learner
from moe_runtime.types import ModelSignature


class PolicyListener(Listener):
    """Tells eviction policies that ask for it of steps and of the routing of layers.

    Policies that decide after the use are told when the layer's demands are already under way, so
    that their thinking costs no time while there is something to wait for.
    """

    def __init__(self, stores: Sequence[ExpertStore[Any]]) -> None:
        self._stores = [store for store in stores if store.watches]
        decide_later = all(store.decides_later for store in self._stores)
        self.hears_demands = bool(self._stores) and decide_later
        self.hears_routing = not decide_later

    def begin(self, step: Step) -> None:
        """Tells of a step, and of the requests that ended before it."""
        if not self._stores:
            return
        for store in self._stores:
            for request in step.ended:
                store.finish(request)
        for store in self._stores:
            store.observe(StepBegins(sequences=step.requests, token_ids=step.token_ids))

    def routed(self, routing: LayerRouting) -> None:
        """Tells of a layer, if any token goes to one of its experts."""
        if routing.keys:
            self.demanded(routing)

    def demanded(self, routing: LayerRouting) -> None:
        """Tells of a layer."""
        event = LayerRouted(
            layer=routing.layer,
            expert_ids=routing.ids_TK.cpu().numpy(),
            gate_weights=routing.weights_TK.float().cpu().numpy(),
        )
        for store in self._stores:
            store.observe(event)


class KeptLearning(Listener):
    """The learners of a loaded model: each begins with what earlier processes learned.

    Args:
        signature: the model; one that has not come to the end of a step keeps nothing.
        predictor: name of the predictor, or the file of a trained one, which says what it begins
            with.
        writes: whether this process writes what is learned, as one of a group does.
    """

    def __init__(
        self,
        signature: ModelSignature,
        predictor: str | Path,
        *,
        writes: bool,
    ) -> None:
        self._signature = signature
        self._writes = writes
        self._predictor = predictor
        self._has_step = False
        self._learners: dict[str, Learner] = {}

    def keep(self, *watchers: object) -> None:
        """Restores those of the watchers that learn from requests, and keeps them in the end."""
        for watcher in watchers:
            if not isinstance(watcher, Learner):
                continue
            if watcher.name in PREDICTORS and options.is_file_name(self._predictor):
                continue
            options.restore_learned(watcher, self._signature)
            self._learners.setdefault(watcher.name, watcher)

    def close(self) -> None:
        """Writes what was learned, requests that still run included."""
        if self._has_step and self._writes:
            for learner in self._learners.values():
                options.keep_learned(learner, self._signature)

    def end(self) -> None:
        """A step came to its end."""
        self._has_step = True
