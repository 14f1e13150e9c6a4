"""Forward passes of one sequence or several.

Shape suffixes: B sequences, Q new tokens, R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from moe_runtime.checkpoints.transformers_private import attention_name, attention_names, cache_name
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.adapters import Adapters
from moe_runtime.inference.budget import kv_bytes_per_token
from moe_runtime.inference.cache_copies import BlockCopies, StateCopies
from moe_runtime.inference.cpu.attention import EAGER_ATTENTION, use_single_query_attention
from moe_runtime.inference.drafted_steps import DRAFTED_ELSEWHERE
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.known_classes import (
    can_share_a_pass,
    has_known_layers,
    keeps_every_token,
    keeps_states,
)
from moe_runtime.inference.pictures import (
    for_model,
    kinds_of,
    other_kinds_of,
    tensors_of,
)
from moe_runtime.inference.rows_alone import (
    RowsAlone,
    can_join,
    most_exact_rows,
    rows_with_own_bits,
)
from moe_runtime.inference.sequence_cache import (
    BatchCache,
    RowMemory,
    have_close_states,
    have_same_tokens,
    new_cache,
    own_states,
    tokens_of_states,
)
from moe_runtime.inference.steps import RequestNumbers, Step
from moe_runtime.serving.kv_account import PIECE
from moe_runtime.serving.sampling import token_logprobs
from moe_runtime.serving.scheduling import Failure, Sequence

if TYPE_CHECKING:
    from moe_runtime.inference.device.decode_graphs import DecodeGraphs


LOGPROB_ROWS = 32
"""Rows whose log-probabilities are computed at once."""
TOLERANCE = 0.05
"""Largest difference between the result of a trial and the expected one."""
TRIED_TOGETHER = (2, 3, 8)
"""Numbers of sequences whose bits in one step are compared with those of each alone."""


class ModelPasses:
    """Calls a model for sequences.

    A single sequence goes through the model as ``generate`` would send it. Several go together if
    the model allows it: products and experts see the tokens of all, attention the tokens of each.

    Attributes:
        most_exact: most sequences that get the same bits in a shared step as alone.
        reads_in_pieces: whether a prompt may go through the model piece by piece.
        keeps_prefixes: whether a sequence can continue from copies of another's cache.
        states: copies the parts of a cache that are not tokens of blocks; None if there are none.
        token_bytes: of a token in a block, if there are states.
        state_tokens: tokens whose room the running states of a sequence need.
        reserved_bytes: memory reserved for the keys and values of a token.
    """

    def __init__(self, model: Any, adapters: Adapters, *, exact: int = 1) -> None:
        """Tries with a few tokens what the model allows, and whether up to ``exact`` sequences get
        equal bits together.

        Raises:
            UnsupportedModelError: the model does not generate text from tokens alone.
        """
        config = model.config
        for part in model.modules():
            if hasattr(part, "rope_deltas"):
                part.rope_deltas = None  # of an earlier caller's pictures
        if getattr(config, "is_encoder_decoder", False) or not model.can_generate():
            raise UnsupportedModelError(
                f"a server needs a causal language model, and {type(model).__name__} is none; use "
                "model.generate for it"
            )
        self._model = model
        self._adapters = adapters
        self._device = model.device
        self._request_numbers: dict[int, int] = {}  # by a sequence's, as listeners know them
        self._ended_requests: list[int] = []
        known = inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model.forward)
        self._keeps_rows = "logits_to_keep" in known
        self.vocab_size = int(config.get_text_config().vocab_size)
        self._next = [9 % self.vocab_size]  # of trials
        self._borrowed = attention_name(model) if _keeps_attention(model) else None
        if self._borrowed == "sdpa":
            use_single_query_attention(model)  # supports keys of several caches
        self._adds_mask = attention_names(model) == {EAGER_ATTENTION}
        self.can_join = can_join(model)
        self.most_exact = 1
        self._exact = exact
        self.reads_in_pieces = True
        self.state_tokens = 0
        is_plain = keeps_every_token(config) and can_share_a_pass(config)
        self.keeps_prefixes = is_plain
        self.states: StateCopies | None = None
        self.token_bytes = 0
        self._has_states = keeps_states(config)
        is_rounded = getattr(model, "_kv_rounding", None) is not None
        self.reserved_bytes = kv_bytes_per_token(
            config, model.dtype, "int8" if is_rounded else "exact"
        )
        self._graphs = _graphs_of(model)
        self.can_have_rows = (
            self._graphs is not None
            and self._keeps_rows
            and "position_ids" in known
            and can_share_a_pass(config)
        )
        with self._trial():
            if self.can_have_rows:
                self._try_rows()
            if self.can_join:
                self._try_joining()
            if not is_plain:
                self._try_pieces()

    def close(self) -> None:
        """Restores the model's attention."""
        if self._borrowed is not None and attention_name(self._model) != self._borrowed:
            self._model.set_attn_implementation(self._borrowed)

    def end_request(self, sequence: int) -> None:
        """Tells listeners with the next step that a sequence has ended."""
        if sequence in self._request_numbers:
            self._ended_requests.append(self._request_numbers.pop(sequence))

    @property
    def abilities(self) -> tuple[Any, ...]:
        """All results of the trials on which steps depend."""
        states = None if self.states is None else (self.states.can_cut, self.states.num_bytes)
        found = self.can_join, self.most_exact, self.reads_in_pieces, self.keeps_prefixes, states
        return *found, self.token_bytes, self.state_tokens, self.reserved_bytes, self.can_have_rows

    @property
    def reads_together(self) -> bool:
        """Whether prompts can share a pass, also with sequences that decode."""
        return self.can_join and not self._has_states

    def new_cache(self) -> DynamicCache:
        cache = new_cache(self._model, grows=self._device.type == "cpu")
        setattr(cache, DRAFTED_ELSEWHERE, True)
        return cache

    def cache_of_one_token(self) -> DynamicCache:
        cache = self.new_cache()
        with self._trial():
            self._call([[0]], cache, keep=1)
        return cache

    def most_together(self, *, exact: bool) -> int:
        if not self.can_join:
            return 1
        return self.most_exact if exact else sys.maxsize

    def decode(self, sequences: Items[Sequence]) -> torch.Tensor:
        """Computes the next token of each; returns logits ``[B, V]`` of the following one."""
        chosen = [(sequence, 1) for sequence in sequences]
        last = [sequence.tokens[sequence.num_computed] for sequence in sequences]
        caches = [_cache_of(sequence) for sequence in sequences]
        if len(caches) == 1:
            own_states(cache := caches[0])
        else:
            cache = self._joined(caches)
        self._name_requests(cache, chosen)
        with self._adapted(chosen):
            return self._step(last, cache, _positions(chosen))

    def verify(self, sequences: Items[Sequence], drafted: Items[list[int]]) -> torch.Tensor:
        """Computes the next token of each and its drafted ones; returns logits ``[R, V]`` after
        each of these, sequence by sequence."""
        rows = [1 + len(draft) for draft in drafted]
        tokens, places = [], []
        for sequence, draft in zip(sequences, drafted, strict=True):
            first = sequence.num_computed
            tokens += [sequence.tokens[first], *draft]
            places += range(first, first + 1 + len(draft))
        caches = [_cache_of(sequence) for sequence in sequences]
        cache = BatchCache(caches, adds_mask=self._adds_mask, rows=rows)
        self._name_requests(cache, list(zip(sequences, rows, strict=True)))
        with RowsAlone(len(tokens)):
            ids, positions = [[token] for token in tokens], torch.tensor(places)[:, None]
            return self._call(ids, cache, keep=1, position_ids=positions)[:, -1]

    def new_rows(self, like: DynamicCache, num_rows: int, num_tokens: int) -> RowMemory:
        assert self._graphs is not None
        return RowMemory(self._model.config, self._graphs.store.device, like, num_rows, num_tokens)

    def step_of_rows(
        self, cache: Any, inputs: dict[str, Any], sequences: Items[Sequence] = ()
    ) -> torch.Tensor:
        """Logits ``[B, V]`` of a step of `RowMemory`; without sequences it is a trial."""
        if sequences:
            self._name_requests(cache, [(sequence, 1) for sequence in sequences])
        options = {**inputs, self._cache_name: cache, "logits_to_keep": 1}
        return self._model(**options, use_cache=True, return_dict=True).logits[:, -1]

    def read(self, chosen: Items[tuple[Sequence, int]]) -> torch.Tensor:
        """Computes the next tokens of prompts; returns logits ``[B, V]`` after the last of each.

        A single sequence that wants log-probabilities of its prompt gets ``[R, V]``, of all tokens.
        States are copied to `Sequence.cuts`.
        """
        sizes = [num_new for _, num_new in chosen]
        ids = []
        for sequence, num_new in chosen:
            first = sequence.num_computed
            ids.extend(sequence.tokens[first : first + num_new])
        positions = _positions(chosen)
        inputs = {} if positions is None else {"position_ids": positions[..., None, :]}
        if len(chosen) == 1:
            inputs |= self._seen(*chosen[0])
        caches = [_cache_of(sequence) for sequence, _ in chosen]
        cache = caches[0] if len(caches) == 1 else self._joined(caches, sizes)
        self._name_requests(cache, chosen)
        with self._adapted(chosen), self._cutting(chosen):
            if len(chosen) > 1:
                ends = torch.tensor(sizes, device=self._device).cumsum(0) - 1
                return self._call([ids], cache, keep=ends, **inputs)[0]
            if not chosen[0][0].wants_prompt_logprobs:
                return self._call([ids], cache, keep=1, **inputs)[:, -1]
            return self._call([ids], cache, keep=sizes[0], **inputs)[0]

    def _seen(self, sequence: Sequence, num_new: int) -> dict[str, torch.Tensor]:
        """Inputs of the pictures in the next tokens of a prompt."""
        end = sequence.num_computed + num_new
        placed = [one for one in sequence.pictures_left if one.end <= end]
        inputs = tensors_of([one.picture for one in placed])
        pictures = [one.picture for one in sequence.request.pictures]
        inputs |= other_kinds_of(sequence.tokens[sequence.num_computed : end], pictures)
        if placed and sequence.positions is None:
            # masks depend on the kinds of all tokens so far
            before = [one for one in sequence.request.pictures if one.end <= end]
            inputs["mm_token_type_ids"] = kinds_of(end, before)
        return for_model(self._model, inputs)

    @contextlib.contextmanager
    def _cutting(self, chosen: Items[tuple[Sequence, int]]) -> Iterator[None]:
        cut = [(sequence, num_new) for sequence, num_new in chosen if sequence.cuts]
        if self.states is None or not cut:
            yield
            return
        first = cut[0][0]  # the only one if running states are copied
        within = first.cuts if self.states.can_cut else {}
        with self.states.within(_cache_of(first), first.num_computed, within):
            yield
        take = self.states.take_windows if self.states.can_cut else self.states.take
        for sequence, num_new in cut:
            for end, state in sequence.cuts.items():
                behind = sequence.num_computed + num_new - end
                assert take(state, _cache_of(sequence), end, behind)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """The model's listeners do not see the passes of this block."""
        steps = getattr(self._model, "_steps", None)  # of a model from ``load``
        muted = contextlib.nullcontext() if steps is None else steps.muted()
        with muted, torch.inference_mode():
            yield

    def _step(
        self, ids: Items[int], cache: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = [[token] for token in ids]
        inputs = {} if positions is None else {"position_ids": positions[..., None]}
        is_shared = len(rows) > 1 and self._exact > 1
        with RowsAlone(len(rows)) if is_shared else contextlib.nullcontext():
            return self._call(rows, cache, keep=1, **inputs)[:, -1]

    def _adapted(
        self, chosen: Items[tuple[Sequence, int]]
    ) -> contextlib.AbstractContextManager[None]:
        return self._adapters.applied([(one.request.adapter, num_new) for one, num_new in chosen])

    def _name_requests(self, cache: Any, chosen: Items[tuple[Sequence, int]]) -> None:
        """Gives a step the numbers of its requests, for the model's listeners."""

        def number_requests(numbers: RequestNumbers, step: Step) -> None:
            known = self._request_numbers
            begun = [one.number for one, _ in chosen if one.number not in known]
            step.begun = range(numbers.next, numbers.next + len(begun))
            numbers.next = step.begun.stop
            known.update(zip(begun, step.begun, strict=True))
            step.ended, self._ended_requests = self._ended_requests, []
            own, num_new = zip(*((known[one.number], count) for one, count in chosen), strict=True)
            step.requests = np.repeat(own, num_new)
            step.first_request = own[0]

        cache.number_requests = number_requests

    def _joined(self, caches: Items[DynamicCache], num_new: Items[int] | None = None) -> BatchCache:
        return BatchCache(caches, num_new, adds_mask=self._adds_mask)

    def _call(
        self,
        ids: list[list[int]],
        cache: Any,
        *,
        keep: int | torch.Tensor,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Logits ``[B, Q, V]`` of the last ``keep`` rows, or of the rows that it names."""
        options: dict[str, Any] = {self._cache_name: cache}
        options |= {name: value.to(self._device) for name, value in inputs.items()}
        if self._keeps_rows:
            options["logits_to_keep"] = keep
        tokens = torch.tensor(ids, device=self._device)
        out = self._model(input_ids=tokens, use_cache=True, return_dict=True, **options).logits
        if self._keeps_rows:
            return out
        return out[:, -keep:] if isinstance(keep, int) else out[:, keep]

    def _tried(self) -> tuple[list[DynamicCache], list[int]]:
        ids = [[index % self.vocab_size for index in row] for row in ((5, 7, 3), (11, 2))]
        caches = [self.new_cache() for _ in ids]
        for row, cache in zip(ids, caches, strict=True):
            self._call([row], cache, keep=1)
        return caches, [len(row) for row in ids]

    def _try_rows(self) -> None:
        """Uses rows only if two sequences in them get the same results as alone."""
        caches, places = self._tried()
        with Failure() as failure:  # as of joined ones
            rows = self.new_rows(caches[0], len(caches), 2 * PIECE)
            for index, (cache, place) in enumerate(zip(caches, places, strict=True)):
                rows.write(index, cache, place)
            together = self.step_of_rows(*rows.step(0, self._next * 2, places))
            alone = [self._step(self._next, cache) for cache in caches]
            self.can_have_rows = _are_close(together, torch.cat(alone))
        self.can_have_rows &= not failure.has_failed

    def _try_joining(self) -> None:
        """Joins sequences only if two of them get the same results as alone."""
        caches, places = self._tried()
        own = copy.deepcopy(caches)
        alone = torch.cat([self._step(self._next, cache) for cache in own])
        with Failure() as failure:  # an unknown model's code may fail in any way
            joined = copy.deepcopy(caches)
            together = self._step(self._next * 2, self._joined(joined), torch.tensor(places))
            self.can_join = _are_close(together, alone) and all(
                have_close_states(one, other, TOLERANCE)
                for one, other in zip(joined, own, strict=True)
            )
            if self.can_join and not self._has_states:
                self.most_exact = self._try_exactness(caches, places, own, alone)
        self.can_join &= not failure.has_failed

    def _try_exactness(
        self,
        caches: Items[DynamicCache],
        places: Items[int],
        own: Items[DynamicCache],
        alone: torch.Tensor,
    ) -> int:
        """The most sequences that get the same bits in a shared step as alone."""
        limit = min(self._exact, rows_with_own_bits(self._model))
        sizes = sorted({min(size, limit) for size in (*TRIED_TOGETHER, limit)} - {0, 1})
        found = 1
        for size in sizes:
            rows = [row % len(caches) for row in range(size)]
            joined = [copy.deepcopy(caches[row]) for row in rows]
            positions = torch.tensor([places[row] for row in rows])
            logits = self._step(self._next * size, self._joined(joined), positions)
            if not torch.equal(logits, alone[rows]):
                break
            if not all(map(have_same_tokens, joined, [own[row] for row in rows])):
                break
            found = size
        layers = [m for m in self._model.modules() if isinstance(m, OffloadedExperts)][-1:]
        sizes = [size for size in sizes if size <= found]
        return min((most_exact_rows(m, sizes, self._model.dtype) for m in layers), default=found)

    def _try_pieces(self) -> None:
        """Cuts prompts and keeps prefixes only if a prompt in two parts has the same result."""
        ids = [index % self.vocab_size for index in (5, 7, 3, 11, 2, 9)]
        cache = self.new_cache()
        whole = self._call([ids], cache, keep=1)[:, -1]
        if self._has_states:
            self.state_tokens = tokens_of_states(cache, self.reserved_bytes)
        if self._has_states or not can_share_a_pass(self._model.config):
            with Failure() as failure:  # some states take one token more, or many from the start
                halves = self.new_cache()
                self._call([ids[:3]], halves, keep=1)
                self.reads_in_pieces = _are_close(
                    self._call([ids[3:]], halves, keep=1)[:, -1], whole
                )
            self.reads_in_pieces &= not failure.has_failed
        if not self.reads_in_pieces or not has_known_layers(self._model.config):
            return
        states, blocks = StateCopies(self._model, cache), BlockCopies(3)
        self.token_bytes = BlockCopies(1).learn(cache)
        for cuts in (True, False) if states.can_cut else (False,):
            with Failure() as failure:
                state, begun, rest = states.new(), self.new_cache(), self.new_cache()
                with states.within(begun, 0, {3: state} if cuts else {}):
                    self._call([ids if cuts else ids[:3]], begun, keep=1)
                take = states.take_windows if cuts else states.take
                assert take(state, begun, 3, 3 if cuts else 0)
                blocks.append(rest, blocks.copy(begun, 0))
                states.put(state, rest, 3)
                self.keeps_prefixes = _are_close(self._call([ids[3:]], rest, keep=1)[:, -1], whole)
            if not failure.has_failed and self.keeps_prefixes:
                states.can_cut, self.states = cuts, states
                return
        self.keeps_prefixes = False


def _are_close(logits: torch.Tensor, given: torch.Tensor) -> bool:
    return torch.allclose(logits.float(), given.float(), rtol=TOLERANCE, atol=TOLERANCE)


def _graphs_of(model: Any) -> DecodeGraphs | None:
    if inspect.ismethod(model.forward):
        return None
    from moe_runtime.inference.device.decode_graphs import DecodeGraphs
    from moe_runtime.inference.device.static_caches import state_layers, static_cache

    cache = static_cache(model.config, 1) if isinstance(model.forward, DecodeGraphs) else None
    return None if cache is None or state_layers(cache) else model.forward


def _keeps_attention(model: Any) -> bool:
    return model.device.type != "cpu"


def add_logprobs(sequence: Sequence, num_new: int, logits_RV: torch.Tensor) -> None:
    first, prompt = sequence.num_computed, sequence.request.prompt_ids
    targets = prompt[first + 1 : first + 1 + num_new]
    wanted = sequence.request.num_prompt_logprobs or 0
    for row in range(0, len(targets), LOGPROB_ROWS):
        some = targets[row : row + LOGPROB_ROWS]
        sequence.add_logprobs(token_logprobs(logits_RV[row : row + len(some)], some, wanted))


def _positions(parts: Items[tuple[Sequence, int]]) -> torch.Tensor | None:
    """Positions of the next tokens, ``[R]`` int64, or ``[4, R]`` if pictures count otherwise. None
    for a single sequence without such pictures: its cache has them."""
    if not any(sequence.positions for sequence, _ in parts):
        if len(parts) == 1:
            return None
        firsts = [(sequence.num_computed, num_new) for sequence, num_new in parts]
        return torch.cat([torch.arange(first, first + num_new) for first, num_new in firsts])
    rows = []
    for sequence, num_new in parts:
        first = sequence.num_computed
        plain = torch.arange(first, first + num_new).expand(4, -1)
        rows.append(sequence.positions.rows(first, num_new) if sequence.positions else plain)
    return torch.cat(rows, dim=1)


def _cache_of(sequence: Sequence) -> DynamicCache:
    assert sequence.cache is not None
    return sequence.cache
