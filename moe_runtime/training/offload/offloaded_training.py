"""Training of a model whose routed experts live in host memory and on the disk.

`attach` makes loops of others train offloaded experts: GradScaler of torch, accelerate, Trainers.
They see only the parameters around the experts where they scale gradients, clip, save and resume.
Those methods are replaced by functions that see all parameters.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.checkpoints.transformers_private import has_adapters
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedUseError
from moe_runtime.inference.budget import available_host_bytes, peak_resident_bytes
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
from moe_runtime.training.offload.compute_copies import DeviceLink, LinkTraffic
from moe_runtime.training.offload.device_updates import DeviceUpdates
from moe_runtime.training.offload.memory import TrainingMemory
from moe_runtime.training.offload.optimizer import ExpertOptimizer
from moe_runtime.training.offload.passes import (
    OffloadedTrainingExperts,
    TrainedExpertsExecutor,
    Visits,
    run_window,
)
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import Sections, Traffic
from moe_runtime.training.offload.site import ExpertsSite, OneProcess
from moe_runtime.training.optimizer import S, StepOptimizer, StepOutcome
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStats:
    """Counters of a training run.

    Attributes:
        skipped_steps: steps left out because gradients were not finite.
        traffic: bytes by route, and seconds of waiting.
        link: bytes between tiers in memory and where products are computed.
        resident_experts: experts whose tier is host memory.
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
    """Training of experts that have records; a checkpoint names versions of the records."""

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
        self.model, self.memory, self.records = model, memory, records
        self.skipped_steps = 0
        self.sites = list(sites)
        self._checkpoints = checkpoints
        self.saves = checkpoints.saves

    @property
    @abc.abstractmethod
    def num_steps(self) -> int: ...

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters after the steps so far, by name."""
        return self._executor.expert(key)

    def stacked(self, layer: int) -> dict[str, Tensor]:
        """Copies of a layer's parameters, experts of this process first, in ascending order."""
        return self._executor.stacked(layer)

    def stats(self) -> OffloadStats:
        experts, disk = self.records.experts, self.records.disk
        return OffloadStats(
            steps=self.num_steps,
            skipped_steps=self.skipped_steps,
            traffic=dataclasses.replace(self.records.traffic),
            link=LinkTraffic(),
            num_experts=len(experts),
            resident_experts=sum(map(self.records.is_resident, experts)),
            budget_bytes=self.memory.budget_bytes,
            disk_bytes=0 if disk is None else disk.num_bytes,
            peak_rss_bytes=peak_resident_bytes(),
        )

    def report(self) -> dict[str, Any]:
        return self.stats().report()

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """As `StepOptimizer.write`: copies the state; the job runs once every expert is durable."""
        self._checkpoints.write(state, lambda found: own(found)["experts"], job)

    def transfers(self) -> dict[str, Any]:
        traffic = self.records.traffic
        return {
            "stall_s": traffic.stall_s,
            "memory_bytes": traffic.resident_bytes + traffic.reused_bytes,
            "read_bytes": traffic.read_bytes,
            "written_bytes": traffic.written_bytes,
        }

    def check(self) -> None:
        self.records.check()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled."""
        TrainedElsewhere.refuse()

    def close(self) -> None:
        """Waits for a checkpoint being written and ends the transfers; the model is unusable then.

        Raises:
            MoERuntimeError, OSError: the checkpoint could not be written; the last one is intact.
        """
        self.saves.close()
        self.records.close()
        self.saves.wait()


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
            "the parameters to train"
        )


def fill(
    records: RecordStore,
    sites: Sequence[ExpertsSite],
    initial: Callable[[ExpertKey], Sequence[Tensor]] | None,
) -> None:
    """Writes every expert's first record from `initial`, or from its module's parameters."""
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
EXPERTS = "experts"
"""Folder of a Trainer's checkpoint with the records of the experts."""
_STATES = "optimizer.pt"
_KINDS = {"experts": MAPPING, "steps": MAPPING, "dense": MAPPING}
_FIXED = ("betas", "eps", "weight_decay")
_RATES = ("lr", "initial_lr")


class OffloadedTraining(ExpertTraining, torch.optim.Optimizer):
    """The optimizer of the whole model, offloaded experts included; `offload_training` makes it.

    A step is `backward` and `step`:

        losses = training.backward([lambda part=part: loss_of(part) for part in micro_batches])
        outcome = training.step(rate)

    `loss.backward()` followed by `step` works too. Then the experts' gradients wait on their tiers,
    and experts are fetched once for every micro-batch.

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
        # the same dictionaries, so that each part reads the rates that a schedule writes
        torch.optim.Optimizer.__init__(
            self, [*self.dense.groups, *self._experts], {"lr": settings.lr, **fixed}
        )

    @property
    def num_steps(self) -> int:
        return self.optimizer.step

    def backward(
        self,
        parts: Sequence[Callable[[], Tensor]],
        *,
        rate: float | None = None,
        is_last: bool = True,
    ) -> list[Tensor]:
        """Runs forward and backward passes of micro-batches; fetches each expert once for all.

        Args:
            parts: each computes the loss of one micro-batch, divided by their number for a mean.
            rate: learning rate of the step; None for the rates of `param_groups`.
            is_last: no more gradients of the step follow. Then experts on the disk are updated
                within the backward pass, unless the norm is needed first.

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
        before = self._executor.visits
        before.require_open()
        rate = self._rate if rate is None else rate
        self._final_rate = rate if is_last else None
        visits = Visits(rate=self._final_rate, went_back=before.went_back)
        self._executor.visits = visits
        self._is_scaled = True
        work = [partial(self._part, part) for part in parts]
        try:
            losses = run_window(self.model, work, self._modules)
        except BaseException:
            self.discard()
            raise
        visits.is_final = is_last and not self._settings.waits_for_norm
        return losses

    def step(  # type: ignore[override]
        self, rate: float | Callable[[], Any] | None = None
    ) -> StepOutcome | Any:
        """Clips, updates all that is not updated yet, and forgets the gradients.

        Args:
            rate: learning rate of all groups, that of `backward`; None for the rates of
                `param_groups`. A function is called first, as torch's optimizers do.

        Returns:
            The norm of the gradients, and the names of those that are not finite: then the step is
            not taken, and updates of the backward pass are rolled back. With a function, its
            result.

        Raises:
            RuntimeError: no backward pass came before, or the training is closed.
            ValueError: the rate differs from that of the backward pass.
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
        norm, scale, is_skipped = self.optimizer.take_step(
            rate, dense_norm, bool(bad_dense), self._executor.visits.went_back
        )
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
        self._begin_step()
        self._executor.expect_first_layer()
        return StepOutcome(norm, bad)

    def _begin_step(self) -> None:
        self._final_rate, self._is_scaled = None, False
        self._executor.visits = Visits()

    @property
    def _rate(self) -> float:
        """Of the experts; if they are frozen, of the other parameters."""
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
                "offload_training reads the parameters to train once: add parameters before it"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `discard`, if there are gradients."""
        if self._final_rate is not None or self.optimizer.has_gradient or self.dense.gradients():
            self.discard()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Makes the next step clip by the norm of all gradients, and returns that norm.

        A collective call.

        Args:
            max_norm: largest norm; a smaller `clip_norm` of the settings or of an earlier call
                stays. 0 and infinity only return the norm.

        Raises:
            UnsupportedUseError: `backward` may have updated experts already.
        """
        self._require_waiting()
        self._reduce()
        if math.isfinite(max_norm) and max_norm:
            self.optimizer.clip_norm = min(max_norm, self.optimizer.clip_norm or max_norm)
        return self.optimizer.norm(self.dense.norm())[0]

    def unscale(self, factor: float) -> bool:
        """Makes the next step multiply the experts' gradients by a factor; a collective call.

        Returns:
            Whether gradients of experts in any process are not finite.

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
        """Sums the gradients around the experts over all processes, once a step."""
        if self._processes.size > 1 and not self._executor.visits.is_reduced:
            self._processes.reduce_gradients(self.dense.parameters())
            self._executor.visits.is_reduced = True

    def attach(self, loop: T) -> T:
        """Makes a loop of others take its steps by this optimizer; returns the loop.

        Args:
            loop: a Trainer of transformers or TRL, before `train`: its models and checkpoints
                include the experts; an Accelerator, which prepares this optimizer with the others;
                or a GradScaler of torch, which drops the gradients of a step that it skips.

        Raises:
            UnsupportedUseError: the Trainer would do something that cannot include the experts.
            CapacityError: it saves, and there is no memory for the experts' weights.
        """
        found: Any = loop
        places = ("_save", "clip_grad_norm_", "_unscale_grads_")
        if not vars(found).keys().isdisjoint(places):
            raise UnsupportedUseError(
                f"this {type(found).__name__} is attached already: attach it once, to one training"
            )
        if isinstance(found, torch.amp.GradScaler):
            _attach_scaler(self, found)
            return loop
        if hasattr(found, "accelerator"):
            _attach_trainer(self, found)
            found = found.accelerator
        if not hasattr(found, "unscale_gradients"):
            raise UnsupportedUseError(
                "attach takes a Trainer, an Accelerator or a GradScaler of torch, got "
                f"{type(loop).__name__}"
            )

        def clip_grad_norm(parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
            del parameters  # without the experts
            if norm_type != 2:
                raise UnsupportedUseError(f"gradients are clipped by their 2-norm, not {norm_type}")
            found.unscale_gradients()
            return torch.tensor(self.clip_grad_norm(float(max_norm)))

        found.clip_grad_norm_ = clip_grad_norm
        if found.scaler is not None:
            _attach_scaler(self, found.scaler)
        return loop

    def discard(self) -> None:
        """Drops the gradients since the last step, and rolls back what they changed."""
        self._executor.copies.forget()  # first: no copy may use a record that is released
        self.optimizer.discard()
        self.dense.forget()
        self._begin_step()

    def _names_everywhere(self, own: Sequence[ExpertKey]) -> tuple[str, ...]:
        """Names of the given experts of all processes; a collective call."""
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
        """Moments, step counts and the version of every expert that belongs to them.

        Part of a checkpoint that `write` saves, and cannot be pickled before; the experts
        themselves stay in `storage_dir`.

        Raises:
            MoERuntimeError, OSError: the last checkpoint could not be written.
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
        """Writes the experts with their moments into a folder; returns the rest, which pickles.

        Unlike `write`, it copies experts on the disk too, so each export stays whole.
        """
        return {
            "experts": self._checkpoints.export(folder),
            **self._around(),
            "model": {name: tensor.detach() for name, tensor in self._changing().items()},
            "param_groups": [],  # so that torch's optimizers refuse it with a message
        }

    def _changing(self) -> Mapping[str, Tensor]:
        """Trained parameters around the experts, and buffers."""
        kept = self.model.state_dict(keep_vars=True)
        others = (nn.Parameter, TrainedElsewhere)
        buffers = {name: t for name, t in kept.items() if not isinstance(t, others)}
        return {**trained_around_experts(self.model), **buffers}

    def load_state_dict(  # type: ignore[override]
        self, state: Mapping[str, Any], folder: Path | None = None
    ) -> None:
        """Loads a checkpoint's `state_dict`, under any budget.

        Args:
            folder: of the experts, if `export` made the state.

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
        # accelerate loads the state that it has just taken
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


def _attach_scaler(training: OffloadedTraining, scaler: Any) -> None:
    """Makes a scaler divide the experts' gradients too, and skip a step if they overflow."""
    unscale_plainly, step_plainly = scaler._unscale_grads_, scaler.step

    def unscale(
        optimizer: object, inverse: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if optimizer is not training:
            return unscale_plainly(optimizer, inverse, found_inf, allow_fp16)
        has_overflow = training.unscale(float(inverse))
        around = SimpleNamespace(param_groups=training.dense.groups)
        found = unscale_plainly(around, inverse, found_inf, allow_fp16)
        found.setdefault(found_inf.device, found_inf)
        if has_overflow:
            found[found_inf.device] = torch.ones_like(found_inf)
        return found

    def step(optimizer: object, *args: Any, **options: Any) -> Any:
        result = step_plainly(optimizer, *args, **options)
        if optimizer is training:
            training.zero_grad()  # of a skipped step
        return result

    scaler._unscale_grads_, scaler.step = unscale, step


def _attach_trainer(training: OffloadedTraining, trainer: Any) -> None:
    _require_sound(training, trainer)
    trainer.optimizer = training
    trainer._mixed_mesh_grads = False  # it would read gradients to find out
    save, save_states = trainer._save, trainer._save_optimizer_and_scheduler
    load, load_states = training.load_state_dict, trainer._load_optimizer_and_scheduler

    def save_whole(output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and not _saves_adapters(trainer.model):
            _require_room(training)
            state_dict = training.model.state_dict() | {
                f"{site.name}.{name}": tensor
                for layer, site in enumerate(training.sites)
                for name, tensor in training.stacked(layer).items()
            }
        save(output_dir, state_dict)

    def save_states_whole(output_dir: str) -> None:
        state = training.export(Path(output_dir) / EXPERTS)
        with _instead(training, "state_dict", lambda: state):
            save_states(output_dir)

    def load_states_whole(checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if not (folder / _STATES).is_file():
            raise CheckpointError(
                f"{folder} has no {_STATES}, with which training goes on: save_only_model left it "
                "out, or the save has failed; begin from a whole model, or resume from a "
                "checkpoint with states"
            )

        with _instead(training, "load_state_dict", partial(load, folder=folder / EXPERTS)):
            load_states(checkpoint)

    def load_best() -> None:
        folder = Path(trainer.state.best_model_checkpoint)
        state = torch.load(folder / _STATES, map_location="cpu", weights_only=True)
        load(state, folder=folder / EXPERTS)

    trainer._save, trainer._save_optimizer_and_scheduler = save_whole, save_states_whole
    trainer._load_optimizer_and_scheduler, trainer._load_best_model = load_states_whole, load_best
    # the parameters are in the states
    trainer._load_from_checkpoint = lambda checkpoint, model=None: None


def _require_sound(training: OffloadedTraining, trainer: Any) -> None:
    """Refuses settings that would fail, or lose experts, after training has begun."""
    arguments = trainer.args
    if trainer.accelerator.num_processes > 1 or training._processes.size > 1:
        raise UnsupportedUseError(
            "a Trainer trains offloaded experts in one process; for several write the loop with "
            "`backward` and `step`, or use `moe-runtime train`"
        )
    if trainer.model_init is not None:
        raise UnsupportedUseError(
            "model_init would build another model than the one that was offloaded: give the model"
        )
    if getattr(arguments, "sync_ref_model", False):
        raise UnsupportedUseError(
            "sync_ref_model would copy the experts out of the model, where they are not: set it to "
            "False"
        )
    if arguments.load_best_model_at_end and arguments.save_only_model:
        raise UnsupportedUseError(
            "load_best_model_at_end takes the experts from the states of a checkpoint, which "
            "save_only_model leaves out: set one of them to False"
        )
    saves = str(getattr(arguments.save_strategy, "value", arguments.save_strategy)) != "no"
    if not saves:
        return
    if not _saves_adapters(trainer.model):
        _require_room(training)
    elif any(parameter.requires_grad for _, parameter in _absent(training)):
        raise UnsupportedUseError(
            "PEFT saves adapters alone, and the experts are trained too: freeze them before "
            "offload_training, or give save_strategy='no'"
        )


def _saves_adapters(model: Any) -> bool:
    return has_adapters(model) or hasattr(model, "get_base_model")


def _absent(training: OffloadedTraining) -> Iterator[tuple[str, TrainedElsewhere]]:
    for name, parameter in training.model.named_parameters():
        if isinstance(parameter, TrainedElsewhere):
            yield name, parameter


def _require_room(training: OffloadedTraining) -> None:
    needed = sum(p.numel() * p.element_size() for _, p in _absent(training))
    if needed > (free := available_host_bytes()):
        raise CapacityError(
            f"save_pretrained takes the experts' weights into memory, {format_bytes(needed)} of "
            f"{format_bytes(free)} that are free: give save_strategy='no', or train with "
            "`moe-runtime finetune`, which writes them expert by expert"
        )


@contextlib.contextmanager
def _instead(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of an object in the block."""
    vars(owner)[name] = function
    try:
        yield
    finally:
        del vars(owner)[name]
