"""``load``: a transformers model whose routed experts stay in the checkpoint's files."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.dense_weights import load_dense
from moe_runtime.checkpoints.expert_map import ExpertMap, ExpertsModule, map_experts
from moe_runtime.checkpoints.opening import (
    build_on_meta,
    files_of,
    open_checkpoint,
    read_generation_config,
)
from moe_runtime.config import (
    ACTIVATIONS,
    CACHE_CODES,
    KV_CACHES,
    MISSES,
    SHARES,
    STAND_IN,
    Budget,
    MemorySize,
    PrefetchMode,
    check_draft,
    parse_budget,
    parse_mode,
    require_known,
    require_types,
)
from moe_runtime.errors import CapacityError
from moe_runtime.inference.budget import (
    ENTRY_BYTES,
    MIN_SLOTS,
    Context,
    MemoryPlan,
    available_device_bytes,
    available_host_bytes,
    bytes_for_recordings,
    context_step_bytes,
    default_context,
    known_positions,
    plan_memory,
    reserve_for,
    resident_bytes,
    resolve_budget,
    set_up_libraries,
    tokens_to_plan_for,
)
from moe_runtime.inference.cpu.attention import (
    rest_torch_threads,
    rounding_of,
    use_single_query_attention,
)
from moe_runtime.inference.cpu.step_layers import fuse_attention_layers, use_small_batch_layers
from moe_runtime.inference.device.cards import (
    give_stores,
    open_cards,
    plan_cards,
    require_one_process,
)
from moe_runtime.inference.expert_layer import OffloadedExperts, bind_slots
from moe_runtime.inference.hugging_face.loaded_model import (
    LoadedFacts,
    RuntimeHandle,
    as_loaded_model,
    watch_misses_of_drafts,
)
from moe_runtime.inference.kv_cache import grow_cache_in_place, require_roundable
from moe_runtime.inference.learning import KeptLearning, PolicyListener, check_records, open_record
from moe_runtime.inference.lossy import LossyRules, apply_rules, copied_bytes
from moe_runtime.inference.steps import Steps, TokenLimit, most_in_pass
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.kernels.operands import find_devices
from moe_runtime.memory.source import ExpertLayout, ExpertSource, Slab, touched_meanwhile
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction import LayerShares, Setting, make_policy, require_live
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.policies.prediction import check_name, is_file_name
from moe_runtime.policies.prediction.base import shape_of
from moe_runtime.types import ExpertKey, ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.inference.draft_models import DraftPlan
    from moe_runtime.inference.step_times import StepTimes
    from moe_runtime.parallel.dispatching import Group

ExpertsT = TypeVar("ExpertsT", bound=torch.nn.Module)
AUTO = "auto"
_NONE = type(None)
TYPES: dict[str, tuple[type, ...]] = {
    "path_or_id": (str, Path),
    "device": (str, int, torch.device),
    "dtype": (str, torch.dtype),
    **dict.fromkeys(("policy", "prefetch", "shares", "cache_code", "kv_cache"), (str,)),
    **dict.fromkeys(("activations", "misses", "routing"), (str,)),
    "skip_below": (float, int),
    **dict.fromkeys(("predictor", "draft"), (str, Path)),
    **dict.fromkeys(("trace", "timeline", "placement", "adapter"), (str, Path, _NONE)),
    "max_tokens": (int, _NONE),
    "io_threads": (int,),
    **dict.fromkeys(("warm_up", "teach"), (bool,)),
    "progress": (cast("type", Callable), _NONE),
}


def load(
    path_or_id: str | Path | Checkpoint,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    host_memory: MemorySize | Budget = "auto",
    device_memory: MemorySize = "auto",
    policy: str = "lru",
    prefetch: str = "off",
    predictor: str | Path = "next-gate",
    shares: str = "auto",
    cache_code: str = "none",
    kv_cache: str = "exact",
    activations: str = "exact",
    misses: str = "device",
    routing: str = "exact",
    skip_below: float = 0.0,
    draft: str | Path = "none",
    trace: str | Path | None = None,
    timeline: str | Path | None = None,
    max_tokens: int | None = None,
    io_threads: int = 4,
    warm_up: bool = False,
    teach: bool = True,
    progress: Progress | None = None,
    group: Group | None = None,
    placement: str | Path | None = None,
    adapter: str | Path | None = None,
) -> PreTrainedModel:
    """Loads a Mixture-of-Experts checkpoint and leaves its routed experts on disk.

    The result works like the model of ``transformers``: ``forward``, ``generate``, pipelines and
    chat templates. It reads experts from the original files when tokens need them, and caches them
    within the budget. Budget, policy and threads change no bit of the result.

    Args:
        path_or_id: the folder of a checkpoint, a GGUF file, a repository on the hub, or an open
            ``Checkpoint``.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for a GPU if there is one. Several GPUs of one
            model divide the layers' experts: ``"cuda:0,cuda:1"``. The first has all other weights.
        dtype: the type to compute in, or ``"auto"`` for the checkpoint's own.
        host_memory: limit of host memory, with dense weights, KV cache and activations: bytes,
            ``"7GiB"``, a share such as ``0.25``, or ``"auto"`` for most of the free memory of the
            machine or control group. Returned tensors and backward passes come on top.
        device_memory: the same for the memory of each GPU.
        policy: the eviction policy. ``"auto"`` takes the one with the fewest misses on the model's
            latest routing, and keeps the routing of this run for the next one.
        prefetch: ``"off"``; ``"observe"`` predicts and counts, but reads nothing; ``"enforce"``
            reads likely experts while the link is idle; ``"auto"`` does so while it is faster.
        predictor: a predictor's name, the file of a trained one, or ``"auto"`` for the model's own
            gates if it has known ones.
        shares: slots of each layer: ``"even"``; ``"adaptive"``, more where misses cost most; or
            ``"auto"``: even, or the shares that ``policy="auto"`` found.
        cache_code: bf16 experts and linear layers in memory: ``"none"``, as in the files, or
            ``"planes"``, a lossless code that holds 1.4 times as many experts. CPU only.
        kv_cache: keys and values: ``"exact"``, or ``"int8"``: rounded to 8 bits with a scale per 32
            values, in half the memory. Running states stay exact. Lossy; CPU only.
        activations: inputs of quantised weights: ``"exact"``, or ``"int8"``: rounded to 8 bits with
            a scale per 32 values. Faster and lossy; CPU only.
        misses: where to compute experts that a GPU lacks, in steps of up to 16 tokens: ``"device"``
            copies them first; ``"auto"`` also uses the CPU, by measured speeds, so the last bits
            depend on residency. ``"stand-in"``, CPU only: int4 copies of all experts replace
            missing ones. Lossy.
        routing: ``"exact"``, or ``"cache-aware:LAMBDA"``: in steps of up to 16 tokens a resident
            expert replaces a missing one if their scores differ by at most LAMBDA times the sum of
            the token's chosen scores. A token's best expert stays. Lossy; CPU only.
        skip_below: steps of up to 16 tokens skip missing experts with less than this share of a
            token's weights. Lossy; CPU only.
        draft: source of draft tokens, several of which one pass verifies: ``"none"``;
            ``"lookup"``: what followed the latest tokens earlier in the text; ``"mtp"``: the
            checkpoint's own multi-token head; or a small model with the same tokenizer. Its weights
            count in ``host_memory``. Texts stay the same; drafts that do not pay stop. CPU only.
        trace: file for the routing, see ``docs/trace-format.md``.
        timeline: file for the times of layers, waits and reads, in the Chrome trace format.
        max_tokens: tokens to reserve memory for: prompts and answers of all sequences and beams of
            a batch. More raise ``CapacityError`` before computing. Default: 4096, and more, up to
            the model's length, from memory that all experts leave. If not all experts fit, it takes
            up to a sixteenth of theirs.
        io_threads: reads in flight at once.
        warm_up: fill the slots with experts and compile kernels before returning.
        teach: with ``policy="auto"``: after the model is closed, and once enough routing is kept, a
            process of the lowest priority trains the policy ``reuse`` on it.
        progress: called with the current work, the bytes done and the total bytes.
        group: processes that divide the experts, each within its own budget; those of one machine
            hold the other weights once. All load the same model with the same options, except the
            budgets, and make the same calls. The output has the bits of a single
            process. Shares of memory and ``"auto"`` count for an equal part of a machine's memory.
        placement: file with the experts of each process. By default shares of memory, or of speed
            if all experts fit; ``policy="auto"`` balances them by the latest routing.
        adapter: folder of a LoRA adapter from PEFT or ``finetune``, on layers, experts or both. The
            base weights stay unchanged. CPU only.

    Returns:
        The model, frozen and in evaluation mode, with a ``RuntimeHandle`` as its ``moe``.
        Unsupported uses raise ``UnsupportedUseError``; see ``docs/transformers-features.md``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or incomplete.
        UnsupportedModelError: the checkpoint is sound but not supported.
        CapacityError: the budget is too small, or an allocation fails.
        RankFailureError: another process of the group died, stalled, or has other settings.
        ValueError: an option is unknown, or an output would replace an input or another output.
        TypeError: an option has a wrong type.
    """
    opened = path_or_id if isinstance(path_or_id, Checkpoint) else None
    require_types(TYPES, {**locals(), "path_or_id": opened.folder if opened else path_or_id})
    start = time.perf_counter()
    budgets = {
        "host": parse_budget(host_memory, name="host_memory"),
        "device": parse_budget(device_memory, name="device_memory"),
    }
    check_names(policy, shares, predictor, cache_code, activations, kv_cache)
    if io_threads < 1:
        raise ValueError(f"io_threads must be at least 1, got {io_threads}")
    mode, places = parse_mode(prefetch), find_devices(device)
    place = places[0]
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if place.type == "cpu" and budgets["device"] != Budget():
        raise ValueError(f"device_memory is for models on a GPU, not a CPU; got {device_memory!r}")
    rules = LossyRules.of(routing, skip_below, misses)
    is_alone = group is None and placement is None
    check_place(place, rules, draft, misses, trace, kv_cache, is_alone=is_alone)
    if len(places) > 1:
        require_one_process(device, prefetch, shares, is_alone=is_alone)
    own_adapter = None
    if adapter is not None:
        from moe_runtime.inference.adapters import LoadedAdapter

        own_adapter = LoadedAdapter(adapter, place)
    transport = None
    if not is_alone:
        from moe_runtime.parallel.dispatching import as_transport

        transport = as_transport(group)
    checkpoint = opened or open_checkpoint(cast(Any, path_or_id), dtype, progress=progress)
    if trace is not None or timeline is not None:
        inputs = [*files_of(checkpoint.folder), predictor, placement]
        check_records(trace, timeline, inputs)
    planned_tokens = tokens_to_plan_for(checkpoint.config, max_tokens)
    model = build_on_meta(checkpoint)
    require_roundable(model, kv_cache)
    set_up_libraries(checkpoint.dtype)
    baseline = resident_bytes()  # libraries; memory allocated from here on counts as the runtime's
    experts = map_experts(model, checkpoint, codes_dense=cache_code != "none")
    if activations != "exact":
        from moe_runtime.checkpoints.dense_weights import round_activations

        round_activations(experts, place)
    expert_bytes = sum(layout.tensor_bytes for layout in experts.layouts.values())
    signature = signature_of(checkpoint, experts)
    dense_bytes = whole_bytes = experts.dense_bytes(checkpoint.dtype)
    embedding_bytes = experts.embedding_bytes if place.type == "cpu" else 0
    partition, neighbours, num_here = None, None, 1
    # codes differ in size by their values, and a device has weights of its own
    may_share = place.type == "cpu" and cache_code == "none"
    if transport is not None:
        from moe_runtime.inference.shared_weights import Neighbours

        neighbours = Neighbours(transport, may_share=may_share)
        dense_bytes, embedding_bytes = map(neighbours.own_bytes, (dense_bytes, embedding_bytes))
        num_here = neighbours.num_processes
    free = {"host": available_host_bytes() // num_here}
    if place.type != "cpu":
        free["device"] = available_device_bytes(place)
    in_pass = most_in_pass(model, place)
    kept: dict[str, Any] = {"kv_cache": kv_cache, "in_pass": in_pass}
    dense, all_layouts = (dense_bytes, embedding_bytes), experts.layouts
    if transport is not None:
        from moe_runtime.inference.expert_partition import divide_experts, measure_products

        num_slots = MIN_SLOTS
        with suppress(CapacityError):  # the plan below raises it
            maps = {"host": experts, "device": experts}
            tokens, none = planned_tokens, DraftMemory()
            plans, _ = _plan(checkpoint, maps, budgets, free, dense, tokens, 0, none, kept)
            num_slots = max(plan.num_slots for plan in plans.values())
        measure = partial(measure_products, place, checkpoint.dtype)
        partition = divide_experts(
            transport,
            experts,
            signature,
            placement,
            num_slots,
            measure if num_here < transport.size else None,
            checkpoint.folder if policy == AUTO else None,
        )
    is_first = partition is None or partition.transport.rank == 0
    drafting = plan_draft(draft, checkpoint, model, progress)
    modules, slot_maps, set_aside_bytes = _lay_out(model, experts, place, cache_code)
    if rules.stands_in:
        set_aside_bytes += copied_bytes(experts)
    if place.type != "cpu":
        set_aside_bytes += bytes_for_recordings(checkpoint.config, checkpoint.dtype, signature)
    blocks = [module.name.rpartition(".")[0] for module in experts.modules]
    estimator, table_bytes = None, 0
    if mode is not PrefetchMode.OFF:
        from moe_runtime.inference.prediction import open_estimator

        estimator, table_bytes = open_estimator(
            predictor, model, blocks, signature, checkpoint.folder, expert_bytes
        )
    extra_bytes = table_bytes + set_aside_bytes
    if partition is not None and policy == AUTO and placement is None and may_share:
        partition.follow_loads()
        extra_bytes += ENTRY_BYTES * (len(all_layouts) - len(experts.layouts))
    if own_adapter is not None:
        tokens = min(planned_tokens, in_pass or planned_tokens)
        extra_bytes += own_adapter.bytes_beside(model, tokens)
    # all processes of a group must plan the same context
    asked = max_tokens if partition is None else planned_tokens
    plans, context = _plan(
        checkpoint, slot_maps, budgets, free, dense, asked, extra_bytes, drafting, kept
    )
    max_tokens = context.max_tokens
    lacks_slots = plans["host"].num_slots < len(experts.layouts)
    rules.require_effect(model, blocks, top_k=experts.top_k, lacks_slots=lacks_slots)
    # a barrier: all processes measure free memory before any of them allocates
    if partition is not None:
        partition.require_same_model(checkpoint, experts, place)

    cards = plan_cards(
        places, plans, budgets["device"], checkpoint, slot_maps, set_aside_bytes, max_tokens
    )
    plans = cards[0].plans | {"host": plans["host"]}
    if len(cards) == 1 and place.type != "cpu" and policy == AUTO and misses == "device":
        from moe_runtime.inference.device.device_experts import policy_of_device

        policy = policy_of_device(plans, experts)
    # before weights are loaded, so that the memory of the choice is free again
    tier, folder = "device" if "device" in plans else "host", checkpoint.folder
    num_slots = sum(card.plans[tier].num_slots for card in cards)
    is_lacking = num_slots < len(experts.layouts)
    choice = resolve_policy(policy, shares, signature, folder, num_slots, experts.slot_bytes)
    if len(cards) > 1:
        choice = replace(choice, adaptive=False)
    # a CPU's plan has fewer dense bytes if embeddings stay in their files
    is_stored = place.type == "cpu" and plans["host"].dense_bytes < dense_bytes
    reads, sharing = True, nullcontext()
    if neighbours is not None:
        is_stored = neighbours.any(is_stored)
        reads, sharing = neighbours.reads, neighbours.sharing(model)
    stored = experts.embeddings if is_stored else {}
    with sharing:
        slabs = [Slab(c.plans["host"].num_slots, plans["host"].slot_bytes) for c in cards]
        # weights that only have their form take memory until they are shared
        with touched_meanwhile(slabs[0]) if reads else nullcontext():
            finish_dense(model, checkpoint, experts, place, progress, stored, kv_cache, fills=reads)
    elsewhere_bytes = 0
    if neighbours is not None:
        with touched_meanwhile(slabs[0]):
            neighbours.wait()
        held_bytes = whole_bytes - (experts.embedding_bytes if is_stored else 0)
        elsewhere_bytes = held_bytes - neighbours.own_bytes(held_bytes)
    if partition is not None and partition.follows_loads:
        experts.layouts = all_layouts
    sources = [ExpertSource(c.own(experts).layouts, io_threads=io_threads) for c in cards]
    checkpoint.require_unchanged()
    new_policy = policy_maker(choice, signature, experts.layouts)
    times = None
    if timeline is not None and is_first:
        from moe_runtime.inference.step_times import StepTimes
        from moe_runtime.lab.traces.timeline import Timeline

        times = StepTimes(Timeline(timeline))
    open_stores = partial(_open_stores, times)
    opened = open_cards(cards, sources, slabs, experts, slot_maps, new_policy, open_stores)
    store, host_store = opened[0]
    stores: list[ExpertStore[Any]] = [s for tiers in opened for s in tiers if s is not None]
    steps = Steps(stores, [*inspect.signature(model.forward).parameters])
    listeners = steps.listeners
    is_planned = misses not in ("device", STAND_IN)
    give_stores(cards, opened, modules, bind_slots(slot_maps["host"]) if is_planned else None)
    for module in modules:
        module.partition, module.listeners = partition, listeners
        module.list_parameters(checkpoint.dtype, place)
    apply_rules(rules, model, blocks, modules, store)
    versions = {version for source in sources for version in source.versions()}
    as_loaded_model(model, folder, versions, steps, max_tokens, in_pass)
    if place.type != "cpu":
        from moe_runtime.inference.device.decoding_model import capture_decoding

        capture_decoding(model, modules)
    facts = LoadedFacts(
        signature=signature,
        host_plan=plans["host"],
        device_plan=plans.get("device"),
        dense_bytes=plans["device" if "device" in plans else "host"].dense_bytes + elsewhere_bytes,
        expert_bytes=expert_bytes,
        baseline_rss_bytes=baseline,
        load_s=time.perf_counter() - start,
        choice=choice,
        context=context,
        kv_cache=kv_cache,
        draft_bytes=drafting.bytes_for(max_tokens),
        elsewhere_bytes=elsewhere_bytes,
    )
    learning = recorder = prefetcher = None
    if estimator is not None or any(each.watchers for each in stores):
        learning = KeptLearning(signature, folder, predictor, writes=is_first)
        learning.keep(*(watcher for each in stores for watcher in each.watchers))
    watched = [each for each in stores if each.watchers]
    policies = PolicyListener(watched) if watched else None
    for listener in filter(None, (TokenLimit(max_tokens, in_pass), times, policies, learning)):
        listeners.add(listener)
    # a policy matters only if some experts have no slot; processes are balanced by the record
    is_auto = policy == AUTO and (is_lacking or partition is not None)
    if is_first and (is_auto or trace is not None):
        largest = max(layout.tensor_bytes for layout in experts.layouts.values())
        recorder = open_record(
            listeners,
            signature,
            folder,
            trace,
            expert_bytes=largest,
            keeps_recent=is_auto,
            teaches=teach and is_lacking,
        )
    if estimator is not None:
        from moe_runtime.inference.prediction import open_prefetcher

        prefetcher = open_prefetcher(
            model, listeners, blocks, store, estimator, mode, place, partition, learning
        )
    drafts = None
    if draft != "none":
        from moe_runtime.inference.drafted_steps import DraftedSteps
        from moe_runtime.inference.drafts import Lookups

        drafts = DraftedSteps(model, Lookups(), max_tokens)
    handle = cast(Any, model).moe = RuntimeHandle(
        store,
        facts,
        host_store=host_store,
        others=opened[1:],
        recorder=recorder,
        prefetcher=prefetcher,
        timeline=None if times is None else times.timeline,
        learning=learning,
        drafts=None if drafts is None else drafts.control,
    )
    if own_adapter is not None:
        own_adapter.apply(model)
    if rules.stands_in or warm_up:
        from moe_runtime.inference.warming import copy_experts, warm

        if rules.stands_in:
            copy_experts(model, modules, progress)
        if warm_up:
            warm(model, modules, max_tokens, progress)
    if drafting.drafter is not None and drafts is not None:
        with ExitStack() as failure:
            failure.callback(handle.close)
            handle.draft_model = drafting.drafter.load(model, max_tokens, progress)
            failure.pop_all()
        drafts.source, drafts.handle = handle.draft_model, handle
        watch_misses_of_drafts(handle, len(experts.layouts) - plans["host"].num_slots)
    if drafts is not None:
        cast(Any, model)._drafts = drafts
        handle.reset_stats()
    return model


def check_names(
    policy: str,
    shares: str,
    predictor: str | Path,
    cache_code: str,
    activations: str = "exact",
    kv_cache: str = "exact",
) -> None:
    """Refuses unknown names before loading. Raises CheckpointError: the predictor's file is missing
    or damaged. Raises ValueError: a name is unknown."""
    require_live(policy)
    require_known("shares", shares, SHARES)
    require_known("cache_code", cache_code, CACHE_CODES)
    require_known("activations", activations, ACTIVATIONS)
    require_known("kv_cache", kv_cache, KV_CACHES)
    if predictor != AUTO:
        if is_file_name(predictor):
            from moe_runtime.lab.traces.learned import read_predictor_signature

            read_predictor_signature(predictor)
        else:
            check_name(str(predictor))


def check_place(
    place: torch.device,
    rules: LossyRules,
    draft: str | Path,
    misses: str,
    trace: str | Path | None,
    kv_cache: str,
    *,
    is_alone: bool,
) -> None:
    """Refuses options that this device or a group of processes does not support, and contradicting
    pairs. Raises ValueError: one of these, or a name is unknown."""
    check_draft(draft)
    require_known("misses", misses, MISSES)
    given = dict.fromkeys(rules.named, "cpu")
    if draft != "none":
        given[f"draft {draft}"] = "cpu"
    if kv_cache != "exact":
        given[f"kv_cache {kv_cache}"] = "cpu"
    if misses not in ("device", STAND_IN):
        given[f"misses {misses}"] = "cuda"
    kinds = {"cpu": "the CPU", "cuda": "a GPU"}
    for name, kind in given.items():
        if place.type != kind:
            raise ValueError(
                f"{name} is for models on {kinds[kind]}, got the device {place}: leave it out"
            )
        if not is_alone:
            raise ValueError(f"{name} is for one process: leave it out, or group and placement")
    if draft != "none" and rules.named:
        raise ValueError(
            f"draft {draft} changes no text, and what {' and '.join(rules.named)} changes depends "
            "on the drafts: leave one of them out"
        )
    if draft != "none" and trace is not None:
        raise ValueError(
            f"draft {draft} computes tokens that a trace must not have: leave one of the two out"
        )


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of drafts: a model or head that writes them, and states after each drafted token."""

    drafter: DraftPlan | None = None
    states_bytes: int = 0

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes to reserve for texts of ``num_tokens`` tokens in all."""
        of_model = 0 if self.drafter is None else self.drafter.bytes_for(num_tokens)
        return self.states_bytes + of_model

    @property
    def context_step_bytes(self) -> int:
        """Bytes per further `CONTEXT_STEP` of tokens."""
        return 0 if self.drafter is None else self.drafter.context_step_bytes


def plan_draft(
    draft: str | Path, checkpoint: Checkpoint, model: PreTrainedModel, progress: Progress | None
) -> DraftMemory:
    """The memory of drafts for a model on the meta device."""
    if draft == "none":
        return DraftMemory()
    from moe_runtime.inference.drafted_steps import MOST_STATES, without_effect
    from moe_runtime.inference.sequence_cache import bytes_of_states

    if (of_text := bytes_of_states(model)) is None:
        raise without_effect(model)
    states_bytes = (MOST_STATES + 1) * of_text  # one more: the text's own
    if draft == "lookup":
        return DraftMemory(None, states_bytes)
    if draft == "mtp":
        from moe_runtime.inference.mtp_heads import HeadPlan

        return DraftMemory(HeadPlan(checkpoint, model), states_bytes)
    from moe_runtime.inference.draft_models import DraftPlan

    return DraftMemory(DraftPlan(draft, checkpoint, progress), states_bytes)


def _lay_out(
    model: PreTrainedModel, experts: ExpertMap, place: torch.device, cache_code: str
) -> tuple[list[OffloadedExperts], dict[str, ExpertMap], int]:
    """Replaces the experts modules. Returns the new ones, the layout of experts in the slots of
    each tier, and bytes to reserve for these layouts."""
    slot_maps, set_aside_bytes, kind = {"host": experts, "device": experts}, 0, OffloadedExperts
    if cache_code != "none":
        from moe_runtime.inference.cache_code import coded_experts

        slot_maps["host"], set_aside_bytes = coded_experts(experts, place)
    if place.type != "cpu":
        from moe_runtime.inference.device import device_experts

        kind, set_aside_bytes = device_experts.DeviceExperts, device_experts.WORKSPACE_BYTES
        device_experts.keep_readable(experts.packed_dense, experts.dense_entries)
        slot_maps["device"] = device_experts.experts_on_device(experts)

    def make(module: ExpertsModule, layer: int) -> OffloadedExperts:
        return kind(module, layer, [key for key in experts.layouts if key.layer == layer + 1])

    return replace_experts(model, experts, make), slot_maps, set_aside_bytes


def replace_experts(
    model: PreTrainedModel, experts: ExpertMap, make: Callable[[ExpertsModule, int], ExpertsT]
) -> list[ExpertsT]:
    """Replaces each experts module by ``make(module, layer)``."""
    replaced = []
    for layer, module in enumerate(experts.modules):
        parent, _, name = module.name.rpartition(".")
        replaced.append(make(module, layer))
        setattr(model.get_submodule(parent), name, replaced[-1])
    return replaced


def finish_dense(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    experts: ExpertMap,
    place: torch.device,
    progress: Progress | None = None,
    stored: Mapping[str, str] | None = None,
    kv_cache: str = "exact",
    *,
    fills: bool = True,
) -> None:
    """Loads everything but the experts and prepares the model to generate. Embeddings named in
    ``stored`` stay in their files. Without ``fills`` weights get no values. Raises CheckpointError:
    the checkpoint is damaged or incomplete."""
    load_dense(model, checkpoint, experts, place, progress, stored, fills=fills)
    if place.type == "cpu":
        use_small_batch_layers(model)
        use_single_query_attention(model)
        fuse_attention_layers(model, copies=fills)
        rest_torch_threads(model)
        grow_cache_in_place(model, rounding_of(model, kv_cache))
    settings = read_generation_config(checkpoint.folder) if model.can_generate() else None
    if settings is not None:
        model.generation_config = settings
    model.eval().requires_grad_(False)


def _plan(
    checkpoint: Checkpoint,
    slot_maps: dict[str, ExpertMap],
    budgets: dict[str, Budget],
    free: dict[str, int],
    dense: tuple[int, int],
    max_tokens: int | None,
    extra_bytes: int,
    drafting: DraftMemory,
    kept: dict[str, Any],
) -> tuple[dict[str, MemoryPlan], Context]:
    """Divides the budgets. Dense weights lie on the GPU if there is one, else on the host.
    ``dense`` has their bytes, and those of embeddings that may stay in their files."""
    dense_bytes, embedding_bytes = dense
    experts, config, dtype = slot_maps["host"], checkpoint.config, checkpoint.dtype
    signature = signature_of(checkpoint, experts)

    def reserve(num_tokens: int) -> int:
        sizes: dict[str, Any] = {"max_tokens": num_tokens, "dense_bytes": dense_bytes}
        sizes["writes_dense"] = "device" not in free
        reserved = reserve_for(checkpoint, experts, signature, **sizes, **kept)
        return extra_bytes + drafting.bytes_for(num_tokens) + reserved

    names = {"host": "this machine", "device": "the device"}
    sizes = {place: resolve_budget(budgets[place], free[place], names[place]) for place in free}
    dense_place = "device" if "device" in free else "host"
    context = Context(tokens_to_plan_for(config, max_tokens), "as max_tokens says")
    if max_tokens is None:
        context = default_context(
            known_positions(config),
            sizes[dense_place],
            dense_bytes=dense_bytes,
            reserve_bytes=reserve(context.max_tokens),
            slot_bytes=slot_maps[dense_place].slot_bytes,
            num_experts=len(experts.layouts),
            embedding_bytes=embedding_bytes,
            step_bytes=context_step_bytes(config, dtype, signature.top_k, **kept)
            + drafting.context_step_bytes,
        )
    plans = {
        place: plan_memory(
            size,
            dense_bytes=dense_bytes if place == dense_place else 0,
            reserve_bytes=reserve(context.max_tokens) if place == dense_place else 0,
            slot_bytes=slot_maps[place].slot_bytes,
            num_experts=len(experts.layouts),
            max_tokens=context.max_tokens,
            embedding_bytes=embedding_bytes,
        )
        for place, size in sizes.items()
    }
    return plans, context


def _open_stores(
    times: StepTimes | None,
    source: ExpertSource,
    slab: Slab,
    experts: ExpertMap,
    slot_maps: dict[str, ExpertMap],
    plans: dict[str, MemoryPlan],
    new_policy: Callable[[MemoryPlan], LayerShares],
    place: torch.device,
) -> tuple[ExpertStore[ExpertWeights], ExpertStore[torch.Tensor] | None]:
    """The store that layers compute from and, for a device or coded experts, the one below.
    ``experts`` has the layout in the files, ``slot_maps`` that in the slots of each tier."""
    host = plans["host"]
    listeners = (None, None) if times is None else (times.of_tier(0), times.of_tier(1))
    if "device" in plans:
        from moe_runtime.inference.device.device_experts import open_device_stores
        from moe_runtime.memory.device.cuda_device import CudaDevice

        gpu = CudaDevice(place)
        return open_device_stores(source, slab, plans, new_policy, slot_maps, listeners, gpu)
    bind, in_slots = bind_slots(slot_maps["host"]), slot_maps["host"]
    if experts is not in_slots:
        from moe_runtime.inference.cache_code import open_coded_stores

        return open_coded_stores(source, slab, experts, in_slots, host, new_policy, bind, listeners)
    fast, streams = listeners[0], host.stream_slots()
    own = ExpertStore(source, slab, new_policy(host), bind, stream_slots=streams, listener=fast)
    return own, None


def signature_of(checkpoint: Checkpoint, experts: ExpertMap) -> ModelSignature:
    """The shape that traces, predictors and placements of a model must match."""
    return ModelSignature(
        model_type=checkpoint.config.model_type,
        num_layers=len(experts.modules),
        num_experts=max((module.num_experts for module in experts.modules), default=0),
        top_k=experts.top_k,
        vocab_size=checkpoint.config.get_text_config().vocab_size,
    )


def resolve_policy(
    policy: str,
    shares: str,
    signature: ModelSignature,
    checkpoint: Path,
    num_slots: int,
    expert_bytes: int | None = None,
) -> PolicyChoice:
    """The named policy and shares; for ``auto`` those with the best replay.

    Args:
        shares: ``even``, ``adaptive``, or ``auto``: even, or the shares of the policy's choice.
        checkpoint: its folder or file.
        num_slots: of the tier that layers compute from.
    """
    chosen = PolicyChoice(policy=policy, adaptive=False, reason="")
    if policy == AUTO:
        from moe_runtime.lab.replay.choice import choose_policy
        from moe_runtime.lab.traces.learned import read_lesson
        from moe_runtime.lab.traces.recent import read_recent

        recent, lesson = read_recent(signature, checkpoint), read_lesson(signature, checkpoint)
        chosen = choose_policy(signature, recent, num_slots, expert_bytes, lesson)
    if shares == AUTO:
        return chosen
    return replace(chosen, adaptive=shares == "adaptive")


def policy_maker(
    choice: PolicyChoice,
    signature: ModelSignature,
    layouts: Mapping[ExpertKey, ExpertLayout],
) -> Callable[[MemoryPlan], LayerShares]:
    """A function that makes the chosen policy for a tier."""
    shape = shape_of(signature)
    # bytes per miss, if experts differ
    read = {key: float(layout.tensor_bytes) for key, layout in layouts.items()}
    costs = read if len({*read.values()}) > 1 else None

    def make(plan: MemoryPlan) -> LayerShares:
        return make_policy(
            choice.policy,
            num_slots=plan.num_slots,
            setting=Setting(shape=shape, costs=costs),
            adaptive=choice.adaptive,
            reserve=plan.stream_slots(),
        )

    return make
