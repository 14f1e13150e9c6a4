"""`ParallelExperts`: the experts of a layer, spread over ranks, as a module.

Goes into a layer in place of its own experts: `MoELayer(..., experts=ParallelExperts(...))`.

Shape suffixes: T tokens, D model, K choices, F hidden, S slots of this rank, E experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.activation import Activation
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.parallel.dispatch import Group, as_transport
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.pipeline import Overlap, expert_parallel
from moe_runtime.parallel.replicas import ExpertMove, sum_replica_gradients
from moe_runtime.parallel.slices import slice_experts
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.parallel.wire import WireName
from moe_runtime.routing import Routing


class ParallelExperts(nn.Module):
    """This rank's share of `E` feed-forward networks.

    Args:
        num_experts: `E`.
        hidden_size: `D`.
        intermediate_size: `F`.
        groups: The layout, or the group of ranks among which experts are spread; None for this
            process alone.
        slots: Where the experts lie; equal runs of (slices of) experts by default.
        activation: As in `expert_mlp`.
        has_gate: Gated experts.
        bias: Experts with biases.
        overlap: How communication is hidden.
        wire: How rows travel: `exact`, or the lossy `bf16` and `fp8`.
        impl: Implementation of the experts.
        seed: The parameters of an expert depend on this and its number, not on where it lies.

    Attributes:
        gate_up_proj: `[S, 2F / slices, D]` (`[S, F / slices, D]` without a gate).
        down_proj: `[S, D, F / slices]`.
        gate_up_proj_bias, down_proj_bias: `[S, 2F / slices]` and `[S, D]`, or None.
        slots: where the experts lie.

    Raises:
        ValueError: Sizes that cannot work, or a placement of another model or group.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        groups: LayoutGroups | Group | None = None,
        *,
        slots: ExpertSlots | None = None,
        activation: Activation = "silu",
        has_gate: bool = True,
        bias: bool = False,
        overlap: Overlap | None = None,
        wire: WireName = "exact",
        impl: ExpertMlpImpl = "auto",
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_slices = 1
        group: Group | None
        if isinstance(groups, LayoutGroups):
            num_slices = groups.layout.etp
            group = groups.experts
        else:
            group = groups
        self._transport = as_transport(group)
        self.slots = slots or ExpertSlots.contiguous(
            num_experts, self._transport.size, num_slices=num_slices
        )
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        self.activation: Activation = activation
        self.has_gate = has_gate
        self.overlap = overlap
        self.wire: WireName = wire
        self.impl: ExpertMlpImpl = impl
        self._slice = self._transport.rank % self.slots.num_slices
        width = (2 if has_gate else 1) * intermediate_size // self.slots.num_slices
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (width, hidden_size),
            "down_proj": (hidden_size, intermediate_size // self.slots.num_slices),
        }
        if bias:
            shapes |= {"gate_up_proj_bias": (width,), "down_proj_bias": (hidden_size,)}
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            shape = (self.slots.slots_per_rank, *shapes[name]) if name in shapes else None
            parameter = None
            if shape is not None:
                parameter = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))
            self.register_parameter(name, parameter)
        self.reset_parameters(seed)

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Normal with standard deviation `1 / sqrt(fan in)`; biases and empty slots zero."""
        gate_up, down = self.get_parameter("gate_up_proj"), self.get_parameter("down_proj")
        rows = self.intermediate_size * (2 if self.has_gate else 1)
        for slot, expert in enumerate(self.experts_here):
            if expert < 0:
                continue
            random = torch.Generator().manual_seed(seed * 1_000_003 + expert)
            first = torch.randn(1, rows, self.hidden_size, generator=random)
            second = torch.randn(1, self.hidden_size, self.intermediate_size, generator=random)
            whole = StackedExperts(
                gate_up=first / math.sqrt(self.hidden_size),
                down=second / math.sqrt(self.intermediate_size),
                has_gate=self.has_gate,
            )
            part = slice_experts(whole, self._slice, self.slots.num_slices)
            gate_up[slot], down[slot] = part.gate_up[0], part.down[0]

    @property
    def experts_here(self) -> list[int]:
        """The expert in each slot of this rank, -1 for empty slots."""
        return self.slots.experts_of(self._transport.rank)

    def stacked(self) -> StackedExperts:
        """This rank's parameters as kernels take them.

        The second bias is a parameter of slice 0 alone; the other slices see zeros.
        """
        down_bias = self.down_proj_bias
        if isinstance(down_bias, Tensor) and self._slice > 0:
            down_bias = torch.zeros_like(down_bias)
        gate_up_bias = self.gate_up_proj_bias
        return StackedExperts(
            gate_up=self.get_parameter("gate_up_proj"),
            down=self.get_parameter("down_proj"),
            gate_up_bias=gate_up_bias if isinstance(gate_up_bias, Tensor) else None,
            down_bias=down_bias if isinstance(down_bias, Tensor) else None,
            has_gate=self.has_gate,
        )

    def forward(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`; a collective call.

        Choices with an id of `num_experts` are passed over.

        Raises:
            RankFailureError: A rank died, stalled, or has other settings.
        """
        parameters = self.stacked()

        def experts(rows_RD: Tensor, counts_S: Tensor) -> Tensor:
            return grouped_expert_mlp(
                rows_RD, counts_S, parameters, activation=self.activation, impl=self.impl
            )

        return expert_parallel(
            x_TD,
            Routing(ids_TK, weights_TK, self.num_experts),
            experts,
            self._transport,
            slots=self.slots,
            overlap=self.overlap,
            wire=self.wire,
        )

    def sum_replica_gradients(self) -> None:
        """Gives all copies of an expert the same gradient; call it before the optimizer's step.

        A collective call. Does nothing where no expert has copies.
        """
        if any(len(held) > 1 for slices in self.slots.holders for held in slices):
            sum_replica_gradients(list(self.parameters()), self.slots, self._transport)

    @torch.no_grad()
    def move(self, slots: ExpertSlots, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Moves to another placement, between two batches; a collective call.

        Where the number of slots changes, the parameters are replaced by new ones, in the optimizer
        as well.

        Args:
            slots: The new placement. With `keep_in_place`, what stays does not move at all.
            optimizer: Its states of these parameters move along.

        Returns:
            Experts that travelled between ranks, over all ranks.
        """
        move = ExpertMove(self.slots, slots, self._transport)
        for name, parameter in list(self.named_parameters()):
            states = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for key, state in states.items():
                if isinstance(state, Tensor) and state.shape == parameter.shape:
                    states[key] = move.apply(state)
            moved = move.apply(parameter)
            parameter.grad = None
            if moved.shape == parameter.shape:
                parameter.copy_(moved)
            else:
                self._replace(name, parameter, nn.Parameter(moved), optimizer)
        self.slots = slots
        return move.num_transfers

    def _replace(
        self,
        name: str,
        old: nn.Parameter,
        new: nn.Parameter,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        new.requires_grad_(old.requires_grad)
        self.register_parameter(name, new)
        if optimizer is None:
            return
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)

    def logical_state(self) -> dict[str, Tensor]:
        """This rank's experts by logical number, as views: `experts.{e}.gate_up_proj` and so on.

        Slices add `.slice{j}of{n}`. Copies of an expert have one name, under which
        `torch.distributed.checkpoint` saves them once; a later run with any other placement finds
        its own experts in the checkpoint.
        """
        suffix = (
            f".slice{self._slice}of{self.slots.num_slices}" if self.slots.num_slices > 1 else ""
        )
        return {
            f"experts.{expert}.{name}{suffix}": parameter.detach()[slot]
            for slot, expert in enumerate(self.experts_here)
            if expert >= 0
            for name, parameter in self.named_parameters()
        }

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {len(self.experts_here)} here, slices={self.slots.num_slices}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        )
