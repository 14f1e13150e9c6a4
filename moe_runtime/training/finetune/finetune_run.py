"""Fine-tuning of a transformers checkpoint whose experts do not fit.

If all parameters are trained, the experts are read once and live where `offload_training` puts
them. With adapters (LoRA), they are read from the checkpoint when needed, and never written. At the
end, a checkpoint like the first one is written, expert by expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.adapter_files import ADAPTER_FILES
from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import CheckpointExperts
from moe_runtime.checkpoints.export import LikeCheckpoint
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint, read_generation_config
from moe_runtime.config import parse_budget
from moe_runtime.digests import digest, digest_of_file
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.files import make_folders, open_regular
from moe_runtime.inference.budget import (
    MemoryPlan,
    available_device_bytes,
    available_host_bytes,
    resolve_budget,
)
from moe_runtime.inference.budget import plan_memory as plan_slots
from moe_runtime.inference.device.device_experts import DeviceStacks, experts_on_device, open_tiers
from moe_runtime.inference.loading import signature_of
from moe_runtime.kernels.expert_mlp.products import experts_code_bytes
from moe_runtime.kernels.operands import find_device
from moe_runtime.memory.device.cuda_device import open_device
from moe_runtime.memory.source import ExpertSource, Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LayerShares, Setting, make_policy
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.training.checkpoint import TrainingState, checkpoints_in, load_checkpoint
from moe_runtime.training.data import (
    TokenStreams,
    data_files,
    encode_corpora,
    load_tokenizer,
    read_corpora,
    windows_of,
)
from moe_runtime.training.examples import ids_of
from moe_runtime.training.finetune.checkpoint_model import (
    CheckpointModel,
    activation_bytes,
    add_attention_adapters,
    load_around_experts,
    merged_adapters,
    require_exportable,
    shares_rows,
    take_adapters,
    write_adapters,
)
from moe_runtime.training.finetune.records import RECORD_FILES, is_of_records
from moe_runtime.training.finetune.rendering import Renderer, encode_records
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.loop import Trainer
from moe_runtime.training.offload.entry import (
    find_sites,
    layouts_of,
    plan_memory,
)
from moe_runtime.training.offload.frozen import (
    AdapterTraining,
    ExpertAdapters,
    FrozenExpertsExecutor,
    adapters_for,
)
from moe_runtime.training.offload.memory import (
    SPARE_BYTES,
    FrozenMemory,
    TrainingMemory,
    device_budget,
)
from moe_runtime.training.offload.offloaded_training import ExpertTraining
from moe_runtime.training.offload.records import Sections
from moe_runtime.training.offload.site import ExpertsSite
from moe_runtime.training.prepared import (
    BASE_FILES,
    DATA,
    EXPERTS,
    FIRST_ADAPTERS,
    PreparedRun,
    check_inputs_stay,
    check_outputs,
)
from moe_runtime.training.ranks import OneRank, Processes
from moe_runtime.training.tracing import TrainingTrace, open_trace, trace_bytes
from moe_runtime.training.train_plan import all_experts, optimizer_settings, plan_of
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WRITTEN_ON_DEVICE = 16
"""Most bytes of a value while operations of torch convert codes to fp32."""


def divide_budget(
    config: FinetuneConfig,
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    experts: ExpertMap,
    sites: list[ExpertsSite],
    place: torch.device,
    ranks: Processes | None = None,
) -> TrainingMemory | FrozenMemory:
    """Divides this process's budgets; processes of a machine share its free memory."""
    sharing = 1 if ranks is None else ranks.here
    if ranks is not None and config.lora is None:
        sites = [site.divided(ranks.groups) for site in sites]
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
            has_disk=True, state=method.state_format, sharing=sharing, place=place,
        )  # fmt: skip
    kept = Sections.STATE if place.type == "cpu" else Sections.ALL
    largest = max(layout.bytes_of(kept) for layout in layouts_of(sites).values())
    trained = _adapter_bytes(config, model, sites)
    # the expert in use: its weights in fp32 and another dtype, and on a device their gradients;
    # and one of its quantised matrices during conversion to fp32
    on_the_way = 4 if place.type == "cpu" else _WRITTEN_ON_DEVICE
    in_use = largest + on_the_way * experts.largest_quantised
    dense = experts.dense_bytes(checkpoint.dtype)
    computes = activations + trained + in_use
    if place.type == "cpu":
        reserve = computes + trace + experts.scratch_bytes
        return FrozenMemory(host=_host_plan(host_memory, dense, reserve, experts, sharing))
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


def _host_plan(
    host_memory: str, dense: int, reserve: int, experts: ExpertMap, sharing: int = 1
) -> MemoryPlan:
    budget = parse_budget(host_memory, name="host_memory")
    return plan_slots(
        resolve_budget(budget, available_host_bytes() // sharing, "the host"),
        dense_bytes=dense,
        reserve_bytes=reserve,
        slot_bytes=experts.slot_bytes,
        num_experts=len(experts.layouts),
    )


def _routed_bytes(
    config: FinetuneConfig, checkpoint: Checkpoint, top_k: int, sites: list[ExpertsSite]
) -> int:
    """Bytes of a layer's routed rows if kernels compute all together: outputs, hidden values,
    gradients of pre-activations, and the adapters' outputs."""
    rows = config.data.tokens_per_step * top_k
    hidden = checkpoint.config.get_text_config().hidden_size
    width = 2 * hidden + 2 * max(site.dim_preactivation for site in sites)
    return int(rows * width * getattr(torch, config.run.precision).itemsize)


def _adapter_bytes(config: FinetuneConfig, model: PreTrainedModel, sites: list[ExpertsSite]) -> int:
    assert config.lora is not None
    total = 0
    if "experts" in config.lora.places:
        with torch.device("meta"):
            for adapters in adapters_for(sites, config.lora.rank, config.lora.factor):
                total += 16 * sum(parameter.numel() for parameter in adapters.parameters())
    if "attention" in config.lora.places:
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
        widths = sum(layer.in_features + layer.out_features for layer in linear)
        total += 16 * config.lora.rank * widths
        if config.lora.dora:  # lengths, and whole products whose lengths PEFT computes
            total += 16 * sum(layer.out_features for layer in linear)
            sizes = ((m.in_features + 3 * m.out_features) * m.in_features for m in linear)
            total += 4 * max(sizes, default=0)
    return total


def slots_plan(memory: FrozenMemory, num_experts: int) -> dict[str, Any]:
    """The plan of a step that visits every expert; keys as of `train_plan.plan_of`."""
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


_SAMPLES, _SAMPLE_BYTES = 17, 4096
"""Of each weight file, at equal distances: further training of a model changes all of them."""


def device_of(config: FinetuneConfig) -> torch.device:
    """The device of a run: by default the CPU; "auto" is a GPU, except for --zeroth-order."""
    by_forwards_alone = config.lora is None and not config.method.has_backward
    name = config.run.device or "cpu"
    place = find_device("cpu" if name == "auto" and by_forwards_alone else name, "run.device")
    if place.type == "cpu":
        if config.run.device_memory != "auto":
            raise ValueError(
                f"device_memory is for a GPU; this run is on the CPU, got "
                f"{config.run.device_memory!r}"
            )
    elif by_forwards_alone:
        raise UnsupportedModelError(
            "--zeroth-order computes on the CPU so far; give --device cpu, or train by gradients"
        )
    return place


def open_frozen(
    experts: ExpertMap, signature: ModelSignature, memory: FrozenMemory, place: torch.device
) -> tuple[ExpertMap, list[ExpertStore[Tensor]]]:
    """The layout of experts in the slots that compute them, and the stores.

    Experts are computed from the first store; if it is on a device, the host's store follows.
    """
    host, there = memory.host, memory.device

    def policy_of(plan: MemoryPlan) -> LayerShares:
        return make_policy(
            "lru",
            num_slots=plan.num_slots,
            setting=Setting(shape=shape_of(signature)),
            adaptive=False,
            reserve=plan.stream_slots(),
        )

    def filled(_: ExpertKey, slot: Tensor) -> Tensor:
        return slot  # each use of an expert unpacks its values again

    with contextlib.ExitStack() as opened:
        source = ExpertSource(experts.layouts)
        opened.callback(source.close)
        slab = Slab(host.num_slots, host.slot_bytes)
        if there is None:
            store = ExpertStore(
                source, slab, policy_of(host), filled, stream_slots=host.stream_slots()
            )
            opened.pop_all()
            return experts, [store]
        device = open_device(place)
        slots = Slab(there.num_slots, there.slot_bytes, allocate=device.allocate)
        on_device = experts_on_device(experts)
        stores = open_tiers(
            source, slab, slots, {"device": there, "host": host}, policy_of,
            {"device": on_device, "host": experts}, (None, None), device, filled,
        )  # fmt: skip
        if not any(on_device.packings):  # kernels have no gradients through codes
            stores[0].stacks = DeviceStacks(device, slots, on_device)
        opened.pop_all()
        return on_device, [*stores]


@dataclass(frozen=True, kw_only=True)
class FinetunePreparation(PreparedRun):
    """A run of a checkpoint, before weights are read.

    Attributes:
        config: with the number of steps.
        model: on the meta device.
        exporter: writes checkpoints like it; None if only adapters are written.
        ranks: the processes that train together.
        tokenizer: of the checkpoint.
    """

    config: FinetuneConfig
    checkpoint: Checkpoint
    model: PreTrainedModel
    experts: ExpertMap
    tokenizer: Any
    exporter: LikeCheckpoint | None
    sites: list[ExpertsSite]
    memory: TrainingMemory | FrozenMemory
    ranks: OneRank

    @property
    def settings(self) -> dict[str, Any]:
        lora, own = self.config.lora, {BASE_FILES: _fingerprint(self.checkpoint)}
        if lora is not None and lora.start is not None:
            # the folder of the first adapters is not needed later: the checkpoints have them
            own["lora.start"] = "given"
            files = [lora.start / name for name in ADAPTER_FILES]
            if all(file.is_file() for file in files):
                own[FIRST_ADAPTERS] = " ".join(map(digest_of_file, files))
        return super().settings | own


def prepare(
    config: FinetuneConfig,
    *,
    epochs: float | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    progress: Progress | None = None,
    keeps_text: bool = True,
    ranks: Processes | None = None,
) -> FinetunePreparation:
    """Reads headers and text, and divides the budget; reads no weights yet.

    Args:
        epochs: number of passes over the text; replaces `config.run.steps`.
        on_stage: called with the name of each stage.
        progress: of a download of the checkpoint, as for ``find_checkpoint``.
        keeps_text: write the encoded text to the run's folder.
        ranks: the processes that train together; one process when omitted.
    """
    output, trace = config.run.output, config.run.trace
    if ranks is not None:
        _refuse_together(config, ranks)
    device = device_of(config)
    on_stage("reading the checkpoint's headers")
    torch.manual_seed(config.run.seed)
    dtype = torch.float32 if config.lora is None else getattr(torch, config.run.precision)
    checkpoint = open_checkpoint(config.model, dtype, progress=progress)
    require_exportable(checkpoint, config)
    advice = "name a file or folder that is there, or a data set of the hub (OWNER/NAME)"
    files = data_files(config.data, Path(), advice)
    check_inputs_stay(output, trace, files, checkpoint.folder)
    check_outputs(output, trace)
    most = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and (context := config.data.context) > most:
        raise ValueError(f"context must be at most {most}, the model's positions, got {context}")
    widest = checkpoint.config.get_text_config().hidden_size
    if config.lora is not None and config.lora.rank > widest:
        raise ValueError(
            f"the rank of adapters must be at most {widest}, the model's width, beyond which it "
            f"adds nothing, got {config.lora.rank}"
        )
    # it is copied at the end, but faults are found now
    generation = read_generation_config(checkpoint.folder)
    tokenizer = load_tokenizer(checkpoint.folder)
    model = build_on_meta(checkpoint)
    experts = map_experts(model, checkpoint)
    experts.tie(model)  # tied parameters are planned for and counted once
    if device.type != "cpu":
        experts.packed_dense.clear()  # every backward pass would unpack their values again
    sites = find_sites(model)
    memory = divide_budget(config, checkpoint, model, experts, sites, device, ranks)
    on_stage("reading the text")
    if any(is_of_records(file) for file in files):
        stops = generation.eos_token_id if generation is not None else None
        stops = [stops] if isinstance(stops, int) else stops or ()
        routed = signature_of(checkpoint, experts)
        renderer = Renderer(
            tokenizer, stops, checkpoint.config.get_text_config().vocab_size,
            (routed.num_layers, routed.top_k, routed.num_experts),
        )  # fmt: skip
        cached = {"cache": output / DATA, "keeps": keeps_text}
        streams = _records(config, files, renderer, shares_rows=shares_rows(model), **cached)
    else:
        corpora = read_corpora(config.data, Path())
        on_stage("encoding the text")
        streams = encode_corpora(corpora, tokenizer, cache=output / DATA, keeps=keeps_text)
    _check_vocabulary(checkpoint, streams)
    batches, held_out = windows_of(streams, config)
    if epochs is not None:
        windows = epochs * batches.windows_per_epoch
        # rounded: 1.1 times 10 is more than 11 in binary
        steps = max(1, math.ceil(round(windows / config.data.sequences_per_step, 6)))
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=steps))
    total = sum(parameter.numel() for parameter in model.parameters())
    signature = signature_of(checkpoint, experts)
    in_experts = sum(
        m.module.get_parameter(name).numel() for m in experts.modules for name in m.parameters
    )
    exporter = None
    if config.lora is None or config.merge:
        exporter = LikeCheckpoint(model, checkpoint, experts)
        if exporter.rounded and config.export_dtype != config.run.precision:
            raise ValueError(
                f"{exporter.rounded[0]} has more digits in the checkpoint than in bfloat16, and "
                "merge would write it rounded: give precision float32, or the export dtype "
                "bfloat16, or leave merge out"
            )
    idle = 1 - signature.top_k / signature.num_experts
    return FinetunePreparation(
        config=config,
        output=output,
        storage=config.run.storage_dir or output / EXPERTS,
        streams=streams,
        batches=batches,
        held_out=held_out,
        checkpoint=checkpoint,
        model=model,
        experts=experts,
        tokenizer=tokenizer,
        exporter=exporter,
        sites=sites,
        memory=memory,
        ranks=ranks or OneRank(),
        device=device,
        num_parameters=total,
        num_active_parameters=total - round(in_experts * idle),
    )


def start(
    preparation: FinetunePreparation,
    *,
    resume: bool,
    reschedule: bool = False,
    progress: Progress | None = None,
) -> Trainer:
    """Reads the weights; a trainer at the beginning of the run, or at its last checkpoint.

    Args:
        resume: continue from the newest checkpoint; without one, begin.
        reschedule: the number of steps and the course of the rate may differ from the checkpoint's.
        progress: called with the stage, the bytes done and all bytes.
    """
    config, model, ranks = preparation.config, preparation.model, preparation.ranks
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    if ranks.size > 1:
        ranks.require_shared(preparation.output)
    found = preparation.find_state(resume=resume, reschedule=reschedule)
    if found is not None and not isinstance(found[1], TrainingState):
        raise CheckpointError(
            f"{found[0]}: is of a run of several processes, expected one of finetune"
        )
    place = preparation.device
    load_around_experts(model, preparation.checkpoint, preparation.experts, place, progress)
    model.train()
    if config.run.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(config.run.seed)
    if config.lora is not None:
        optimizer = _frozen(preparation)
    else:
        optimizer = _offloaded(preparation, resumes=found is not None)
    with ExitStack() as refused:
        refused.callback(optimizer.close)
        if config.lora is not None and config.lora.start is not None and found is None:
            take_adapters(config.lora.start, model, preparation.sites, config.lora)
        trainer = Trainer(
            preparation,
            CheckpointModel(model),
            optimizer,
            sinks=preparation.open_sinks(found) if ranks.rank == 0 else (),
            ranks=ranks,
            trace=_open_trace(preparation, 0 if found is None else found[1].step),
        )
        if found is not None:
            trainer.resume(*found)
        refused.pop_all()
    return trainer


def finish(preparation: FinetunePreparation, trainer: Trainer, *, export: bool) -> dict[str, Any]:
    """Writes adapters to `adapters/`, the trained checkpoint to `model/`, and `summary.json`.

    Returns the summary.
    """
    output, config = preparation.output, preparation.config
    model = adapters = None
    if export and config.lora is not None:
        adapters = output / "adapters"
        write_adapters(adapters, preparation.model, preparation.sites, config.lora, config.model)
    if export and preparation.exporter is not None:
        model = output / "model"
        optimizer = trainer.optimizer
        assert isinstance(optimizer, ExpertTraining | AdapterTraining)
        dtype = None if config.export_dtype == "auto" else getattr(torch, config.export_dtype)
        write = partial(preparation.exporter.write, model, dtype=dtype)
        if preparation.ranks.size > 1 and config.lora is None:
            _with_all_experts(preparation, write)
        else:
            with merged_adapters(preparation.model) as state:
                write(state, optimizer.expert)
    return trainer.write_summary(model, adapters=adapters)


def _with_all_experts(
    preparation: FinetunePreparation,
    use: Callable[[Mapping[str, Any], Callable[[ExpertKey], Mapping[str, Tensor]]], object],
) -> None:
    """Calls a function with the last checkpoint's model, collected from several processes."""
    config, checkpoint = preparation.config, preparation.checkpoint
    state = load_checkpoint(checkpoints_in(preparation.checkpoints)[-1])
    model = build_on_meta(checkpoint)
    experts = map_experts(model, checkpoint)
    experts.tie(model)
    load_around_experts(model, checkpoint, experts, preparation.device, None)
    with all_experts(model, optimizer_settings(config), preparation.storage, state) as training:
        CheckpointModel(model).load_state_dict(dict(state.model))
        with merged_adapters(model) as named:
            use(named, training.expert)


def _refuse_together(config: FinetuneConfig, ranks: Processes) -> None:
    if config.data.micro_batches % ranks.size:
        most = -(-config.data.micro_batches // ranks.size) * ranks.size
        raise ValueError(
            f"micro_batches ({config.data.micro_batches}) must be a multiple of the {ranks.size} "
            f"processes, which share them; give {most}"
        )
    if config.lora is None and not config.method.has_backward:
        raise ValueError("--zeroth-order works in one process; start it without torchrun")
    if config.run.trace is not None:
        raise ValueError("--trace records a run of one process; leave it out")
    if device_of(config).type != "cpu":
        raise ValueError("finetune in several processes computes on the CPU; give --device cpu")


def plan(preparation: FinetunePreparation) -> dict[str, Any]:
    """Places of experts, and bytes of a step; call it before weights are read."""
    memory = preparation.memory
    if isinstance(memory, FrozenMemory):
        return slots_plan(memory, len(preparation.experts.layouts))
    config = preparation.config
    settings = optimizer_settings(config)
    layouts, place = layouts_of(preparation.sites, config.method.state_format), preparation.device
    device_bytes = None
    if place.type != "cpu":
        device_bytes = device_budget(config.run.device_memory, place, held=0)
    return plan_of(memory, layouts, settings, device_bytes)


def _offloaded(preparation: FinetunePreparation, *, resumes: bool) -> ExpertTraining:
    config, memory = preparation.config, preparation.memory
    assert isinstance(memory, TrainingMemory)
    if config.run.storage_dir is None:
        make_folders(preparation.storage)
    places: dict[str, Any] = {}
    if preparation.device.type != "cpu":  # methods for the CPU only do not have this option
        places["device_memory"] = config.run.device_memory
    names = [site.parameter_names for site in preparation.sites]
    with closing(CheckpointExperts(preparation.experts, names, torch.float32)) as source:
        return config.method.offload(
            preparation.model,
            host_memory=memory.budget_bytes,
            activation_memory=memory.activation_bytes,
            storage_dir=preparation.storage,
            initial=source.tensors_of,
            resumes=resumes,
            **places,
            **({} if preparation.ranks.size == 1 else {"groups": preparation.ranks.layout_groups}),
        )


def _open_trace(preparation: FinetunePreparation, first_step: int) -> TrainingTrace | None:
    run = preparation.config.run
    if run.trace is None:
        return None
    return open_trace(
        run.trace,
        signature_of(preparation.checkpoint, preparation.experts),
        preparation.model,
        [site.name for site in preparation.sites],
        first_step=first_step,
        num_steps=run.trace_steps,
        expert_bytes=max(own.tensor_bytes for own in preparation.experts.layouts.values()),
    )


def _frozen(preparation: FinetunePreparation) -> AdapterTraining:
    config, memory, model = preparation.config, preparation.memory, preparation.model
    assert config.lora is not None
    assert isinstance(memory, FrozenMemory)
    model.requires_grad_(False)
    if "attention" in config.lora.places:
        add_attention_adapters(model, config.lora)
    adapters: list[ExpertAdapters] = []
    if "experts" in config.lora.places:
        adapters = adapters_for(preparation.sites, config.lora.rank, config.lora.factor)
        adapters = [own.to(preparation.device) for own in adapters]
    signature = signature_of(preparation.checkpoint, preparation.experts)
    in_slots, stores = open_frozen(preparation.experts, signature, memory, preparation.device)
    with ExitStack() as opened:
        opened.callback(stores[0].close)
        executor = FrozenExpertsExecutor(preparation.sites, in_slots, stores[0], adapters)
        training = AdapterTraining(
            model, preparation.sites, executor, adapters, stores, optimizer_settings(config),
            memory, preparation.ranks.layout_groups,
        )  # fmt: skip
        opened.pop_all()
    return training


def _fingerprint(checkpoint: Checkpoint) -> str:
    """A digest of the configuration, and of each weight file's size and samples."""
    config = checkpoint.folder / "config.json"
    found = digest(config.read_bytes()) if config.is_file() else ""
    for path in sorted(checkpoint.stamps):
        with open_regular(path) as file:
            size = path.stat().st_size
            found = digest(f"{path.name} {size}".encode(), found)
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                found = digest(file.read(_SAMPLE_BYTES), found)
    return found


def _records(
    config: FinetuneConfig, files: Sequence[Path], renderer: Renderer, **options: Any
) -> dict[str, TokenStreams]:
    if others := [file for file in files if not is_of_records(file)]:
        raise ValueError(
            f"{others[0]} is a text file and others hold records ({', '.join(RECORD_FILES)}); "
            "give files of one kind"
        )
    return {
        name: encode_records(config.data, name, renderer, **options) for name in config.data.sources
    }


def _check_vocabulary(checkpoint: Checkpoint, streams: Mapping[str, TokenStreams]) -> None:
    size = checkpoint.config.get_text_config().vocab_size
    sides = [ids_of(side) for s in streams.values() for side in (s.training, s.held_out)]
    largest = max((int(side.max()) for side in sides if len(side)), default=0)
    if largest >= size:
        raise ValueError(
            f"{checkpoint.folder}: its tokenizer gives id {largest}, the model has {size} tokens"
        )
