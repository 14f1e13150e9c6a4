"""Warming up: experts are read and kernels compiled before somebody waits for the first token."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch

from moe_runtime.checkpoints.checkpoint import Progress
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.memory.tiers import TierStore
from moe_runtime.types import ExpertKey

PROMPT_TOKENS, NEW_TOKENS = 32, 3
"""A prompt that kernels for many tokens compute, and steps of one token."""
MOST_PROMPT_TOKENS = 8192
"""Of a prompt that is computed for the sake of its kernels alone."""


def warm_up(
    model: Any, modules: Sequence[OffloadedExperts], max_tokens: int, progress: Progress | None
) -> None:
    """Reads experts as far as every layer has slots, on a device and in the host's memory below it,
    then computes a few tokens.

    Nobody who records or learns hears of it, and counters begin at zero behind it.
    """
    is_done = False
    try:
        with _unheard(model):
            _read_experts(modules, progress)
            # a class of several models has no pass of its own
            if model.can_generate() and type(model).forward is not torch.nn.Module.forward:
                _compute(model, max_tokens)
                _compute_prompts(model, modules, max_tokens)
        model.moe.reset_stats()
        is_done = True
    finally:
        if not is_done:
            model.moe.close()


@contextmanager
def _unheard(model: Any) -> Iterator[None]:
    """Nobody hears of passes and reads within a ``with`` block."""
    stores = model._steps._stores
    listeners = [store.listener for store in stores]
    try:
        for store in stores:
            store.listener = None
        with model._steps.unheard():
            yield
    finally:
        for store, listener in zip(stores, listeners, strict=True):
            store.listener = listener


def _read_experts(modules: Sequence[OffloadedExperts], progress: Progress | None) -> None:
    store = modules[0].store
    assert store is not None, "the model is loaded"
    lower = store.fetcher.lower if isinstance(store, TierStore) else None
    wanted = [_own_experts(module) for module in modules]
    shares = [store.share(module.layer) for module in modules]
    rest = [
        share + (lower.share(m.layer) if lower else 0)
        for m, share in zip(modules, shares, strict=True)
    ]
    slot_bytes, num_done = store.stats().slot_bytes, 0
    total_bytes = sum(len(own[:most]) for own, most in zip(wanted, rest, strict=True)) * slot_bytes

    def count() -> None:
        nonlocal num_done
        num_done += 1
        if progress is not None:
            progress("warming up", num_done * slot_bytes, total_bytes)

    for module, experts, share, most in zip(modules, wanted, shares, rest, strict=True):
        with closing(module.each(experts[:share], num_tokens=1)) as arriving:
            for _ in arriving:
                count()
        for expert in experts[share:most]:
            assert lower is not None, "there is a share below"
            with lower.lease([ExpertKey(module.layer, expert)]) as lease:
                for _ in lease:
                    count()


def _own_experts(module: OffloadedExperts) -> list[int]:
    """Those of a layer that this process holds."""
    share, every = module.share, range(module.num_experts)
    return [e for e in every if share is None or share.owns(ExpertKey(module.layer, e))]


@torch.inference_mode()
def _compute(model: Any, max_tokens: int) -> None:
    """A prompt and some steps behind it, with the cache that `generate` takes."""
    length = min(PROMPT_TOKENS, max_tokens - NEW_TOKENS)
    if length < 1:
        return
    name, given = cache_name(model.forward), dict[str, Any](use_cache=True)
    if model.device.type != "cpu":
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
    """Prompts of other lengths, for which a device has kernels of their own.

    Memory is set aside for the logits of one token alone.
    """
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
    """Tokens of the shortest prompts for which products take their second tile, their third one,
    and so on, as far as prompts may be so long.
    """
    from moe_runtime.kernels.grouped_gemm.tiles import TILES_16_BIT

    limits = [rows for rows, _ in TILES_16_BIT["gated"][:-1]]
    lengths = [rows * num_experts // top_k + 1 for rows in limits]
    return [length for length in lengths if length <= most]
