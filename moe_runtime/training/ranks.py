"""Training by one process or by several: division of the work, and sums over the processes.

Several processes share a step's micro-batches. Each holds its share of the experts, and rows travel
to them. With tensor, context or pipeline parallelism, several processes compute one micro-batch
together, as one data-parallel rank. A configuration trains the same model with any number of
processes.

`torch.distributed.pipelining` schedules the stages. Huang et al., "GPipe" (2019); Narayanan et al.,
"PipeDream" (2019) for one forward, one backward (1F1B).
"""

import contextlib
import copy
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError, RankFailureError
from moe_runtime.files import locked, make_folders
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.training.run_config import PipelineSchedule, TrainConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.models.lm.parallel import StageModule
    from moe_runtime.parallel import (
        ExpertSlots,
        LayoutGroups,
        ParallelExperts,
        ParallelLayout,
        Rebalancer,
    )
    from moe_runtime.training.exchange_choice import AutoExchange


def require_compiler(device: torch.device) -> None:
    """Refuses a missing compiler in one line; `torch.compile` would print a long error."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError(
            "run.compile needs a C++ compiler on the CPU (g++ or clang++), and none is on the "
            "PATH; install one, or set run.compile = false"
        )


def autocast_of(precision: str, device_type: str) -> torch.autocast:
    """A context in which matrix products have the precision `run.precision`.

    It caches no narrow copies of weights: torch drops them only at the end of the outermost
    autocast, so inside a caller's, the next step would use weights from before the update.
    """
    return torch.autocast(
        device_type, dtype=torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False
    )


T = TypeVar("T")
_POLL_S = 0.02
_SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
"""torch's names."""
_MADE_ELSEWHERE = ("sparse", "switching")
_TAKEN_APART: tuple[PipelineSchedule, ...] = ("zero_bubble", "zbv")
"""Schedules that compute gradients of inputs first and of weights later."""


class Pipeline:
    """Takes micro-batches through all stages; every method is a collective call of the stages.

    The losses are those of this stage times the number of stages, so that the mean over the stages
    is the loss of the whole model.

    Args:
        group: processes of all stages, in order.
        loss_scale: factor of the cross-entropy; the stages scale the losses of gates.
    """

    def __init__(
        self,
        modules: "Sequence[StageModule]",
        group: "ProcessGroup",
        *,
        schedule: PipelineSchedule,
        loss_scale: float,
    ) -> None:
        self._modules = list(modules)
        self._group = group
        self._schedule = schedule
        self._loss_scale = loss_scale
        # of the last call that trained and the last that measured: lengths change rarely
        self._built: dict[bool, tuple[tuple[int, ...], Any]] = {}

    def backward(self, parts: Sequence[Tensor]) -> list[Losses]:
        """Adds the gradients of windows `[B, C + 1]` of equal shapes; returns their losses."""
        return self._pass(parts, is_training=True)

    @torch.no_grad()
    def measure(self, parts: Sequence[Tensor], *, at_once: int) -> list[Losses]:
        """The losses of windows, without gradients; at most `at_once` parts are in flight."""
        found: list[Losses] = []
        if len(self._modules) > 1:
            for part in parts:
                self._measure_in_turn(part)
            return self._losses_found()
        start = 0
        while start < len(parts):
            end = start + 1
            while end < min(len(parts), start + at_once) and parts[end].shape == parts[start].shape:
                end += 1
            found += self._pass(parts[start:end], is_training=False)
            start = end
        return found

    def _pass(self, parts: Sequence[Tensor], *, is_training: bool) -> list[Losses]:
        schedule = self._schedule_for(parts, is_training=is_training)
        windows = torch.cat(list(parts))
        with _own_errors():
            schedule.step(target=windows, windows=windows, return_outputs=False)
        return self._losses_found()

    def _measure_in_turn(self, windows: Tensor) -> None:
        """One stage after another: torch's schedules of two stages always compute gradients."""
        import torch.distributed as dist

        size, group = self._group.size(), self._group
        here = {module.stage.index: module for module in self._modules}

        def rank_of(stage: int) -> int:
            return dist.get_global_rank(group, min(stage, 2 * size - 1 - stage))

        passed: tuple[Tensor, ...] = ()
        for number, module in sorted(here.items()):
            if number > 0 and number - 1 not in here:
                shapes = module.received_of(windows)
                passed = tuple(torch.empty_like(x, device=windows.device) for x in shapes)
                for tensor in passed:
                    dist.recv(tensor, rank_of(number - 1), group=group)
            result = module(*passed, windows=windows)
            passed = result if isinstance(result, tuple) else (result,)
            if not module.stage.is_last and number + 1 not in here:
                for tensor in passed:
                    dist.send(tensor.contiguous(), rank_of(number + 1), group=group)

    def _losses_found(self) -> list[Losses]:
        """The losses of the calls since the last time, of all stages of this process."""
        # recomputed blocks in the backward pass are no calls of the stage
        calls = zip(*(module.found for module in self._modules), strict=True)
        found = [_total(losses, self._group.size()) for losses in calls]
        for module in self._modules:
            module.found.clear()
        return found

    def _schedule_for(self, parts: Sequence[Tensor], *, is_training: bool) -> Any:
        from torch.distributed import pipelining

        key = (len(parts), *parts[0].shape)
        if is_training not in self._built or self._built[is_training][0] != key:
            # torch would find the shapes by calls of its own, which exchange rows and count loads
            stages = [
                pipelining.PipelineStage(
                    module,
                    module.stage.index,
                    module.stage.count,
                    parts[0].device,
                    input_args=module.received_of(parts[0]),
                    output_args=module.sent_of(parts[0]),
                    group=self._group,
                )
                for module in self._modules
            ]
            name = self._schedule if is_training else "gpipe"
            make = getattr(pipelining, _SCHEDULES[name])
            own = stages if name in _TAKEN_APART else stages[0]
            loss = self._scaled if is_training else None
            self._built[is_training] = (key, make(own, len(parts), loss, scale_grads=False))
        return self._built[is_training][1]

    def _scaled(self, cross_entropy: Tensor, _windows: Tensor) -> Tensor:
        return cross_entropy * self._loss_scale


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Unwraps the errors of a stage's forward pass, which torch wraps."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None or "failed to run forward" not in str(error):
            raise
        raise error.__cause__ from None


def _total(parts: Sequence[Losses], factor: int) -> Losses:
    """The sum of several stages' shares of one micro-batch's losses, times a factor."""
    values: dict[str, Any] = {}
    for name in Losses.__dataclass_fields__:
        shares = [getattr(part, name) for part in parts]
        values[name] = None if shares[0] is None else sum(shares) * factor
    return Losses(**values)


class Offload(Protocol):
    """Moves activations of a stage out of memory, for one forward pass after another."""

    def saving(self) -> contextlib.AbstractContextManager[object]: ...

    def close(self) -> None: ...


class OneRank:
    """A process that trains alone.

    Attributes:
        data_rank: index of this process's micro-batch among those computed side by side.
        loss_share: this process's share of its micro-batch's loss, which the processes of a
            data-parallel rank add up.
        pipeline: takes micro-batches through stages; None if each process has all layers.
        exchange: the choice of "auto" in `[parallel]`; empty without one.
        layout_groups: groups of the layout; None for one process.
        group: all processes, for torch; None for one process.
    """

    rank = 0
    size = 1
    data_rank = 0
    num_data_ranks = 1
    loss_share = 1.0
    pipeline: "Pipeline | None" = None
    exchange = ""
    layout_groups: "LayoutGroups | None" = None
    group: "ProcessGroup | None" = None

    def spread(self, model: LanguageModel) -> None: ...

    def draw_apart(self, seed: int, step: int) -> None:
        """Seeds the random numbers of gates and dropout, except in the first data-parallel rank.

        Called before each step, so that a resumed run draws the same numbers.
        """

    def part(self, items: Sequence[T]) -> list[T]:
        """This data-parallel rank's share of the items; the number of ranks divides theirs."""
        return list(items)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes; a collective call, as the following."""
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def texts(self, text: str) -> list[str]:
        """The texts of all processes, by rank."""
        return [text]

    def first_text(self, text: str) -> str:
        """The first non-empty text of all processes; empty if all are."""
        return next(filter(None, self.texts(text)), "")

    def for_background(self) -> "OneRank":
        """The same processes, for exchanges of another thread."""
        return self

    def require_shared(self, folder: Path) -> None:
        """Refuses a folder that not all processes see, as on machines without a shared disk."""
        with contextlib.ExitStack() as stack:
            probe = ""
            if self.rank == 0:
                make_folders(folder)
                probe = f"{secrets.token_hex(8)}.shared"
                stack.enter_context(locked(folder / probe))
            is_there = (folder / self.first_text(probe)).exists()
            lacking = self.first_text("" if is_there else f"rank {self.rank} of {self.size}")
        if lacking:
            raise CheckpointError(
                f"{folder}: {lacking} does not see what rank 0 writes there; name an output folder "
                "that all machines share"
            )

    def begin_part(self, *, is_last: bool) -> None:
        """Called before each micro-batch."""

    def after_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        """May move experts and their states in a `torch.optim.Optimizer`; a collective call."""

    def reduce_gradients(self, named: Mapping[str, Tensor]) -> None: ...

    def gradient_norm(self, named: Mapping[str, Tensor]) -> float:
        gradients = [p.grad for p in named.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """The block runs in the first process, and then in the others."""
        yield

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block with exchanges by torch; names a process that is missing."""
        del what
        return contextlib.nullcontext()

    def barrier(self) -> None:
        self.any(False)

    def close(self) -> None:
        """Ends background work of this process."""


class Processes(OneRank):
    """One of the processes of a `torch.distributed` world that train together.

    Attributes:
        here: processes of the group on this machine.

    Raises:
        ValueError: the layout is of another number of processes.
        RankFailureError: a process has another layout or version.
    """

    def __init__(self, layout: "ParallelLayout", timeout_s: float) -> None:
        import torch.distributed as dist

        from moe_runtime.parallel import FlatTransport, LayoutGroups
        from moe_runtime.parallel.communication.transport import (
            ranks_here,
            require_same,
            software_facts,
        )
        from moe_runtime.parallel.communication.watch import CollectiveMonitor

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._layout, self._timeout_s = layout, timeout_s
        places = layout.coordinates(self.rank, "dense")
        self.data_rank, self.num_data_ranks = places["dp"], layout.dp
        self._stage = places["pp"]
        self.groups = LayoutGroups(layout, timeout_s=timeout_s)
        self.groups.make_ends()
        self.layout_groups = self.groups
        group = self.groups.make("dense", "tp", "cp", "dp", "pp")
        assert group is not None, "several processes are more than one"
        self._group = self.group = group
        self._watch = CollectiveMonitor(group, timeout_s)
        transport = FlatTransport(group, timeout_s=timeout_s)
        require_same(transport, {**software_facts(), "the layout": str(layout)})
        self.here = len(ranks_here(transport))

    def draw_apart(self, seed: int, step: int) -> None:
        number = self.data_rank + self.num_data_ranks * self._stage
        if number > 0:
            torch.manual_seed((seed + 1_000_003 * step + number) % 2**63)

    def part(self, items: Sequence[T]) -> list[T]:
        return list(items[self.data_rank :: self.num_data_ranks])

    def mean(self, values: Tensor) -> Tensor:
        total = values.clone()
        self.groups.all_reduce(total, self._group, "means")
        return total / self.size

    def any(self, flag: bool) -> bool:
        votes = torch.tensor(float(flag))
        self.groups.all_reduce(votes, self._group, "requests to stop")
        return bool(votes > 0)

    def texts(self, text: str) -> list[str]:
        import torch.distributed as dist

        texts = [""] * self.size
        with self.watched("an exchange of texts"):
            dist.all_gather_object(texts, text, group=self._group)
        return texts

    def for_background(self) -> "Processes":
        import torch.distributed as dist

        from moe_runtime.parallel.communication.watch import CollectiveMonitor, backend_limit

        timeout_s, everybody = self._timeout_s, list(range(self.size))
        group = dist.new_group(everybody, timeout=backend_limit(timeout_s), backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        found = copy.copy(self)
        found._group = found.group = group
        found._watch = CollectiveMonitor(group, timeout_s)
        return found

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._watch.over_torch(what)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        store, key = self._group.get_group_store(), "moe/first/done"
        if self.rank == 0:
            outcome = "failed"
            try:
                yield
                outcome = "done"
            finally:
                store.set(key, outcome)
            return
        # no time limit; an ended first process is noticed
        while not store.check([key]):
            if 0 in self._watch.ended_ranks():
                raise RankFailureError(f"rank 0 of {self.size} has ended", ranks=(0,))
            time.sleep(_POLL_S)
        if store.get(key) == b"failed":
            raise RankFailureError(f"rank 0 of {self.size} has failed", ranks=(0,))
        yield


class SeveralRanks(Processes):
    """One of the processes that train a language model together.

    Args:
        folder: base of relative paths.
        make_experts: makes a layer's experts, as `ParallelExperts` does, if they are sparse or
            switching.
        make_offload: makes what offloads activations of a stage, as `StageOffload` does.

    Raises:
        ValueError: the layout or the number of parts does not fit the number of processes.
        CheckpointError: `parallel.placement` cannot be read, or is for other processes.
        RankFailureError: a process has another layout or version.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path = Path(),
        make_experts: "Callable[..., ParallelExperts] | None" = None,
        make_offload: "Callable[..., Offload] | None" = None,
    ) -> None:
        import torch.distributed as dist

        from moe_runtime.parallel import ParallelLayout
        from moe_runtime.parallel.placement_map import load_placement_map

        own, size = config.parallel, dist.get_world_size()
        self._config = config
        layout = ParallelLayout(
            world_size=size,
            tp=own.tp,
            cp=own.cp,
            pp=own.pp,
            etp=own.etp,
            ep=own.ep or max(1, size // (own.etp * own.pp)),
        )
        _refuse(config, layout.dp)
        config.refuse_idle_copies(layout.ep)
        if make_experts is None and own.experts in _MADE_ELSEWHERE:
            raise ValueError(f"experts that are {own.experts} need a make_experts that makes them")
        if make_offload is None and own.offload:
            raise ValueError("parallel.offload needs a make_offload that makes what offloads")
        self._make_experts, self._make_offload = make_experts, make_offload
        self._offload: Offload | None = None
        self._output = folder / config.run.output
        self._map = None
        if own.placement is not None:
            self._map = load_placement_map(folder / own.placement)
            self._map.require(self._map.signature, num_ranks=layout.ep)
        self._rebalancers: list[Rebalancer] = []
        self._spread: dict[str, ParallelExperts] = {}
        self._sharded: Any = None
        if config.run.host_memory is not None:
            _refuse_offloaded(config, layout.edp)
        super().__init__(layout, own.timeout_s)
        # a sum over a data-parallel rank is divided by the parts of each sequence only
        self.loss_share = 1 / layout.tp
        self._auto: AutoExchange | None = None
        if own.transport in ("hierarchical", "auto"):
            nodes = own.ranks_per_node or self.here
            is_asked = own.transport == "hierarchical" or own.ranks_per_node > 0
            are_alike = len(set(self.texts(str(nodes)))) == 1
            if is_asked and not are_alike:
                raise ValueError("machines differ in their processes: give parallel.ranks_per_node")
            if is_asked or (are_alike and self.groups.has_machines(nodes)):
                self.groups.make_nodes(nodes)

    def spread(self, model: LanguageModel) -> None:
        from moe_runtime.models.lm.parallel import (
            divide_sequences,
            leave_exchanges,
            shard_dense,
            spread_experts,
        )
        from moe_runtime.parallel import Overlap

        numbers = {id(layer): number for number, layer in enumerate(model.routed_layers())}
        self._choose(model)
        stages = self._keep_stages(model)
        own = self._config.parallel
        assert own.overlap != "auto", "it is replaced before"
        panels = max(2, own.overlap) if own.transport == "panels" else 1
        options: dict[str, Any] = {"overlap": Overlap(degree=own.overlap, panels=panels)}
        if self._make_experts is not None and own.experts in _MADE_ELSEWHERE:
            options["make"] = self._make_experts
        here = [numbers[id(layer)] for layer in model.routed_layers()]
        slots = self._slots(model, here)
        spread_experts(model, self.groups, wire=own.wire, slots=slots, **options)
        self._follow_experts(model)
        divide_sequences(model, self.groups)
        for stage in stages:
            stage.model.part = model.part
        if own.zero:
            root = stages[0] if stages else None
            shard_dense(model, self.groups, root=root, keeps_gathered=own.zero < 3)
            self._sharded = model if own.zero == 1 and root is None else None
        if self._config.run.compile:
            leave_exchanges(model)

    def _choose(self, model: LanguageModel) -> None:
        """Replaces what is "auto" in `[parallel]`."""
        if self._config.parallel.is_auto:
            from moe_runtime.training.exchange_choice import AutoExchange

            can_gather = self._make_experts is not None
            self._auto = AutoExchange(self._config, model, self.groups, self, can_gather=can_gather)
            self.groups.ranks_per_node = self._auto.ranks_per_node
            self._config = replace(self._config, parallel=self._auto.resolved)
            self.exchange = str(self._auto)

    def _slots(self, model: LanguageModel, layers: Sequence[int]) -> "list[ExpertSlots] | None":
        """The first slots of some layers' experts; None for equal runs of experts."""
        from moe_runtime.parallel import ExpertSlots
        from moe_runtime.policies.placement import Devices, rebalance
        from moe_runtime.policies.placement.base import slots_needed
        from moe_runtime.training.tracing import signature_of_config

        own, moe = self._config.parallel, self._config.model.moe
        size, each = self._layout.ep, self.groups.ranks_per_node
        if moe is None:
            return None
        if self._map is not None:
            self._map.require(signature_of_config(model.config), num_ranks=size)
            placed = [self._map.experts_of_ranks(layer) for layer in layers]
        elif own.experts == "rebalanced":
            # all slots of the run, so that no parameter changes its shape
            slots_needed(moe.num_experts, own.copies, size)
            equal, devices = (
                np.ones((1, moe.num_experts)),
                Devices(num_nodes=size // each, gpus_per_node=each),
            )
            found = rebalance(equal, devices, num_slots=moe.num_experts + own.copies)
            placed = [found.expert_of_slot[0].reshape(size, -1).tolist()] * len(layers)
        else:
            return None
        return [
            ExpertSlots.from_ranks(
                # in ascending order, for experts off memory; empty slots last
                [sorted(experts, key=lambda e: (e < 0, e)) for experts in ranks],
                moe.num_experts,
                ranks_per_node=each,
            )
            for ranks in placed
        ]

    def _follow_experts(self, model: LanguageModel) -> None:
        """Notes the experts of this process, and starts rebalancers and copies."""
        from moe_runtime.models.lm.attention import Attention
        from moe_runtime.parallel import ParallelExperts, Rebalancer

        own = self._config.parallel
        self._spread = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, ParallelExperts)
        }
        if self._auto is not None:
            self._rebalancers = self._auto.follow(list(self._spread.values()), self.groups)
        elif own.experts == "rebalanced":
            self._rebalancers = [
                Rebalancer(
                    experts,
                    every=own.rebalance_every,
                    num_replicas=own.copies,
                    groups=self.groups,
                )
                for experts in self._spread.values()
            ]
        for block in model.own_blocks() if own.experts == "sparse" else ():
            # copies travel while the attention before the experts computes
            attention = [module for module in block.modules() if isinstance(module, Attention)]
            if block.routed is not None:
                prepare: Any = block.routed.experts
                prepare.prepare_before(attention[-1])

    def begin_part(self, *, is_last: bool) -> None:
        if self._sharded is not None:
            # whole gradients are summed, and reduced once
            self._sharded.set_requires_gradient_sync(is_last)
            self._sharded.set_reshard_after_backward(is_last)

    def after_step(self, optimizer: torch.optim.Optimizer | None) -> None:
        for rebalancer in self._rebalancers:
            rebalancer.step(optimizer)
        if self._auto is not None:
            self._auto.step()

    def _keep_stages(self, model: LanguageModel) -> "list[StageModule]":
        """Keeps this process's stages of the model; returns none without a pipeline."""
        group = self.groups.group("dense", "pp")
        if group is None:
            return []
        from moe_runtime.models.lm.parallel import Stage, StageModule, keep_stages, piece_of

        scale = self.loss_share * self.num_data_ranks / self._config.data.micro_batches
        device = next(model.parameters()).device.type
        order, count = self._config.parallel.schedule, self._layout.pp
        numbers = [self._stage]
        if order == "zbv":
            numbers, count = [self._stage, 2 * count - 1 - self._stage], 2 * count
        stages = [
            StageModule(
                piece_of(model) if len(numbers) > 1 else model,
                Stage(number, count),
                loss_scale=scale,
                autocast=lambda: autocast_of(self._config.run.precision, device),
            )
            for number in numbers
        ]
        if len(stages) > 1:
            keep_stages(model, stages)
        if self._make_offload is not None and self._config.parallel.offload:
            parts = self._config.data.micro_batches // self.num_data_ranks
            place = self._output / f"activations-{self.rank}"
            self._offload = self._make_offload(place, stages[0], parts, self._config.parallel)
            stages[0].saving = self._offload.saving
        self.pipeline = Pipeline(stages, group, schedule=order, loss_scale=scale)
        return stages

    def close(self) -> None:
        if self._offload is not None:
            self._offload.close()

    def reduce_gradients(self, named: Mapping[str, Tensor]) -> None:
        dense, experts = _divided(named)
        for module in self._spread.values():
            module.sum_replica_gradients()
        self.groups.reduce_dense_gradients(dense)
        self.groups.reduce_expert_gradients(experts)
        self.groups.sum_end_gradients(self._tied(named))

    def _tied(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The embedding, if the first and the last stage have a copy each."""
        is_end = self._layout.pp > 1 and self._config.model.tie_embeddings
        # with zbv, one process has both ends
        is_end = is_end and self._config.parallel.schedule != "zbv"
        return [p for name, p in named.items() if is_end and name == "embedding.weight"]

    def gradient_norm(self, named: Mapping[str, Tensor]) -> float:
        dense, experts = _divided(named)
        # the first stage counts tensors that the last has a copy of
        copies = set(self._tied(named)) if self._stage > 0 else set()
        several = [
            (parameter, module.slots)
            for module in self._spread.values()
            if module.has_copies
            for parameter in module.parameters()
        ]
        copied = {id(parameter) for parameter, _ in several}
        return self.groups.gradient_norm(
            [parameter for parameter in dense if parameter not in copies],
            [parameter for parameter in experts if id(parameter) not in copied],
            several,
        )


def together(group: "ProcessGroup | None", timeout_s: float = 300.0) -> Processes | None:
    """The processes of a group that share experts and micro-batches; None for one process."""
    if group is None or group.size() == 1:
        return None
    from moe_runtime.parallel import ParallelLayout

    return Processes(ParallelLayout(world_size=group.size(), ep=group.size()), timeout_s)


def _refuse(config: TrainConfig, num_data_ranks: int) -> None:
    from moe_runtime.models.lm.parallel import check_layout, check_stages

    data, own = config.data, config.parallel
    if config.is_research:
        raise ValueError("the keys of [research] are for one process; leave them or torchrun out")
    if data.micro_batches % num_data_ranks:
        raise ValueError(
            f"data.micro_batches ({data.micro_batches}) must be a multiple of the {num_data_ranks} "
            "processes that compute them side by side; --set data.micro_batches="
            f"{-(-data.micro_batches // num_data_ranks) * num_data_ranks}"
        )
    check_stages(config.model, own.pp, per_process=1 + (own.pp > 1 and own.schedule == "zbv"))
    is_apart = own.pp > 1 and own.schedule in _TAKEN_APART
    if is_apart and (own.zero or config.run.recompute or config.run.compile):
        raise ValueError(
            f"parallel.schedule {own.schedule} takes the backward pass apart, which parallel.zero, "
            "run.recompute and run.compile do not; leave one of them out"
        )
    each = data.micro_batches // num_data_ranks
    if own.schedule == "zero_bubble" and each > own.pp and each % own.pp:
        raise ValueError(
            f"parallel.schedule {own.schedule} goes in rounds of parallel.pp = {own.pp} "
            f"micro-batches, {each} for each pipeline are not whole rounds; --set "
            f"data.micro_batches={-(-each // own.pp) * own.pp * num_data_ranks}"
        )
    _refuse_experts(config)
    if own.pp > 1 and config.run.host_memory is not None:
        raise ValueError(
            f"run.host_memory cannot be combined with parallel.pp ({own.pp}); leave one of them out"
        )
    if own.schedule == "1f1b" and data.micro_batches < own.pp * num_data_ranks:
        raise ValueError(
            f"parallel.schedule 1f1b needs a micro-batch for each of the parallel.pp = {own.pp} "
            f"stages, {data.micro_batches} for {num_data_ranks} pipelines are too few; --set "
            f"data.micro_batches={own.pp * num_data_ranks}, or take the schedule gpipe"
        )
    contexts = {data.context, data.short_context or data.context}
    check_layout(config.model, tp=own.tp, cp=own.cp, contexts=contexts)


def _refuse_experts(config: TrainConfig) -> None:
    own, moe = config.parallel, config.model.moe
    if moe is None:
        if own.experts != "static" or own.placement is not None:
            raise ValueError("parallel.experts and parallel.placement are for models with experts")
        return
    if own.experts not in ("static", "auto") and config.run.compile:
        raise ValueError(
            f"run.compile and parallel.experts {own.experts} do not go together; leave one of them "
            "out"
        )
    if own.experts == "sparse" and config.run.recompute:
        raise ValueError(
            "run.recompute computes a layer again, and by then parallel.experts sparse has copied "
            "other experts; leave one of them out"
        )
    if moe.recompute and (own.transport == "panels" or own.experts == "switching"):
        raise ValueError(
            "model.moe.recompute is for experts that are computed at once: leave it out, or "
            "parallel.transport panels and parallel.experts switching"
        )


def _refuse_offloaded(config: TrainConfig, num_copies: int) -> None:
    own = config.parallel
    for name, degree in (("tp", own.tp), ("pp", own.pp), ("etp", own.etp)):
        if degree > 1:
            raise ValueError(
                f"run.host_memory and parallel.{name} ({degree}) do not go together yet: every "
                "process has whole experts, and all of the dense part; leave one of them out"
            )
    if own.zero:
        raise ValueError(
            "run.host_memory and parallel.zero do not go together yet; leave one of them out"
        )
    if own.experts != "static" or own.overlap != 1 or own.transport in ("panels", "auto"):
        raise ValueError(
            "with run.host_memory experts are computed once for a step, where they are: "
            "parallel.experts must be static, overlap 1 and transport flat or hierarchical"
        )
    if num_copies > 1:
        raise ValueError(
            f"with run.host_memory every expert lies in one process; parallel.ep ({own.ep}) would "
            f"make {num_copies} copies, leave it out"
        )


def _divided(named: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    dense = [p for name, p in named.items() if ".experts." not in name]
    experts = [p for name, p in named.items() if ".experts." in name]
    return dense, experts
