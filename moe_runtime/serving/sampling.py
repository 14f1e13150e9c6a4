"""Chooses the next token of a request from the model's logits.

Shape suffixes: R rows, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe_runtime.inference.generation import NOT_FINITE
from moe_runtime.serving.requests import (
    ConstraintError,
    GenerationRequest,
    NewToken,
    SamplingOptions,
    TokenLogprob,
)

_NO_IDS = cast(torch.LongTensor, torch.empty((1, 0), dtype=torch.int64))
"""Argument of warpers, which use only the scores."""


class Sampler:
    """Chooses a request's tokens; computes only what the request asks for."""

    def __init__(self, request: GenerationRequest) -> None:
        options = request.sampling
        self._request = request
        self._counts: Counter[int] = Counter()
        self._penalty = None
        if options.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        # tensors: a loop over many biases would delay all requests
        self._biased_ids = torch.tensor(list(options.logit_bias), dtype=torch.int64)
        self._biases = torch.tensor(list(options.logit_bias.values()), dtype=torch.float32)
        self._warpers = _warpers(options)
        self._generator: torch.Generator | None = None
        if options.temperature:
            self._generator = torch.Generator()
            self._generator.seed()
            if options.seed is not None:
                self._generator.manual_seed(options.seed)

    def choose(self, logits_V: torch.Tensor, answer_ids: Sequence[int]) -> NewToken:
        """The next token, from logits ``[V]`` of any floating dtype.

        Raises:
            ConstraintError: the constraint allows no token.
            ValueError: the logits are not finite.
        """
        raw_V = logits_V.float().cpu()
        if not bool(raw_V.max().isfinite()):  # the maximum of values with a NaN is NaN
            raise ValueError(NOT_FINITE)
        scores_V = self._changed(raw_V, answer_ids)
        if self._generator is None:
            token = int(scores_V.argmax())
        else:
            # scores up to 0: a temperature near 0 makes no positive infinity
            scores_1V = self._warpers(_NO_IDS, (scores_V - scores_V.max())[None])
            chances_V = torch.softmax(scores_1V[0], dim=-1)
            token = int(torch.multinomial(chances_V, 1, generator=self._generator))
        self._counts[token] += 1
        wanted = self._request.num_logprobs
        if wanted is None:
            return NewToken(token)
        (found,) = token_logprobs(raw_V[None], [token], wanted)
        return NewToken(token, found.logprob, found.top)

    def _changed(self, raw_V: torch.Tensor, answer_ids: Sequence[int]) -> torch.Tensor:
        """Logits with biases and penalties; banned tokens get minus infinity."""
        request, options = self._request, self._request.sampling
        banned = () if len(answer_ids) >= request.min_new_tokens else request.stop_ids
        constraint = request.constraint
        allowed = None if constraint is None else constraint.allowed(answer_ids)
        if constraint is not None and constraint.is_exhausted:
            banned = ()
        counts = options.presence_penalty or options.frequency_penalty
        if not (banned or constraint or options.logit_bias or self._penalty or counts):
            return raw_V
        scores_V = raw_V.clone()
        scores_V[self._biased_ids] += self._biases
        if self._penalty is not None:
            ids = torch.tensor([[*request.prompt_ids, *answer_ids]])
            scores_V = self._penalty(cast(torch.LongTensor, ids), scores_V[None])[0]
        if self._counts and counts:
            ids = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            scores_V[ids] -= options.presence_penalty + options.frequency_penalty * times
        if banned:
            scores_V[list(banned)] = -torch.inf
        if allowed is not None:
            size = min(len(allowed), len(scores_V))
            scores_V[:size].masked_fill_(~allowed[:size], -torch.inf)
            scores_V[size:] = -torch.inf
            if not bool((scores_V > -torch.inf).any()):
                raise ConstraintError("the constraint allows no token here")
        return scores_V


def token_logprobs(
    logits_RV: torch.Tensor, tokens: Sequence[int], num_top: int
) -> list[TokenLogprob]:
    """The log-probability of each row's token, and the ``num_top`` most likely tokens.

    Raises:
        ValueError: the logits are not finite.
    """
    logprobs_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    own = logprobs_RV.gather(1, torch.tensor(tokens, device=logits_RV.device)[:, None])[:, 0]
    if bool(own.isnan().any()):
        raise ValueError(NOT_FINITE)
    top = logprobs_RV.topk(min(num_top, logits_RV.shape[1]), dim=-1)
    rows = zip(own.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        TokenLogprob(logprob, tuple(zip(ids, values, strict=True))) for logprob, ids, values in rows
    ]


def _warpers(options: SamplingOptions) -> LogitsProcessorList:
    """Temperature and filters, in the order of transformers."""
    warpers = LogitsProcessorList()
    if options.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(options.temperature)))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        warpers.append(TopPLogitsWarper(float(options.top_p)))
    if options.min_p:
        warpers.append(MinPLogitsWarper(float(options.min_p)))
    return warpers
