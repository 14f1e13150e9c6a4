"""Gates by name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Any, get_args, get_type_hints

from moe_runtime.config import nearest, type_in_words
from moe_runtime.routing.assignment import Base, Sinkhorn
from moe_runtime.routing.base import Gate
from moe_runtime.routing.cosine import CosineTopK
from moe_runtime.routing.gshard import GShard
from moe_runtime.routing.hashed import Hash
from moe_runtime.routing.moepp import MoEPlusPlus
from moe_runtime.routing.noisy_topk import NoisyTopK
from moe_runtime.routing.prototype import Prototype
from moe_runtime.routing.reinforce import Reinforce
from moe_runtime.routing.sam import Sam
from moe_runtime.routing.switch import Switch
from moe_runtime.routing.topk import GroupLimitedTopK, RoundRobinTopK, SigmoidTopK, SoftmaxTopK
from moe_runtime.routing.variable import DenseToSparse, ExpertChoice

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
_NUMBERS: Mapping[type, type] = MappingProxyType({int: Integral, float: Real})


def make_gate(name: str, hidden_size: int, num_experts: int, top_k: int, /, **options: Any) -> Gate:
    """Makes the gate of that name.

    Args:
        name: a key of `GATES`.
        hidden_size: width of a token.
        num_experts: E.
        top_k: choices of a token.
        options: the gate's own keyword arguments.

    Raises:
        ValueError: The name or an option is unknown (the nearest is named), an option is missing
            or of a type that it cannot have, or the gate refuses the sizes.
    """
    if name not in GATES:
        raise ValueError(f"unknown gate {name!r}: {nearest(name, GATES)}")
    known = gate_options(name)
    for option in options:
        if option not in known:
            raise ValueError(f"gate {name!r} has no option {option!r}: {nearest(option, known)}")
    _check_types(name, options)
    try:
        return GATES[name](hidden_size, num_experts, top_k, **options)
    except (AttributeError, OverflowError, TypeError) as error:
        # What is in a list or a table is known to the gate alone.
        own = {option: options[option] for option in known if option in _own(name) & options.keys()}
        raise ValueError(f"gate {name!r} cannot be made with the options {own}: {error}") from None


def _check_types(name: str, options: Mapping[str, Any]) -> None:
    """Refuses an own option of the gate that is missing, or no number, switch or kind it can be."""
    hints = get_type_hints(GATES[name].__init__)
    for option in _own(name):
        if option not in options:
            if signature(GATES[name].__init__).parameters[option].default is Parameter.empty:
                raise ValueError(f"gate {name!r} needs the option {option!r}")
            continue
        hint, value = hints[option], options[option]
        kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if all(isinstance(kind, type) for kind in kinds) and not any(
            isinstance(value, _NUMBERS.get(kind, kind))
            and (kind is bool or not isinstance(value, bool))
            for kind in kinds
        ):
            words = " or ".join(type_in_words(kind) for kind in kinds if kind is not NoneType)
            raise ValueError(f"option {option!r} of gate {name!r} must be {words}, got {value!r}")


def _own(name: str) -> set[str]:
    """Options of this gate that not every gate has."""
    return set(gate_options(name)) & set(signature(GATES[name].__init__).parameters)


def gate_options(name: str) -> list[str]:
    """Names of the keyword arguments of a gate."""
    kind = GATES[name]
    options = [*signature(kind.__init__).parameters, *signature(Gate.__init__).parameters]
    positional = {"self", "hidden_size", "num_experts", "top_k", "options", "num_scores"}
    return [option for option in dict.fromkeys(options) if option not in positional]
