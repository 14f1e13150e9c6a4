"""Training by one process or by several: which part is whose, and what has to be added up.

Several processes share a step's micro-batches, each holds its share of the experts, and rows travel
to them. With tensor, context or pipeline parallelism some of them compute one micro-batch together,
as one data-parallel rank. The same configuration trains the same model whatever the number of
processes.

`torch.distributed.pipelining` schedules the stages. Huang et al., "GPipe" (2019); Narayanan et al.,
"PipeDream" (2019) for one forward, one backward (1F1B).
"""

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError, RankFailureError
from moe_runtime.files import locked, make_folders
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.training.run_config import PipelineSchedule, TrainConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.models.lm.parallel import StageModule
    from moe_runtime.parallel import LayoutGroups


def require_compiler(device: torch.device) -> None:
    """Refuses early what `torch.compile` would say in the first step, at length."""
    if device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise ValueError(
            "run.compile needs a C++ compiler on the CPU (g++ or clang++), and none is on the "
            "PATH; install one, or set run.compile = false"
        )


def autocast_of(precision: str, device_type: str) -> torch.autocast:
    """The context in which a run's matrix products have its `run.precision`.

    It keeps no narrow copies of weights: torch drops those at the end of the outermost autocast
    alone, and inside of a caller's the next step would compute with weights from before the update.
    """
    return torch.autocast(
        device_type, dtype=torch.bfloat16, enabled=precision == "bfloat16", cache_enabled=False
    )


T = TypeVar("T")
_POLL_S = 0.02


class Pipeline:
    """Takes micro-batches through all stages; every method is a collective call of the stages.

    The losses that it gives are those of this stage times the number of stages, so that the mean
    over the stages is that of the whole model.

    Args:
        group: The processes of all stages, in their order.
        loss_scale: Factor of the cross-entropy that is trained on, as the stages have it for the
            losses of gates.
    """

    def __init__(
        self,
        module: "StageModule",
        group: "ProcessGroup",
        *,
        schedule: PipelineSchedule,
        loss_scale: float,
    ) -> None:
        self._module = module
        self._group = group
        self._schedule = schedule
        self._loss_scale = loss_scale
        # Of the last call that trained and of the last that measured: lengths change rarely.
        self._built: dict[bool, tuple[tuple[int, ...], Any]] = {}

    def backward(self, parts: Sequence[Tensor]) -> list[Losses]:
        """Adds the gradients of micro-batches, windows `[B, C + 1]` of equal shapes; the losses of
        each."""
        return self._pass(parts, is_training=True)

    @torch.no_grad()
    def measure(self, parts: Sequence[Tensor], *, at_once: int) -> list[Losses]:
        """The losses of windows, without gradients; at most `at_once` parts are under way
        together."""
        found: list[Losses] = []
        start = 0
        while start < len(parts):
            end = start + 1
            while end < min(len(parts), start + at_once) and parts[end].shape == parts[start].shape:
                end += 1
            found += self._pass(parts[start:end], is_training=False)
            start = end
        return found

    def _pass(self, parts: Sequence[Tensor], *, is_training: bool) -> list[Losses]:
        module = self._module
        schedule = self._schedule_for(parts, is_training=is_training)
        windows = torch.cat(list(parts))
        module.found.clear()
        with _own_errors():
            schedule.step(target=windows, windows=windows, return_outputs=False)
        count = module.stage.count
        # Blocks that are computed again in the backward pass are no calls of the stage.
        found = [_times(losses, count) for losses in module.found]
        module.found.clear()
        return found

    def _schedule_for(self, parts: Sequence[Tensor], *, is_training: bool) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        key = (len(parts), *parts[0].shape)
        if is_training not in self._built or self._built[is_training][0] != key:
            module = self._module
            # Shapes are told, so that torch need not find them out by calls of its own, which
            # would exchange rows and count loads.
            stage = PipelineStage(
                module,
                module.stage.index,
                module.stage.count,
                parts[0].device,
                input_args=module.received_of(parts[0]),
                output_args=module.sent_of(parts[0]),
                group=self._group,
            )
            is_1f1b = is_training and self._schedule == "1f1b"
            make = Schedule1F1B if is_1f1b else ScheduleGPipe
            loss = self._scaled if is_training else None
            self._built[is_training] = (key, make(stage, len(parts), loss, scale_grads=False))
        return self._built[is_training][1]

    def _scaled(self, cross_entropy: Tensor, _windows: Tensor) -> Tensor:
        return cross_entropy * self._loss_scale


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    """Takes off the wrapping that torch puts around the errors of a stage's forward pass."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is None or "failed to run forward" not in str(error):
            raise
        raise error.__cause__ from None


def _times(losses: Losses, factor: int) -> Losses:
    values: dict[str, Any] = {name: getattr(losses, name) for name in Losses.__dataclass_fields__}
    return replace(losses, **{n: v if v is None else v * factor for n, v in values.items()})


class OneRank:
    """A process that trains by itself.

    Attributes:
        data_rank: which of the micro-batches that are computed side by side is this process's.
        loss_share: what this process adds to its micro-batch's part of the loss, which other
            processes of the same data-parallel rank add to as well.
        pipeline: what takes micro-batches through stages; None where each process has all layers.
    """

    rank = 0
    size = 1
    data_rank = 0
    num_data_ranks = 1
    loss_share = 1.0
    pipeline: "Pipeline | None" = None

    @property
    def layout_groups(self) -> "LayoutGroups | None":
        return None

    def spread(self, model: LanguageModel) -> None: ...

    def draw_apart(self, step: int) -> None:
        """Has gates draw at random for other tokens than the first data-parallel rank's."""

    def part(self, items: Sequence[T]) -> list[T]:
        """This data-parallel rank's share of what all have; their number divides it."""
        return list(items)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes; a collective call, as all that follow."""
        return values

    def any(self, flag: bool) -> bool:
        return flag

    def first_text(self, text: str) -> str:
        """The first text among all processes that is not empty; empty if all are."""
        return text

    def require_shared(self, folder: Path) -> None:
        """Refuses a folder that the processes do not share, as on machines with disks of their
        own."""
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

    def reduce_gradients(self, named: Mapping[str, Tensor]) -> None: ...

    def gradient_norm(self, named: Mapping[str, Tensor]) -> float:
        gradients = [p.grad for p in named.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """The block runs in the first process, and then in the others."""
        yield

    @property
    def group(self) -> "ProcessGroup | None":
        return None

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block in which torch exchanges something: a missing process is named."""
        del what
        return contextlib.nullcontext()

    def barrier(self) -> None:
        self.any(False)


class SeveralRanks(OneRank):
    """One of the processes of a `torch.distributed` world that train together.

    Raises:
        ValueError: the layout or the number of parts does not fit the number of processes.
        RankFailureError: a process has another layout or version.
    """

    def __init__(self, config: TrainConfig) -> None:
        import torch.distributed as dist

        from moe_runtime.parallel import FlatTransport, LayoutGroups, ParallelLayout
        from moe_runtime.parallel.communication.transport import require_same, software_facts
        from moe_runtime.parallel.communication.watch import CollectiveMonitor

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        own = config.parallel
        self._config = config
        self._layout = layout = ParallelLayout(
            world_size=self.size,
            tp=own.tp,
            cp=own.cp,
            pp=own.pp,
            etp=own.etp,
            ep=own.ep or max(1, self.size // (own.etp * own.pp)),
        )
        _refuse(config, layout.dp)
        if config.run.host_memory is not None:
            _refuse_offloaded(config, layout.edp)
        places = layout.coordinates(self.rank, "dense")
        self.data_rank, self.num_data_ranks = places["dp"], layout.dp
        self._stage = places["pp"]
        # The sum over a data-parallel rank is divided by the parts of each sequence only.
        self.loss_share = 1 / layout.tp
        self.groups = LayoutGroups(layout, timeout_s=own.timeout_s)
        self.groups.make_ends()
        group = self.groups.make("dense", "tp", "cp", "dp", "pp")
        assert group is not None, "several processes are more than one"
        self._group = group
        self._watch = CollectiveMonitor(group, own.timeout_s)
        transport = FlatTransport(group, timeout_s=own.timeout_s)
        require_same(transport, {**software_facts(), "the layout": str(layout)})

    @property
    def layout_groups(self) -> "LayoutGroups":
        return self.groups

    def spread(self, model: LanguageModel) -> None:
        from moe_runtime.models.lm.parallel import (
            divide_sequences,
            leave_exchanges,
            shard_dense,
            spread_experts,
        )

        stage = self._keep_stage(model)
        spread_experts(model, self.groups)
        divide_sequences(model, self.groups)
        if self._config.parallel.shard_dense:
            shard_dense(model, self.groups, root=stage)
        if self._config.run.compile:
            leave_exchanges(model)
        self.draw_apart(0)

    def _keep_stage(self, model: LanguageModel) -> "StageModule | None":
        stages = self.groups.group("dense", "pp")
        if stages is None:
            return None
        from moe_runtime.models.lm.parallel import Stage, StageModule

        scale = self.loss_share * self.num_data_ranks / self._config.data.micro_batches
        device = next(model.parameters()).device.type
        stage = StageModule(
            model,
            Stage(self._stage, self._layout.pp),
            loss_scale=scale,
            autocast=lambda: autocast_of(self._config.run.precision, device),
        )
        order = self._config.parallel.schedule
        self.pipeline = Pipeline(stage, stages, schedule=order, loss_scale=scale)
        return stage

    def draw_apart(self, step: int) -> None:
        number = self.data_rank + self.num_data_ranks * self._stage
        if number > 0:
            torch.manual_seed(torch.initial_seed() + 1_000_003 * step + number)

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

    def first_text(self, text: str) -> str:
        import torch.distributed as dist

        texts = [""] * self.size
        with self.watched("an exchange of texts"):
            dist.all_gather_object(texts, text, group=self._group)
        return next(filter(None, texts), "")

    def reduce_gradients(self, named: Mapping[str, Tensor]) -> None:
        dense, experts = _divided(named)
        self.groups.reduce_dense_gradients(dense)
        self.groups.reduce_expert_gradients(experts)
        self.groups.sum_end_gradients(self._tied(named))

    def _tied(self, named: Mapping[str, Tensor]) -> list[Tensor]:
        """The embedding, where the first and the last stage have a copy each."""
        is_end = self._layout.pp > 1 and self._config.model.tie_embeddings
        return [p for name, p in named.items() if is_end and name == "embedding.weight"]

    @property
    def group(self) -> "ProcessGroup":
        return self._group

    def watched(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._watch.over_torch(what)

    def gradient_norm(self, named: Mapping[str, Tensor]) -> float:
        dense, experts = _divided(named)
        # The first stage counts what the last has a copy of.
        copies = set(self._tied(named)) if self._stage > 0 else set()
        return self.groups.gradient_norm([p for p in dense if p not in copies], experts)

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        store, key = self._group.get_group_store(), "moe/first/done"
        if self.rank == 0:
            yield
            store.set(key, "1")
            return
        # However long the first one takes; its end is noticed.
        while not store.check([key]):
            if 0 in self._watch.ended_ranks():
                raise RankFailureError(f"rank 0 of {self.size} has ended", ranks=(0,))
            time.sleep(_POLL_S)
        yield


def _refuse(config: TrainConfig, num_data_ranks: int) -> None:
    from moe_runtime.models.lm.parallel import check_layout, check_stages

    data, own = config.data, config.parallel
    if data.micro_batches % num_data_ranks:
        raise ValueError(
            f"data.micro_batches ({data.micro_batches}) must be a multiple of the {num_data_ranks} "
            "processes that compute them side by side; --set data.micro_batches="
            f"{-(-data.micro_batches // num_data_ranks) * num_data_ranks}"
        )
    check_stages(config.model, own.pp)
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


def _refuse_offloaded(config: TrainConfig, num_copies: int) -> None:
    own = config.parallel
    for name, degree in (("tp", own.tp), ("pp", own.pp), ("etp", own.etp)):
        if degree > 1:
            raise ValueError(
                f"run.host_memory and parallel.{name} ({degree}) do not go together yet: every "
                "process has whole experts, and all of the dense part; leave one of them out"
            )
    if own.shard_dense:
        raise ValueError(
            "run.host_memory and parallel.shard_dense do not go together yet; leave one of them out"
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
