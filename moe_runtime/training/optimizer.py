"""The interface of the loop's optimizers, and AdamW in memory."""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe_runtime.errors import CheckpointError
from moe_runtime.training.checkpoint import (
    AMOUNT,
    COUNT,
    MAPPING,
    BackgroundSave,
    host_copy,
    require_kind,
    require_kinds,
    require_like,
    shown,
)

if TYPE_CHECKING:
    from moe_runtime.training.ranks import OneRank
    from moe_runtime.training.run_config import OptimizerConfig

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step.

    Attributes:
        gradient_norm: global norm of the gradients before clipping.
        bad_parameters: parameters whose gradients were not finite; if any, the step was skipped.
    """

    gradient_norm: float
    bad_parameters: tuple[str, ...] = ()


class StepOptimizer(abc.ABC):
    """An optimizer of the loop, wherever its states are and whenever it updates them.

    Attributes:
        keeps_newest_alone: a checkpoint takes over files that the last one names.
        dense: of all parameters but offloaded experts.
        saves: writes checkpoints in the background.
    """

    keeps_newest_alone = False
    dense: DenseAdamW

    def __init__(self) -> None:
        self.saves = BackgroundSave()

    @abc.abstractmethod
    def backward(self, parts: Sequence[Callable[[], Tensor]], *, rate: float) -> object:
        """Computes the losses of a step's micro-batches, one a part, and sums their gradients.

        After an exception of a part, no gradient is left.
        """

    @abc.abstractmethod
    def step(self, rate: float) -> StepOutcome:
        """Clips, updates and forgets the gradients; changes nothing if some are not finite."""

    def state_dict(self) -> dict[str, Any]:
        return self.dense.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`, or refuses it with a `CheckpointError`."""
        if "experts" in state:
            raise CheckpointError("the checkpoint is of a run with a host_memory; give one")
        self.dense.load_state_dict(state)

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Writes a copy of a state by a job in the background, while training goes on.

        Args:
            state: of the whole run, with the `state_dict` of this optimizer.
            own: finds that `state_dict` in it, for optimizers that complete it first.
            job: writes a state to its place, atomically.
        """
        del own
        self.saves.wait()  # one copy at a time
        copied = host_copy(state)
        self.saves.start(lambda: job(copied))

    def wait(self) -> None:
        """Waits until the last checkpoint is durable; raises if it could not be written."""
        self.saves.wait()

    def transfers(self) -> dict[str, Any]:
        """Seconds of waiting and bytes so far, by name; empty where nothing is moved."""
        return {}

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Ends background work; an offloaded model is unusable then."""
        self.saves.close()


class DenseAdamW:
    """torch's AdamW over named parameters; norms and biases do not decay.

    Attributes:
        adamw: None without parameters.
    """

    def __init__(
        self,
        named: Mapping[str, Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._named = dict(named)
        self.adamw: torch.optim.AdamW | None = None
        if self._named:
            groups = list(_groups(self._named, weight_decay))
            self.adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """AdamW's groups that have parameters; changes in them hold for the next step."""
        groups = [] if self.adamw is None else self.adamw.param_groups
        return [group for group in groups if group["params"]]

    def parameters(self) -> list[Tensor]:
        return list(self._named.values())

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self._named.values() if p.grad is not None]

    def norm(self) -> float:
        gradients = self.gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def bad_gradients(self) -> tuple[str, ...]:
        return tuple(
            name
            for name, parameter in self._named.items()
            if parameter.grad is not None and not _is_finite(parameter.grad)
        )

    def step(self, rate: float | None = None, scale: float = 1.0) -> None:
        """Takes a step; `rate` is of all groups, None for the rate of each."""
        if scale != 1:
            for gradient in self.gradients():
                gradient.mul_(scale)
        if self.adamw is not None:
            for group in self.adamw.param_groups if rate is not None else ():
                group["lr"] = rate
            self.adamw.step()

    def clipped_step(self, rate: float, clip_norm: float, norm: float | None = None) -> StepOutcome:
        """As `StepOptimizer.step`; `norm` is of all gradients, if other processes have some."""
        norm = self.norm() if norm is None else norm
        bad: tuple[str, ...] = ()
        if not math.isfinite(norm):
            bad = self.bad_gradients() or ("the experts of another process",)
        if not bad:
            self.step(rate, clip_scale(norm, clip_norm))
        self.forget()
        return StepOutcome(norm, bad)

    def forget(self) -> None:
        for parameter in self._named.values():
            parameter.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's states by parameter, in place: `exp_avg`, `exp_avg_sq`, `step`."""
        if self.adamw is None:
            return {}
        for parameter in self._named.values():
            state = self.adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        return {name: dict(self.adamw.state[p]) for name, p in self._named.items()}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.adamw is None else self.adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.state_dict()
        kinds = {"state": MAPPING, "param_groups": MAPPING.listed()} if own else {}
        require_kinds(state, kinds, "the optimizer's state")
        if self.adamw is None:
            return
        numbers, found = (
            [group.get("params") for group in groups["param_groups"]] for groups in (own, state)
        )
        if not COUNT.listed().listed().fits(found) or found != numbers:
            raise CheckpointError("the optimizer's state belongs to other parameters")
        parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        for number, moments in state["state"].items():
            if number not in range(len(parameters)):
                raise CheckpointError(f"the optimizer's state has a parameter {shown(number)}")
            what = f"the optimizer's state of parameter {number}"
            require_moments(moments, parameters[number], what)
        self.adamw.load_state_dict({**own, "state": state["state"]})


def require_moments(moments: Any, parameter: Tensor, what: str) -> None:
    """Refuses a stored state that is not AdamW's for a parameter."""
    step = moments.get("step") if isinstance(moments, Mapping) else None
    # torch counts in fp64 where that is the default type
    kind = step.dtype if isinstance(step, Tensor) and step.is_floating_point() else None
    count = torch.zeros((), dtype=kind)
    require_like(moments, {"step": count, "exp_avg": parameter, "exp_avg_sq": parameter}, what)
    require_kind(moments["step"].item(), AMOUNT, f"{what}: step")


class Optimizer(StepOptimizer):
    """AdamW in memory, by one process or by several."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, ranks: OneRank | None = None
    ) -> None:
        super().__init__()
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._named:
            raise ValueError("the model has no trainable parameter")
        self._ranks, self._clip_norm = ranks, config.clip_norm
        self.dense = DenseAdamW(
            self._named,
            lr=config.peak_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def backward(self, parts: Sequence[Callable[[], Tensor]], *, rate: float) -> None:
        del rate  # for optimizers that update inside the backward pass
        with contextlib.ExitStack() as failed:
            # gradients of some parts would be added to those of the next step
            failed.callback(self.dense.forget)
            for number, part in enumerate(parts, 1):
                if self._ranks is not None:
                    self._ranks.begin_part(is_last=number == len(parts))
                part().backward()
            failed.pop_all()

    def step(self, rate: float) -> StepOutcome:
        norm = None
        if self._ranks is not None:
            self._ranks.reduce_gradients(self._named)
            norm = self._ranks.gradient_norm(self._named)
        outcome = self.dense.clipped_step(rate, self._clip_norm, norm)
        if self._ranks is not None:
            self._ranks.after_step(self.dense.adamw)
        return outcome


def state_order(named: Mapping[str, Tensor]) -> list[str]:
    """Names of a whole model's parameters in the order of `DenseAdamW.state_dict`."""
    return sorted(named, key=lambda name: not decays(name, named[name]))


def clip_scale(norm: float, clip_norm: float) -> float:
    """Factor that brings gradients of a global norm down to `clip_norm`; 0 does not clip."""
    return clip_norm / norm if clip_norm and math.isfinite(norm) and norm > clip_norm else 1.0


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices and stacks of them, never to norms and biases."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _is_finite(gradient: Tensor) -> bool:
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(local.isfinite().all())


def _groups(named: Mapping[str, Tensor], weight_decay: float) -> Iterator[dict[str, Any]]:
    """AdamW's groups of parameters, some of them empty.

    The fused kernel needs separate calls for whole parameters and for those of every mesh.
    """
    decaying = [p for name, p in named.items() if decays(name, p)]
    others = [p for name, p in named.items() if not decays(name, p)]
    for parameters, decay in ((decaying, weight_decay), (others, 0.0)):
        by_mesh: dict[DeviceMesh | None, list[Tensor]] = {None: []}
        for parameter in parameters:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        for alike in by_mesh.values():
            yield {"params": alike, "weight_decay": decay}
