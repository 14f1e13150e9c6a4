"""`MoELayer`: a Mixture-of-Experts layer in place of a feed-forward block.

Shape suffixes: T tokens, D model width, E experts, K choices of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.layer.aux import LayerAux, weighted_loss
from moe_runtime.layer.experts import Experts, SharedExperts, compute_dtype
from moe_runtime.routing import Capacity, DropPolicy, Gate, Routing, RoutingContext, make_gate


class MoELayer(nn.Module):
    """Each token visits `top_k` of `num_experts` feed-forward networks, chosen by a gate.

    `y = sum_k weight_k * expert_k(x) + shared(x)`. Dropless unless `capacity_factor` is given.

    Args:
        hidden_size: Width of the tokens.
        intermediate_size: Width inside one expert.
        num_experts: Routed experts.
        top_k: Experts of a token.
        gate: A name of `moe_runtime.routing.GATES`, or a gate of that width and those experts.
        gate_options: Keyword arguments of the named gate.
        activation: A name of `moe_runtime.layer.activations.ACTIVATIONS`.
        bias: Experts with biases.
        shared_experts: Experts that every token visits besides, each `intermediate_size` wide.
        shared_expert_gate: Multiplies their output by `sigmoid(w x)` (Qwen2-MoE).
        capacity_factor: An expert takes `ceil(capacity_factor * tokens * top_k / num_experts)`
            choices of a group; None means dropless.
        drop_policy: Which choices are kept: see `moe_runtime.routing.Capacity`.
        num_groups: Consecutive parts of the batch that are routed on their own (GShard).
        loss_weights: Coefficients of the auxiliary losses by name; None means the gate's own.
        experts: What runs the routed experts instead of `Experts`: a module called with
            `(x_TD, ids_TK, weights_TK)`, for example one whose experts live in other processes.
        name: How errors call this layer.

    Attributes:
        aux: `LayerAux` of the last call; None before the first.

    Raises:
        ValueError: Sizes that cannot work, or unknown names.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        gate: str | Gate = "softmax_topk",
        gate_options: Mapping[str, Any] | None = None,
        activation: str = "swiglu",
        bias: bool = False,
        shared_experts: int = 0,
        shared_expert_gate: bool = False,
        capacity_factor: float | None = None,
        drop_policy: DropPolicy = "choice",
        num_groups: int = 1,
        loss_weights: Mapping[str, float] | None = None,
        experts: nn.Module | None = None,
        name: str = "MoELayer",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if intermediate_size < 1:
            raise ValueError(f"intermediate_size must be at least 1, got {intermediate_size}")
        if shared_experts < 0:
            raise ValueError(f"shared_experts must not be negative, got {shared_experts}")
        self.name = name
        self.hidden_size = hidden_size
        if isinstance(gate, Gate):
            self.gate = gate
        else:
            capacity = None
            if capacity_factor is not None:
                capacity = Capacity(capacity_factor, drop_policy)
            common = {
                "capacity": capacity,
                "num_groups": num_groups,
                "loss_weights": loss_weights,
                "name": f"the gate of {name}",
                "device": device,
                "dtype": dtype,
            }
            self.gate = make_gate(
                gate, hidden_size, num_experts, top_k, **{**common, **(gate_options or {})}
            )
        kind: dict[str, Any] = {
            "activation": activation,
            "bias": bias,
            "device": device,
            "dtype": dtype,
        }
        if experts is None:
            experts = Experts(num_experts, hidden_size, intermediate_size, **kind)
        self.experts = experts
        self.shared: SharedExperts | None = None
        if shared_experts:
            width = shared_experts * intermediate_size
            self.shared = SharedExperts(hidden_size, width, gated=shared_expert_gate, **kind)
        self.aux: LayerAux | None = None

    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Routes and computes.

        Args:
            x: `[..., D]`; with three or more dimensions the last but one is the sequence.
            token_ids: Token numbers `[...]`, for hash routing.
            previous_logits: `aux.routing.logits_TE` of the previous layer, for MoE++.
            generator: Randomness of gates that use some; None means torch's own.

        Returns:
            `[..., D]` in the dtype of `x` (under autocast in autocast's).

        Raises:
            ValueError: A width or batch that does not fit, or scores that are not numbers.
        """
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{self.name}: expected [..., {self.hidden_size}], got {list(x.shape)}"
            )
        x_TD = x.reshape(-1, self.hidden_size)
        context = RoutingContext(
            token_ids_T=None if token_ids is None else token_ids.reshape(-1),
            previous_logits_TE=previous_logits,
            num_sequences=math.prod(x.shape[:-2]) if x.ndim > 2 else 1,
            generator=generator,
        )
        routing: Routing = self.gate(x_TD, context)
        out_TD = self.experts(x_TD, routing.ids_TK, routing.weights_TK)
        if self.shared is not None:
            out_TD = out_TD + self.shared(x_TD)
        loss = weighted_loss(routing.losses, self.gate.loss_weights, routing.weights_TK)
        self.aux = LayerAux(routing, routing.losses, loss)
        return out_TD.to(compute_dtype(x)).view(*x.shape[:-1], self.hidden_size)
