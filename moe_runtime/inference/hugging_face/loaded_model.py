"""The class of a loaded model, with its differences from transformers, and ``model.moe``.
``docs/transformers-features.md`` lists the differences."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch import Tensor

from moe_runtime.allocator import give_back_free_pages
from moe_runtime.checkpoints.absent import AbsentTensor, convert_as_a_whole, refuse_copy
from moe_runtime.checkpoints.transformers_private import (
    attention_name,
    has_adapters,
    page_size_name,
)
from moe_runtime.errors import CapacityError, UnsupportedUseError
from moe_runtime.inference.budget import Context, MemoryPlan, peak_resident_bytes, room_for
from moe_runtime.inference.cpu.attention import ATTENTION
from moe_runtime.inference.steps import (
    CalledInSteps,
    Pieces,
    Steps,
    refuse_tracing,
    too_long,
)
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.memory.source import FileVersion
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.types import ExpertCounters, ModelSignature, RuntimeStats, StoreStats

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, PreTrainedConfig, PreTrainedModel

    from moe_runtime.inference.draft_models import CachedDrafts
    from moe_runtime.inference.drafts import DraftControl
    from moe_runtime.inference.learning import KeptLearning, RoutingRecord
    from moe_runtime.lab.traces.timeline import Timeline
    from moe_runtime.memory.prefetcher import Prefetcher


def as_loaded_model(
    model: PreTrainedModel,
    folder: Path,
    versions: set[FileVersion],
    steps: Steps,
    max_tokens: int,
    in_pass: int | None,
) -> None:
    """Gives a model with offloaded experts the class of a loaded model. ``in_pass`` limits the
    tokens of a pass; None for no limit."""
    add_base(model, GeneratingModel if model.can_generate() else LoadedModel)
    cast(Any, model).checkpoint_folder = folder
    vars(model).update(_steps=steps, _max_tokens=max_tokens, _expert_files=versions, _drafts=None)
    cast(Any, model)._pieces = None if in_pass is None else Pieces(model, in_pass, max_tokens)
    convert_as_a_whole(model)


def add_base(model: Any, base: type) -> None:
    """Puts ``base`` before the class of a model; the name of the class stays."""
    kind = type(model)
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(kind.__name__, (base, kind), names)


class LoadedModel(CalledInSteps):
    """Mixin of a transformers model whose experts lie in files of ``checkpoint_folder``."""

    checkpoint_folder: Path
    _max_tokens: int
    _expert_files: set[FileVersion]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers: a model with its experts in memory."""
        return cls._own_class()(*args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Writes the whole checkpoint; copies experts and quantised weights from their files.

        Args:
            save_directory: the folder; other files in it stay.
            state_dict: written instead of the model's own parameters, without experts.
            options: ``max_shard_size``, ``variant`` and others of transformers.

        Raises:
            CheckpointError: the checkpoint was replaced since it was loaded.
            OSError: writing fails; the old files stay.
            UnsupportedUseError: an option is not supported, or quantised weights were changed.
        """
        model = cast(Any, self)
        if has_adapters(self):  # writes the adapters only
            super_save = cast(Any, super()).save_pretrained
            super_save(save_directory, is_main_process, state_dict, **options)
            return
        from moe_runtime.inference.hugging_face.saving import SaveOptions, save_around_experts

        settings = SaveOptions.of(options)
        if any(".base_layer." in name for name in model.state_dict()):
            raise UnsupportedUseError(
                "adapters wrap parts of this model: save them through the PeftModel, or call its "
                "unload or merge_and_unload before save_pretrained"
            )
        if vars(model).get("_adapter") is not None:
            raise UnsupportedUseError(
                f"the adapter {model._adapter} is beside this model's weights, not in them: load "
                "the model without adapter to save it"
            )
        state = model.state_dict() if state_dict is None else state_dict
        own = set(model.state_dict()).difference(model.all_tied_weights_keys)
        lacking = sorted(own.difference(state))
        if lacking:
            raise UnsupportedUseError(
                f"state_dict has no {lacking[0]}: a loaded model is written as a whole; "
                "leave state_dict out, or give all of model.state_dict()"
            )
        self._require_own_experts(state)
        if is_main_process:
            folder, place = self.checkpoint_folder, Path(save_directory)
            save_around_experts(model, folder, place, state, settings, self._expert_files)

    def save_distributed_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: see ``save_pretrained``."""
        raise UnsupportedUseError(
            "a loaded model is not spread over processes: one process writes the whole checkpoint "
            "with save_pretrained"
        )

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers: a model with its experts in memory."""
        return cls._own_class().from_pretrained(*args, **kwargs)

    @classmethod
    def _own_class(cls) -> Any:
        return cls.__mro__[cls.__mro__.index(CalledInSteps) + 1]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As in torch; experts stay as in the checkpoint. Raises UnsupportedUseError: the state has
        weights of experts."""
        self._require_own_experts(state_dict)
        return cast(Any, super()).load_state_dict(state_dict, strict=strict, assign=assign)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        if requires_grad:
            raise UnsupportedUseError(
                "requires_grad_() would train the experts too, which are in the checkpoint's "
                "files: call it on the parameters or modules to train, add adapters with PEFT, or "
                "train experts with `moe-runtime finetune`"
            )
        return cast(Any, super()).requires_grad_(requires_grad)

    def init_continuous_batching(
        self,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> Any:
        """As in transformers, with SDPA and within ``max_tokens``.

        Raises:
            CapacityError: the settings need more memory than is reserved.
            UnsupportedUseError: the model has an int8 KV cache, and this has none.
        """
        if cast(Any, self).moe.facts.kv_cache != "exact":
            raise UnsupportedUseError(
                "continuous batching of transformers has a cache of its own, which kv_cache int8 "
                "does not reach: load the model with kv_cache exact, or use the server"
            )
        model, make = cast(Any, self), cast(Any, super()).init_continuous_batching
        given = generation_config or model.generation_config
        if continuous_batching_config is None:
            continuous_batching_config = getattr(given, "continuous_batching_config", None)
        longest = 0
        if workload_hints is not None:
            longest = workload_hints.max_prompt_length + workload_hints.max_generated_length
        pieces, most = self._pieces, self._max_tokens
        in_pass = most if pieces is None else pieces.most_tokens
        settings = limit_batching(model.config, continuous_batching_config, longest, most, in_pass)
        made = partial(make, generation_config, settings, workload_hints)
        if attention_name(model) != ATTENTION:
            return made()
        model.set_attn_implementation("sdpa")
        manager = None
        try:
            manager = made()
            if manager._original_attn_impl is None:
                # the manager restores this attention when it stops
                manager._original_attn_impl = ATTENTION
        finally:
            if manager is None:
                model.set_attn_implementation(ATTENTION)
        return manager

    def _require_own_experts(self, state: Mapping[str, Any]) -> None:
        own = {n for n, t in cast(Any, self).state_dict().items() if isinstance(t, AbsentTensor)}
        given = [n for n in state if n in own and not isinstance(state[n], AbsentTensor)]
        if given:
            raise UnsupportedUseError(
                f"{given[0]}: experts and quantised weights of a loaded model are those of its "
                "checkpoint's files and cannot be given; leave them out, or call from_pretrained "
                "of transformers"
            )

    def __prepare_scriptable__(self) -> NoReturn:
        """``torch.jit.script`` calls this first."""
        refuse_tracing("torch.jit.script")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()


class GeneratingModel(LoadedModel):
    """A loaded model that generates text."""

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """As in transformers. Raises CapacityError: the text would exceed ``max_tokens``."""
        num_sequences, length = _longest_text(inputs, generation_config, options)
        if num_sequences * length > self._max_tokens:
            raise too_long(num_sequences, length, self._max_tokens)
        generate = cast(Any, super()).generate
        return generate(inputs, generation_config, *rest, **options)


def limit_batching(
    config: PreTrainedConfig,
    given: ContinuousBatchingConfig | None,
    longest: int,
    max_tokens: int,
    in_pass: int,
) -> ContinuousBatchingConfig:
    """Settings of continuous batching whose paged cache and steps fit in ``max_tokens``.

    Sets unset ones, for which transformers would take most of the machine's memory. A step has at
    most half of ``in_pass`` tokens; the memory of the other half holds gathered keys and values,
    the mask, and two rows of logits per request. ``longest`` is the length of the longest request
    with its answer; 0 if unknown. Raises CapacityError: a given setting or a request is too large.
    """
    from transformers import ContinuousBatchingConfig

    if longest > max_tokens:
        raise too_long(1, longest, max_tokens)

    text = config.get_text_config()
    settings = ContinuousBatchingConfig() if given is None else copy.copy(given)
    page = page_size_name(settings)
    page_size = getattr(settings, page)
    if given is None:
        # so small that two more blocks fit, see `_tokens_of_blocks`
        page_size = max(4, min(page_size, max_tokens // 32))
        setattr(settings, page, page_size)
    blocks = max_tokens // page_size
    while blocks and _tokens_of_blocks(text, blocks, page_size) > room_for(max_tokens):
        blocks -= 1
    # The mask has a value per pair of new and cached token. With so few tokens in a step it takes
    # at most half of their activations, which are 48 bytes or more per hidden value.
    passed = min(max_tokens, in_pass)
    unmasked = 6 * passed * text.hidden_size // max_tokens
    step = max(1, min(passed // 2, max(64, text.hidden_size // 4), unmasked))
    # fp32 logits and a copy fit in the 48 bytes per hidden value of half the tokens
    rows = 24 * passed * text.hidden_size // (8 * text.vocab_size)
    most = {
        "num_blocks": blocks,
        "max_batch_tokens": step,
        "max_requests_per_batch": max(1, min(step, rows)),
        "cpu_offload_space": 0,
    }
    for name, value in most.items():
        asked = getattr(settings, name)
        if asked is None and value:
            setattr(settings, name, value)
        elif asked is None or asked > value:
            pages = f" of {page_size} tokens" if name == "num_blocks" else ""
            raise CapacityError(
                f"continuous batching may have a {name} of at most {value}{pages}, got {asked}: "
                f"memory is set aside for {max_tokens} tokens; load the model with a larger "
                "max_tokens, or give smaller settings"
            )
    return settings


def _tokens_of_blocks(text: PreTrainedConfig, num_blocks: int, page_size: int) -> int:
    """Tokens of a paged cache. transformers divides it into sectors that fit pages of every kind of
    attention, and adds two sectors that requests do not get."""
    layers = text.num_hidden_layers
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * layers)
    sector_layers = math.lcm(*kinds.values())
    sectors = -(-num_blocks * layers // sector_layers) + 2
    return -(-sectors * sector_layers * page_size // layers)


def _longest_text(inputs: Any, config: Any, options: dict[str, Any]) -> tuple[int, int]:
    """The number of sequences, with beams and returned ones, and their length; 0 if unknown."""

    def option(name: str) -> Any:
        given = options.get(name)
        return getattr(config, name, None) if given is None else given

    prompt = options.get("input_ids") if inputs is None else inputs
    if prompt is None:
        prompt = options.get("inputs_embeds")
    # without a prompt, transformers begins with one token
    num_sequences, num_prompt_tokens = (1, 1) if prompt is None else prompt.shape[:2]
    num_new, length = option("max_new_tokens"), option("max_length")
    if num_new is not None:
        length = num_prompt_tokens + num_new
    widened = max(option("num_beams") or 1, option("num_return_sequences") or 1)
    return num_sequences * widened, length or 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFacts:
    """Facts about a loaded model.

    Attributes:
        signature: the shape that traces and predictors must match.
        device_plan: None for a model on the CPU.
        dense_bytes: of everything but the routed experts.
        elsewhere_bytes: those of them that count in budgets of other processes, which share them.
        baseline_rss_bytes: resident memory of the process after imports, before loading.
        load_s: seconds of loading.
        choice: the eviction policy, and the reason for ``auto``'s choice.
        context: tokens that memory is reserved for, and the reason for the number.
        kv_cache: the option of ``load``.
        draft_bytes: of a draft model, with memory for its texts.
    """

    signature: ModelSignature
    host_plan: MemoryPlan
    device_plan: MemoryPlan | None
    dense_bytes: int
    expert_bytes: int
    baseline_rss_bytes: int
    load_s: float
    choice: PolicyChoice
    context: Context
    kv_cache: str = "exact"
    draft_bytes: int = 0
    elsewhere_bytes: int = 0


class RuntimeHandle:
    """``model.moe``: statistics, self-check and closing. As a context manager it closes at the end.
    A closed model refuses every call."""

    def __init__(
        self,
        store: ExpertStore[ExpertWeights],
        facts: LoadedFacts,
        *,
        host_store: ExpertStore[Tensor] | None = None,
        others: Sequence[tuple[ExpertStore[ExpertWeights], ExpertStore[Tensor] | None]] = (),
        recorder: RoutingRecord | None = None,
        prefetcher: Prefetcher | None = None,
        timeline: Timeline | None = None,
        learning: KeptLearning | None = None,
        drafts: DraftControl | None = None,
    ) -> None:
        """Owns the stores, recorder and prefetcher from now on; ``others`` are stores of further
        GPUs. Raises CheckpointError: another process is writing the trace or the timeline."""
        self.facts = facts
        self.recorder = recorder
        self.prefetcher = prefetcher
        self._store = store
        self._host_store = host_store
        above = store, *(tiers[0] for tiers in others)
        below = host_store, *(tiers[1] for tiers in others)
        self._above, self._below = [*above], [each for each in below if each is not None]
        self._timeline = timeline
        self._learning = learning
        self.drafts = drafts
        self.draft_model: CachedDrafts | None = None
        self._closed = False
        # locks the files against other processes
        with contextlib.ExitStack() as stack:
            if self._timeline is not None:
                stack.callback(self._timeline.close)
                self._timeline.hold()
            if self.recorder is not None:
                self.recorder.hold()
            stack.pop_all()

    def stats(self) -> RuntimeStats:
        """Counters since loading or `reset_stats`."""
        facts = self.facts
        fastest = added([store.stats() for store in self._above])
        slowest = added([store.stats() for store in self._below or self._above])
        counted = {f.name: getattr(fastest, f.name) for f in dataclasses.fields(ExpertCounters)}
        counted["readahead_bytes"] = slowest.readahead_bytes
        if self.drafts is not None:
            counted |= self.drafts.counts()
        return RuntimeStats(
            **counted,
            bytes_read=slowest.bytes_read,
            copied_bytes=0 if facts.device_plan is None else fastest.bytes_read,
            budget_bytes=facts.host_plan.budget_bytes,
            dense_bytes=facts.dense_bytes,
            expert_bytes=facts.expert_bytes,
            baseline_rss_bytes=facts.baseline_rss_bytes,
            peak_rss_bytes=peak_resident_bytes() - facts.elsewhere_bytes,
            load_s=facts.load_s,
            policy=facts.choice.policy,
            shares="adaptive" if facts.choice.adaptive else "even",
            policy_reason=facts.choice.reason,
            prefetch="off" if self.prefetcher is None else self.prefetcher.describe(),
            kv_cache=facts.kv_cache,
            draft_bytes=facts.draft_bytes,
            predict_s=0.0 if self.prefetcher is None else self.prefetcher.stats().predict_s,
        )

    def waits(self) -> tuple[float, int, int]:
        """See `ExpertStore.waits`."""
        return self._store.waits()

    def reset_stats(self) -> None:
        """Sets all counters to zero."""
        for store in (*self._above, *self._below):
            store.reset_stats()
        if self.prefetcher is not None:
            self.prefetcher.reset_stats()
        if self.drafts is not None:
            self.drafts.reset_counts()

    def check(self) -> None:
        """Checks the invariants of every tier.

        Raises:
            AssertionError: one is violated.
            MoERuntimeError: the process is a fork of the one that loaded the model.
        """
        for store in (*self._above, *self._below):
            store.check()

    def close(self) -> None:
        """Ends reads, frees the experts' memory and completes trace and timeline. Does nothing in a
        fork of the process that loaded the model."""
        if self._closed or self._store.is_forked:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:  # closes all, even if one fails
            for part in (self.recorder, self._timeline, self._learning, self.draft_model):
                if part is not None:
                    stack.callback(part.close)
            for store in self._above:
                stack.callback(store.close)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()

    def __enter__(self) -> RuntimeHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_OF_ONE_EXPERT = {"slot_bytes", "miss_cpu_s", "miss_copy_s", "miss_return_s", "miss_launch_s"}


def added(parts: Sequence[StoreStats]) -> StoreStats:
    """Counters of several stores together; of figures of one expert, the largest."""
    found = {}
    for field in dataclasses.fields(StoreStats):
        values = [getattr(part, field.name) for part in parts]
        found[field.name] = max(values) if field.name in _OF_ONE_EXPERT else sum(values)
    return StoreStats(**found)


def is_resizable(handle: RuntimeHandle) -> bool:
    """Whether the model has a single tier, in host memory and without a cache code."""
    return handle._host_store is None


def resize_cache(handle: RuntimeHandle, num_slots: int) -> int:
    """Resizes the cache of a model that ``is_resizable`` to ``num_slots``, ``MIN_SLOTS`` at least.

    Returns the new number: more while experts are in use or being read, fewer if allocation fails.
    """
    store, facts = handle._store, handle.facts
    plan = replace(facts.host_plan, num_slots=num_slots)
    streamed = 0
    if store.decides_later:
        streamed = min(plan.stream_slots(), facts.signature.top_k, num_slots // 4)
    found = store.resize(
        num_slots, shared_slots=num_slots - streamed, stream_slots=plan.stream_slots()
    )
    taken = plan.dense_bytes + plan.reserve_bytes + found * plan.slot_bytes
    handle.facts = replace(facts, host_plan=replace(plan, num_slots=found, budget_bytes=taken))
    return found


def watch_misses_of_drafts(handle: RuntimeHandle, num_lacking: int) -> None:
    """Counts misses that would be hits if the memory of drafts held experts. ``num_lacking``
    experts have no slot."""
    if is_resizable(handle):
        more = handle.facts.draft_bytes // handle.facts.host_plan.slot_bytes
        handle._store.num_watched = min(num_lacking, more)


def give_up_drafts(handle: RuntimeHandle) -> None:
    """Closes the draft model and gives its memory to experts."""
    facts, more = handle.facts, handle._store.num_watched
    handle._store.num_watched = 0
    assert handle.draft_model is not None
    handle.draft_model.close()
    handle.draft_model = None
    give_back_free_pages()
    plan = facts.host_plan
    plan = replace(plan, reserve_bytes=plan.reserve_bytes - facts.draft_bytes)
    handle.facts = replace(facts, draft_bytes=0, host_plan=plan)
    resize_cache(handle, plan.num_slots + more)
