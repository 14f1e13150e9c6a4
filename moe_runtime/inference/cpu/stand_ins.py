"""Stand-ins on which an attention layer's own ``forward`` shows what its result depends on.

They give it the layer's parts and constants and a cache to append to, and note what is read.
Whatever else is asked of them is refused, and noted too: no comparison of results could show that
it makes no difference.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import torch

from moe_runtime.checkpoints.transformers_private import CACHE_NAMES, cache_name

_PARAMETERS = [
    ["self", "hidden_states", "position_embeddings", "attention_mask", name, "kwargs"]
    for name in CACHE_NAMES
]
_CONSTANTS = (bool, int, float, str, type(None))


class Asked:
    """What a ``forward`` asked of its stand-ins.

    Attributes:
        constants: names that were read, of the layer and of its configuration.
        more: whether it asked for anything but the layer's parts, constants, and to append.
    """

    def __init__(self) -> None:
        self.constants: list[tuple[object, set[str]]] = []
        self.more = False

    def names_of(self, owner: object) -> set[str]:
        """The names that were read of the layer or of its configuration."""
        for known, names in self.constants:
            if known is owner:
                return names
        self.constants.append((owner, set()))
        return self.constants[-1][1]

    def refuse(self, what: str) -> NoReturn:
        """Notes that something else was asked for.

        Raises:
            AttributeError: always.
        """
        self.more = True
        raise AttributeError(f"{what} is more than an attention layer's parts and constants")


class StandIn:
    """An object of which parts and constants can be read, and nothing else done."""

    def __init__(self, stands_for: object, parts: dict[str, Any], asked: Asked) -> None:
        names = asked.names_of(stands_for)
        vars(self).update(_stands_for=stands_for, _parts=parts, _asked=asked, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name in self._parts:
            return self._parts[name]
        self._names.add(name)  # that there is none can change too
        value = getattr(self._stands_for, name)
        if not isinstance(value, _CONSTANTS):
            self._asked.refuse(name)
        return value

    def __setattr__(self, name: str, value: object) -> None:
        self._asked.refuse(name)


class _CacheStandIn:
    """A cache of keys and values to which can be appended, and of which nothing else is known."""

    def __init__(self, cache: Any, asked: Asked) -> None:
        self._cache = cache
        self._asked = asked

    def update(self, *key_value_layer: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As the cache itself."""
        return self._cache.update(*key_value_layer, **options)

    def __getattr__(self, name: str) -> NoReturn:
        self._asked.refuse(name)


class OptionStandIn:
    """An option that can be handed on, and not looked at."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def __bool__(self) -> NoReturn:
        self._asked.refuse("an option's value")

    def __eq__(self, other: object) -> NoReturn:
        self._asked.refuse("an option's value")

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        self._asked.refuse(name)


def takes_usual_arguments(forward: object) -> bool:
    """Whether that is a function with the arguments of the usual attention layer's ``forward``."""
    if not inspect.isfunction(forward):  # something that is called, but no function
        return False
    parameters = inspect.signature(forward).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    return [*parameters] in _PARAMETERS and kinds[-1] is inspect.Parameter.VAR_KEYWORD


def call_on_stand_ins(
    layer: Any,
    parts: Iterable[str],
    asked: Asked,
    *,
    hidden: torch.Tensor,
    angles: tuple[torch.Tensor, ...],
    cache: Any,
    mask: torch.Tensor | None = None,
    options: Iterable[str] = (),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an attention layer's own ``forward`` returns where all but tensors are stand-ins.

    Args:
        layer: the layer.
        parts: names of its modules and parameters that may be used.
        asked: takes down what is asked for.
        hidden: ``[B, Q, D]``.
        angles: cosines and sines, ``[B, Q, A]`` each.
        cache: to append keys and values to.
        mask: None, or ``[B, 1, Q, S]``.
        options: names of further arguments.
    """
    own: dict[str, Any] = {name: getattr(layer, name) for name in parts}
    own["config"] = StandIn(layer.config, {}, asked)
    return type(layer).forward(
        StandIn(layer, own, asked),
        hidden_states=hidden,
        position_embeddings=angles,
        attention_mask=mask,
        **{cache_name(type(layer).forward): _CacheStandIn(cache, asked)},
        **{name: OptionStandIn(asked) for name in options},
    )
