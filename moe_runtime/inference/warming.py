"""Warm-up before the first request: read experts, compile kernels, make stand-ins."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, cast

import torch

from moe_runtime.checkpoints.checkpoint import Progress
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.memory.store import ExpertStore
from moe_runtime.memory.tiers import TierStore
from moe_runtime.types import ExpertKey

PROMPT_TOKENS, NEW_TOKENS = 32, 3
"""A prompt for the kernels of many tokens, and steps of one token."""
MOST_PROMPT_TOKENS = 8192
"""Most tokens of a prompt that only compiles kernels."""


def warm(
    model: Any, modules: Sequence[OffloadedExperts], max_tokens: int, progress: Progress | None
) -> None:
    """Fills the slots of all tiers with experts, then computes a few tokens."""
    with _before_use(model):
        read_experts(modules, progress)
        # a class of several models has no forward
        if model.can_generate() and type(model).forward is not torch.nn.Module.forward:
            _compute(model, max_tokens)
            _compute_prompts(model, modules, max_tokens)


def copy_experts(
    model: Any, modules: Sequence[OffloadedExperts], progress: Progress | None
) -> None:
    """Reads every expert once and makes its int4 copy."""
    total, num_done = model.moe.facts.expert_bytes, 0
    num_experts = sum(module.num_experts for module in modules)
    with _before_use(model):
        for module in modules:
            assert module.store is not None
            assert module.miss_rules is not None
            with module.store.lease(module._keys, streaming=True) as lease:
                for group in lease:
                    for key, weights in group:
                        module.miss_rules.keep_copy(key, weights)
                        num_done += 1
                    if progress is not None:
                        progress("making stand-ins", total * num_done // num_experts, total)


@contextmanager
def _before_use(model: Any) -> Iterator[None]:
    """Mutes all listeners in a ``with`` block, and resets counters after it. A failure closes the
    model."""
    stores = model._steps._stores
    listeners = [store.listener for store in stores]
    with ExitStack() as failure:
        failure.callback(model.moe.close)
        try:
            for store in stores:
                store.listener = None
            with model._steps.muted():
                yield
        finally:
            for store, listener in zip(stores, listeners, strict=True):
                store.listener = listener
        model.moe.reset_stats()
        failure.pop_all()


def read_experts(modules: Sequence[OffloadedExperts], progress: Progress | None) -> None:
    """Fills the slots of all tiers with experts."""
    stores = [cast(ExpertStore[Any], module.store) for module in modules]
    lowers = [s.fetcher.lower if isinstance(s, TierStore) else None for s in stores]
    wanted = [
        [key.expert for key in m._keys if m.partition is None or m.partition.owns(key)]
        for m in modules
    ]
    counts = [store.slots_of(m.layer) for m, store in zip(modules, stores, strict=True)]
    rest = [
        num_slots + (lower.slots_of(m.layer) if lower else 0)
        for m, lower, num_slots in zip(modules, lowers, counts, strict=True)
    ]
    slot_bytes, num_done = stores[0].stats().slot_bytes, 0
    total_bytes = sum(len(own[:most]) for own, most in zip(wanted, rest, strict=True)) * slot_bytes

    def count() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress("warming up", num_done * slot_bytes, total_bytes)

    places = zip(modules, lowers, wanted, counts, rest, strict=True)
    for module, lower, experts, num_slots, most in places:
        with closing(module.each(experts[:num_slots], num_tokens=1)) as arriving:
            for _ in arriving:
                count()
        for expert in experts[num_slots:most]:
            assert lower is not None, "the tier below has slots"
            with lower.lease([ExpertKey(module.layer, expert)]) as lease:
                for _ in lease:
                    count()


@torch.inference_mode()
def _compute(model: Any, max_tokens: int) -> None:
    length = min(PROMPT_TOKENS, max_tokens - NEW_TOKENS)
    if length < 1:
        return
    name, given = cache_name(model.forward), dict[str, Any](use_cache=True)
    if model.device.type != "cpu" and getattr(model, "_can_compile_fullgraph", False):
        from moe_runtime.inference.device.static_caches import static_cache

        given[name] = static_cache(model.config, length + NEW_TOKENS)
    vocab_size = model.config.get_text_config().vocab_size
    ids_1T = torch.arange(length, device=model.device)[None] % vocab_size
    for _ in range(1 + NEW_TOKENS):
        output = model(ids_1T, **given)
        given[name] = getattr(output, name, None)
        ids_1T = output.logits[:, -1:].argmax(-1)


@torch.inference_mode()
def _compute_prompts(model: Any, modules: Sequence[OffloadedExperts], max_tokens: int) -> None:
    """Computes prompts of lengths with other kernels on a device; keeps logits of one token."""
    if not isinstance(modules[0].store, TierStore):
        return
    vocab_size = model.config.get_text_config().vocab_size
    num_experts, top_k = modules[0].num_experts, model.moe.facts.signature.top_k
    known = inspect.signature(type(model).forward).parameters
    given = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    for length in prompt_lengths(num_experts, top_k, min(max_tokens, MOST_PROMPT_TOKENS)):
        ids_1T = torch.arange(length, device=model.device)[None] % vocab_size
        model(ids_1T, use_cache=False, **given)


def prompt_lengths(num_experts: int, top_k: int, most: int) -> list[int]:
    """The shortest prompts for the second tile of products, the third, and so on."""
    from moe_runtime.kernels.grouped_gemm.tile import TILES_16_BIT

    limits = [rows for rows, _ in TILES_16_BIT["gated"][:-1]]
    lengths = [rows * num_experts // top_k + 1 for rows in limits]
    return [length for length in lengths if length <= most]
