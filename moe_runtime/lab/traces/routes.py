"""Recorded traces as sequences to learn from: joined, split, without repeats, side by side."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moe_runtime.lab.traces.format import PHASES, TRACE_VERSION, Trace, absent_id, expert_dtype
from moe_runtime.policies.prediction.base import Routes, shape_of
from moe_runtime.types import ModelSignature

GRAM_TOKENS = 8
"""Tokens in a row that two texts do not share by accident."""
UNKNOWN_MODEL = "unknown"
"""Model type of files from elsewhere that do not say it."""
REPEATED_SHARE = 0.5
"""A sequence is a repetition when this share of its grams stands in one earlier sequence."""


def same_model(one: ModelSignature, other: ModelSignature) -> bool:
    """Whether files belong together; of one that does not name its model only sizes are known."""
    if UNKNOWN_MODEL in (one.model_type, other.model_type):
        return shape_of(one) == shape_of(other)
    return one == other


def shown_model(signature: ModelSignature) -> str:
    """The model of a file, for messages."""
    one = signature
    return (
        f"{one.model_type} with {one.num_layers} layers of {one.num_experts} experts, {one.top_k} "
        f"for each token, and {one.vocab_size} token ids"
    )


def routes_of(trace: Trace) -> Routes:
    """Orders the tokens of a trace by request and position."""
    order = np.lexsort((trace.token_position, trace.token_request))
    requests = trace.token_request[order]
    starts = np.flatnonzero(np.diff(requests, prepend=-1))
    ids = trace.expert_ids[order].astype(np.int64)
    ids[trace.expert_ids[order] == trace.absent] = trace.signature.num_experts
    return Routes(
        shape=shape_of(trace.signature),
        expert_ids=ids,
        gate_weights=trace.gate_weights[order].astype(np.float32),
        token_ids=trace.token_id[order].astype(np.int64),
        offsets=np.append(starts, trace.num_tokens).astype(np.int64),
    )


def unrepeated(routes: Routes) -> list[int]:
    """The numbers of the sequences that do not mostly repeat an earlier one."""
    seen: dict[bytes, set[int]] = {}
    kept: list[int] = []
    for sequence in range(routes.num_sequences):
        grams = _grams(routes, sequence)
        shared = Counter(other for gram in grams for other in seen.get(gram, ()))
        if shared and max(shared.values()) > REPEATED_SHARE * len(grams):
            continue
        kept.append(sequence)
        for gram in grams:
            seen.setdefault(gram, set()).add(sequence)
    return kept


def split_unrepeated(
    routes: Routes, *, test_share: float, seed: int = 0
) -> tuple[list[int], list[int]]:
    """As `split_numbers`, of the sequences that do not repeat an earlier one."""
    kept = unrepeated(routes)
    train, test = split_numbers(len(kept), test_share=test_share, seed=seed)
    return [kept[number] for number in train], [kept[number] for number in test]


def trace_of_routes(routes: Routes, signature: ModelSignature) -> Trace:
    """Sequences as a trace that decoded one after another, a token in each step."""
    lengths = np.diff(routes.offsets)
    request = np.repeat(np.arange(routes.num_sequences, dtype=np.int32), lengths)
    dtype = expert_dtype(signature.num_experts)
    is_absent = routes.expert_ids >= signature.num_experts
    return Trace(
        version=TRACE_VERSION,
        signature=signature,
        step_phase=np.full(routes.num_tokens, PHASES.index("decode"), np.uint8),
        step_start=np.arange(routes.num_tokens + 1, dtype=np.int64),
        token_request=request,
        token_id=routes.token_ids.astype(np.int32),
        token_position=(np.arange(routes.num_tokens) - routes.offsets[request]).astype(np.int32),
        expert_ids=np.where(is_absent, absent_id(dtype), routes.expert_ids).astype(dtype),
        gate_weights=routes.gate_weights.astype(np.float16),
    )


def side_by_side(trace: Trace, *, count: int) -> Trace:
    """The requests of a trace, one token of each of ``count`` in a step."""
    order = np.lexsort((trace.token_position, trace.token_request))
    bounds = np.flatnonzero(np.diff(trace.token_request[order]))
    waiting = deque(map(deque, np.split(order, bounds + 1)))
    if len(waiting) < count:
        raise ValueError(
            f"expected a trace of at least {count} requests to serve so many side by side, got a "
            f"trace of {len(waiting)} requests; record more prompts, as `run --prompts FILE "
            "--trace` does"
        )
    running = [waiting.popleft() for _ in range(count)]
    rows: list[int] = []
    while len(running) == count:
        rows += [one.popleft() for one in running]
        running = [one for one in running if one]
        while waiting and len(running) < count:
            running.append(waiting.popleft())
    steps = len(rows) // count
    columns = ("token_request", "token_id", "token_position", "expert_ids", "gate_weights")
    return replace(
        trace,
        step_phase=np.full(steps, PHASES.index("decode"), np.uint8),
        step_start=np.arange(0, len(rows) + 1, count, dtype=np.int64),
        step_update=None,
        **{name: getattr(trace, name)[rows] for name in columns},
    )


def split_numbers(
    num_sequences: int, *, test_share: float, seed: int = 0
) -> tuple[list[int], list[int]]:
    """Numbers of sequences for training, and of those for testing, drawn at random."""
    order = np.random.default_rng(seed).permutation(num_sequences)
    num_test = round(test_share * num_sequences)
    if not 0 < num_test < num_sequences:
        raise ValueError(
            f"a test share of {test_share} of {num_sequences} sequences leaves nothing to train or "
            "to test on; record more prompts, as `run --prompts FILE --trace` does, or choose "
            "another share"
        )
    return sorted(order[num_test:].tolist()), sorted(order[:num_test].tolist())


def join_routes(parts: Sequence[Routes]) -> Routes:
    """The sequences of several recordings of one model."""
    if not parts or any(part.shape != parts[0].shape for part in parts):
        raise ValueError(f"expected traces of one model, got shapes {[p.shape for p in parts]}")
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Routes(
        shape=parts[0].shape,
        expert_ids=np.concatenate([part.expert_ids for part in parts]),
        gate_weights=np.concatenate([part.gate_weights for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _grams(routes: Routes, sequence: int) -> set[bytes]:
    rows = routes.tokens_of(sequence)
    symbols = routes.token_ids[rows]
    if (symbols < 0).any():
        symbols = np.ascontiguousarray(routes.expert_ids[rows, 0])
    symbols = symbols.reshape(len(symbols), -1)
    last = max(1, len(symbols) - GRAM_TOKENS + 1)
    return {symbols[start : start + GRAM_TOKENS].tobytes() for start in range(last)}
