"""`offload_training` moves the experts of a model to where there is room, to train them there."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from moe_runtime.allocator import return_freed_blocks
from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.checkpoints.expert_map import find_experts
from moe_runtime.checkpoints.transformers_private import gate_of, has_adapters
from moe_runtime.config import MemorySize, parse_budget, require_types
from moe_runtime.errors import CheckpointError, UnsupportedModelError, UnsupportedUseError
from moe_runtime.inference.budget import available_host_bytes, resolve_budget
from moe_runtime.inference.known_classes import recognise_activation
from moe_runtime.layer import Experts
from moe_runtime.parallel import LayoutGroups
from moe_runtime.training.offload.activations import (
    SLOT_BYTES,
    ActivationPolicy,
    Activations,
    ActivationSwap,
)
from moe_runtime.training.offload.adamw import AdamW
from moe_runtime.training.offload.device_updates import DeviceUpdates, planned_updates
from moe_runtime.training.offload.disk import Disk
from moe_runtime.training.offload.memory import (
    CPU,
    DEFAULT_ACTIVATION_SHARE,
    TrainingMemory,
    computing_device,
    dense_bytes,
    device_shares,
    divide,
    held_bytes,
    link_bytes,
    open_link,
    saved_bytes,
)
from moe_runtime.training.offload.offloaded_training import OffloadedTraining, fill, require_trained
from moe_runtime.training.offload.record_store import RecordStore
from moe_runtime.training.offload.records import RecordLayout, StateFormat
from moe_runtime.training.offload.site import (
    ExpertsSite,
    OneProcess,
    layer_sites,
    processes_of,
)
from moe_runtime.types import ExpertKey


def require_whole_saves(model: nn.Module, sites: Sequence[ExpertsSite]) -> None:
    """Makes `save_pretrained` of a model and of its parts refuse to leave experts out."""
    parameters = {
        f"{site.name}.{name}": site.module.get_parameter(name)
        for site in sites
        for name in site.parameter_names
    }
    trained = {name: parameter.requires_grad for name, parameter in parameters.items()}
    for path, part in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {n.removeprefix(prefix): t for n, t in trained.items() if n.startswith(prefix)}
        if own and hasattr(type(part), "save_pretrained"):
            part.__dict__["save_pretrained"] = _whole_save(part, own)


def _whole_save(model: Any, trained: Mapping[str, bool]) -> Any:
    """A model's `save_pretrained` that refuses; `trained` says of each expert parameter whether it
    is."""
    save = cast(Any, type(model)).save_pretrained

    @functools.wraps(save)
    def save_whole(*args: Any, **options: Any) -> None:
        bound = inspect.signature(save).bind(model, *args, **options).arguments
        state_dict = {**bound, **bound.get("kwargs", {})}.get("state_dict") or {}
        # adapters are saved without their base
        saves_adapters = has_adapters(model) or hasattr(model, "get_base_model")
        needed = [name for name, is_trained in trained.items() if is_trained or not saves_adapters]
        absent = (TrainedElsewhere, type(None))
        lacking = [name for name in needed if isinstance(state_dict.get(name), absent)]
        if lacking:
            raise UnsupportedUseError(
                f"{lacking[0]} is with the optimizer of offload_training, not in the model, and "
                "would be missing: give save_pretrained a state_dict with the experts "
                "(`stacked(layer)` of the optimizer has a layer's), or train with "
                "`moe-runtime finetune`, which writes them expert by expert"
            )
        save(model, *args, **options)

    return save_whole


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (nn.Module,),
    "storage_dir": (str, Path, type(None)),
    "optimizer": (AdamW, type(None)),
    "activations": (str,),
    "update_stride": (str, int, type(None)),
    "io_threads": (int,),
    **dict.fromkeys(("direct", "resumes"), (bool,)),
    "initial": (cast("type", Callable), type(None)),
}
"""Sizes and groups are checked when they are parsed."""


def offload_training(
    model: nn.Module,
    *,
    host_memory: MemorySize = "auto",
    device_memory: MemorySize = "auto",
    storage_dir: str | Path | None = None,
    optimizer: AdamW | None = None,
    copy_memory: MemorySize = 0,
    activation_memory: MemorySize = DEFAULT_ACTIVATION_SHARE,
    activations: Activations = "model",
    update_stride: int | Literal["auto"] | None = "auto",
    io_threads: int = 4,
    direct: bool = True,
    initial: Callable[[ExpertKey], Sequence[Tensor]] | None = None,
    resumes: bool = False,
    groups: LayoutGroups | None = None,
) -> OffloadedTraining:
    """Trains a model whose routed experts and their states do not fit where it computes.

    The experts' parameters leave the model. Weights, moments and gradients live in records in host
    memory as far as the budget goes, and in files beyond it. The results do not depend on the
    budget, the experts' places or the number of threads. Parameters that do not require gradients
    when this is called are not trained, experts included.

    Args:
        model: with `MoELayer`s, or of a family of transformers with its experts interface, or with
            such a model as a part.
        host_memory: budget for records, dense parameters with their states, and activations: bytes,
            a size, a share of free memory, or "auto".
        device_memory: budget on the GPU of a model there. Dense parameters with their states and
            activations come first; the rest keeps experts' weights from step to step. "auto" keeps
            none; a model on the CPU needs "auto".
        copy_memory: for a model on the CPU, the part of the budget that keeps experts' weights in
            the dtype of products (bf16 under autocast) instead of converting them for each pass.
        storage_dir: an existing folder on a fast disk, for experts beyond the budget and for
            checkpoints.
        optimizer: settings of AdamW.
        activation_memory: the part of the budget for activations: bytes, a size, or a share of the
            budget.
        activations: `keep`, `recompute` or `swap` (to `storage_dir`) the experts' activations of
            all layers between forward and backward pass; `model` follows each layer's setting;
            `auto` takes the fastest plan after measuring the first step, and keeps at most half of
            `activation_memory`. Not for blocks that are recomputed as a whole.
        update_stride: the GPU makes one of so many updates, the CPU the others (Deep Optimizer
            States). "auto" measures both and the link; None leaves all to the CPU. A GPU may round
            differently.
        io_threads: reads and writes in flight at once.
        direct: bypass the page cache where the file system can.
        initial: for experts on the meta device: returns an expert's tensors, in the order of its
            module's parameters. Called for one expert after another.
        resumes: `storage_dir` holds the experts of a checkpoint for `load_state_dict`; nothing is
            written there first.
        groups: the processes that share the experts, each whole and without copies
            (`MoELayer(..., group=ExpertSpread(groups=groups))`, or a model of transformers, which
            this divides). Each process has a budget, and files below `storage_dir` for its experts.
            A share of free memory, or "auto", is divided among the processes of a machine. All
            call this together, then `backward` with equally many parts, and `step`. Other
            parameters are equal on all, and their gradients averaged.

    Returns:
        The optimizer of the whole model; close it at the end.

    Raises:
        CapacityError: a budget or the disk is too small; names the smallest budget that works.
        CheckpointError: `storage_dir` is missing or cannot be written, or the checkpoint is damaged
            or of another model.
        UnsupportedModelError: the model has no routed experts that can leave it, or the layout
            divides or copies them.
        ValueError: a size cannot be parsed, an option has no such value, or no parameter requires
            gradients.
        TypeError: an option has a wrong type.
        RankFailureError: another process died or stalled.
    """
    require_types(_TYPES, locals())
    require_trained(model)
    settings = optimizer or AdamW()
    return_freed_blocks()
    sites = find_sites(model)
    place = computing_device(model, expert_parameters(sites))
    if groups is not None and groups.layout.world_size > 1:
        # every process has the whole model
        sites = [
            site
            if site.own is not None or isinstance(site.module, Experts)
            else site.divided(groups)
            for site in sites
        ]
    _check_device(place, device_memory, copy_memory, groups)
    processes = processes_of(groups, sites, model)
    layouts = layouts_of(sites, settings.state_format)
    memory = plan_memory(
        model, sites, host_memory, activation_memory,
        has_disk=storage_dir is not None, state=settings.state_format, copy_memory=copy_memory,
        sharing=processes.here, place=place,
    )  # fmt: skip
    elsewhere = _device_updates(place, update_stride)
    room, copies = memory.activation_bytes, memory.copy_bytes
    if place.type != "cpu":
        room, copies = device_shares(
            device_memory, activation_memory, place, [*layouts.values()],
            dense=memory.dense_bytes,
            held=held_bytes(model, expert_parameters(sites), place),
            updates=elsewhere,
        )  # fmt: skip
    folder = None if storage_dir is None else own_folder(Path(storage_dir), processes)
    with contextlib.ExitStack() as opened:
        records = open_records(layouts, memory, folder, io_threads, direct)
        opened.callback(records.close)
        link = open_link(records, place)  # may refuse: before every expert is written
        if not resumes:
            fill(records, sites, initial)
        policy = _activation_policy(activations, sites, room, folder, direct)
        opened.callback(policy.close)
        require_whole_saves(model, sites)
        training = OffloadedTraining(
            model, sites, records, settings, memory, activations=policy, device_updates=elsewhere,
            copy_bytes=copies, processes=processes, link=link,
        )  # fmt: skip
        opened.pop_all()
    return training


def plan_memory(
    model: nn.Module,
    sites: Sequence[ExpertsSite],
    host_memory: MemorySize,
    activation_memory: MemorySize,
    *,
    has_disk: bool,
    state: StateFormat | None = None,
    copy_memory: MemorySize = 0,
    sharing: int = 1,
    place: torch.device = CPU,
) -> TrainingMemory:
    """The division of a budget by `offload_training`; allocates nothing.

    Args:
        has_disk: experts may live on the disk.
        state: contents of records; full moments when omitted.
        sharing: processes that share the free memory of this machine.
        place: the device of the model, its dense parameters and activations.

    Raises:
        CapacityError: the budget is too small; names the smallest that works.
    """
    parameters = expert_parameters(sites)
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.is_cpu)
    budget = resolve_budget(
        parse_budget(host_memory, name="host_memory"),
        available_host_bytes() // sharing + held,
        "the host",
    )
    activations = parse_budget(activation_memory, name="activation_memory").resolve(
        budget, auto_share=DEFAULT_ACTIVATION_SHARE
    )
    copies = 0
    if copy_memory:
        copies = parse_budget(copy_memory, name="copy_memory").resolve(budget, auto_share=0.0)
    layouts = layouts_of(sites, state)
    # without a disk there are no checkpoints
    saves = has_disk and place.type != "cpu"
    return divide(
        budget,
        layouts,
        dense=dense_bytes(model, parameters),
        activations=activations,
        copies=copies,
        has_disk=has_disk,
        link=link_bytes(layouts.values(), place),
        saved=saved_bytes(model, parameters) if saves else 0,
    )


def find_sites(model: nn.Module) -> list[ExpertsSite]:
    sites = layer_sites(model)
    if not sites and any(hasattr(module, "config") for module in model.modules()):
        sites = _transformers_sites(model)
    if not sites:
        raise UnsupportedModelError(
            f"{type(model).__name__} has neither a MoELayer nor experts of transformers' "
            "experts interface, so there is nothing to offload"
        )
    return sites


def expert_parameters(sites: Sequence[ExpertsSite]) -> list[nn.Parameter]:
    return [site.module.get_parameter(n) for site in sites for n in site.parameter_names]


def layouts_of(
    sites: Sequence[ExpertsSite], state: StateFormat | None = None
) -> dict[ExpertKey, RecordLayout]:
    """The record layout of every expert, in order; with full moments when `state` is omitted."""
    layouts = [site.layout(state) for site in sites]
    return {
        ExpertKey(layer, expert): layouts[layer]
        for layer, site in enumerate(sites)
        for expert in site.experts_here
    }


def own_folder(storage_dir: Path, processes: OneProcess) -> Path:
    """The folder of a process's files, in or equal to the given one; is made if missing."""
    folder = storage_dir / processes.folder_name
    if not storage_dir.is_dir():
        raise CheckpointError(f"storage_dir {storage_dir} is not a directory; make it first")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {folder}: {error.strerror}") from None
    return folder


def open_records(
    layouts: Mapping[ExpertKey, RecordLayout],
    memory: TrainingMemory,
    storage_dir: Path | None,
    io_threads: int,
    direct: bool,
) -> RecordStore:
    disk = None
    if storage_dir is not None:
        disk = Disk(storage_dir, layouts, io_threads=io_threads, direct=direct)
    try:
        return RecordStore(
            layouts, resident=memory.resident, ring_slots=memory.ring_slots, disk=disk
        )
    except BaseException:
        if disk is not None:
            disk.close()
        raise


def _transformers_sites(model: Any) -> list[ExpertsSite]:
    sites = []
    for experts in find_experts(model):
        module = experts.module
        if experts.name.endswith(".base_layer"):  # PEFT changes the parameters in every call
            raise UnsupportedModelError(
                f"{experts.name} has adapters by PEFT's target_parameters, which cannot be trained "
                "with the experts offloaded: use `moe-runtime finetune --lora`, or merge them first"
            )
        others = {name for name, _ in module.named_parameters()} - set(experts.parameters)
        if others or getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(
                f"{experts.name} has parameters besides its experts "
                f"({', '.join(sorted(others)) or 'a norm after them'}); training it offloaded is "
                "not supported yet"
            )
        own = gate_of(module) if module.has_gate else module.act_fn
        sites.append(
            ExpertsSite(
                name=experts.name,
                module=module,
                num_experts=experts.num_experts,
                first="gate_up_proj" if module.has_gate else "up_proj",
                has_gate=module.has_gate,
                is_transposed=module.is_transposed,
                is_concatenated=module.is_concatenated,
                activation=recognise_activation(module) or own,
            )
        )
    return sites


def _activation_policy(
    kind: Activations,
    sites: Sequence[ExpertsSite],
    room: int,
    folder: Path | None,
    direct: bool,
) -> ActivationPolicy:
    swap = None
    if kind in ("swap", "auto") and folder is not None:
        # of transfers in both directions; a layer's own tensors come on top
        buffers = max(4 * SLOT_BYTES, room // 16)
        swap = ActivationSwap(folder, direct=direct, buffer_bytes=buffers)
    try:
        return ActivationPolicy(kind, [site.recompute for site in sites], swap, room // 2)
    except BaseException:
        if swap is not None:
            swap.close()
        raise


def _device_updates(
    place: torch.device, stride: int | Literal["auto"] | None
) -> DeviceUpdates | None:
    if stride == "auto":
        return None if place.type == "cpu" else planned_updates(place)
    if stride is not None and stride < 1:
        raise ValueError(f"update_stride must be at least 1, None or 'auto', got {stride}")
    return None if stride is None else DeviceUpdates(place, stride)


def _check_device(
    place: torch.device,
    device_memory: MemorySize,
    copy_memory: MemorySize,
    groups: LayoutGroups | None,
) -> None:
    if place.type == "cpu":
        if device_memory != "auto":
            raise ValueError(
                "device_memory is for models on a GPU; this one is on the CPU, "
                f"got {device_memory!r}"
            )
        return
    if copy_memory:
        raise ValueError(
            f"copy_memory is for models on the CPU; this one is on {place}: give device_memory"
        )
    if groups is not None and groups.layout.world_size > 1:
        raise UnsupportedModelError(
            f"experts that are trained from host memory by several processes are computed on the "
            f"CPU, this model is on {place}"
        )
