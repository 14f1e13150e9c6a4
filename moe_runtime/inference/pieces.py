"""A long call of a model becomes several passes, so that activations take the memory of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.errors import CapacityError
from moe_runtime.inference.kv_cache import give_room
from moe_runtime.inference.sequence_cache import can_share_a_pass
from moe_runtime.inference.steps import too_long

PASS_TOKENS = 2048
"""Most tokens of a pass: enough rows for every expert, few enough for their activations."""
_WHOLE_FAMILIES = frozenset(
    ("diffusion_gemma", "jamba", "minimax", "qwen3_omni_moe", "qwen3_omni_moe_thinker")
)
"""Families whose caches, states or positions do not go on after a part of a prompt."""
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Angles that depend on how long the whole prompt is."""
ANSWERS_MORE = ("output_attentions", "output_hidden_states", "output_router_logits")
"""Settings with which a model answers more than logits."""
_BY_TOKEN = ("input_ids", "inputs_embeds")
_AS_THEY_ARE = ("return_dict", "tokenizer", "assistant_tokenizer")
_OF_PICTURES = ("pixel_values", "image_", "mm_encoder_outputs")
_PICTURE_MARKS = [f"{kind}_token_{end}" for kind in ("image", "video") for end in ("id", "index")]
_KINDS = ("mm_token_type_ids", "token_type_ids")


def most_in_pass(model: PreTrainedModel, device: torch.device) -> int | None:
    """Tokens of a pass of a model on a ``device``; None where any prompt is one pass."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    is_whole = (
        device.type != "cpu"
        or not model.can_generate()
        or config.model_type in _WHOLE_FAMILIES
        or bool(kinds & _ROPE_BY_LENGTH)
        or not can_share_a_pass(config)
    )
    return None if is_whole else PASS_TOKENS


class Pieces:
    """Comes between the calls of a model and its passes.

    A piece's tokens attend to those before it through the cache, as those of a conversation do. A
    picture stays whole, and with it what comes before it. A call is one pass if gradients, a loss
    or hidden states are asked for, which are known to take more than was set aside. Any other that
    cannot be cut is refused where it is longer than that.
    """

    def __init__(self, model: Any, most_tokens: int, max_tokens: int) -> None:
        """A pass has ``most_tokens`` at most, all cached and new tokens are ``max_tokens``."""
        self.most_tokens, self._max_tokens = most_tokens, max_tokens
        self._names = [*inspect.signature(model.forward).parameters]
        self._cache_name = cache_name(model.forward)

    def call(
        self, model: Any, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """The model's answer; ``run`` computes a pass. Raises CapacityError: it needs room for more
        tokens than memory is set aside for, or cannot be cut."""
        given = {**kwargs, **dict(zip(self._names, args, strict=False))}
        given = {name: value for name, value in given.items() if value is not None}
        if not given.get("mm_encoder_outputs", True):  # of a text without pictures
            del given["mm_encoder_outputs"]
        tokens = next((given[name] for name in _BY_TOKEN if name in given), None)
        if tokens is None or tokens.shape[0] * tokens.shape[1] <= self.most_tokens:
            return run(*args, **kwargs)
        first, cache = self._first_end(model, given), given.pop(self._cache_name, None)
        is_cut = isinstance(first, int)
        num_cached = int(cache.get_seq_length()) if is_cut and cache is not None else 0
        if isinstance(first, int) and not _has_positions(model, given, num_cached):
            first = "pictures whose places are unknown"
        if not isinstance(first, int):
            if first:
                raise CapacityError(
                    f"more than {self.most_tokens} new tokens with {first} would be one pass, for "
                    "which no memory is set aside: give fewer at a time"
                )
            return run(*args, **kwargs)
        num_sequences, num_new = tokens.shape[:2]
        most = max(self.most_tokens // num_sequences, 1)
        ends = [*range(max(most, first), num_new, most), num_new]
        if num_sequences * (num_cached + num_new) > self._max_tokens:
            raise too_long(num_sequences, num_cached + num_new, self._max_tokens)
        text = model.config.get_text_config(decoder=True)
        is_cached = given.pop("use_cache", getattr(text, "use_cache", True))
        keep = given.pop("logits_to_keep", 0)
        keep = keep if keep > 0 else max(num_new + keep, 0)  # a negative one leaves out the first
        if cache is None:
            cache = DynamicCache(config=model.config)
            give_room(cache, model)
        given |= {"use_cache": True, self._cache_name: cache}
        out, kept = None, []
        for begin, end in pairwise((0, *ends)):
            part = dict(self._part(given, begin, end, num_cached))
            num_kept = min(end - begin, keep - num_new + end)
            if "logits_to_keep" in self._names:
                part["logits_to_keep"] = max(num_kept, 1)
            out = run(**part)
            if num_kept > 0:
                kept.append(out.logits[:, -num_kept:])
        assert out is not None
        left_out = () if is_cached else (self._cache_name,)
        answer = {name: value for name, value in out.items() if name not in left_out}
        kept = kept or [out.logits[:, :0]]
        return type(out)(**(answer | {"logits": kept[0] if len(kept) == 1 else torch.cat(kept, 1)}))

    def _first_end(self, model: Any, given: Mapping[str, Any]) -> int | str:
        """Tokens up to the end of the last picture; or why the call is not cut, empty where it is
        known to take more than was set aside."""
        cache, mask = given.get(self._cache_name), given.get("attention_mask")
        config = model.config.get_text_config(decoder=True)
        more = [name for name in ANSWERS_MORE if given.get(name, getattr(config, name, False))]
        has_gradients = torch.is_grad_enabled() and any(
            isinstance(one, torch.Tensor) and one.requires_grad
            for one in chain(given.values(), model.parameters())
        )
        is_served = hasattr(cache, "number_requests")  # whose owner cuts
        if is_served or has_gradients or "labels" in given or "output_hidden_states" in more:
            return ""
        if more:
            return more[0]
        if cache is not None and type(cache) not in (DynamicCache, StaticCache):
            return f"a {type(cache).__name__}"
        if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            return "an attention mask for each pair of tokens"
        if not isinstance(given.get("logits_to_keep", 0), int):
            return "logits_to_keep as a tensor"
        if given.get("return_dict") is False:
            return "return_dict=False"
        known = {*_BY_TOKEN, *_AS_THEY_ARE, *ANSWERS_MORE, self._cache_name, "attention_mask"}
        known |= {"use_cache", "logits_to_keep", "position_ids", "cache_position"}
        rest = [name for name in given if name not in known and not name.endswith("type_ids")]
        if unknown := [name for name in rest if not name.startswith(_OF_PICTURES)]:
            return unknown[0]
        if not rest:
            return 0
        kinds = next((given[name] for name in _KINDS if name in given), None)
        if kinds is None:
            marks = [getattr(model.config, name, None) for name in _PICTURE_MARKS]
            marks = [one for one in marks if one is not None]
            if not marks or "input_ids" not in given:
                return "pictures whose places are unknown"
            kinds = torch.isin(given["input_ids"], torch.tensor(marks))
        places = kinds.any(0).nonzero()
        return int(places[-1]) + 1 if len(places) else 0

    def _part(
        self, given: Mapping[str, Any], begin: int, end: int, num_cached: int
    ) -> Iterator[tuple[str, Any]]:
        """The arguments of the pass of some new tokens."""
        for name, value in given.items():
            if name in _BY_TOKEN:
                yield name, value[:, begin:end]
            elif name == "attention_mask":
                yield name, value[:, : num_cached + end]
            elif name in ("position_ids", "cache_position") or name.endswith("type_ids"):
                if not (begin and name in _KINDS):
                    yield name, value[..., begin:end]
            elif not (begin and name.startswith(_OF_PICTURES)):
                yield name, value


def _has_positions(model: Any, given: dict[str, Any], num_cached: int) -> bool:
    """Whether a piece can be told where its tokens are, where the model counts pictures otherwise
    than tokens. Gives it the positions of all, which it would find from the whole prompt."""
    owner: Any = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
    if owner is None or "position_ids" in given:
        return True
    if num_cached:  # the model counts on from the cache, as it does for the whole call
        return owner.rope_deltas is not None or not any(n.startswith(_OF_PICTURES) for n in given)
    if "input_ids" not in given:
        return False
    ids, names = given["input_ids"], ("image_grid_thw", "attention_mask")
    told = [given[name] for name in _KINDS if name in given and "image_grid_thw" in given]
    kinds = told[0] if told else torch.zeros_like(ids)
    known = {name: given[name] for name in names if name in given}
    found = owner.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, **known)
    given["position_ids"], owner.rope_deltas = found
    return True
