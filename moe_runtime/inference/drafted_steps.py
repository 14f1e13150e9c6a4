"""Speculative steps: a step of one token also computes drafted tokens, to answer later steps.

A pass has one row for the given token and one for each drafted token. The caller gets the first row
and a cache with one more token. If the next call has the drafted token, its row is the answer, and
nothing is computed. Tokens are chosen from the same bits and random numbers as without drafts.

Shape suffixes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_runtime.checkpoints.transformers_private import attention_names, cache_name
from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeError, MoERuntimeWarning, UnsupportedModelError
from moe_runtime.inference.cpu.attention import EAGER_ATTENTION
from moe_runtime.inference.drafts import Draft, DraftControl, Drafter, Lookups, Offer, Source
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.hugging_face.loaded_model import RuntimeHandle, give_up_drafts
from moe_runtime.inference.known_classes import keeps_states
from moe_runtime.inference.kv_cache import can_give_back, give_room
from moe_runtime.inference.rows_alone import (
    RowsAlone,
    can_join,
    most_exact_rows,
    rows_with_own_bits,
)
from moe_runtime.inference.sequence_cache import (
    BatchCache,
    bring_back,
    have_same_states,
    have_same_tokens,
    is_as_left,
    new_cache,
    own_states,
    take_out,
)
from moe_runtime.inference.steps import ANSWERS_MORE

MOST_ROWS = 16
"""Most rows of a pass; experts on a CPU compute as many in one call."""
MOST_STATES = 8
"""Most rows of a pass in models with states: each row keeps its own until the drafts are judged."""
DRAFTED_ELSEWHERE = "is_drafted_elsewhere"
"""Attribute of a cache whose owner, such as the server's engine, drafts itself."""
_TRIED = (2, 3, 8)
_TAKEN = ("input_ids", "attention_mask", "position_ids", "cache_position")
_KEPT = ("use_cache", "logits_to_keep", "return_dict")
_UNUSED = ("tokenizer", "assistant_tokenizer")
"""Arguments that ``generate`` passes to models without effect."""


@dataclass
class _Text:
    """One sequence, identified by its cache.

    Attributes:
        num_tokens: tokens in the cache.
        draft: the draft of the last pass.
        expected: tokens of the draft that the caller has not reached.
        logits_RV: logits after each of them.
        make: makes an output from logits.
        passed_by: tokens of steps without drafting, which the drafter has not seen yet.
        places: positions of the pass's first token, ``[1, 1]`` or of several kinds ``[P, 1, 1]``;
            None if the caller gave none.
        is_inference: the pass ran in torch's inference mode.
    """

    drafter: Drafter
    num_tokens: int = 0
    draft: Draft = field(default_factory=lambda: Draft([], 0))
    expected: list[int] = field(default_factory=list)
    passed_by: list[int] = field(default_factory=list)
    logits_RV: list[torch.Tensor] = field(default_factory=list)
    make: Callable[[torch.Tensor], Any] | None = None
    is_inference: bool = False
    places: torch.Tensor | None = None


class DraftedSteps:
    """Adds drafts to the passes of a model on the CPU.

    Attributes:
        control: chooses the number of drafted tokens, and counts.
        source: makes the drafters of texts.
        turn: the lock of the model's passes.
        has_ended: a draft failed, and there are no more.
        handle: of the model, if drafts take memory that experts may lack.
        adds_mask: as for `BatchCache`.
    """

    def __init__(
        self,
        model: Any,
        source: Source,
        most_tokens: int,
        *,
        control: DraftControl | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Tries how many rows of a pass have the bits of single steps.

        Raises UnsupportedModelError: no two rows have.
        """
        config = model.config
        self._text_config = config.get_text_config(decoder=True)
        self._is_of_text = config.get_text_config() is config
        self._keeps_states = keeps_states(config)
        self._names = [*inspect.signature(model.forward).parameters]
        self._cache_name = cache_name(model.forward)
        self.adds_mask = attention_names(model) == {EAGER_ATTENTION}
        self.source: Source = source
        self.clock = clock
        self._most_tokens = most_tokens
        self._texts: weakref.WeakKeyDictionary[Any, _Text] = weakref.WeakKeyDictionary()
        self.turn, self.has_ended = model._steps.turn, False
        self.handle: RuntimeHandle | None = None
        most_rows = exact_rows(model, MOST_ROWS)
        if most_rows < 2:
            raise without_effect(model)
        self.control = control or DraftControl(most_rows)

    def call(self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The model's output; ``run`` computes a pass."""
        if self.has_ended:
            return run(*args, **kwargs)
        with self.turn:
            given = {**kwargs, **dict(zip(self._names, args, strict=False))}
            cache: Any = given.get(self._cache_name)
            if self._rests(cache, given.get("input_ids")):
                return run(*args, **kwargs)
            token = self._single_token(given)
            if token is None:
                return self._other(run, args, kwargs, given)
            text = self._texts[cache]
            text.drafter.extend([token])
            text.num_tokens += 1
            is_right = text.expected[:1] == [token]
            if (
                is_right
                and can_give_back(cache)
                and _is_kept(text, cache, given.get("position_ids"))
            ):
                return self._answer_kept(text, cache)
            if text.expected and not is_right:
                self.control.judged(text.draft.grade, 0, has_failed=True)
            self._forget(text)
            if self._keeps_states:
                own_states(cache)
            most = min(self.control.most_rows, self._most_tokens - text.num_tokens + 1) - 1
            (offer,) = offers = [text.drafter.offer(max(most, 0))]  # the cache has no more room
            tokens, drafting_s = list[int](), 0.0
            if offer.most and can_give_back(cache):
                (tokens,), drafting_s = self.propose([text.drafter], offers)
            if tokens:
                draft = Draft(tokens, offer.grade)
                return self._verify(run, given, text, draft, token, drafting_s)
            with self.timed(1, 1):
                out = run(*args, **kwargs)
                self.source.passed([text.drafter], [text.num_tokens - 1], [1])
            return out

    def _rests(self, cache: Any, ids: Any) -> bool:
        """Whether a step does no drafting. Its token is kept for the next step that does."""
        text = None if cache is None else self._texts.get(cache)
        if text is None or text.expected or not isinstance(self.source, Lookups):
            return False
        if ids is not None and ids.shape == (1, 1) and self.control.rests():
            text.passed_by.append(int(ids))
            return True
        text.drafter.extend(text.passed_by)
        text.num_tokens += len(text.passed_by)
        text.passed_by = []
        return False

    @contextlib.contextmanager
    def timed(self, num_base: int, num_rows: int, drafting_s: float = 0.0) -> Iterator[None]:
        """Measures a pass for `DraftControl.measured`. Afterwards closes drafts that cost too
        much."""
        began, handle = self.clock(), self.handle
        before = None if handle is None else handle.waits()
        yield
        seconds, spared_s = self.clock() - began, 0.0
        if handle is not None and before is not None:
            pairs = zip(before, handle.waits(), strict=True)
            waited_s, misses, spared = (max(last - first, 0) for first, last in pairs)
            spared_s = waited_s * spared / misses if misses else 0.0
        self.control.measured(num_base, num_rows, seconds, drafting_s, spared_s)
        if self.control.is_too_dear and handle is not None and handle.draft_model is not None:
            draft_bytes, self.source = handle.facts.draft_bytes, Lookups()
            give_up_drafts(handle)
            self.control.begin_anew()
            message = (
                "the draft is given up: answers come sooner where experts have its "
                f"{format_bytes(draft_bytes)}; lookup, which takes none, goes on; name it as "
                "draft, or give more memory"
            )
            warnings.warn(message, MoERuntimeWarning, stacklevel=2)

    def _single_token(self, given: Mapping[str, Any]) -> int | None:
        cache: Any = given.get(self._cache_name)
        ids = given.get("input_ids")
        if cache is None or ids is None:
            return None
        text = self._texts.get(cache)
        if text is None or ids.shape != (1, 1) or torch.is_grad_enabled():
            return None
        if cache.get_seq_length() != text.num_tokens:
            return None
        others = given.keys() - {self._cache_name, *_TAKEN, *_KEPT, *_UNUSED}
        if any(given[name] is not None and given[name] is not False for name in others):
            return None
        if not isinstance(given.get("logits_to_keep", 0), int) or self._answers_more():
            return None
        places, mask = given.get("position_ids"), given.get("attention_mask")
        if places is None and not self._is_of_text:
            return None  # earlier images may shift the position
        if places is not None and places.shape[-2:] != (1, 1):
            return None
        if mask is not None and (mask.shape != (1, text.num_tokens + 1) or not bool(mask.all())):
            return None
        return int(ids)

    def _answers_more(self) -> bool:
        return any(getattr(self._text_config, name, False) for name in ANSWERS_MORE)

    def _other(
        self,
        run: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        given: Mapping[str, Any],
    ) -> Any:
        """Runs any other pass. A text is followed from its beginning, if it has a cache."""
        before: Any = given.get(self._cache_name)
        num_before = before.get_seq_length() if hasattr(before, "get_seq_length") else 0
        text = None if before is None else self._texts.pop(before, None)
        began = self.clock()
        out = run(*args, **kwargs)
        self.control.passed(self.clock() - began)
        cache: Any = getattr(out, self._cache_name, None)
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        give_room(cache)  # the model may have made it in this pass
        if text is None:
            text = _Text(self.source.new())
        self._forget(text)
        is_whole = mask is None or (mask.ndim == 2 and bool(mask.all()))
        if ids is not None and len(ids) == 1 and is_whole and text.num_tokens == num_before:
            text.drafter.extend(ids[0].tolist())
            text.num_tokens += ids.shape[1]
            is_ours = can_give_back(cache) and not hasattr(cache, DRAFTED_ELSEWHERE)
            if is_ours and cache.get_seq_length() == text.num_tokens:
                self._texts[cache] = text
                self.source.passed([text.drafter], [num_before], [ids.shape[1]])
        return out

    def propose(
        self,
        drafters: Sequence[Drafter],
        offers: Sequence[Offer],
        has_room: Callable[[int, int], bool] = lambda index, count: True,
    ) -> tuple[list[list[int]], float]:
        """Drafts of each text for the next pass, and seconds of drafting.

        ``has_room(index, count)`` says whether a text has room for the drafted tokens.
        """
        none: list[list[int]] = [[] for _ in offers]
        counts = [0] * len(offers) if self.has_ended else self.control.choose(offers)
        counts = [
            count if count and has_room(index, count) else 0 for index, count in enumerate(counts)
        ]
        if not any(counts):
            return none, 0.0
        began = self.clock()
        chosen = [one for one, count in zip(drafters, counts, strict=True) if count]
        try:
            if self.control.may_catch_up(len(counts)) and self.source.catch_up(chosen):
                self.control.caught_up((now := self.clock()) - began)
                began = now
            return self.source.draft(drafters, counts), self.clock() - began
        except _OF_DRAFTS as error:
            self.has_ended = True
            self.control.failed()
            found = " ".join(str(error).split()) or type(error).__name__
            message = f"the model goes on without drafts, since one failed: {found}"
            warnings.warn(message, MoERuntimeWarning, stacklevel=2)
            return none, 0.0

    def _verify(
        self,
        run: Callable[..., Any],
        given: Mapping[str, Any],
        text: _Text,
        draft: Draft,
        token: int,
        drafting_s: float,
    ) -> Any:
        cache, num_rows = given[self._cache_name], 1 + len(draft.tokens)
        text.places, first = given.get("position_ids"), torch.tensor([[text.num_tokens - 1]])
        later = torch.arange(num_rows)[:, None]
        rows = BatchCache([cache], adds_mask=self.adds_mask, rows=[num_rows])
        rows.is_one_text = True
        inputs = {
            "input_ids": torch.tensor([[each] for each in (token, *draft.tokens)]),
            "position_ids": (first if text.places is None else text.places) + later,
            self._cache_name: rows,
        }
        with self.timed(1, num_rows, drafting_s):
            with RowsAlone(num_rows):
                out = run(**inputs, **{name: given[name] for name in _KEPT if name in given})
            self.source.passed([text.drafter], [text.num_tokens - 1], [num_rows])
        take_out(cache, len(draft.tokens))

        def make(logits: torch.Tensor) -> Any:
            return type(out)(**{"logits": logits, self._cache_name: cache})

        answer, *text.logits_RV = out.logits.split(1)
        text.draft, text.expected, text.make = draft, [*draft.tokens], make
        text.is_inference = torch.is_inference_mode_enabled()
        return make(answer)

    def _answer_kept(self, text: _Text, cache: Any) -> Any:
        bring_back(cache)
        del text.expected[0]
        self.control.judged(text.draft.grade, 1, has_failed=False)
        assert text.make is not None
        return text.make(text.logits_RV.pop(0))

    def _forget(self, text: _Text) -> None:
        text.draft, text.expected, text.logits_RV, text.make = Draft([], 0), [], [], None


def _is_kept(text: _Text, cache: Any, places: torch.Tensor | None) -> bool:
    """Whether the row of the next expected token is valid for this cache and position."""
    if text.is_inference != torch.is_inference_mode_enabled():
        return False
    if not is_as_left(cache):
        return False
    if places is None or text.places is None:
        return places is text.places
    return torch.equal(places, text.places + 1 + len(text.draft.tokens) - len(text.expected))


def without_effect(model: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"draft has no effect for {type(model).__name__} here: several tokens of a text do not "
        "have the bits of one at a time in a pass, or it keeps states that no token can be taken "
        "out of; leave draft out"
    )


_OF_UNKNOWN_CODE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_OF_DRAFTS = (*_OF_UNKNOWN_CODE, AssertionError, MemoryError, MoERuntimeError, OSError)


def exact_rows(model: Any, most: int) -> int:
    """Most tokens of a text that have in one pass the bits of single passes; 1 if no two have."""
    if model.device.type != "cpu" or not can_join(model):
        return 1
    if keeps_states(model.config):
        most = min(most, MOST_STATES)
    with model._steps.muted(), torch.inference_mode():
        try:
            return _tried_rows(model, min(most, rows_with_own_bits(model)))
        except _OF_UNKNOWN_CODE:  # a model may use a cache in unknown ways
            return 1


def _are_as_alone(cache: Any, count: int, alone: Sequence[Any]) -> bool:
    """Whether a cache of ``count`` rows equals that of as many steps, also with rows removed."""
    for left in range(count, 0, -1):
        if not (have_same_tokens(cache, alone[left]) and have_same_states(cache, alone[left])):
            return False
        if left > 1:
            take_out(cache, 1)
    return True


def _tried_rows(model: Any, limit: int) -> int:
    name, size = cache_name(model.forward), model.config.get_text_config().vocab_size
    adds_mask = attention_names(model) == {EAGER_ATTENTION}
    first, second, *prompt = (index % size for index in (9, 4, 5, 7, 3))

    def step(tokens: Sequence[int], places: Sequence[int], cache: Any) -> Any:
        ids, rows = ([[each] for each in some] for some in (tokens, places))
        inputs = {"input_ids": torch.tensor(ids), "position_ids": torch.tensor(rows), name: cache}
        return model(**inputs, use_cache=True, return_dict=True)

    own = new_cache(model, grows=True)
    begun = model(torch.tensor([prompt]), use_cache=True, return_dict=True, **{name: own})
    if {*begun} != {"logits", name} or not can_give_back(own):
        return 1
    caches, alone = [copy.deepcopy(own)], []
    for place, token in enumerate((first, second), len(prompt)):
        alone.append(step([token], [place], own).logits)
        caches.append(copy.deepcopy(own))
    sizes = sorted({min(each, limit) for each in (*_TRIED, limit)} - {0, 1})
    found = 1
    for num_rows in sizes:  # two rows of each copy; one of the last if the number is odd
        rows = [min(2, num_rows - done) for done in range(0, num_rows, 2)]
        joined = [copy.deepcopy(caches[0]) for _ in rows]
        which = [index for count in rows for index in range(count)]
        with RowsAlone(num_rows):
            together = step(
                [(first, second)[index] for index in which],
                [len(prompt) + index for index in which],
                BatchCache(joined, adds_mask=adds_mask, rows=rows),
            )
        is_same = torch.equal(together.logits, torch.cat([alone[index] for index in which]))
        if not is_same or not all(map(_are_as_alone, joined, rows, [caches] * len(rows))):
            break
        found = num_rows
    layers = [each for each in model.modules() if isinstance(each, OffloadedExperts)][-1:]
    tried = [each for each in sizes if each <= found]
    return min((most_exact_rows(each, tried, model.dtype) for each in layers), default=found)
