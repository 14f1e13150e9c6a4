"""Tells the eviction policies of the stores where a model's gates send the tokens."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.routing_record import read_step
from moe_runtime.inference.steps import RequestNumbers
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.policies.prediction import LayerRouted, StepBegins
from moe_runtime.types import ExpertKey


def attach_observer(
    model: torch.nn.Module, modules: Iterable[OffloadedExperts], stores: Sequence[ExpertStore[Any]]
) -> None:
    """Lets the policies that ask for it see every forward pass of a model from now on.

    A policy that decides after the use is told when the layer's demands are already under way, so
    that its thinking costs no time while there is something to wait for.
    """
    watching = [store for store in stores if store.watches]
    if not watching:
        return
    requests = RequestNumbers()

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = read_step(args, kwargs)
        first_request, ended = requests.begin(step)
        for store in watching:
            for request in ended:
                store.finish(request)
        event = StepBegins(sequences=step.sequences + first_request, token_ids=step.token_ids)
        for store in watching:
            store.observe(event)

    def routed(
        layer: int,
        _keys: Sequence[ExpertKey],
        _hidden_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> None:
        event = LayerRouted(
            layer=layer,
            expert_ids=ids_TK.cpu().numpy(),
            gate_weights=weights_TK.float().cpu().numpy(),
        )
        for store in watching:
            store.observe(event)

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    for module in modules:
        if all(store.decides_later for store in watching):
            module.late_observer = routed
        else:
            module.observer = routed
