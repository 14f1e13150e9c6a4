"""Attention layers in steps of one token on a GPU: one kernel between their products and attention.

Layers are recognised as on a CPU, on stand-ins. There the specification of the kernel has to give
the layer's bits, with parts that are like the layer's but for their weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from moe_runtime.checkpoints import transformers_private as private
from moe_runtime.inference.cpu import attention_parts as parts
from moe_runtime.inference.cpu.attention import ATTENTION, CHANGING_OPTIONS, attend
from moe_runtime.inference.cpu.fused_attention import (
    Case,
    FusedAttention,
    has_usual_parts,
    same_bits,
)
from moe_runtime.inference.cpu.stand_ins import Asked, call_on_stand_ins
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.kernels.linear.gpu import linears_of_a_row
from moe_runtime.kernels.rms_norm import FORMS, rms_norm_reference
from moe_runtime.kernels.rotary_step import RowNorm, rotary_step
from moe_runtime.kernels.triton_support import is_interpreted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SDPA, _EAGER = "sdpa", "eager"
_DIM = 8
"""Of the hidden values that a layer's likeness takes: the products are not what is compared."""
_ARRIVALS = "moe_runtime_arrivals"
Norms = tuple[RowNorm | None, RowNorm | None]


def fuse_device_attention(model: PreTrainedModel) -> None:
    """Gives the attention layers of a model on a GPU that qualify a way of their own for steps of
    one token a sequence with a static cache."""
    masks = AddedMasks()
    for module in model.modules():
        if has_usual_parts(module, (_SDPA, _EAGER), FORMS):
            attention = DeviceAttention(module, masks)
            if attention.is_known:
                masks.first = masks.first or attention
                cast(Any, module).forward = attention


class AddedMasks:
    """Masks as attention adds them, made once for all layers of a step that are given the same one.

    SDPA makes them anew for every layer, and copies those whose rows are no multiple of 8 long.

    Attributes:
        first: the layer with which a step begins.
    """

    def __init__(self) -> None:
        """Knows none."""
        self.first: DeviceAttention | None = None
        self._known = WeakTensorKeyDictionary()

    def added(self, mask: torch.Tensor, dtype: torch.dtype, layer: DeviceAttention) -> torch.Tensor:
        """What is added to scores for a mask ``[B, 1, 1, S]`` that allows; others are as they are.

        So are those of which torch does not know whether somebody changed them. Not every change
        is one that torch counts, so the first layer makes its mask in any case.
        """
        if layer is self.first:
            self._known.clear()
        if mask.dtype != torch.bool or mask.is_inference():
            return mask
        state = mask._version, dtype
        known = self._known.get(mask)
        if known is None or known[0] != state:
            length = mask.shape[-1]
            shape = *mask.shape[:-1], -(-length // 8) * 8
            room = torch.full(shape, -torch.inf, dtype=dtype, device=mask.device)
            known = state, room[..., :length].masked_fill_(mask, 0.0)
            self._known[mask] = known
        return known[1]


class DeviceAttention(FusedAttention):
    """The ``forward`` of an attention layer on a GPU.

    Attributes:
        is_known: whether its attention is SDPA or eager, as transformers has them.
    """

    shows_weights = _EAGER
    takes_prompts = False

    def __init__(self, module: Any, masks: AddedMasks) -> None:
        """Takes the place of the method; the layer's own stays in its class."""
        super().__init__(module)
        self._masks = masks
        self._attend, eager = self._functions[-1], self._functions[-2]
        known = eager if self._attention == _EAGER else private.sdpa_attention_forward
        self.is_known = self._attend is not None and self._attend is known
        self._pairs_share = False
        if self._attention == _SDPA:  # a server's is the same for keys that are tensors
            self._served = ATTENTION

    def _functions_now(self) -> list[Any]:
        """As of any layer, and its attention."""
        found = super()._functions_now()
        registered, eager = found[2], found[-1]
        if self._attention != _EAGER:
            eager = None if registered is None else registered.get(self._attention)
        return [*found, eager]

    def _places_now(self) -> list[Any]:
        # of a layer's parts nothing is kept but what they compute
        return [self._parts[0].weight.dtype]

    def _bind(self, *, pairs_share: bool) -> bool:
        self._pairs_share = pairs_share
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
        norms = _norms_of(self._module, lambda weight: weight.detach())
        return self._compute(self._module, norms, hidden_states, (cos, sin), mask, layer)

    def _compute(
        self,
        module: Any,
        norms: Norms,
        hidden: torch.Tensor,
        angles: Sequence[torch.Tensor],
        mask: torch.Tensor | None,
        layer: Any,
        *,
        is_sample: bool = False,
    ) -> torch.Tensor:
        query, key, value = _project(module, hidden, is_sample=is_sample)
        arrivals = None if is_sample else _arrivals_of(layer)
        query = rotary_step(
            (query, key, value),
            (angles[0].flatten(1), angles[1].flatten(1)),
            (layer.keys, layer.values),
            layer.cumulative_length,
            norms,
            pairs_share=self._pairs_share,
            arrivals=arrivals,
            impl="reference" if is_sample else "triton",
        )
        if arrivals is None and not layer.cumulative_length.ndim:
            layer.cumulative_length.add_(1)
        if is_sample or self._attention == _EAGER:
            is_served = is_sample and getattr(module.config, private.ATTENTION_SETTING) == ATTENTION
            mixed, _ = (attend if is_served else self._attend)(
                module, query, layer.keys, layer.values, mask, dropout=0.0, scaling=module.scaling
            )
        else:
            # heads that share keys are rows of one product, as of transformers 5.23: nothing is
            # repeated
            mixed = scaled_dot_product_attention(
                query.view(*layer.keys.shape[:2], -1, query.shape[-1]),
                layer.keys,
                layer.values,
                attn_mask=mask if mask is None else self._masks.added(mask, query.dtype, self),
                scale=module.scaling,
            )
        return module.o_proj(mixed.reshape(len(hidden), 1, -1))

    def _agrees(
        self, cos: torch.Tensor, asked: Asked, generator: torch.Generator, case: Case
    ) -> bool:
        """Whether both ways give the same bits for a token of two sequences, on the CPU."""
        from transformers.cache_utils import StaticLayer

        length, scale, is_masked, _ = case
        module, dtype = self._module, self._parts[0].weight.dtype

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        sample, norms = _sample_of(module, random)
        hidden, angles = random(2, 1, _DIM) * scale, random(2, 2, 1, cos.shape[-1]).unbind()
        mask = torch.arange(length + 3).expand(2, 1, 1, -1) > 0 if is_masked else None
        key_heads = module.k_proj.out_features // module.head_dim
        widths = module.head_dim, module.v_proj.out_features // key_heads
        cached = [random(2, key_heads, length, width) for width in widths]
        layers = [StaticLayer(length + 3) for _ in range(2)]
        for layer in layers:
            layer.update(*cached)
        own, _ = call_on_stand_ins(
            sample,
            [*self._names, *sample._parameters],
            asked,
            hidden=hidden,
            angles=angles,
            cache=SimpleNamespace(update=lambda k, v, _, **more: layers[0].update(k, v, **more)),
            mask=mask,
            options=self._options - CHANGING_OPTIONS,
        )
        ours = self._compute(sample, norms, hidden, angles, mask, layers[1], is_sample=True)
        pairs = ((getattr(layer, name) for layer in layers) for name in ("keys", "values"))
        return same_bits(own, ours) and all(same_bits(*pair) for pair in pairs)


def _project(module: Any, hidden: torch.Tensor, *, is_sample: bool) -> list[torch.Tensor]:
    """Queries, keys and values ``[B, N]``; of one token of one sequence in one launch."""
    layers = [module._modules[name] for name in parts.PROJECTIONS[:3]]
    weights = [] if is_sample else [(layer.weight, layer.bias) for layer in layers]
    found = linears_of_a_row(hidden, *weights) if weights else None
    if found is None:
        found = [layer(hidden) for layer in layers]
    return [part.flatten(1) for part in found]


def _static_layer(cache: Any, index: int) -> Any:
    """A layer of a static cache that has its memory, or None."""
    from transformers.cache_utils import StaticCache, StaticLayer

    from moe_runtime.inference.device.static_caches import RowCache

    if type(cache) is RowCache:
        return cache.layers[index]
    if type(cache) is not StaticCache or cache.offloading:
        return None
    layer = cache.layers[index]
    return layer if type(layer) is StaticLayer and layer.is_initialized else None


def _arrivals_of(layer: Any) -> torch.Tensor | None:
    """What `rotary_step` moves the length of a cached layer on with, and keeps with it: two steps
    of one cache never overlap.

    None for rows, whose caller says their places, and within a recording if there is none yet: what
    is made there is memory of the graph.
    """
    length, found = layer.cumulative_length, vars(layer).get(_ARRIVALS)
    if length.ndim:
        return None
    if found is None or found.device != length.device:
        if length.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            found = torch.zeros(1, dtype=torch.int32, device=length.device)
        setattr(layer, _ARRIVALS, found)
    return cast(torch.Tensor, found)


def _sample_of(module: Any, random: Any) -> tuple[Any, Norms]:
    """A layer's likeness on the CPU with small random weights, and its norms."""
    sample, own = copy.copy(module), dict[str, Any]()
    for name in parts.PROJECTIONS:
        part = parts.linear_of(module, name)
        shape = (part.out_features, _DIM) if name != "o_proj" else (_DIM, part.in_features)
        own[name] = partial(linear, weight=random(*shape))
    norms = _norms_of(module, lambda weight: random(len(weight)))
    for name, row in zip(parts.NORMS, norms, strict=True):
        if row is not None:
            own[name] = partial(rms_norm_reference, weight=row.weight, eps=row.eps, form=row.form)
    parameters = {name: random(*each.shape) for name, each in module._parameters.items()}
    vars(sample).update(_modules=own, _parameters=parameters, behind=module)
    return sample, norms


def _norms_of(module: Any, weight_of: Callable[[torch.Tensor], torch.Tensor]) -> Norms:
    found: list[RowNorm | None] = []
    for name in parts.NORMS:
        norm = module._modules.get(name)
        row = None if norm is None else RowNorm(weight_of(norm.weight), norm.eps, norm.form)
        found.append(row)
    return found[0], found[1]
