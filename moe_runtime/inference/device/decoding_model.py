"""Loaded models on a GPU: decode steps are recorded, and queued ahead of the host."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessor

from moe_runtime.checkpoints.transformers_private import (
    CACHE_NAMES,
    attention_name,
    cache_name,
)
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.cpu.step_layers import replace_dense_layers
from moe_runtime.inference.device.decode_graphs import DecodeGraphs, is_own
from moe_runtime.inference.device.fused_layers import (
    fuse_device_attention,
    fuse_residuals,
    fuse_routers,
)
from moe_runtime.inference.device.static_caches import (
    StaticCaches,
    attention_layers,
    grown,
    is_filled,
    is_static,
    state_layers,
    static_cache,
)
from moe_runtime.inference.generation import NOT_FINITE, FiniteLogits
from moe_runtime.inference.hugging_face.loaded_model import add_base
from moe_runtime.inference.kv_cache import cache_of
from moe_runtime.inference.steps import OneThread

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessorList,
        PreTrainedModel,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

    from moe_runtime.inference.device.decode_graphs import DecodeGraphs

_OTHER_WAYS = (
    *CACHE_NAMES, "assistant_model", "prompt_lookup_num_tokens", "custom_generate",
    "prefill_chunk_size", "penalty_alpha",
)  # fmt: skip
"""Settings of `generate` that keep transformers' own choice of cache."""
_NOT_AHEAD = ("output_attentions", "output_hidden_states", "prefill_chunk_size", "is_assistant")
_NOT_OF_STEPS = ("tokenizer", "assistant_tokenizer")
_WITHOUT_POSITIONS = frozenset({*CACHE_NAMES, "use_cache", "logits_to_keep", "position_ids"})


def capture_decoding(model: PreTrainedModel, modules: Sequence[Any]) -> None:
    """Records the decode steps of a loaded model as CUDA graphs."""
    if model.device.type == "cuda":
        fuse_steps(model)
        # Torch's threads spin after each operation, and delay the native kernels' threads, which
        # begin and end together: an expert on the CPU then takes 8 ms instead of 0.1.
        OneThread().hold(model)
    caches = StaticCaches()
    cast(Any, model).forward = DecodeGraphs(model, modules, caches)
    if model.can_generate():
        vars(model).update(_unpadded=weakref.WeakSet(), _caches=caches)
        add_base(model, RecordedDecoding)


def fuse_steps(model: PreTrainedModel) -> None:
    """Fuses the layers of steps of one token."""
    replace_dense_layers(model)
    fuse_routers(model)
    fuse_device_attention(model)
    fuse_residuals(model)


class RecordedDecoding:
    """Mixin of a loaded model on a GPU that generates text."""

    _unpadded: weakref.WeakSet[Any]  # static caches whose next steps need only the last tokens
    _caches: StaticCaches

    def generate(
        self, inputs: Any = None, generation_config: Any = None, *rest: Any, **options: Any
    ) -> Any:
        """As in transformers, with a static cache for greedy decoding and sampling: graphs need
        fixed addresses. A returned cache is dynamic."""
        name = cache_name(cast(Any, self).forward)
        settings = {"disable_compile": options.get("disable_compile", True)}
        if generation_config is None:
            options |= settings
        else:  # a config excludes options
            generation_config = copy.deepcopy(generation_config)
            vars(generation_config).update(settings)
        own = self._cache_for(inputs, generation_config, options)
        if own is not None:
            options[name] = own
            options.pop("cache_implementation", None)  # it is "static", if anything
            if generation_config is not None:
                generation_config.cache_implementation = None
        try:
            found = cast(Any, super()).generate(inputs, generation_config, *rest, **options)
            if is_filled(cache := getattr(found, name, None)):
                setattr(found, name, grown(cache))
        finally:
            self._caches.give_back(own)
        return found

    def _cache_for(self, inputs: Any, config: Any, options: dict[str, Any]) -> Any:
        prompts = (inputs, options.get("input_ids"), options.get("inputs_embeds"))
        shapes = [prompt.shape[:2] for prompt in prompts if isinstance(prompt, torch.Tensor)]
        if not shapes or not self._can_be_static(config, options):
            return None
        num_sequences, length = max(shapes, key=itemgetter(1))
        num_tokens = length + self._asked("max_new_tokens", config, options)
        if length == 1:  # with a filled cache this would look like a later step
            return static_cache(cast(Any, self).config, num_tokens)
        most = cast(Any, self)._max_tokens // max(1, num_sequences)
        cache = self._caches.take(cast(Any, self).config, num_sequences, num_tokens, most)
        if cache is not None and not self._asked("return_dict_in_generate", config, options):
            self._caches.unseen.add(cache)
        return cache

    def _asked(self, name: str, config: Any, options: dict[str, Any]) -> Any:
        places = (getattr(each, name, None) for each in (config, cast(Any, self).generation_config))
        found = (options.get(name), *places)
        return next((value for value in found if value is not None), None)

    def _can_be_static(self, config: Any, options: dict[str, Any]) -> bool:
        def asked(name: str) -> Any:
            return self._asked(name, config, options)

        return (
            asked("max_new_tokens") is not None
            and all(asked(name) in (None, 1) for name in ("num_beams", "num_return_sequences"))
            and not any(asked(name) not in (None, False) for name in _OTHER_WAYS)
            and cast(Any, self).generation_config.cache_implementation is None
            and asked("cache_implementation") in (None, "static")
            and options.get("use_cache") is None
            and asked("use_cache") is not False
            and getattr(self, "_can_compile_fullgraph", False)
            # under autocast keys and values may differ in dtype, and no step is recorded
            and not torch.is_autocast_enabled(cast(Any, self).device.type)
        )

    def _sample(self, input_ids: torch.Tensor, **given: Any) -> Any:
        for name in _NOT_OF_STEPS:  # transformers would pass them to the model
            given.pop(name, None)
        if self._can_be_ahead(input_ids, given):
            return decode_ahead(self, input_ids, **given)
        return cast(Any, super())._sample(input_ids, **given)

    def _can_be_ahead(self, input_ids: torch.Tensor, given: dict[str, Any]) -> bool:
        cache, config = cache_of(given), given["generation_config"]
        return (
            isinstance(cast(Any, self).forward, DecodeGraphs)  # else a program wrapped it
            and is_static(cache)
            and cache.get_seq_length() == 0
            and input_ids.device == cast(Any, self).device
            and given.get("inputs_embeds") is None
            and not any(getattr(config, name) for name in _NOT_AHEAD)
            and not given.get("synced_gpus")
        )

    def new_cache(
        self, num_sequences: int, num_tokens: int, last: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A static cache, for callers with a loop of their own.

        Args:
            num_tokens: of each sequence, new ones included.
            last: the previous result; its memory and recording are reused if the size is equal.

        Returns:
            The cache by its argument's name; empty if the model has no static cache.
        """
        name = cache_name(cast(Any, self).forward)
        self._caches.give_back(last.get(name))
        if not getattr(self, "_can_compile_fullgraph", False):
            return {}
        most = cast(Any, self)._max_tokens // num_sequences
        cache = self._caches.take(cast(Any, self).config, num_sequences, num_tokens, most)
        return {} if cache is None else {name: cache}

    def knows_positions(self, cache: Any) -> bool:
        """Whether steps with this static cache need only the last tokens."""
        return cache in self._unpadded

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; later steps without padding need only the last tokens. The graph
        makes positions and masks from the cache."""
        cache = cache_of(kwargs)
        given = {name: value for name, value in kwargs.items() if value is not None}
        is_later = not is_first_iteration and given.keys() <= _WITHOUT_POSITIONS
        is_step, is_known = is_later and next_sequence_length == 1, self.knows_positions(cache)
        if is_known and not is_step:
            self._unpadded.discard(cache)
        if is_later and not (is_step and is_known) and is_filled(cache):
            positions = kwargs.get("position_ids")
            is_whole = (attention_mask is None or bool(attention_mask.all())) and (
                positions is None or bool((positions[..., -1] == int(cache.get_seq_length())).all())
            )
            # masks of eager attention need numbers on the host, which a graph cannot hold
            if is_whole and attention_name(cast(Any, self)) != "eager":
                self._unpadded.add(cache)
        if is_step and self.knows_positions(cache):
            given.pop("position_ids", None)
            ids_B1 = input_ids[:, -1:].to(attention_layers(cache)[0].device).contiguous()
            return {"input_ids": ids_B1, **given}
        return cast(Any, super()).prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length,
            attention_mask=attention_mask, inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration, **kwargs,
        )  # fmt: skip


def decode_ahead(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None = None,
    synced_gpus: bool = False,
    **given: Any,
) -> Any:
    """Greedy decoding and sampling as in transformers, with the next step queued ahead of the host.

    Tokens, scores and arguments of processors and criteria equal those of transformers' loop. If a
    streamer changes the model, this counts from the next call of `generate` on.

    Args:
        model: a `RecordedDecoding`.
        input_ids: the prompts ``[B, T]``, on the model's device.
        given: arguments of the model, with a static cache.

    Returns:
        The prompts and new tokens, or transformers' output with them.
    """
    assert not synced_gpus, "a model of one process"
    graphs: DecodeGraphs = model.forward
    selection = _TokenSelection(
        graphs, input_ids, logits_processor, stopping_criteria, generation_config
    )
    cache, recorded = cache_of(given), None

    def step(ids_BT: torch.Tensor, **length: Any) -> Any:
        nonlocal recorded
        inputs = model.prepare_inputs_for_generation(ids_BT, **length, **given)
        if selection.is_known:
            graphs.trust(recorded)
        output = model(**inputs, return_dict=True)
        recorded = graphs.replayed_for(cache)
        return output

    # a user's own cache may have no room for a step ahead
    room = min(layer.max_cache_len for layer in attention_layers(cache))
    # an unused step changes recurrent states for good
    may_be_ahead = not state_layers(cache) or cache in model._caches.unseen
    most_before = min(generation_config.max_length - 1, room)
    output: Any = step(input_ids, is_first_iteration=True)
    ids_BT, is_ahead = input_ids, False
    try:
        while True:
            if not model.knows_positions(cache):
                given = model._update_model_kwargs_for_generation(output, given)
            ids_BT = selection.select(ids_BT, output.logits)
            output = None
            if may_be_ahead and graphs.is_one_graph and ids_BT.shape[1] <= most_before:
                output, is_ahead = step(ids_BT, next_sequence_length=1), True
            tokens_B, is_over = selection.wait()
            if streamer is not None:
                streamer.put(tokens_B)
            if is_over:
                break
            if output is None:
                output = step(ids_BT, next_sequence_length=1)
            is_ahead = False
    finally:
        graphs.trust(None)
        for layer in attention_layers(cache) if is_ahead else ():
            layer.cumulative_length -= 1  # removes the token of the unused step
    if streamer is not None:
        streamer.end()
    return selection.result(ids_BT, cache)


def _limits_of(criteria: Iterable[Any]) -> tuple[float, frozenset[int] | None]:
    """The longest length and the end tokens of criteria; None instead of the end tokens if other
    criteria are among them."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    most, ends = math.inf, frozenset[int]()
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            most = min(most, criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            ends |= {*criterion.eos_token_id.tolist()}
        else:
            return most, None
    return most, ends


def _runs_own(part: Any) -> bool:
    """Whether a processor or criterion is of transformers or ours, and calls no foreign code."""
    return is_own(type(part)) and all(map(is_own, filter(callable, vars(part).values())))


class _LateCheck(LogitsProcessor):
    """As `FiniteLogits`, without waiting: replaces bad logits by zeros and raises later."""

    are_finite: torch.Tensor

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.are_finite = scores.max().isfinite().reshape(1)
        return scores.where(self.are_finite, 0.0)


class _TokenSelection:
    """Selects the next tokens on the device, and copies them to the host. ``is_known`` means that
    no foreign code runs."""

    def __init__(
        self,
        graphs: DecodeGraphs,
        input_ids: torch.Tensor,
        processor: Any,
        criteria: Any,
        config: GenerationConfig,
    ) -> None:
        self._graphs, self._criteria, self._config = graphs, criteria, config
        self.is_known = all(map(_runs_own, (*processor, *criteria)))
        self._processor, self._checks = type(processor)(), list[_LateCheck]()
        for each in processor:
            if isinstance(each, FiniteLogits):
                self._checks.append(each := _LateCheck())
            self._processor.append(each)
        has_end = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._padding = cast(Any, config)._pad_token_tensor if has_end else None
        self._most, self._ends = _limits_of(criteria)
        # otherwise the host sees ends from the tokens
        self._asks_criteria = self._ends is None or (len(input_ids) > 1 and bool(self._ends))
        self._unfinished_B = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
        self._length = input_ids.shape[1]
        self._pending: Any = None
        asks = config.return_dict_in_generate
        self._scores: Any = () if asks and config.output_scores else None
        self._logits: Any = () if asks and config.output_logits else None

    def select(self, ids_BT: torch.Tensor, logits_BTV: torch.Tensor) -> torch.Tensor:
        """Queues the choice of a token per sequence; returns the sequences with the tokens."""
        logits_BV = logits_BTV[:, -1].to(dtype=torch.float32, copy=True)
        scores_BV = self._processor(ids_BT, logits_BV)
        if self._scores is not None:
            self._scores += (scores_BV,)
        if self._logits is not None:
            self._logits += (logits_BV,)
        if self._config.do_sample:
            probabilities_BV = torch.nn.functional.softmax(scores_BV, dim=-1)
            tokens_B = torch.multinomial(probabilities_BV, num_samples=1).squeeze(1)
        else:
            tokens_B = scores_BV.argmax(-1)
        if self._asks_criteria and self._padding is not None:
            tokens_B = tokens_B * self._unfinished_B + self._padding * (1 - self._unfinished_B)
        ids_BT = torch.cat([ids_BT, tokens_B[:, None]], dim=-1)
        parts = [tokens_B, *(check.are_finite for check in self._checks)]
        if self._asks_criteria:
            self._unfinished_B = self._unfinished_B & ~self._criteria(ids_BT, self._scores)
            parts.append(self._unfinished_B)
        self._length = ids_BT.shape[1]
        told = torch.cat(parts) if len(parts) > 1 else tokens_B
        self._pending = self._graphs.store.device.download(told, is_kept=True)
        return ids_BT

    def wait(self) -> tuple[torch.Tensor, bool]:
        """The tokens on the host, and whether all sequences have ended."""
        found, copied = self._pending
        while not copied.query() and self._graphs.store.count_one():
            """The host counts past steps while it waits."""
        copied.synchronize()
        num, numbers = len(self._unfinished_B), found.tolist()
        unfinished = numbers[num + len(self._checks) :]
        if not all(numbers[num : len(numbers) - len(unfinished)]):
            raise CheckpointError(NOT_FINITE)
        if self._asks_criteria or self._ends is None:
            return found[:num], not any(unfinished)
        is_end = self._length >= self._most or self._ends.issuperset(numbers[:num])
        return found[:num], is_end

    def result(self, ids_BT: torch.Tensor, cache: Any) -> Any:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        if not self._config.return_dict_in_generate:
            return ids_BT
        kind: Any = GenerateDecoderOnlyOutput
        name = next(name for name in CACHE_NAMES if name in kind.__dataclass_fields__)
        return kind(sequences=ids_BT, scores=self._scores, logits=self._logits, **{name: cache})
