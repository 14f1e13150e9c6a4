"""``max_tokens``: the tokens that memory is set aside for, and the refusal of more."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import CapacityError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DEFAULT_TOKENS = 4096
"""Tokens that memory is set aside for where nothing was said, if the model knows as many."""


def tokens_to_plan_for(config: PreTrainedConfig, max_tokens: int | None) -> int:
    """What ``max_tokens`` stands for.

    Args:
        config: of the model.
        max_tokens: tokens of all sequences together; None for a single sequence as long as the
            model knows positions, of 4096 at most.

    Raises:
        ValueError: fewer than one.
    """
    if max_tokens is None:
        known = getattr(config.get_text_config(), "max_position_embeddings", None)
        return min(DEFAULT_TOKENS, known) if isinstance(known, int) else DEFAULT_TOKENS
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return max_tokens


def limit_tokens(model: PreTrainedModel, max_tokens: int) -> None:
    """Has a model refuse what needs room for more tokens than memory was set aside for.

    A forward pass is refused before it computes: cached and new tokens of all its sequences count,
    of a static cache all the places that it has. ``generate`` is refused before it begins where the
    caller says how long the text may become; beams and returned sequences count as sequences.
    """
    from transformers import StaticCache

    def refuse_long_step(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if tokens is None:
            tokens = kwargs.get("inputs_embeds")
        if tokens is not None:
            num_sequences, num_new = tokens.shape[:2]
            length = _length_with(kwargs.get("past_key_values"), num_new, StaticCache)
            if num_sequences * length > max_tokens:
                raise _too_long(num_sequences, length, max_tokens)

    model.register_forward_pre_hook(refuse_long_step, with_kwargs=True)
    if model.can_generate():
        _limit_generate(model, max_tokens)


def _limit_generate(model: Any, max_tokens: int) -> None:
    generate = model.generate

    @functools.wraps(generate)
    def limited(
        inputs: Any = None, generation_config: Any = None, *rest: Any, **options: Any
    ) -> Any:
        num_sequences, length = _longest_text(inputs, generation_config, options)
        if num_sequences * length > max_tokens:
            raise _too_long(num_sequences, length, max_tokens)
        return generate(inputs, generation_config, *rest, **options)

    model.generate = limited


def _longest_text(inputs: Any, config: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of each that ``generate`` was asked for; no tokens where not said."""

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


def _length_with(cache: Any, num_new: int, static: type) -> int:
    """Tokens of a sequence that a static cache has places for, or any other will hold."""
    if cache is None:
        return num_new
    if isinstance(cache, static):
        return max(num_new, *(getattr(layer, "max_cache_len", 0) for layer in cache.layers))
    return num_new + int(cache.get_seq_length())


def _too_long(num_sequences: int, length: int, max_tokens: int) -> CapacityError:
    asked = f"{length} tokens" if num_sequences == 1 else f"{num_sequences} sequences of {length}"
    return CapacityError(
        f"{asked} need room for {num_sequences * length} tokens, but memory is set aside for "
        f"{max_tokens}; load the model with max_tokens={num_sequences * length}, or ask for fewer"
    )
