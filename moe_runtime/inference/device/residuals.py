"""Decoder layers on a GPU: a residual is added by the kernel that normalises the sum.

A layer adds what its attention gives to its input, normalises the sum, and adds what its
feed-forward gives; the next layer, or the norm at the end of the model, begins by normalising that.
Whoever adds hands the normalised sum to the norm that comes next, which gives it back when it is
asked for that very sum.

A layer is recognised by what it does with stand-ins for its parts, never by its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from moe_runtime.inference.cpu.small_batch import SmallBatchRMSNorm
from moe_runtime.inference.cpu.stand_ins import Asked, OptionStandIn, StandIn
from moe_runtime.kernels.rms_norm.residual import add_rms_norm
from moe_runtime.kernels.triton_support import is_interpreted

_MORE = "an_option_that_no_layer_names"


class _Order(NamedTuple):
    """In which order a layer calls its parts, and with what.

    Attributes:
        parts: names of the norm, the attention, the norm and the feed-forward.
        passed: options of the layer that its attention gets, with their defaults.
        passes_more: whether it also gets those that the layer does not name.
        is_pair: whether the feed-forward returns what is added and something else.
    """

    parts: tuple[str, str, str, str]
    passed: Mapping[str, Any]
    passes_more: bool
    is_pair: bool


class _Handed:
    """A sum and what a norm makes of it; outside of the module, whose settings stay the same."""

    def __init__(self) -> None:
        # at once: other threads may call the model
        self._given: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def give(self, total: torch.Tensor, normed: torch.Tensor) -> None:
        """Keeps both until the norm is called."""
        self._given = total, total._version, normed

    def take(self, total: torch.Tensor) -> torch.Tensor | None:
        """What was given with this sum, once; None if another one was, or it was changed."""
        given, self._given = self._given, None
        if given is None or given[0] is not total or total._version != given[1]:
            return None
        return given[2]


class HandedNorm(SmallBatchRMSNorm):
    """A normalisation that may have been computed by who made its input."""

    def __init__(self, norm: SmallBatchRMSNorm) -> None:
        """Takes the place of a norm."""
        super().__init__(norm.__dict__["replaced"], norm.eps, norm.form)
        self._handed = _Handed()
        self.train(norm.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As of a `SmallBatchRMSNorm`."""
        normed = self._handed.take(hidden_states)
        return super().forward(hidden_states) if normed is None else normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + x``, ``[..., D]``, which this norm is to be asked for next."""
        weight = self._parameters.get("weight")
        if weight is None or len({(t.dtype, t.shape[-1:]) for t in (x, residual, weight)}) > 1:
            return residual + x
        if x.shape != residual.shape:
            return residual + x
        # tensors of inference mode do not count their changes
        with torch.inference_mode(False), torch.no_grad():
            impl = "auto" if x.is_cuda else "triton"
            found = add_rms_norm(x, residual, weight, self.eps, form=self.form, impl=impl)
        self._handed.give(*found)
        return found[0]


class ResidualLayer:
    """The ``forward`` of a decoder layer.

    Attributes:
        following: the norm that comes next; None where that is not known.
    """

    def __init__(self, layer: torch.nn.Module, order: _Order) -> None:
        """Takes the place of the method; the layer's own stays in its class."""
        self._layer: Any = layer
        self._own = type(layer).forward
        self._order = order
        self._named = frozenset(_options_of(self._own))
        self.following: HandedNorm | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the layer: ``[B, Q, D]`` to the same."""
        parts = [self._layer._modules.get(name) for name in self._order.parts]
        if args or not self._is_able(hidden_states, parts, kwargs):
            own = type(self._layer).forward
            return own(self._layer, hidden_states, *args, **kwargs)
        first, attention, second, feed_forward = cast(list[Any], parts)
        given = {n: kwargs.get(n, default) for n, default in self._order.passed.items()}
        if self._order.passes_more:
            given |= {n: value for n, value in kwargs.items() if n not in self._named}
        mixed, _ = attention(hidden_states=first(hidden_states), **given)
        total = second.add(mixed, hidden_states)
        found = feed_forward(second(total))
        if self._order.is_pair:
            found, _ = found
        return total + found if self.following is None else self.following.add(found, total)

    def _is_able(self, hidden: torch.Tensor, parts: list[Any], options: Mapping[str, Any]) -> bool:
        return (
            (hidden.is_cuda or is_interpreted())
            and not (torch.is_grad_enabled() or self._layer.training)
            and not torch.compiler.is_compiling()
            and type(self._layer).forward is self._own
            and None not in parts
            and type(parts[2]) is HandedNorm
            and (self._order.passes_more or self._named.issuperset(options))
        )


def fuse_residuals(model: torch.nn.Module) -> None:
    """Gives the decoder layers of a model on a GPU that qualify sums which are normalised at once.

    Args:
        model: whose norms are `SmallBatchRMSNorm` already where they can be.
    """
    known: dict[tuple[Any, ...], _Order | None] = {}
    for parent in [*model.modules()]:
        for layers in [*parent.children()]:
            if isinstance(layers, torch.nn.ModuleList):
                _fuse_stack(parent, [*layers], known)


def _fuse_stack(
    parent: torch.nn.Module,
    layers: list[torch.nn.Module],
    known: dict[tuple[Any, ...], _Order | None],
) -> None:
    """Layers one behind the other, and a norm behind the last one if the parent has just one."""
    before: ResidualLayer | None = None
    for layer in layers:
        key = type(layer), *layer._modules
        if key not in known:
            known[key] = _order_of(layer)
        order = known[key]
        if order is None or "forward" in vars(layer):
            before = None
            continue
        first = _hand(layer, order.parts[0])
        _hand(layer, order.parts[2])
        if before is not None:
            before.following = first
        before = ResidualLayer(layer, order)
        cast(Any, layer).forward = before
    norms = [n for n, part in parent._modules.items() if isinstance(part, SmallBatchRMSNorm)]
    if before is not None and len(norms) == 1:
        before.following = _hand(parent, norms[0])


def _hand(parent: torch.nn.Module, name: str) -> HandedNorm:
    norm = parent._modules[name]
    assert isinstance(norm, SmallBatchRMSNorm), "it was looked at"
    if type(norm) is not HandedNorm:
        norm = HandedNorm(norm)
        setattr(parent, name, norm)
    return norm


def _options_of(forward: Any) -> dict[str, Any]:
    """Arguments of a layer beside its input, with their defaults."""
    parameters = [*inspect.signature(forward).parameters.values()][2:]
    return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}


def _order_of(layer: torch.nn.Module) -> _Order | None:
    norms = [n for n, part in layer._modules.items() if isinstance(part, SmallBatchRMSNorm)]
    if len(layer._modules) != 4 or len(norms) != 2 or layer._parameters or layer._buffers:
        return None
    options = _options_of(type(layer).forward)
    if inspect.Parameter.empty in options.values():
        return None
    for is_pair in (False, True):
        for more in ((_MORE,), ()):
            order = _try_order(layer, norms, options, more, is_pair=is_pair)
            if order is not None:
                return order
    return None


def _try_order(
    layer: torch.nn.Module,
    norms: list[str],
    options: Mapping[str, Any],
    more: tuple[str, ...],
    *,
    is_pair: bool,
) -> _Order | None:
    """The order of the parts where a layer does what `ResidualLayer` does, bit for bit."""
    generator, asked = torch.Generator().manual_seed(0), Asked()
    calls: list[_Call] = []

    def random() -> torch.Tensor:
        # two rows: a tensor that is taken for a pair is told apart
        return torch.randn(2, 1, 8, generator=generator).bfloat16()

    def stand_in(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(_Call(name, args, kwargs, random()))
            is_whole = name in norms or (len(calls) != 2 and not is_pair)
            return calls[-1].found if is_whole else (calls[-1].found, None)

        return call

    hidden, parts = random(), {name: stand_in(name) for name in layer._modules}
    given = {name: OptionStandIn(asked) for name in (*options, *more)}
    try:
        # what transformers wraps around it is for training alone
        forward = inspect.unwrap(type(layer).forward)
        out = forward(cast(Any, StandIn(layer, parts, asked)), hidden, **given)
    except Exception:  # of foreign code, which was not made for this
        return None
    if not isinstance(out, torch.Tensor) or asked.more or asked.names_of(layer) or len(calls) != 4:
        return None
    first, attention, second, feed_forward = calls
    passed, total = dict(attention.kwargs), hidden + attention.found
    if (
        {first.part, second.part} != {*norms}
        or len({call.part for call in calls}) != 4
        or not first.is_of(hidden)
        or attention.args
        or passed.pop("hidden_states", None) is not first.found
        or not all(given.get(name) is value for name, value in passed.items())
        or not second.is_of(total)
        or not feed_forward.is_of(second.found)
        or not torch.equal(out, total + feed_forward.found)
    ):
        return None
    named = {name: options[name] for name in passed if name in options}
    first_to_last = first.part, attention.part, second.part, feed_forward.part
    return _Order(first_to_last, named, _MORE in passed, is_pair)


class _Call(NamedTuple):
    """Of a part of a layer, and what its stand-in gave."""

    part: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether it was asked about these values and nothing else."""
        return len(self.args) == 1 and not self.kwargs and torch.equal(self.args[0], x)
