"""What trainings of experts with records have in common: checkpoints, counters, the end."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.budget import peak_resident_bytes
from moe_runtime.training.offload.checkpoint import ExpertCheckpoints
from moe_runtime.training.offload.execution.compute_copies import LinkTraffic
from moe_runtime.training.offload.memory import TrainingMemory
from moe_runtime.training.offload.optimizers.dense_adamw import StepOutcome
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.entries import Traffic
from moe_runtime.training.offload.states.records import RecordLayout, Sections
from moe_runtime.training.offload.states.states import ExpertStates
from moe_runtime.types import ExpertKey

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadStats:
    """What a training run did so far.

    Attributes:
        steps: steps taken.
        skipped_steps: steps left out because gradients were not finite.
        traffic: bytes by way, and seconds of waiting.
        link: bytes between tiers in memory and where products are computed.
        num_experts: routed experts.
        resident_experts: those whose tier is host memory.
        budget_bytes: of host memory.
        disk_bytes: bytes of the files.
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


class ExpertTraining(abc.ABC):
    """Training of experts that have records of their own, of which a checkpoint names versions.

    Args:
        model: its experts' parameters have left it.
        sites: its experts.
        states: their records.
        memory: how the budget was divided.
        checkpoints: of the records.

    Attributes:
        model, states, memory: as given.
        skipped_steps: steps left out because something was not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsModuleSpec],
        states: ExpertStates,
        memory: TrainingMemory,
        checkpoints: ExpertCheckpoints,
    ) -> None:
        self.model = model
        self.memory = memory
        self.states = states
        self.skipped_steps = 0
        self._sites = list(sites)
        self._checkpoints = checkpoints

    @property
    @abc.abstractmethod
    def num_steps(self) -> int:
        """Steps that were taken."""

    @abc.abstractmethod
    def backward(
        self, parts: Sequence[Callable[[], Tensor]], *, rate: float | None = None
    ) -> list[Tensor]:
        """Computes a step's micro-batches; returns the losses, detached."""

    @abc.abstractmethod
    def step(self, rate: float | None = None) -> StepOutcome:
        """Updates the parameters by what `backward` found."""

    @abc.abstractmethod
    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters as they are after the steps so far, by name."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must have beside the model; a part of it is under `experts`."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint has of `state_dict`."""

    def stats(self) -> OffloadStats:
        """Counters so far."""
        experts = self.states.experts.values()
        disk = self.states.disk
        return OffloadStats(
            steps=self.num_steps,
            skipped_steps=self.skipped_steps,
            traffic=dataclasses.replace(self.states.traffic),
            link=LinkTraffic(),
            num_experts=len(experts),
            resident_experts=sum(expert.resident_slot is not None for expert in experts),
            budget_bytes=self.memory.budget_bytes,
            disk_bytes=0 if disk is None else disk.num_bytes,
            peak_rss_bytes=peak_resident_bytes(),
        )

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Saves a checkpoint while training goes on.

        Args:
            state: everything that belongs to it, `state_dict` included; it is copied.
            own: finds in it what `state_dict` gave.
            job: writes a state to its place, atomically; called in another thread, once every
                expert is durable.
        """
        self._checkpoints.write(state, lambda found: own(found)["experts"], job)

    def wait(self) -> None:
        """Returns when the checkpoint under way is durable.

        Raises:
            MoERuntimeError, OSError: it could not be written; the one before is intact.
        """
        self._checkpoints.wait()

    def transfers(self) -> dict[str, Any]:
        """Seconds of waiting and bytes so far, by name."""
        return self.states.traffic.by_way()

    def check(self) -> None:
        """Proves that the entries of all records agree with each other.

        Raises:
            AssertionError: they do not.
        """
        self.states.check()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled."""
        TrainedElsewhere.refuse()

    def close(self) -> None:
        """Waits for the checkpoint under way and ends the transfers; the model is of no use then.

        Raises:
            MoERuntimeError, OSError: the checkpoint could not be written; the one before is intact.
        """
        self._checkpoints.close()
        self.states.close()
        self._checkpoints.wait()


def trained_around_experts(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters beside the offloaded experts that require gradients, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, TrainedElsewhere)
    }


def require_no_new_parameters(model: nn.Module, known: Iterable[Tensor]) -> None:
    """Refuses parameters that came after the optimizer was made, which would not be trained.

    Raises:
        UnsupportedUseError: a parameter beside the experts requires gradients and is not known.
    """
    ids = set(map(id, known))
    for name, parameter in trained_around_experts(model).items():
        if id(parameter) not in ids:
            raise UnsupportedUseError(
                f"{name} requires gradients since the experts were offloaded and would not be "
                "trained: add adapters and set requires_grad before that"
            )


def require_trained(model: nn.Module) -> None:
    """Refuses a model of which nothing would be trained.

    Raises:
        ValueError: no parameter requires gradients.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "there is nothing to train: no parameter requires gradients; set requires_grad on "
            "those that shall be trained"
        )


def fill(
    states: ExpertStates,
    layouts: Mapping[ExpertKey, RecordLayout],
    tensors_of: Callable[[ExpertKey], Sequence[Tensor]],
) -> None:
    """Writes the first version of every expert: given weights, moments of zero."""
    for key, layout in layouts.items():
        record = states.acquire(key, Sections.NONE, writes=True)
        layout.clear(record, Sections.ALL)
        views = layout.views(record, Sections.PARAMETERS)
        for view, tensor in zip(views, tensors_of(key), strict=True):
            view.copy_(tensor)
        states.write_state(key)
        states.release(key)
    states.commit()
