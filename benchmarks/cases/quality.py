"""The case ``quality``: perplexity on a text, and the distance from a reference model.

Chunks and metrics follow llama.cpp's perplexity tool: each chunk starts with the BOS token, if the
model has one, and the tokens of its second half count. Systems take turns on parts of the text. One
is loaded at a time; the reference's logits are kept in a temporary file.

T tokens, N counted tokens, V vocabulary. Logarithms are natural, sums float64.
"""

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import moe_runtime
from moe_runtime.benchmarks import suite
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.checkpoints.transformers_private import CACHE_NAMES
from moe_runtime.errors import CheckpointError, MoERuntimeError
from moe_runtime.inference import generation

METRICS = {
    "perplexity": suite.Metric("count"),
    "perplexity_ratio": suite.Metric("share"),
    "kl_nats": suite.Metric("nats"),
    **suite.facts("nats", "kl_p99_nats", "kl_max_nats"),
    "same_top": suite.Metric("share", better="more"),
    "prompt_tokens_per_s": suite.Metric("tokens/s", better="more"),
    "decode_tokens_per_s": suite.Metric("tokens/s", better="more"),
    **suite.facts("share", "hit_share", better="more"),
    **suite.facts("share", "changed_share"),
    **suite.facts("bytes", "read_bytes"),
}
"""Hits, choices changed by a lossy option, and bytes count for each judged half."""
_CHANGES = ("replaced_choices", "skipped_choices", "stand_in_choices")
_TURNS = 3
_MOST_KEPT = 1 << 30
"""Bytes of the reference's logits in the temporary file."""
_MOST_LOGITS = 1 << 23
"""Logits of one pass; about a quarter of a GiB in float64, with temporaries."""

Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class QualityPlan:
    """The work of every system: chunks of token ids of one length.

    Attributes:
        is_stepwise: read the second half token by token, as in decoding.
        kept: file with the reference's logits of the current part.
    """

    chunks: Sequence[Sequence[int]]
    vocab_size: int
    is_stepwise: bool
    is_stopping: Callable[[], bool]
    kept: IO[bytes]

    @property
    def num_prompt(self) -> int:
        return len(self.chunks[0]) // 2

    def parts(self) -> list[Sequence[Sequence[int]]]:
        """The groups of chunks that systems read in turn."""
        num_chunks, num_judged = len(self.chunks), len(self.chunks[0]) - 1 - self.num_prompt
        most = max(1, _MOST_KEPT // (4 * num_judged * self.vocab_size))
        num_parts = max(min(_TURNS, num_chunks), -(-num_chunks // most))
        ends = (num_chunks * number // num_parts for number in range(num_parts + 1))
        return [self.chunks[first:end] for first, end in pairwise(ends)]


def cut_text(words: str, models: Sequence[str], context: int) -> tuple[list[list[int]], int]:
    """Split a text into chunks of ``context`` token ids; also return the vocabulary size.

    Raises:
        ValueError: the text is too short, a model has fewer positions, or vocabularies differ.
        CheckpointError: a tokenizer or a configuration cannot be used.
    """
    found = dict[tuple[int, bytes], Tensor]()
    for model in models:
        tokenizer, config = load_tokenizer(Path(model)), read_config(Path(model))
        generation.check_room(config, "--context", context)
        ids_T = generation.encode_prompt(tokenizer, words)["input_ids"][0]
        generation.check_vocabulary(config, ids_T)
        if len(ids_T) < context:
            raise ValueError(
                f"the text has {len(ids_T)} tokens for {model}, and a chunk takes {context}; give "
                "a longer text, or a smaller --context"
            )
        size = config.get_text_config().vocab_size
        chunks_CT = ids_T[: len(ids_T) // context * context].view(-1, context)
        first = generation.encode_prompt(tokenizer, "a")["input_ids"][0, 0]
        if first == tokenizer.bos_token_id:
            chunks_CT[:, 0] = first
        found[size, chunks_CT.numpy().tobytes()] = chunks_CT
    if len(found) > 1:
        raise ValueError(
            "the models have different vocabularies, or different tokens for this text, so that "
            "probabilities cannot be compared; give forms of one model"
        )
    [((vocab_size, _), chunks_CT)] = found.items()
    return chunks_CT.tolist(), vocab_size


def score_tokens(logits_NV: Tensor, ids_N: Tensor, reference_NV: Tensor | None) -> Scores:
    """Scores ``[N, 4]`` of tokens from the logits before each: negative log-probability, that of
    the reference, KL divergence from the reference, and whether the top tokens agree. Without a
    reference ``[N, 1]``.

    Raises:
        CheckpointError: logits are NaN, or give a token no probability.
    """
    log_q = logits_NV.double().log_softmax(-1)
    columns = [-log_q.gather(1, ids_N[:, None])[:, 0]]
    if reference_NV is not None:
        log_p = reference_NV.double().log_softmax(-1)
        p = log_p.exp()
        columns.append(-log_p.gather(1, ids_N[:, None])[:, 0])
        columns.append(torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1))
        columns.append((logits_NV.argmax(-1) == reference_NV.argmax(-1)).double())
    scores = torch.stack(columns, 1).numpy()
    if not np.isfinite(scores).all():
        raise CheckpointError(generation.NOT_FINITE)
    return scores


def summarize(scores: Scores) -> dict[str, dict[str, Any]]:
    """Means of `score_tokens` by metric, with 95 % intervals; tokens count as independent.

    The interval of a ratio is that of the differences, which includes the covariance.
    """
    found = {"perplexity": _mean(scores[:, 0], is_logarithm=True)}
    if scores.shape[1] > 1:
        found["perplexity_ratio"] = _mean(scores[:, 0] - scores[:, 1], is_logarithm=True)
        found["kl_nats"] = _mean(scores[:, 2])
        for part, share in (("p99", 99), ("max", 100)):
            value = float(np.percentile(scores[:, 2], share))
            found[f"kl_{part}_nats"] = {"mean": value, "low": None, "high": None}
        found["same_top"] = _mean(scores[:, 3])
    return found


def _mean(values: Scores, *, is_logarithm: bool = False) -> dict[str, Any]:
    """A mean and its interval; for logarithms, the exponential of the mean and its delta-method
    error."""
    mean, ends = float(values.mean()), suite.mean_interval(values.tolist())
    power, shift = (math.exp(mean), 1 - mean) if is_logarithm else (1.0, 0.0)
    low, high = (None, None) if ends is None else (power * (end + shift) for end in ends)
    return {"mean": power * (mean + shift), "low": low, "high": high}


class QualitySystem(suite.BenchSystem):
    """A model under test, loaded with the given options. Each repetition reads the next part.

    The reference itself has no reference: it keeps the logits of a part for the others.
    """

    def __init__(
        self,
        plan: QualityPlan,
        reference: "QualitySystem | None",
        name: str,
        model: str,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(name)
        self._plan, self._reference, self._model, self._options = plan, reference, model, options
        self._found, self._turns = list[dict[str, suite.Number]](), count()
        self.scores, self.device = list[Scores](), "cpu"

    def repeat(self) -> Mapping[str, suite.Number]:
        number = next(self._turns)
        if self._reference is not None:
            self._reference._read(number)
        self._read(number)
        return self._found[number]

    def _read(self, number: int) -> None:
        """Read a part once."""
        if number < len(self._found):
            return
        chunks, scores, rows = self._plan.parts()[number], list[Scores](), list[dict[str, float]]()
        self._plan.kept.seek(0)
        try:
            model: Any = moe_runtime.load(self._model, **self._options, max_tokens=len(chunks[0]))
            with closing(model.moe):
                rows = [self._read_chunk(model, ids, scores) for ids in chunks]
        except suite.StoppedRepetitionError:
            raise
        except (MoERuntimeError, RuntimeError, ValueError) as error:
            raise suite.PeerFailedError(str(error)) from None
        self.device = str(model.device)
        if model.device.type == "cuda":
            self.gpu = torch.cuda.get_device_name(model.device)
        self.scores.append(np.concatenate(scores))
        found: dict[str, suite.Number] = {name: [row[name] for row in rows] for name in rows[0]}
        found |= {name: one["mean"] for name, one in summarize(self.scores[-1]).items()}
        self._found.append(found)

    @torch.inference_mode()
    def _read_chunk(self, model: Any, ids: Sequence[int], scores: list[Scores]) -> dict[str, float]:
        """Read a chunk with a new cache; return speeds and counters and add its scores."""
        plan, spent_s, before = self._plan, list[float](), model.moe.stats()
        num_rows = 1 if plan.is_stepwise else max(1, _MOST_LOGITS // plan.vocab_size)
        on_gpu = getattr(model, "new_cache", None)  # a static cache, whose steps are recorded
        given = on_gpu(1, len(ids), {}) if on_gpu else {}
        if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
            given["logits_to_keep"] = 1
        ids_T = torch.tensor(ids)
        targets = ids_T[plan.num_prompt + 1 :].split(num_rows)
        for part_T in [ids_T[: plan.num_prompt], *ids_T[plan.num_prompt : -1].split(num_rows)]:
            if plan.is_stopping():
                raise suite.StoppedRepetitionError(f"{self.name}: stopped")
            begin = time.perf_counter()
            output = model(part_T[None].to(model.device), use_cache=True, **given)
            logits_NV = output.logits[0].float().cpu()
            spent_s.append(time.perf_counter() - begin)
            given = {name: output[name] for name in output.keys() & set(CACHE_NAMES)}
            if len(spent_s) == 1:
                before = model.moe.stats()
                continue
            # The reference does the same work, since computing between two passes slows the next
            # one.
            reference_NV, num_columns = logits_NV, 1
            if self._reference is None:
                plan.kept.write(logits_NV.numpy().data)
            else:
                raw = bytearray(plan.kept.read(4 * logits_NV.numel()))
                reference_NV = torch.frombuffer(raw, dtype=torch.float32).view_as(logits_NV)
                num_columns = 4
            compared = score_tokens(logits_NV, targets[len(spent_s) - 2], reference_NV)
            scores.append(compared[:, :num_columns])
        after, of_model = model.moe.stats(), model.moe.facts.signature

        def grown(*names: str) -> float:
            return float(sum(getattr(after, name) - getattr(before, name) for name in names))

        num_choices = of_model.num_layers * of_model.top_k * sum(map(len, targets))
        found = {
            "hit_share": grown("hits") / max(1.0, grown("hits", "late_hits", "misses")),
            "changed_share": grown(*_CHANGES) / num_choices,
            "read_bytes": grown("bytes_read"),
        }
        found["prompt_tokens_per_s"] = plan.num_prompt / spent_s[0]
        if plan.is_stepwise:
            found["decode_tokens_per_s"] = (len(spent_s) - 1) / sum(spent_s[1:])
        return found


def measure_quality(
    plan: QualityPlan,
    asked: Sequence[tuple[str, str, Mapping[str, Any]]],
    rules: suite.Rules,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Judge systems, each a name, a model and its options. The first is the reference.

    Returns:
        The content of a results file. Means and their 95 % intervals are over all tokens that
        every system has read.

    Raises:
        PeerFailedError: the reference or all other systems failed.
    """
    num_parts = len(plan.parts())
    # all parts are read, however certain the numbers are
    rules = replace(rules, least=num_parts + 1, most=num_parts, max_s=math.inf)
    first = QualitySystem(plan, None, *asked[0])
    systems = [first, *(QualitySystem(plan, first, *one) for one in asked[1:])]
    found, ended = suite.run_in_turn(systems, rules)
    failures = [found[one.name].failure for one in systems[1:] or systems]
    if all(failures):
        raise suite.PeerFailedError(failures[0])
    # after an interruption, the parts that all systems have read
    least = min(filter(None, (len(one.repetitions) for one in found.values())), default=0)
    rows = []
    for one in systems:
        measured, scores = found[one.name], one.scores[:least]
        measured.repetitions = measured.repetitions[:least]
        if measured.repetitions and one is not first:
            same = np.concatenate(scores)[:, 3]
            one.compared, one.equal = len(same), int(same.sum())
        rows.append(suite.describe_compared(one, measured, METRICS))
        if measured.repetitions:
            for metric, values in summarize(np.concatenate(scores)).items():
                rows[-1]["summary"][metric] |= values
    return suite.make_results(
        "quality", {**settings, "device": first.device}, ended, rows, gpu=first.gpu
    )
