"""How a budget is divided between what is fine-tuned and the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.config import parse_budget
from moe_runtime.inference.budget import (
    MemoryPlan,
    available_device_bytes,
    available_host_bytes,
    resolve_budget,
)
from moe_runtime.inference.budget import plan_memory as plan_slots
from moe_runtime.inference.device.device_stores import experts_on_device
from moe_runtime.inference.loading import signature_of
from moe_runtime.kernels.expert_mlp.kept_code import experts_code_bytes
from moe_runtime.training.finetune.checkpoint_model import activation_bytes, trained_bytes
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.offload.frozen import adapters_for
from moe_runtime.training.offload.memory import SPARE_BYTES, FrozenMemory, TrainingMemory
from moe_runtime.training.offload.offloading import layouts_of, plan_memory
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.tracing import trace_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_WRITTEN_ON_DEVICE = 16
"""Bytes of a value on its way from codes to fp32 by operations of torch, at most."""


def divide_budget(
    config: FinetuneConfig,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    experts: ExpertMap,
    sites: list[ExpertsModuleSpec],
    place: torch.device,
) -> TrainingMemory | FrozenMemory:
    """The budgets' division, before anything of the model is in memory.

    Raises:
        CapacityError: it is too small; names the smallest that works.
    """
    method = config.method
    activations = activation_bytes(
        checkpoint.config,
        method.num_sides * config.data.tokens_per_step,
        method.num_sides * config.data.micro_batches,
        top_k=experts.top_k,
        recompute=config.run.recompute or not method.has_backward,
    )
    activations += experts_code_bytes(
        {tensor.shape for layout in layouts_of(sites).values() for tensor in layout.tensors},
        getattr(torch, config.run.precision),
        method.num_sides * config.data.tokens_per_step,
        has_backward=method.has_backward,
        is_trained=method.has_backward and config.lora is None,
    )
    trace = 0
    if config.run.trace is not None:
        trace = trace_bytes(config, signature_of(checkpoint, experts))
    host_memory = config.run.host_memory or "auto"
    if config.lora is None:
        return plan_memory(
            model, sites, host_memory, activations + trace,
            has_disk=True, state=method.state_format, place=place,
        )  # fmt: skip
    largest = max(layout.record_bytes for layout in layouts_of(sites).values())
    trained = _adapter_bytes(config, model, sites)
    # the expert in use: its weights in fp32 and in another type, and their gradients; and a
    # quantised matrix of it on the way to fp32
    on_the_way = 4 if place.type == "cpu" else _WRITTEN_ON_DEVICE
    in_use = largest + on_the_way * experts.largest_quantised
    dense = experts.dense_bytes(checkpoint.dtype)
    computes = activations + trained + in_use
    if place.type == "cpu":
        reserve = computes + trace + experts.scratch_bytes
        return FrozenMemory(host=_host_plan(host_memory, dense, reserve, experts))
    # a checkpoint's copy has no gradients
    saved = trained * 3 // 4
    reserve = SPARE_BYTES + saved + trace + experts.scratch_bytes
    host = _host_plan(host_memory, 0, reserve, experts)
    budget = resolve_budget(
        parse_budget(config.run.device_memory, name="device_memory"),
        available_device_bytes(place),
        "the device",
    )
    there = plan_slots(
        budget,
        dense_bytes=dense,
        reserve_bytes=computes + _routed_bytes(config, checkpoint, experts.top_k, sites),
        slot_bytes=experts_on_device(experts).slot_bytes,
        num_experts=len(experts.layouts),
        option="device_memory",
    )
    return FrozenMemory(host=host, device=there)


def _host_plan(host_memory: str, dense: int, reserve: int, experts: ExpertMap) -> MemoryPlan:
    budget = parse_budget(host_memory, name="host_memory")
    return plan_slots(
        resolve_budget(budget, available_host_bytes(), "the host"),
        dense_bytes=dense,
        reserve_bytes=reserve,
        slot_bytes=experts.slot_bytes,
        num_experts=len(experts.layouts),
    )


def _routed_bytes(
    config: FinetuneConfig, checkpoint: Checkpoint, top_k: int, sites: list[ExpertsModuleSpec]
) -> int:
    """Of a layer's routed rows where kernels compute all of them together: outputs, hidden values,
    gradients of pre-activations, and what adapters add to the outputs."""
    rows = config.data.tokens_per_step * top_k
    hidden = checkpoint.config.get_text_config().hidden_size
    width = 2 * hidden + 2 * max(site.dim_preactivation for site in sites)
    return int(rows * width * getattr(torch, config.run.precision).itemsize)


def _adapter_bytes(
    config: FinetuneConfig, model: PreTrainedModel, sites: list[ExpertsModuleSpec]
) -> int:
    """Weights, gradients and moments of adapters, counted for every matrix of two dimensions."""
    assert config.lora is not None
    total = 0
    if "experts" in config.lora.places:
        with torch.device("meta"):
            for adapters in adapters_for(sites, config.lora.rank, config.lora.scale):
                total += trained_bytes(list(adapters.parameters()))
    if "attention" in config.lora.places:
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        widths = sum(layer.in_features + layer.out_features for layer in linear)
        total += 16 * config.lora.rank * widths
    return total


def slots_plan(memory: FrozenMemory, num_experts: int) -> dict[str, Any]:
    """What the division means for a step that visits every expert; as `offloaded.plan_of`."""
    host, computing = memory.host, memory.device or memory.host
    away = max(0, num_experts - host.num_slots)
    return {
        "experts": num_experts,
        "experts_in_memory": host.num_slots,
        "host_budget_bytes": host.budget_bytes,
        "device_budget_bytes": None if memory.device is None else memory.device.budget_bytes,
        "dense_bytes": computing.dense_bytes,
        "activation_bytes": computing.reserve_bytes,
        "slot_bytes": host.num_slots * host.slot_bytes,
        "disk_bytes": 0,
        # forward and backward
        "read_bytes_per_step": 2 * away * host.slot_bytes,
        "written_bytes_per_step": 0,
    }
