"""The loop of `generate` on a GPU: a step is queued before the host knows the token before it.

Where a whole step is one graph, the device would wait for the host after every token: for what it
chose to arrive there, and for the next step to be queued. Here the step of the token that was just
chosen is queued first, from the device's memory, and then the token is waited for, shown, and
looked at for an end. The last step is wasted where an end was found.

It stands for one of transformers, as that is from 5.17 on, whose private parts it uses.

Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessor

from moe_runtime.checkpoints.transformers_private import CACHE_NAMES, cache_of
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.device.structure import is_own
from moe_runtime.inference.generation import NOT_FINITE, FiniteLogits

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    from moe_runtime.inference.device.decode_graphs import DecodeGraphs


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
    """Greedy decoding and sampling as in transformers.

    Tokens, scores and what processors and criteria are called with are those of its own loop. What
    a streamer changes in the model counts from the next call of `generate` on.

    Args:
        model: a `RecordedDecoding`.
        input_ids: the prompts ``[B, T]``, where the model is.
        logits_processor: changes logits.
        stopping_criteria: says which sequences have ended.
        generation_config: of the call; outputs of layers are not asked for.
        streamer: is given the tokens of each step.
        synced_gpus: never.
        given: what the model is called with, a static cache among it.

    Returns:
        The tokens with the prompts, or a dictionary with them.
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
        recorded = graphs.looked_at(cache)
        return output

    # a user's own cache may have room for no more than what it was expected to come to
    room = min(layer.max_cache_len for layer in cache.layers)
    most_before = min(generation_config.max_length - 1, room)
    output: Any = step(input_ids, is_first_iteration=True)
    ids_BT, is_ahead = input_ids, False
    try:
        while True:
            if not model.knows_positions(cache):
                given = model._update_model_kwargs_for_generation(output, given)
            ids_BT = selection.select(ids_BT, output.logits)
            output = None
            if graphs.is_one_graph and ids_BT.shape[1] <= most_before:
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
        for layer in cache.layers if is_ahead else ():
            layer.cumulative_length -= 1  # by the token that nobody asked for
    if streamer is not None:
        streamer.end()
    return selection.result(ids_BT, cache)


def _limits_of(criteria: Iterable[Any]) -> tuple[float, frozenset[int] | None]:
    """The most tokens of a sequence, and those that end one; None where criteria go by more."""
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
    """Whether a processor or a criterion is no foreign one, and calls none."""
    return is_own(type(part)) and all(map(is_own, filter(callable, vars(part).values())))


class _LateCheck(LogitsProcessor):
    """As `FiniteLogits`, without a wait for the device: what is refused later is zero until then.

    Attributes:
        are_finite: ``[1]``, of the last call.
    """

    are_finite: torch.Tensor

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.are_finite = scores.max().isfinite().reshape(1)
        return scores.where(self.are_finite, 0.0)


class _TokenSelection:
    """Selects the next tokens: from logits on the device to what the host knows of them.

    Attributes:
        is_known: whether nobody's own code runs for it.
    """

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
        # else tokens tell the host which sequences have ended
        self._asks_criteria = self._ends is None or (len(input_ids) > 1 and bool(self._ends))
        self._unfinished_B = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
        self._length = input_ids.shape[1]
        self._pending: Any = None
        asks = config.return_dict_in_generate
        self._scores: Any = () if asks and config.output_scores else None
        self._logits: Any = () if asks and config.output_logits else None

    def select(self, ids_BT: torch.Tensor, logits_BTV: torch.Tensor) -> torch.Tensor:
        """Queues the choice of a token for each sequence, and a copy of it to the host.

        Returns:
            The sequences with their new tokens.
        """
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
        self._pending = self._graphs.device.download(told, is_kept=True)
        return ids_BT

    def wait(self) -> tuple[torch.Tensor, bool]:
        """The tokens on the host, and whether all sequences have ended.

        Raises:
            CheckpointError: logits are not finite.
        """
        found, copied = self._pending
        while not copied.query() and self._graphs.count_one():
            """The host has nothing better to do."""
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
        """What `generate` returns."""
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        if not self._config.return_dict_in_generate:
            return ids_BT
        kind: Any = GenerateDecoderOnlyOutput
        name = next(name for name in CACHE_NAMES if name in kind.__dataclass_fields__)
        return kind(sequences=ids_BT, scores=self._scores, logits=self._logits, **{name: cache})
