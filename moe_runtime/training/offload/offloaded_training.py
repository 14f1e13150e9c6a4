"""Training of a model whose routed experts live in host memory and on the disk."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.inference.budget import peak_resident_bytes
from moe_runtime.training.checkpoint import (
    AMOUNT,
    MAPPING,
    PLAIN,
    require_kind,
    require_kinds,
    require_like,
)
from moe_runtime.training.offload.activations import ActivationPolicy
from moe_runtime.training.offload.adamw import AdamW
from moe_runtime.training.offload.checkpoint import ExpertCheckpoints
from moe_runtime.training.offload.compute_copies import LinkTraffic
from moe_runtime.training.offload.device_link import DeviceLink
from moe_runtime.training.offload.device_updates import DeviceUpdates
from moe_runtime.training.offload.loops import attach
from moe_runtime.training.offload.memory import TrainingMemory
from moe_runtime.training.offload.optimizer import ExpertOptimizer
from moe_runtime.training.offload.passes import (
    OffloadedTrainingExperts,
    TrainedExpertsExecutor,
    run_window,
)
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import Sections, Traffic
from moe_runtime.training.offload.site import ExpertsSite, OneProcess
from moe_runtime.training.optimizer import S, StepOptimizer, StepOutcome
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStats:
    """What a training run did so far.

    Attributes:
        skipped_steps: steps left out because gradients were not finite.
        traffic: bytes by route, and seconds of waiting.
        link: bytes between tiers in memory and where products are computed.
        resident_experts: those whose tier is host memory.
        budget_bytes: of host memory.
        peak_rss_bytes: highest resident memory of the process, by the kernel's counter.
    """

    steps: int
    skipped_steps: int
    traffic: Traffic
    link: LinkTraffic
    num_experts: int
    resident_experts: int
    budget_bytes: int
    disk_bytes: int
    peak_rss_bytes: int

    def report(self) -> dict[str, Any]:
        return {
            "experts": self.num_experts,
            "experts_in_memory": self.resident_experts,
            "host_budget_bytes": self.budget_bytes,
            "disk_bytes": self.disk_bytes,
            "read_bytes": self.traffic.read_bytes,
            "written_bytes": self.traffic.written_bytes,
            "wasted_bytes": self.traffic.wasted_bytes,
            "to_device_bytes": self.link.to_device_bytes,
            "from_device_bytes": self.link.from_device_bytes,
            "stall_s": round(self.traffic.stall_s, 3),
            "peak_rss_bytes": self.peak_rss_bytes,
        }


class ExpertTraining(StepOptimizer, abc.ABC):
    """Training of experts that have records of their own, of which a checkpoint names versions."""

    keeps_newest_alone = True
    _executor: Any  # an `ExpertsExecutor`, made with the modules

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsSite],
        records: RecordStore,
        memory: TrainingMemory,
        checkpoints: ExpertCheckpoints,
    ) -> None:
        self.model = model
        self.memory = memory
        self.records = records
        self.skipped_steps = 0
        self.sites = list(sites)
        self._checkpoints = checkpoints

    @property
    @abc.abstractmethod
    def num_steps(self) -> int: ...

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters as they are after the steps so far, by name."""
        return self._executor.expert(key)

    def stacked(self, layer: int) -> dict[str, Tensor]:
        """Copies of a layer's parameters, experts of this process first, in ascending order."""
        return self._executor.stacked(layer)

    def stats(self) -> OffloadStats:
        experts, disk = self.records.experts.values(), self.records.disk
        return OffloadStats(
            steps=self.num_steps,
            skipped_steps=self.skipped_steps,
            traffic=dataclasses.replace(self.records.traffic),
            link=LinkTraffic(),
            num_experts=len(experts),
            resident_experts=sum(expert.resident_slot is not None for expert in experts),
            budget_bytes=self.memory.budget_bytes,
            disk_bytes=0 if disk is None else disk.num_bytes,
            peak_rss_bytes=peak_resident_bytes(),
        )

    def report(self) -> dict[str, Any]:
        return self.stats().report()

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """As of `StepOptimizer`: copies the state; the job runs once every expert is durable."""
        self._checkpoints.write(state, lambda found: own(found)["experts"], job)

    def wait(self) -> None:
        self._checkpoints.wait()

    @property
    def has_failed_save(self) -> bool:
        return self._checkpoints.has_failed_save

    def transfers(self) -> dict[str, Any]:
        return self.records.traffic.by_route()

    def check(self) -> None:
        self.records.check()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled."""
        TrainedElsewhere.refuse()

    def close(self) -> None:
        """Waits for the checkpoint under way and ends the transfers; the model is of no use then.

        Raises:
            MoERuntimeError, OSError: the checkpoint could not be written; the one before is intact.
        """
        self._checkpoints.close()
        self.records.close()
        self._checkpoints.wait()


def trained_around_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters other than the offloaded experts that require gradients, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, TrainedElsewhere)
    }


def require_no_new_parameters(model: nn.Module, known: Iterable[Tensor]) -> None:
    ids = set(map(id, known))
    for name, parameter in trained_around_experts(model).items():
        if id(parameter) not in ids:
            raise UnsupportedUseError(
                f"{name} requires gradients since the experts were offloaded and would not be "
                "trained: add adapters and set requires_grad before that"
            )


def require_trained(model: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "there is nothing to train: no parameter requires gradients; set requires_grad on "
            "those that shall be trained"
        )


def fill(
    records: RecordStore,
    sites: Sequence[ExpertsSite],
    initial: Callable[[ExpertKey], Sequence[Tensor]] | None,
) -> None:
    """Writes every expert's first record: what `initial` gives, or its module's parameters."""
    for key, expert in records.experts.items():
        layout = expert.layout
        tensors = sites[key.layer].parameters_of(key.expert) if initial is None else initial(key)
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                f"{sites[key.layer].name} is on the meta device, without values: load or "
                "initialise the model first, or give the experts' weights as `initial`"
            )
        record = records.acquire(key, Sections.NONE, writes=True)
        layout.clear(record, Sections.ALL)
        views = layout.views(record, Sections.PARAMETERS)
        for view, tensor in zip(views.values(), tensors, strict=True):
            view.copy_(tensor)
        records.write_state(key)
        records.release(key)
    records.commit()


T = TypeVar("T")
_KINDS = {"experts": MAPPING, "steps": MAPPING, "dense": MAPPING}
_FIXED = ("betas", "eps", "weight_decay")
_RATES = ("lr", "initial_lr")


class OffloadedTraining(ExpertTraining, torch.optim.Optimizer):
    """The optimizer of the whole model, offloaded experts included; `offload_training` makes it.

    A step is `backward` and `step`:

        losses = training.backward([lambda part=part: loss_of(part) for part in micro_batches])
        outcome = training.step(rate)

    `loss.backward()` followed by `step` works as well, as loops of others have it; then the
    experts' gradients wait on their tiers, and experts are fetched once for every micro-batch.

    Attributes:
        param_groups: matrices around the experts, other parameters around them, and the experts;
            groups without parameters are left out. Each step reads `lr` of every group. Other
            settings of the experts are those of `offload_training`.
    """

    _executor: TrainedExpertsExecutor

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsSite],
        records: RecordStore,
        settings: AdamW,
        memory: TrainingMemory,
        *,
        activations: ActivationPolicy,
        device_updates: DeviceUpdates | None,
        copy_bytes: int,
        processes: OneProcess,
        link: DeviceLink | None,
    ) -> None:
        checkpoints = ExpertCheckpoints(records, sites, settings.state_format, processes)
        super().__init__(model, sites, records, memory, checkpoints)
        self.optimizer = ExpertOptimizer(records, settings, device_updates, processes)
        self._executor = TrainedExpertsExecutor(
            sites, self.optimizer, activations, copy_bytes, link
        )
        self.activations = activations
        self._processes, self._settings = processes, settings
        self._final_rate: float | None = None
        self._is_closed = self._is_scaled = False
        self._modules: list[OffloadedTrainingExperts] = []
        for layer, site in enumerate(sites):
            module = OffloadedTrainingExperts(
                site, layer, self._executor, activations, lambda: self.optimizer.has_gradient
            )
            module.train(site.module.training)
            site.put(model, module)
            self._modules.append(module)
        self.dense = settings.dense(trained_around_experts(model))
        away = [
            parameter
            for parameter in model.parameters()
            if isinstance(parameter, TrainedElsewhere) and parameter.requires_grad
        ]
        fixed = {name: getattr(settings, name) for name in _FIXED}
        self._experts = [{"params": away, "lr": settings.lr, **fixed}] if away else []
        # the same dictionaries: what a schedule writes into them, each part reads
        torch.optim.Optimizer.__init__(
            self, [*self.dense.groups, *self._experts], {"lr": settings.lr, **fixed}
        )

    @property
    def num_steps(self) -> int:
        return self.optimizer.step

    @property
    def num_processes(self) -> int:
        return self._processes.size

    def backward(
        self,
        parts: Sequence[Callable[[], Tensor]],
        *,
        rate: float | None = None,
        is_last: bool = True,
    ) -> list[Tensor]:
        """Runs the forward and the backward passes of micro-batches, experts fetched once for all.

        Args:
            parts: each computes the loss of one micro-batch, divided by their number where a mean
                is wanted.
            rate: learning rate of the step; None means those of `param_groups`.
            is_last: whether these are all gradients of the step. If so, and unless the norm is
                needed first, experts on the disk are updated within the backward pass.

        Returns:
            The losses, detached.

        Raises:
            RuntimeError: it was called again after the last part of a step, or after `close`.
            UnsupportedUseError: several processes have asked for the norm of this step already.
            MoERuntimeError: an expert could not be read or written.
        """
        self._require_open()
        if self._final_rate is not None:
            raise RuntimeError("backward was called twice before step; give is_last=False at first")
        self._executor.visits.require_own_gradients()
        rate = self._rate if rate is None else rate
        self._executor.begin(rate if is_last else None)
        self._final_rate = rate if is_last else None
        self._is_scaled = True
        work = [partial(self._part, part) for part in parts]
        losses: list[Tensor] = []
        try:
            losses = run_window(self.model, work, self._modules)
        finally:
            if not losses:
                self.discard()
        return losses

    def step(  # type: ignore[override]
        self, rate: float | Callable[[], Any] | None = None
    ) -> StepOutcome | Any:
        """Clips, updates what has not been updated yet, and forgets the gradients.

        Args:
            rate: learning rate of all groups, that of `backward`; None means those of
                `param_groups`. A function is called first, as torch's optimizers do.

        Returns:
            The norm of the gradients, and those that were not finite: then the step is not taken,
            and what the backward pass had updated is taken back. With a function, its result.

        Raises:
            RuntimeError: no backward pass came before, or the training is closed.
            ValueError: the rate is another than the backward pass had.
            UnsupportedUseError: the model got parameters to train after `offload_training`, or a
                setting of the experts was changed.
            MoERuntimeError: an expert could not be read or written.
        """
        self._require_open()
        if callable(rate):
            with torch.enable_grad():
                result = rate()
            self.step()
            return result
        has_gradient = self._executor.visits.went_back or bool(self.dense.gradients())
        if self._final_rate is None and not has_gradient:
            raise RuntimeError("step needs a backward pass before it: there are no gradients")
        if self._settings.loss_scale != 1 and not self._is_scaled:
            raise UnsupportedUseError(
                "loss_scale is of losses that `backward` of this optimizer computes, and these "
                "gradients are of another: leave it out, or attach a GradScaler"
            )
        require_no_new_parameters(self.model, self.dense.parameters())
        self._require_fixed()
        for group in self.param_groups if rate is not None else ():
            group["lr"] = rate
        rate = self._rate
        if self._final_rate is not None and rate != self._final_rate:
            raise ValueError(
                f"backward had a rate of {self._final_rate}, step has one of {rate}; "
                "experts were updated with the first"
            )
        self._reduce()
        dense_norm = self.dense.norm()
        bad_dense = () if math.isfinite(dense_norm) else self.dense.bad_gradients()
        own_bad = list(self.optimizer.bad_experts)
        norm, scale, is_skipped = self.optimizer.take_step(rate, dense_norm, bool(bad_dense))
        bad: tuple[str, ...] = ()
        if is_skipped:
            bad = self._names_everywhere(own_bad) + bad_dense
            self.skipped_steps += 1
            self._executor.copies.forget()
        else:
            self.dense.step(scale=scale)
            self._executor.copies.after_step()
        self.dense.forget()
        self.activations.finish_step()
        self._final_rate, self._is_scaled = None, False
        self._executor.begin()
        self._executor.expect_first_layer()
        return StepOutcome(norm, bad)

    @property
    def _rate(self) -> float:
        """Of the experts, or where none is trained, of the other parameters."""
        return float(self.param_groups[-1]["lr"])

    def _require_fixed(self) -> None:
        for group in self._experts:
            for name in _FIXED:
                if group[name] != getattr(self._settings, name):
                    raise UnsupportedUseError(
                        f"{name} of the experts is {group[name]}, and their steps are taken with "
                        f"{getattr(self._settings, name)}: give it to moe_runtime.AdamW, and "
                        "cycle_momentum=False to a schedule"
                    )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == len(self.dense.groups) + len(self._experts):
            raise UnsupportedUseError(
                "what is trained is read once, by offload_training: add parameters before it"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `discard`, where there are gradients."""
        if self._final_rate is not None or self.optimizer.has_gradient or self.dense.gradients():
            self.discard()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Has the step to come clip by the true norm of all gradients, which it returns.

        Args:
            max_norm: largest norm; a smaller `clip_norm` of the settings, or one that was asked
                for before, stays. 0 and infinity ask for the norm alone.

        Returns:
            The norm over all processes; a collective call.

        Raises:
            UnsupportedUseError: `backward` may have updated experts already.
        """
        self._require_waiting()
        self._reduce()
        if math.isfinite(max_norm) and max_norm:
            self.optimizer.clip_norm = min(max_norm, self.optimizer.clip_norm or max_norm)
        return self.optimizer.norm(self.dense.norm())[0]

    def unscale(self, factor: float) -> bool:
        """Has the step to come multiply the experts' gradients; a collective call.

        Returns:
            Whether some of them, in any process, are not finite.

        Raises:
            UnsupportedUseError: `backward` may have updated experts already.
        """
        self._require_waiting()
        self._reduce()
        self.optimizer.unscale *= factor
        return self.optimizer.norm(0.0)[1] > 0

    def _require_waiting(self) -> None:
        if self._final_rate is not None and not self._settings.waits_for_norm:
            raise UnsupportedUseError(
                "the norm is known when all gradients are: give AdamW(clip_norm=...), which clips "
                "in `step`; for a GradScaler call backward of the losses"
            )

    def _reduce(self) -> None:
        """Gives the parameters around the experts the gradients of all processes, once a step."""
        if self._processes.size > 1 and not self._executor.visits.is_reduced:
            self._processes.reduce_gradients(self.dense.parameters())
            self._executor.visits.is_reduced = True

    def attach(self, loop: T) -> T:
        """Has a loop take its steps by this optimizer, and see the gradients of all parameters.

        Args:
            loop: a Trainer of transformers or TRL, before `train`: its models and checkpoints have
                the experts too; an Accelerator, which prepares this optimizer with the others; or
                a GradScaler of torch, which drops the gradients of a step that it skips.

        Returns:
            The loop.

        Raises:
            UnsupportedUseError: the Trainer would do something that cannot include the experts.
            CapacityError: it saves, and there is no memory for the experts' weights.
        """
        return attach(self, loop)

    def discard(self) -> None:
        """Forgets the gradients since the last step, and takes back what they changed."""
        self._executor.copies.forget()  # first: no copy may reach into a record that is given back
        self.optimizer.discard()
        self.dense.forget()
        self._final_rate, self._is_scaled = None, False
        self._executor.begin()

    def _names_everywhere(self, own: Sequence[ExpertKey]) -> tuple[str, ...]:
        """Names of the experts that some process has; a collective call."""
        keys = [
            ExpertKey(layer, e) for layer, s in enumerate(self.sites) for e in range(s.num_experts)
        ]
        votes = self._processes.sums([float(key in own) for key in keys])
        return tuple(
            f"{self.sites[key.layer].name}.{key.expert}"
            for key, vote in zip(keys, votes, strict=True)
            if vote
        )

    def stats(self) -> OffloadStats:
        link = dataclasses.replace(self._executor.copies.traffic)
        return dataclasses.replace(super().stats(), link=link)

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the training is closed: it takes no more steps")

    def close(self) -> None:
        self._is_closed = True
        self._executor.copies.forget()
        with contextlib.closing(self.activations):
            super().close()

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts, and which version of every expert belongs to them.

        Part of a checkpoint that `write` saves; the experts themselves stay in `storage_dir`. It
        cannot be pickled before that.

        Raises:
            MoERuntimeError, OSError: the checkpoint before could not be written.
        """
        return {"experts": self._checkpoints.begin(), **self._around()}

    def _around(self) -> dict[str, Any]:
        rates = [
            {name: float(group[name]) for name in _RATES if name in group}
            for group in self.param_groups
        ]
        return {
            "steps": self.optimizer.state_dict(), "dense": self.dense.state_dict(), "rates": rates,
        }  # fmt: skip

    def export(self, folder: Path) -> dict[str, Any]:
        """Writes the experts with their moments into a folder; all else, which pickles, is
        returned.

        Unlike `write`, it copies what lies on the disk too, and each export stays whole.
        """
        return {
            "experts": self._checkpoints.export(folder),
            **self._around(),
            "model": {name: tensor.detach() for name, tensor in self._changing().items()},
            "param_groups": [],  # so that torch's optimizers refuse it in words
        }

    def _changing(self) -> Mapping[str, Tensor]:
        """Trained parameters around the experts, and buffers."""
        kept = self.model.state_dict(keep_vars=True)
        buffers = {n: t for n, t in kept.items() if not isinstance(t, nn.Parameter)}
        away = (TrainedElsewhere,)
        buffers = {name: t for name, t in buffers.items() if not isinstance(t, away)}
        return {**trained_around_experts(self.model), **buffers}

    def load_state_dict(  # type: ignore[override]
        self, state: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Takes up what a checkpoint has of `state_dict`, under any budget.

        Args:
            folder: where `export` wrote the experts, of whose state this is.

        Raises:
            CheckpointError: it is of another model, or damaged; says where.
        """
        require_kind(state, MAPPING, "the checkpoint's optimizer")
        if "experts" not in state:
            raise CheckpointError(
                "the checkpoint is of a run whose experts were in memory; go on without a budget"
            )
        optional = {"rates": PLAIN, "model": MAPPING, "param_groups": PLAIN}
        if folder is None and "model" in state:
            raise CheckpointError(
                "the checkpoint is of a Trainer that this training was attached to: "
                "`training.attach(trainer)` before it resumes"
            )
        require_kinds(state, _KINDS, "the checkpoint's optimizer", optional=optional)
        if folder is not None:
            require_kind(state.get("model"), MAPPING, "the checkpoint's model")
            require_like(state["model"], self._changing(), "the checkpoint's model")
        # what was just asked for comes back, as accelerate does
        is_own = self._checkpoints.holds(state["experts"])
        if not (is_own and state["steps"]["step"] == self.optimizer.step):
            self.optimizer.load_state_dict(state["steps"])
            self._checkpoints.restore(state["experts"], self.optimizer.step, folder)
            self._executor.copies.forget()
        self.dense.load_state_dict(state["dense"])
        self.param_groups = [*self.dense.groups, *self._experts]
        rates = state.get("rates") or [{}] * len(self.param_groups)  # older versions kept none
        if len(rates) != len(self.param_groups):
            raise CheckpointError(f"the checkpoint has rates of {len(rates)} groups of parameters")
        for group, own in zip(self.param_groups, rates, strict=True):
            require_kinds(
                own, {}, "rates of the checkpoint", optional=dict.fromkeys(_RATES, AMOUNT)
            )
            group.update(own)
        if folder is not None:
            for name, tensor in self._changing().items():
                tensor.detach().copy_(state["model"][name])

    def _part(self, part: Callable[[], Tensor]) -> Tensor:
        loss = part()
        scale = self.optimizer.loss_scale.value
        (loss if scale == 1 else loss * scale).backward()
        return loss.detach()
