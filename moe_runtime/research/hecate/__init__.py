"""Hecate's fully sharded sparse data parallelism: copies of hot experts for one iteration.

The owner of an expert keeps its parameters and optimizer state. For an iteration, chosen experts
are copied to other ranks (sparse all-gather), which compute their own tokens for them; gradients of
the copies are summed at the owner (the backward pass of the first). The copies travel while earlier
operations compute. Results change by no more than the order of sums.

The paper does not specify how shares are rounded; here it is by largest remainder. Copies that an
expert cannot use go to the next.

Shape suffixes: T tokens, D model, K choices, R rows, S owned slots of a rank, X slots with copies,
E experts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_runtime.kernels.expert_mlp import grouped_expert_mlp
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.communication.wire import WireName
from moe_runtime.parallel.dispatching import Group, Overlap, as_transport, expert_parallel
from moe_runtime.parallel.groups import LayoutGroups
from moe_runtime.parallel.parallel_experts import ParallelExperts, replace_tensors
from moe_runtime.parallel.replicas import SlotExchange, keep_in_place
from moe_runtime.parallel.rows import SPREAD, tie_rows
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.routing import Routing


def plan_copies(
    loads_E: Sequence[float],
    owner_E: Sequence[int],
    *,
    num_devices: int,
    devices_per_node: int,
    max_experts: int,
    slots_per_device: int,
) -> list[list[int]]:
    """Copies for the next iteration (Hecate's algorithm 1).

    Copies as many of the hottest experts as the computation before the layer hides
    (`max_experts`), within the room of each device.

    Returns:
        For each device, the experts to copy to it, hottest first; never one that it owns.

    Raises:
        ValueError: Numbers that do not fit each other.
    """
    num_experts = len(loads_E)
    if len(owner_E) != num_experts or not all(0 <= o < num_devices for o in owner_E):
        raise ValueError(f"expected an owner among {num_devices} devices for each expert")
    _check_nodes(num_devices, devices_per_node)
    num_hot = min(max_experts, num_experts)
    room = min(slots_per_device, num_hot)
    hot = _by_load(loads_E)[:num_hot]
    if num_hot <= room:
        return [[e for e in hot if owner_E[e] != device] for device in range(num_devices)]
    copies: list[list[int]] = [[] for _ in range(num_devices)]
    nodes = _nodes(num_devices, devices_per_node)
    wanted = _shares([loads_E[e] for e in hot], num_devices * room, num_devices - 1)
    for expert, number in zip(hot, wanted, strict=True):
        holds = [device == owner_E[expert] for device in range(num_devices)]
        for _ in range(number):
            # in a node without the expert if there is one, where most room is
            counts = [len(held) for held in copies]
            device = _pick_device(
                nodes,
                [not there and count < room for there, count in zip(holds, counts, strict=True)],
                [(any(holds[d] for d in node), sum(counts[d] for d in node)) for node in nodes],
                [(count,) for count in counts],
            )
            if device is None:
                break
            copies[device].append(expert)
            holds[device] = True
    return copies


def calibrate(
    loads_E: Sequence[float],
    owner_E: Sequence[int],
    copies: Sequence[Sequence[int]],
    *,
    devices_per_node: int,
    slots_per_device: int,
    token_s: float,
    expert_s: float,
) -> list[list[int]]:
    """More copies for this iteration, now that its loads are known (Hecate's calibration).

    Algorithm 1 again, with the real loads and the remaining memory, for every number of hottest
    experts. The best plan is taken if it saves the busiest device more time than sending the copies
    costs, which nothing hides.

    Args:
        copies: Experts that are copied already, for each device.
        slots_per_device: Copies that a device has room for, those in `copies` included.
        token_s: Seconds to compute one token, in all passes.
        expert_s: Seconds to copy one expert and to bring its gradient back.

    Returns:
        For each device, more experts to copy to it; empty lists where nothing is gained.
    """
    num_devices = len(copies)
    holders = _holders(owner_E, copies)
    before = max(_device_loads(loads_E, holders, num_devices))
    room = slots_per_device - max((len(experts) for experts in copies), default=0)
    best: list[list[int]] = [[] for _ in range(num_devices)]
    best_s = 0.0
    for number in range(1, len(loads_E) + 1 if room > 0 else 0):
        plan = plan_copies(
            loads_E,
            owner_E,
            num_devices=num_devices,
            devices_per_node=devices_per_node,
            max_experts=number,
            slots_per_device=room,
        )
        extra = [
            [expert for expert in wanted if device not in holders[expert]]
            for device, wanted in enumerate(plan)
        ]
        after = max(_device_loads(loads_E, _holders(owner_E, copies, extra), num_devices))
        sent = [
            sum(owner_E[e] == device for some in extra for e in some)
            for device in range(num_devices)
        ]
        cost_s = expert_s * max(*sent, *map(len, extra))
        gain_s = token_s * (before - after) - cost_s
        if gain_s > best_s:
            best, best_s = extra, gain_s
    return best


def _holders(owner_E: Sequence[int], *plans: Sequence[Sequence[int]]) -> list[set[int]]:
    """Devices that hold each expert: its owner, and the targets of copies."""
    holders = [{owner} for owner in owner_E]
    for plan in plans:
        for device, experts in enumerate(plan):
            for expert in experts:
                holders[expert].add(device)
    return holders


def _device_loads(
    loads_E: Sequence[float], holders: Sequence[set[int]], num_devices: int
) -> list[float]:
    """Tokens that each device computes when those of an expert are split over its holders."""
    loads = [0.0] * num_devices
    for load, devices in zip(loads_E, holders, strict=True):
        for device in devices:
            loads[device] += load / len(devices)
    return loads


def reshard(
    loads_LE: Sequence[Sequence[float]], *, num_devices: int, devices_per_node: int, num_copied: int
) -> list[list[int]]:
    """`owner[layer][expert]`: the same number of experts for every device (Hecate's algorithm 2).

    The hottest `num_copied` experts of a layer are copied anyway, so their owners do not matter;
    the others are balanced within their layer.
    """
    _check_nodes(num_devices, devices_per_node)
    total = sum(len(loads_E) for loads_E in loads_LE)
    if total % num_devices:
        raise ValueError(f"{total} experts do not divide by {num_devices} devices")
    free = [total // num_devices] * num_devices
    owners = [[-1] * len(loads_E) for loads_E in loads_LE]
    nodes = _nodes(num_devices, devices_per_node)
    layers = sorted(range(len(loads_LE)), key=lambda layer: (-max(loads_LE[layer]), layer))
    for layer in layers:
        loads_E = loads_LE[layer]
        carried = [0.0] * num_devices
        for expert in _by_load(loads_E)[num_copied:]:
            device = _pick_device(
                nodes,
                [num > 0 for num in free],
                [(sum(carried[d] for d in node), sum(free[d] for d in node)) for node in nodes],
                list(zip(carried, free, strict=True)),
            )
            assert device is not None, "there are as many places as experts"
            owners[layer][expert] = device
            carried[device] += loads_E[expert]
            free[device] -= 1
    for owner_E in owners:
        for expert, device in enumerate(owner_E):
            if device < 0:
                owner_E[expert] = max(range(num_devices), key=lambda d: (free[d], -d))
                free[owner_E[expert]] -= 1
    return owners


def _check_nodes(num_devices: int, devices_per_node: int) -> None:
    if num_devices < 1 or devices_per_node < 1 or num_devices % devices_per_node:
        raise ValueError(
            f"{num_devices} devices are not a whole number of nodes of {devices_per_node}"
        )


def _by_load(loads_E: Sequence[float]) -> list[int]:
    return sorted(range(len(loads_E)), key=lambda expert: (-loads_E[expert], expert))


def _shares(loads: Sequence[float], total: int, most: int) -> list[int]:
    """`total` in proportion to the loads by largest remainder, none above `most`."""
    sum_loads = sum(loads)
    exact = [total * load / sum_loads if sum_loads > 0 else total / len(loads) for load in loads]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(loads)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    spare = 0
    for i, share in enumerate(shares):
        shares[i] = min(share + spare, most)
        spare = share + spare - shares[i]
    return shares


def _nodes(num_devices: int, devices_per_node: int) -> list[range]:
    devices = range(num_devices)
    return [devices[first : first + devices_per_node] for first in devices[::devices_per_node]]


def _pick_device(
    nodes: Sequence[range],
    is_usable: Sequence[bool],
    node_order: Sequence[tuple[float, ...]],
    device_order: Sequence[tuple[float, ...]],
) -> int | None:
    """The first usable device of the first node that has one, in the given orders."""
    usable = [n for n, node in enumerate(nodes) if any(is_usable[d] for d in node)]
    if not usable:
        return None
    best = nodes[min(usable, key=node_order.__getitem__)]
    return min((d for d in best if is_usable[d]), key=device_order.__getitem__)


ExpertsWith = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""`(rows_RD, counts_X, parameters) -> y_RD`: experts that read the parameters they are given."""


class SparseMaterialisation:
    """Copies of some experts on some ranks.

    Attributes:
        slots: where the experts lie while the copies exist: owned slots first, then copies.
        copies: for each rank, the experts that are copied to it.
        sent_experts: experts that this rank sends, with repetitions: the traffic of one pass.
    """

    def __init__(
        self,
        owners: ExpertSlots,
        copies: Sequence[Sequence[int]],
        group: Group | None,
        *,
        ranks_per_node: int = 1,
    ) -> None:
        """Plans the copies; a collective call.

        Args:
            owners: Where the experts lie, each on one rank.
            copies: For each rank, experts to copy to it; those it owns are skipped.

        Raises:
            ValueError: An expert has several owners, or the plan does not fit the group.
        """
        if owners.num_slices > 1 or any(len(held[0]) > 1 for held in owners.holders):
            raise ValueError("every expert must have exactly one owner")
        self.transport = as_transport(group)
        self._owners = owners
        self._ranks_per_node = ranks_per_node
        self.copies: list[list[int]] = [[] for _ in range(owners.num_ranks)]
        self._held = [owners.experts_of(rank) for rank in range(owners.num_ranks)]
        self._waves: list[SlotExchange] = []
        self._add(copies)

    def _add(self, copies: Sequence[Sequence[int]]) -> None:
        """Plans one more exchange of copies; experts that a rank holds already are skipped."""
        owners = self._owners
        if len(copies) != owners.num_ranks:
            raise ValueError(
                f"the plan is of {len(copies)} ranks, the experts lie on {owners.num_ranks}"
            )
        extra = [
            [expert for expert in dict.fromkeys(wanted) if expert not in held]
            for wanted, held in zip(copies, self._held, strict=True)
        ]
        unknown = [e for experts in extra for e in experts if not 0 <= e < owners.num_experts]
        if unknown:
            raise ValueError(f"there is no expert {unknown[0]} among {owners.num_experts}")
        width = owners.slots_per_rank
        sources = [divmod(owners.holders[e][0][0], width) for e in range(owners.num_experts)]
        wave = SlotExchange(
            [[sources[expert] for expert in experts] for experts in extra], width, self.transport
        )
        self._waves.append(wave)
        self._held = [held + more for held, more in zip(self._held, extra, strict=True)]
        self.copies = [held + more for held, more in zip(self.copies, extra, strict=True)]
        self.slots = ExpertSlots.from_ranks(
            self._held, owners.num_experts, ranks_per_node=self._ranks_per_node
        )
        self._num_empty = self.slots.slots_per_rank - len(self._held[self.transport.rank])
        self.sent_experts = sum(len(wave.sent_slots) for wave in self._waves)

    def start(self, parameters: Sequence[Tensor]) -> PendingParameters:
        """Starts copying parameters `[S, ...]`; attention can run meanwhile."""
        pending = PendingParameters(parameters)
        for wave in self._waves:
            pending.add(wave)
        pending.num_empty = self._num_empty
        return pending

    def extend(
        self, copies: Sequence[Sequence[int]], pending: PendingParameters | None = None
    ) -> SparseMaterialisation:
        """A plan with more copies, once the loads are known (calibration); a collective call.

        Copies of this plan in `pending` become those of the new plan: only new ones are sent.
        """
        longer = copy.copy(self)
        longer._waves = list(self._waves)
        longer._add(copies)
        if pending is not None:
            pending.add(longer._waves[-1])
            pending.num_empty = longer._num_empty
        return longer


class PendingParameters:
    """Copies of parameters on their way; `num_empty` slots after them stay empty."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._pending: list[list[Callable[[], Tensor]]] = [[] for _ in parameters]
        self.num_empty = 0

    def add(self, wave: SlotExchange) -> None:
        """Starts one more exchange of copies."""
        for parameter, pending in zip(self._parameters, self._pending, strict=True):
            pending.append(wave.start(parameter))

    def wait(self) -> list[Tensor]:
        """`[X, ...]` for each parameter: owned slots, copies, and slots that stay empty."""
        return [
            torch.cat(
                [
                    parameter,
                    *(wait() for wait in pending),
                    parameter.new_zeros((self.num_empty, *parameter.shape[1:])),
                ]
            )
            for parameter, pending in zip(self._parameters, self._pending, strict=True)
        ]


def loads_of_all(routing: Routing, transport: Transport) -> list[int]:
    """Tokens that each expert gets from all ranks together, `[E]`; a collective call."""
    ids = routing.ids_TK.flatten()
    own_E = torch.bincount(ids[ids < routing.num_experts], minlength=routing.num_experts)
    own_PE = own_E.expand(transport.size, -1).contiguous()
    return transport.exchange_numbers(own_PE).sum(dim=0).tolist()


def sparse_expert_parallel(
    x_TD: Tensor,
    routing: Routing,
    experts: ExpertsWith,
    parameters: Sequence[Tensor],
    plan: SparseMaterialisation,
    *,
    copies: PendingParameters | None = None,
    rematerialise: bool = False,
    overlap: Overlap | None = None,
    shared: Callable[[Tensor], Tensor] | None = None,
    wire: WireName = "exact",
) -> Tensor:
    """One layer of experts with copies; gradients arrive at the owners.

    Args:
        experts: Computes the tokens; it may not keep the parameters.
        parameters: `[S, ...]` this rank owns.
        copies: `plan.start(parameters)`, started earlier to hide it; made here by default.
        rematerialise: Drops the copies after the forward pass and makes them again in the backward
            pass.
    """
    materialised = (copies or plan.start(parameters)).wait()
    again = _Again(plan, parameters, materialised) if rematerialise else None

    def compute(rows_RD: Tensor, counts_X: Tensor) -> Tensor:
        if again is None:
            return experts(rows_RD, counts_X, materialised)
        rows_RD = _Backwards.apply(rows_RD, again.forget)  # pyright: ignore[reportAssignmentType]
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            y_RD = experts(rows_RD, counts_X, materialised)
        if rows_RD.shape[0] == 0:
            y_RD = tie_rows(y_RD, rows_RD, *materialised)
        again.num_stages += 1
        return _Backwards.apply(y_RD, again.fetch)  # pyright: ignore[reportReturnType]

    y_TD = expert_parallel(
        x_TD,
        routing,
        compute,
        plan.transport,
        slots=plan.slots,
        overlap=overlap,
        shared=shared,
        parameters=materialised,
        wire=wire,
    )
    if again is not None:
        again.storages.clear()  # the addresses mean nothing from now on
    return y_TD


class _Again:
    """Replaces materialised parameters among the saved tensors, and makes them again.

    Every stage of the backward pass asks for them, so all ranks exchange them at the same point,
    with or without rows; the last stage drops them.
    """

    def __init__(
        self,
        plan: SparseMaterialisation,
        parameters: Sequence[Tensor],
        materialised: Sequence[Tensor],
    ) -> None:
        self._plan = plan
        self._parameters = [parameter.detach() for parameter in parameters]
        self.storages = {t.untyped_storage().data_ptr(): i for i, t in enumerate(materialised)}
        self._fetched: list[Tensor] = []
        self.num_stages = 0
        self._num_left = 0

    def pack(self, tensor: Tensor) -> Tensor | tuple[int, torch.Size, tuple[int, ...], int]:
        index = self.storages.get(tensor.untyped_storage().data_ptr())
        if index is None:
            return tensor
        return index, tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def unpack(self, saved: Tensor | tuple[int, torch.Size, tuple[int, ...], int]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        index, shape, stride, offset = saved
        return self._fetched[index].as_strided(shape, stride, offset)

    def fetch(self) -> None:
        if self._num_left == 0:
            self._num_left = self.num_stages
            with torch.no_grad():
                self._fetched = self._plan.start(self._parameters).wait()

    def forget(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._fetched = []


class _Backwards(Function):
    """Nothing in the forward pass; calls a function before the backward pass goes on."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return rows_RD.view_as(rows_RD)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return grad_RD, None


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRules:
    """How much is copied.

    Attributes:
        max_experts: Experts of a layer that are copied at most: those whose transfer hides behind
            the computation before the layer (`hidden_experts`).
        slots_per_rank: Copies of a layer that a rank has room for.
        ranks_per_node: Consecutive ranks of a machine. Copies go to other machines first, and
            tokens to a holder on their own machine.
        window: Iterations whose mean loads are the forecast of the next one.
        rematerialise: Copies are dropped after the forward pass and made again in the backward
            pass: memory for traffic.
        token_s: Seconds to compute one row, in all passes; with `expert_s` it allows more copies
            once the loads are known (calibration).
        expert_s: Seconds to copy one expert and to bring its gradient back, hidden by nothing.
    """

    max_experts: int
    slots_per_rank: int
    ranks_per_node: int = 1
    window: int = 5
    rematerialise: bool = False
    token_s: float = 0.0
    expert_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("max_experts", 0), ("slots_per_rank", 0), ("window", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if min(self.token_s, self.expert_s) < 0 or bool(self.token_s) != bool(self.expert_s):
            raise ValueError(
                "calibration needs token_s and expert_s, both positive, got "
                f"{self.token_s} and {self.expert_s}"
            )


def hidden_experts(compute_s: float, bytes_per_s: float, expert_bytes: int) -> int:
    """Experts whose copying takes no longer than the computation before a layer."""
    return int(compute_s * bytes_per_s / expert_bytes)


class SparseExperts(ParallelExperts):
    """Experts with one owner each, and copies of hot ones for an iteration.

    Arguments as of `ParallelExperts`, whole experts only. `num_copied` counts the experts that this
    rank sent in the last forward pass.

    Raises:
        ValueError: Experts cut into slices, or ranks that do not divide by machines.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        groups: LayoutGroups | Group | None = None,
        *,
        rules: CopyRules,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, groups, **options)
        if self.slots.num_slices > 1:
            raise ValueError("only whole experts are copied; these are cut into slices (etp)")
        if self.slots.num_ranks % rules.ranks_per_node:
            raise ValueError(
                f"{self.slots.num_ranks} ranks are not a whole number of machines of "
                f"{rules.ranks_per_node}"
            )
        self.rules = rules
        self.num_copied = 0
        self._loads: deque[list[int]] = deque(maxlen=rules.window)
        self._plan: SparseMaterialisation | None = None
        self._pending: PendingParameters | None = None

    @property
    def forecast_E(self) -> list[float]:
        """Mean tokens of each expert, of all ranks, over the last iterations."""
        if not self._loads:
            return [0.0] * self.num_experts
        return [sum(loads) / len(self._loads) for loads in zip(*self._loads, strict=True)]

    def prepare(self) -> None:
        """Starts this iteration's copies, which travel while earlier layers compute.

        A collective call, once before each forward pass, which makes it otherwise. No parameter may
        change in between.
        """
        self._plan = SparseMaterialisation(
            self.slots, self._copies(), self.transport, ranks_per_node=self.rules.ranks_per_node
        )
        self._pending = self._plan.start(self._owned())

    def prepare_before(self, module: nn.Module) -> None:
        """Calls `prepare` before each forward pass of a module, such as the attention."""
        module.register_forward_pre_hook(lambda *_: self.prepare())

    def forward(
        self,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        *,
        shared: Callable[[Tensor], Tensor] | None = None,
        later: bool = False,
    ) -> Any:
        if self._pending is None:
            self.prepare()
        if later:  # copies travel until then
            return partial(self.forward, x_TD, ids_TK, weights_TK, shared=shared)
        plan, pending = self._plan, self._pending
        assert plan is not None
        assert pending is not None
        self._plan = self._pending = None
        routing = Routing(ids_TK, weights_TK, self.num_experts)
        loads_E = loads_of_all(routing, self.transport)
        self._loads.append(loads_E)
        if self.rules.token_s:
            extra = calibrate(
                loads_E,
                self._owners(),
                plan.copies,
                devices_per_node=self.rules.ranks_per_node,
                slots_per_device=self.rules.slots_per_rank,
                token_s=self.rules.token_s,
                expert_s=self.rules.expert_s,
            )
            plan = plan.extend(extra, pending) if any(extra) else plan
        self.num_copied = plan.sent_experts
        stacked = self.stacked()
        is_there = [tensor is not None for tensor in stacked.tensors()]

        def compute(rows_RD: Tensor, counts_X: Tensor, read: Sequence[Tensor]) -> Tensor:
            remaining = iter(read)
            tensors = [next(remaining) if there else None for there in is_there]
            return grouped_expert_mlp(
                rows_RD,
                counts_X,
                replace_tensors(stacked, tensors),
                activation=self.activation,
                impl=self.impl,
                recompute=self.recompute,
            )

        return sparse_expert_parallel(
            self._as_experts_read(x_TD),
            routing,
            compute,
            self._owned(),
            plan,
            copies=pending,
            rematerialise=self.rules.rematerialise,
            overlap=self.overlap,
            shared=shared,
            wire=self.wire,
        )

    def move(self, slots: Any, optimizer: torch.optim.Optimizer | None = None) -> int:
        if self._pending is not None:
            raise ValueError("copies are on their way: owners change between two iterations")
        return super().move(slots, optimizer)

    def _owned(self) -> list[Tensor]:
        return [tensor for tensor in self.stacked().tensors() if tensor is not None]

    def _owners(self) -> list[int]:
        return [held[0][0] // self.slots.slots_per_rank for held in self.slots.holders]

    def _copies(self) -> list[list[int]]:
        if not self._loads:
            return [[] for _ in range(self.slots.num_ranks)]
        return plan_copies(
            self.forecast_E,
            self._owners(),
            num_devices=self.slots.num_ranks,
            devices_per_node=self.rules.ranks_per_node,
            max_experts=self.rules.max_experts,
            slots_per_device=self.rules.slots_per_rank,
        )


def reshard_layers(
    layers: Sequence[SparseExperts], optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Gives the experts of several layers new owners by their forecasts (Hecate's algorithm 2).

    Every rank ends with the same number of experts over all layers. A collective call between two
    iterations, every hundred or so; the optimizer's states of the parameters move along.

    Returns:
        Experts that travelled, over all ranks.

    Raises:
        ValueError: The experts of all layers do not divide by the ranks.
    """
    rules = layers[0].rules
    num_ranks = layers[0].slots.num_ranks
    owners = reshard(
        [layer.forecast_E for layer in layers],
        num_devices=num_ranks,
        devices_per_node=rules.ranks_per_node,
        num_copied=min(rules.max_experts, rules.slots_per_rank),
    )
    num_moved = 0
    for layer, owner_E in zip(layers, owners, strict=True):
        wanted = [[e for e, owner in enumerate(owner_E) if owner == r] for r in range(num_ranks)]
        slots = keep_in_place(wanted, layer.slots)
        if slots.holders != layer.slots.holders:
            num_moved += layer.move(slots, optimizer)
    return num_moved


__all__ = [
    "CopyRules",
    "SparseExperts",
    "SparseMaterialisation",
    "hidden_experts",
    "reshard_layers",
    "sparse_expert_parallel",
]
