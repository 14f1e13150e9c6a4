"""Text generation from one prompt, with streaming and timing.

``transformers`` does sampling, stopping and the KV cache, for any of its language models.
"""

import contextlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from moe_runtime.errors import CheckpointError, MoERuntimeWarning, blamed_on
from moe_runtime.inference.budget import known_positions
from moe_runtime.inference.incremental_text import IncrementalText
from moe_runtime.inference.pictures import Pictures, for_model

COLDEST = 1e-20
"""Lowest temperature above 0: fp32 logits below 1e18 stay finite when divided by it."""

NOT_FINITE = (
    "the model's logits are not finite, so no token can be chosen: `moe-runtime inspect MODEL "
    "--verify` names weights that are NaN or infinite; if none is, and it computes in float16, "
    "take --dtype bfloat16"
)
_MOST_SAID = 300
_PART_ENDS = frozenset({"<|return|>", "<|flush|>"})
"""In a vocabulary with one of these, `<|end|>` ends a part of an answer, not the answer."""
FinishReason = Literal["stop", "length", "interrupted"]
_WITHOUT_BEAMS = {"num_beams": 1, "num_return_sequences": 1, "penalty_alpha": 0, "dola_layers": 0}
"""Settings of a checkpoint that every command ignores, with their neutral values."""
_OF_TRANSFORMERS = {
    **{"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": 0, "guidance_scale": 1},
    **{"no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "min_length": 0},
    **{"encoder_repetition_penalty": 1, "min_new_tokens": 0, "sequence_bias": 0},
    **{"bad_words_ids": 0, "suppress_tokens": 0, "begin_suppress_tokens": 0},
    **{"forced_bos_token_id": None, "forced_eos_token_id": None, "watermarking_config": None},
    "exponential_decay_length_penalty": None,
}
"""Settings that `generate_text` uses and the engine ignores, with their neutral values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """Generated text and its timing.

    Attributes:
        text: text of the new tokens, as a continuation of the prompt, without special tokens.
        token_ids: new tokens, the end-of-text token included.
        prompt_tokens: special tokens included.
        ttft_s: seconds from the call to the first new token; None without one.
        decode_tokens_per_s: of the tokens after the first; None with fewer than two tokens.
        finish_reason: ``"stop"`` at an end-of-text token or one of the checkpoint's
            ``stop_strings``, ``"length"`` at ``max_new_tokens``, ``"interrupted"`` by the user.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    new_tokens: int
    ttft_s: float | None
    decode_tokens_per_s: float | None
    finish_reason: FinishReason


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during generation; ``result`` has the text so far."""

    def __init__(self, result: GenerationResult) -> None:
        super().__init__("generation was interrupted")
        self.result = result


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    chat: bool = False,
    pictures: Pictures | None = None,
    on_text: Callable[[str], None] | None = None,
) -> GenerationResult:
    """Continues a prompt.

    Args:
        model: a ``transformers`` model with ``generate``.
        prompt: the text to continue, or the user's message when ``chat`` is set.
        temperature: 0 takes the most likely token; higher values are more random.
        top_p: sample from the most likely tokens with this total probability.
        top_k: sample from this many of the most likely tokens; 0 for all.
        min_p: sample from tokens with at least this share of the highest probability.
        seed: makes sampling repeatable; the global random state does not change.
        chat: applies the tokenizer's chat template to the prompt.
        pictures: placed before the text of the message; needs ``chat``.
        on_text: called with each piece of final text.

    Raises:
        ValueError: an option is out of range, the prompt has no tokens, or prompt and new tokens
            exceed the model's positions.
        CheckpointError: the tokenizer, its template or the generation settings fail, or the model's
            logits are not finite.
        GenerationInterrupted: Ctrl-C; has the text so far.
    """
    check_options(max_new_tokens, temperature, top_p, seed)
    started = time.perf_counter()
    inputs = encode_prompt(tokenizer, prompt, chat=chat, pictures=pictures)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    check_length(model.config, num_prompt_tokens, max_new_tokens)
    check_vocabulary(model.config, inputs["input_ids"])
    before = None if chat else inputs["input_ids"][0].tolist()
    stream = _TimedStreamer(tokenizer, on_text, before)

    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        # top_k = 0 disables the default filter of transformers
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
        options["min_p"] = min_p or None
    if ends := end_token_ids(model, tokenizer):
        options["eos_token_id"] = ends
    try:
        with _seeded(seed), _before_first_pass(model):
            model.generate(
                **for_model(model, inputs),
                max_new_tokens=max_new_tokens,
                num_beams=1,
                streamer=stream,
                tokenizer=tokenizer,
                logits_processor=LogitsProcessorList([FiniteLogits()]),
                **options,
            )
    except KeyboardInterrupt:
        stream.end()
        result = stream.result(num_prompt_tokens, started, "interrupted")
        raise GenerationInterrupted(result) from None
    ids = stream.token_ids
    is_cut = len(ids) < max_new_tokens and model.generation_config.stop_strings is not None
    stopped = is_cut or (bool(ids) and ids[-1] in ends)
    return stream.result(num_prompt_tokens, started, "stop" if stopped else "length")


class FiniteLogits(LogitsProcessor):
    """Raises CheckpointError: logits are not finite."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if not scores.max().isfinite():  # the maximum of values with a NaN is NaN
            raise CheckpointError(NOT_FINITE)
        return scores


def check_options(max_new_tokens: int, temperature: float, top_p: float, seed: int | None) -> None:
    """Checks options of ``generate_text`` before a model is loaded. Raises ValueError: an option is
    out of range."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not (temperature == 0 or COLDEST <= temperature < math.inf):
        raise ValueError(
            f"temperature must be 0 (greedy) or at least {COLDEST:g}, got {temperature}"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed must lie in [0, 2**63), got {seed}")


def sampling_for(
    settings: Any, *, temperature: float | None = None, top_p: float | None = None
) -> dict[str, Any]:
    """``temperature``, ``top_p``, ``top_k`` and ``min_p``: as given, else from the checkpoint's
    ``GenerationConfig`` (``settings``), else greedy."""
    values: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    if getattr(settings, "do_sample", None):
        values["temperature"] = 1.0
        found = {name: getattr(settings, name, None) for name in values}
        values |= {name: value for name, value in found.items() if value is not None}
    asked = {"temperature": temperature, "top_p": top_p}
    return values | {name: value for name, value in asked.items() if value is not None}


def warn_of_unused(settings: Any, *, is_engine: bool) -> None:
    """Warns of generation settings of a checkpoint that have no effect.

    ``temperature``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty``, and tokens and strings
    that end a text always have an effect. The engine (``is_engine``) ignores some others.
    """
    neutral = _WITHOUT_BEAMS | (_OF_TRANSFORMERS if is_engine else {})
    found = {name: getattr(settings, name, None) for name in neutral}
    unused = [
        f"{name} {value}" for name, value in found.items() if value and value != neutral[name]
    ]
    if unused:
        said = ", ".join(unused)[:_MOST_SAID]
        message = f"generation_config.json asks for {said}, which has no effect here"
        warnings.warn(message, MoERuntimeWarning, stacklevel=2)


def sampling_words(values: Mapping[str, Any]) -> str:
    """The values of `sampling_for` as text."""
    if not values["temperature"]:
        return "greedy: always the most likely token"
    without_effect = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    shown = [
        f"{name} {value:g}" for name, value in values.items() if value != without_effect.get(name)
    ]
    return ", ".join(shown)


def encode_prompt(
    tokenizer: Any, prompt: str, *, chat: bool = False, pictures: Pictures | None = None
) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of a prompt, both ``[1, T]`` int64, and inputs of
    pictures. Raises CheckpointError: the tokenizer or its chat template fails. Raises ValueError:
    the prompt has no tokens or no valid text, or there is no chat template."""
    prompt.encode()  # half a surrogate pair is not valid text
    if chat:
        content: Any = prompt
        if pictures is not None:
            marks = [{"type": "image"} for _ in pictures.pictures]
            content = [*marks, {"type": "text", "text": prompt}]
        return encode_messages(tokenizer, [{"role": "user", "content": content}], pictures)
    with blamed_on("this model's tokenizer cannot encode the prompt"):
        encoded = tokenizer(prompt, return_tensors="pt")
    return _tensors(encoded)


def encode_messages(
    tokenizer: Any, messages: list[dict[str, Any]], pictures: Pictures | None = None
) -> dict[str, torch.Tensor]:
    """As ``encode_prompt`` for a conversation, ending where the model answers. Raises
    CheckpointError: the chat template fails. Raises ValueError: there is none, or no tokens."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "this model's tokenizer has no chat template; give a plain prompt, as to moe-runtime "
            "run without --chat"
        )

    def takes_later() -> bool:
        with contextlib.suppress(CheckpointError), blamed_on("the chat template"):
            return takes_later_systems(partial(tokenizer.apply_chat_template, tokenize=False))
        return False

    messages = in_known_roles(messages, template_source(tokenizer), takes_later)
    with blamed_on("this model's chat template cannot be used; give a plain prompt"):
        if pictures is None:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return _tensors(encoded)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    text = pictures.write(text)
    with blamed_on("this model's tokenizer cannot encode the prompt"):
        encoded = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return _tensors(encoded) | pictures.inputs(encoded["input_ids"][0].tolist())


def template_source(tokenizer: Any) -> str:
    """The source of a tokenizer's chat template, or of all that it has."""
    found = tokenizer.chat_template
    return found if isinstance(found, str) else "\n".join(found.values())


def template_names(source: str, variable: str) -> bool:
    """Whether a chat template has this word."""
    return re.search(rf"\b{re.escape(variable)}\b", source) is not None


def in_known_roles(
    messages: Sequence[dict[str, Any]], source: str, takes_later: Callable[[], bool]
) -> list[dict[str, Any]]:
    """A conversation in the roles that a chat template knows.

    `developer` becomes `system` in templates without it. Where `takes_later`, of
    `takes_later_systems`, is false, the first system messages are merged and later ones are given
    to the user.
    """
    plain = [
        {**one, "role": "system"}
        if one["role"] == "developer" and not template_names(source, "developer")
        else one
        for one in messages
    ]
    merged = _with_systems_first(plain)
    return plain if merged == plain or takes_later() else merged


def takes_later_systems(write: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether a template shows system messages after the first message. Some refuse or omit them;
    `write` renders a conversation."""
    turns = (("system", "first"), ("user", "Hi"), ("system", "later"), ("user", "Hi"))
    return "later" in write([{"role": role, "content": text} for role, text in turns])


def _with_systems_first(conversation: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merges the first system messages; later ones become messages of the user."""
    found: list[dict[str, Any]] = []
    for message in conversation:
        if message["role"] not in ("system", "developer"):
            found.append(message)
            continue
        last = found[-1] if found else None
        is_first = last is None or (len(found) == 1 and last["role"] in ("system", "developer"))
        if last is not None and (is_first or last["role"] == "user"):
            before, added = last["content"], message["content"]
            is_text = isinstance(before, str)
            part = {"type": "text", "text": added}
            joined = f"{before}\n\n{added}" if is_text else [*before, part]
            found[-1] = {**last, "content": joined}
        else:
            found.append(message if is_first else {**message, "role": "user"})
    return found


def _tensors(encoded: Any) -> dict[str, torch.Tensor]:
    if encoded["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty, expected at least one token of text")
    input_ids = encoded["input_ids"].long()
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


class _TimedStreamer(BaseStreamer):
    """Passes on final text, and keeps ids and times of the new tokens."""

    def __init__(
        self,
        tokenizer: Any,
        on_text: Callable[[str], None] | None,
        prompt_ids: Sequence[int] | None,
    ) -> None:
        self.token_ids: list[int] = []
        self._tokenizer = tokenizer
        self._on_text = on_text
        self._text = IncrementalText(self._decode, frozenset(tokenizer.all_special_ids))
        if prompt_ids is not None:
            self._text.follow(prompt_ids, is_whole=True)
        self._parts: list[str] = []
        self._is_prompt = True
        self._first_s = 0.0
        self._last_s = 0.0

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self._last_s = time.perf_counter()
        if not self.token_ids:
            self._first_s = self._last_s
        for token_id in value.flatten().tolist():
            self.token_ids.append(token_id)
            self._show(self._text.add(token_id))

    def end(self) -> None:
        self._show(self._text.end())

    def _show(self, piece: str) -> None:
        self._parts.append(piece)
        if piece and self._on_text is not None:
            self._on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def result(
        self, num_prompt_tokens: int, started_s: float, finish_reason: FinishReason
    ) -> GenerationResult:
        num_new = len(self.token_ids)
        decode_s = self._last_s - self._first_s
        return GenerationResult(
            text="".join(self._parts),
            token_ids=tuple(self.token_ids),
            prompt_tokens=num_prompt_tokens,
            new_tokens=num_new,
            ttft_s=self._first_s - started_s if num_new else None,
            decode_tokens_per_s=(num_new - 1) / decode_s if num_new > 1 and decode_s > 0 else None,
            finish_reason=finish_reason,
        )


def check_length(config: Any, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError: prompt and new tokens exceed the model's positions."""
    limit = known_positions(config)
    if limit is not None and num_prompt_tokens + max_new_tokens > limit:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} token{'s'[num_prompt_tokens == 1 :]} and "
            f"{max_new_tokens} new ones are asked for, but the model knows {limit} positions; "
            "shorten the prompt or ask for fewer"
        )


def check_room(config: Any, option: str, num_tokens: int) -> None:
    """Raises ValueError: an option of ``num_tokens`` exceeds the model's positions."""
    limit = known_positions(config)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"{option} {num_tokens}: a text cannot be longer than the {limit} positions that the "
            "model knows; give at most as many"
        )


def check_vocabulary(config: Any, input_ids: torch.Tensor) -> None:
    """Raises CheckpointError: a token is outside the vocabulary, so the tokenizer is of another
    model."""
    vocab_size, highest = config.get_text_config().vocab_size, int(input_ids.max())
    if highest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer gives token {highest}, but the model has a vocabulary of {vocab_size}; "
            "the tokenizer's files are another model's"
        )


def end_token_ids(
    model: Any, tokenizer: Any = None, render: Callable[[list[dict[str, str]]], str] | None = None
) -> list[int]:
    """The tokens that end a text: of the settings, the tokenizer and the chat template. ``render``
    applies the chat template; by default the tokenizer does."""
    end = model.generation_config.eos_token_id
    ends = [] if end is None else [end] if isinstance(end, int) else list(end)
    if tokenizer is not None:
        others = (tokenizer.eos_token_id, _end_of_answer(tokenizer, render))
        ends += [other for other in others if other is not None and other not in ends]
    return ends


def _end_of_answer(
    tokenizer: Any, render: Callable[[list[dict[str, str]]], str] | None
) -> int | None:
    """The special token that a chat template puts after an answer, or None."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    said = [{"role": role, "content": f"{role} text"} for role in ("user", "assistant", "user")]
    for messages in (said[:2], said):
        with contextlib.suppress(CheckpointError), blamed_on("the chat template"):
            if render is None:
                shown = tokenizer.apply_chat_template(messages, tokenize=False)
            else:
                shown = render(messages)
            behind = shown.partition(said[1]["content"])[2].lstrip()
            ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
            if ids and ids[0] in tokenizer.added_tokens_decoder:
                found = tokenizer.added_tokens_decoder[ids[0]].content
                # answers of gpt-oss and Solar have several parts, which end with it
                is_of_part = found == "<|end|>" and not _PART_ENDS.isdisjoint(
                    tokenizer.added_tokens_encoder
                )
                return None if is_of_part or ids[0] == tokenizer.bos_token_id else ids[0]
    return None


def stop_strings_of(settings: Any) -> tuple[str, ...]:
    """The ``stop_strings`` of a checkpoint's generation settings. Raises CheckpointError: they are
    not strings."""
    found = getattr(settings, "stop_strings", None) or ()
    stops = (found,) if isinstance(found, str) else found
    if not isinstance(stops, list | tuple) or not all(isinstance(s, str) and s for s in stops):
        raise CheckpointError(
            f"generation_config.json: expected stop_strings to be texts, found {found!r:.80}"
        )
    return tuple(stops)


@contextlib.contextmanager
def _before_first_pass(model: Any) -> Iterator[None]:
    """Turns errors before the first pass into errors of the checkpoint's settings."""
    blame = contextlib.ExitStack()
    blame.enter_context(blamed_on("the checkpoint's settings of generation cannot be used"))

    def begin(module: Any, inputs: Any) -> None:
        blame.pop_all()

    hook = model.register_forward_pre_hook(begin)
    with blame:
        try:
            yield
        finally:
            hook.remove()


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
