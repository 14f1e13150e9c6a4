"""Decoder layers on a GPU: a residual is added by the kernel that normalises the sum.

A layer adds what its attention gives to its input, normalises the sum, and adds what its
feed-forward gives; the next layer, or the norm at the end of the model, begins by normalising that.
Whoever adds hands the normalised sum to the norm that comes next, which gives it back when it is
asked for that very sum.

A layer is recognised by what it does with stand-ins for its parts, never by its name.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch

from moe_runtime.inference.cpu.small_batch import SmallBatchRMSNorm
from moe_runtime.inference.cpu.stand_ins import Asked, OptionStandIn, StandIn
from moe_runtime.kernels.rms_norm.residual import add_rms_norm
from moe_runtime.kernels.triton_support import is_interpreted

_MORE = "an_option_that_no_layer_names"
_CASES = (1, 1.0, True), (3, 1e3, False)
"""One token and several, of usual and of large values, with options and without."""
_LOOK_UPS = "pop", "get", "setdefault", "keys", "items"
"""By which a layer may read options that it does not name."""


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
        self._given: tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]] | None = None

    def give(self, total: torch.Tensor, normed: torch.Tensor, *made_with: Any) -> None:
        """Keeps both until the norm is called."""
        self._given = total, normed, (total._version, *made_with)

    def take(self, total: torch.Tensor, *made_with: Any) -> torch.Tensor | None:
        """What was given with this sum, once; None if another one was, or anything has changed."""
        given, self._given = self._given, None
        if given is None or given[0] is not total or given[2] != (total._version, *made_with):
            return None
        return given[1]


class HandedNorm(SmallBatchRMSNorm):
    """A normalisation that may have been computed by who made its input."""

    def __init__(self, norm: SmallBatchRMSNorm) -> None:
        """Takes the place of a norm."""
        super().__init__(norm.__dict__["replaced"], norm.eps, norm.form)
        self._handed = _Handed()
        self.train(norm.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As of a `SmallBatchRMSNorm`."""
        normed = self._handed.take(hidden_states, *self._made_with())
        return super().forward(hidden_states) if normed is None else normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + x``, ``[..., D]``, which this norm is to be asked for next."""
        weight = self._parameters.get("weight")
        tensors = x, residual, weight
        kinds = {(t.device, t.dtype, t.shape[-1:]) for t in tensors if t is not None}
        if weight is None or len(kinds) > 1 or x.shape != residual.shape:
            return residual + x
        # tensors of inference mode do not count their changes
        with torch.inference_mode(False), torch.no_grad():
            impl = "auto" if x.is_cuda else "triton"
            found = add_rms_norm(x, residual, weight, self.eps, form=self.form, impl=impl)
        self._handed.give(*found, *self._made_with())
        return found[0]

    def _made_with(self) -> tuple[Any, ...]:
        weight = self._parameters.get("weight")
        version = 0  # tensors of inference mode do not count their changes
        if weight is not None and not weight.is_inference():
            version = weight._version
        return id(weight), version, self.eps, self.form


class ResidualLayer:
    """The ``forward`` of a decoder layer.

    Attributes:
        following: the norm that comes next, and the module that calls it; None where that is not
            known.
    """

    def __init__(self, layer: torch.nn.Module, order: _Order) -> None:
        """Takes the place of the method; the layer's own stays in its class."""
        self._layer: Any = layer
        self._own = type(layer).forward
        self._order = order
        self._named = frozenset(_options_of(self._own))
        self.following: tuple[HandedNorm, torch.nn.Module] | None = None

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
        del mixed  # its memory is not needed beside that of the feed-forward
        found = feed_forward(second(total))
        if self._order.is_pair:
            found, _ = found
        if self.following is None or _are_observed(self._layer, *self.following):
            return total + found
        return self.following[0].add(found, total)

    def _is_able(self, hidden: torch.Tensor, parts: list[Any], options: Mapping[str, Any]) -> bool:
        return (
            (hidden.is_cuda or is_interpreted())
            and not (torch.is_grad_enabled() or self._layer.training)
            and not torch.compiler.is_compiling()
            and type(self._layer).forward is self._own
            and None not in parts
            and type(parts[2]) is HandedNorm
            and not _are_observed(parts[2])
            and (self._order.passes_more or self._named.issuperset(options))
        )


def _are_observed(*modules: torch.nn.Module) -> bool:
    """Whether code that is called before or behind one may change what it gets or gives, in ways
    that torch does not count."""
    hooks = (hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks))
    return any(hooks) or bool(torch.nn.modules.module._has_any_global_hook())


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
        are_norms = [isinstance(part, SmallBatchRMSNorm) for part in layer.children()]
        key = type(layer), *layer._modules, *are_norms
        if key not in known:
            known[key] = _order_of(layer)
        order = known[key]
        if order is None or "forward" in vars(layer):
            before = None
            continue
        first = _hand(layer, order.parts[0])
        _hand(layer, order.parts[2])
        if before is not None:
            before.following = first, layer
        before = ResidualLayer(layer, order)
        cast(Any, layer).forward = before
    norms = [n for n, part in parent._modules.items() if isinstance(part, SmallBatchRMSNorm)]
    if before is not None and len(norms) == 1:
        before.following = _hand(parent, norms[0]), parent


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


def _own_forward(layer: torch.nn.Module) -> Any:
    """A layer's method without what transformers wraps around it, which is for training alone."""

    def is_foreign(function: Any) -> bool:
        module = getattr(function, "__globals__", {}).get("__name__", "")
        return not str(module).startswith("transformers.")

    return inspect.unwrap(type(layer).forward, stop=is_foreign)


def _order_of(layer: torch.nn.Module) -> _Order | None:
    norms = [n for n, part in layer._modules.items() if isinstance(part, SmallBatchRMSNorm)]
    if len(layer._modules) != 4 or len(norms) != 2 or layer._parameters or layer._buffers:
        return None
    forward = _own_forward(layer)
    if not inspect.isfunction(forward):  # something that is called, but no function
        return None
    names = [*inspect.signature(forward).parameters]
    options = _options_of(forward)
    looks_up = any(step.argval in _LOOK_UPS for step in dis.get_instructions(forward))
    if names[1:2] != ["hidden_states"] or inspect.Parameter.empty in options.values() or looks_up:
        return None
    for is_pair, more in itertools.product((False, True), ((_MORE,), ())):
        first, second = (
            _try_order(layer, norms, options, more, case, is_pair=is_pair) for case in _CASES
        )
        if first is not None and first == second:
            return first
    return None


def _try_order(
    layer: torch.nn.Module,
    norms: list[str],
    options: Mapping[str, Any],
    more: tuple[str, ...],
    case: tuple[int, float, bool],
    *,
    is_pair: bool,
) -> _Order | None:
    """The order of the parts where a layer does what `ResidualLayer` does, bit for bit."""
    num_tokens, scale, has_options = case
    generator, asked = torch.Generator().manual_seed(0), Asked()
    dtype = layer.get_submodule(norms[0]).get_parameter("weight").dtype
    calls: list[_Call] = []

    def random() -> torch.Tensor:
        # two rows: a tensor that is taken for a pair is told apart
        return (torch.randn(2, num_tokens, 8, generator=generator) * scale).to(dtype)

    def stand_in(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(_Call(name, args, kwargs, random()))
            is_whole = name in norms or (len(calls) != 2 and not is_pair)
            return calls[-1].found if is_whole else (calls[-1].found, None)

        return call

    hidden, parts = random(), {name: stand_in(name) for name in layer._modules}
    given = {n: OptionStandIn(asked) if has_options else None for n in (*options, *more)}
    out = None
    with contextlib.suppress(Exception):  # of foreign code, which was not made for this
        out = _own_forward(layer)(StandIn(layer, parts, asked), hidden, **given)
    if asked.more or asked.names_of(layer) or len(calls) != 4:
        return None
    first, attention, second, feed_forward = calls
    passed, total = dict(attention.kwargs), hidden + attention.found
    if (
        {first.part, second.part} != {*norms}
        or len({call.part for call in calls}) != 4
        or not first.is_of(hidden)
        or attention.args
        or passed.pop("hidden_states", None) is not first.found
        or not all(name in given and given[name] is value for name, value in passed.items())
        or not second.is_of(total)
        or not feed_forward.is_of(second.found)
        or not _are_same(out, total + feed_forward.found)
    ):
        return None
    named = {name: options[name] for name in passed if name in options}
    first_to_last = first.part, attention.part, second.part, feed_forward.part
    return _Order(first_to_last, named, _MORE in passed, is_pair)


def _are_same(found: Any, expected: torch.Tensor) -> bool:
    is_tensor = isinstance(found, torch.Tensor) and found.dtype == expected.dtype
    return is_tensor and torch.equal(found, expected)


class _Call(NamedTuple):
    """Of a part of a layer, and what its stand-in gave."""

    part: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        """Whether it was asked about these values and nothing else."""
        return len(self.args) == 1 and not self.kwargs and _are_same(self.args[0], x)
