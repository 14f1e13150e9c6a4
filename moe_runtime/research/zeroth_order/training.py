"""Zeroth-order training of a model whose routed experts live elsewhere: forward passes alone.

MeZO measures the loss at two points, to both sides of the parameters along a random direction, and
moves along it by the difference. Here an expert crosses the disk once per direction and step: when
it is there, the update of the step before is made up for, it is moved to one side, computed with,
moved to the other, computed with, moved back, and sent back. The two forward passes of all
micro-batches go through the model side by side and meet at the experts.

The roundings are those of MeZO in memory, moving there and back included, so the parameters are
its to the bit. There are no gradients and no moments: a record is the parameters alone.

Source: Wang et al., "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models
with Limited GPU Memory" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_runtime.config import MemorySize
from moe_runtime.errors import CheckpointError
from moe_runtime.research.zeroth_order.directions import ZerothOrder, descend, direction, perturb
from moe_runtime.research.zeroth_order.spsa import SpsaExecutor, SpsaExperts
from moe_runtime.training.offload.checkpoint import ExpertCheckpoints
from moe_runtime.training.offload.execution.window import MicroBatchBarrier
from moe_runtime.training.offload.expert_training import (
    ExpertTraining,
    fill,
    require_no_new_parameters,
    require_trained,
    trained_around_experts,
)
from moe_runtime.training.offload.memory import DEFAULT_ACTIVATION_SHARE, TrainingMemory
from moe_runtime.training.offload.offloading import (
    find_sites,
    layouts_of,
    open_states,
    plan_memory,
    stacked_parameters,
)
from moe_runtime.training.offload.optimizers.dense_adamw import StepOutcome, decays
from moe_runtime.training.offload.processes import processes_of
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.records import StateFormat
from moe_runtime.training.offload.states.states import ExpertStates
from moe_runtime.training.offload.whole_saves import require_whole_saves
from moe_runtime.training.stored_values import AMOUNT, MAPPING, NUMBER, PLAIN, require_kinds
from moe_runtime.types import ExpertKey

PARAMETERS_ALONE = StateFormat(trains=False)
"""What a record holds: nothing is kept of gradients, because there are none."""
_KINDS = {
    "experts": MAPPING,
    "seed": PLAIN,
    "slopes": NUMBER.or_none().listed(),
    "rates": AMOUNT.listed(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderStep(StepOutcome):
    """What a step measured; the norm is that of the gradient along the direction.

    Attributes:
        loss: mean of the losses to both sides.
        slope: their difference over the distance, the projected gradient.
    """

    loss: float
    slope: float

    @property
    def is_skipped(self) -> bool:
        """Whether the losses were not finite, so that nothing moved."""
        return bool(self.bad_parameters)


@dataclass(frozen=True, slots=True)
class _Measured:
    """What the forward passes of a step found, until the step is taken.

    Attributes:
        left, right: the losses to both sides, summed over the micro-batches.
        minus: the dense parameters to the second side.
        rate: learning rate of the step.
    """

    left: float
    right: float
    minus: dict[str, Tensor]
    rate: float


class ZerothOrderTraining(ExpertTraining):
    """MeZO on a whole model; `offload_zeroth_order` makes it.

    A step is `backward`, which makes forward passes alone, and `step`, as of other optimizers.

    Args:
        model: its experts are replaced.
        sites: its experts.
        states: their records.
        settings: of MeZO.
        memory: how the budget was divided.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsModuleSpec],
        states: ExpertStates,
        settings: ZerothOrder,
        memory: TrainingMemory,
    ) -> None:
        checkpoints = ExpertCheckpoints(states, sites, PARAMETERS_ALONE)
        super().__init__(model, sites, states, memory, checkpoints)
        self._settings = settings
        self._measured: _Measured | None = None
        self._passes = SpsaExecutor(sites, states, settings)
        self._modules: list[SpsaExperts] = []
        for layer, site in enumerate(sites):
            module = SpsaExperts(site, layer, self._passes)
            module.train(site.module.training)
            site.put(model, module)
            self._modules.append(module)
        self._dense = trained_around_experts(model)

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        return self._passes.step - self.skipped_steps

    def backward(
        self, parts: Sequence[Callable[[], Tensor]], *, rate: float | None = None
    ) -> list[Tensor]:
        """Measures the losses to both sides, in forward passes of all micro-batches side by side.

        Args:
            parts: each computes the loss of one micro-batch, divided by their number where a mean
                is wanted; called twice. What a model draws at random differs between the two.
            rate: learning rate; the settings' when omitted.

        Returns:
            The losses, those to the first side first.

        Raises:
            MoERuntimeError: an expert could not be read or written. After this or any other error
                some experts are moved aside: go on from the last checkpoint.
            RuntimeError: the step that was measured last was not taken.
            UnsupportedUseError: the model got parameters to train after the training was made.
        """
        require_no_new_parameters(self.model, self._dense.values())
        if self._measured is not None:
            raise RuntimeError("backward was called twice before step")
        own = {name: p.data for name, p in self._dense.items() if p.requires_grad}
        plus = {name: tensor.clone() for name, tensor in own.items()}
        self._move_dense(plus, 1)
        minus = {name: tensor.clone() for name, tensor in plus.items()}
        self._move_dense(minus, -2)
        window = MicroBatchBarrier(
            self.model,
            [torch.no_grad()(part) for part in (*parts, *parts)],
            on_turn=lambda part: self._use(plus if part < len(parts) else minus),
        )
        self._set_window(window, len(parts))
        try:
            losses = window.run()
        finally:
            self._set_window(None, 0)
            self._use(own)
        self._measured = _Measured(
            left=sum(map(float, losses[: len(parts)])),
            right=sum(map(float, losses[len(parts) :])),
            minus=minus,
            rate=self._settings.lr if rate is None else rate,
        )
        return losses

    def step(self, rate: float | None = None) -> ZerothOrderStep:
        """Moves everything by what `backward` measured; experts when they are needed next.

        Args:
            rate: learning rate; must be that of `backward`.

        Raises:
            RuntimeError: nothing was measured.
            ValueError: the rate is another than `backward` had.
        """
        measured, self._measured = self._measured, None
        if measured is None:
            raise RuntimeError("step was called before backward")
        if rate is not None and rate != measured.rate:
            raise ValueError(f"backward was told a rate of {measured.rate}, step one of {rate}")
        self._move_dense(measured.minus, 1)
        slope = (measured.left - measured.right) / (2 * self._settings.eps)
        is_skipped = not math.isfinite(slope)
        for name, moved in measured.minus.items():
            tensor = self._dense[name].data
            tensor.copy_(moved)
            if not is_skipped:
                along = self._direction(name, tensor)
                descend(tensor, along, slope, rate=measured.rate, decay=self._decay(name))
        self._passes.finish_step(None if is_skipped else slope, measured.rate)
        self.skipped_steps += is_skipped
        return ZerothOrderStep(
            gradient_norm=abs(slope),
            bad_parameters=("the losses to both sides",) if is_skipped else (),
            loss=(measured.left + measured.right) / 2,
            slope=slope,
        )

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters as they are after the steps so far, by name."""
        return self._passes.expert(key)

    def stacked(self, layer: int) -> dict[str, Tensor]:
        """Copies of a layer's parameters as its module had them, experts first."""
        experts = [self.expert(ExpertKey(layer, e)) for e in range(self._sites[layer].num_experts)]
        return {name: torch.stack([e[name] for e in experts]) for name in experts[0]}

    def state_dict(self) -> dict[str, Any]:
        """Slopes and rates so far, and which version of every expert belongs to them.

        Raises:
            CheckpointError: there is no `storage_dir`.
            MoERuntimeError, OSError: the checkpoint before could not be written.
        """
        return {
            "experts": self._checkpoints.begin(),
            "seed": self._settings.seed,
            "slopes": list(self._passes.slopes),
            "rates": list(self._passes.rates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what a checkpoint has of `state_dict`, under any budget.

        Raises:
            CheckpointError: it is of another model or seed, or damaged.
        """
        require_kinds(state, _KINDS, "the checkpoint's optimizer")
        if len(state["slopes"]) != len(state["rates"]):
            raise CheckpointError("the checkpoint has not as many slopes as rates")
        if state["seed"] != self._settings.seed:
            raise CheckpointError(
                f"the checkpoint's directions have seed {state['seed']}, this run's "
                f"{self._settings.seed}"
            )
        self._checkpoints.restore(state["experts"], 2 * len(state["slopes"]) + 1)
        self._passes.slopes[:] = state["slopes"]
        self._passes.rates[:] = state["rates"]
        self.skipped_steps = self._passes.slopes.count(None)

    def _move_dense(self, tensors: Mapping[str, Tensor], times: int) -> None:
        for name, tensor in tensors.items():
            perturb(tensor, self._direction(name, tensor), times * self._settings.eps)

    def _direction(self, name: str, tensor: Tensor) -> Tensor:
        return direction(tensor, seed=self._settings.seed, step=self._passes.step, name=name)

    def _decay(self, name: str) -> float:
        return self._settings.weight_decay if decays(name, self._dense[name]) else 0.0

    def _use(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._dense[name].data = tensor

    def _set_window(self, window: MicroBatchBarrier[Tensor] | None, num_left: int) -> None:
        self._passes.num_left = num_left
        for module in self._modules:
            module.window = window


def offload_zeroth_order(
    model: nn.Module,
    *,
    host_memory: MemorySize = "auto",
    storage_dir: str | Path | None = None,
    optimizer: ZerothOrder | None = None,
    activation_memory: MemorySize = DEFAULT_ACTIVATION_SHARE,
    io_threads: int = 4,
    direct: bool = True,
    initial: Callable[[ExpertKey], Sequence[Tensor]] | None = None,
    resumes: bool = False,
) -> ZerothOrderTraining:
    """Fine-tunes a model by forward passes alone, its routed experts off memory.

    The experts' parameters leave the model as in `offload_training`, without moments or gradients.

    Args:
        model: with `MoELayer`s, or of a family of transformers with its experts interface.
        host_memory: budget: bytes, a size, a share of what is free, or "auto".
        storage_dir: an existing folder on a fast disk, for experts beyond the budget.
        optimizer: settings of MeZO.
        activation_memory: the part of the budget set aside for activations.
        io_threads: reads and writes in flight at once.
        direct: go past the page cache where the file system can.
        initial: for a model whose expert parameters are on the meta device, as of
            `offload_training`.
        resumes: `storage_dir` holds the experts of a checkpoint, which `load_state_dict` follows
            with: nothing is written there first.

    Raises:
        CapacityError: a budget or the disk is too small; names the smallest budget that works.
        CheckpointError: `storage_dir` is missing or cannot be written.
        UnsupportedModelError: the model has no routed experts that can leave it.
        ValueError: a size cannot be read, or no parameter requires gradients.
    """
    require_trained(model)
    sites = find_sites(model)
    # Directions are drawn for whole models, and losses measured in one process.
    processes_of(None, sites, model.parameters())
    layouts = layouts_of(sites, PARAMETERS_ALONE)
    memory = plan_memory(
        model,
        sites,
        host_memory,
        activation_memory,
        has_disk=storage_dir is not None,
        state=PARAMETERS_ALONE,
    )
    folder = None if storage_dir is None else Path(storage_dir)
    states = open_states(layouts, memory, folder, io_threads, direct)
    if not resumes:
        fill(states, layouts, initial or stacked_parameters(sites))
    require_whole_saves(model, sites)
    return ZerothOrderTraining(model, sites, states, optimizer or ZerothOrder(), memory)
