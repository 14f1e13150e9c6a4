"""Fast linear layers, norms and attention layers for steps of few tokens.

Reading weights and the number of small operations bound such a step. Linear layers use our kernel;
norms become one operation instead of six; attention of one token on a CPU becomes one call instead
of forty operations. For several tokens of a sequence, kernels compute norms and RoPE. Attention has
the bits of the layer's own ``forward``, which runs if the layer is observed or changed.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.checkpoints.transformers_private import ATTENTION_SETTING, cache_name
from moe_runtime.inference.known_classes import (
    PAIRS_SHARE,
    ROTARY_ATTENTION,
    class_name,
    is_theirs,
    norm_form,
)
from moe_runtime.inference.kv_cache import take_place
from moe_runtime.kernels.decode_step.attention_step import (
    AttentionWeights,
    RowNorm,
    attention_heads,
    attention_step,
)
from moe_runtime.kernels.decode_step.prepared import PreparedLinear, PreparedRMSNorm
from moe_runtime.kernels.decode_step.single_query_attention import native_attention
from moe_runtime.kernels.linear import ROWS_PER_CALL, linear, native_row_limit
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.rms_norm import NormForm, rms_norm
from moe_runtime.memory.source import aligned_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_small_batch_layers(model: torch.nn.Module) -> None:
    """Replaces linear layers, norms, router weights, convolutions and steps of recurrent layers of
    a model on the CPU."""
    replace_dense_layers(model)
    for module in model.modules():
        if is_router(module):
            module.weight = _SmallBatchWeight.of(cast(torch.nn.Parameter, module.weight))
        for child in module.children():
            if type(child) is torch.nn.Conv1d:
                from moe_runtime.inference.cpu.recurrent_steps import (
                    use_recurrent_steps,
                    use_shifted_products,
                )

                use_shifted_products(child)
                use_recurrent_steps(module)


def replace_dense_layers(model: torch.nn.Module) -> None:
    """Replaces linear layers, and norms of the forms that our kernel has."""
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is torch.nn.Linear and type(child.weight) is torch.nn.Parameter:
                setattr(module, name, SmallBatchLinear(child).train(child.training))
            elif (norm := as_rms_norm(child)) is not None:
                setattr(module, name, norm.train(child.training))


def is_observed(*parts: torch.nn.Module) -> bool:
    """Whether modules have hooks, a replaced ``forward`` or parametrizations."""
    for part in parts:
        own = part.__dict__
        if (  # in full, as it runs for every layer of a step
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or own["_modules"]  # a part of a linear layer or norm is a parametrization
            or "forward" in own
        ):
            return True
    return False


class SmallBatchLinear(torch.nn.Linear):
    """A linear layer that reads its weight at the speed of memory for few rows (one on a GPU). It
    shares the parameters of the replaced layer."""

    def __init__(self, replaced: torch.nn.Linear) -> None:
        super().__init__(replaced.in_features, replaced.out_features, bias=False, device="meta")
        self.weight = replaced.weight
        self.bias = replaced.bias
        self._prepared = PreparedLinear()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        # the module's own attribute lookup takes longer than everything below
        parameters = self._parameters
        if "weight" not in parameters or "bias" not in parameters:
            return super().forward(input)  # parametrized or pruned
        weight, bias = parameters["weight"], parameters["bias"]
        assert weight is not None
        y = None if input.is_cuda else self._prepared(input, weight, bias)
        return linear(input, weight, bias) if y is None else y


_EPS_NAMES = ("variance_epsilon", "eps")
"""Names of a norm's epsilon in families."""


class SmallBatchRMSNorm(torch.nn.Module):
    """Root-mean-square norm in one operation for few rows.

    Shares the weight of the replaced layer. That layer computes inputs of another type than the
    weight, which families round differently.
    """

    def __init__(self, replaced: torch.nn.Module, eps: float, form: NormForm) -> None:
        super().__init__()
        self.weight = cast(torch.nn.Parameter, replaced.weight)
        self.eps = eps
        self.form: NormForm = form
        self._prepared = PreparedRMSNorm(form)
        self.__dict__["replaced"] = replaced  # not registered: the weight is registered here

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalises ``[..., D]`` along its last dimension."""
        weight = self._parameters.get("weight")
        if weight is None:  # parametrized
            return rms_norm(hidden_states, self.weight, self.eps, form=self.form)
        normed = self._prepared(hidden_states, weight, self.eps)
        if normed is not None:
            return normed
        if hidden_states.dtype is weight.dtype:
            return rms_norm(hidden_states, weight, self.eps, form=self.form)
        replaced = self.__dict__["replaced"]
        replaced._parameters["weight"] = weight
        return replaced(hidden_states)

    def __getattr__(self, name: str) -> Any:
        if name in _EPS_NAMES and "eps" in self.__dict__:
            return self.__dict__["eps"]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _EPS_NAMES and "replaced" in self.__dict__:
            setattr(self.__dict__["replaced"], name, value)
            name = "eps"
        super().__setattr__(name, value)


class _SmallBatchWeight(torch.nn.Parameter):
    """A router's matrix, for calls of ``torch.nn.functional.linear``."""

    prepared: PreparedLinear | None = None

    @staticmethod
    def of(weight: torch.nn.Parameter) -> torch.nn.Parameter:
        own = weight.detach().as_subclass(cast(Any, _SmallBatchWeight))
        return cast(torch.nn.Parameter, own.requires_grad_(weight.requires_grad))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs:
            func = _multiply
        # as torch itself disables subclasses; an exception cannot leave them disabled
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def _multiply(x: torch.Tensor, weight: Any, *bias: Any) -> torch.Tensor:
    if not isinstance(weight, _SmallBatchWeight):
        return linear(x, weight, *bias)
    if weight.prepared is None:
        weight.prepared = PreparedLinear()
    y = weight.prepared(x, weight, bias[0] if bias else None)
    return linear(x, weight, *bias) if y is None else y


def is_router(module: Any) -> bool:
    """Whether a module is a router with only a weight matrix and perhaps a bias."""
    own = dict(module.named_parameters(recurse=False))
    is_linear = set(own) in ({"weight"}, {"weight", "bias"}) and own["weight"].ndim == 2
    return is_linear and type(module).__name__.endswith("Router")


def as_rms_norm(module: Any) -> SmallBatchRMSNorm | None:
    """The replacement of a norm of a known form, else None."""
    weight, form = module._parameters.get("weight"), norm_form(module)
    if weight is None or form is None or "forward" in vars(module):
        return None
    return SmallBatchRMSNorm(
        module, next(vars(module)[n] for n in _EPS_NAMES if n in vars(module)), form
    )


ATTENTION, EAGER_ATTENTION = "moe_runtime", "moe_runtime_eager"
"""Registered names of our attention for SDPA and for eager."""

CHANGING_OPTIONS = frozenset(
    ("dropout", "output_attentions", "softcap", "position_bias", "s_aux", "sinks", "cache")
)
"""Options for more than softmax, scale and mask."""

_CALLED = ("ALL_ATTENTION_FUNCTIONS", "apply_rotary_pos_emb", "eager_attention_forward")
"""Globals of its module that a layer calls; programs may replace them."""

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


def fuse_attention_layers(model: PreTrainedModel, *, copies: bool = True) -> None:
    """Fuses known attention layers of a model on the CPU. The weights of queries, keys and values
    move into one buffer; the parameters become views of it, without values unless it ``copies``
    them."""
    if native_library() is None:
        return
    for module in model.modules():
        if has_usual_parts(module):
            merge(*(linear_of(module, name) for name in PROJECTIONS[:3]), copies=copies)
            cast(Any, module).forward = FusedAttention(module)


_EPS = operator.attrgetter("eps")
_ROTARY, _CLIP = ("sliding_window", "is_sliding", "use_qk_norm"), "clip_qkv"
"""Settings that change what a layer of ``ROTARY_ATTENTION`` computes."""


class FusedAttention:
    """The ``forward`` of an attention layer, with fast paths for one token and for several."""

    shows_weights = EAGER_ATTENTION  # the attention that may return weights
    takes_prompts = True  # several tokens too

    def __init__(self, module: Any) -> None:
        self._module = module
        self._attention = self._served = getattr(module.config, ATTENTION_SETTING)
        self._names = [name for name in (*PROJECTIONS, *NORMS) if name in module._modules]
        self._parts = [module.get_submodule(name) for name in self._names]
        # without the wrapper that renames the cache argument
        self._own: Any = inspect.unwrap(type(module).forward)
        self._cache_name = cache_name(self._own)
        self._functions = self._functions_now()
        self._norms = [module._modules[name] for name in self._names if name in NORMS]
        self._config = getattr(module.config, "behind", module.config)
        self._settings: list[Any] = []
        self._weights: AttentionWeights | None = None
        self._pairs_share = class_name(module) in PAIRS_SHARE
        registered = self._functions[2]
        self._prompt_attention = registered and registered.get(self._attention)
        self.most_sequences = 0

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Hidden values ``[B, Q, D]``, and None for attention weights."""
        out = None if args else self._step(**kwargs)
        if out is not None:
            return out, None
        return type(self._module).forward(self._module, *args, **kwargs)

    def _step(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Tensor | None:
        """The output ``[B, Q, D]``; None if the layer's own ``forward`` must run."""
        cache = options.pop(self._cache_name, None)
        if (
            hidden_states.ndim != 3
            or (hidden_states.shape[1] != 1 and not self.takes_prompts)
            or not isinstance(position_embeddings, tuple)
            or cache is None
            or torch.is_grad_enabled()
            or forward_ad._current_level >= 0
            or torch.is_autocast_enabled(hidden_states.device.type)
            or torch.compiler.is_compiling()
            or (not CHANGING_OPTIONS.isdisjoint(options) and changes_attention(options))
            or self._is_changed()
        ):
            return None
        cos, sin = position_embeddings
        batch, num_new, _ = hidden_states.shape
        if cos.ndim != 3 or cos.shape[1] != num_new:
            return None
        if num_new != 1:
            # in fp32, torch's sums of squares of several rows differ by processor
            if not self._may_fuse(1) or (self._norms and cos.dtype is torch.float32):
                return None
            return self._prompt(hidden_states, cos, sin, attention_mask, cache, options)
        # a server's sequences have caches of their own
        each = getattr(cache, "step_each", None) if batch > 1 else None
        if not self._may_fuse(1 if each else batch):
            return None
        if each:
            return each(self._module.layer_idx, hidden_states, self._weights, cos, sin)
        return self._fused(hidden_states, cos, sin, attention_mask, cache)

    def _is_changed(self) -> bool:
        module = self._module
        # the configuration's own lookup is slow
        name = object.__getattribute__(module.config, ATTENTION_SETTING)
        return bool(
            name not in (self._attention, self._served)
            or module.training
            or (self._attention == self.shows_weights and module._forward_hooks)
            or torch.nn.modules.module._has_any_global_hook()
            or any(map(operator.is_not, self._functions_now(), self._functions))
            or any(map(operator.is_not, map(module._modules.get, self._names), self._parts))
            or is_observed(*self._parts)
        )

    def _may_fuse(self, num_sequences: int) -> bool:
        """Whether the kernels support so many sequences with the current settings and weights."""
        own = vars(self._module)
        settings: list[Any] = [
            self._module.scaling,
            *map(_EPS, self._norms),
            *map(own.get, _ROTARY),
            own.get("indexer", own["_modules"].get("indexer")),
            vars(self._config).get(_CLIP),
        ]
        for part in (*self._parts, self._module):
            for tensor in part._parameters.values():
                if tensor is None:
                    continue
                if (matrix := tensor.__dict__.get("matrix")) is not None:  # of packed weights
                    settings.append(matrix)
                else:
                    settings += (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if settings != self._settings:
            self._settings = []  # in case the lines below fail
            may_fuse = is_usual_rotary(self._module, self._config) and self._bind()
            self.most_sequences = self._most_sequences() if may_fuse else 0
            self._settings = settings
        return num_sequences <= self.most_sequences

    def _bind(self) -> bool:
        self._weights = bind(self._module, pairs_share=self._pairs_share)
        return self._weights is not None

    def _most_sequences(self) -> int:
        """Sequences up to which the layer's own products use the native kernels too."""
        weights, library = self._weights, native_library()
        if weights is None or weights.c_struct is None or library is None:
            return 0
        most = min(native_row_limit(library, weights.dtype), ROWS_PER_CALL)
        products = (getattr(weight, "product", None) for weight in (weights.qkv, weights.output))
        return min((most, *(product.row_limit for product in products if product is not None)))

    def _functions_now(self) -> list[Any]:
        """The layer's own ``forward``, its configuration, and the functions that it calls."""
        forward = type(self._module).forward
        return [forward, self._module.config, *map(self._own.__globals__.get, _CALLED)]

    def _fused(
        self, hidden_states: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor | None:
        weights = self._weights
        assert weights is not None
        batch = hidden_states.shape[0]
        if mask is not None and (mask.ndim != 4 or mask.shape[:3] != (batch, 1, 1)):
            return None
        if {hidden_states.dtype, cos.dtype, sin.dtype} != {weights.dtype}:
            return None
        place = take_place(cache, self._module.layer_idx, weights.dtype)
        if place is None:
            return None
        out = attention_step(
            hidden_states.reshape(batch, -1),
            weights,
            cos.reshape(cos.shape[0], -1),
            sin.reshape(sin.shape[0], -1),
            *place,
            None if mask is None else added_mask(mask[:, 0, 0]),
        )
        return out.view(batch, 1, -1)

    def _prompt(
        self,
        hidden_states: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: Any,
        options: dict[str, Any],
    ) -> Tensor | None:
        module, weights, registered = self._module, self._weights, self._functions[2]
        attend = registered and registered.get(getattr(module.config, ATTENTION_SETTING))
        if weights is None or attend is None or attend is not self._prompt_attention:
            return None
        if {hidden_states.dtype, cos.dtype, sin.dtype} != {weights.dtype}:
            return None
        q, k, v, o = (linear_of(module, name) for name in PROJECTIONS)
        query, key = attention_heads(q(hidden_states), k(hidden_states), weights, cos, sin)
        value = v(hidden_states).unflatten(-1, (weights.num_key_heads, -1)).transpose(1, 2)
        key, value = cache.update(key, value, module.layer_idx)
        if weights.sinks is not None:
            options = {**options, "s_aux": weights.sinks}
        mixed, _ = attend(module, query, key, value, mask, scaling=module.scaling, **options)
        return o(mixed.flatten(2))


def has_usual_parts(
    module: torch.nn.Module,
    attentions: Sequence[str] = (ATTENTION, EAGER_ATTENTION),
    forms: Sequence[str] = ("rounded",),
) -> bool:
    """Whether a layer is of ``ROTARY_ATTENTION``, has its original parts, and one of these
    attentions and norm forms."""
    turn = getattr(inspect.unwrap(type(module).forward), "__globals__", {}).get(_CALLED[1])
    if class_name(module) not in ROTARY_ATTENTION or not (turn is None or is_theirs(turn)):
        return False
    linears, norms = (
        [module._modules.get(name) for name in names] for names in (PROJECTIONS, NORMS)
    )
    if "forward" in vars(module) or not all(
        type(part) in (SmallBatchLinear, torch.nn.Linear) for part in linears
    ):
        return False
    if not all(
        norm is None or (type(norm) is SmallBatchRMSNorm and norm.form in forms) for norm in norms
    ):
        return False
    q, k, v, _ = cast(list[SmallBatchLinear], linears)
    kinds = {(type(p.weight), p.weight.dtype, p.bias is None, p.in_features) for p in (q, k, v)}
    attention = getattr(vars(module).get("config"), ATTENTION_SETTING, None)
    return len(kinds) == 1 and attention in attentions and module._parameters.keys() <= {"sinks"}


def linear_of(module: torch.nn.Module, name: str) -> SmallBatchLinear:
    return cast(SmallBatchLinear, module._modules[name])


def merge(*parts: SmallBatchLinear, copies: bool = True) -> None:
    """Moves the weights of linear layers into one buffer, and their biases into another."""
    for name in ("weight", "bias"):
        parameters = [parameter for part in parts if (parameter := getattr(part, name)) is not None]
        if not parameters:
            continue
        if isinstance(parameters[0], AbsentTensor):
            from moe_runtime.checkpoints.dense_weights import join_packed

            join_packed(parts)
            continue
        memory = aligned_bytes(sum(parameter.nbytes for parameter in parameters))
        for parameter in parameters:
            place = memory[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            if copies:
                place.copy_(parameter.data)
            parameter.data = place
            memory = memory[parameter.nbytes :]


def _joined(parameters: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Adjacent tensors as one; None if they are not adjacent."""
    first = parameters[0]
    if any(isinstance(parameter, AbsentTensor) for parameter in parameters):
        from moe_runtime.checkpoints.dense_weights import whole_of

        return whole_of(parameters)
    if first is None:
        return None
    end = first.data_ptr()
    for parameter in parameters:
        if parameter is None or parameter.data_ptr() != end or not parameter.is_contiguous():
            return None
        end += parameter.nbytes
    rows = sum(len(parameter) for parameter in parameters if parameter is not None)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def bind(module: Any, *, pairs_share: bool) -> AttentionWeights | None:
    """The layer's weights for the kernel; None if they are not adjacent or have other sizes."""
    q, k, v, o = (linear_of(module, name) for name in PROJECTIONS)
    qkv = _joined([q.weight, k.weight, v.weight])
    qkv_bias = _joined([q.bias, k.bias, v.bias])
    if qkv is None or (qkv_bias is None) != (q.bias is None):
        return None
    heads, key_heads = q.out_features // module.head_dim, k.out_features // module.head_dim
    if not key_heads or heads % key_heads or v.out_features % key_heads:
        return None
    value_dim = v.out_features // key_heads
    if o.in_features != heads * value_dim or q.out_features != heads * module.head_dim:
        return None
    sinks = module._parameters.get("sinks")
    if sinks is not None and sinks.shape != (heads,):
        return None
    norms: dict[str, Any] = {name: head_norm(module, name) for name in NORMS}
    sizes = {None, module.head_dim}
    for norm, size in zip(norms.values(), (q.out_features, k.out_features), strict=True):
        if (None if norm is None else len(norm.weight)) not in {*sizes, size}:
            return None
    return AttentionWeights(
        qkv=qkv,
        output=o.weight.detach(),
        qkv_bias=qkv_bias,
        output_bias=None if o.bias is None else o.bias.detach(),
        **norms,
        num_heads=heads,
        num_key_heads=key_heads,
        key_dim=module.head_dim,
        value_dim=value_dim,
        scale=float(module.scaling),
        sinks=None if sinks is None else sinks.detach(),
        pairs_share=pairs_share,
    )


def head_norm(module: Any, name: str) -> RowNorm | None:
    norm = module._modules.get(name)
    if not isinstance(norm, SmallBatchRMSNorm):
        return None
    return RowNorm(norm.weight.detach(), norm.eps, norm.form)


def is_usual_rotary(layer: Any, config: Any) -> bool:
    """Whether a layer has no clipping and no indexer, and uses its norms and RoPE."""
    window, is_sliding, norms_heads = map(vars(layer).get, _ROTARY)
    turns = is_sliding is None or is_sliding or window is None
    has_its_norms = norms_heads is None or norms_heads == ("q_norm" in layer._modules)
    indexer = vars(layer).get("indexer", layer._modules.get("indexer"))
    return bool(turns and has_its_norms and indexer is None and vars(config).get(_CLIP) is None)


def single_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``attend`` for one query, ``[B, 1, H, V]``; None for other calls."""
    if (
        query.shape[2] != 1
        or query.shape[1] % key.shape[1]
        or (mask is not None and mask.shape != (len(query), 1, 1, key.shape[2]))
        or changes_attention(options)
        or torch.is_autocast_enabled("cpu")
    ):
        return None
    scale = scale_of(query, options)
    added = None if mask is None else added_mask(mask[:, 0, 0])
    mixed = native_attention(query.squeeze(2), key, value, added, scale, sinks)
    return None if mixed is None else mixed.unsqueeze(1)


def changes_attention(options: dict[str, Any]) -> bool:
    """Whether options change more than scale and mask."""
    asked = (options[name] for name in CHANGING_OPTIONS & options.keys())
    return any(isinstance(option, torch.Tensor) or bool(option) for option in asked)


def scale_of(query: torch.Tensor, options: dict[str, Any]) -> float:
    scaling = options.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def added_mask(mask_BS: torch.Tensor) -> torch.Tensor:
    """The fp32 mask to add to scores, from a bool mask or an additive one."""
    if mask_BS.dtype != torch.bool:
        return mask_BS.float()
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(mask_BS.shape).masked_fill(~mask_BS, lowest)
