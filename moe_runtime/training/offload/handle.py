"""Training of a model whose routed experts live in host memory and on the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_runtime.errors import CheckpointError
from moe_runtime.training.offload.checkpoint import ExpertCheckpoints
from moe_runtime.training.offload.execution.activations import ActivationPolicy
from moe_runtime.training.offload.execution.device_link import DeviceLink
from moe_runtime.training.offload.execution.offloaded_experts import OffloadedTrainingExperts
from moe_runtime.training.offload.execution.passes import LayerExecutor
from moe_runtime.training.offload.execution.window import MicroBatchBarrier, run_window
from moe_runtime.training.offload.expert_training import (
    ExpertTraining,
    OffloadStats,
    require_no_new_parameters,
    trained_around_experts,
)
from moe_runtime.training.offload.memory import TrainingMemory
from moe_runtime.training.offload.optimizers.adamw import AdamW
from moe_runtime.training.offload.optimizers.dense_adamw import DenseAdamW, StepOutcome
from moe_runtime.training.offload.optimizers.device_updates import DeviceUpdates
from moe_runtime.training.offload.optimizers.optimizer import ExpertOptimizer
from moe_runtime.training.offload.processes import OneProcess
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.states import ExpertStates
from moe_runtime.training.stored_values import MAPPING, require_kind, require_kinds
from moe_runtime.types import ExpertKey

_KINDS = {"experts": MAPPING, "steps": MAPPING, "dense": MAPPING}


class OffloadedTraining(ExpertTraining):
    """The optimizer of a model whose experts live elsewhere; `offload_training` makes it.

    A step is `backward` and `step`:

        losses = training.backward([lambda part=part: loss_of(part) for part in micro_batches])
        outcome = training.step(rate)

    `loss.backward()` followed by `step` works as well; then the experts' gradients wait on their
    tiers for the step, and experts are fetched once for every micro-batch.

    Attributes:
        optimizer: of the experts.
        activations: what becomes of them between forward and backward pass.
        dense: of everything else.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsModuleSpec],
        states: ExpertStates,
        settings: AdamW,
        memory: TrainingMemory,
        activations: ActivationPolicy | None = None,
        device_updates: DeviceUpdates | None = None,
        copy_bytes: int = 0,
        processes: OneProcess | None = None,
        link: DeviceLink | None = None,
    ) -> None:
        self._processes = processes or OneProcess()
        checkpoints = ExpertCheckpoints(states, sites, settings.state_format, self._processes)
        super().__init__(model, sites, states, memory, checkpoints)
        self.optimizer = ExpertOptimizer(states, settings, device_updates, self._processes)
        self._passes = LayerExecutor(
            sites, self.optimizer, activations=activations, copy_bytes=copy_bytes, link=link
        )
        self.activations = self._passes.activations
        self._settings = settings
        self._names = [site.parameter_names for site in sites]
        self._final_rate: float | None = None
        self._modules: list[OffloadedTrainingExperts] = []
        for layer, site in enumerate(sites):
            module = OffloadedTrainingExperts(
                site, layer, self._passes, self.activations, lambda: self.optimizer.has_gradient
            )
            module.train(site.module.training)
            site.put(model, module)
            self._modules.append(module)
        self.dense = DenseAdamW(
            trained_around_experts(model),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        return self.optimizer.step

    def backward(
        self,
        parts: Sequence[Callable[[], Tensor]],
        *,
        rate: float | None = None,
        is_last: bool = True,
    ) -> list[Tensor]:
        """Forward and backward passes of the micro-batches of a step, experts fetched once for all.

        Args:
            parts: each computes the loss of one micro-batch, divided by their number where a mean
                is wanted.
            rate: learning rate of the step; None means that of the settings.
            is_last: whether these are all gradients of the step. If so, and unless the norm is
                needed first, experts on the disk are updated within the backward pass.

        Returns:
            The losses, detached.

        Raises:
            RuntimeError: `backward` was called again after the last part of a step.
            MoERuntimeError: an expert could not be read or written.
        """
        if self._final_rate is not None:
            raise RuntimeError("backward was called twice before step; give is_last=False at first")
        rate = self._settings.lr if rate is None else rate
        self._passes.begin(rate if is_last else None)
        self._final_rate = rate if is_last else None
        work = [partial(self._part, part) for part in parts]
        losses: list[Tensor] = []
        try:
            losses = run_window(self.model, work, self._set_window)
        finally:
            if not losses:
                self.discard()
        return losses

    def step(self, rate: float | None = None) -> StepOutcome:
        """Clips, updates what has not been updated yet, and forgets the gradients.

        Args:
            rate: learning rate; must be that of `backward`.

        Returns:
            The norm of the gradients, and who had some that were not finite: then the step is not
            taken, and what the backward pass had updated is taken back.

        Raises:
            ValueError: the rate is another than the backward pass had.
            UnsupportedUseError: the model got parameters to train after `offload_training`.
            MoERuntimeError: an expert could not be read or written.
        """
        require_no_new_parameters(self.model, self.dense.parameters())
        rate = self._settings.lr if rate is None else rate
        if self._final_rate is not None and rate != self._final_rate:
            raise ValueError(
                f"backward was told a rate of {self._final_rate}, step one of {rate}; "
                "experts were updated with the first"
            )
        self._processes.reduce_gradients(self.dense.parameters())
        dense_norm = self.dense.norm()
        bad_dense = () if math.isfinite(dense_norm) else self.dense.bad_gradients()
        own_bad = self.optimizer.bad_experts
        norm, scale, is_skipped = self.optimizer.finish(rate, dense_norm, bool(bad_dense))
        bad: tuple[str, ...] = ()
        if is_skipped:
            bad = self._names_everywhere(own_bad) + bad_dense
            self.skipped_steps += 1
            self._passes.copies.forget()
        else:
            self.dense.step(rate, scale)
            self._passes.copies.after_step()
        self.dense.forget()
        self.activations.finish_step()
        self._final_rate = None
        self._passes.begin()
        self._passes.expect_first_layer()
        return StepOutcome(norm, bad)

    def discard(self) -> None:
        """Forgets the gradients since the last step, and takes back what they changed."""
        self._passes.copies.forget()  # first: no copy may reach into a record that is given back
        self.optimizer.discard()
        self.dense.forget()
        self._final_rate = None
        self._passes.begin()

    def name_of(self, key: ExpertKey) -> str:
        """How reports call an expert."""
        return f"{self._sites[key.layer].name}.{key.expert}"

    def _names_everywhere(self, own: Sequence[ExpertKey]) -> tuple[str, ...]:
        """Names of the experts that some process has; a collective call."""
        keys = [
            ExpertKey(layer, e) for layer, s in enumerate(self._sites) for e in range(s.num_experts)
        ]
        votes = self._processes.sums([float(key in own) for key in keys])
        return tuple(self.name_of(key) for key, vote in zip(keys, votes, strict=True) if vote)

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters as they are after the steps so far, by name."""
        with self._passes.parameters(key) as named:
            return {name: tensor.clone() for name, tensor in named.items()}

    def stacked(self, layer: int) -> dict[str, Tensor]:
        """Copies of a layer's parameters, experts of this process first, in ascending order."""
        return {name: self._passes.stacked(layer, name) for name in self._names[layer]}

    def stats(self) -> OffloadStats:
        """Counters so far."""
        link = dataclasses.replace(self._passes.copies.traffic)
        return dataclasses.replace(super().stats(), link=link)

    def close(self) -> None:
        """As of `ExpertTraining`; activations on the disk end, too."""
        self._passes.copies.forget()
        with contextlib.closing(self.activations):
            super().close()

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts, and which version of every expert belongs to them.

        Part of a checkpoint that `write` saves; the experts themselves stay in `storage_dir`.

        Raises:
            CheckpointError: there is no `storage_dir`.
            MoERuntimeError, OSError: the checkpoint before could not be written.
        """
        return {
            "experts": self._checkpoints.begin(),
            "steps": self.optimizer.state_dict(),
            "dense": self.dense.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint has of `state_dict`, under any budget.

        Raises:
            CheckpointError: it is of another model, or damaged; says where.
        """
        require_kind(state, MAPPING, "the checkpoint's optimizer")
        if "experts" not in state:
            raise CheckpointError(
                "the checkpoint is of a run whose experts were in memory; go on without a budget"
            )
        require_kinds(state, _KINDS, "the checkpoint's optimizer")
        self.optimizer.load_state_dict(state["steps"])
        self._checkpoints.restore(state["experts"], self.optimizer.step)
        self._passes.copies.forget()
        self.dense.load_state_dict(state["dense"])

    def _part(self, part: Callable[[], Tensor]) -> Tensor:
        loss = part()
        scale = self.optimizer.loss_scale.value
        (loss if scale == 1 else loss * scale).backward()
        return loss.detach()

    def _set_window(self, window: MicroBatchBarrier[Any] | None) -> None:
        for module in self._modules:
            module.window = window
