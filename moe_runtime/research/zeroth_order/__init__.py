"""Zeroth-order training of a model whose routed experts live elsewhere: forward passes alone.

MeZO measures the loss to both sides of the parameters along a random direction, and moves along it
by the difference. The two forward passes of all micro-batches go through the model side by side and
meet at the experts. An expert crosses the disk once per direction and step: it gets the update of
the step before, is moved to one side, computed with, moved to the other, computed with, moved back,
and written.

A direction is drawn from its seed wherever it is needed. The seed names step and tensor, not the
order in which tensors come by. An expert's content is counted in half steps: 2 t before step t, and
2 t + 1 after it was moved to both sides and back in step t, whose update waits for the slope. The
roundings are those of MeZO in memory, so the parameters are the same to the bit.

Sources: Malladi et al., "Fine-Tuning Language Models with Just Forward Passes" (MeZO, 2023); Wang
et al., "ZO2: Scalable Zeroth-Order Fine-Tuning for Extremely Large Language Models with Limited GPU
Memory" (2025).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn

from moe_runtime.config import MemorySize, nearest, require_types
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.layer.experts import compute_dtype
from moe_runtime.training.checkpoint import AMOUNT, MAPPING, NUMBER, PLAIN, require_kinds
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.offload.checkpoint import ExpertCheckpoints
from moe_runtime.training.offload.entry import (
    find_sites,
    layouts_of,
    open_records,
    plan_memory,
    require_whole_saves,
)
from moe_runtime.training.offload.memory import DEFAULT_ACTIVATION_SHARE, TrainingMemory
from moe_runtime.training.offload.offloaded_training import (
    ExpertTraining,
    fill,
    require_no_new_parameters,
    require_trained,
    trained_around_experts,
)
from moe_runtime.training.offload.passes import (
    AbsentExperts,
    ExpertsExecutor,
    LayerInput,
    MicroBatchWindow,
    streamed,
    visited,
)
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import Sections, StateFormat
from moe_runtime.training.offload.site import ExpertsSite, processes_of
from moe_runtime.training.optimizer import StepOutcome, decays
from moe_runtime.types import ExpertKey

Untouched = Literal["dense_exact", "sparse_skip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrder:
    """Settings of MeZO.

    Attributes:
        lr: learning rate of steps that name no other.
        eps: distance at which the loss is measured to both sides.
        weight_decay: decay of matrices; norms and biases do not decay.
        seed: of all directions.
        untouched: experts without tokens in a step: `dense_exact` moves them as MeZO does,
            `sparse_skip` leaves them, so that a step reads and writes only what it computes with.
    """

    lr: float = 1e-7
    eps: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0
    untouched: Untouched = "dense_exact"

    def __post_init__(self) -> None:
        kinds = {**dict.fromkeys(("lr", "eps", "weight_decay"), (int, float)), "seed": (int,)}
        require_types(kinds, {name: getattr(self, name) for name in kinds})
        for name in ("lr", "weight_decay"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                value = getattr(self, name)
                raise ValueError(f"{name} must be finite and at least 0, got {value}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be positive, got {self.eps}")
        if self.untouched not in get_args(Untouched):
            hint = nearest(str(self.untouched), get_args(Untouched))
            raise ValueError(f"untouched is {self.untouched!r}; {hint}")


def direction(like: Tensor, *, seed: int, step: int, name: str) -> Tensor:
    """Normal numbers for one tensor in one step, in its shape, dtype and device."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # drawn on the host wherever the tensor is, so that a device gets the same numbers
    drawn = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    return drawn.to(like.device)


def perturb(tensor: Tensor, along: Tensor, distance: float) -> None:
    """Moves a tensor, in two roundings, as they are in any layout of its elements."""
    tensor.add_(along * distance)


def descend(tensor: Tensor, along: Tensor, slope: float, *, rate: float, decay: float) -> None:
    """The update: `tensor -= rate * (slope * along + decay * tensor)`."""
    move = along * slope
    if decay:
        move.add_(tensor * decay)
    tensor.sub_(move.mul_(rate))


_SIDES = (1, -2, 1)
"""Distances, in `eps`: to one side, from there to the other, and back."""


class SpsaExecutor(ExpertsExecutor):
    """Forward passes of layers whose experts come once for both sides.

    Attributes:
        slopes: projected gradient of each step so far; None where it was not finite.
        rates: learning rate of each step so far.
        num_left: how many of the inputs of a layer belong to the first side; 0 outside a step.
    """

    def __init__(
        self, sites: Sequence[ExpertsSite], records: RecordStore, settings: ZerothOrder
    ) -> None:
        self.slopes: list[float | None] = []
        self.rates: list[float] = []
        super().__init__(sites)
        self.num_left = 0
        self._records = records
        self._settings = settings

    @property
    def step(self) -> int:
        return len(self.slopes)

    def finish_step(self, slope: float | None, rate: float) -> None:
        """Takes the step's slope; experts move by it when they are needed next."""
        self.slopes.append(slope)
        self.rates.append(rate)
        self._records.commit()
        self._expect(0, [])

    def forward(self, layer: int, inputs: Sequence[LayerInput]) -> list[Tensor]:
        """`[T, D]` outputs of a layer, one of each input: both sides in a step, else as it is."""
        site = self._sites[layer]
        calls = streamed(site, inputs)
        keys = visited(layer, calls)
        self._expect(layer, keys)
        self._last_visited[layer] = keys
        for call in calls:
            call.begin_forward(0, keeps=False)
        for key in keys:
            if self.num_left:
                self._visit(key, calls[: self.num_left], calls[self.num_left :])
            else:
                self._compute(key, self._fetch(key), calls)
                self._records.release(key)
        return [call.output() for call in calls]

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        record = self._fetch(key)
        named = self._named(key, record)
        copies = {name: tensor.clone() for name, tensor in named.items()}
        self._records.release(key)
        return copies

    def _visit(
        self, key: ExpertKey, left: list[StreamedExperts], right: list[StreamedExperts]
    ) -> None:
        record = self._fetch(key)
        named = self._trained(key, record)
        along = self._directions(key, named, self.step)
        for distance, calls in zip(_SIDES, (left, right, []), strict=True):
            self._shift(named, along, distance)
            self._compute(key, record, calls)
        if named:
            self._records.set_content_step(key, 2 * self.step + 1)
            self._records.write_state(key)
        self._records.release(key)

    def _fetch(self, key: ExpertKey) -> Tensor:
        """An expert's record after all steps so far."""
        trains = bool(self._records.experts[key].layout.trained)
        record = self._records.acquire(key, Sections.PARAMETERS, writes=trains)
        behind = self._records.content_step(key)
        if behind >= 2 * self.step or not trains:
            return record
        self._catch_up(key, self._trained(key, record), behind)
        self._records.set_content_step(key, 2 * self.step)
        return record

    def _catch_up(self, key: ExpertKey, named: dict[str, Tensor], behind: int) -> None:
        """Makes the update that waits, and takes the steps that the expert was not visited in."""
        first, is_visited = divmod(behind, 2)
        moves_always = self._settings.untouched == "dense_exact"
        for step in range(first, self.step):
            was_visited = step == first and is_visited
            if not (was_visited or moves_always):
                return
            along = self._directions(key, named, step)
            for distance in () if was_visited else _SIDES:
                self._shift(named, along, distance)
            slope, rate = self.slopes[step], self.rates[step]
            if slope is None:
                continue
            for one in self._records.experts[key].layout.trained:
                decay = self._settings.weight_decay if one.decays else 0.0
                descend(named[one.name], along[one.name], slope, rate=rate, decay=decay)

    def _shift(self, named: dict[str, Tensor], along: dict[str, Tensor], times: int) -> None:
        for name, tensor in named.items():
            perturb(tensor, along[name], times * self._settings.eps)

    def _directions(self, key: ExpertKey, named: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        place = self._sites[key.layer].name
        return {
            name: direction(
                tensor, seed=self._settings.seed, step=step, name=f"{place}.{name}.{key.expert}"
            )
            for name, tensor in named.items()
        }

    def _compute(self, key: ExpertKey, record: Tensor, calls: Sequence[StreamedExperts]) -> None:
        here = [call for call in calls if call.num_rows(key.expert)]
        if not here:
            return
        named, x_TD = self._named(key, record), here[0].x_TD
        views = [view.to(x_TD.device, x_TD.dtype) for view in named.values()]
        weights = self._sites[key.layer].stacked([*named], views)
        for call in here:
            call.forward(key.expert, weights)

    def _named(self, key: ExpertKey, record: Tensor) -> dict[str, Tensor]:
        return self._records.experts[key].layout.views(record, Sections.PARAMETERS)

    def _trained(self, key: ExpertKey, record: Tensor) -> dict[str, Tensor]:
        """The parameters that move."""
        named = self._named(key, record)
        return {t.name: named[t.name] for t in self._records.experts[key].layout.trained}

    def _expect(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Reads ahead: this layer's experts, then those that the next layer had last time."""
        following = self._last_visited.get(layer + 1 if keys else layer, [])
        self._records.expect((key, Sections.PARAMETERS) for key in [*keys, *following])


class SpsaExperts(AbsentExperts):
    """Routed experts whose parameters are not here, for forward passes to both sides."""

    def __init__(self, site: ExpertsSite, layer: int, executor: SpsaExecutor) -> None:
        super().__init__(site, layer, has_gradient=lambda: False)
        self._executor = executor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`; a backward pass is refused."""
        x_TD = hidden_states.detach().to(compute_dtype(hidden_states))
        entry = LayerInput(x_TD, top_k_index, top_k_weights.detach())

        def together(entries: list[LayerInput]) -> list[Tensor]:
            # another thread's part may have left autocast or gradients on
            with torch.no_grad(), without_autocast(hidden_states.device.type):
                return self._executor.forward(self.layer, entries)

        if self.window is None:
            (out_TD,) = together([entry])
        else:
            out_TD = self.window.meet(self.layer, entry, together)
        out_TD = out_TD.to(hidden_states.dtype) if self._keeps_dtype else out_TD
        return _NoBackward.apply(out_TD, hidden_states, top_k_weights)


class _NoBackward(torch.autograd.Function):
    """Passes an output through, and refuses gradients, which would lack the experts' part."""

    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, *inputs: Tensor) -> Tensor:
        return out_TD.view_as(out_TD)

    @staticmethod
    @first_derivatives_only("experts of offload_zeroth_order have no derivatives")
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise UnsupportedUseError(
            "offload_zeroth_order trains by forward passes alone: call `backward` and `step` of "
            "the optimizer that it returned, or train by gradients with offload_training"
        )


PARAMETERS_ALONE = StateFormat(trains=False)
"""Records hold parameters alone: there are no gradients."""
_KINDS = {
    "experts": MAPPING,
    "seed": PLAIN,
    "slopes": NUMBER.or_none().listed(),
    "rates": AMOUNT.listed(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderStep(StepOutcome):
    """Measured in a step: mean `loss` of both sides, and their difference over the distance."""

    loss: float
    slope: float

    @property
    def is_skipped(self) -> bool:
        """Whether the losses were not finite, so that nothing moved."""
        return bool(self.bad_parameters)


@dataclass(frozen=True, slots=True)
class _Measured:
    """The losses to both sides, summed over micro-batches; dense parameters of the second."""

    left: float
    right: float
    minus: dict[str, Tensor]
    rate: float


class ZerothOrderTraining(ExpertTraining):
    """MeZO on a whole model; `offload_zeroth_order` makes it.

    A step is `backward`, which makes forward passes alone, and `step`, as of other optimizers.
    """

    _executor: SpsaExecutor

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsSite],
        records: RecordStore,
        settings: ZerothOrder,
        memory: TrainingMemory,
    ) -> None:
        checkpoints = ExpertCheckpoints(records, sites, PARAMETERS_ALONE)
        super().__init__(model, sites, records, memory, checkpoints)
        self._settings = settings
        self._measured: _Measured | None = None
        self._executor = SpsaExecutor(sites, records, settings)
        self._modules: list[SpsaExperts] = []
        for layer, site in enumerate(sites):
            module = SpsaExperts(site, layer, self._executor)
            module.train(site.module.training)
            site.put(model, module)
            self._modules.append(module)
        self._dense = trained_around_experts(model)

    @property
    def num_steps(self) -> int:
        return self._executor.step - self.skipped_steps

    def backward(
        self, parts: Sequence[Callable[[], Tensor]], *, rate: float | None = None
    ) -> list[Tensor]:
        """Measures the losses to both sides, in forward passes of all micro-batches side by side.

        Args:
            parts: each computes the loss of one micro-batch, divided by their number where a mean
                is wanted; called twice, with other random draws of the model.
            rate: learning rate; the settings' when omitted.

        Returns:
            The losses, those to the first side first.

        Raises:
            MoERuntimeError: an expert could not be read or written. After any error go on from the
                last checkpoint: some experts are perturbed.
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
        window = MicroBatchWindow(
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
        """Moves everything by the slope of `backward`; experts when they are needed next.

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
                decay = self._settings.weight_decay if decays(name, self._dense[name]) else 0.0
                descend(tensor, along, slope, rate=measured.rate, decay=decay)
        self._executor.finish_step(None if is_skipped else slope, measured.rate)
        self.skipped_steps += is_skipped
        return ZerothOrderStep(
            gradient_norm=abs(slope),
            bad_parameters=("the losses to both sides",) if is_skipped else (),
            loss=(measured.left + measured.right) / 2,
            slope=slope,
        )

    def state_dict(self) -> dict[str, Any]:
        """Slopes and rates so far, and which version of every expert belongs to them.

        Raises:
            CheckpointError: there is no `storage_dir`.
            MoERuntimeError, OSError: the checkpoint before could not be written.
        """
        return {
            "experts": self._checkpoints.begin(),
            "seed": self._settings.seed,
            "slopes": list(self._executor.slopes),
            "rates": list(self._executor.rates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, under any budget.

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
        self._executor.slopes[:] = state["slopes"]
        self._executor.rates[:] = state["rates"]
        self.skipped_steps = self._executor.slopes.count(None)

    def _move_dense(self, tensors: Mapping[str, Tensor], times: int) -> None:
        for name, tensor in tensors.items():
            perturb(tensor, self._direction(name, tensor), times * self._settings.eps)

    def _direction(self, name: str, tensor: Tensor) -> Tensor:
        return direction(tensor, seed=self._settings.seed, step=self._executor.step, name=name)

    def _use(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._dense[name].data = tensor

    def _set_window(self, window: MicroBatchWindow[Tensor] | None, num_left: int) -> None:
        self._executor.num_left = num_left
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

    The experts' parameters leave the model as in `offload_training`, without moments or gradients;
    arguments and errors as there. `optimizer` has the settings of MeZO.
    """
    require_trained(model)
    sites = find_sites(model)
    # Directions are drawn for whole models, and losses measured in one process.
    processes_of(None, sites, model)
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
    with contextlib.ExitStack() as opened:
        records = open_records(layouts, memory, folder, io_threads, direct)
        opened.callback(records.close)
        if not resumes:
            fill(records, sites, initial)
        require_whole_saves(model, sites)
        training = ZerothOrderTraining(model, sites, records, optimizer or ZerothOrder(), memory)
        opened.pop_all()
    return training


@dataclass(frozen=True, slots=True)
class ForwardPassesAlone:
    """The training method: both sides go through the model at once, and blocks keep nothing."""

    settings: ZerothOrder
    state_format = PARAMETERS_ALONE
    num_sides = 2
    has_backward = False

    def offload(self, model: nn.Module, **places: Any) -> ZerothOrderTraining:
        return offload_zeroth_order(model, optimizer=self.settings, **places)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderConfig:
    """Training by forward passes alone: `eps` and `untouched` as of `ZerothOrder`."""

    eps: float = 1e-3
    untouched: Untouched = "dense_exact"

    def __post_init__(self) -> None:
        # the optimizer checks its settings
        ZerothOrder(eps=self.eps, untouched=self.untouched)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZerothOrderFinetuneConfig(FinetuneConfig):
    """A fine-tuning run without gradients."""

    zeroth_order: ZerothOrderConfig = field(default_factory=ZerothOrderConfig)

    def __post_init__(self) -> None:
        if self.lora is not None:
            raise ValueError("lora and zeroth_order are two ways to train; leave one of them out")
        if self.run.recompute:
            raise ValueError("zeroth_order has no backward pass to recompute for; leave it out")

    @property
    def method(self) -> ForwardPassesAlone:
        return ForwardPassesAlone(
            ZerothOrder(
                weight_decay=self.optimizer.weight_decay,
                seed=self.run.seed,
                **dataclasses.asdict(self.zeroth_order),
            )
        )


__all__ = ["ZerothOrder", "ZerothOrderTraining", "offload_zeroth_order"]
