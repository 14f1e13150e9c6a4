"""Fused layers of a model on a GPU for steps of one token: attention, residuals and routers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from transformers.cache_utils import StaticCache, StaticLayer

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.inference.cpu.attention import ATTENTION
from moe_runtime.inference.cpu.step_layers import (
    PROJECTIONS,
    FusedAttention,
    SmallBatchRMSNorm,
    has_usual_parts,
    head_norm,
    is_router,
)
from moe_runtime.inference.device.static_caches import RowCache
from moe_runtime.inference.known_classes import (
    EAGER_ATTENTION_CLASSES,
    RESIDUAL_LAYERS,
    ResidualForm,
    RouterForm,
    class_name,
    router_form,
    tensors_of,
)
from moe_runtime.kernels.decode_step.expert_choice import (
    MOST_CHOICES,
    MOST_EXPERTS,
    ChoiceImpl,
    choose_experts,
)
from moe_runtime.kernels.decode_step.split_attention import split_attention
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.rms_norm import FORMS
from moe_runtime.kernels.rms_norm.op import add_rms_norm
from moe_runtime.kernels.triton_support import is_interpreted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SDPA, _EAGER = "sdpa", "eager"
_COUNTERS = "moe_runtime_counters"


def fuse_device_attention(model: PreTrainedModel) -> None:
    """Fuses steps of known attention layers on a GPU with a static cache."""
    for module in model.modules():
        if has_usual_parts(module, (_SDPA, _EAGER), FORMS):
            attention = DeviceAttention(module)
            if attention.is_known:
                cast(Any, module).forward = attention


class DeviceAttention(FusedAttention):
    """The ``forward`` of an attention layer on a GPU. ``is_known`` means that its attention is
    SDPA, or a known eager softmax with sinks."""

    shows_weights = _EAGER
    takes_prompts = False

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        eager, attend = self._functions[-2:]
        if self._attention == _EAGER:
            self.is_known = class_name(module) in EAGER_ATTENTION_CLASSES and attend is eager
        else:
            self.is_known = attend is private.sdpa_attention_forward
        if self._attention == _SDPA:  # a server's attention is the same for tensor keys
            self._served = ATTENTION

    def _functions_now(self) -> list[Any]:
        found = super()._functions_now()
        registered, eager = found[2], found[-1]
        if self._attention != _EAGER:
            eager = None if registered is None else registered.get(self._attention)
        return [*found, eager]

    def _places_now(self) -> list[Any]:
        # nothing else of the parts is cached
        return [self._parts[0].weight.dtype]

    def _bind(self) -> bool:
        return True

    def _most_sequences(self) -> int:
        return MAX_TOKENS

    def _fused(
        self,
        hidden_states: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
    ) -> torch.Tensor | None:
        batch, dtype = len(hidden_states), hidden_states.dtype
        layer = _static_layer(cache, self._module.layer_idx)
        if layer is None or not (hidden_states.is_cuda or is_interpreted()):
            return None
        if mask is not None and (mask.ndim != 4 or mask.shape[:3] != (batch, 1, 1)):
            return None
        if len(layer.keys) != batch or {cos.dtype, sin.dtype, layer.keys.dtype} != {dtype}:
            return None
        query, key, value = _project(self._module, hidden_states)
        counters = _counters_of(layer)
        mixed = split_attention(
            (query, key, value),
            (cos.flatten(1), sin.flatten(1)),
            (layer.keys, layer.values),
            layer.cumulative_length,
            (head_norm(self._module, "q_norm"), head_norm(self._module, "k_norm")),
            scale=self._module.scaling,
            mask_BS=None if mask is None else mask[:, 0, 0],
            sinks_H=self._module._parameters.get("sinks"),
            window=vars(self._module).get("sliding_window") or 0,
            pairs_share=self._pairs_share,
            counters=counters,
            impl="triton",
        )
        if counters is None and not layer.cumulative_length.ndim:
            layer.cumulative_length.add_(1)
        return self._module.o_proj(mixed.view(batch, 1, -1))


def _project(module: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Queries, keys and values ``[B, N]``; one launch for a single token."""
    layers = [module._modules[name] for name in PROJECTIONS[:3]]
    found = linears_of_a_row(hidden, *((layer.weight, layer.bias) for layer in layers))
    if found is None:
        found = [layer(hidden) for layer in layers]
    return [part.flatten(1) for part in found]


def _static_layer(cache: Any, index: int) -> Any:
    if type(cache) is RowCache:
        return cache.layers[index]
    if type(cache) is not StaticCache or cache.offloading:
        return None
    layer = cache.layers[index]
    return layer if type(layer) is StaticLayer and layer.is_initialized else None


def _counters_of(layer: Any) -> torch.Tensor | None:
    """The counters of `split_attention`, kept in the cache layer; None if a recording would own
    the new memory."""
    found, (batch, num_heads) = vars(layer).get(_COUNTERS), layer.keys.shape[:2]
    shape = (1 + batch * num_heads,)
    if found is None or (found.device, found.shape) != (layer.keys.device, shape):
        if layer.keys.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            found = torch.zeros(shape, dtype=torch.int32, device=layer.keys.device)
        setattr(layer, _COUNTERS, found)
    return cast(torch.Tensor, found)


class _Handed:
    """A sum and its norm. An object of its own, since recordings compare the module's settings."""

    def __init__(self) -> None:
        # one attribute, since other threads may call the model
        self._given: tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]] | None = None

    def give(self, total: torch.Tensor, normed: torch.Tensor, *made_with: Any) -> None:
        self._given = total, normed, (total._version, *made_with)

    def take(self, total: torch.Tensor, *made_with: Any) -> torch.Tensor | None:
        """The norm of this sum, once; None for another sum, or after any change."""
        given, self._given = self._given, None
        if given is None or given[0] is not total or given[2] != (total._version, *made_with):
            return None
        return given[1]


class HandedNorm(SmallBatchRMSNorm):
    """A norm that may be computed together with its input."""

    def __init__(self, norm: SmallBatchRMSNorm) -> None:
        super().__init__(norm.__dict__["replaced"], norm.eps, norm.form)
        self._handed = _Handed()
        self.train(norm.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self._handed.take(hidden_states, *self._made_with())
        return super().forward(hidden_states) if normed is None else normed

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual + x``, ``[..., D]``; keeps its norm for the next call."""
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
    """The ``forward`` of a decoder layer. ``following`` is the next norm with the module that calls
    it, if known."""

    def __init__(self, layer: torch.nn.Module, form: ResidualForm) -> None:
        self._layer: Any = layer
        self._own = type(layer).forward
        self._form = form
        parameters = [*inspect.signature(self._own).parameters.values()][2:]
        self._defaults = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
        self.following: tuple[HandedNorm, torch.nn.Module] | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = [self._layer._modules.get(name) for name in self._form.parts]
        if args or not self._is_able(hidden_states, parts):
            own = type(self._layer).forward
            return own(self._layer, hidden_states, *args, **kwargs)
        first, attention, second, feed_forward = cast(list[Any], parts)
        mixed, _ = attention(hidden_states=first(hidden_states), **{**self._defaults, **kwargs})
        total = second.add(mixed, hidden_states)
        del mixed  # frees memory before the feed-forward
        found = feed_forward(second(total))
        if self._form.is_pair:
            found, _ = found
        if self.following is None or _are_observed(self._layer, *self.following):
            return total + found
        return self.following[0].add(found, total)

    def _is_able(self, hidden: torch.Tensor, parts: list[Any]) -> bool:
        return (
            (hidden.is_cuda or is_interpreted())
            and not (torch.is_grad_enabled() or self._layer.training)
            and not torch.compiler.is_compiling()
            and type(self._layer).forward is self._own
            and None not in parts
            and type(parts[2]) is HandedNorm
            and not _are_observed(parts[2])
        )


def _are_observed(*modules: torch.nn.Module) -> bool:
    """Whether modules have hooks, which may change tensors uncounted by torch."""
    hooks = (hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks))
    return any(hooks) or bool(torch.nn.modules.module._has_any_global_hook())


def fuse_residuals(model: torch.nn.Module) -> None:
    """Fuses residual sums of known decoder layers on a GPU with the next norms."""
    for parent in [*model.modules()]:
        for layers in [*parent.children()]:
            if isinstance(layers, torch.nn.ModuleList):
                _fuse_stack(parent, [*layers])


def _fuse_stack(parent: torch.nn.Module, layers: list[torch.nn.Module]) -> None:
    """Fuses layers in order, and the parent's norm after the last if it has only one."""
    before: ResidualLayer | None = None
    for layer in layers:
        form = RESIDUAL_LAYERS.get(class_name(layer))
        if form is None or "forward" in vars(layer) or not _has_parts(layer, form):
            before = None
            continue
        first = _hand(layer, form.parts[0])
        _hand(layer, form.parts[2])
        if before is not None:
            before.following = first, layer
        before = ResidualLayer(layer, form)
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


def _has_parts(layer: torch.nn.Module, form: ResidualForm) -> bool:
    norms = [layer._modules.get(form.parts[place]) for place in (0, 2)]
    has_others = {*layer._modules} != {*form.parts} or layer._parameters or layer._buffers
    return not has_others and all(isinstance(norm, SmallBatchRMSNorm) for norm in norms)


_OF_MODULES = frozenset(vars(torch.nn.Module()))


def fuse_routers(model: torch.nn.Module) -> None:
    """Fuses the choice of known routers on a GPU into one kernel after their product."""
    for module in model.modules():
        if is_router(module) and not module._modules and "forward" not in vars(module):
            form = router_form(module)
            if form is not None and _fits(module, form):
                cast(Any, module).forward = FusedRouter(module, form)


class FusedRouter:
    """The ``forward`` of a router, with a fast path for few tokens."""

    def __init__(self, module: torch.nn.Module, form: RouterForm) -> None:
        self._module: Any = module
        self._own = type(module).forward
        self._settings = self._settings_now()
        self._shapes = self._shapes_now()
        self.form = form

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Logits ``[T, E]``, weights ``[T, K]`` and ids ``[T, K]`` of hidden values."""
        if len(args) == 1 and not kwargs and self._may_fuse(args[0]):
            return compute_router(self.form, args[0], tensors_of(self._module), "triton")
        return self._own(self._module, *args, **kwargs)

    def _may_fuse(self, hidden: Any) -> bool:
        module, form = self._module, self.form
        return (
            type(hidden) is Tensor
            and (hidden.ndim == 2 or (hidden.ndim == 3 and form.takes_batches))
            and 0 < hidden.numel() <= MAX_TOKENS * hidden.shape[-1]
            and (hidden.is_cuda or is_interpreted())
            and hidden.dtype is module.weight.dtype
            and not torch.is_grad_enabled()
            and forward_ad._current_level < 0
            and not torch.is_autocast_enabled(hidden.device.type)
            and not torch.compiler.is_compiling()
            and type(module).forward is self._own
            and not module._modules
            and self._settings_now() == self._settings
            and self._shapes_now() == self._shapes
        )

    def _shapes_now(self) -> tuple[Any, ...]:
        return tuple((name, each.shape) for name, each in tensors_of(self._module).items())

    def _settings_now(self) -> dict[str, Any]:
        """All attributes of the router except tensors and this object."""
        own = vars(self._module)
        names = own.keys() - _OF_MODULES | {"training"}
        return {name: own[name] for name in sorted(names) if name != "forward"}


def compute_router(
    form: RouterForm, hidden: Tensor, tensors: dict[str, Any], impl: ChoiceImpl
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and ids of a router; a third tensor is the bias of the choice."""
    rows_TD, weight, bias = hidden.flatten(0, -2), tensors["weight"], tensors.get("bias")
    if form.product == "wide":
        rows_TD, weight = rows_TD.float(), weight.float()
        bias = None if bias is None else bias.float()
    multiply = torch.nn.functional.linear if impl == "reference" else linear
    logits_TE = multiply(rows_TD, weight, bias)
    if form.product == "widened":
        logits_TE = logits_TE.float()
    more = [each for name, each in tensors.items() if name not in ("weight", "bias")]
    ids_TK, weights_TK = choose_experts(
        logits_TE, form.num_choices, form.choice, bias_E=more[0] if more else None,
        dtype=hidden.dtype if form.keeps_dtype else torch.float32, impl=impl,
    )  # fmt: skip
    return logits_TE, weights_TK, ids_TK


def _fits(module: Any, form: RouterForm) -> bool:
    """Whether a router has the tensors of its class, within the kernel's limits."""
    tensors, num_experts = tensors_of(module), len(module.weight)
    more = [each.shape for name, each in tensors.items() if name not in ("weight", "bias")]
    are_numbers = all(each.is_floating_point() for each in tensors.values())
    fits = num_experts <= MOST_EXPERTS and form.num_choices <= MOST_CHOICES
    return fits and are_numbers and more in ([], [(num_experts,)])
