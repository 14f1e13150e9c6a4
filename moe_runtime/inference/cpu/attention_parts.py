"""The parts of the usual attention layer, and its weights as one step of the kernels takes them."""

from __future__ import annotations

from typing import Any, cast

import torch

from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.inference.cpu.small_batch import SmallBatchLinear, SmallBatchRMSNorm
from moe_runtime.kernels.attention_step import AttentionWeights, HeadNorm
from moe_runtime.memory.slab import aligned_bytes

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")


def names_of(module: torch.nn.Module) -> list[str]:
    """The names of the parts that a layer has."""
    return [name for name in (*PROJECTIONS, *NORMS) if name in module._modules]


def linear_of(module: torch.nn.Module, name: str) -> SmallBatchLinear:
    """One of its projections."""
    return cast(SmallBatchLinear, module._modules[name])


def merge(*parts: SmallBatchLinear) -> None:
    """Moves the weights of linear layers into one buffer, one behind the other; biases likewise."""
    for name in ("weight", "bias"):
        parameters = [parameter for part in parts if (parameter := getattr(part, name)) is not None]
        if not parameters:
            continue
        if isinstance(parameters[0], AbsentTensor):
            from moe_runtime.checkpoints.packed_parameter import join_packed

            join_packed(parts)
            continue
        memory = aligned_bytes(sum(parameter.nbytes for parameter in parameters))
        for parameter in parameters:
            place = memory[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)
            place.copy_(parameter.data)
            parameter.data = place
            memory = memory[parameter.nbytes :]


def _joined(parameters: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Tensors that lie one behind the other as one, or None where they do not."""
    first = parameters[0]
    if any(isinstance(parameter, AbsentTensor) for parameter in parameters):
        from moe_runtime.checkpoints.packed_parameter import whole_of

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
    """The layer's weights for the kernel, or None where they do not lie together any more.

    Args:
        module: the layer.
        pairs_share: whether the two values of a pair share an angle, which only the layer knows.
    """
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
    norms: dict[str, Any] = {name: _head_norm(module._modules.get(name)) for name in NORMS}
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


def _head_norm(part: torch.nn.Module | None) -> HeadNorm | None:
    if not isinstance(part, SmallBatchRMSNorm):
        return None
    return HeadNorm(part.weight.detach(), part.eps)
