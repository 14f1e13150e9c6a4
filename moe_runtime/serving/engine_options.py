"""How an engine divides its work, and the memory that it may fill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_runtime.inference.budget import activation_bytes_per_token
from moe_runtime.kernels.expert_mlp.decode import MAX_TOKENS
from moe_runtime.serving.kv_account import PIECE
from moe_runtime.serving.requests import GenerationRequest, RequestTooLongError


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """How an engine divides its work.

    Attributes:
        most_waiting: requests that may wait; more are refused.
        most_running: requests that are answered at a time.
        prompt_tokens: most tokens of prompts in a step in which others decode.
        max_slowdown: times as long that a step may take with prompts as without, as far as
            `StepSizes` can hold it; with infinity steps grow to ``prompt_tokens``.
        idle_prompt_tokens: most tokens of prompts in a step in which no sequence decodes.
        reuses_prefixes: keeps keys and values of prompts and answers in free memory.
        exact: gives a request the bits that it would get alone: prompts are read one at a time, in
            pieces of ``prompt_tokens``, and only whole pieces are reused.
        decode_rows: sequences that decode in recorded steps on a GPU, at most, up to 16, in half of
            the memory for tokens. With ``exact`` there are rows for all running sequences, or none.

    Raises:
        ValueError: one is too small; the message begins with its name.
    """

    most_waiting: int = 256
    most_running: int = 32
    prompt_tokens: int = 256
    max_slowdown: float = 3.0
    idle_prompt_tokens: int = 2048
    reuses_prefixes: bool = True
    exact: bool = False
    decode_rows: int = 4

    def __post_init__(self) -> None:
        for name in ("most_waiting", "most_running", "prompt_tokens", "idle_prompt_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.decode_rows <= MAX_TOKENS:
            raise ValueError(f"decode_rows must be 0 to {MAX_TOKENS}, got {self.decode_rows}")
        if not self.max_slowdown > 1:
            raise ValueError(f"max_slowdown must be above 1, got {self.max_slowdown}")


def capacity_of(model: Any, max_tokens: int | None) -> int:
    """Tokens that all caches together may have."""
    reserved = getattr(model, "_max_tokens", None)
    found = reserved if max_tokens is None else max_tokens
    if found is None:
        raise ValueError("max_tokens must say how many tokens there is memory for")
    if reserved is not None and found > reserved:
        raise ValueError(
            f"max_tokens is {found}, but the model was loaded with memory set aside for {reserved}"
        )
    if found < PIECE:
        raise ValueError(f"max_tokens must be at least {PIECE}, got {found}")
    return int(found)


def check_request(
    request: GenerationRequest, *, most_tokens: int, most_room: int, vocab_size: int
) -> None:
    """Refuses a request that is too long or has unknown tokens."""
    num_prompt, num_new = len(request.prompt_ids), request.max_new_tokens
    # the engine also computes what follows a prompt: one token more, which is not shown
    if num_prompt + num_new > most_tokens or num_prompt >= most_room:
        raise RequestTooLongError(
            f"the prompt has {num_prompt} tokens and needs room for {max(num_new, 1)} more, "
            f"but a request may have {most_tokens} in all",
            num_tokens=num_prompt + num_new,
            most_tokens=most_tokens,
        )
    for token in (*request.prompt_ids, *request.sampling.logit_bias, *request.stop_ids):
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is none of the model's vocabulary of {vocab_size}")


def rows_of_logits(config: Any, dtype: torch.dtype, max_tokens: int, top_k: int) -> int:
    """Rows of fp32 logits that fit, with activations, into those set aside; at least four."""
    activations = activation_bytes_per_token(config, dtype, top_k)
    logits = 4 * config.get_text_config().vocab_size
    return max(4, max_tokens * activations // (activations + logits))
