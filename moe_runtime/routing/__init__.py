"""Routing: gates choose experts for tokens; all of them produce one `Routing` value."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from types import MappingProxyType
from typing import Any

from moe_runtime.config import nearest
from moe_runtime.routing.assigned import Base, DenseToSparse, ExpertChoice, Hash, Sinkhorn
from moe_runtime.routing.base import Choice, Gate, GateOptions, RoutingContext
from moe_runtime.routing.capacity import Capacity, DropPolicy, expert_slots
from moe_runtime.routing.losses import LOSSES, LossInputs
from moe_runtime.routing.moepp import MoEPlusPlus, ZeroExpertCounts
from moe_runtime.routing.reinforce import Reinforce
from moe_runtime.routing.topk import (
    CosineTopK,
    GroupLimitedTopK,
    GShard,
    NoisyTopK,
    Prototype,
    RoundRobinTopK,
    Sam,
    SigmoidTopK,
    SoftmaxTopK,
    Switch,
)
from moe_runtime.routing.value import Policy, Routing, ZeroRouting, expert_counts

__all__ = [
    "GATES",
    "LOSSES",
    "Capacity",
    "Choice",
    "DropPolicy",
    "Gate",
    "GateOptions",
    "GroupLimitedTopK",
    "LossInputs",
    "MoEPlusPlus",
    "Policy",
    "Reinforce",
    "Routing",
    "RoutingContext",
    "SigmoidTopK",
    "SoftmaxTopK",
    "ZeroExpertCounts",
    "ZeroRouting",
    "expert_counts",
    "expert_slots",
    "gate_options",
    "make_gate",
]

GATES: Mapping[str, type[Gate]] = MappingProxyType(
    {
        "softmax_topk": SoftmaxTopK,
        "sigmoid_topk": SigmoidTopK,
        "group_limited_topk": GroupLimitedTopK,
        "cosine_topk": CosineTopK,
        "noisy_topk": NoisyTopK,
        "switch": Switch,
        "gshard": GShard,
        "prototype": Prototype,
        "sam": Sam,
        "expert_choice": ExpertChoice,
        "dense_to_sparse": DenseToSparse,
        "hash": Hash,
        "sinkhorn": Sinkhorn,
        "base": Base,
        "moepp": MoEPlusPlus,
        "rl_r": Reinforce,
        "round_robin": RoundRobinTopK,
    }
)


def make_gate(name: str, hidden_size: int, num_experts: int, top_k: int, /, **options: Any) -> Gate:
    """Makes the gate of that name.

    Args:
        name: a key of `GATES`.
        options: the gate's own keyword arguments.

    Raises:
        ValueError: The name or an option is unknown (the nearest is named), an option is missing or
            has a wrong type, or the gate refuses the sizes.
    """
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}: {nearest(name, GATES)}")
    known, common = gate_options(name), _options_of(Gate)
    for option in options:
        if option not in known:
            raise ValueError(f"gate {name!r} has no option {option!r}: {nearest(option, known)}")
    for option, parameter in _options_of(GATES[name]).items():
        if option not in options and parameter.default is Parameter.empty:
            raise ValueError(f"gate {name!r} needs the option {option!r}")
    try:
        return GATES[name](hidden_size, num_experts, top_k, **options)
    except (AttributeError, OverflowError, TypeError) as error:
        # What is in a list or a table is known to the gate alone.
        own = {option: value for option, value in options.items() if option not in common}
        raise ValueError(f"gate {name!r} cannot be made with the options {own}: {error}") from None


def gate_options(name: str) -> list[str]:
    """Names of the keyword arguments of a gate."""
    return list(_options_of(GATES[name]))


def _options_of(kind: type[Gate]) -> dict[str, Parameter]:
    """Keyword arguments of a gate and of what it inherits from, its own first."""
    found: dict[str, Parameter] = {}
    for base in kind.__mro__[: kind.__mro__.index(Gate) + 1]:
        found = found | {**signature(base.__init__).parameters, **found}
    positional = {"self", "hidden_size", "num_experts", "top_k", "options", "num_scores"}
    return {name: parameter for name, parameter in found.items() if name not in positional}
