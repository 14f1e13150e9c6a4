"""Training runs with experts in host memory and on the disk, by `run.host_memory`.

Inside `StreamedInit`, stacks of expert matrices have no storage, and their random values are drawn
and dropped. Later each expert's matrices are drawn again from the same place in the stream of
random numbers. They have the same bits as in memory, if a matrix has a multiple of 16 elements,
which torch draws at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.config import format_bytes
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.expert_mlp.products import experts_code_bytes
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.layers import CHUNK_BYTES
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.parallel import ExpertSlots
from moe_runtime.training.checkpoint import TrainingState
from moe_runtime.training.offload.adamw import AdamW, bytes_of_step
from moe_runtime.training.offload.checkpoint import remove_own_files
from moe_runtime.training.offload.entry import (
    expert_parameters,
    find_sites,
    layouts_of,
    offload_training,
    plan_memory,
)
from moe_runtime.training.offload.memory import (
    CPU,
    SPARE_BYTES,
    TrainingMemory,
    dense_bytes,
    device_budget,
    expert_buffer_bytes,
    held_bytes,
    smallest_budget,
)
from moe_runtime.training.offload.offloaded_training import OffloadedTraining
from moe_runtime.training.offload.records import RecordLayout
from moe_runtime.training.offload.site import ExpertsSite
from moe_runtime.training.ranks import OneRank
from moe_runtime.training.run_config import LoopConfig, TrainConfig
from moe_runtime.training.tracing import signature_of_config, trace_bytes
from moe_runtime.types import ExpertKey

_ATEN = torch.ops.aten


@dataclass
class _Draw:
    """The last values drawn for a stack, and the generator's state before them."""

    mean: float
    std: float
    state: Tensor
    drawn: int = 0


class StreamedInit(TorchDispatchMode):
    """Makes tensors of three dimensions without storage, and notes the draws for them."""

    def __init__(self) -> None:
        super().__init__()
        self._draws: dict[int, _Draw] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is _ATEN.empty.memory_format and len(args[0]) == 3:
            return func(*args, **{**options, "device": torch.device("meta")})
        if func is _ATEN.normal_.default and args[0].is_meta:
            self._skip(*args)
            return args[0]
        return func(*args, **options)

    def tensors_of(self, sites: Sequence[ExpertsSite], key: ExpertKey) -> list[Tensor]:
        """One expert's first weights; call it for a layer's experts in ascending order."""
        module = sites[key.layer].module
        names = sites[key.layer].parameter_names
        return [self._draw(module.get_parameter(name), key.expert) for name in names]

    def _skip(self, stack: Tensor, mean: float = 0.0, std: float = 1.0) -> None:
        self._draws[_place(stack)] = _Draw(mean, std, torch.get_rng_state())
        matrix = torch.empty(stack.shape[1:], dtype=stack.dtype)
        for _ in range(len(stack)):
            matrix.normal_(mean, std)

    def _draw(self, stack: Tensor, expert: int) -> Tensor:
        draw = self._draws.get(_place(stack))
        if draw is None:
            return torch.zeros(stack.shape[1:], dtype=stack.dtype)
        assert draw.drawn <= expert, "experts are drawn in order"
        generator = torch.Generator()
        generator.set_state(draw.state)
        matrix = torch.empty(stack.shape[1:], dtype=stack.dtype)
        # skipped experts have their place in the stream
        for _ in range(draw.drawn, expert + 1):
            matrix.normal_(draw.mean, draw.std, generator=generator)
        draw.drawn = expert + 1
        draw.state = generator.get_state()
        return matrix


def _place(stack: Tensor) -> int:
    return stack.untyped_storage()._cdata


_SPARE_SHARE = 1 / 8
"""Added to the counted activations, for buffers of libraries and of the allocator."""


def build_model(config: TrainConfig, *, is_offloaded: bool) -> tuple[LanguageModel, StreamedInit]:
    streamed = StreamedInit()
    with streamed if is_offloaded else contextlib.nullcontext():
        model = LanguageModel(config.model, recompute=config.run.recompute)
    if is_offloaded:
        experts = {id(p) for site in find_sites(model) for p in site.module.parameters()}
        left_out = [n for n, p in model.named_parameters() if p.is_meta and id(p) not in experts]
        if left_out:
            raise UnsupportedModelError(
                f"run.host_memory cannot be used with this gate: {left_out[0]} is not an expert"
            )
    return model, streamed


def offloaded_optimizer(
    config: TrainConfig,
    model: LanguageModel,
    initial: Callable[[ExpertKey], Sequence[Tensor]],
    folder: Path,
    *,
    resumes: bool,
    ranks: OneRank,
) -> OffloadedTraining:
    """Moves the experts to their tiers.

    Args:
        initial: returns an expert's first weights; called in ascending order.
        folder: for experts beyond the budget, and their part of the checkpoints.
    """
    assert config.run.host_memory is not None, "only runs with a budget are offloaded"
    return offload_training(
        model,
        host_memory=config.run.host_memory,
        device_memory=config.run.device_memory,
        storage_dir=folder,
        optimizer=optimizer_settings(config),
        activation_memory=activation_bytes(config, ranks.num_data_ranks),
        activations=config.run.offload.activations,
        initial=initial,
        resumes=resumes,
        groups=ranks.layout_groups,
    )


@contextlib.contextmanager
def whole_run(
    config: TrainConfig, state: TrainingState, folder: Path
) -> Iterator[tuple[LanguageModel, OffloadedTraining]]:
    """A checkpoint's whole model in this process, from any number of processes."""
    model, first = build_model(config, is_offloaded=True)
    initial = partial(first.tensors_of, find_sites(model))
    settings = optimizer_settings(config)
    with all_experts(model, settings, folder, state, initial=initial) as training:
        model.load_state_dict(dict(state.model))
        yield model, training


@contextlib.contextmanager
def all_experts(
    model: nn.Module,
    settings: AdamW,
    folder: Path,
    state: TrainingState,
    *,
    initial: Callable[[ExpertKey], Sequence[Tensor]] | None = None,
) -> Iterator[OffloadedTraining]:
    """All experts of a checkpoint in this process, from any number of processes.

    Experts of several processes are collected in files that are removed at the end.

    Args:
        model: whole; the caller loads its other parameters.
        folder: of the experts' files.
    """
    sites = find_sites(model)
    layouts = layouts_of(sites, settings.state_format)
    training = offload_training(
        model,
        host_memory=smallest_budget(layouts, dense_bytes(model, expert_parameters(sites))) + 1,
        storage_dir=folder,
        optimizer=settings,
        # nothing is computed
        activation_memory=1,
        initial=initial,
        resumes=True,
    )
    are_elsewhere = False
    try:
        training.load_state_dict(dict(state.optimizer))
        rows = state.optimizer["experts"]["experts"].values()
        # files of one process lie in the folder itself, and stay
        are_elsewhere = all(row[5:] and row[5] for row in rows)
        yield training
    finally:
        training.close()
        if are_elsewhere:
            remove_own_files(folder)


def optimizer_settings(config: LoopConfig) -> AdamW:
    options, offload = config.optimizer, config.run.offload
    return AdamW(
        lr=options.peak_rate,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        clip_norm=options.clip_norm,
        **offload.optimizer_options(),
    )


def offload_plan(
    config: TrainConfig, model: LanguageModel, ranks: OneRank, place: torch.device = CPU
) -> dict[str, Any]:
    """Places of this process's experts, and bytes of a step in which every expert gets tokens.

    `place` is the device that computes.
    """
    assert config.run.host_memory is not None, "only runs with a budget are offloaded"
    sites, settings = find_sites(model), optimizer_settings(config)
    for number, site in enumerate(sites):
        slots = ExpertSlots.contiguous(site.num_experts, ranks.size)
        sites[number] = dataclasses.replace(site, own=tuple(slots.experts_of(ranks.rank)))
    memory = plan_memory(
        model, sites, config.run.host_memory, activation_bytes(config, ranks.num_data_ranks),
        has_disk=True, state=settings.state_format, place=place,
    )  # fmt: skip
    device_bytes = None
    if place.type != "cpu":
        held = held_bytes(model, expert_parameters(sites), place)
        device_bytes = device_budget(config.run.device_memory, place, held)
    return plan_of(memory, layouts_of(sites, settings.state_format), settings, device_bytes)


def plan_of(
    memory: TrainingMemory,
    layouts: Mapping[ExpertKey, RecordLayout],
    settings: AdamW,
    device_bytes: int | None = None,
) -> dict[str, Any]:
    """The plan of a step in which every expert gets tokens.

    Args:
        device_bytes: the budget of a device that computes; None for the CPU.
    """
    resident = set(memory.resident)
    away = [
        bytes_of_step(layout, settings) for key, layout in layouts.items() if key not in resident
    ]
    return {
        "experts": memory.num_experts,
        "experts_in_memory": len(memory.resident),
        "host_budget_bytes": memory.budget_bytes,
        "device_budget_bytes": device_bytes,
        "dense_bytes": memory.dense_bytes,
        "activation_bytes": memory.activation_bytes,
        "slot_bytes": memory.slot_bytes,
        "disk_bytes": sum(layout.state_bytes for layout in layouts.values()),
        "read_bytes_per_step": sum(read for read, _ in away),
        "written_bytes_per_step": sum(written for _, written in away),
    }


def activation_bytes(config: TrainConfig, num_data_ranks: int = 1) -> int:
    """Bytes of a step's forward and backward pass, from the model's shape.

    All micro-batches of a step are in memory at once, as they meet at the experts. One of several
    data-parallel processes may get all rows that the others route.
    """
    model, data = config.model, config.data
    assert model.vocab_size is not None, "the tokenizer is known by now"
    tokens = data.tokens_per_step // num_data_ranks
    part = data.tokens_per_step // data.micro_batches
    choice = config.run.offload.activations
    recomputes = model.moe is not None and model.moe.recompute
    keeps = choice == "keep" or (choice == "model" and not recomputes)
    layer = _layer_bytes(model, keeps=keeps) * tokens
    kept = (4 * model.hidden_size + _routing_bytes(model)) * tokens
    blocks = model.num_layers * (kept if config.run.recompute else layer)
    experts = layer if config.run.recompute else 0
    if model.moe is not None:
        width = model.moe.intermediate_size
        experts += expert_buffer_bytes(data.tokens_per_step, model.hidden_size, width)
        if num_data_ranks > 1:
            # incoming rows and outgoing results, kept for the backward pass at both ends
            rows = 4 * model.hidden_size + (2 * width if keeps else 0)
            blocks += model.num_layers * 4 * rows * model.moe.top_k * data.tokens_per_step
    # logits are computed a chunk at a time, with their gradients
    chunk = min(CHUNK_BYTES, 4 * part * model.vocab_size)
    loss = 4 * part * model.hidden_size * 3 + 3 * chunk
    temporary = 4 * tokens * model.hidden_size * 6
    # with auto, half of it is for activations that experts may keep
    times = 2 if choice == "auto" else 1
    most = (blocks + max(loss, experts) + temporary) * (1 + _SPARE_SHARE)
    code = 0
    if model.moe is not None:
        width = model.moe.intermediate_size
        code = experts_code_bytes(
            {(2 * width, model.hidden_size), (model.hidden_size, width)},
            getattr(torch, config.run.precision),
            data.tokens_per_step,
            has_backward=True,
            is_trained=True,
        )
    recorded = 0 if config.run.trace is None else trace_bytes(config, signature_of_config(model))
    return times * int(most) + code + recorded + SPARE_BYTES


def _layer_bytes(model: LanguageModelConfig, *, keeps: bool) -> int:
    """Bytes of one token in one layer for the backward pass."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    width = 2 * (model.intermediate_size or 0)
    if model.moe is not None:
        routed = 2 * model.moe.intermediate_size * (model.moe.top_k if keeps else 0)
        shared = 3 * model.moe.intermediate_size * model.moe.shared_experts
        width = max(width, routed + shared)
    return 4 * (8 * model.hidden_size + 4 * heads + width) + 3 * _routing_bytes(model)


def _routing_bytes(model: LanguageModelConfig) -> int:
    """Bytes of one token in one layer: ids and weights of its choices, scores and shares."""
    return 0 if model.moe is None else 12 * model.moe.top_k + 8 * model.moe.num_experts


def offload_status(report: Mapping[str, Any], elapsed_s: float) -> str:
    share = report["stall_s"] / elapsed_s if elapsed_s else 0.0
    return (
        f"{report['experts_in_memory']} of {report['experts']} experts in memory, "
        f"{format_bytes(report['read_bytes'])} read, {format_bytes(report['written_bytes'])} "
        f"written, {share:.1%} of the time waiting, "
        f"at most {format_bytes(report['peak_rss_bytes'])} resident"
    )
