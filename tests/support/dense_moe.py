"""The judge of the layer: every expert computed on every token in fp64, then weighted.

It shares no code with the product: weights come in as a dense matrix `[T, E]` that the test makes
from a gate's formula.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.layer import MoELayer
from moe_runtime.routing import Routing


def dense_experts(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """`[T, E, D]`: the output of each of the layer's experts for each token.

    Zero-computation experts come last: constants, copies, zeros.
    """
    params = dict(layer.experts.named_parameters())
    has_gate = "gate_up_proj" in params
    first = params["gate_up_proj" if has_gate else "up_proj"]
    hidden = torch.einsum("td,efd->tef", x_TD, first)
    bias = params.get("gate_up_proj_bias" if has_gate else "up_proj_bias")
    if bias is not None:
        hidden = hidden + bias
    if has_gate:
        half = hidden.shape[-1] // 2
        gate, up = hidden[..., :half], hidden[..., half:]
        hidden = gate * torch.sigmoid(gate) * up
    else:
        hidden = torch.relu(hidden) ** 2
    out = torch.einsum("tef,edf->ted", hidden, params["down_proj"])
    if "down_proj_bias" in params:
        out = out + params["down_proj_bias"]
    if layer.zero is None:
        return out
    special = []
    for vector, mix in zip(layer.zero.vectors, layer.zero.mix_weight, strict=True):
        first_share = torch.sigmoid(x_TD @ (mix[0] - mix[1]))[:, None]
        special.append(first_share * x_TD + (1 - first_share) * vector)
    special += [x_TD] * layer.zero.counts.copy + [0 * x_TD] * layer.zero.counts.zero
    return torch.cat([out, torch.stack(special, dim=1)], dim=1)


def dense_weights(routing: Routing) -> Tensor:
    """`[T, E]`: the weight of each expert for each token, 0 where it is not used."""
    num_tokens, num_experts = routing.ids_TK.shape[0], routing.num_experts
    weights = routing.weights_TK.new_zeros(num_tokens, num_experts + 1)
    return weights.scatter_add(1, routing.ids_TK, routing.weights_TK)[:, :num_experts]


def dense_layer(layer: MoELayer, x_TD: Tensor, weights_TE: Tensor) -> Tensor:
    """`[T, D]`: the routed part of the layer for a dense matrix of weights."""
    return torch.einsum("te,ted->td", weights_TE, dense_experts(layer, x_TD))
