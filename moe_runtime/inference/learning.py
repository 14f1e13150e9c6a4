"""Policies that learn from requests, or decide by their routing: who tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_runtime.inference.steps import LayerRouting, Listener, Step
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.prediction import LayerRouted, StepBegins


class PolicyListener(Listener):
    """Tells eviction policies that ask for it of steps and of the routing of layers.

    Policies that decide after the use are told when the layer's demands are already under way, so
    that their thinking costs no time while there is something to wait for.
    """

    def __init__(self, stores: Sequence[ExpertStore[Any]]) -> None:
        self._stores = [store for store in stores if store.watchers]
        self.follows_requests = bool(self._stores)
        decide_later = all(store.decides_later for store in self._stores)
        self.hears_demands = bool(self._stores) and decide_later
        self.hears_routing = not decide_later

    def begin(self, step: Step) -> None:
        """Tells of a step, and of the requests that ended before it."""
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
