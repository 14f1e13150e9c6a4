"""`ParallelExperts`: the experts of a layer, spread over ranks, as a module.

Slices of experts, names under which checkpoints keep them, and moves by load.

A slice of an expert is a narrower expert; the outputs of all slices add up to the expert's.

Shape suffixes: T tokens, D model, K choices, F hidden, S slots of this rank, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe_runtime.kernels.expert_mlp import StackedExperts, grouped_expert_mlp
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl
from moe_runtime.kernels.operands import Activation
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import (
    ExpertsFn,
    Group,
    Overlap,
    PanelExperts,
    StackedPanels,
    as_transport,
    begin_expert_parallel,
)
from moe_runtime.parallel.groups import LayoutGroups, ParallelLayout
from moe_runtime.parallel.replicas import (
    ExpertMove,
    keep_in_place,
    sum_replica_gradients,
    transfers_between,
)
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.policies.placement import Devices, rebalance
from moe_runtime.policies.placement.base import slots_needed
from moe_runtime.routing import Routing
from moe_runtime.routing.base import surrounding_ddp


def slice_experts(experts: StackedExperts, index: int, num_slices: int) -> StackedExperts:
    """Slice `index` of every expert, as copies; the bias of the second matrix belongs to slice 0.

    Raises:
        ValueError: The hidden dimension does not divide, or there is no such slice.
    """
    if not 0 <= index < num_slices:
        raise ValueError(f"slice must be in 0..{num_slices - 1}, got {index}")
    if experts.dim_hidden % num_slices:
        raise ValueError(
            f"the hidden dimension of the experts ({experts.dim_hidden}) does not divide into "
            f"{num_slices} slices"
        )
    width = experts.dim_hidden // num_slices
    ids = torch.arange(index * width, (index + 1) * width, device=experts.device)
    columns = ids  # of the first matrix, which makes these hidden units
    if experts.has_gate and experts.is_concatenated:
        columns = torch.cat([ids, ids + experts.dim_hidden])
    elif experts.has_gate:
        columns = torch.stack([2 * ids, 2 * ids + 1], dim=1).flatten()
    first, second = (2, 1) if experts.is_transposed else (1, 2)
    down_bias = experts.down_bias
    if down_bias is not None and index > 0:
        down_bias = torch.zeros_like(down_bias)
    bias = experts.gate_up_bias
    return replace(
        experts,
        gate_up=experts.gate_up.index_select(first, columns),
        down=experts.down.index_select(second, ids),
        gate_up_bias=None if bias is None else bias.index_select(1, columns),
        down_bias=down_bias,
    )


def replace_tensors(experts: StackedExperts, tensors: Sequence[Tensor | None]) -> StackedExperts:
    """The same layout with other tensors, in the order of `StackedExperts.tensors`."""
    gate_up, down, gate_up_bias, down_bias = tensors
    assert gate_up is not None
    assert down is not None
    return replace(
        experts, gate_up=gate_up, down=down, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


_SLICED_DIM = {"gate_proj": 0, "up_proj": 0, "down_proj": 1, "gate_proj_bias": 0, "up_proj_bias": 0}


def logical_views(tensors: Mapping[str, Tensor], experts: Sequence[int]) -> dict[str, Tensor]:
    """Every expert's matrices by name, as views: `{e}.gate_proj`, `{e}.up_proj`, `{e}.down_proj`.

    Args:
        tensors: `[S, ...]` stacked parameters by name, or tensors laid out like them:
            `gate_up_proj` (gate rows first) or `up_proj`, `down_proj`, and their biases.
        experts: The expert in each slot; -1 for none.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            if name.startswith("gate_up_proj"):
                suffix = name.removeprefix("gate_up_proj")
                gate, up = tensor[slot].chunk(2)
                views |= {f"{expert}.gate_proj{suffix}": gate, f"{expert}.up_proj{suffix}": up}
            else:
                views[f"{expert}.{name}"] = tensor[slot]
    return views


def copy_part(whole: Tensor, part: Tensor) -> None:
    """Copies this rank's part of `whole` into `part`, a `DTensor` or a tensor of its shape."""
    if not isinstance(part, DTensor):
        part.copy_(whole)
        return
    mesh = part.device_mesh
    # FSDP2's shards of slices are cut last: such a split has a factor, the number of slices.
    order = sorted(enumerate(part.placements), key=lambda item: hasattr(item[1], "split_factor"))
    for dimension, placement in order:
        cut = getattr(placement, "dim", None)
        if cut is not None:
            pieces = whole.chunk(mesh.size(dimension), cut)
            number = mesh.get_local_rank(dimension)
            whole = pieces[number] if number < len(pieces) else whole.narrow(cut, 0, 0)
    part.to_local().copy_(whole)


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
        elsewhere: the module that computes arriving rows, where experts are not in this one.

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
        self._slice_group: dist.ProcessGroup | None = None
        if isinstance(groups, LayoutGroups):
            num_slices = groups.layout.etp
            self._slice_group = groups.group("expert", "etp")
            groups = groups.experts_transport
        self.transport = as_transport(groups)
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
        rows = self.intermediate_size * (2 if self.has_gate else 1)
        for slot, expert in enumerate(self.experts_here):
            if expert < 0:
                continue
            random = torch.Generator().manual_seed(self._seed * 1_000_003 + expert)
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
                here = slice(expert, expert + 1)
                one = [None if tensor is None else tensor[here] for tensor in whole.tensors()]
                self._fill(slot, replace_tensors(whole, one))

    def _fill(self, slot: int, expert: StackedExperts) -> None:
        """Copies this rank's slice of one whole expert."""
        part = slice_experts(expert, self._slice, self.slots.num_slices)
        for own, tensor in zip(self.stacked().tensors(), part.tensors(), strict=True):
            if own is not None and tensor is not None:
                own[slot] = tensor[0]

    def compute_with(self, experts: nn.Module) -> None:
        """Lets a module compute the rows that arrive here; frees the own parameters.

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
    begins_early = True
    """Whether `forward` takes `later`."""

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        later: bool = False,
    ) -> Any:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`, `[T, D]`; a collective call.

        Choices with an id of `num_experts` are skipped. The output of `shared`, which every token
        visits, is added. With `later`, rows are sent and a function is returned that computes the
        output: rows travel in both passes while something else is computed.

        Raises:
            RankFailureError: A rank died, stalled, or has other settings.
            ValueError: The module is in a `DistributedDataParallel` whose processes hold other
                experts, or `fully_shard` shards its parameters over such processes.
        """
        self._check_wrapper()
        self._check_sharding()
        own = () if self.elsewhere is not None else self.stacked().tensors()
        finish = begin_expert_parallel(
            self._as_experts_read(x_TD),
            Routing(ids_TK, weights_TK, self.num_experts),
            self._experts_fn(),
            self.transport,
            slots=self.slots,
            overlap=self.overlap,
            shared=shared,
            # A rank without rows takes part in the backward pass too.
            parameters=[tensor for tensor in own if tensor is not None],
            wire=self.wire,
        )
        return finish if later else finish()

    def _check_wrapper(self) -> None:
        """Refuses a wrapper that would make parameters of different experts equal."""
        wrapper = surrounding_ddp()
        if wrapper is None or self._wrapper == id(wrapper):
            return
        self._wrapper = id(wrapper)
        own = set(map(id, self.parameters()))
        named = wrapper.module.named_parameters()
        wrapped = {name for name, parameter in named if id(parameter) in own}
        if wrapped - wrapper.parameters_to_ignore:
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

    @property
    def has_copies(self) -> bool:
        return any(len(held) > 1 for slices in self.slots.holders for held in slices)

    @torch.no_grad()
    def fill_copies(self, tensors: Iterable[Tensor]) -> None:
        """Gives slots here that hold one expert the last one's values, which `logical_state` names;
        tensors are `[S, ...]`."""
        last = {expert: slot for slot, expert in enumerate(self.experts_here) if expert >= 0}
        here = [(slot, last[e]) for slot, e in enumerate(self.experts_here) if e >= 0]
        for tensor in tensors:
            for slot, source in here:
                if slot != source:
                    tensor[slot] = tensor[source]

    def sum_replica_gradients(self) -> None:
        """Gives all copies of an expert the same gradient, before the optimizer's step; a
        collective call."""
        if self.has_copies:
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
        for name, old in list(self.named_parameters()):
            states = optimizer.state.get(old, {}) if optimizer is not None else {}
            for key, state in states.items():
                if isinstance(state, Tensor) and state.shape == old.shape:
                    states[key] = move.apply(state)
            moved = move.apply(old)
            old.grad = None
            if moved.shape == old.shape:
                old.copy_(moved)
                continue
            new = nn.Parameter(moved, requires_grad=old.requires_grad)
            self.register_parameter(name, new)
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["params"] = [new if p is old else p for p in group["params"]]
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
        self.slots = slots
        return move.num_transfers

    def logical_state(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """This rank's experts by logical number, as views: `{e}.gate_proj`, `{e}.up_proj` ...

        Copies of an expert have one name and slices are `DTensor`s of the whole:
        `torch.distributed.checkpoint` saves every number once, and a run under another layout finds
        its own experts, or slices of them.

        Args:
            tensors: The parameters by default, or an optimizer's states of them.

        Raises:
            ValueError: The experts are sliced and were not made with a `LayoutGroups`.
        """
        if tensors is None:
            tensors = {name: own.detach() for name, own in self.named_parameters()}
        views = logical_views(tensors, self.experts_here)
        if self.slots.num_slices == 1:
            return views
        if self._slice_group is None:
            raise ValueError("slices are named with a LayoutGroups only, got a plain group")
        sliced: dict[str, Tensor] = {}
        for name, view in views.items():
            cut = _SLICED_DIM.get(name.partition(".")[2])
            if cut is not None:
                mesh = DeviceMesh.from_group(self._slice_group, view.device.type)
                sliced[name] = DTensor.from_local(view, mesh, [Shard(cut)], run_check=False)
            elif self._slice == 0:  # the bias of the second matrix
                sliced[name] = view
        return sliced

    def extra_repr(self) -> str:
        return (
            f"{self.num_experts}, {len(self.experts_here)} here, slices={self.slots.num_slices}, "
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebalanced:
    """One look at the loads.

    Balance is the mean over the largest load of the ranks, before and after; 1 is perfect.
    `num_transfers` counts experts that travelled between ranks.
    """

    balance_before: float
    balance_after: float
    num_transfers: int


class MoveCosts(Protocol):
    """Gain and cost of a move, in any one unit."""

    def gain(self, loads_E: np.ndarray, before: ExpertSlots, after: ExpertSlots) -> float:
        """Saved until the next look, with these loads."""
        ...

    def cost(self, num_transfers: int) -> float: ...


_PERSISTENCE = 0.98
"""Largest share of a gain that remains at the next look."""
_PROVEN_SHARE = 0.25
"""Share of a move's cost that gains must have been worth before it."""


class RebalanceRule:
    """Decides from look to look whether experts move: EPLB's placement by loads, if it pays.

    Args:
        num_slots: one for each expert, and those for replicas.
        decay: Share of the older counts that still counts at the next look.
        least_gain: Gain in balance below which nothing is moved.
        costs: Decide instead of `least_gain`. A gain counts by the share of earlier gains that the
            following loads confirmed, whether experts moved or not.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        decay: float = 0.5,
        least_gain: float = 0.05,
        costs: MoveCosts | None = None,
    ) -> None:
        if not 0 <= decay < 1 or least_gain < 0:
            raise ValueError(
                f"expected decay in [0, 1) and least_gain from 0 on, got {decay} and {least_gain}"
            )
        self._num_slots, self._decay, self._least_gain = num_slots, decay, least_gain
        self._costs, self._trust, self._proven = costs, 1.0, 0.0
        self._loads_E: np.ndarray | None = None
        self._promised: tuple[ExpertSlots, ExpertSlots, float] | None = None

    def look(
        self, counted_E: np.ndarray, slots: ExpertSlots
    ) -> tuple[ExpertSlots | None, float, float]:
        """The new placement, or None; the balance now, and the one after the move.

        Args:
            counted_E: float64 loads since the last look.
        """
        older_E = 0.0 if self._loads_E is None else self._decay * self._loads_E
        loads_E = self._loads_E = older_E + counted_E
        num_ranks, each = slots.num_ranks, slots.ranks_per_node
        devices = Devices(num_nodes=num_ranks // each, gpus_per_node=each)
        placement = rebalance(loads_E[None], devices, num_slots=self._num_slots)
        wanted = placement.expert_of_slot[0].reshape(num_ranks, -1).tolist()
        proposed = keep_in_place(wanted, slots)
        before, after = rank_balance(loads_E, slots), rank_balance(loads_E, proposed)
        if self._costs is None:
            pays = after >= before + self._least_gain
        else:
            pays = self._pays(self._costs, counted_E, slots, proposed)
        return (proposed if pays else None), before, after

    def _pays(
        self, costs: MoveCosts, counted_E: np.ndarray, slots: ExpertSlots, proposed: ExpertSlots
    ) -> bool:
        if self._promised is not None:
            *then, promise = self._promised
            realized = max(0.0, costs.gain(counted_E, *then))
            self._trust = (self._trust + min(1.0, realized / promise)) / 2
            self._proven += realized
        gain, transfers = costs.gain(counted_E, slots, proposed), transfers_between(slots, proposed)
        self._promised = (slots, proposed, gain) if gain > 0 else None
        # A gain lasts as long as earlier ones did. A move that the next look does not pay back also
        # waits until gains of a share of its cost came true.
        saved, cost = self._trust * gain, costs.cost(transfers)
        lasting = saved / (1 - _PERSISTENCE * self._trust)
        pays = transfers > 0 and (
            saved > cost or (lasting > cost and self._proven > _PROVEN_SHARE * cost)
        )
        if pays:
            self._proven = 0.0
        return pays


class Rebalancer:
    """Counts where the tokens of a layer go and, from time to time, places its experts by that.

    Placement is EPLB's, with replicas if there are slots for them. Outputs change by no more than
    the order of sums. With replicas in training, `experts.sum_replica_gradients()` belongs before
    every optimizer step.

    Args:
        every: Calls of `step` between two looks at the loads.
        num_replicas: Slots beyond one for each expert; together they divide by the ranks.
        groups: The layout, where it has copies of all experts (EDP): they stay alike.
        decay, least_gain, costs: As of `RebalanceRule`.

    Attributes:
        counted_E: float64 loads between the last two looks, of all ranks.

    Raises:
        ValueError: Slots that do not divide by the ranks, sliced experts, or impossible numbers.
    """

    def __init__(
        self,
        experts: ParallelExperts,
        *,
        every: int = 100,
        num_replicas: int = 0,
        groups: LayoutGroups | None = None,
        **rule: Any,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        if experts.slots.num_slices > 1:
            raise ValueError("only whole experts are moved; these are cut into slices (etp)")
        slots_needed(experts.num_experts, num_replicas, experts.slots.num_ranks)
        self._experts, self._groups = experts, groups
        self._every, self._num_steps = every, 0
        self._rule = RebalanceRule(experts.num_experts + num_replicas, **rule)
        self._own_E = torch.zeros(experts.num_experts, dtype=torch.int64)
        self.counted_E = np.zeros(experts.num_experts)
        self._hook = experts.register_forward_pre_hook(self._count)

    def close(self) -> None:
        self._hook.remove()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> Rebalanced | None:
        """To be called between two batches, after the optimizer's step; a collective call.

        The optimizer's states of the experts move along. Returns None between two looks at the
        loads.
        """
        self._num_steps += 1
        if self._num_steps % self._every:
            return None
        self._sum_counts()
        slots, before, after = self._rule.look(self.counted_E, self._experts.slots)
        if slots is None:
            return Rebalanced(balance_before=before, balance_after=before, num_transfers=0)
        num_transfers = self._experts.move(slots, optimizer)
        return Rebalanced(balance_before=before, balance_after=after, num_transfers=num_transfers)

    def _count(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        num_experts = len(self._own_E)
        ids = inputs[1].flatten()
        # The last number counts choices that are not dispatched.
        counts = torch.bincount(ids, minlength=num_experts + 1)[:num_experts]
        self._own_E = self._own_E.to(counts.device) + counts

    def _sum_counts(self) -> None:
        """Adds up what all ranks have counted since the last look."""
        transport = self._experts.transport
        own_PE = self._own_E.cpu().expand(transport.size, -1).contiguous()
        counted_E = transport.exchange_numbers(own_PE).sum(dim=0).double()
        if self._groups is not None:
            copies = self._groups.group("expert", "edp")
            self._groups.all_reduce(counted_E, copies, "loads")
        self.counted_E = counted_E.numpy()
        self._own_E = torch.zeros_like(self._own_E)


def rank_loads(loads_E: np.ndarray, slots: ExpertSlots) -> np.ndarray:
    """`[P]`: loads of ranks when an expert's is split over its copies."""
    ranks = np.zeros(slots.num_ranks)
    for load, (held, *_) in zip(loads_E, slots.holders, strict=True):
        for slot in held:
            ranks[slot // slots.slots_per_rank] += load / len(held)
    return ranks


def rank_balance(loads_E: np.ndarray, slots: ExpertSlots) -> float:
    """Mean over largest load of the ranks."""
    ranks = rank_loads(loads_E, slots)
    return float(ranks.mean() / ranks.max()) if ranks.max() > 0 else 1.0
