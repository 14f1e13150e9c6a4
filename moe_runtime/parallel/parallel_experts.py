"""`ParallelExperts`: the experts of a layer, spread over ranks, as a module.

Shape suffixes: T tokens, D model, K choices, F hidden, S slots of this rank, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.kernels.operands import Activation
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import Group, as_transport
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.logical import as_slices, logical_views
from moe_runtime.parallel.parallel_layout import ParallelLayout
from moe_runtime.parallel.pipeline import (
    ExpertsFn,
    Overlap,
    PanelExperts,
    StackedPanels,
    expert_parallel,
)
from moe_runtime.parallel.replicas import ExpertMove, sum_replica_gradients
from moe_runtime.parallel.slices import one_expert, slice_experts
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing
from moe_runtime.routing.base import surrounding_ddp

ExpertGroup = LayoutGroups | ParallelLayout | Group
"""Processes that experts are spread over: a layout, its groups, or one group of ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertSpread:
    """How a layer's experts are spread over processes: `MoELayer(..., group=ExpertSpread(...))`.

    A `ParallelLayout` gets process groups for this layer; layers can share one `LayoutGroups`.
    `overlap`, `wire` and `seed` are those of `ParallelExperts`.
    """

    groups: ExpertGroup
    overlap: Overlap | None = None
    wire: WireName = "exact"
    seed: int = 0

    def make_experts(
        self, num_experts: int, hidden_size: int, intermediate_size: int, /, **options: Any
    ) -> ParallelExperts:
        """This rank's share of a layer's experts; the other arguments as of `ParallelExperts`."""
        groups = self.groups
        return ParallelExperts(
            num_experts,
            hidden_size,
            intermediate_size,
            LayoutGroups(groups) if isinstance(groups, ParallelLayout) else groups,
            overlap=self.overlap,
            wire=self.wire,
            seed=self.seed,
            **options,
        )


class ParallelExperts(nn.Module):
    """This rank's share of `E` feed-forward networks.

    Args:
        groups: The layout, or the group of ranks among which experts are spread; None for this
            process alone.
        slots: Where the experts lie; equal runs of (slices of) experts by default.
        activation, has_gate, bias, impl: As of `expert_mlp`.
        overlap: How communication is hidden.
        wire: How rows travel: `exact`, or the lossy `bf16` and `fp8`.
        recompute: The backward pass computes the experts' pre-activations again.
        seed: The parameters of an expert depend on this and its number, not on where it lies.

    Attributes:
        gate_up_proj: `[S, 2F / slices, D]`; `up_proj [S, F / slices, D]` without a gate.
        down_proj: `[S, D, F / slices]`.
        gate_up_proj_bias (or up_proj_bias), down_proj_bias: `[S, 2F / slices]` and `[S, D]`; only
            with biases.
        elsewhere: what computes the rows that arrive, where experts are not in this module.

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
        recompute: bool = False,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_slices = 1
        group: Group | None
        self._slice_group: dist.ProcessGroup | None = None
        if isinstance(groups, LayoutGroups):
            num_slices = groups.layout.etp
            group = groups.experts_transport
            self._slice_group = groups.group("expert", "etp")
        else:
            group = groups
        self.transport = as_transport(group)
        self.slots = slots or ExpertSlots.contiguous(
            num_experts, self.transport.size, num_slices=num_slices
        )
        self.num_experts, self.hidden_size = num_experts, hidden_size
        self.intermediate_size = intermediate_size
        self.activation: Activation = activation
        self.has_gate = has_gate
        self.overlap = overlap
        self.wire: WireName = wire
        self.impl: ExpertMlpImpl = impl
        self.recompute = recompute
        self.elsewhere: nn.Module | None = None
        self._slice = self.transport.rank % self.slots.num_slices
        self._seed = seed
        self._wrapper = 0
        self._mesh: DeviceMesh | None = None
        self._checked_mesh: DeviceMesh | None = None
        width = (2 if has_gate else 1) * intermediate_size // self.slots.num_slices
        self.first_name = "gate_up_proj" if has_gate else "up_proj"
        shapes: dict[str, tuple[int, ...]] = {
            self.first_name: (width, hidden_size),
            "down_proj": (hidden_size, intermediate_size // self.slots.num_slices),
        }
        if bias:
            shapes |= {f"{self.first_name}_bias": (width,), "down_proj_bias": (hidden_size,)}
        for name, shape in shapes.items():
            zeros = torch.zeros((self.slots.slots_per_rank, *shape), device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(zeros))
        if not self.down_proj.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with standard deviation `1 / sqrt(fan in)`; biases and empty slots zero."""
        for parameter in self.parameters():
            parameter.zero_()
        seed = self._seed
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
            self._fill(slot, whole)

    @torch.no_grad()
    def take(self, whole: StackedExperts) -> None:
        """Copies this rank's share of `E` experts, not transposed, gate rows before up rows."""
        for slot, expert in enumerate(self.experts_here):
            if expert >= 0:
                self._fill(slot, one_expert(whole, expert))

    def _fill(self, slot: int, whole: StackedExperts) -> None:
        part = slice_experts(whole, self._slice, self.slots.num_slices)
        for own, tensor in zip(self.stacked().tensors(), part.tensors(), strict=True):
            if own is not None and tensor is not None:
                own[slot] = tensor[0]

    def compute_with(self, experts: nn.Module) -> None:
        """Has a module compute the rows that arrive here; the own parameters are given up.

        The module is called once: with rows `[R, D]` sorted by slot, the expert of each row `[R,
        1]`, and None for weights; it returns `[R, D]`.
        """
        self.elsewhere = experts
        self.overlap = Overlap(is_local_first=False)
        self._parameters.clear()

    @property
    def experts_here(self) -> list[int]:
        """The expert in each slot of this rank, -1 for empty slots."""
        return self.slots.experts_of(self.transport.rank)

    def stacked(self) -> StackedExperts:
        """This rank's parameters as kernels take them.

        The second bias is a parameter of slice 0; other slices multiply theirs by 0, so that the
        graphs of all ranks hold the same exchanges.
        """
        own = dict(self.named_parameters())
        down_bias = own.get("down_proj_bias")
        if down_bias is not None and self._slice > 0:
            down_bias = down_bias * 0
        return StackedExperts(
            gate_up=own[self.first_name],
            down=own["down_proj"],
            gate_up_bias=own.get(f"{self.first_name}_bias"),
            down_bias=down_bias,
            has_gate=self.has_gate,
        )

    overlaps_shared = True
    """Whether `forward` takes shared experts, to compute them while rows travel."""

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`; a collective call.

        Choices with an id of `num_experts` are skipped. The output of `shared`, which every token
        visits, is added.

        Raises:
            RankFailureError: A rank died, stalled, or has other settings.
            ValueError: The module is in a `DistributedDataParallel` whose processes hold other
                experts, or `fully_shard` shards its parameters over such processes.
        """
        self._check_wrapper()
        self._check_sharding()
        own = () if self.elsewhere is not None else self.stacked().tensors()
        return expert_parallel(
            self._as_experts_read(x_TD),
            Routing(ids_TK, weights_TK, self.num_experts),
            self._experts_fn(),
            self.transport,
            slots=self.slots,
            overlap=self.overlap,
            shared=shared,
            # A rank that no row came to takes part in the backward pass all the same.
            parameters=[tensor for tensor in own if tensor is not None],
            wire=self.wire,
        )

    def _check_wrapper(self) -> None:
        """Refuses a wrapper that would make parameters of different experts equal."""
        wrapper = surrounding_ddp()
        if wrapper is None or self._wrapper == id(wrapper):
            return
        self._wrapper = id(wrapper)
        own = set(map(id, self.parameters()))
        named = wrapper.module.named_parameters()
        kept = {name for name, parameter in named if id(parameter) in own}
        if kept - wrapper.parameters_to_ignore:
            assert wrapper.process_group is not None
            self._require_same_experts(
                wrapper.process_group,
                "DistributedDataParallel gives all processes the experts of the first one, but "
                "they hold different experts of this layer: train without the wrapper, and call "
                "reduce_dense_gradients and reduce_expert_gradients of LayoutGroups before a step",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Notes the processes over which FSDP2 (`fully_shard`) shards a parameter."""
        if isinstance(value, DTensor):
            self._mesh = value.device_mesh
        super().__setattr__(name, value)

    def _check_sharding(self) -> None:
        """Refuses FSDP2 where it puts parts of different experts together."""
        if self._mesh is None or self._mesh == self._checked_mesh:
            return
        self._checked_mesh = self._mesh
        for group in self._mesh.get_all_groups():
            self._require_same_experts(
                group,
                "fully_shard puts the parts of all processes together as those of one parameter, "
                "but they hold different experts of this layer: give it the experts' parameters as "
                "ignored_params, and call reduce_expert_gradients of LayoutGroups before a step",
            )

    def _require_same_experts(self, group: dist.ProcessGroup | None, reason: str) -> None:
        here = (self._slice, self.experts_here)
        held = [here] * dist.get_world_size(group)
        dist.all_gather_object(held, here, group=group)
        if any(there != here for there in held):
            raise ValueError(reason)

    def _as_experts_read(self, x_TD: Tensor) -> Tensor:
        """Under autocast, rows are rounded as the experts would, but before they travel."""
        device = x_TD.device.type
        if torch.is_autocast_enabled(device) and x_TD.dtype != torch.float64:
            return x_TD.to(torch.get_autocast_dtype(device))
        return x_TD

    def _experts_fn(self) -> ExpertsFn | PanelExperts:
        if self.elsewhere is not None:
            return self._rows_elsewhere
        parameters = self.stacked()
        if self.overlap is not None and self.overlap.panels > 1:
            return StackedPanels(parameters, self.activation)
        return partial(
            grouped_expert_mlp,
            experts=parameters,
            activation=self.activation,
            impl=self.impl,
            recompute=self.recompute,
        )

    def _rows_elsewhere(self, rows_RD: Tensor, counts_S: Tensor) -> Tensor:
        assert self.elsewhere is not None
        ids_S = torch.tensor(self.experts_here, device=counts_S.device)
        ids_R1 = ids_S.repeat_interleave(counts_S)[:, None].to(rows_RD.device)
        return self.elsewhere(rows_RD, ids_R1, None)

    def sum_replica_gradients(self) -> None:
        """Gives all copies of an expert the same gradient, before the optimizer's step; a
        collective call."""
        if any(len(held) > 1 for slices in self.slots.holders for held in slices):
            sum_replica_gradients(list(self.parameters()), self.slots, self.transport)

    @torch.no_grad()
    def move(self, slots: ExpertSlots, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Moves to another placement, between two batches; a collective call.

        Where the number of slots changes, new parameters replace the old ones, in the optimizer
        too.

        Args:
            slots: The new placement. With `keep_in_place`, what stays does not move.
            optimizer: Its states of these parameters move along.

        Returns:
            Experts that travelled between ranks, over all ranks.

        Raises:
            ValueError: The experts are not in this module.
        """
        if self.elsewhere is not None:
            raise ValueError("experts that are trained offloaded stay in their processes")
        move = ExpertMove(self.slots, slots, self.transport)
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

    def logical_state(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """This rank's experts by logical number, as views: `{e}.gate_proj`, `{e}.up_proj` ...

        Copies of an expert have one name and slices are `DTensor`s of the whole:
        `torch.distributed.checkpoint` saves every number once, and a run under another layout finds
        its own experts, or slices of them.

        Args:
            tensors: What to name: the parameters by default, or an optimizer's states of them.

        Raises:
            ValueError: The experts are sliced and were not made with a `LayoutGroups`.
        """
        tensors = (
            {n: p.detach() for n, p in self.named_parameters()} if tensors is None else tensors
        )
        views = logical_views(tensors, self.experts_here)
        if self.slots.num_slices == 1:
            return views
        if self._slice_group is None:
            raise ValueError("slices are named with a LayoutGroups only, got a plain group")
        return as_slices(views, self._slice_group, self._slice)

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {len(self.experts_here)} here, slices={self.slots.num_slices}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        )
