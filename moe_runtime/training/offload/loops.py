"""Offloaded training in the loops of others: GradScaler of torch, accelerate, Trainers.

Each has places where it would see the parameters around the experts alone: it scales gradients
back, clips, saves and resumes. Those places are given functions that see all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.checkpoints.transformers_private import has_adapters
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedUseError
from moe_runtime.inference.budget import available_host_bytes

if TYPE_CHECKING:
    from moe_runtime.training.offload.offloaded_training import OffloadedTraining

T = TypeVar("T")
EXPERTS = "experts"
"""Folder of a Trainer's checkpoint with the records of the experts."""
_STATES = "optimizer.pt"


def attach(training: OffloadedTraining, loop: T) -> T:
    """As of `OffloadedTraining.attach`."""
    found: Any = loop
    places = ("_save", "clip_grad_norm_", "_unscale_grads_")
    if not vars(found).keys().isdisjoint(places):
        raise UnsupportedUseError(
            f"this {type(found).__name__} is attached already: attach it once, to one training"
        )
    if isinstance(found, torch.amp.GradScaler):
        _attach_scaler(training, found)
        return loop
    if hasattr(found, "accelerator"):
        _attach_trainer(training, found)
        found = found.accelerator
    if not hasattr(found, "unscale_gradients"):
        raise UnsupportedUseError(
            "attach takes a Trainer, an Accelerator or a GradScaler of torch, got "
            f"{type(loop).__name__}"
        )

    def clip_grad_norm(parameters: object, max_norm: float, norm_type: float = 2) -> Tensor:
        del parameters  # of which some processes and files have a part
        if norm_type != 2:
            raise UnsupportedUseError(f"gradients are clipped by their 2-norm, not {norm_type}")
        found.unscale_gradients()
        return torch.tensor(training.clip_grad_norm(float(max_norm)))

    found.clip_grad_norm_ = clip_grad_norm
    if found.scaler is not None:
        _attach_scaler(training, found.scaler)
    return loop


def _attach_scaler(training: OffloadedTraining, scaler: Any) -> None:
    """Has a scaler divide the experts' gradients too, and skip a step for their overflows."""
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
            training.zero_grad()  # what was skipped
        return result

    scaler._unscale_grads_, scaler.step = unscale, step


def _attach_trainer(training: OffloadedTraining, trainer: Any) -> None:
    _require_sound(training, trainer)
    trainer.optimizer = training
    trainer._mixed_mesh_grads = False  # what it would look at gradients for
    save, save_states = trainer._save, trainer._save_optimizer_and_scheduler
    load, load_states = training.load_state_dict, trainer._load_optimizer_and_scheduler

    def save_whole(output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and not _saves_adapters(trainer.model):
            state_dict = whole_state(training)
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

        def take_up(state: Any) -> None:
            load(state, folder=folder / EXPERTS)

        with _instead(training, "load_state_dict", take_up):
            load_states(checkpoint)

    def load_best() -> None:
        folder = Path(trainer.state.best_model_checkpoint)
        state = torch.load(folder / _STATES, map_location="cpu", weights_only=True)
        load(state, folder=folder / EXPERTS)

    trainer._save, trainer._save_optimizer_and_scheduler = save_whole, save_states_whole
    trainer._load_optimizer_and_scheduler, trainer._load_best_model = load_states_whole, load_best
    # the states bring the parameters
    trainer._load_from_checkpoint = lambda checkpoint, model=None: None


def _require_sound(training: OffloadedTraining, trainer: Any) -> None:
    """Refuses what would fail, or lose experts, only when training has begun."""
    arguments = trainer.args
    if trainer.accelerator.num_processes > 1 or training.num_processes > 1:
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


def whole_state(training: OffloadedTraining) -> dict[str, Tensor]:
    """The state of the whole model, experts included, as it was before they left it.

    Raises:
        CapacityError: there is not enough memory for the experts' weights.
    """
    _require_room(training)
    state = dict(training.model.state_dict())
    return state | {
        f"{site.name}.{name}": tensor
        for layer, site in enumerate(training.sites)
        for name, tensor in training.stacked(layer).items()
    }


@contextlib.contextmanager
def _instead(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A `with` block in which an object has another method."""
    vars(owner)[name] = function
    try:
        yield
    finally:
        del vars(owner)[name]
