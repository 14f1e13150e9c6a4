"""``max_tokens``: the tokens that memory is set aside for, and the refusal of more."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints.transformers_private import page_size_name
from moe_runtime.errors import CapacityError
from moe_runtime.inference.kv_cache import room_for
from moe_runtime.inference.steps import Listener, Step

if TYPE_CHECKING:
    from transformers import ContinuousBatchingConfig, PreTrainedConfig

DEFAULT_TOKENS = 4096
"""Tokens that memory is set aside for by default, if the model knows as many."""


def known_positions(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest sequence that a model knows; None where its configuration says none."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) else None


def tokens_to_plan_for(config: PreTrainedConfig, max_tokens: int | None) -> int:
    """``max_tokens``, or where that is None the positions that a model knows, of 4096 at most.

    Raises:
        ValueError: fewer than one.
    """
    if max_tokens is None:
        known = known_positions(config)
        return DEFAULT_TOKENS if known is None else min(DEFAULT_TOKENS, known)
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return max_tokens


class TokenLimit(Listener):
    """Refuses passes that need room for more tokens than memory was set aside for.

    Cached and new tokens of all sequences count, of a static cache all its places.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens, self.follows_requests = max_tokens, False

    def allow(self, step: Step) -> None:
        """CapacityError where a pass needs more room."""
        places = [getattr(layer, "max_cache_len", 0) for layer in getattr(step.cache, "layers", ())]
        length = max(step.num_new, *places) if any(places) else step.num_cached + step.num_new
        if step.num_sequences * length > self._max_tokens:
            raise _too_long(step.num_sequences, length, self._max_tokens)


def limit_batching(
    config: PreTrainedConfig,
    given: ContinuousBatchingConfig | None,
    longest: int,
    max_tokens: int,
) -> ContinuousBatchingConfig:
    """Settings of continuous batching whose paged cache and steps keep to ``max_tokens``.

    Unset ones are set: transformers would take most of the machine's memory. A step has at most
    half the tokens: the activations of the others leave room for gathered keys and values, the
    mask, and two rows of logits for each request. ``longest`` are the tokens of the longest
    request, its answer included; 0 where not known.

    Raises:
        CapacityError: a setting that was given, or a request, needs room for more.
    """
    from transformers import ContinuousBatchingConfig

    if longest > max_tokens:
        raise _too_long(1, longest, max_tokens)

    text = config.get_text_config()
    settings = ContinuousBatchingConfig() if given is None else copy.copy(given)
    page = page_size_name(settings)
    page_size = getattr(settings, page)
    if given is None:
        # Two more blocks than the tokens need still fit then, see `_tokens_of_blocks`.
        page_size = max(4, min(page_size, max_tokens // 32))
        setattr(settings, page, page_size)
    blocks = max_tokens // page_size
    while blocks and _tokens_of_blocks(text, blocks, page_size) > room_for(max_tokens):
        blocks -= 1
    # The mask has a value for each token of a step and each cached one: with as few tokens in a
    # step it is a small part of their activations, which are 48 bytes or more per hidden value.
    step = max(1, min(max_tokens // 2, max(64, text.hidden_size // 4)))
    # fp32 logits and a copy, against the 48 bytes per hidden value of half the tokens.
    rows = 24 * max_tokens * text.hidden_size // (8 * text.vocab_size)
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
    """Tokens that a paged cache has memory for.

    transformers divides it into sectors that pages of every kind of attention fit in, and adds two
    that no request gets.
    """
    layers = text.num_hidden_layers
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * layers)
    sector_layers = math.lcm(*kinds.values())
    sectors = -(-num_blocks * layers // sector_layers) + 2
    return -(-sectors * sector_layers * page_size // layers)


def limit_generation(inputs: Any, config: Any, options: dict[str, Any], max_tokens: int) -> None:
    """CapacityError for a call of ``generate`` that says it may need room for more tokens."""
    num_sequences, length = _longest_text(inputs, config, options)
    if num_sequences * length > max_tokens:
        raise _too_long(num_sequences, length, max_tokens)


def _longest_text(inputs: Any, config: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Sequences, beams and returned ones included, and tokens of each; 0 where not said."""

    def option(name: str) -> Any:
        given = options.get(name)
        return getattr(config, name, None) if given is None else given

    prompt = options.get("input_ids") if inputs is None else inputs
    if prompt is None:
        prompt = options.get("inputs_embeds")
    # Without a prompt transformers begins with one token of its own.
    num_sequences, num_prompt_tokens = (1, 1) if prompt is None else prompt.shape[:2]
    num_new, length = option("max_new_tokens"), option("max_length")
    if num_new is not None:
        length = num_prompt_tokens + num_new
    widened = max(option("num_beams") or 1, option("num_return_sequences") or 1)
    return num_sequences * widened, length or 0


def _too_long(num_sequences: int, length: int, max_tokens: int) -> CapacityError:
    asked = f"{length} tokens" if num_sequences == 1 else f"{num_sequences} sequences of {length}"
    return CapacityError(
        f"{asked} need room for {num_sequences * length} tokens, but memory is set aside for "
        f"{max_tokens}; load the model with max_tokens={num_sequences * length}, or ask for fewer"
    )
